"""Packed weights: what kernels need to know of each quantised type.

Rows lie in groups of 16, a lane each, columns in blocks of 32.  A group holds first its codes, then its scales, in as
many
bytes as the same rows take in a GGUF file: packing moves bits and loses none.  Codes are split into planes of 8, 4, 2
or 1
bits; byte ``4 * row + k`` of a 64-byte vector belongs to column ``4 * j + k`` of the block, where `j` counts first
the bit
fields of a byte and then the vectors.  Every weight is ``scale * code + bias`` with an unsigned code, and scale and
bias
shared by 16 or 32 columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from ....graph.dtypes import DType
from ....ops.quants import E2M1, NONLINEAR
from ..compiler import Part, part
from .codes import codes_2, codes_3, codes_4, codes_5, codes_6, codes_8
from .simd import (
    and_int,
    bits_to_float,
    load_byte,
    load_half,
    load_small,
    load_small_signed,
    look_up,
    mul,
    or_int,
    shift_left,
    shift_right,
    splat,
    splat_int,
    store_byte,
    sub_int,
    table_of,
    to_float,
    where_less,
)

ROWS, COLUMNS = 16, 32


@dataclass(frozen=True, slots=True)
class Format:
    """One quantised type.

    ``code(row, c)`` is the unsigned code of column `c` in a row of a file, ``split(row, to, lane, s)`` moves the
    scales of
    block `s` of a file to lane `lane` of theirs.  ``codes(p, h)`` are the 8 code vectors of 32 columns, from where
    these
    stand in the one or two planes; ``scales(p, b)`` are scale and bias of columns 32 b to 32 b + 15, and of the 16
    after
    them, which differ if `halves`.
    """

    name: str
    block: int
    planes: tuple[int, ...]
    code: Part
    split: Part
    codes: Part
    scales: Part
    halves: bool = False


# ----------------------------------------------------------------------------------------------- types of one block


@part
def nibble_code(row, c, head, nbytes):
    """Nibbles of a 32-column block: the low ones are its first 16 columns."""
    byte = load_byte(row + c // 32 * nbytes + head + c % 16)
    return byte >> 4 if c % 32 >= 16 else byte & 15


@part
def fifth_bit(row, c, head, nbytes):
    at = row + c // 32 * nbytes + head + c % 32 // 8
    return (load_byte(at) >> c % 8 & 1) << 4


@part
def move_half(row, to, lane):
    """Two bytes to their lane of 16."""
    store_byte(to + 2 * lane, load_byte(row))
    store_byte(to + 2 * lane + 1, load_byte(row + 1))


@part
def q4_0_code(row, c):
    return nibble_code(row, c, 2, 18)


@part
def q4_1_code(row, c):
    return nibble_code(row, c, 4, 20)


@part
def q5_0_code(row, c):
    return nibble_code(row, c, 6, 22) | fifth_bit(row, c, 2, 22)


@part
def q5_1_code(row, c):
    return nibble_code(row, c, 8, 24) | fifth_bit(row, c, 4, 24)


@part
def q8_0_code(row, c):
    return load_byte(row + c // 32 * 34 + 2 + c % 32) ^ 0x80


@part
def mxfp4_code(row, c):
    return nibble_code(row, c, 1, 17)


def _one_scale(nbytes: int) -> Part:
    def split(row, to, lane, s):
        move_half(row + s * nbytes, to + s * 32, lane)

    return part(split)


def _scale_and_bias(nbytes: int) -> Part:
    """Biases stand beside their scales."""

    def split(row, to, lane, s):
        move_half(row + s * nbytes, to + s * 64, lane)
        move_half(row + s * nbytes + 2, to + s * 64 + 32, lane)

    return part(split)


def _centred(zero: int) -> Part:
    def scales(p, b):
        d = load_half(p + 32 * b)
        m = mul(d, splat(-zero))
        return d, m, d, m

    return part(scales)


@part
def scale_and_bias(p, b):
    d, m = load_half(p + 64 * b), load_half(p + 64 * b + 32)
    return d, m, d, m


@part
def mxfp4_split(row, to, lane, s):
    store_byte(to + s * 16 + lane, load_byte(row + s * 17))


@part
def mxfp4_scales(p, b):
    """``2 ** (e - 128)``, since the table of values is doubled; the two smallest are subnormal."""
    e = load_small(p + 16 * b)
    small = bits_to_float(shift_left(splat_int(0x200000), e))
    d = where_less(to_float(e), splat(2.0), small, bits_to_float(shift_left(sub_int(e, splat_int(1)), splat_int(23))))
    m = mul(d, splat(-12.0))
    return d, m, d, m


# --------------------------------------------------------------------------------------------- code books of 16


def _looked_up(values: np.ndarray) -> tuple[Part, int]:
    """Codes through a book of 16 signed values; made unsigned by what is added, which is returned as well."""
    zero = -int(values.min())
    table = table_of([int(v) + zero for v in values])

    def codes(p, h):
        a, b, c, d, e, f, g, i = codes_4(p, h)
        t = table()
        return (
            look_up(t, a),
            look_up(t, b),
            look_up(t, c),
            look_up(t, d),
            look_up(t, e),
            look_up(t, f),
            look_up(t, g),
            look_up(t, i),
        )

    return part(codes), zero


nonlinear_codes, NONLINEAR_ZERO = _looked_up(NONLINEAR)
mxfp4_codes, _ = _looked_up(E2M1)


# ------------------------------------------------------------------------------------------------ types of 256 columns


@part
def nibble_of_64(row, c):
    """Nibbles of 64 columns in 32 bytes: the low ones are the first half."""
    byte = load_byte(row + c // 64 * 32 + c % 32)
    return byte >> 4 if c % 64 >= 32 else byte & 15


@part
def crumb_of_128(row, c):
    """Two bits of 128 columns in 32 bytes, lowest first."""
    return load_byte(row + c // 128 * 32 + c % 32) >> c // 32 % 4 * 2 & 3


@part
def bit_of_256(row, c):
    """One bit of 256 columns in 32 bytes, lowest first."""
    return load_byte(row + c % 32) >> c // 32 & 1


@part
def q2_k_code(row, c):
    return crumb_of_128(row + c // 256 * 84 + 16, c % 256)


@part
def q3_k_code(row, c):
    block = row + c // 256 * 110
    return crumb_of_128(block + 32, c % 256) | bit_of_256(block, c % 256) << 2


@part
def q4_k_code(row, c):
    return nibble_of_64(row + c // 256 * 144 + 16, c % 256)


@part
def q5_k_code(row, c):
    block = row + c // 256 * 176
    return nibble_of_64(block + 48, c % 256) | bit_of_256(block + 16, c % 256) << 4


@part
def q6_k_code(row, c):
    """Nibbles of 128 columns in 64 bytes, and two bits of them in 32."""
    block, i = row + c // 256 * 210, c % 256
    byte = load_byte(block + i // 128 * 64 + i % 64)
    return (byte >> 4 if i % 128 >= 64 else byte & 15) | crumb_of_128(block + 128, i) << 4


@part
def iq4_xs_code(row, c):
    return nibble_code(row + c // 256 * 136 + 8, c % 256, 0, 16)


@part
def six_bits(at, j):
    """Scale (`j` 0 to 7) or minimum (8 to 15) of the 12 bytes of Q4_K and Q5_K (``get_scale_min_k4`` of ggml)."""
    half, i = j // 8 * 4, j % 8
    if i < 4:
        return load_byte(at + half + i) & 63
    low = load_byte(at + 4 + i)
    return (low >> half & 15) | load_byte(at + half + i - 4) >> 6 << 4


def _k_split(nbytes: int) -> Part:
    """Of Q4_K and Q5_K: for 8 blocks the low nibbles of scale and minimum, for pairs of blocks their high bits; then
    the two float16."""

    def split(row, to, lane, s):
        block, at = row + s * nbytes, to + s * 256
        for pair in range(4):
            high = 0
            for k in range(2):
                j = 2 * pair + k
                scale, minimum = six_bits(block + 4, j), six_bits(block + 4, j + 8)
                store_byte(at + 16 * j + lane, (scale & 15) | (minimum & 15) << 4)
                high |= (scale >> 4 | minimum >> 4 << 2) << 4 * k
            store_byte(at + 128 + 16 * pair + lane, high)
        move_half(block, at + 192, lane)
        move_half(block + 2, at + 224, lane)

    return part(split)


@part
def k_scales(p, b):
    """Of Q4_K and Q5_K: 6-bit scale and minimum of 32 columns, each times a float16 of 256."""
    at, j = p + b // 8 * 256, b % 8
    low, high = load_small(at + 16 * j), shift_right(load_small(at + 128 + 16 * (j // 2)), splat_int(j % 2 * 4))
    four, three = splat_int(4), splat_int(3)
    scale = or_int(and_int(low, splat_int(15)), shift_left(and_int(high, three), four))
    minimum = or_int(shift_right(low, four), shift_left(and_int(shift_right(high, splat_int(2)), three), four))
    d = mul(load_half(at + 192), to_float(scale))
    m = mul(mul(load_half(at + 224), splat(-1.0)), to_float(minimum))
    return d, m, d, m


@part
def q2_k_split(row, to, lane, s):
    block, at = row + s * 84, to + s * 320
    for j in range(16):
        store_byte(at + 16 * j + lane, load_byte(block + j))
    move_half(block + 80, at + 256, lane)
    move_half(block + 82, at + 288, lane)


@part
def q2_k_scale(at, j):
    both = load_small(at + 16 * j)
    d = mul(load_half(at + 256), to_float(and_int(both, splat_int(15))))
    m = mul(mul(load_half(at + 288), splat(-1.0)), to_float(shift_right(both, splat_int(4))))
    return d, m


@part
def q2_k_scales(p, b):
    at, j = p + b // 8 * 320, b % 8 * 2
    d, m = q2_k_scale(at, j)
    e, n = q2_k_scale(at, j + 1)
    return d, m, e, n


@part
def q3_k_split(row, to, lane, s):
    """6-bit scales: low nibbles of blocks j and j + 8 share a byte, high bits of j, j + 4, j + 8 and j + 12, too."""
    block, at = row + s * 110, to + s * 224
    for j in range(8):
        store_byte(at + 16 * j + lane, load_byte(block + 96 + j))
    for j in range(4):
        store_byte(at + 128 + 16 * j + lane, load_byte(block + 104 + j))
    move_half(block + 108, at + 192, lane)


@part
def q3_k_scale(at, j):
    low = shift_right(load_small(at + 16 * (j % 8)), splat_int(j // 8 * 4))
    high = shift_right(load_small(at + 128 + 16 * (j % 4)), splat_int(j // 4 * 2))
    whole = or_int(and_int(low, splat_int(15)), shift_left(and_int(high, splat_int(3)), splat_int(4)))
    return mul(load_half(at + 192), to_float(sub_int(whole, splat_int(32))))


@part
def q3_k_scales(p, b):
    at, j = p + b // 8 * 224, b % 8 * 2
    d, e = q3_k_scale(at, j), q3_k_scale(at, j + 1)
    four = splat(-4.0)
    return d, mul(d, four), e, mul(e, four)


@part
def q6_k_split(row, to, lane, s):
    block, at = row + s * 210, to + s * 288
    for j in range(16):
        store_byte(at + 16 * j + lane, load_byte(block + 192 + j))
    move_half(block + 208, at + 256, lane)


@part
def q6_k_scales(p, b):
    at, j = p + b // 8 * 288, b % 8 * 2
    whole = load_half(at + 256)
    d = mul(whole, to_float(load_small_signed(at + 16 * j)))
    e = mul(whole, to_float(load_small_signed(at + 16 * j + 16)))
    zero = splat(-32.0)
    return d, mul(d, zero), e, mul(e, zero)


@part
def iq4_xs_split(row, to, lane, s):
    block, at = row + s * 136, to + s * 128
    for j in range(4):
        store_byte(at + 16 * j + lane, load_byte(block + 4 + j))
    for j in range(2):
        store_byte(at + 64 + 16 * j + lane, load_byte(block + 2 + j))
    move_half(block, at + 96, lane)


@part
def iq4_xs_scales(p, b):
    at, j = p + b // 8 * 128, b % 8
    low = shift_right(load_small(at + 16 * (j // 2)), splat_int(j % 2 * 4))
    high = shift_right(load_small(at + 64 + 16 * (j // 4)), splat_int(j % 4 * 2))
    whole = or_int(and_int(low, splat_int(15)), shift_left(and_int(high, splat_int(3)), splat_int(4)))
    d = mul(load_half(at + 96), to_float(sub_int(whole, splat_int(32))))
    m = mul(d, splat(-NONLINEAR_ZERO))
    return d, m, d, m


FORMATS: Mapping[DType, Format] = MappingProxyType(
    {
        DType.Q4_0: Format("q4_0", 32, (4,), q4_0_code, _one_scale(18), codes_4, _centred(8)),
        DType.Q4_1: Format("q4_1", 32, (4,), q4_1_code, _scale_and_bias(20), codes_4, scale_and_bias),
        DType.Q5_0: Format("q5_0", 32, (4, 1), q5_0_code, _one_scale(22), codes_5, _centred(16)),
        DType.Q5_1: Format("q5_1", 32, (4, 1), q5_1_code, _scale_and_bias(24), codes_5, scale_and_bias),
        DType.Q8_0: Format("q8_0", 32, (8,), q8_0_code, _one_scale(34), codes_8, _centred(128)),
        DType.IQ4_NL: Format("iq4_nl", 32, (4,), q4_0_code, _one_scale(18), nonlinear_codes, _centred(NONLINEAR_ZERO)),
        DType.MXFP4: Format("mxfp4", 32, (4,), mxfp4_code, mxfp4_split, mxfp4_codes, mxfp4_scales),
        DType.Q2_K: Format("q2_k", 256, (2,), q2_k_code, q2_k_split, codes_2, q2_k_scales, True),
        DType.Q3_K: Format("q3_k", 256, (2, 1), q3_k_code, q3_k_split, codes_3, q3_k_scales, True),
        DType.Q4_K: Format("q4_k", 256, (4,), q4_k_code, _k_split(144), codes_4, k_scales),
        DType.Q5_K: Format("q5_k", 256, (4, 1), q5_k_code, _k_split(176), codes_5, k_scales),
        DType.Q6_K: Format("q6_k", 256, (4, 2), q6_k_code, q6_k_split, codes_6, q6_k_scales, True),
        DType.IQ4_XS: Format("iq4_xs", 256, (4,), iq4_xs_code, iq4_xs_split, nonlinear_codes, iq4_xs_scales),
    }
)
