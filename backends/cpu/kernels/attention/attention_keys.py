"""Integer scores for keys in blocks: queries are quantised to 8-bit blocks; lanes are 16 keys.

The codes of 16 keys are transposed once for all heads that share them: four columns to a lane.
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
"""Bytes of a transposed block of 16 keys."""
UP: Mapping[DType, np.float32] = MappingProxyType({DType.Q8_0: np.float32(-128), DType.Q4_0: np.float32(-8)})
"""Numbers to add to the codes that `BLOCK_TRANSPOSERS` make."""
TURNS = MappingProxyType({DType.Q8_0: turn_eight_bits, DType.Q4_0: turn_four_bits})


def query_bytes(size: int) -> int:
    """Return the bytes of a quantised query: codes; then for each block its scale and its offset correction."""
    return -(-(size + size // BLOCK * 8) // 64) * 64


def keys_bytes(size: int) -> int:
    """Return the bytes of 16 keys: transposed pairs of blocks, and scales."""
    return (size // BLOCK + 1) * (SQUARE + 32)


def round_query(dtype: DType) -> Part:
    """Make ``(query, size, to)``: quantise a query to 8-bit blocks with float32 scales, for keys of `dtype`."""
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
    """Make ``(keys, step, last, size, to)``: transpose 16 keys for `dot_query_keys`.

    `last` is the index of the last key; keys behind it repeat it.
    """
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
    """Return the 16 products of a quantised query and 16 keys.

    ``x[k] = sum over b of query_scale[b] * key_scale[b, k] * (q[b] . key[b, k] + correction[b])``.
    """
    blocks = size // BLOCK
    scales, factors = keys + (blocks + 1) * SQUARE, query + size
    moved, x = factors + 4 * blocks, zeros()
    for block in range(blocks):
        q, k, sums = query + BLOCK * block, keys + SQUARE * block, no_ints()
        for i in range(8):  # sums[k] += q[4 i : 4 i + 4] . key[k, 4 i : 4 i + 4]
            sums = dot4(sums, load_bytes(k + 64 * i), four_everywhere(q + 4 * i))
        scale = mul(load_half(scales + 32 * block), splat_from(factors + 4 * block))
        x = fma(add(to_float(sums), splat_from(moved + 4 * block)), scale, x)
    return x
