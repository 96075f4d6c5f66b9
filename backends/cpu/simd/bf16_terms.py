"""Float32 as a sum of bfloat16 terms: the bfloat16 nearest to the number, then the bfloat16 nearest to the remainder.

Two terms have a relative error of at most 2^-17. Three terms have no error that float32 would show. Two terms are exact
for float16, because two times 8 bits hold the 11 bits of a float16.

>>> import numpy as np
>>> def nearest(x):
...     bits = np.float32(x).view(np.uint32)
...     return np.uint32((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)
>>> x = np.float32(np.float16(0.1))
>>> bool(nearest(x) == x), bool(nearest(x) + nearest(x - nearest(x)) == x)
(False, True)
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir

from .bf16_pairs import (
    extract_first_of_pairs,
    extract_second_of_pairs,
    round_and_concat_as_bf16,
    round_and_interleave_as_bf16,
    widen_bf16_to_low_and_high_halves,
)
from .permute_lanes import transpose_vectors
from .vectors import ADDRESS, FLOATS, LANES, NOTHING, Intrinsic, absolute, intrinsic

_SHORTS = ir.VectorType(ir.IntType(16), LANES)
_INTERLEAVED = ir.Constant(ir.VectorType(ir.IntType(32), 2 * LANES), [i + j for i in range(LANES) for j in (0, LANES)])
_PAIRS = ir.VectorType(ir.IntType(32), LANES)


@cache
def make_split_and_store_bf16_pair_terms(term_count: int) -> Intrinsic:
    """Make an intrinsic that splits two float32 vectors into bfloat16 terms and stores the terms as interleaved pairs.

    The intrinsic is ``(to, step, first, second)``. The 16 pairs of a term are consecutive, and terms are `step` bytes
    apart.
    """

    @intrinsic(NOTHING, ADDRESS, ADDRESS, FLOATS, FLOATS)
    def store_terms(b, to, step, first, second):
        for term in range(term_count):
            pairs = round_and_interleave_as_bf16(b, first, second)
            b.store(pairs, b.inttoptr(to, pairs.type.as_pointer()), align=4)
            if term < term_count - 1:
                first = b.fsub(first, extract_first_of_pairs.body(b, pairs))
                second = b.fsub(second, extract_second_of_pairs.body(b, pairs))
                to = b.add(to, step)

    return store_terms


@cache
def make_split_and_store_ordered_bf16_terms(term_count: int) -> Intrinsic:
    """Make an intrinsic that splits 32 float32 into bfloat16 terms and stores the numbers of each term in order.

    The intrinsic is ``(to, step, low, high)``. The 32 numbers of a term are consecutive, and terms are `step` bytes
    apart. A number that rounds to infinity has one term; the other terms are zero.
    """

    @intrinsic(NOTHING, ADDRESS, ADDRESS, FLOATS, FLOATS)
    def store_terms(b, to, step, low, high):
        for term in range(term_count):
            shorts = round_and_concat_as_bf16(b, low, high)
            b.store(shorts, b.inttoptr(to, shorts.type.as_pointer()), align=2)
            if term < term_count - 1:
                low, high = (
                    _zero_nonfinite(b, b.fsub(v, nearest))
                    for v, nearest in zip((low, high), widen_bf16_to_low_and_high_halves(b, shorts), strict=True)
                )
                to = b.add(to, step)

    return store_terms


def _zero_nonfinite(b: Any, vector: Any) -> Any:
    """Replace infinite and NaN lanes of a float32 vector by 0."""
    infinite = ir.Constant(vector.type, [float("inf")] * LANES)
    return b.select(
        b.fcmp_ordered("<", absolute.body(b, vector), infinite), vector, ir.Constant(vector.type, [0.0] * LANES)
    )


@intrinsic(NOTHING, ADDRESS, ADDRESS, ADDRESS)
def transpose_32x16_shorts(b, source, step, destination):
    """Transpose 32 rows of 16 numbers of 16 bits, `step` bytes apart, into 16 dense rows of 32 numbers."""

    def load_row(i: int) -> Any:
        at = b.add(source, b.mul(step, ir.Constant(source.type, i)))
        return b.load(b.inttoptr(at, _SHORTS.as_pointer()), align=2)

    pairs = [
        b.bitcast(b.shuffle_vector(load_row(i), load_row(i + 1), _INTERLEAVED), _PAIRS) for i in range(0, 2 * LANES, 2)
    ]
    for i, column in enumerate(transpose_vectors(b, pairs)):
        b.store(
            column, b.inttoptr(b.add(destination, ir.Constant(destination.type, 64 * i)), _PAIRS.as_pointer()), align=4
        )
