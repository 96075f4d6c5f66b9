"""Queries meet keys in blocks as integers: queries are rounded to blocks of 8 bits first, and lanes are 16 keys.

The integers of 16 keys are turned once for all heads that share them, four columns to a lane.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from .....graph.dtypes import DType
from ...compiler import Part, part
from ...simd.bytes import dot4, four_everywhere
from ...simd.squares import gather_halves, turn_eight_bits, turn_four_bits
from ...simd.vectors import (
    absolute,
    add,
    div,
    fma,
    lane_0,
    larger,
    largest_across,
    load,
    load_bytes,
    load_half,
    mul,
    no_ints,
    round_away,
    splat,
    splat_from,
    store_scalar,
    store_small,
    to_float,
    total,
    truncated,
    zeros,
)
from ..blocks import BLOCK, HIGHEST, SCALE, inverse

SQUARE = 512
"""Bytes of a turned block of 16 keys."""
UP: Mapping[DType, np.float32] = MappingProxyType({DType.Q8_0: np.float32(-128), DType.Q4_0: np.float32(-8)})
"""What has to be added to the integers that `TURNS` give."""
TURNS = MappingProxyType({DType.Q8_0: turn_eight_bits, DType.Q4_0: turn_four_bits})


def query_bytes(size: int) -> int:
    """Of a rounded query: its integers, and of each block the scale and the sum that corrects how keys are moved."""
    return -(-(size + size // BLOCK * 8) // 64) * 64


def keys_bytes(size: int) -> int:
    """Of 16 keys: turned pairs of blocks, and scales."""
    return (size // BLOCK + 1) * (SQUARE + 32)


def round_query(dtype: DType) -> Part:
    """A query in blocks of 8 bits, scaled by float32, for keys of such a type."""
    up = UP[dtype]

    def round_query(query, size, to):
        scales = to + size
        moved = scales + size // BLOCK * 4
        for c in range(0, size, BLOCK):
            x, y, at = load(query + 4 * c), load(query + 4 * c + 64), c // BLOCK * 4
            d = div(splat(largest_across(larger(absolute(x), absolute(y)))), splat(HIGHEST))
            factor = inverse(d)
            x, y = round_away(mul(x, factor)), round_away(mul(y, factor))
            store_small(to + c, truncated(x))
            store_small(to + c + 16, truncated(y))
            store_scalar(scales + at, lane_0(d))
            store_scalar(moved + at, total(mul(add(x, y), splat(up))))

    return part(round_query)


def turn_keys(dtype: DType) -> Part:
    """16 keys from an address on, of which the last has that number, to where `dots` reads them."""
    turn, nbytes = TURNS[dtype], dtype.block_bytes

    def turn_keys(keys, step, last, size, to):
        blocks = size // BLOCK
        scales = to + (blocks + 1) * SQUARE
        for block in range(0, blocks, 2):
            second = nbytes if block + 1 < blocks else 0
            turn(keys + block * nbytes + SCALE, step, last, second, to + block * SQUARE)
        for block in range(blocks):
            gather_halves(keys + block * nbytes, step, last, scales + 32 * block)

    return part(turn_keys)


@part
def dots(query, keys, size):
    """The products of a rounded query with 16 keys."""
    blocks = size // BLOCK
    scales, factors = keys + (blocks + 1) * SQUARE, query + size
    moved, x = factors + 4 * blocks, zeros()
    for block in range(blocks):
        q, k, sums = query + BLOCK * block, keys + SQUARE * block, no_ints()
        for i in range(8):
            sums = dot4(sums, load_bytes(k + 64 * i), four_everywhere(q + 4 * i))
        scale = mul(load_half(scales + 32 * block), splat_from(factors + 4 * block))
        x = fma(add(to_float(sums), splat_from(moved + 4 * block)), scale, x)
    return x
