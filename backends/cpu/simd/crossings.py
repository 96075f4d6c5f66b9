"""Dot products of each of four rows with each of four other rows, which are loaded once."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from .order import fold_1, fold_2, fold_4, fold_8
from .tiles import bundle, members
from .vectors import ADDRESS, FLOATS, Intrinsic, fma, intrinsic, load, several, zeros

FOUR = 4
PRODUCTS = several(FLOATS, FOUR * FOUR)


@intrinsic(PRODUCTS)
def no_products(b):
    return bundle(b, [zeros.body(b)] * FOUR * FOUR)


@intrinsic(PRODUCTS, PRODUCTS, *[ADDRESS] * 4)
def add_products(b, sums, rows, step, others, pace):
    """Add the products of 16 columns; rows are `step` bytes apart, the other rows `pace` bytes."""
    left, right = _column(b, rows, step), _column(b, others, pace)
    pairs = [(x, y) for x in left for y in right]
    return bundle(b, [fma.body(b, x, y, s) for (x, y), s in zip(pairs, members(b, sums), strict=True)])


def _column(b: Any, first: Any, step: Any) -> list[Any]:
    places = [b.add(first, b.mul(step, ir.Constant(step.type, i))) for i in range(FOUR)]
    return [load.body(b, place) for place in places]


@intrinsic(FLOATS, PRODUCTS)
def crossed(b, sums):
    """Sum the lanes of each product: the first row with all others, then the second row."""
    folds: tuple[Intrinsic, ...] = (fold_8, fold_4, fold_2, fold_1)
    vectors = members(b, sums)
    for fold in folds:
        vectors = [fold.body(b, x, y) for x, y in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]
