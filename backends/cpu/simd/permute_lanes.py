"""Reordering of lanes: every fourth lane, even and odd lanes, sums of lane pairs, transposes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from .vectors import (
    ADDRESS,
    FLOATS,
    INTS,
    LANES,
    NOTHING,
    Intrinsic,
    intrinsic,
    llvm_type,
    load,
    load_bf16,
    load_f16,
    load_first_lanes,
    store,
)

_I, _i32, _i64 = llvm_type(INTS), ir.IntType(32), llvm_type(ADDRESS)


def _make_two_vector_shuffle(order: Sequence[int]) -> Intrinsic:
    """Make an intrinsic that shuffles the lanes of two vectors into `order`; 16 and up is the second vector."""
    lanes = ir.Constant(_I, list(order))
    return intrinsic(FLOATS, FLOATS, FLOATS)(lambda b, x, y: b.shuffle_vector(x, y, lanes))


evens, odds = (_make_two_vector_shuffle(range(j, 2 * LANES, 2)) for j in (0, 1))
first_pairs, last_pairs = (
    _make_two_vector_shuffle([i + j for i in range(s, s + 8) for j in (0, LANES)]) for s in (0, 8)
)


def _make_every_fourth_lane_selection(first: int) -> Intrinsic:
    """Make an intrinsic that returns lanes `first`, `first` + 4, `first` + 8, ... of the 64 lanes of four vectors."""

    @intrinsic(FLOATS, FLOATS, FLOATS, FLOATS, FLOATS)
    def select_every_fourth(b, p, q, r, s):
        eight = ir.Constant(ir.VectorType(_i32, 8), [first + 4 * i for i in range(8)])
        low, high = b.shuffle_vector(p, q, eight), b.shuffle_vector(r, s, eight)
        return b.shuffle_vector(low, high, ir.Constant(_I, list(range(16))))

    return select_every_fourth


fourth_0, fourth_1, fourth_2, fourth_3 = (_make_every_fourth_lane_selection(j) for j in range(4))


def _make_pairwise_sum_of_two_vectors(distance: int) -> Intrinsic:
    """Make an intrinsic that adds each pair of lanes `distance` apart within x and within y, and returns 16 sums.

    The result alternates: `distance` sums of x, then `distance` sums of y, and so on.
    """

    @intrinsic(FLOATS, FLOATS, FLOATS)
    def add_lane_pairs(b, x, y):
        low = [i for i in range(2 * LANES) if not i & distance]
        halves = (ir.Constant(_I, [i + shift for i in low]) for shift in (0, distance))
        return b.fadd(*(b.shuffle_vector(x, y, lanes) for lanes in halves))

    return add_lane_pairs


fold_8, fold_4, fold_2, fold_1 = map(_make_pairwise_sum_of_two_vectors, (8, 4, 2, 1))


@intrinsic(NOTHING, ADDRESS, ADDRESS, ADDRESS, ADDRESS)
def transpose_16x16(b, source, step, destination, destination_step):
    """Transpose a 16 x 16 matrix of float32 in memory; rows are `step` and `destination_step` bytes apart."""

    def row_address(base: Any, stride: Any, i: int) -> Any:
        return b.add(base, b.mul(stride, ir.Constant(_i64, i)))

    for i, column in enumerate(
        transpose_vectors(b, [load.body(b, row_address(source, step, i)) for i in range(LANES)])
    ):
        store.body(b, row_address(destination, destination_step, i), column)


def _make_partial_transpose(load_row: Callable[[Any, Any, Any], Any]) -> Intrinsic:
    """Make an intrinsic that transposes up to 16 rows of up to 16 numbers into 16 rows of 16 float32.

    The intrinsic is ``(source, step, rows, columns, to)``. Source rows are `step` bytes apart, and the result is dense.
    The last row replaces missing rows. Zeros replace missing columns if `load_row` loads zeros.
    """

    @intrinsic(NOTHING, *[ADDRESS] * 5)
    def transpose_rows(b, source, step, rows, columns, to):
        last = b.sub(rows, ir.Constant(_i64, 1))
        numbers = [ir.Constant(_i64, i) for i in range(LANES)]
        present = [b.select(b.icmp_signed("<", i, last), i, last) for i in numbers]
        vectors = [load_row(b, b.add(source, b.mul(step, i)), columns) for i in present]
        for i, column in zip(numbers, transpose_vectors(b, vectors), strict=True):
            store.body(b, b.add(to, b.mul(i, ir.Constant(_i64, 64))), column)

    return transpose_rows


transpose_f32 = _make_partial_transpose(lambda b, a, columns: load_first_lanes.body(b, a, columns))
transpose_f16 = _make_partial_transpose(lambda b, a, _: load_f16.body(b, a))
transpose_bf16 = _make_partial_transpose(lambda b, a, _: load_bf16.body(b, a))


def transpose_vectors(b: Any, vectors: Sequence[Any]) -> list[Any]:
    """Transpose 16 vectors of 16 lanes: lane j of result i is lane i of vector j."""
    vectors, lanes = list(vectors), range(LANES)
    for distance in (8, 4, 2, 1):
        low = ir.Constant(_I, [i if not i & distance else i - distance + LANES for i in lanes])
        high = ir.Constant(_I, [i + distance if not i & distance else i + LANES for i in lanes])
        for i in (i for i in lanes if not i & distance):
            pair = vectors[i], vectors[i + distance]
            vectors[i], vectors[i + distance] = (b.shuffle_vector(*pair, order) for order in (low, high))
    return vectors
