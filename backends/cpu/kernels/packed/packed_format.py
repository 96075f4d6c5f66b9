"""One packed weight type: its layout, and the functions that pack and read it.

`format_table` lists all types.
"""

from __future__ import annotations

from functools import cache, partial

from .....graph.dtypes import DType
from .....graph.lazy_dataclass import dataclass
from ...compilation.compiler import Subroutine, subroutine
from ...simd.dot_tiles import make_bit_plane_code_loader
from ...simd.int8_dots import WeightCodeProperties
from ...simd.vectors import Intrinsic, load_byte, load_f16, load_four, mul, splat, store_byte, store_int

GROUP_ROWS, BLOCK_COLUMNS, UNIT_BLOCKS = 16, 32, 8
"""Rows of a group, columns of a block, blocks of a unit."""
NIBBLE_MASK, CRUMB_MASK, BIT_MASK = 0x0F0F0F0F, 0x03030303, 0x01010101
"""Masks of the lowest 4 bits, 2 bits and 1 bit of four bytes."""
MAX_UNEXPANDED_ROWS, MAX_UNEXPANDED_ROWS_OF_SLOW_CODES = 16, 8
"""Limits of `PackedFormat.max_unexpanded_rows`: slowly unpacked codes are expanded sooner."""


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """The packed layout of one quantised weight type, with the subroutines that pack and load it.

    A group is 16 rows, one lane each. A block is 32 columns of a group. A plane stores some bits of each code.

    Attributes:
        dtype: The quantised type.
        plane_bytes: Bytes of 32 columns of a group in the first and in the second plane of codes.
        pack_codes: ``(row, b, first, second, lane)`` copies the codes of columns 32 b to 32 b + 31 of a file row's unit
            to their lane of both planes.
        pack_scales: ``(row, to, lane, s)`` copies the scales of file block `s` to their lane.
        load_codes: ``(p, h)`` loads the codes of 32 columns from both planes.
        load_scales: ``(p, b)`` loads the scales of block `b` of a unit with packed scales at `p`, one row per SIMD
            lane: a vector for the first 16 columns of the block, and one for the last 16.
        load_biases: ``(p, b)`` loads the biases in the same form. With a zero point they are ``-zero_point * scale``.
        zero_point: The code of weight 0; 0 if biases are stored.
        has_half_block_scales: Whether the two scales of a block differ.
        max_code: The largest code.
        load_two_codes: ``(p, q)`` loads the codes of the blocks at `p` and at `q`, in one plane and whole units. It is
            None if loading both blocks together is not faster.
        max_unexpanded_rows: Products of at most this many activation rows unpack the codes anew for each of them.
    """

    dtype: DType
    plane_bytes: tuple[int, int]
    pack_codes: Subroutine
    pack_scales: Subroutine
    load_codes: Intrinsic
    load_scales: Subroutine
    load_biases: Subroutine
    zero_point: int
    has_half_block_scales: bool
    max_code: int
    load_two_codes: Intrinsic | None = None
    max_unexpanded_rows: int = MAX_UNEXPANDED_ROWS_OF_SLOW_CODES

    @property
    def dot_product_code_properties(self) -> WeightCodeProperties:
        """The properties of the codes for dot products: largest code, zero point, whether half blocks have scales."""
        return WeightCodeProperties(self.max_code, self.zero_point, self.has_half_block_scales)

    @property
    def blocks_per_load(self) -> int:
        """Number of blocks of a group that are loaded together, as that is fastest: 1 or 2."""
        return 1 if self.load_two_codes is None else 2

    @property
    def packed_block_bytes(self) -> int:
        """Bytes of one block of a group: the codes and scales of 32 columns of 16 rows."""
        return GROUP_ROWS * BLOCK_COLUMNS * self.dtype.block_bytes // self.dtype.block


def make_bitplane_format(
    dtype: DType,
    plane_bits: tuple[int, ...],
    load_four_codes: Subroutine,
    pack_scales: Subroutine,
    load_scales: Subroutine,
    biases: Subroutine | int,
    *,
    load_codes: Intrinsic | None = None,
    max_code: int | None = None,
    has_half_block_scales: bool = False,
) -> PackedFormat:
    """Make the packed format of a type with codes that are split into planes: memory with some bits of each code.

    Args:
        dtype: The quantised type.
        plane_bits: Bits of a code in each plane.
        load_four_codes: ``(row, c)`` returns the codes of columns `c` to c + 3 of a file row's unit, one byte each.
        pack_scales: `PackedFormat.pack_scales`.
        load_scales: `PackedFormat.load_scales`.
        biases: `PackedFormat.load_biases`, or the zero point of the codes.
        load_codes: `PackedFormat.load_codes`. If absent, the codes are the bits of all planes.
        max_code: The largest code. If absent, all bits may be set.
        has_half_block_scales: `PackedFormat.has_half_block_scales`.
    """
    zero = biases if isinstance(biases, int) else 0
    return PackedFormat(
        dtype,
        (64 * plane_bits[0], 64 * sum(plane_bits[1:])),
        make_pack_codes_into_bit_planes(load_four_codes, plane_bits),
        pack_scales,
        load_codes or make_bit_plane_code_loader(plane_bits),
        load_scales,
        biases if isinstance(biases, Subroutine) else make_load_negative_zero_point_biases(load_scales, zero),
        zero,
        has_half_block_scales,
        (1 << sum(plane_bits)) - 1 if max_code is None else max_code,
        None,
        MAX_UNEXPANDED_ROWS_OF_SLOW_CODES if has_half_block_scales or len(plane_bits) > 1 else MAX_UNEXPANDED_ROWS,
    )


