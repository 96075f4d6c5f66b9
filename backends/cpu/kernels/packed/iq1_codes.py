"""Codes of the types IQ1: entries of 8 columns that are -1, 0 or 1, plus or minus an eighth.

A code is 9 plus eight times a weight. A block has 32 columns of 16 rows. Byte ``4 * row + i`` of a vector has the low
8 bits of index i of the row. 16 bits of the row have three more bits of each index, and the signs of eighths.

The 2048 entries are numbered anew, so that the last four columns are looked up in smaller tables. 128 bins hold
16 entries each. All entries of a bin have one of two second halves, and a bound tells which. The low 7 bits of the new
number are the bin. Bit 7 is the highest bit of the place in the bin, and the other bits are its low bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir

from .....graph.dtypes import DType
from ...simd.vectors import ADDRESS, BYTES, bytes_of, intrinsic, ints_of, llvm_type
from .code_books import (
    TABLE_BYTES,
    VECTOR_BYTES,
    CodeBook,
    CodeBookLoaders,
    emit_2_bit_levels_as_bytes,
    emit_bit_test_per_byte,
    emit_byte_of_each_lane,
    emit_byte_table_lookup,
    emit_constant_table_address,
    emit_fields_of_each_lane_as_4_bytes,
    emit_gather_of_codes,
    emit_index_high_bits,
    emit_load,
    emit_load_16_extended_to_i32,
    has_128_byte_permutes,
    make_one_and_two_block_loaders,
)

_B, _i16, _i64 = llvm_type(BYTES), ir.IntType(16), ir.IntType(64)
BIN_ENTRIES = 16
"""Entries of a bin; there are as many bins as bytes in a table of one lookup."""
IQ1_ZERO = 9
"""The code of 0, and half of the largest code."""
IQ1_BOOK = CodeBook(DType.IQ1_S, (-1, 0, 1), IQ1_ZERO)
"""The code book of IQ1_S and IQ1_M."""


@cache
def list_iq1_entries_in_kernel_order() -> np.ndarray:
    """Return the file numbers of all IQ1 code book entries, in the order in which kernels number the entries.

    A bin is 16 consecutive entries of this order. A second half is the levels of the last four columns of an entry. In
    this order a bin has at most two different second halves.
    """
    halves = IQ1_BOOK.pack_levels_into_two_bytes()[1]
    left = sorted((np.flatnonzero(halves == half) for half in np.unique(halves)), key=len)
    order = list[int]()
    while left:
        filled = len(order) % BIN_ENTRIES
        fits = (n for n, group in enumerate(left) if not filled or filled + len(group) >= BIN_ENTRIES)
        order += left.pop(next(fits)).tolist()
    return np.array(order)


def _compute_iq1_entry_numbers_in_kernels() -> np.ndarray:
    """Compute the number of each entry (eight weights) of the IQ1 code book in the tables of kernels.

    The result has the order of `list_iq1_entries_in_kernel_order`. A bin is 16 consecutive entries. The low 7 bits of a
    number are the bin of the entry, the other bits its place in the bin.
    """
    bins, places = np.divmod(np.arange(len(list_iq1_entries_in_kernel_order())), BIN_ENTRIES)
    return bins + TABLE_BYTES * (places // 8 + 2 * (places % 8))


def _reorder_iq1_table_for_kernels(table: np.ndarray) -> np.ndarray:
    """Reorder a table with one row for each IQ1 entry from the numbers of the file to the numbers of the kernels."""
    renumbered = np.empty_like(table)
    renumbered[_compute_iq1_entry_numbers_in_kernels()] = table[list_iq1_entries_in_kernel_order()]
    return renumbered


@intrinsic(ADDRESS, ADDRESS)
def convert_iq1_entry_number_from_file(b, number):
    """Convert the number of an IQ1 code-book entry from the order of the file to the order of the kernels."""
    numbers = np.empty(len(list_iq1_entries_in_kernel_order()), "<u2")
    numbers[list_iq1_entries_in_kernel_order()] = _compute_iq1_entry_numbers_in_kernels()
    at = b.add(
        emit_constant_table_address(b, "iq1_numbers", numbers.view(np.uint8)), b.shl(number, ir.Constant(_i64, 1))
    )
    return b.zext(emit_load(b, at, 0, _i16), _i64)


def _make_iq1_second_half_lookup_tables() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Build the tables that look up the last four levels of an IQ1 entry by its bin: 16 consecutive entries.

    The entries of a bin have at most two different halves (last four levels), each for a range of places. The three
    arrays have an element for each bin:

    - the half of its first entry,
    - the half of its last entry,
    - 16 times the place in the bin at which the second range begins (modulo 256).
    """
    halves = IQ1_BOOK.pack_levels_into_two_bytes()[1][list_iq1_entries_in_kernel_order()].reshape(-1, BIN_ENTRIES)
    first, last = halves[:, 0], halves[:, -1]
    bounds = (halves == first[:, None]).sum(1) % BIN_ENTRIES
    assert (np.where(np.arange(BIN_ENTRIES) < bounds[:, None], first[:, None], last[:, None]) == halves).all()
    return first, last, (BIN_ENTRIES * bounds).astype(np.uint8)


