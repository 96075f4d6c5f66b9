"""Attention scores of keys in Q8_0 or Q4_0 blocks, by integer dot products with queries in 8-bit blocks.

SIMD lanes are 16 keys. Their codes are transposed once for all heads that share them: four columns to a lane.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from .....graph.dtypes import DType
from ...compilation.compiler import Subroutine, subroutine
from ...simd.byte_vectors import dot4, splat_4_bytes
from ...simd.transpose_int8 import copy_16_strided_f16_repeating_last, transpose_4_bit_blocks, transpose_8_bit_blocks
from ...simd.vectors import (
    absolute,
    add,
    div,
    fma,
    lane_0,
    lane_max,
    lane_sum,
    larger,
    load,
    load_bytes,
    load_f16,
    mul,
    round_away,
    smaller,
    splat,
    splat_from,
    store_scalar,
    store_u8_lanes,
    to_float,
    truncate_to_int,
    zero_ints,
    zeros,
)
from ..vector.block_rows import BLOCK_ELEMENTS, Q8_0_MAX_CODE, SCALE_BYTES, compute_reciprocal_or_zero

TRANSPOSED_BLOCK_BYTES = 512
"""Bytes of a transposed block of 16 keys."""
CODE_OFFSETS: Mapping[DType, np.float32] = MappingProxyType({DType.Q8_0: np.float32(-128), DType.Q4_0: np.float32(-8)})
"""Numbers to add to the codes that `BLOCK_TRANSPOSERS` make."""
BLOCK_TRANSPOSERS = MappingProxyType({DType.Q8_0: transpose_8_bit_blocks, DType.Q4_0: transpose_4_bit_blocks})


FINITE_SCALE = np.float32(1e37)
"""A number above the scales of finite queries. In a block with infinities, their codes are 127 and others about 0."""


@subroutine
def round_and_clamp_to_int8_codes(x):
    """Round each lane to the nearest integer, clamped to the range from -127 to 127; NaN stays NaN."""
    return round_away(smaller(larger(x, splat(-Q8_0_MAX_CODE)), splat(Q8_0_MAX_CODE)))


def compute_quantised_query_bytes(size: int) -> int:
    """Return the padded bytes of a quantised query of `size` elements: codes, then scale and correction per block."""
    return -(-(size + size // BLOCK_ELEMENTS * 8) // 64) * 64


def compute_bytes_of_16_transposed_keys(size: int) -> int:
    """Return the bytes of 16 transposed keys of `size` elements: their codes in pairs of blocks, and their scales."""
    return (size // BLOCK_ELEMENTS + 1) * (TRANSPOSED_BLOCK_BYTES + 32)


def make_quantise_query_to_int8_blocks(dtype: DType) -> Subroutine:
    """Make the subroutine that quantises a query to 8-bit blocks with float32 scales, for keys of `dtype`.

    The subroutine is ``(query, size, to)``: the address of the query, its number of elements, and the address of the
    result.
    """
    code_offset = CODE_OFFSETS[dtype]

    def quantise_query(query, size, to):
        scales = to + size
        corrections = scales + size // BLOCK_ELEMENTS * 4
        for c in range(0, size, BLOCK_ELEMENTS):
            x, y, at = load(query + 4 * c), load(query + 4 * c + 64), c // BLOCK_ELEMENTS * 4
            d = div(splat(lane_max(larger(absolute(x), absolute(y)))), splat(Q8_0_MAX_CODE))
            factor = compute_reciprocal_or_zero(smaller(d, splat(FINITE_SCALE)))
            x, y = round_and_clamp_to_int8_codes(mul(x, factor)), round_and_clamp_to_int8_codes(mul(y, factor))
            store_u8_lanes(to + c, truncate_to_int(x))
            store_u8_lanes(to + c + 16, truncate_to_int(y))
            store_scalar(scales + at, lane_0(d))
            store_scalar(corrections + at, lane_sum(mul(add(x, y), splat(code_offset))))

    return subroutine(quantise_query)


def make_transpose_16_quantised_keys(dtype: DType) -> Subroutine:
    """Make the subroutine that transposes the codes of 16 quantised keys, so that each SIMD lane has one key.

    The subroutine is ``(keys, step, last, size, to)``. `step` is the bytes from key to key. `last` is the index of the
    last key, which is repeated for missing keys. `dot_query_with_16_keys` reads the result.
    """
    transpose_blocks, nbytes = BLOCK_TRANSPOSERS[dtype], dtype.block_bytes

    def transpose_keys(keys, step, last, size, to):
        blocks = size // BLOCK_ELEMENTS
        scales = to + (blocks + 1) * TRANSPOSED_BLOCK_BYTES
        for block in range(0, blocks, 2):
            second = nbytes if block + 1 < blocks else 0
            transpose_blocks(
                keys + block * nbytes + SCALE_BYTES, step, last, second, to + block * TRANSPOSED_BLOCK_BYTES
            )
        for block in range(blocks):
            copy_16_strided_f16_repeating_last(keys + block * nbytes, step, last, scales + 32 * block)

    return subroutine(transpose_keys)


@subroutine
def dot_query_with_16_keys(query, keys, size):
    """Return the 16 dot products of a quantised query and 16 transposed keys of `size` elements, with b for blocks.

    ``x[k] = sum over b of query_scale[b] * key_scale[b, k] * (q[b] . key[b, k] + correction[b])``.
    """
    blocks = size // BLOCK_ELEMENTS
    scales, factors = keys + (blocks + 1) * TRANSPOSED_BLOCK_BYTES, query + size
    corrections, x = factors + 4 * blocks, zeros()
    for block in range(blocks):
        q, k, sums = query + BLOCK_ELEMENTS * block, keys + TRANSPOSED_BLOCK_BYTES * block, zero_ints()
        for i in range(8):  # sums[k] += q[4 i : 4 i + 4] . key[k, 4 i : 4 i + 4]
            sums = dot4(sums, load_bytes(k + 64 * i), splat_4_bytes(q + 4 * i))
        scale = mul(load_f16(scales + 32 * block), splat_from(factors + 4 * block))
        x = fma(add(to_float(sums), splat_from(corrections + 4 * block)), scale, x)
    return x