def make_pack_codes_into_bit_planes(load_four_codes: Subroutine, plane_bits: tuple[int, ...]) -> Subroutine:
    """Make the subroutine that packs 32 codes of a row: their bits are split over one or two planes.

    The subroutine is ``(row, b, first, second, lane)``: it packs block `b` (32 columns) of the file row at `row` to
    lane `lane` of the planes at `first` and `second`.
    """
    low_bits = _make_copy_code_bits_to_plane(load_four_codes, 0, plane_bits[0])
    if len(plane_bits) == 1:

        def pack(row, b, first, second, lane):
            low_bits(row, b * BLOCK_COLUMNS, first + 4 * lane)
    else:
        high_bits = _make_copy_code_bits_to_plane(load_four_codes, *plane_bits)

        def pack(row, b, first, second, lane):
            low_bits(row, b * BLOCK_COLUMNS, first + 4 * lane)
            high_bits(row, b * BLOCK_COLUMNS, second + 4 * lane)

    return subroutine(pack)


def _make_copy_code_bits_to_plane(load_four_codes: Subroutine, first: int, width: int) -> Subroutine:
    """Make the subroutine ``(row, c, to)`` that copies `width` bits of each of 32 codes to one lane of a plane.

    The bits of a code begin at bit `first`. The first four columns become the lowest bits of the first vector.
    """
    fields, mask = 8 // width, ((1 << width) - 1) * 0x01010101

    def copy_bits(row, c, to):
        for vector in range(width):
            bits = 0
            for field in range(fields):
                bits |= (load_four_codes(row, c + 4 * (vector * fields + field)) >> first & mask) << field * width
            store_int(to + 64 * vector, bits)

    return subroutine(copy_bits)


@subroutine
def unpack_four_2_bit_codes_of_128(row, c):
    """Unpack the 2-bit codes of columns `c` to ``c + 3`` of the file row at `row` to one byte each.

    128 columns are in 32 bytes, lowest bits first.
    """
    return load_four(row + c // 128 * 32 + c % 32) >> c // 32 % 4 * 2 & CRUMB_MASK


@subroutine
def copy_f16_to_lane(row, to, lane):
    """Copy the float16 at `row` to lane `lane` of the 16 float16 at `to`."""
    store_byte(to + 2 * lane, load_byte(row))
    store_byte(to + 2 * lane + 1, load_byte(row + 1))


@cache
def make_load_negative_zero_point_biases(load_scales: Subroutine, zero_point: int) -> Subroutine:
    """Make the subroutine that computes the biases of a type with a fixed zero point: ``-zero_point * scale``.

    The subroutine is ``(p, b)``, as `load_scales`: the address of the packed scales, and the number of the block.
    """

    def biases(p, b):
        d, e = load_scales(p, b)
        return mul(d, splat(-zero_point)), mul(e, splat(-zero_point))

    return subroutine(biases)


def make_pack_f16_scale(block_bytes: int, scale_offset: int = 0) -> Subroutine:
    """Make the subroutine that packs the only float16 scale of each file block, which is at byte `scale_offset`.

    The subroutine is ``(row, to, lane, s)``: it copies the scale of file block `s` of the row at `row` to lane `lane`
    of the packed scales at `to`.
    """

    def split(row, to, lane, s):
        copy_f16_to_lane(row + s * block_bytes + scale_offset, to + s * 32, lane)

    return subroutine(split)


def make_load_f16_scale(blocks_per_scale: int) -> Subroutine:
    """Make the subroutine that loads float16 scales of 16 rows; each scale belongs to `blocks_per_scale` blocks.

    The subroutine is ``(p, b)``: the address of the packed scales, and the number of the block (32 columns).
    """

    def scales(p, b):
        d = load_f16(p + 32 * (b // blocks_per_scale))
        return d, d

    return subroutine(scales)


format_with_half_scales = partial(make_bitplane_format, has_half_block_scales=True)
"""`make_bitplane_format` for a type with two scales in 32 columns."""
