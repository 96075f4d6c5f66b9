"""Packed weights with code books: the types IQ1, IQ2 and IQ3. `code_books` reads the codes.

Indices, signs and high bits of indices of 32 columns lie in one plane. The scales follow the codes of 256 columns.
"""

from __future__ import annotations

from .....graph.dtypes import DType
from ...compilation.compiler import Subroutine, subroutine
from ...simd.vectors import (
    add_int,
    and_int,
    load_byte,
    load_f16,
    load_four,
    load_ints,
    load_u8_as_i32,
    load_u16_lanes,
    mul,
    mul_int,
    or_int,
    shift_left,
    shift_right,
    splat,
    splat_int,
    store_byte,
    store_int,
    to_float,
)
from .code_books import CodeBook, CodeBookLoaders, make_signed_code_book_loaders
from .iq1_codes import IQ1_ZERO, convert_iq1_entry_number_from_file, make_iq1_code_book_loaders
from .packed_format import GROUP_ROWS, UNIT_BLOCKS, PackedFormat, copy_f16_to_lane, make_load_negative_zero_point_biases

IQ2_MAGNITUDES, IQ3_XXS_MAGNITUDES = (8, 25, 43), (4, 12, 20, 28, 36, 44, 52, 62)
IQ3_S_MAGNITUDES = (1, 3, 5, 7, 9, 11, 13, 15)
"""The numbers of the code books, ascending."""


@subroutine
def spread_7_bit_fields_to_bytes(four):
    """Move four 7-bit fields of sign bits to the low 7 bits of four bytes, and the 4 bits above them to the top bits.

    IQ2_XXS and IQ3_XXS files store four fields of signs and a 4-bit scale in 32 bits. Kernels need bytes of signs.
    """
    fields = four & 0x7F | four << 1 & 0x7F00 | four << 2 & 0x7F0000 | four << 3 & 0x7F000000
    return fields | four >> 21 & 0x80 | four >> 14 & 0x8000 | four >> 7 & 0x800000 | four & 0x80000000


@subroutine
def collect_top_bits_of_4_bytes(v):
    """Return in each 32-bit lane the highest bits of the lane's four bytes, as a 4-bit number.

    A multiplication moves the bits side by side.
    """
    return shift_right(
        mul_int(and_int(shift_right(v, splat_int(7)), splat_int(0x01010101)), splat_int(0x10204080)), splat_int(28)
    )


@subroutine
def compute_odd_scale_factor(scale):
    """Return ``2 * scale + 1`` as float32, the factor for which a small integer scale stands."""
    return to_float(add_int(shift_left(scale, splat_int(1)), splat_int(1)))


@subroutine
def pack_iq2_xxs_codes(row, b, first, second, lane):
    """Pack the IQ2_XXS codes of block `b` (32 columns) of the file row at `row` to lane `lane` of the plane at `first`.

    A lane has four code book indices in one vector and four sign bytes in the next. The top bits of the sign bytes hold
    the scale. `second` is not used (`PackedFormat.pack_codes`).
    """
    store_int(first + 4 * lane, load_four(row + 2 + 8 * b))
    store_int(first + 64 + 4 * lane, spread_7_bit_fields_to_bytes(load_four(row + 6 + 8 * b)))


@subroutine
def pack_iq2_xs_codes(row, b, first, second, lane):
    """Pack the IQ2_XS codes of block `b` (32 columns) of the file row at `row` to lane `lane` of the plane at `first`.

    A lane has the low bytes of four code book indices in one vector and four sign bytes in the next. The top bit of a
    sign byte is the high bit of an index. `second` is not used (`PackedFormat.pack_codes`).
    """
    for i in range(4):
        high = load_byte(row + 3 + 8 * b + 2 * i)
        store_byte(first + 4 * lane + i, load_byte(row + 2 + 8 * b + 2 * i))
        store_byte(first + 64 + 4 * lane + i, high >> 1 | (high & 1) << 7)


