"""Cache rows in blocks of 32 numbers, in the layout of ggml: a float16 scale before the codes.

Packed weights have another layout (`products.formats`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from ....graph.dtypes import DType
from ..compiler import Part, part
from ..simd.shorts import splat_half, store_half
from ..simd.vectors import (
    absolute,
    add,
    and_int,
    div,
    larger,
    largest_across,
    load_small,
    load_small_signed,
    minimum,
    mul,
    or_int,
    round_away,
    round_to_zero,
    shift_left,
    shift_right,
    smaller,
    smallest_across,
    splat,
    splat_int,
    store,
    store_small,
    sub,
    sub_int,
    to_float,
    truncated,
    where_less,
    where_nonzero,
    zeros,
)

BLOCK, SCALE = 32, 2
"""Elements of a block, and bytes of its scale."""
ONE, HIGHEST, LOWEST, MIDDLE, LAST = (np.float32(x) for x in (1, 127, -8, 8.5, 15))


@part
def load_q8_0(row, c):
    """Load 16 elements from column `c`, a multiple of 16."""
    block = row + c // BLOCK * 34
    return mul(to_float(load_small_signed(block + SCALE + c % BLOCK)), splat_half(block))


@part
def load_q4_0(row, c):
    """Load 16 elements as `load_q8_0` does. Low nibbles are the first half of a block, high nibbles the second half."""
    block = row + c // BLOCK * 18
    q = and_int(shift_right(load_small(block + SCALE), splat_int(c % BLOCK // 4)), splat_int(15))
    return mul(to_float(sub_int(q, splat_int(8))), splat_half(block))


def _expand(nbytes: int, load: Part) -> Part:
    """Make ``(row, c, n, to)``: expand columns `c` to `n`, multiples of 32, to float32."""

    def expand(row, c, n, to):
        for block in range(row + c // BLOCK * nbytes, row + n // BLOCK * nbytes, nbytes):
            store(to, load(block, 0))
            store(to + 64, load(block, 16))
            to += 4 * BLOCK

    return part(expand)


@part
def inverse(scale):
    """Return ``1 / scale``; 0 for 0."""
    return where_nonzero(scale, div(splat(ONE), scale), zeros())


@part
def store_q8_0(row, c, x, y):
    """Store both halves of the block at column `c`. The largest magnitude becomes 127."""
    d = div(splat(largest_across(larger(absolute(x), absolute(y)))), splat(HIGHEST))
    block, factor = row + c // BLOCK * 34, inverse(d)
    store_half(block, d)
    store_small(block + SCALE, truncated(round_away(mul(x, factor))))
    store_small(block + SCALE + 16, truncated(round_away(mul(y, factor))))


@part
def store_q4_0(row, c, x, y):
    """Store both halves of the block at column `c`. The number with the largest magnitude becomes -8."""
    low, high = splat(smallest_across(smaller(x, y))), splat(largest_across(larger(x, y)))
    d = div(where_less(sub(zeros(), low), high, high, low), splat(LOWEST))
    block, factor = row + c // BLOCK * 18, inverse(d)
    store_half(block, d)
    x, y = (
        minimum(round_to_zero(add(mul(x, factor), splat(MIDDLE))), splat(LAST)),
        minimum(round_to_zero(add(mul(y, factor), splat(MIDDLE))), splat(LAST)),
    )
    store_small(block + SCALE, or_int(truncated(x), shift_left(truncated(y), splat_int(4))))


LOADS: Mapping[DType, Part] = MappingProxyType({DType.Q8_0: load_q8_0, DType.Q4_0: load_q4_0})
EXPAND: Mapping[DType, Part] = MappingProxyType(
    {dtype: _expand(dtype.block_bytes, load) for dtype, load in LOADS.items()}
)
STORES: Mapping[DType, Part] = MappingProxyType({DType.Q8_0: store_q8_0, DType.Q4_0: store_q4_0})
