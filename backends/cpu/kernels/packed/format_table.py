"""Packed weights: the layout of each quantised type and the functions that read it.

1. A group is 16 rows, one lane each. A block is 32 columns. A unit is 8 blocks, or the remaining blocks.
2. A unit stores its codes, then its scales, in as many bytes as in a GGUF file. Packing only moves bits. A product
reads memory front to back, which processors prefetch best.
3. Codes are split into planes of 8, 4, 2 or 1 bits. Byte ``4 * row + k`` of a 64-byte vector holds column ``4 * j + k``
of the block. `j` counts first the bit fields of a byte, then the vectors.
4. Code books (`code_book_formats`) and numbers to base 3 (`ternary_formats`) have planes of their own.
5. Every weight is ``scale * code + bias``. Codes are unsigned. 16 or 32 columns share a scale and a bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

import numpy as np

from .....graph.dtypes import DType
from .....ops.block_layouts import FP4_VALUES_TIMES_2, IQ4_NL_CODE_BOOK
from ...compilation.compiler import Subroutine, subroutine
from ...simd.byte_vectors import make_repeated_16_byte_lookup_table
from ...simd.dot_tiles import make_bit_plane_code_loader
from ...simd.vectors import (
    Intrinsic,
    and_int,
    bits_to_float,
    bytes_as_floats,
    fma,
    load_16_i8_as_i32,
    load_byte,
    load_f16,
    load_four,
    load_ints,
    load_u8_as_i32,
    mul,
    next_bytes_as_floats,
    or_int,
    shift_left,
    shift_right,
    splat,
    splat_int,
    store_byte,
    sub_int,
    to_float,
    where_less,
)
from .code_book_formats import GRID_FORMATS
from .packed_format import (
    BIT_MASK,
    BLOCK_COLUMNS,
    GROUP_ROWS,
    NIBBLE_MASK,
    UNIT_BLOCKS,
    PackedFormat,
    copy_f16_to_lane,
    format_with_half_scales,
    make_bitplane_format,
    make_load_f16_scale,
    make_pack_f16_scale,
    unpack_four_2_bit_codes_of_128,
)
from .ternary_formats import TERNARY_FORMATS

__all__ = ["BLOCK_COLUMNS", "FORMATS", "GROUP_ROWS", "UNIT_BLOCKS", "PackedFormat"]


# ----------------------------------------------------------------------------------------------- types of one block


@subroutine
def unpack_4_bit_codes_of_four_columns(row, c, head, nbytes):
    """Unpack the 4-bit codes of columns `c` to ``c + 3`` of the file row at `row` to one byte each.

    A file block has 32 columns in `nbytes` bytes, `head` of them before the codes. Low nibbles are the first half.
    """
    return load_four(row + c // 32 * nbytes + head + c % 16) >> c % 32 // 16 * 4 & NIBBLE_MASK


@subroutine
def unpack_fifth_bits_of_four_columns(row, c, head, nbytes):
    """Unpack bit 4 of the 5-bit codes of columns `c` to ``c + 3`` of the file row at `row`, to bit 4 of one byte each.

    The 4 bytes with one bit per column are `head` bytes after the start of a file block of `nbytes` bytes.
    """
    four = load_byte(row + c // 32 * nbytes + head + c % 32 // 8) >> c % 8 & 15
    return (four * 0x204081 & BIT_MASK) << 4


@subroutine
def load_q4_0_codes(row, c):
    return unpack_4_bit_codes_of_four_columns(row, c, 2, 18)


@subroutine
def load_q4_1_codes(row, c):
    return unpack_4_bit_codes_of_four_columns(row, c, 4, 20)


@subroutine
def load_q5_0_codes(row, c):
    return unpack_4_bit_codes_of_four_columns(row, c, 6, 22) | unpack_fifth_bits_of_four_columns(row, c, 2, 22)


@subroutine
def load_q5_1_codes(row, c):
    return unpack_4_bit_codes_of_four_columns(row, c, 8, 24) | unpack_fifth_bits_of_four_columns(row, c, 4, 24)


@subroutine
def load_q8_0_codes(row, c):
    return load_four(row + c // 32 * 34 + 2 + c % 32) ^ 0x80808080


@subroutine
def load_mxfp4_codes(row, c):
    return unpack_4_bit_codes_of_four_columns(row, c, 1, 17)


def _make_pack_scale_and_bias(nbytes: int) -> Subroutine:
    """Make the subroutine that packs the float16 scale and the float16 bias of a file block of `nbytes` bytes.

    It is ``(row, to, lane, s)``: from file block `s` of the row at `row` to lane `lane` at `to`, biases after scales.
    """

    def split_scale_and_bias(row, to, lane, s):
        copy_f16_to_lane(row + s * nbytes, to + s * 64, lane)
        copy_f16_to_lane(row + s * nbytes + 2, to + s * 64 + 32, lane)

    return subroutine(split_scale_and_bias)


@subroutine
def load_scales_next_to_biases(p, b):
    d = load_f16(p + 64 * b)
    return d, d


@subroutine
def load_biases_next_to_scales(p, b):
    m = load_f16(p + 64 * b + 32)
    return m, m


@subroutine
def pack_mxfp4_scales(row, to, lane, s):
    store_byte(to + s * 16 + lane, load_byte(row + s * 17))


@subroutine
def load_halved_mxfp4_scales(p, b):
    """Load half of the MXFP4 scales of block `b` of 16 rows: ``2 ** (e - 128)`` for the exponent e, stored from `p` on.

    They are halved because the code book holds doubled values. The two smallest results are subnormal floats.
    """
    e = load_u8_as_i32(p + 16 * b)
    small = bits_to_float(shift_left(splat_int(0x200000), e))
    d = where_less(to_float(e), splat(2.0), small, bits_to_float(shift_left(sub_int(e, splat_int(1)), splat_int(23))))
    return d, d


@subroutine
def unpack_four_unscaled_nvfp4_codes(row, c):
    """Unpack the 4-bit NVFP4 codes of columns `c` to ``c + 3`` of the file row at `row` to one byte each, unscaled."""
    return load_four(row + c // 64 * 36 + 4 + c % 64 // 16 * 8 + c % 8) >> c % 16 // 8 * 4 & NIBBLE_MASK


@subroutine
def pack_nvfp4_scales(row, to, lane, s):
    for j in range(4):
        store_byte(to + s * 64 + 16 * j + lane, load_byte(row + s * 36 + j))


@subroutine
def e4m3_to_halved_f32(e):
    """Return half the value of each 8-bit float E4M3 as float32.

    NaN gives 0. The values equal `HALF_OF_E4M3`. They are halved because the code book holds doubled values.
    """
    e = and_int(e, splat_int(127))
    half = mul(bits_to_float(shift_left(e, splat_int(20))), splat(2.0**119))
    return where_less(to_float(e), splat(127.0), half, splat(0.0))


@subroutine
def load_nvfp4_scales(p, b):
    return e4m3_to_halved_f32(load_u8_as_i32(p + 32 * b)), e4m3_to_halved_f32(load_u8_as_i32(p + 32 * b + 16))


# --------------------------------------------------------------------------------------------- code books of 16


def _make_code_book_decoder(values: np.ndarray) -> tuple[Intrinsic, int, int]:
    """Make the decoder of 4-bit codes that are indices into a code book of 16 signed values.

    Returns:
        The code loader, the zero point that makes the values unsigned, and the largest code.
    """
    zero = -int(values.min())
    return (
        make_bit_plane_code_loader((4,), table=make_repeated_16_byte_lookup_table([int(v) + zero for v in values])),
        zero,
        int(values.max()) + zero,
    )


decode_iq4_nl_codes, IQ4_NL_ZERO_POINT, IQ4_NL_MAX_CODE = _make_code_book_decoder(IQ4_NL_CODE_BOOK)
decode_fp4_codes, FP4_ZERO_POINT, FP4_MAX_CODE = _make_code_book_decoder(FP4_VALUES_TIMES_2)


# ------------------------------------------------------------------------------------------------ types of 256 columns


@subroutine
def unpack_four_4_bit_codes_of_64(row, c):
    """Unpack columns `c` to ``c + 3`` of the 4-bit codes at `row`; 64 columns are in 32 bytes, low nibbles first."""
    return load_four(row + c // 64 * 32 + c % 32) >> c % 64 // 32 * 4 & NIBBLE_MASK


@subroutine
def unpack_single_bits_of_four_columns(row, c):
    """Unpack the bits of columns `c` to ``c + 3`` at `row` to one byte each.

    256 columns have one bit each in 32 bytes, lowest bits first.
    """
    return load_four(row + c % 32) >> c // 32 & BIT_MASK


@subroutine
def load_q2_k_codes(row, c):
    return unpack_four_2_bit_codes_of_128(row + 16, c)


@subroutine
def load_q3_k_codes(row, c):
    return unpack_four_2_bit_codes_of_128(row + 32, c) | unpack_single_bits_of_four_columns(row, c) << 2


@subroutine
def load_q4_k_codes(row, c):
    return unpack_four_4_bit_codes_of_64(row + 16, c)


@subroutine
def load_q5_k_codes(row, c):
    return unpack_four_4_bit_codes_of_64(row + 48, c) | unpack_single_bits_of_four_columns(row + 16, c) << 4


@subroutine
def unpack_four_q6_k_codes(row, c):
    """Unpack the 6-bit Q6_K codes of columns `c` to ``c + 3`` of the file row at `row` to one byte each."""
    low = load_four(row + c // 128 * 64 + c % 64) >> c % 128 // 64 * 4 & NIBBLE_MASK
    return low | unpack_four_2_bit_codes_of_128(row + 128, c) << 4


@subroutine
def load_iq4_xs_codes(row, c):
    return unpack_4_bit_codes_of_four_columns(row + 8, c, 0, 16)


@subroutine
def unpack_6_bit_k_scale_or_minimum(at, j):
    """Unpack a 6-bit scale or minimum of a Q4_K or Q5_K block from the 12 bytes at `at`.

    `j` from 0 to 7 is a scale, `j` from 8 to 15 a minimum, as in ``get_scale_min_k4`` of ggml.
    """
    half, i = j // 8 * 4, j % 8
    if i < 4:
        return load_byte(at + half + i) & 63
    low = load_byte(at + 4 + i)
    return (low >> half & 15) | load_byte(at + half + i - 4) >> 6 << 4


@subroutine
def pack_q45_k_scales_and_minima(row, to, lane, s):
    """Pack the scales and minima of the Q4_K or Q5_K file block at `row` to lane `lane` of the packed scales at `to`.

    Their order is: low nibbles of 8 scales and minima, high bits of pairs of blocks, two float16.
    """
    for pair in range(4):
        high = 0
        for k in range(2):
            j = 2 * pair + k
            scale = unpack_6_bit_k_scale_or_minimum(row + 4, j)
            minimum = unpack_6_bit_k_scale_or_minimum(row + 4, j + 8)
            store_byte(to + 16 * j + lane, (scale & 15) | (minimum & 15) << 4)
            high |= (scale >> 4 | minimum >> 4 << 2) << 4 * k
        store_byte(to + 128 + 16 * pair + lane, high)
    copy_f16_to_lane(row, to + 192, lane)
    copy_f16_to_lane(row + 2, to + 224, lane)


@subroutine
def load_high_bits_of_k_scale_and_minimum(at, j):
    """Load the high bits of block `j` of Q4_K or Q5_K rows: bits 0 and 1 of the scale, bits 2 and 3 of the minimum."""
    return shift_right(load_u8_as_i32(at + 128 + 16 * (j // 2)), splat_int(j % 2 * 4))


@subroutine
def load_q45_k_scales(p, b):
    """Load the Q4_K or Q5_K scales of block `b` (32 columns) of 16 rows from the packed scales at `p`, without minima.

    A scale is the product of the 6-bit scale of the 32 columns and the float16 scale of 256 columns."""
    low = and_int(load_u8_as_i32(p + 16 * b), splat_int(15))
    high = and_int(load_high_bits_of_k_scale_and_minimum(p, b), splat_int(3))
    d = mul(load_f16(p + 192), to_float(or_int(low, shift_left(high, splat_int(4)))))
    return d, d


@subroutine
def load_q45_k_biases(p, b):
    """Load minus the Q4_K or Q5_K minima (6 bits times float16) of block `b` of 16 rows; `p` is as for the scales."""
    low, four = shift_right(load_u8_as_i32(p + 16 * b), splat_int(4)), splat_int(4)
    high = and_int(shift_right(load_high_bits_of_k_scale_and_minimum(p, b), splat_int(2)), splat_int(3))
    m = mul(mul(load_f16(p + 224), splat(-1.0)), to_float(or_int(low, shift_left(high, four))))
    return m, m


@subroutine
def pack_q2_k_scales(row, to, lane, s):
    for j in range(16):
        store_byte(to + 16 * j + lane, load_byte(row + j))
    copy_f16_to_lane(row + 80, to + 256, lane)
    copy_f16_to_lane(row + 82, to + 288, lane)


@subroutine
def load_q2_k_scales(p, b):
    j, four = 2 * b, splat_int(15)
    d = load_f16(p + 256)
    first, second = and_int(load_u8_as_i32(p + 16 * j), four), and_int(load_u8_as_i32(p + 16 * j + 16), four)
    return mul(d, to_float(first)), mul(d, to_float(second))


@subroutine
def load_q2_k_biases(p, b):
    j, four = 2 * b, splat_int(4)
    m = mul(load_f16(p + 288), splat(-1.0))
    first, second = shift_right(load_u8_as_i32(p + 16 * j), four), shift_right(load_u8_as_i32(p + 16 * j + 16), four)
    return mul(m, to_float(first)), mul(m, to_float(second))


@subroutine
def pack_q3_k_scales_and_f16(row, to, lane, s):
    """Pack the 6-bit scales and the float16 of the Q3_K file block at `row` to lane `lane` of packed scales at `to`.

    Scales j and j + 8 share a byte for their low nibbles. Scales j, j + 4, j + 8 and j + 12 share a byte for their high
    bits.
    """
    for j in range(8):
        store_byte(to + 16 * j + lane, load_byte(row + 96 + j))
    for j in range(4):
        store_byte(to + 128 + 16 * j + lane, load_byte(row + 104 + j))
    copy_f16_to_lane(row + 108, to + 192, lane)


@subroutine
def load_q3_k_scales(p, b):
    """Load the Q3_K scales of block `b` of 16 rows from the packed scales at `p`: a vector for each 16 columns of it.

    A scale is ``d * (stored - 32)``, with a stored 6-bit number and the float16 d. It is computed as
    ``d * stored - 32 d``, which is exact, too.
    """
    low = shift_right(load_ints(p + 32 * (b % 4)), splat_int(b // 4 * 4))
    high = shift_right(load_ints(p + 128 + 32 * (b % 2)), splat_int(b // 2 * 2))
    high = shift_left(and_int(high, splat_int(0x03030303)), splat_int(4))
    whole = or_int(and_int(low, splat_int(0x0F0F0F0F)), high)
    d = load_f16(p + 192)
    less = mul(d, splat(-32.0))
    return fma(d, bytes_as_floats(whole), less), fma(d, next_bytes_as_floats(whole), less)


@subroutine
def pack_q6_k_scales(row, to, lane, s):
    for j in range(16):
        store_byte(to + 16 * j + lane, load_byte(row + 192 + j))
    copy_f16_to_lane(row + 208, to + 256, lane)


@subroutine
def load_q6_k_scales(p, b):
    j = 2 * b
    whole = load_f16(p + 256)
    d = mul(whole, to_float(load_16_i8_as_i32(p + 16 * j)))
    e = mul(whole, to_float(load_16_i8_as_i32(p + 16 * j + 16)))
    return d, e


@subroutine
def pack_iq4_xs_scales(row, to, lane, s):
    for j in range(4):
        store_byte(to + 16 * j + lane, load_byte(row + 4 + j))
    for j in range(2):
        store_byte(to + 64 + 16 * j + lane, load_byte(row + 2 + j))
    copy_f16_to_lane(row, to + 96, lane)


@subroutine
def load_iq4_xs_scales(p, b):
    low = shift_right(load_u8_as_i32(p + 16 * (b // 2)), splat_int(b % 2 * 4))
    high = shift_right(load_u8_as_i32(p + 64 + 16 * (b // 4)), splat_int(b % 4 * 2))
    whole = or_int(and_int(low, splat_int(15)), shift_left(and_int(high, splat_int(3)), splat_int(4)))
    d = mul(load_f16(p + 96), to_float(sub_int(whole, splat_int(32))))
    return d, d


load_one_scale = make_load_f16_scale(1)
_INTERLEAVED_BIASES = load_scales_next_to_biases, load_biases_next_to_scales
_format_with_iq4_codes = partial(make_bitplane_format, load_codes=decode_iq4_nl_codes, max_code=IQ4_NL_MAX_CODE)
_format_with_fp4_codes = partial(make_bitplane_format, load_codes=decode_fp4_codes, max_code=FP4_MAX_CODE)
_ALL_FORMATS = (
    make_bitplane_format(DType.Q4_0, (4,), load_q4_0_codes, make_pack_f16_scale(18), load_one_scale, 8),
    make_bitplane_format(DType.Q4_1, (4,), load_q4_1_codes, _make_pack_scale_and_bias(20), *_INTERLEAVED_BIASES),
    make_bitplane_format(DType.Q5_0, (4, 1), load_q5_0_codes, make_pack_f16_scale(22), load_one_scale, 16),
    make_bitplane_format(DType.Q5_1, (4, 1), load_q5_1_codes, _make_pack_scale_and_bias(24), *_INTERLEAVED_BIASES),
    make_bitplane_format(DType.Q8_0, (8,), load_q8_0_codes, make_pack_f16_scale(34), load_one_scale, 128),
    _format_with_fp4_codes(
        DType.MXFP4, (4,), load_mxfp4_codes, pack_mxfp4_scales, load_halved_mxfp4_scales, FP4_ZERO_POINT
    ),
    _format_with_fp4_codes(
        DType.NVFP4,
        (4,),
        unpack_four_unscaled_nvfp4_codes,
        pack_nvfp4_scales,
        load_nvfp4_scales,
        FP4_ZERO_POINT,
        has_half_block_scales=True,
    ),
    make_bitplane_format(
        DType.Q4_K, (4,), load_q4_k_codes, pack_q45_k_scales_and_minima, load_q45_k_scales, load_q45_k_biases
    ),
    make_bitplane_format(
        DType.Q5_K, (4, 1), load_q5_k_codes, pack_q45_k_scales_and_minima, load_q45_k_scales, load_q45_k_biases
    ),
    format_with_half_scales(DType.Q2_K, (2,), load_q2_k_codes, pack_q2_k_scales, load_q2_k_scales, load_q2_k_biases),
    format_with_half_scales(DType.Q3_K, (2, 1), load_q3_k_codes, pack_q3_k_scales_and_f16, load_q3_k_scales, 4),
    format_with_half_scales(DType.Q6_K, (4, 2), unpack_four_q6_k_codes, pack_q6_k_scales, load_q6_k_scales, 32),
    _format_with_iq4_codes(
        DType.IQ4_NL, (4,), load_q4_0_codes, make_pack_f16_scale(18), load_one_scale, IQ4_NL_ZERO_POINT
    ),
    _format_with_iq4_codes(
        DType.IQ4_XS, (4,), load_iq4_xs_codes, pack_iq4_xs_scales, load_iq4_xs_scales, IQ4_NL_ZERO_POINT
    ),
    *GRID_FORMATS,
    *TERNARY_FORMATS,
)
FORMATS: Mapping[DType, PackedFormat] = MappingProxyType({form.dtype: form for form in _ALL_FORMATS})