@subroutine
def pack_iq2_s_codes(row, b, first, second, lane):
    store_int(first + 4 * lane, load_four(row + 2 + 4 * b))
    store_int(first + 64 + 4 * lane, load_four(row + 34 + 4 * b))
    store_byte(first + 128 + lane, load_byte(row + 66 + b))


@subroutine
def pack_iq3_xxs_indices_and_signs(row, b, first, second, lane):
    """Pack the IQ3_XXS codes of block `b` (32 columns) of the file row at `row` to lane `lane` of the plane at `first`.

    A lane has eight code book indices in two vectors and four sign bytes in the next. The top bits of the sign bytes
    hold the scale. `second` is not used (`PackedFormat.pack_codes`).
    """
    store_int(first + 4 * lane, load_four(row + 2 + 8 * b))
    store_int(first + 64 + 4 * lane, load_four(row + 6 + 8 * b))
    store_int(first + 128 + 4 * lane, spread_7_bit_fields_to_bytes(load_four(row + 66 + 4 * b)))


@subroutine
def pack_iq3_s_codes(row, b, first, second, lane):
    store_int(first + 4 * lane, load_four(row + 2 + 8 * b))
    store_int(first + 64 + 4 * lane, load_four(row + 6 + 8 * b))
    store_int(first + 128 + 4 * lane, load_four(row + 74 + 4 * b))
    store_byte(first + 192 + lane, load_byte(row + 66 + b))


def _make_pack_renumbered_iq1_codes(indices_offset: int, high_offset: int, bits: int) -> Subroutine:
    """Make the subroutine that packs the codes of an IQ1 type, with code book entries numbered as kernels need them.

    The subroutine is ``(row, b, first, second, lane)``: it packs block `b` (32 columns) of the file row at `row` to
    lane `lane` of the plane at `first`. `iq1_codes` explains the numbers.

    Args:
        indices_offset: The first byte of the low bytes of indices.
        high_offset: The first byte of the 16 bits for each block.
        bits: Bits from an index to the next in these 16 bits; the lowest three are the high bits of the index.
    """
    other_bits = 0xFFFF & ~sum(7 << bits * i for i in range(4))

    def pack(row, b, first, second, lane):
        fields = load_byte(row + high_offset + 2 * b) | load_byte(row + high_offset + 1 + 2 * b) << 8
        changed = fields & other_bits
        for i in range(4):
            number = convert_iq1_entry_number_from_file(
                load_byte(row + indices_offset + 4 * b + i) | (fields >> bits * i & 7) << 8
            )
            store_byte(first + 4 * lane + i, number)
            changed |= number >> 8 << bits * i
        store_byte(first + 64 + 2 * lane, changed)
        store_byte(first + 65 + 2 * lane, changed >> 8)

    return subroutine(pack)


@subroutine
def pack_f16_scale_only(row, to, lane, s):
    """Copy the float16 scale of the file row's unit at `row` to lane `lane` of the 16 packed scales at `to`.

    It is for types that store all smaller scales among the signs. `s` is not used (`PackedFormat.pack_scales`).
    """
    copy_f16_to_lane(row, to, lane)


def _make_pack_small_scales_and_f16(at: int, count: int) -> Subroutine:
    """Make the subroutine that packs the scales of file blocks with a float16 and `count` bytes of small scales.

    The subroutine is ``(row, to, lane, s)``: it packs the scales of the file block at `row` to lane `lane` at `to`. The
    float16 is at the start of the file block, and the bytes begin at byte `at`.
    """

    def split(row, to, lane, s):
        for j in range(count):
            store_byte(to + GROUP_ROWS * j + lane, load_byte(row + at + j))
        copy_f16_to_lane(row, to + GROUP_ROWS * count, lane)

    return subroutine(split)


