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
SUPER_BLOCK_RULES: Mapping[DType, str] = MappingProxyType(
    {
        DType.Q2_K: "WithMinimum<16, 3, -5, 16, 15, true>",
        DType.Q3_K: "Signed<4, 32, OneByOne>",
        DType.Q4_K: "WithMinimum<32, 15, -10, 21, 63, false>",
        DType.Q5_K: "WithMinimum<32, 31, -5, 16, 63, false>",
        DType.Q6_K: "Signed<32, 128, Nineteen>",
        DType.IQ4_XS: "BookWithScales",
    }
)
"""The C++ struct that rounds a super-block of each dtype."""
SOURCE = KernelSource("blocks.cu", tuple(f"round_blocks<{rule}>" for rule in dict.fromkeys(RULES.values())))
SUPER_BLOCK_SOURCE = KernelSource(
    "super_blocks.cu", tuple(f"round_super_blocks<{rule}>" for rule in SUPER_BLOCK_RULES.values())
)
SOURCES = (SOURCE, SUPER_BLOCK_SOURCE)
KERNELS = {dtype: SOURCE[f"round_blocks<{rule}>"] for dtype, rule in RULES.items()} | {
    dtype: SUPER_BLOCK_SOURCE[f"round_super_blocks<{rule}>"] for dtype, rule in SUPER_BLOCK_RULES.items()
}
"""The kernel that rounds blocks of each dtype."""
THREADS, LANES = 128, 32
"""Threads of a thread block; a warp rounds one quantisation block."""


def _launch_rounding(launches: LaunchBuilder, x: Operand, out: Operand, dtype: DType) -> None:
    """Launch the rounding of `x` to blocks of `dtype`; the result is float32."""
    require_supported(dtype in KERNELS, f"casts to {dtype} are missing")
    require_supported(out.is_dense, f"casts to {dtype} with a strided result are missing")
    if not (x.dtype is DType.F32 and x.is_dense):
        launch_cast(launches, x, out)
        x = out
    count = math.prod(out.shape) // dtype.block
    if count:
        blocks = count_blocks(count, THREADS // LANES)
        launches.add_launch(KERNELS[dtype], blocks, THREADS, [count, x, out])


def _bind_cast(launches: LaunchBuilder, call: BoundInstruction) -> None:
    dtype = call.attrs["dtype"]
    assert isinstance(dtype, DType)
    if dtype.is_quantised:
        _launch_rounding(launches, call.operand(0), call.out, dtype)
    else:
        launch_cast(launches, call.operand(0), call.out, dtype)


BINDINGS: Mapping[str, OpBinder] = MappingProxyType({"cast": _bind_cast})
