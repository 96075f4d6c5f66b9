"""Packed weights: the layout of each quantised type and the functions that read it.

1. A group is 16 rows, one lane each. A block is 32 columns. A unit is 8 blocks, or the remaining blocks.
2. A unit stores its codes, then its scales, in as many bytes as in a GGUF file. Packing only moves bits. A product
reads memory front to back, which processors prefetch best.
3. Codes are split into planes of 8, 4, 2 or 1 bits. Byte ``4 * row + k`` of a 64-byte vector holds column ``4 * j + k``
of the block. `j` counts first the bit fields of a byte, then the vectors.
4. Every weight is ``scale * code + bias``. Codes are unsigned. 16 or 32 columns share a scale and a bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

import numpy as np

from .....graph.dtypes import DType
from .....graph.lazy_dataclass import dataclass
from .....ops.quantisation import FP4_VALUES_TIMES_2, IQ4_NL_CODE_BOOK
from ...compiler import Part, part
from ...simd.bytes import table_of
from ...simd.dots import Codes
from ...simd.tiles import codes_of
from ...simd.vectors import (
    Intrinsic,
    and_int,
    bits_to_float,
    bytes_as_floats,
    fma,
    load_byte,
    load_four,
    load_half,
    load_ints,
    load_small,
    load_small_signed,
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

ROWS, COLUMNS, UNIT = 16, 32, 8
"""Rows of a group, columns of a block, blocks of a unit."""


@dataclass(frozen=True, slots=True)
class Format:
    """The packed layout of one quantised type.

    Attributes:
        plane_bits: Code bits in each plane.
        load_four_codes: ``(row, c)`` returns the codes of columns `c` to c + 3 of a file row's unit, one byte each.
        split_scales: ``(row, to, lane, s)`` copies the scales of file block `s` to their lane.
        load_codes: ``(p, h)`` loads the codes of 32 columns from both planes.
        load_scales: ``(p, b)`` loads the scales of columns 32 b to 32 b + 15, and of the 16 columns behind them.
        load_biases: ``(p, b)`` loads the biases likewise. With a zero point they are ``-zero_point * scale``.
        zero_point: The code of weight 0; 0 if biases are stored.
        has_half_block_scales: Whether the two scales of a block differ.
        max_code: The largest code.
    """

    dtype: DType
    planes: tuple[int, ...]
    four: Part
    split: Part
    codes: Intrinsic
    scales: Part
    biases: Part
    zero: int
    halves: bool
    largest: int

    @property
    def known(self) -> Codes:
        """Properties of the codes for dot products."""
        return Codes(self.largest, self.zero, self.halves)

    @property
    def nbytes(self) -> int:
        """Bytes of 32 columns of a group, codes and scales."""
        return ROWS * COLUMNS * self.dtype.block_bytes // self.dtype.block


# ----------------------------------------------------------------------------------------------- types of one block


NIBBLES, CRUMBS, BITS = 0x0F0F0F0F, 0x03030303, 0x01010101
"""Masks of the lowest 4 bits, 2 bits and 1 bit of four bytes."""


@part
def nibbles(row, c, head, nbytes):
    """Unpack 4 codes of a 32-column block. The low nibbles are the first 16 columns."""
    return load_four(row + c // 32 * nbytes + head + c % 16) >> c % 32 // 16 * 4 & NIBBLES


@part
def fifth_bits(row, c, head, nbytes):
    """Unpack the fifth bits of 4 columns from 4 bytes with a bit per column. A product moves four neighbours apart."""
    four = load_byte(row + c // 32 * nbytes + head + c % 32 // 8) >> c % 8 & 15
    return (four * 0x204081 & BITS) << 4


@part
def move_half(row, to, lane):
    """Copy a float16 to its lane of 16."""
    store_byte(to + 2 * lane, load_byte(row))
    store_byte(to + 2 * lane + 1, load_byte(row + 1))


@part
def q4_0_four(row, c):
    return nibbles(row, c, 2, 18)


@part
def q4_1_four(row, c):
    return nibbles(row, c, 4, 20)


@part
def q5_0_four(row, c):
    return nibbles(row, c, 6, 22) | fifth_bits(row, c, 2, 22)


@part
def q5_1_four(row, c):
    return nibbles(row, c, 8, 24) | fifth_bits(row, c, 4, 24)


@part
def q8_0_four(row, c):
    return load_four(row + c // 32 * 34 + 2 + c % 32) ^ 0x80808080


@part
def mxfp4_four(row, c):
    return nibbles(row, c, 1, 17)


def _one_scale(nbytes: int) -> Part:
    def split(row, to, lane, s):
        move_half(row + s * nbytes, to + s * 32, lane)

    return part(split)


def _scale_and_bias(nbytes: int) -> Part:
    """Make `PackedFormat.split_scales` for a scale and a bias. The biases follow the scales."""

    def split(row, to, lane, s):
        move_half(row + s * nbytes, to + s * 64, lane)
        move_half(row + s * nbytes + 2, to + s * 64 + 32, lane)

    return part(split)


def _centred(scales: Part, zero: int) -> Part:
    """Make the biases of a type with a fixed zero point: ``-zero * scale``."""

    def biases(p, b):
        d, e = scales(p, b)
        return mul(d, splat(-zero)), mul(e, splat(-zero))

    return part(biases)


@part
def half_scales(p, b):
    d = load_half(p + 32 * b)
    return d, d


@part
def scales_beside_biases(p, b):
    d = load_half(p + 64 * b)
    return d, d


@part
def biases_beside_scales(p, b):
    m = load_half(p + 64 * b + 32)
    return m, m


@part
def mxfp4_split(row, to, lane, s):
    store_byte(to + s * 16 + lane, load_byte(row + s * 17))


@part
def mxfp4_scales(p, b):
    """Load ``2 ** (e - 128)``, because the code book is doubled. The two smallest scales are subnormal."""
    e = load_small(p + 16 * b)
    small = bits_to_float(shift_left(splat_int(0x200000), e))
    d = where_less(to_float(e), splat(2.0), small, bits_to_float(shift_left(sub_int(e, splat_int(1)), splat_int(23))))
    return d, d


# --------------------------------------------------------------------------------------------- code books of 16


def _looked_up(values: np.ndarray) -> tuple[Intrinsic, int, int]:
    """Return the codes through a book of 16 signed values, the zero point that makes them unsigned, the top code."""
    zero = -int(values.min())
    return codes_of((4,), table=table_of([int(v) + zero for v in values])), zero, int(values.max()) + zero


nonlinear_codes, NONLINEAR_ZERO, NONLINEAR_LARGEST = _looked_up(IQ4_NL_CODE_BOOK)
mxfp4_codes, MXFP4_ZERO, MXFP4_LARGEST = _looked_up(FP4_VALUES_TIMES_2)


# ------------------------------------------------------------------------------------------------ types of 256 columns


@part
def nibbles_of_64(row, c):
    """Unpack 4 codes of 64 columns in 32 bytes. The low nibbles are the first half."""
    return load_four(row + c // 64 * 32 + c % 32) >> c % 64 // 32 * 4 & NIBBLES


@part
def crumbs_of_128(row, c):
    """Unpack 4 codes of 2 bits from 128 columns in 32 bytes, lowest bits first."""
    return load_four(row + c // 128 * 32 + c % 32) >> c // 32 % 4 * 2 & CRUMBS


@part
def bits_of_256(row, c):
    """Unpack 4 bits from 256 columns in 32 bytes, lowest bits first."""
    return load_four(row + c % 32) >> c // 32 & BITS


@part
def q2_k_four(row, c):
    return crumbs_of_128(row + 16, c)


@part
def q3_k_four(row, c):
    return crumbs_of_128(row + 32, c) | bits_of_256(row, c) << 2


@part
def q4_k_four(row, c):
    return nibbles_of_64(row + 16, c)


@part
def q5_k_four(row, c):
    return nibbles_of_64(row + 48, c) | bits_of_256(row + 16, c) << 4


@part
def q6_k_four(row, c):
    """Join nibbles of 128 columns in 64 bytes and their two high bits in 32 bytes."""
    low = load_four(row + c // 128 * 64 + c % 64) >> c % 128 // 64 * 4 & NIBBLES
    return low | crumbs_of_128(row + 128, c) << 4


@part
def iq4_xs_four(row, c):
    return nibbles(row + 8, c, 0, 16)


@part
def six_bits(at, j):
    """Unpack scale (`j` 0 to 7) or minimum (8 to 15) of Q4_K and Q5_K (``get_scale_min_k4`` of ggml)."""
    half, i = j // 8 * 4, j % 8
    if i < 4:
        return load_byte(at + half + i) & 63
    low = load_byte(at + 4 + i)
    return (low >> half & 15) | load_byte(at + half + i - 4) >> 6 << 4


@part
def k_split(row, to, lane, s):
    """Split Q4_K and Q5_K scales: low nibbles of 8 scales and minimums; high bits of block pairs; two float16."""
    for pair in range(4):
        high = 0
        for k in range(2):
            j = 2 * pair + k
            scale, minimum = six_bits(row + 4, j), six_bits(row + 4, j + 8)
            store_byte(to + 16 * j + lane, (scale & 15) | (minimum & 15) << 4)
            high |= (scale >> 4 | minimum >> 4 << 2) << 4 * k
        store_byte(to + 128 + 16 * pair + lane, high)
    move_half(row, to + 192, lane)
    move_half(row + 2, to + 224, lane)


@part
def six_high_bits(at, j):
    """Load the two high bits of the scale of block `j`, and above them the high bits of the minimum."""
    return shift_right(load_small(at + 128 + 16 * (j // 2)), splat_int(j % 2 * 4))


@part
def k_scales(p, b):
    """Return the 6-bit scale of 32 columns times the float16 of 256 columns, of Q4_K and Q5_K."""
    low, high = and_int(load_small(p + 16 * b), splat_int(15)), and_int(six_high_bits(p, b), splat_int(3))
    d = mul(load_half(p + 192), to_float(or_int(low, shift_left(high, splat_int(4)))))
    return d, d


@part
def k_biases(p, b):
    """Return the negative 6-bit minimum times the other float16."""
    low, four = shift_right(load_small(p + 16 * b), splat_int(4)), splat_int(4)
    high = and_int(shift_right(six_high_bits(p, b), splat_int(2)), splat_int(3))
    m = mul(mul(load_half(p + 224), splat(-1.0)), to_float(or_int(low, shift_left(high, four))))
    return m, m


@part
def q2_k_split(row, to, lane, s):
    for j in range(16):
        store_byte(to + 16 * j + lane, load_byte(row + j))
    move_half(row + 80, to + 256, lane)
    move_half(row + 82, to + 288, lane)


@part
def q2_k_scales(p, b):
    j, four = 2 * b, splat_int(15)
    d = load_half(p + 256)
    first, second = and_int(load_small(p + 16 * j), four), and_int(load_small(p + 16 * j + 16), four)
    return mul(d, to_float(first)), mul(d, to_float(second))


@part
def q2_k_biases(p, b):
    j, four = 2 * b, splat_int(4)
    m = mul(load_half(p + 288), splat(-1.0))
    first, second = shift_right(load_small(p + 16 * j), four), shift_right(load_small(p + 16 * j + 16), four)
    return mul(m, to_float(first)), mul(m, to_float(second))


@part
def q3_k_split(row, to, lane, s):
    """Split 6-bit scales. Low nibbles of blocks j, j + 8 share a byte; so do high bits of j, j + 4, j + 8, j + 12."""
    for j in range(8):
        store_byte(to + 16 * j + lane, load_byte(row + 96 + j))
    for j in range(4):
        store_byte(to + 128 + 16 * j + lane, load_byte(row + 104 + j))
    move_half(row + 108, to + 192, lane)


@part
def q3_k_scales(p, b):
    """Make both scales of a block from adjacent bytes. Subtracting 32 d after the product is exact, too."""
    low = shift_right(load_ints(p + 32 * (b % 4)), splat_int(b // 4 * 4))
    high = shift_right(load_ints(p + 128 + 32 * (b % 2)), splat_int(b // 2 * 2))
    high = shift_left(and_int(high, splat_int(0x03030303)), splat_int(4))
    whole = or_int(and_int(low, splat_int(0x0F0F0F0F)), high)
    d = load_half(p + 192)
    less = mul(d, splat(-32.0))
    return fma(d, bytes_as_floats(whole), less), fma(d, next_bytes_as_floats(whole), less)


@part
def q6_k_split(row, to, lane, s):
    for j in range(16):
        store_byte(to + 16 * j + lane, load_byte(row + 192 + j))
    move_half(row + 208, to + 256, lane)


@part
def q6_k_scales(p, b):
    j = 2 * b
    whole = load_half(p + 256)
    d = mul(whole, to_float(load_small_signed(p + 16 * j)))
    e = mul(whole, to_float(load_small_signed(p + 16 * j + 16)))
    return d, e


@part
def iq4_xs_split(row, to, lane, s):
    for j in range(4):
        store_byte(to + 16 * j + lane, load_byte(row + 4 + j))
    for j in range(2):
        store_byte(to + 64 + 16 * j + lane, load_byte(row + 2 + j))
    move_half(row, to + 96, lane)


@part
def iq4_xs_scales(p, b):
    low = shift_right(load_small(p + 16 * (b // 2)), splat_int(b % 2 * 4))
    high = shift_right(load_small(p + 64 + 16 * (b // 4)), splat_int(b % 4 * 2))
    whole = or_int(and_int(low, splat_int(15)), shift_left(and_int(high, splat_int(3)), splat_int(4)))
    d = mul(load_half(p + 96), to_float(sub_int(whole, splat_int(32))))
    return d, d


def _format(
    dtype: DType,
    widths: tuple[int, ...],
    four: Part,
    split: Part,
    scales: Part,
    biases: Part | int,
    *,
    codes: Intrinsic | None = None,
    largest: int | None = None,
    halves: bool = False,
) -> Format:
    """Make a format. `biases` is a number if the codes have a fixed zero point."""
    zero = biases if isinstance(biases, int) else 0
    of_blocks = biases if isinstance(biases, Part) else _centred(scales, zero)
    most = (1 << sum(widths)) - 1 if largest is None else largest
    return Format(dtype, widths, four, split, codes or codes_of(widths), scales, of_blocks, zero, halves, most)


_BESIDE = scales_beside_biases, biases_beside_scales
_HALVES = partial(_format, halves=True)
_NONLINEAR = partial(_format, codes=nonlinear_codes, largest=NONLINEAR_LARGEST)

_OF_E2M1 = partial(_format, codes=mxfp4_codes, largest=MXFP4_LARGEST)

_ALL = (
    _format(DType.Q4_0, (4,), q4_0_four, _one_scale(18), half_scales, 8),
    _format(DType.Q4_1, (4,), q4_1_four, _scale_and_bias(20), *_BESIDE),
    _format(DType.Q5_0, (4, 1), q5_0_four, _one_scale(22), half_scales, 16),
    _format(DType.Q5_1, (4, 1), q5_1_four, _scale_and_bias(24), *_BESIDE),
    _format(DType.Q8_0, (8,), q8_0_four, _one_scale(34), half_scales, 128),
    _OF_E2M1(DType.MXFP4, (4,), mxfp4_four, mxfp4_split, mxfp4_scales, MXFP4_ZERO),
    _format(DType.Q4_K, (4,), q4_k_four, k_split, k_scales, k_biases),
    _format(DType.Q5_K, (4, 1), q5_k_four, k_split, k_scales, k_biases),
    _HALVES(DType.Q2_K, (2,), q2_k_four, q2_k_split, q2_k_scales, q2_k_biases),
    _HALVES(DType.Q3_K, (2, 1), q3_k_four, q3_k_split, q3_k_scales, 4),
    _HALVES(DType.Q6_K, (4, 2), q6_k_four, q6_k_split, q6_k_scales, 32),
    _NONLINEAR(DType.IQ4_NL, (4,), q4_0_four, _one_scale(18), half_scales, NONLINEAR_ZERO),
    _NONLINEAR(DType.IQ4_XS, (4,), iq4_xs_four, iq4_xs_split, iq4_xs_scales, NONLINEAR_ZERO),
)
FORMATS: Mapping[DType, Format] = MappingProxyType({form.dtype: form for form in _ALL})