def _make_load_scales_among_signs(plane_bytes: int, signs: int, factor: float) -> Subroutine:
    """Make the subroutine that loads 4-bit scales, which are the top bits of four sign bytes, as float32.

    The subroutine is ``(p, b)``: it returns the scales of block `b` of 16 rows. The float16 scales are at `p`, and the
    plane of codes is before them.

    Args:
        plane_bytes: Bytes of 32 columns of a group in the plane of codes.
        signs: Byte offset of the signs in the plane.
        factor: The factor of each scale.
    """

    def scales(p, b):
        small = collect_top_bits_of_4_bytes(load_ints(p - (UNIT_BLOCKS - b) * plane_bytes + signs))
        d = mul(mul(load_f16(p), splat(factor)), compute_odd_scale_factor(small))
        return d, d

    return subroutine(scales)


@subroutine
def load_iq2_half_block_scales(p, b):
    """Load the scales of block `b` of 16 IQ2_XS or IQ2_S rows: two vectors, for the first and the last 16 columns.

    `p` is the address of the packed scales. One byte of each row holds both small scales of a block.
    """
    both, d = load_u8_as_i32(p + 16 * b), mul(load_f16(p + 128), splat(0.125))
    return mul(d, compute_odd_scale_factor(and_int(both, splat_int(15)))), mul(
        d, compute_odd_scale_factor(shift_right(both, splat_int(4)))
    )


