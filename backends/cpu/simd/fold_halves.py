"""Reductions of two vectors at once: lanes 0 to 7 of the result hold one number, lanes 8 to 15 hold the other number.

The number of the first vector is in the lower half of the result, the number of the second vector in the upper half.
"""

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


def _fold_two_vectors(b: Any, x: Any, y: Any, combine: Callable[[Any, Any], Any]) -> Any:
    low, high = ([*range(s, s + HALF_LANES), *range(s + LANES, s + LANES + HALF_LANES)] for s in (0, HALF_LANES))
    folded = combine(b.shuffle_vector(x, y, _lanes(low)), b.shuffle_vector(x, y, _lanes(high)))
    for distance in (4, 2, 1):
        folded = combine(folded, b.shuffle_vector(folded, folded, _lanes([i ^ distance for i in range(LANES)])))
    return folded


@intrinsic(FLOATS, FLOATS, FLOATS)
def reduce_two_to_max_magnitude(b, x, y):
    """Reduce both vectors to their largest magnitudes, one in each half of the result.

    A magnitude is NaN if a lane is NaN. Magnitudes are compared as integers, because the bits of a NaN are larger
    than the bits of all numbers.
    """
    mask = ir.Constant(_I, [0x7FFFFFFF] * LANES)
    x, y = (b.and_(b.bitcast(v, _I), mask) for v in (x, y))
    return b.bitcast(_fold_two_vectors(b, x, y, lambda u, v: b.select(b.icmp_signed(">", u, v), u, v)), _F)


@intrinsic(INTS, INTS, INTS)
def reduce_two_to_sum(b, x, y):
    """Reduce both int32 vectors to their sums, one in each half of the result."""
    return _fold_two_vectors(b, x, y, b.add)


@intrinsic(FLOATS, FLOATS)
def splat_number_of_lower_half(b, halves):
    """Return a vector with lane 0 of `halves` in all 16 lanes: the number of the lower half (lanes 0 to 7)."""
    return b.shuffle_vector(halves, halves, _lanes([0] * LANES))


@intrinsic(FLOATS, FLOATS)
def splat_number_of_upper_half(b, halves):
    """Return a vector with lane 8 of `halves` in all 16 lanes.

    A folded vector has one number for each half: in lanes 0 and 8.
    """
    return b.shuffle_vector(halves, halves, _lanes([HALF_LANES] * LANES))


@intrinsic(FLOATS, FLOATS)
def add_upper_half_to_lower(b, halves):
    """Add the number in lanes 8 to 15 to lanes 0 to 7; lanes 8 to 15 stay unchanged."""
    swapped = b.shuffle_vector(halves, halves, _lanes([*range(HALF_LANES, LANES), *range(HALF_LANES)]))
    return b.shuffle_vector(
        b.fadd(halves, swapped), halves, _lanes([*range(HALF_LANES), *range(LANES + HALF_LANES, 2 * LANES)])
    )


@intrinsic(NOTHING, ADDRESS, FLOATS)
def store_one_number_of_each_half(b, address, halves):
    """Store two float32 at `address`: the number in lanes 0 to 7 of `halves`, then the number in lanes 8 to 15."""
    simd.store_long.body(
        b, address, b.bitcast(b.shuffle_vector(halves, halves, _lanes([0, HALF_LANES])), ir.IntType(64))
    )
