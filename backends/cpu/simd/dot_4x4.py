"""Dot products of each of four rows with each of four other rows; every row is loaded only once per 16 columns."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from .dot_tiles import fold_lanes, pack_vectors_into_array, unpack_vectors_from_array
from .vectors import ADDRESS, FLOATS, fma, format_tuple_type, intrinsic, load, zeros

CROSS_ROWS = 4
PRODUCTS_TYPE = format_tuple_type(FLOATS, CROSS_ROWS * CROSS_ROWS)


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
    return fold_lanes(b, unpack_vectors_from_array(b, sums))
