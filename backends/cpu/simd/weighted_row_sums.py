"""Weighted sums of consecutive rows, with four weights per row, so four sums at once.

A lane is a column, so the sums need no reduction over lanes.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from .dot_tiles import pack_vectors_into_array, unpack_vectors_from_array
from .vectors import (
    ADDRESS,
    FLOATS,
    MANY_REGISTERS,
    NOTHING,
    add,
    count_vector_registers,
    fma,
    format_tuple_type,
    intrinsic,
    llvm_type,
    load,
    splat_from,
    store,
    zeros,
)

SCALARS_PER_ROW = 4
SUMS_TYPE = format_tuple_type(FLOATS, 4 * SCALARS_PER_ROW)
"""Type of 16 vectors of sums, the largest number; processors with few registers leave some vectors unused."""


def _choose_rows_and_vectors_per_step() -> tuple[int, int]:
    """Choose the size of one step: the number of rows that it adds, and the number of vectors of each row.

    With two rows an instruction does not wait for the previous sum.
    """
    return (2, 2) if count_vector_registers() == MANY_REGISTERS else (1, 1)


def _address_constant(value: int) -> Any:
    return ir.Constant(llvm_type(ADDRESS), value)


@intrinsic(ADDRESS)
def rows_per_step(b):
    return _address_constant(_choose_rows_and_vectors_per_step()[0])


@intrinsic(ADDRESS)
def row_bytes_per_step(b):
    """Return the number of bytes of each row that one step adds."""
    return _address_constant(64 * _choose_rows_and_vectors_per_step()[1])


@intrinsic(SUMS_TYPE)
def zero_sums(b):
    return pack_vectors_into_array(b, [zeros.body(b)] * (4 * SCALARS_PER_ROW))


@intrinsic(SUMS_TYPE, SUMS_TYPE, *[ADDRESS] * 6)
def add_weighted_rows_to_four_sums(
    b, sums, rows_address, row_stride, first_weights, second_weights, third_weights, fourth_weights
):
    """Add the next rows, each times its weight, to four weighted sums.

    Rows begin at `rows_address` and are `row_stride` bytes apart. Each weights argument is the address of consecutive
    float32 weights, one per row.
    """
    rows, vectors = _choose_rows_and_vectors_per_step()
    known = unpack_vectors_from_array(b, sums)
    for row in range(rows):
        start = b.add(rows_address, b.mul(row_stride, _address_constant(row)))
        vectors_of_row = [load.body(b, b.add(start, _address_constant(64 * i))) for i in range(vectors)]
        for kind, numbers in enumerate((first_weights, second_weights, third_weights, fourth_weights)):
            by = splat_from.body(b, b.add(numbers, _address_constant(4 * row)))
            for i, vector in enumerate(vectors_of_row):
                place = (row * SCALARS_PER_ROW + kind) * vectors + i
                known[place] = fma.body(b, vector, by, known[place])
    return pack_vectors_into_array(b, known)


@intrinsic(NOTHING, ADDRESS, ADDRESS, SUMS_TYPE)
def store_four_weighted_sums(b, address, row_stride, sums):
    """Store the four weighted sums as rows that are `row_stride` bytes apart."""
    rows, vectors = _choose_rows_and_vectors_per_step()
    known = unpack_vectors_from_array(b, sums)
    for kind in range(SCALARS_PER_ROW):
        for i in range(vectors):
            parts = [known[(row * SCALARS_PER_ROW + kind) * vectors + i] for row in range(rows)]
            whole = parts[0] if rows == 1 else add.body(b, *parts)
            store.body(
                b, b.add(b.add(address, b.mul(row_stride, _address_constant(kind))), _address_constant(64 * i)), whole
            )
