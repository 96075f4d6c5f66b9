"""Matrices for attention by AMX tiles: 32 x 32 numbers in bfloat16 terms, or in float32.

A matrix of two terms has four tiles: two of high terms, then two of low terms. A left matrix (keys, values) has 32 rows
of 32 numbers. A right matrix (queries, weights) has 16 rows of pairs for 32 tokens. Both sides must agree on the pairs:
for keys and queries they are columns 16 apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, reduce
from types import MappingProxyType

from .....graph.dtypes import DType
from ... import processor
from ...compiler import Part, part
from ...simd import amx
from ...simd.bf16 import store_rounded
from ...simd.order import turn
from ...simd.terms import store_terms, turn_shorts
from ...simd.vectors import LANES, load, load_bf16, load_half, load_long, mul, splat, store_long, sub, zeros
from ..amx import tiles
from ..cells import CELLS

SIDE = 32
"""Rows and columns of a matrix."""
TILE = amx.TILE
PANEL = 2 * TILE
"""Bytes of one term of a matrix: two tiles."""
SQUARE = 2 * PANEL
"""Bytes of a matrix of two terms, or of float32."""
ROW = 4 * SIDE
"""Bytes of a row of float32."""

A, B, TO, HOW = range(0, 32, 8)
STEP = 32
"""Bytes of a step, which adds the product of two matrix terms to a matrix of sums in registers.

`STEP_LEFT`, `STEP_RIGHT`, `STEP_TARGET` and `STEP_FLAGS` are the offsets of its words.
"""
FRESH, MORE, DONE = 1, 2, 4
"""Flags of a step: the sums begin at 0, the sums begin at the target, the sums are stored to the target."""
QUERIES, WEIGHTS = 3, 2
"""Terms of queries and of weights.

