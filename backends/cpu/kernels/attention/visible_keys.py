"""The keys of a tile that the tokens of prefill attention see, as bits of a word, and the sizes of tiles and blocks."""

from __future__ import annotations

from ...compilation.compiler import subroutine
from ...simd.vectors import (
    LANES,
    bits_to_float,
    count_leading_zeros,
    count_trailing_zeros,
    float_to_bits,
    greater_bitmask,
    load,
    or_int,
    splat,
    store_long,
    where_nonzero,
    zero_ints,
    zeros,
)
from .softmax_scores import (
    FLOAT_ONE,
    MINUS_INFINITY,
    find_visible_key_bits,
    load_16_padded_mask_values,
    max_or_second,
)

TILE_KEYS = 64
"""Keys of a tile: one bit of a word each."""
BLOCK_TOKENS = 32
"""Tokens of a block, and columns of a small matrix: two vectors."""
MATRIX_ROWS = 8
"""Rows of a small matrix."""


@subroutine
def store_visible_key_bits_per_8_tokens(mask, step, tokens, s, keys, to):
    """Find the keys of a tile that are visible to each group of 8 tokens, and store them as bits.

    At `to` each group of 8 tokens gets a 64-bit word. Bit k is set if a token of the group sees key ``s + k``.

    Returns:
        The bits of keys that any token sees, and whether the mask is zero throughout.
    """
    marks, union, tile_mask = zero_ints(), 0, mask + 4 * s
    whole = keys - s >= TILE_KEYS and tokens >= BLOCK_TOKENS
    for first in range(0, BLOCK_TOKENS, MATRIX_ROWS):
        bits = 0
        for r in range(0, TILE_KEYS, LANES):
            max_lanes = splat(MINUS_INFINITY)
            if whole:
                for t in range(first, first + MATRIX_ROWS):
                    lanes = load(tile_mask + t * step + 4 * r)
                    marks, max_lanes = or_int(marks, float_to_bits(lanes)), max_or_second(lanes, max_lanes)
            else:
                for t in range(first, min(tokens, first + MATRIX_ROWS)):
                    lanes = load_16_padded_mask_values(mask + t * step, s + r, keys)
                    marks, max_lanes = or_int(marks, float_to_bits(lanes)), max_or_second(lanes, max_lanes)
            bits |= find_visible_key_bits(max_lanes) << r
        store_long(to + first, bits)
        union |= bits
    return union, greater_bitmask(where_nonzero(bits_to_float(marks), splat(FLOAT_ONE), zeros()), zeros()) == 0


@subroutine
def find_set_bit_range_rounded_to_eights(bits):
    """Find the range (first, end) that contains all set bits of `bits`, rounded outwards to multiples of eight."""
    return count_trailing_zeros(bits) // MATRIX_ROWS * MATRIX_ROWS, (
        TILE_KEYS - count_leading_zeros(bits) + MATRIX_ROWS - 1
    ) // MATRIX_ROWS * MATRIX_ROWS
