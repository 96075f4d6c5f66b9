"""Kernels that round numbers to quantised dtypes: to the values of their blocks as float32, or to the blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from ....graph.dtypes import CACHE_DTYPES, DType
from ...fusion.operands import Operand, require_supported
from ..binding.iteration_axes import MAX_ITERATION_AXES, as_row_starts, build_merged_tiling_iteration_axes
from ..binding.launch_builder import LaunchBuilder, LaunchWord, count_blocks
from ..device.driver import KernelInstance, KernelSource

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
BLOCK_TYPE_NAMES: Mapping[DType, str] = MappingProxyType({d: f"{d.name}Block" for d in CACHE_DTYPES if d.is_quantised})
"""The C++ type of a block, by dtype of a state that keeps its blocks."""
SOURCE = KernelSource(
    "blocks.cu", tuple(f"round_blocks<{rule}>" for rule in dict.fromkeys(RULES.values())), ("cells.cuh",)
)
STORE_SOURCE = KernelSource(
    "blocks.cu",
    tuple(f"store_blocks<{RULES[dtype]}, {ids}>" for dtype in BLOCK_TYPE_NAMES for ids in ("i32", "i64")),
    ("cells.cuh",),
)
SUPER_BLOCK_SOURCE = KernelSource(
    "super_blocks.cu", tuple(f"round_super_blocks<{rule}>" for rule in SUPER_BLOCK_RULES.values())
)
SOURCES = (SOURCE, STORE_SOURCE, SUPER_BLOCK_SOURCE)
KERNELS = {dtype: SOURCE[f"round_blocks<{rule}>"] for dtype, rule in RULES.items()} | {
    dtype: SUPER_BLOCK_SOURCE[f"round_super_blocks<{rule}>"] for dtype, rule in SUPER_BLOCK_RULES.items()
}
"""The kernel that rounds blocks of each dtype."""
THREADS, LANES = 128, 32
"""Threads of a thread block; a warp rounds one quantisation block."""


def launch_rounding_to_block_values(launches: LaunchBuilder, x: Operand, out: Operand, dtype: DType) -> None:
    """Launch the rounding of dense float32 numbers to values that blocks of `dtype` can store, as float32."""
    count = math.prod(out.shape) // dtype.block
    if count:
        blocks = count_blocks(count, THREADS // LANES)
        launches.add_launch(KERNELS[dtype], blocks, THREADS, [count, x, out])


def select_block_store_kernel(dtype: DType, ids: str = "i32") -> KernelInstance:
    """Return the kernel that rounds rows and stores their blocks; `ids` is the C++ type of row numbers."""
    require_supported(dtype in BLOCK_TYPE_NAMES, f"kernels that store blocks of {dtype} are missing")
    return STORE_SOURCE[f"store_blocks<{RULES[dtype]}, {ids}>"]


def choose_block_store_threads(columns: int) -> int:
    """Choose the threads of a thread block that stores a row of `columns` numbers: a warp for each block, up to 8."""
    return 32 * max(1, min(8, columns // 32))


def launch_block_store(launches: LaunchBuilder, x: Operand, out: Operand) -> None:
    """Launch the quantisation of float32 numbers `x` to the blocks of `out`, which has the same shape."""
    kernel = select_block_store_kernel(out.dtype)
    axes = build_merged_tiling_iteration_axes(out.shape[:-1], [as_row_starts(out), as_row_starts(x)])
    words: list[LaunchWord] = [1, out.shape[-1], 0, x.strides[-1], *axes.axes_struct_fields]
    words += [*axes.make_address_and_stride_fields(0, out), *([0] * (1 + MAX_ITERATION_AXES))]
    words += [*axes.make_address_and_stride_fields(1, x), 0, 0]
    launches.add_launch(kernel, axes.element_count, choose_block_store_threads(out.shape[-1]), words)
