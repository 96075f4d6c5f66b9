"""Cache rows in blocks of 32 numbers, in the layout of ggml: a float16 scale before the codes.

Packed weights have another layout (`packed.format_table`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from .....graph.dtypes import DType
from ...compilation.compiler import Subroutine, subroutine
from ...simd.half_memory import load_splat_f16, store_lane_0_as_f16
from ...simd.vectors import (
    absolute,
    add,
    and_int,
    div,
    lane_max,
    lane_min,
    larger,
    load_i8_lanes,
    load_u8_lanes,
    minimum,
    mul,
    or_int,
    round_away,
    round_to_zero,
    shift_left,
    shift_right,
    smaller,
    splat,
    splat_int,
    store,
    store_u8_lanes,
    sub,
    sub_int,
    to_float,
    truncate_to_int,
    where_less,
    where_nonzero,
    zeros,
)

BLOCK_ELEMENTS, SCALE_BYTES = 32, 2
"""Elements of a block, and bytes of its scale."""
FLOAT_ONE, Q8_0_MAX_CODE, Q4_0_MIN_CODE, Q4_0_CODE_OFFSET, Q4_0_MAX_CODE = (
    np.float32(x) for x in (1, 127, -8, 8.5, 15)
)


@subroutine
def load_16_q8_0_elements(row, c):
    """Load 16 elements of a Q8_0 cache row as float32, from column `c`, a multiple of 16."""
    block = row + c // BLOCK_ELEMENTS * 34
    return mul(to_float(load_i8_lanes(block + SCALE_BYTES + c % BLOCK_ELEMENTS)), load_splat_f16(block))


@subroutine
def load_16_q4_0_elements(row, c):
    """Load 16 elements of a Q4_0 cache row as float32, from column `c`, a multiple of 16.

    Low nibbles are the first half of a block, high nibbles the second half.
    """
    block = row + c // BLOCK_ELEMENTS * 18
    q = and_int(shift_right(load_u8_lanes(block + SCALE_BYTES), splat_int(c % BLOCK_ELEMENTS // 4)), splat_int(15))
    return mul(to_float(sub_int(q, splat_int(8))), load_splat_f16(block))


def _make_expand_cache_blocks(nbytes: int, load: Subroutine) -> Subroutine:
    """Make the subroutine ``(row, c, n, to)`` that expands columns `c` to `n` of a quantised cache row to float32.

    `c` and `n` are multiples of 32. A block of 32 columns has `nbytes` bytes; `load` loads 16 columns.
    """

    def expand(row, c, n, to):
        for block in range(row + c // BLOCK_ELEMENTS * nbytes, row + n // BLOCK_ELEMENTS * nbytes, nbytes):
            store(to, load(block, 0))
            store(to + 64, load(block, 16))
            to += 4 * BLOCK_ELEMENTS

    return subroutine(expand)


@subroutine
def compute_reciprocal_or_zero(scale):
    """Return ``1 / scale``, or 0 if the scale is 0."""
    return where_nonzero(scale, div(splat(FLOAT_ONE), scale), zeros())


@subroutine
def store_q8_0_cache_block(row, c, x, y):
    """Quantise 32 elements to Q8_0 and store the block at column `c` of a cache row.

    The vectors `x` and `y` are the halves of the block. The largest magnitude gets the code 127 or -127.
    """
    d = div(splat(lane_max(larger(absolute(x), absolute(y)))), splat(Q8_0_MAX_CODE))
    block, factor = row + c // BLOCK_ELEMENTS * 34, compute_reciprocal_or_zero(d)
    store_lane_0_as_f16(block, d)
    store_u8_lanes(block + SCALE_BYTES, truncate_to_int(round_away(mul(x, factor))))
    store_u8_lanes(block + SCALE_BYTES + 16, truncate_to_int(round_away(mul(y, factor))))


@subroutine
def store_q4_0_cache_block(row, c, x, y):
    """Quantise 32 elements to Q4_0 and store the block at column `c` of a cache row.

    The vectors `x` and `y` are the halves of the block. The number with the largest magnitude gets the code for -8.
    """
    low, high = splat(lane_min(smaller(x, y))), splat(lane_max(larger(x, y)))
    d = div(where_less(sub(zeros(), low), high, high, low), splat(Q4_0_MIN_CODE))
    block, factor = row + c // BLOCK_ELEMENTS * 18, compute_reciprocal_or_zero(d)
    store_lane_0_as_f16(block, d)
    x = minimum(round_to_zero(add(mul(x, factor), splat(Q4_0_CODE_OFFSET))), splat(Q4_0_MAX_CODE))
    y = minimum(round_to_zero(add(mul(y, factor), splat(Q4_0_CODE_OFFSET))), splat(Q4_0_MAX_CODE))
    store_u8_lanes(block + SCALE_BYTES, or_int(truncate_to_int(x), shift_left(truncate_to_int(y), splat_int(4))))


BLOCK_LOADERS: Mapping[DType, Subroutine] = MappingProxyType(
    {DType.Q8_0: load_16_q8_0_elements, DType.Q4_0: load_16_q4_0_elements}
)
BLOCK_EXPANDERS: Mapping[DType, Subroutine] = MappingProxyType(
    {dtype: _make_expand_cache_blocks(dtype.block_bytes, load) for dtype, load in BLOCK_LOADERS.items()}
)
BLOCK_STORERS: Mapping[DType, Subroutine] = MappingProxyType(
    {DType.Q8_0: store_q8_0_cache_block, DType.Q4_0: store_q4_0_cache_block}
)