def make_iq1_code_book_loaders(bits: int, *, has_one_shift: bool) -> CodeBookLoaders:
    """Make the loaders of weight codes of an IQ1 type; an eighth is added to, or subtracted from, each weight.

    Args:
        bits: Bits from an index to the next in the 16 bits of a row; three of them are bits of the index.
        has_one_shift: Whether bit 15 is the sign of all eighths. Otherwise the sign follows the bits of an index.
    """
    of_shift = [15] * 4 if has_one_shift else [bits * i + 3 for i in range(4)]

    def permute_shifts(b: Any, p: Any) -> list[Any]:
        positive = b.bitcast(b.not_(emit_load_16_extended_to_i32(b, p, VECTOR_BYTES, _i16)), _B)
        return [b.and_(emit_fields_of_each_lane_as_4_bytes(b, positive, at - 1, 0), bytes_of(2)) for at in of_shift]

    def permute(b: Any, addresses: Sequence[Any]) -> list[list[Any]]:
        indices = [emit_load(b, p, 0) for p in addresses]
        high = [b.bitcast(emit_load_16_extended_to_i32(b, p, VECTOR_BYTES, _i16), _B) for p in addresses]
        high = [emit_fields_of_each_lane_as_4_bytes(b, x, -4, bits) for x in high]
        set_bits = [
            [emit_bit_test_per_byte(b, x, 7), *(emit_bit_test_per_byte(b, y, bit) for bit in (4, 5, 6))]
            for x, y in zip(indices, high, strict=True)
        ]
        halves = emit_byte_table_lookup(
            b, _reorder_iq1_table_for_kernels(IQ1_BOOK.pack_levels_into_two_bytes()[0]), indices, set_bits
        )
        first, last, bounds = (
            emit_byte_table_lookup(b, table, indices, set_bits) for table in _make_iq1_second_half_lookup_tables()
        )
        blocks = []
        for i, p in enumerate(addresses):
            place = b.or_(b.and_(indices[i], bytes_of(0x80)), b.and_(high[i], bytes_of(0x7F)))
            second = b.select(b.icmp_unsigned(">=", place, bounds[i]), last[i], first[i])
            levels, shifts = emit_2_bit_levels_as_bytes(b, (halves[i], second), 3), permute_shifts(b, p)
            blocks.append([b.or_(b.and_(x, bytes_of(0x18)), shifts[j // 2]) for j, x in enumerate(levels)])
        return blocks

    def gather_one(b: Any, p: Any) -> list[Any]:
        index, high = emit_load(b, p, 0), emit_load_16_extended_to_i32(b, p, VECTOR_BYTES, _i16)
        lanes = [
            b.or_(emit_byte_of_each_lane(b, index, i), emit_index_high_bits(b, high, bits * i, 3)) for i in range(4)
        ]
        found, positive = (
            emit_gather_of_codes(
                b, IQ1_BOOK, 8 * _reorder_iq1_table_for_kernels(IQ1_BOOK.load_entries_as_levels()), lanes
            ),
            b.not_(high),
        )
        shifts = [b.and_(b.lshr(positive, ints_of(at - 1)), ints_of(2)) for at in of_shift]
        shifts = [b.bitcast(b.mul(x, ints_of(0x01010101)), _B) for x in shifts]
        return [b.or_(x, shifts[j // 2]) for j, x in enumerate(found)]

    return make_one_and_two_block_loaders(
        lambda b, addresses: permute(b, addresses) if has_128_byte_permutes() else [gather_one(b, p) for p in addresses]
    )
