"""Two vectors folded into one with one number for each: eight lanes hold the first number, eight lanes the second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from . import vectors as simd
from .vectors import ADDRESS, FLOATS, INTS, LANES, NOTHING, intrinsic, llvm_type

HALF_LANES = LANES // 2
_F, _I = llvm_type(FLOATS), llvm_type(INTS)


def _lanes(order: Sequence[int]) -> ir.Constant:
    return ir.Constant(ir.VectorType(ir.IntType(32), len(order)), list(order))


def _fold_two_vectors(b: Any, x: Any, y: Any, fold: Callable[[Any, Any], Any]) -> Any:
    low, high = ([*range(s, s + HALF_LANES), *range(s + LANES, s + LANES + HALF_LANES)] for s in (0, HALF_LANES))
    folded = fold(b.shuffle_vector(x, y, _lanes(low)), b.shuffle_vector(x, y, _lanes(high)))
    for distance in (4, 2, 1):
        folded = fold(folded, b.shuffle_vector(folded, folded, _lanes([i ^ distance for i in range(LANES)])))
    return folded


@intrinsic(FLOATS, FLOATS, FLOATS)
def fold_max_magnitude(b, x, y):
    """Fold to the largest magnitude of each vector; NaN if a lane is NaN, because its bits are the largest integer."""
    mask = ir.Constant(_I, [0x7FFFFFFF] * LANES)
    x, y = (b.and_(b.bitcast(v, _I), mask) for v in (x, y))
    return b.bitcast(_fold_two_vectors(b, x, y, lambda u, v: b.select(b.icmp_signed(">", u, v), u, v)), _F)


@intrinsic(INTS, INTS, INTS)
def fold_sum(b, x, y):
    """Fold to the sum of all lanes of each vector."""
    return _fold_two_vectors(b, x, y, b.add)


@intrinsic(FLOATS, FLOATS)
def splat_first(b, x):
    """Repeat the number of the first vector in every lane."""
    return b.shuffle_vector(x, x, _lanes([0] * LANES))


@intrinsic(FLOATS, FLOATS)
def splat_second(b, x):
    """Repeat the number of the second vector in every lane."""
    return b.shuffle_vector(x, x, _lanes([HALF_LANES] * LANES))


@intrinsic(FLOATS, FLOATS)
def sum_and_second(b, x):
    """Return the sum of both numbers in the first half, and the second number in the second half."""
    swapped = b.shuffle_vector(x, x, _lanes([*range(HALF_LANES, LANES), *range(HALF_LANES)]))
    return b.shuffle_vector(b.fadd(x, swapped), x, _lanes([*range(HALF_LANES), *range(LANES + HALF_LANES, 2 * LANES)]))


@intrinsic(NOTHING, ADDRESS, FLOATS)
def store_pair(b, a, x):
    """Store both numbers as float32."""
    simd.store_long.body(b, a, b.bitcast(b.shuffle_vector(x, x, _lanes([0, HALF_LANES])), ir.IntType(64)))