The error of a query counts times the size of a score. The error of a weight stays 2^-17 of it, while keys and values
have errors of at least 2^-12.
"""
store_query, store_weight = store_terms(QUERIES), store_terms(WEIGHTS)


EXACT = frozenset((DType.F16, DType.BF16, DType.Q4_0))
"""Types of keys and values that two terms represent exactly."""


def takes(k: DType, v: DType) -> bool:
    """Return whether matrices of these keys and values are exact."""
    return {k, v} <= EXACT


def terms_of(dtype: DType) -> int:
    """Return the terms of keys or values."""
    return 1 if dtype is DType.BF16 else 2


def rounding_of_weights(k: DType, v: DType) -> float | None:
    """Return the relative error of softmax weights in tiles, omitted products included; None without tiles."""
    return 2.0 ** -(8 * WEIGHTS) if processor.tiles() and takes(k, v) else None


@cache
def list_product(left: int, right: int) -> Part:
    """Make ``(end, a, b, to, first, last)``: append the steps of a product of matrices of `left` and `right` terms.

    Small terms come first. Products as small as the rounding of the right side are omitted. `first` is `CLEAR_SUMS`,
    `LOAD_SUMS`, or 0 to go on. `last` is `STORE_SUMS` or 0. The part returns the new end of the list.
    """
    pairs = [(i, j) for i in reversed(range(left)) for j in reversed(range(right)) if i + j < right]
    return reduce(
        _then, [_list_step(i * PANEL, j * PANEL, n == 0, n == len(pairs) - 1) for n, (i, j) in enumerate(pairs)]
    )


def _list_step(i: int, j: int, is_first: bool, is_last: bool) -> Part:
    """Make the part that appends one step, for terms at byte offsets `i` and `j` of the two matrices."""

    def list_step(end, a, b, to, first, last):
        store_long(end + A, a + i)
        store_long(end + B, b + j)
        store_long(end + TO, to)
        store_long(end + HOW, (first if is_first else 0) | (last if is_last else 0))
        return end + STEP

    return part(list_step)


def _then(before: Part, after: Part) -> Part:
    """Return a part that appends the steps of `before`, then of `after`."""

    def both(end, a, b, to, first, last):
        return after(before(end, a, b, to, first, last), a, b, to, first, last)

    return part(both)


@cache
def start_steps() -> Part:
    """Make ``(mine, step)``: load the sums and the terms of a step to registers."""
    unit = tiles()
    clear_0, clear_1, clear_2, clear_3 = unit.clear[:4]
    load_0, load_1, load_2, load_3, load_x, load_y, load_u, load_v = unit.load

    def start(mine, step):
        a, b, to, how = load_long(step + A), load_long(step + B), load_long(step + TO), load_long(step + HOW)
        if how & FRESH:
            clear_0(mine)
            clear_1(mine)
            clear_2(mine)
            clear_3(mine)
        elif how & MORE:
            load_0(mine, to, ROW)
            load_1(mine, to + amx.WIDTH, ROW)
            load_2(mine, to + 16 * ROW, ROW)
            load_3(mine, to + 16 * ROW + amx.WIDTH, ROW)
        load_x(mine, a, amx.WIDTH)
        load_u(mine, b, amx.WIDTH)
        load_v(mine, b + TILE, amx.WIDTH)
        load_y(mine, a + TILE, amx.WIDTH)

    return part(start)


@cache
def take_steps() -> Part:
    """Make ``(mine, first, last)``: run the begun steps `first` to `last`, and begin the step `last`.

    A load waits for an earlier store with the same low 12 address bits, and such a store waits for all products before
    it. So a step begins before vector code stores anything else.
    """
    unit, start = tiles(), start_steps()
    store_0, store_1, store_2, store_3 = unit.store[:4]
    multiply_0, multiply_1, multiply_2, multiply_3 = (
        unit.multiply(2 * row + group, 4 + row, 6 + group) for row in range(2) for group in range(2)
    )

    def take(mine, first, last):
        for step in range(first, last, STEP):
            multiply_0(mine)
            multiply_1(mine)
            multiply_2(mine)
            multiply_3(mine)
            if load_long(step + HOW) & DONE:
                to = load_long(step + TO)
                store_0(mine, to, ROW)
                store_1(mine, to + amx.WIDTH, ROW)
                store_2(mine, to + 16 * ROW, ROW)
                store_3(mine, to + 16 * ROW + amx.WIDTH, ROW)
            start(mine, step + STEP)

    return part(take)


@part
def end_steps(end):
    """Append a last step, which is begun but not run."""
    store_long(end + A, load_long(end - STEP + A))
    store_long(end + B, load_long(end - STEP + B))
    store_long(end + HOW, 0)


@cache
def rows_to_squares(dtype: DType, count: int) -> Part:
    """Make ``(source, step, rows, size, to, wide)``: copy `count` rows to `wide` matrices for each 32 of them.

    Rows are `step` bytes apart and have `size` columns. Missing numbers are zero.
    """
    some, store_pair = CELLS[dtype].some, store_terms(terms_of(dtype))

    def take_rows(source, step, rows, size, to, wide):
        for r in range(count):
            row, at = source + r * step, to + r // SIDE * wide * SQUARE + r % SIDE * amx.WIDTH
            for c in range(0, wide * SIDE, SIDE):
                x = some(row, c, size) if r < rows and c < size else zeros()
                y = some(row, c + LANES, size) if r < rows and c + LANES < size else zeros()
                store_pair(at, PANEL, x, y)
                at += SQUARE

    return part(take_rows)


@cache
def columns_to_squares(dtype: DType, count: int) -> Part:
    """Make ``(source, step, rows, size, to, wide, between)``: transpose `count` rows to matrices of 32 columns.

    The matrices of 32 columns are adjacent for all rows. `between` is scratch of one matrix.
    """
    turn_some, turn_whole, height = _turn_some(dtype), _TURN_WHOLE.get(dtype), count // SIDE
    is_short = turn_whole is not None
    turn_all = turn_whole or turn_some

    def take_columns(source, step, rows, size, to, wide, between):
        for c in range(0, wide * SIDE, LANES):
            square = to + c // SIDE * height * SQUARE + c % SIDE * amx.WIDTH
            for first in range(0, count, SIDE):
                if is_short and first + SIDE <= rows and c + LANES <= size:
                    turn_all(source + first * step, step, SIDE, c, size, square, between)
                else:
                    turn_some(source + first * step, step, rows - first, c, size, square, between)
                square += SQUARE

    return part(take_columns)


@cache
def _turn_some(dtype: DType) -> Part:
    """Make ``(source, step, rows, c, size, to, between)``: transpose 16 columns from `c` on of up to 32 rows."""
    some, terms = CELLS[dtype].some, terms_of(dtype)
    store_pair, end = store_terms(terms), terms * TILE

    def turn_some(source, step, rows, c, size, to, between):
        for r in range(0, SIDE, 2):
            x = some(source + r * step, c, size) if r < rows and c < size else zeros()
            y = some(source + (r + 1) * step, c, size) if r + 1 < rows and c < size else zeros()
            store_pair(between + r * amx.WIDTH // 2, TILE, x, y)
        for term in range(0, end, TILE):
            turn(between + term, amx.WIDTH, to, amx.WIDTH)
            to += PANEL

    return part(turn_some)


@part
def _turn_bf16(source, step, rows, c, size, to, between):
    """Transpose 16 columns of 32 bfloat16 rows."""
    turn_shorts(source + 2 * c, step, to)


@part
def _turn_halves(source, step, rows, c, size, to, between):
    """Transpose 16 columns of 32 float16 rows, and split them into two bfloat16 terms."""
    turn_shorts(source + 2 * c, step, between)
    for r in range(0, LANES * amx.WIDTH, amx.WIDTH):
        x, y = load_half(between + r), load_half(between + r + 32)
        store_rounded(to + r, x, y)
        x, y = sub(x, load_bf16(to + r)), sub(y, load_bf16(to + r + 32))
        store_rounded(to + r + PANEL, x, y)


_TURN_WHOLE: Mapping[DType, Part] = MappingProxyType({DType.F16: _turn_halves, DType.BF16: _turn_bf16})


@part
def lanes_to_square(rows, factor, to):
    """Convert 32 float32 rows of 32 tokens, times a factor, to a matrix of pairs 16 rows apart."""
    for r in range(0, 16 * ROW, ROW):
        for group in range(2):
            at, p = to + r // 2 + group * TILE, rows + r + group * amx.WIDTH
            store_query(at, PANEL, mul(load(p), splat(factor)), mul(load(p + 16 * ROW), splat(factor)))
