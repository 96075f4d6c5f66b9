"""What attention by tiles of AMX multiplies: squares of 32 times 32 numbers in two bfloat16 each, or of float32.

A square of two terms has four tiles: two of high terms, then two of low ones.  One that is multiplied from the left, of
keys or values, has 32 rows of 32 numbers; one from the right, of queries or weights, 16 rows of pairs for 32 tokens.
Which numbers are pairs is free, as long as both sides agree: of keys and queries those 16 columns apart.
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
TILE = amx.TILE
PANEL = 2 * TILE
"""Bytes of one term of a square: two tiles."""
SQUARE = 2 * PANEL
"""Bytes of a square of two terms, or of float32."""
ROW = 4 * SIDE
"""Bytes of a row of float32."""

A, B, TO, HOW = range(0, 32, 8)
STEP = 32
"""Where a step has the terms of two squares whose product is added to a square of sums, in registers, and what else is
to be done; its bytes."""
FRESH, MORE, DONE = 1, 2, 4
"""Of the sums: before, they begin at zero, or at what is in their place; after, they are put there."""
QUERIES, WEIGHTS = 3, 2
"""Terms of float32 on the right: an error of a query counts times the size of a score, that of a weight stays 2^-17 of
it, where keys and values are rounded by 2^-12 of theirs at least."""
store_query, store_weight = store_terms(QUERIES), store_terms(WEIGHTS)


EXACT = frozenset((DType.F16, DType.BF16, DType.Q4_0))
"""Types of keys and values that two terms hold."""


def takes(k: DType, v: DType) -> bool:
    """Whether squares of these keys and values are exact."""
    return {k, v} <= EXACT


def terms_of(dtype: DType) -> int:
    """Of keys or values."""
    return 1 if dtype is DType.BF16 else 2


def rounding_of_weights(k: DType, v: DType) -> float | None:
    """The relative error of weights that meet values of these types in tiles, and of what is left out of products with
    them; None where there are no tiles."""
    return 2.0 ** -(8 * WEIGHTS) if processor.tiles() and takes(k, v) else None


@cache
def list_product(left: int, right: int) -> Part:
    """``(end, a, b, to, first, last)``: list the steps of the product of two squares, of so many terms, of which small
    ones come first, all but those as small as what terms on the right leave out.  `first` is FRESH, MORE or, if it adds
    to another, 0; `last` is DONE or 0.  Returns where the list ends."""
    pairs = [(i, j) for i in reversed(range(left)) for j in reversed(range(right)) if i + j < right]
    return reduce(
        _then, [_list_step(i * PANEL, j * PANEL, n == 0, n == len(pairs) - 1) for n, (i, j) in enumerate(pairs)]
    )


def _list_step(i: int, j: int, is_first: bool, is_last: bool) -> Part:
    def list_step(end, a, b, to, first, last):
        store_long(end + A, a + i)
        store_long(end + B, b + j)
        store_long(end + TO, to)
        store_long(end + HOW, (first if is_first else 0) | (last if is_last else 0))
        return end + STEP

    return part(list_step)


def _then(before: Part, after: Part) -> Part:
    def both(end, a, b, to, first, last):
        return after(before(end, a, b, to, first, last), a, b, to, first, last)

    return part(both)


@cache
def start_steps() -> Part:
    """``(mine, step)``: the sums and terms of a step to registers."""
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
    """``(mine, first, last)``: steps from the first, which has been started, to before the last, which is.

    A load waits for a store before it whose address has the same low 12 bits, and the store for all products before it.
    So a step is started before vector code stores anything more.
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
    """A last step, which is started only."""
    store_long(end + A, load_long(end - STEP + A))
    store_long(end + B, load_long(end - STEP + B))
    store_long(end + HOW, 0)


@cache
def rows_to_squares(dtype: DType, count: int) -> Part:
    """``(source, step, rows, size, to, wide)``: `count` rows of `size` columns, that are `step` bytes apart, to `wide`
    squares for each 32 of them; what is missing is zero."""
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
    """``(source, step, rows, size, to, wide, between)``: the same rows as columns, to a square for 32 columns, then one
    for the next 32 of `count` rows; by way of memory of a square."""
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
    """``(source, step, rows, c, size, to, between)``: 16 columns from `c` on, as many of 32 rows as there are."""
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
    turn_shorts(source + 2 * c, step, to)


@part
def _turn_halves(source, step, rows, c, size, to, between):
    turn_shorts(source + 2 * c, step, between)
    for r in range(0, LANES * amx.WIDTH, amx.WIDTH):
        x, y = load_half(between + r), load_half(between + r + 32)
        store_rounded(to + r, x, y)
        x, y = sub(x, load_bf16(to + r)), sub(y, load_bf16(to + r + 32))
        store_rounded(to + r + PANEL, x, y)


_TURN_WHOLE: Mapping[DType, Part] = MappingProxyType({DType.F16: _turn_halves, DType.BF16: _turn_bf16})


@part
def lanes_to_square(rows, factor, to):
    """32 rows of float32 for 32 tokens, times a factor, to a square of pairs 16 rows apart."""
    for r in range(0, 16 * ROW, ROW):
        for group in range(2):
            at, p = to + r // 2 + group * TILE, rows + r + group * amx.WIDTH
            store_query(at, PANEL, mul(load(p), splat(factor)), mul(load(p + 16 * ROW), splat(factor)))
