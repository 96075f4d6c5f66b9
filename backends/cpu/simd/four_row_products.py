"""Sums of products of rows, four at a time, as the gated delta net needs them.

- Dot products of each of four rows with each of four other rows: every row is loaded only once per 16 columns.
- Weighted sums of consecutive rows with four weights per row, so four sums at once. A lane is a column, so these sums
  need no reduction over lanes.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from .dot_tiles import emit_lane_sums_of_vectors, pack_vectors_into_array, unpack_vectors_from_array
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

CROSS_ROWS = 4
PRODUCTS_TYPE = format_tuple_type(FLOATS, CROSS_ROWS * CROSS_ROWS)
SCALARS_PER_ROW = 4
SUMS_TYPE = format_tuple_type(FLOATS, 4 * SCALARS_PER_ROW)
"""Type of 16 vectors of sums, the largest number; processors with few registers leave some vectors unused."""


@intrinsic(PRODUCTS_TYPE)
def zero_products(b):
    return pack_vectors_into_array(b, [zeros.body(b)] * CROSS_ROWS * CROSS_ROWS)


@intrinsic(PRODUCTS_TYPE, PRODUCTS_TYPE, *[ADDRESS] * 4)
def add_4x4_row_products(b, sums, rows, step, other_rows, other_step):
    """Add the products of 16 columns to 16 dot products: each of four rows with each of four other rows.

    `rows` and `other_rows` are addresses. Rows are `step` bytes apart, the other rows `other_step` bytes.
    """
    left, right = _load_column(b, rows, step), _load_column(b, other_rows, other_step)
    pairs = [(x, y) for x in left for y in right]
    return pack_vectors_into_array(
        b, [fma.body(b, x, y, s) for (x, y), s in zip(pairs, unpack_vectors_from_array(b, sums), strict=True)]
    )


def _load_column(b: Any, first: Any, step: Any) -> list[Any]:
    places = [b.add(first, b.mul(step, ir.Constant(step.type, i))) for i in range(CROSS_ROWS)]
    return [load.body(b, place) for place in places]


@intrinsic(FLOATS, PRODUCTS_TYPE)
def reduce_4x4_products(b, sums):
    """Reduce the 16 vectors of dot products to one vector with the sum of the lanes of each.

    Lanes 0 to 3 are the first row with each of the four other rows, lanes 4 to 7 the second row, and so on.
    """
    return emit_lane_sums_of_vectors(b, unpack_vectors_from_array(b, sums))


def _choose_rows_and_vectors_per_step() -> tuple[int, int]:
    """Choose how much `add_weighted_rows_to_four_sums` adds at once: the number of rows, and of vectors of each row.

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
    """Return the number of bytes of each row that one call of `add_weighted_rows_to_four_sums` adds."""
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
