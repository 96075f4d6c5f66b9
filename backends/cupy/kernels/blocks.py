"""Kernels of casts; a cast to a quantised dtype rounds numbers to the values of its blocks, as float32."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from ....graph.dtypes import DType
from ...fusion.operands import BoundInstruction, Operand, require_supported
from ..binding.launch_builder import LaunchBuilder, OpBinder, count_blocks
from ..device.driver import KernelSource
from .elementwise import launch_cast

RULES: Mapping[DType, str] = MappingProxyType(
    {
        DType.Q8_0: "Symmetric",
        DType.Q4_0: "Peak<8>",
        DType.Q4_1: "Range<15>",
        DType.Q5_0: "Peak<16>",
        DType.Q5_1: "Range<31>",
        DType.IQ4_NL: "Book",
        DType.MXFP4: "Exponent",
        DType.NVFP4: "FloatScale",
        DType.Q1_0: "Sign",
        DType.Q2_0: "Ternary<64>",
        DType.TQ1_0: "Ternary<256>",
        DType.TQ2_0: "Ternary<256>",
    }
)
"""The C++ struct that rounds a block of each dtype."""
SOURCE = KernelSource("blocks.cu", tuple(f"round_blocks<{rule}>" for rule in dict.fromkeys(RULES.values())))
SOURCES = (SOURCE,)
THREADS, LANES = 128, 32
"""Threads of a thread block; a warp rounds one quantisation block."""


def _launch_rounding(launches: LaunchBuilder, x: Operand, out: Operand, dtype: DType) -> None:
    """Launch the rounding of `x` to blocks of `dtype`; the result is float32."""
    require_supported(dtype in RULES, f"casts to {dtype} are missing")
    require_supported(out.is_dense, f"casts to {dtype} with a strided result are missing")
    if not (x.dtype is DType.F32 and x.is_dense):
        launch_cast(launches, x, out)
        x = out
    count = math.prod(out.shape) // dtype.block
    if count:
        blocks = count_blocks(count, THREADS // LANES)
        launches.add_launch(SOURCE[f"round_blocks<{RULES[dtype]}>"], blocks, THREADS, [count, x, out])


def _bind_cast(launches: LaunchBuilder, call: BoundInstruction) -> None:
    dtype = call.attrs["dtype"]
    assert isinstance(dtype, DType)
    if dtype.is_quantised:
        _launch_rounding(launches, call.operand(0), call.out, dtype)
    else:
        launch_cast(launches, call.operand(0), call.out, dtype)


BINDINGS: Mapping[str, OpBinder] = MappingProxyType({"cast": _bind_cast})
