"""Quantisers of types with indices or digits as codes: IQ4_NL, IQ4_XS, MXFP4, TQ1_0 and TQ2_0.

The ternary types and MXFP4 have the bytes of ``quantize_row_*_ref`` in ggml-quants.c. IQ4_NL and IQ4_XS search the
scale with the smallest weighted error.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from .....graph.dtypes import DType
from .....ops.block_layouts import FP4_VALUES_TIMES_2, IQ4_NL_CODE_BOOK
from ...compilation.compiler import subroutine
from ...simd.candidate_lanes import round_scalar_to_half, to_int
from ...simd.half_memory import store_lane_0_as_f16
from ...simd.vectors import (
    LANES,
    absolute,
    add,
    add_int,
    clamp_max,
    clamp_min,
    gather_lanes,
    lane_max,
    load,
    load_byte,
    load_scalar,
    load_u8_as_i32,
    maximum,
    mul,
    mul_int,
    negative,
    or_int,
    power_of_two,
    round_away,
    round_down,
    round_small_floats_to_int,
    shift_left,
    shift_right,
    splat,
    splat_int,
    store_byte,
    store_scalar,
    store_u8_lanes,
    sub,
    where_less,
    zeros,
)
from .block_loop import row_quantiser
from .scale_search import (
    ONE,
    ZERO,
    make_8_inverse_scales_per_peak,
    make_choose_scale_code,
    make_search_best_scale,
    search_scale,
    single,
    sum_weights,
    write_error_weights,
)
from .small_blocks import BLOCK, compute_reciprocal_or_zero, store_32_nibbles
from .super_blocks import CODES, SCALE_CODES, SCALES, STRENGTHS, SUPER_BLOCK, WEIGHTS, integer_steps

SIGN = single(8)
"""The bit of the sign in the index of a 4-bit float."""
CELL_COUNT = 512
"""Cells of half a unit, from -128 to 128. No cell has a boundary between two codes inside."""


def make_nearest_value_table(values: np.ndarray) -> np.ndarray:
    """Make a lookup table that rounds a number to the nearest value of a code book.

    A cell is an interval of length 0.5 between -128 and 128. The first `CELL_COUNT` float32 entries are the nearest
    value of each cell. The next `CELL_COUNT` entries are its index in `values`. Of two equally near values, the first
    one is chosen.

    Args:
        values: the code book, integers from -128 to 127.
    """
    centres = (np.arange(CELL_COUNT) - CELL_COUNT // 2) / 2 + 0.25
    nearest = np.abs(centres[:, None] - values).argmin(1)
    return np.concatenate([values[nearest], nearest]).astype(np.float32)


@cache
def make_iq4_nearest_value_table() -> np.ndarray:
    """Return the lookup table (see `make_nearest_value_table`) of the code book that IQ4_NL and IQ4_XS share."""
    return make_nearest_value_table(IQ4_NL_CODE_BOOK)


@cache
def make_doubled_fp4_nearest_value_table() -> np.ndarray:
    """Return the lookup table (see `make_nearest_value_table`) of all 4-bit floats, times 2 so that they are
    integers.
    """
    return make_nearest_value_table(FP4_VALUES_TIMES_2)


@subroutine
def look_up_nearest_values_or_indices(v, table):
    """Look up the nearest code-book value of each lane of `v`, or its index, in a `make_nearest_value_table`.

    `table` is the address of the first half of the table for values, or of the second half for indices. Numbers beyond
    the table use its first or last cell.
    """
    cells = round_down(add(v, v))
    cells = clamp_max(clamp_min(cells, splat(single(-CELL_COUNT // 2))), splat(single(CELL_COUNT // 2 - 1)))
    return gather_lanes(table + 2 * CELL_COUNT, shift_left(round_small_floats_to_int(cells), splat_int(2)))


@subroutine
def round_lanes_to_code_book_values(v, table, unused):
    """Round each lane to the nearest value of a code book; `table` is the address of its `make_nearest_value_table`."""
    return look_up_nearest_values_or_indices(v, table)


search_book_scale = make_search_best_scale(round_lanes_to_code_book_values)
choose_book_scale = make_choose_scale_code(round_lanes_to_code_book_values)


@subroutine
def quantise_to_code_book_indices(x, scale, table, to):
    """Quantise 32 numbers: write the index of the nearest code-book value as one byte each.

    Args:
        x: address of the numbers.
        scale: scale of the code-book values.
        table: address of the lookup table of the code book (`make_nearest_value_table`).
        to: address for the indices.
    """
    inverse = splat(compute_reciprocal_or_zero(scale))
    for i in range(0, BLOCK, LANES):
        index = look_up_nearest_values_or_indices(mul(load(x + 4 * i), inverse), table + 4 * CELL_COUNT)
        store_u8_lanes(to + i, round_small_floats_to_int(index))


@subroutine
def search_iq4_scale(x, w, table):
    """Return the scale with which the code book of IQ4_NL fits 32 numbers with the smallest weighted squared error.

    Args:
        x: address of the numbers.
        w: address of the weights of their squared errors.
        table: address of `make_iq4_nearest_value_table`.
    """
    spread = make_8_inverse_scales_per_peak(single(-127), single(113), single(0.82), single(0.04))
    return search_book_scale(x, w, BLOCK, table, 0, spread, 3)


@row_quantiser(DType.IQ4_NL)
def quantise_iq4_nl(x, importance, scratch, table, block):
    """Quantise the 32 numbers at `x` to an IQ4_NL block at `block`: a scale, and 4-bit indices into a code book."""
    write_error_weights(x, importance, scratch + WEIGHTS, BLOCK)
    scale = round_scalar_to_half(search_iq4_scale(x, scratch + WEIGHTS, table))
    quantise_to_code_book_indices(x, scale, table, scratch + CODES)
    store_lane_0_as_f16(block, splat(scale))
    store_32_nibbles(scratch + CODES, block + 2)


@row_quantiser(DType.IQ4_XS)
def quantise_iq4_xs(x, importance, scratch, table, block):
    """Quantise the 256 numbers at `x` to an IQ4_XS block at `block`: 4-bit code book indices, a 6-bit scale per 32."""
    scales, strengths, w = scratch + SCALES, scratch + STRENGTHS, scratch + WEIGHTS
    smallest, limit = single(-32), single(31)
    write_error_weights(x, importance, w, SUPER_BLOCK)
    for j in range(LANES):
        store_scalar(scales + 4 * j, ZERO)
        store_scalar(strengths + 4 * j, ZERO)
    for j in range(8):
        store_scalar(scales + 4 * j, search_iq4_scale(x + 128 * j, w + 128 * j, table))
        store_scalar(strengths + 4 * j, sum_weights(w + 128 * j, BLOCK))
    spread = make_8_inverse_scales_per_peak(smallest, limit, single(0.99), single(0.005))
    common = round_scalar_to_half(search_scale(scales, strengths, LANES, smallest, limit, spread, 2))
    store_lane_0_as_f16(block, splat(common))
    high_bits = 0
    for j in range(8):
        xj = x + 128 * j
        scale = load_scalar(scales + 4 * j)
        code = choose_book_scale(xj, w + 128 * j, BLOCK, table, 0, common, scale, integer_steps(), smallest, limit)
        store_byte(scratch + SCALE_CODES + j, to_int(code - smallest))
        quantise_to_code_book_indices(xj, code * common, table, scratch + CODES)
        store_32_nibbles(scratch + CODES, block + 8 + 16 * j)
    for j in range(8):
        high_bits |= (load_byte(scratch + SCALE_CODES + j) >> 4) << (2 * j)
    store_byte(block + 2, high_bits & 255)
    store_byte(block + 3, high_bits >> 8)
    for j in range(4):
        low = load_byte(scratch + SCALE_CODES + 2 * j) & 15
        store_byte(block + 4 + j, low | (load_byte(scratch + SCALE_CODES + 2 * j + 1) & 15) << 4)


@row_quantiser(DType.MXFP4)
def quantise_mxfp4(x, importance, scratch, table, block):
    """Quantise the 32 numbers at `x` to an MXFP4 block at `block`: a power of two as scale, and 4-bit floats.

    Importances have no effect.
    """
    largest = maximum(absolute(load(x)), absolute(load(x + 4 * LANES)))
    # floor(log2) is the exponent field; a power of two below 2**-125 has no scale of its own.
    store_scalar(scratch, lane_max(largest))
    bits = load_byte(scratch + 3) << 1 | load_byte(scratch + 2) >> 7
    exponent = max(bits - 2, 0)
    store_byte(block, exponent)
    # The values of the table are twice the floats, so the scale is 2**(exponent - 128).
    inverse = power_of_two(splat_int(min(128 - exponent, 127)))
    for k in range(0, BLOCK, LANES):
        v = mul(load(x + 4 * k), inverse)
        # Of two values at the same distance the smaller magnitude is chosen: the cells do so below zero.
        index = look_up_nearest_values_or_indices(negative(absolute(v)), table + 4 * CELL_COUNT)
        index = where_less(zeros(), v, clamp_min(sub(index, splat(SIGN)), zeros()), index)
        store_u8_lanes(scratch + CODES + k, round_small_floats_to_int(index))
    store_32_nibbles(scratch + CODES, block + 1)


@subroutine
def quantise_to_trits_and_return_scale(x, to):
    """Quantise 256 numbers at `x` to ternary codes at `to`, and return their scale, the largest magnitude.

    The codes 0, 1 and 2 mean -1, 0 and 1.
    """
    top = zeros()
    for i in range(0, SUPER_BLOCK, LANES):
        top = maximum(top, absolute(load(x + 4 * i)))
    scale = lane_max(top)
    inverse = splat(compute_reciprocal_or_zero(scale))
    for i in range(0, SUPER_BLOCK, LANES):
        q = add(round_away(mul(load(x + 4 * i), inverse)), splat(ONE))
        store_u8_lanes(to + i, round_small_floats_to_int(q))
    return scale


@subroutine
def pack_trits_into_bytes(codes, distance, count):
    """Pack 4 or 5 ternary codes into each byte as base-3 digits; the first code is the most significant digit.

    `count` is the number of codes in a byte. `distance` is the number of bytes between them in `codes`.
    """
    number = load_u8_as_i32(codes)
    for k in range(1, count):
        number = add_int(mul_int(number, splat_int(3)), load_u8_as_i32(codes + distance * k))
    if count == 4:
        number = mul_int(number, splat_int(3))
    # (256 n + 242) // 243 for n up to 242, by a factor of 2**-16.
    scaled = add_int(shift_left(number, splat_int(8)), splat_int(242))
    return shift_right(mul_int(scaled, splat_int(17261)), splat_int(22))


@row_quantiser(DType.TQ1_0)
def quantise_tq1_0(x, importance, scratch, table, block):
    """Quantise the 256 numbers at `x` to a TQ1_0 block at `block`: a scale, and base-3 digits, five in a byte.

    Importances have no effect.
    """
    codes = scratch + CODES
    store_lane_0_as_f16(block + 52, splat(quantise_to_trits_and_return_scale(x, codes)))
    for k in range(0, 32, LANES):
        store_u8_lanes(block + k, pack_trits_into_bytes(codes + k, 32, 5))
    store_u8_lanes(block + 32, pack_trits_into_bytes(codes + 160, 16, 5))
    store_u8_lanes(codes, pack_trits_into_bytes(codes + 240, 4, 4))
    for k in range(4):
        store_byte(block + 48 + k, load_byte(codes + k))


@row_quantiser(DType.TQ2_0)
def quantise_tq2_0(x, importance, scratch, table, block):
    """Quantise the 256 numbers at `x` to a TQ2_0 block at `block`: a scale, and ternary codes of 2 bits.

    Importances have no effect.
    """
    codes = scratch + CODES
    store_lane_0_as_f16(block + 64, splat(quantise_to_trits_and_return_scale(x, codes)))
    for h in range(2):
        for k in range(0, 32, LANES):
            at, out = codes + 128 * h + k, splat_int(0)
            for n in range(4):
                out = or_int(out, shift_left(load_u8_as_i32(at + 32 * n), splat_int(2 * n)))
            store_u8_lanes(block + 32 * h + k, out)
