"""Packed weights of one to three values per code: TQ1_0, TQ2_0, Q1_0 and Q2_0. A trit is a digit to base 3."""

from __future__ import annotations

from .....graph.dtypes import DType
from ...compilation.compiler import subroutine
from ...simd.base3_codes import DIGITS, SHORT_BYTES, load_ternary_codes_of_32_columns
from ...simd.dot_tiles import make_bit_plane_code_loader
from ...simd.vectors import load_byte, store_byte
from .packed_format import (
    BIT_MASK,
    BLOCK_COLUMNS,
    CRUMB_MASK,
    PackedFormat,
    make_bitplane_format,
    make_load_f16_scale,
    make_load_negative_zero_point_biases,
    make_pack_f16_scale,
    unpack_four_2_bit_codes_of_128,
)


@subroutine
def unpack_four_q1_0_codes(row, c):
    """Unpack the Q1_0 codes (one bit each) of columns `c` to ``c + 3`` of the file row at `row` to one byte each.

    A multiplication moves the four adjacent bits apart.
    """
    return (load_byte(row + c // 128 * 18 + 2 + c % 128 // 8) >> c % 8 & 15) * 0x204081 & BIT_MASK


@subroutine
def unpack_four_q2_0_codes(row, c):
    """Unpack the Q2_0 codes of columns `c` to ``c + 3`` of the file row at `row`: 2 bits each, to one byte each."""
    four = load_byte(row + c // 64 * 18 + 2 + c % 64 // 4)
    return (four | four << 6 | four << 12 | four << 18) & CRUMB_MASK


@subroutine
def unpack_base_3_digit(byte, n):
    """Return base-3 digit (trit) number `n` of a packed byte; digit 0 is the most significant.

    `simd.base3_codes` explains the packing.
    """
    for _ in range(n):
        byte = byte * 3 & 255
    return byte * 3 >> 8


@subroutine
def unpack_tq1_0_trit(row, c):
    """Return the base-3 digit (trit) of column `c` of a TQ1_0 file block of 256 columns.

    A file block has 32 bytes of 5 trits, then 16 bytes of 5 trits, then 4 bytes of 4 trits.
    """
    if c < 160:
        return unpack_base_3_digit(load_byte(row + c % 32), c // 32)
    if c < 240:
        return unpack_base_3_digit(load_byte(row + 32 + (c - 160) % 16), (c - 160) // 16)
    return unpack_base_3_digit(load_byte(row + 48 + c % 4), (c - 240) // 4)


@subroutine
def replace_packed_trit(at, n, digit):
    """Replace base-3 digit (trit) number `n` of the packed byte at address `at` by `digit`."""
    old, number = load_byte(at), 0
    for i in range(DIGITS):
        number = number * 3 + (digit if i == n else unpack_base_3_digit(old, i))
    store_byte(at, (number * 256 + 242) // 243)


@subroutine
def pack_tq1_0_codes_as_trits(row, b, first, second, lane):
    """Pack block `b` (32 columns) of the TQ1_0 file row at `row` as base-3 digits (trits), five in a byte.

    The first 20 columns fill 4 bytes of lane `lane` of the plane at `first`. The trits of the last 12 columns go to
    bytes of the plane at `second` that several rows share.
    """
    for k in range(4):
        number = 0
        for j in range(DIGITS):
            number = number * 3 + unpack_tq1_0_trit(row, b * BLOCK_COLUMNS + 4 * j + k)
        store_byte(first + 4 * lane + k, (number * 256 + 242) // 243)
        for j in range(3):
            at = 64 * j + 4 * lane + k
            replace_packed_trit(
                second + at % SHORT_BYTES, at // SHORT_BYTES, unpack_tq1_0_trit(row, b * BLOCK_COLUMNS + 20 + 4 * j + k)
            )


load_tq1_0_scales = make_load_f16_scale(8)
TERNARY_FORMATS = (
    PackedFormat(
        DType.TQ1_0,
        (64, SHORT_BYTES),
        pack_tq1_0_codes_as_trits,
        make_pack_f16_scale(54, scale_offset=52),
        load_ternary_codes_of_32_columns,
        load_tq1_0_scales,
        make_load_negative_zero_point_biases(load_tq1_0_scales, 1),
        1,
        False,
        2,
    ),
    make_bitplane_format(
        DType.TQ2_0,
        (2,),
        unpack_four_2_bit_codes_of_128,
        make_pack_f16_scale(66, scale_offset=64),
        make_load_f16_scale(8),
        1,
    ),
    make_bitplane_format(
        DType.Q1_0,
        (1,),
        unpack_four_q1_0_codes,
        make_pack_f16_scale(18),
        make_load_f16_scale(4),
        1,
        load_codes=make_bit_plane_code_loader((1,), to_bit=1),
        max_code=2,
    ),
    make_bitplane_format(DType.Q2_0, (2,), unpack_four_q2_0_codes, make_pack_f16_scale(18), make_load_f16_scale(2), 1),
)