@subroutine
def load_iq3_s_scales(p, b):
    small = and_int(shift_right(load_u8_as_i32(p + 16 * (b // 2)), splat_int(b % 2 * 4)), splat_int(15))
    d = mul(load_f16(p + 64), compute_odd_scale_factor(small))
    return d, d


@subroutine
def load_iq1_s_scales_divided_by_8(p, b):
    """Load the scales of block `b` of 16 IQ1_S rows, divided by 8, because the codes are eight times the weights.

    `p` is the address of the float16 scales. A scale has 3 bits in the plane of codes before them, next to the bit that
    says whether the block adds or subtracts an eighth.
    """
    small = and_int(shift_right(load_u16_lanes(p - (UNIT_BLOCKS - b) * 96 + 64), splat_int(12)), splat_int(7))
    d = mul(mul(load_f16(p), splat(0.125)), compute_odd_scale_factor(small))
    return d, d


@subroutine
def pack_iq1_m_scales(row, to, lane, s):
    """Pack the scales of the IQ1_M file block at `row` to lane `lane` at `to`: 16 scales of 3 bits and a float16.

    In the file the float16 is the top bits of four 16-bit numbers; in the packed form it comes first. Then come two low
    bits of each scale, then the high bit of each scale. `s` is not used (`PackedFormat.pack_scales`).
    """
    whole, low, high = 0, 0, 0
    for j in range(4):
        four = load_byte(row + 48 + 2 * j) | load_byte(row + 49 + 2 * j) << 8
        whole |= four >> 12 << 4 * j
        for k in range(4):
            low |= (four >> 3 * k & 3) << 2 * (4 * j + k)
            high |= (four >> 3 * k + 2 & 1) << 4 * j + k
    for k in range(2):
        store_byte(to + 2 * lane + k, whole >> 8 * k)
        store_byte(to + 96 + 2 * lane + k, high >> 8 * k)
    store_int(to + 32 + 4 * lane, low)


@subroutine
def load_iq1_m_scales(p, b):
    d, one, three = mul(load_f16(p), splat(0.125)), splat_int(1), splat_int(3)
    low, high = shift_right(load_ints(p + 32), splat_int(4 * b)), shift_right(load_u16_lanes(p + 96), splat_int(2 * b))
    first = or_int(and_int(low, three), shift_left(and_int(high, one), splat_int(2)))
    second = or_int(
        and_int(shift_right(low, splat_int(2)), three), shift_left(and_int(shift_right(high, one), one), splat_int(2))
    )
    return mul(d, compute_odd_scale_factor(first)), mul(d, compute_odd_scale_factor(second))


def _make_code_book_format(
    dtype: DType,
    plane_bytes: int,
    pack_codes: Subroutine,
    loaders: CodeBookLoaders,
    pack_scales: Subroutine,
    load_scales: Subroutine,
    zero_point: int,
    *,
    has_half_block_scales: bool = False,
) -> PackedFormat:
    """Make the packed format of a type with a code book and codes from 0 to ``2 * zero_point``."""
    return PackedFormat(
        dtype,
        (plane_bytes, 0),
        pack_codes,
        pack_scales,
        loaders.load_one_block,
        load_scales,
        make_load_negative_zero_point_biases(load_scales, zero_point),
        zero_point,
        has_half_block_scales,
        2 * zero_point,
        loaders.load_two_blocks,
    )


def _make_book(dtype: DType, magnitudes: tuple[int, ...]) -> CodeBook:
    return CodeBook(dtype, magnitudes, magnitudes[-1])


IQ2_XXS_BOOK, IQ2_XS_BOOK, IQ2_S_BOOK = (
    _make_book(d, IQ2_MAGNITUDES) for d in (DType.IQ2_XXS, DType.IQ2_XS, DType.IQ2_S)
)
IQ3_XXS_BOOK, IQ3_S_BOOK = _make_book(DType.IQ3_XXS, IQ3_XXS_MAGNITUDES), _make_book(DType.IQ3_S, IQ3_S_MAGNITUDES)
GRID_FORMATS = (
    _make_code_book_format(
        DType.IQ1_S,
        96,
        _make_pack_renumbered_iq1_codes(2, 34, 3),
        make_iq1_code_book_loaders(3, has_one_shift=True),
        pack_f16_scale_only,
        load_iq1_s_scales_divided_by_8,
        IQ1_ZERO,
    ),
    _make_code_book_format(
        DType.IQ1_M,
        96,
        _make_pack_renumbered_iq1_codes(0, 32, 4),
        make_iq1_code_book_loaders(4, has_one_shift=False),
        pack_iq1_m_scales,
        load_iq1_m_scales,
        IQ1_ZERO,
        has_half_block_scales=True,
    ),
    _make_code_book_format(
        DType.IQ2_XXS,
        128,
        pack_iq2_xxs_codes,
        make_signed_code_book_loaders(IQ2_XXS_BOOK, 1, has_even_signs=True),
        pack_f16_scale_only,
        _make_load_scales_among_signs(128, 64, 0.125),
        IQ2_XXS_BOOK.zero,
    ),
    _make_code_book_format(
        DType.IQ2_XS,
        128,
        pack_iq2_xs_codes,
        make_signed_code_book_loaders(IQ2_XS_BOOK, 1, has_even_signs=True, has_index_bits=True),
        _make_pack_small_scales_and_f16(66, 8),
        load_iq2_half_block_scales,
        IQ2_XS_BOOK.zero,
        has_half_block_scales=True,
    ),
    _make_code_book_format(
        DType.IQ2_S,
        144,
        pack_iq2_s_codes,
        make_signed_code_book_loaders(IQ2_S_BOOK, 1, 2, has_even_signs=False),
        _make_pack_small_scales_and_f16(74, 8),
        load_iq2_half_block_scales,
        IQ2_S_BOOK.zero,
        has_half_block_scales=True,
    ),
    _make_code_book_format(
        DType.IQ3_XXS,
        192,
        pack_iq3_xxs_indices_and_signs,
        make_signed_code_book_loaders(IQ3_XXS_BOOK, 2, has_even_signs=True),
        pack_f16_scale_only,
        _make_load_scales_among_signs(192, 128, 0.25),
        IQ3_XXS_BOOK.zero,
    ),
    _make_code_book_format(
        DType.IQ3_S,
        208,
        pack_iq3_s_codes,
        make_signed_code_book_loaders(IQ3_S_BOOK, 2, 1, has_even_signs=False),
        _make_pack_small_scales_and_f16(106, 4),
        load_iq3_s_scales,
        IQ3_S_BOOK.zero,
    ),
)
