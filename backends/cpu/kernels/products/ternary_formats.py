"""Packed weights of one to three values per code: TQ1_0, TQ2_0, Q1_0 and Q2_0."""

from __future__ import annotations

from .....graph.dtypes import DType
from ...compiler import subroutine
from ...simd.tiles import make_code_loader
from ...simd.vectors import load_byte
from .packed_format import (
    BIT_MASK,
    CRUMB_MASK,
    make_format,
    make_load_one_scale,
    make_split_one_scale,
    unpack_2_bits_of_128,
)


@subroutine
def load_q1_0_codes(row, c):
    """Unpack 4 bits; a product moves four neighbours apart."""
    return (load_byte(row + c // 128 * 18 + 2 + c % 128 // 8) >> c % 8 & 15) * 0x204081 & BIT_MASK


@subroutine
def load_q2_0_codes(row, c):
    """Unpack 4 codes of 2 bits from a byte."""
    four = load_byte(row + c // 64 * 18 + 2 + c % 64 // 4)
    return (four | four << 6 | four << 12 | four << 18) & CRUMB_MASK


TERNARY_FORMATS = (
    make_format(DType.TQ2_0, (2,), unpack_2_bits_of_128, make_split_one_scale(66, at=64), make_load_one_scale(8), 1),
    make_format(
        DType.Q1_0,
        (1,),
        load_q1_0_codes,
        make_split_one_scale(18),
        make_load_one_scale(4),
        1,
        codes=make_code_loader((1,), to=1),
        largest=2,
    ),
    make_format(DType.Q2_0, (2,), load_q2_0_codes, make_split_one_scale(18), make_load_one_scale(2), 1),
)
