"""Float32 as a sum of bfloat16 terms: the nearest bfloat16, then the nearest to the remainder, and so on.

Two terms have an error of at most 2^-17 of a number, and three have none that float32 would show. Two terms are exact
for float16, because two times 8 bits hold its 11 bits.

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

from .bf16_pairs import first_of_pairs, round_to_bf16, round_to_bf16_pairs, second_of_pairs, widen_bf16
from .permute_lanes import transpose_vectors
from .vectors import ADDRESS, FLOATS, LANES, NOTHING, Intrinsic, absolute, intrinsic

_SHORTS = ir.VectorType(ir.IntType(16), LANES)
_INTERLEAVED = ir.Constant(ir.VectorType(ir.IntType(32), 2 * LANES), [i + j for i in range(LANES) for j in (0, LANES)])
_PAIRS = ir.VectorType(ir.IntType(32), LANES)


@cache
def store_bf16_terms(count: int) -> Intrinsic:
    """Make ``(to, step, first, second)``: store two vectors as bfloat16 pairs, `count` terms `step` bytes apart."""

    @intrinsic(NOTHING, ADDRESS, ADDRESS, FLOATS, FLOATS)
    def store_terms(b, to, step, first, second):
        for term in range(count):
            pairs = round_to_bf16_pairs(b, first, second)
            b.store(pairs, b.inttoptr(to, pairs.type.as_pointer()), align=4)
            if term < count - 1:
                first = b.fsub(first, first_of_pairs.body(b, pairs))
                second = b.fsub(second, second_of_pairs.body(b, pairs))
                to = b.add(to, step)

    return store_terms


@cache
def store_ordered_bf16_terms(count: int) -> Intrinsic:
    """Make ``(to, step, low, high)``: store 32 numbers as bfloat16 in order, `count` terms `step` bytes apart.

    A number that rounds to infinity has one term; its other terms are zero.
    """

    @intrinsic(NOTHING, ADDRESS, ADDRESS, FLOATS, FLOATS)
    def store_terms(b, to, step, low, high):
        for term in range(count):
            shorts = round_to_bf16(b, low, high)
            b.store(shorts, b.inttoptr(to, shorts.type.as_pointer()), align=2)
            if term < count - 1:
                low, high = (
                    _zero_nonfinite(b, b.fsub(v, nearest))
                    for v, nearest in zip((low, high), widen_bf16(b, shorts), strict=True)
                )
                to = b.add(to, step)

    return store_terms


def _zero_nonfinite(b: Any, v: Any) -> Any:
    """Return finite lanes unchanged, and zero for the others."""
    infinite = ir.Constant(v.type, [float("inf")] * LANES)
    return b.select(b.fcmp_ordered("<", absolute.body(b, v), infinite), v, ir.Constant(v.type, [0.0] * LANES))


@intrinsic(NOTHING, ADDRESS, ADDRESS, ADDRESS)
def transpose_16_bit(b, source, step, to):
    """Transpose 32 rows of 16 numbers of 16 bits, `step` bytes apart, into 16 dense rows."""

    def load_row(i: int) -> Any:
        at = b.add(source, b.mul(step, ir.Constant(source.type, i)))
        return b.load(b.inttoptr(at, _SHORTS.as_pointer()), align=2)

    pairs = [
        b.bitcast(b.shuffle_vector(load_row(i), load_row(i + 1), _INTERLEAVED), _PAIRS) for i in range(0, 2 * LANES, 2)
    ]
    for i, column in enumerate(transpose_vectors(b, pairs)):
        b.store(column, b.inttoptr(b.add(to, ir.Constant(to.type, 64 * i)), _PAIRS.as_pointer()), align=4)
