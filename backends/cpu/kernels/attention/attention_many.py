"""Prefill attention by vectors: blocks of 32 tokens times tiles of 64 keys, with online softmax. Lanes are tokens.

1. Copy the keys and values of a tile, so that rows are dense and padded.
2. Compute the scores ``K Q^T`` with `add_matrix_product`.
3. Update the softmax state of each token; scores become weights.
4. Add ``P V`` to the results with `add_matrix_product`.
"""

from __future__ import annotations

import math
from functools import cache

from .....graph.dtypes import DType
from ...compiler import Kernel, Part, part
from ...simd.order import turn
from ...simd.vectors import (
    LANES,
    add,
    bits_to_float,
    float_to_bits,
    fma,
    lanes_above,
    load,
    load_long,
    load_scalar,
    load_some_or,
    mul,
    no_ints,
    or_int,
    splat,
    splat_from,
    store,
    store_long,
    sub,
    where_nonzero,
    zeros,
    zeros_above,
    zeros_below,
)
from ...words import words
from ..amx import Operation, nothing
from ..cells import CELLS, Cells
from ..rows import put
from ..tickets import draw, settle
from .scores import (
    COMMON,
    HEAD,
    LOWEST,
    MASK,
    MINUS_INFINITY,
    NONE,
    ONE,
    OUT,
    SLOPE,
    K,
    Q,
    V,
    finished,
    greater,
    mask_lanes,
    power,
    round_up,
    seen_lanes,
    sink_of,
)

ARGS = words(f"{COMMON} span tickets")
"""The last words: tokens of a unit, and the work queue (`tickets.take_work_item`)."""

TILE = 64
"""Keys of a tile: one bit of a word each."""
BLOCK = 32
"""Tokens of a block, and columns of a small matrix: two vectors."""
ROWS = 8
"""Rows of a small matrix."""
JOBS = 8
"""Approximate number of heads times token blocks that use one copy of a tile."""


def span(jobs: int, units: int, shared: int, tokens: int, threads: int) -> int:
    """Choose the tokens of a unit: all units get the same number, a multiple of a block.

    At most `jobs` blocks use one copy of a key tile. Units are smaller if threads would have too few units.
    """
    blocks = math.ceil(tokens / BLOCK)
    fewest = math.ceil(4 * threads / max(1, units)) if threads > 1 else 1
    spans = max(math.ceil(blocks / max(1, jobs // shared)), min(blocks, fewest))
    return math.ceil(blocks / spans) * BLOCK


def scratch_bytes(rows: int, size: int, width: int) -> int:
    """Return the scratch bytes of a thread. `rows` is heads of a group times tokens of a unit."""
    deep, wide = math.ceil(size / LANES) * LANES, math.ceil(width / BLOCK) * BLOCK
    return 4 * (TILE * (deep + wide + 2 * BLOCK) + 16 + BLOCK + rows * (deep + wide + 2))


@part
def copy_rows(source, step, rows, size, factor, to, count, wide, otherwise):
    """Copy ``to[r, c] = factor * source[r, c]`` to `count` dense rows of `wide` numbers.

    `rows` rows of `size` numbers exist. The other numbers are ``factor * otherwise``.
    """
    for r in range(count):
        for c in range(0, wide, LANES):
            left, at = size - c, source + r * step + 4 * c
            if r >= rows or left <= 0:
                value = otherwise
            elif left >= LANES:
                value = load(at)
            else:
                value = load_some_or(at, left, otherwise)
            store(to + 4 * (r * wide + c), mul(value, splat(factor)))


@part
def add_products(a, row, column, b, step, n, to, pace, fades):
    """Compute ``to[j] = fades[j] * to[j] + sum over i of a[j, i] * b[i]`` for 8 rows j of 32 columns.

    Bytes: `row` and `column` between elements of a, `step` and `pace` between rows of b and of `to`. If `fades` is 0,
    the old `to` is not added.
    """
    p0, p1, p2, p3, p4, p5, p6, p7 = zeros(), zeros(), zeros(), zeros(), zeros(), zeros(), zeros(), zeros()
    q0, q1, q2, q3, q4, q5, q6, q7 = p0, p1, p2, p3, p4, p5, p6, p7
    if fades != 0:
        p0, q0 = two_faded(to, fades)
        p1, q1 = two_faded(to + pace, fades + 4)
        p2, q2 = two_faded(to + 2 * pace, fades + 8)
        p3, q3 = two_faded(to + 3 * pace, fades + 12)
        p4, q4 = two_faded(to + 4 * pace, fades + 16)
        p5, q5 = two_faded(to + 5 * pace, fades + 20)
        p6, q6 = two_faded(to + 6 * pace, fades + 24)
        p7, q7 = two_faded(to + 7 * pace, fades + 28)
    for _ in range(n):
        x, y = load(b), load(b + 64)  # p[j] += a[j, i] * b[i, :16], q[j] += a[j, i] * b[i, 16:]
        u, v = splat_from(a), splat_from(a + row)
        p0, q0, p1, q1 = fma(x, u, p0), fma(y, u, q0), fma(x, v, p1), fma(y, v, q1)
        u, v = splat_from(a + 2 * row), splat_from(a + 3 * row)
        p2, q2, p3, q3 = fma(x, u, p2), fma(y, u, q2), fma(x, v, p3), fma(y, v, q3)
        u, v = splat_from(a + 4 * row), splat_from(a + 5 * row)
        p4, q4, p5, q5 = fma(x, u, p4), fma(y, u, q4), fma(x, v, p5), fma(y, v, q5)
        u, v = splat_from(a + 6 * row), splat_from(a + 7 * row)
        p6, q6, p7, q7 = fma(x, u, p6), fma(y, u, q6), fma(x, v, p7), fma(y, v, q7)
        a += column
        b += step
    put_two(to, p0, q0)
    put_two(to + pace, p1, q1)
    put_two(to + 2 * pace, p2, q2)
    put_two(to + 3 * pace, p3, q3)
    put_two(to + 4 * pace, p4, q4)
    put_two(to + 5 * pace, p5, q5)
    put_two(to + 6 * pace, p6, q6)
    put_two(to + 7 * pace, p7, q7)


@part
def two_faded(rows, fade):
    """Load a row of 32 numbers as two vectors: ``fade * rows[c]``."""
    f = splat_from(fade)
    return mul(load(rows), f), mul(load(rows + 64), f)


@part
def put_two(to, x, y):
    """Store two vectors as a row of 32 numbers."""
    store(to, x)
    store(to + 64, y)


@part
def survey(seen, step, tokens, s, keys, to):
    """Find the visible keys of a tile for each 8 tokens, one word of bits per 8 tokens at `to`.

    Returns:
        The bits of keys that any token sees, and whether the mask is zero throughout.
    """
    marks, union, mask = no_ints(), 0, seen + 4 * s
    whole = keys - s >= TILE and tokens >= BLOCK
    for first in range(0, BLOCK, ROWS):
        bits = 0
        for r in range(0, TILE, LANES):
            tops = splat(MINUS_INFINITY)
            if whole:
                for t in range(first, first + ROWS):
                    lanes = load(mask + t * step + 4 * r)
                    marks, tops = or_int(marks, float_to_bits(lanes)), greater(lanes, tops)
            else:
                for t in range(first, min(tokens, first + ROWS)):
                    lanes = mask_lanes(seen + t * step, s + r, keys)
                    marks, tops = or_int(marks, float_to_bits(lanes)), greater(lanes, tops)
            bits |= seen_lanes(tops) << r
        store_long(to + first, bits)
        union |= bits
    return union, lanes_above(where_nonzero(bits_to_float(marks), splat(ONE), zeros()), zeros()) == 0


@part
def reach(bits):
    """Return the range of visible keys of a tile, rounded outwards to multiples of eight."""
    return zeros_below(bits) // ROWS * ROWS, (TILE - zeros_above(bits) + ROWS - 1) // ROWS * ROWS


@part
def soften(p, hidden, low, high, cap, slope, state, fades):
    """Replace the scores of a tile by weights, update the state, and store the factors of earlier sums in `fades`.

    `hidden` is the mask with tokens as lanes, or 0. The state holds the highest score and the sum of weights of each
    token.
    """
    before, other = load(state), load(state + 64)
    x, y, h, g = before, other, zeros(), zeros()
    for r in range(4 * BLOCK * low, 4 * BLOCK * high, 4 * BLOCK):
        u, v = load(p + r), load(p + r + 64)
        if cap > NONE or hidden != 0:
            if hidden != 0:
                h, g = load(hidden + r), load(hidden + r + 64)
            u, v = finished(u, h, cap, slope), finished(v, g, cap, slope)
            put_two(p + r, u, v)
        x, y = greater(u, x), greater(v, y)
    put_two(state, x, y)
    h, g = power(sub(before, x)), power(sub(other, y))
    put_two(fades, h, g)
    sums, more = mul(load(state + 128), h), mul(load(state + 192), g)
    for r in range(4 * BLOCK * low, 4 * BLOCK * high, 4 * BLOCK):
        u, v = power(sub(load(p + r), x)), power(sub(load(p + r + 64), y))
        put_two(p + r, u, v)
        sums, more = add(sums, u), add(more, v)
    put_two(state + 128, sums, more)


@part
def places(a, thread):
    """Return the addresses of a thread's scratch.

    Tiles of keys, values, scores and mask; bits of visible keys; fades; then queries, states and results of every block
    and head.
    """
    deep, wide = round_up(ARGS.size(a), LANES), round_up(ARGS.width(a), BLOCK)
    rows = ARGS.shared(a) * ARGS.span(a)
    keys = ARGS.scratch(a) + thread * ARGS.scratch_bytes(a)
    values = keys + 4 * TILE * deep
    p = values + 4 * TILE * wide
    hidden = p + 4 * TILE * BLOCK
    bits = hidden + 4 * TILE * BLOCK
    fades = bits + 64
    queries = fades + 4 * BLOCK
    states = queries + 4 * rows * deep
    return keys, values, p, hidden, bits, fades, queries, states, states + 8 * rows


@part
def take_queries(a, heads, start, end, place):
    """Load the scaled queries with tokens as lanes. Set states to the sink alone and results to 0."""
    keys, _, _, _, _, _, queries, states, results = place
    step, size, deep = ARGS.q_step(a), ARGS.size(a), round_up(ARGS.size(a), LANES)
    for first in range(start, end, BLOCK):
        for h in range(ARGS.shared(a)):
            head = heads + h * HEAD
            query, sink = load_long(head + Q) + first * step, sink_of(head)
            copy_rows(query, step, end - first, size, ARGS.factor(a), keys, BLOCK, deep, zeros())
            for c in range(0, deep, LANES):
                to = queries + 4 * BLOCK * c
                turn(keys + 4 * c, 4 * deep, to, 4 * BLOCK)
                turn(keys + 4 * (LANES * deep + c), 4 * deep, to + 64, 4 * BLOCK)
            top = splat(max(sink, LOWEST))
            put_two(states, top, top)
            put_two(states + 128, power(sub(splat(sink), top)), power(sub(splat(sink), top)))
            for c in range(0, 4 * BLOCK * round_up(ARGS.width(a), BLOCK), 64):
                store(results + c, zeros())
            queries += 4 * BLOCK * deep
            states += 8 * BLOCK
            results += 4 * BLOCK * round_up(ARGS.width(a), BLOCK)


def _take_rows(cells: Cells) -> Part:
    """Make ``(source, step, rows, size, to, wide)``: copy the rows of a tile to dense, zero-padded rows of `wide`."""
    some = cells.some

    def take_rows(source, step, rows, size, to, wide):
        for r in range(TILE):
            for c in range(0, wide, LANES):
                row = source + r * step
                store(to + 4 * (r * wide + c), some(row, c, size) if r < rows and c < size else zeros())

    return part(take_rows)


def _take_tile(k: DType, v: DType) -> Part:
    """Make the part that copies the keys and values of a tile."""
    take_keys, take_values = _take_rows(CELLS[k]), _take_rows(CELLS[v])

    def take_tile(a, heads, s, place):
        keys, values, left = place[0], place[1], ARGS.keys(a) - s
        size, width, pace = ARGS.size(a), ARGS.width(a), ARGS.k_step(a)
        take_keys(load_long(heads + K) + s * pace, pace, left, size, keys, round_up(size, LANES))
        pace = ARGS.v_step(a)
        take_values(load_long(heads + V) + s * pace, pace, left, width, values, round_up(width, BLOCK))

    return part(take_tile)


@part
def take_mask(seen, step, count, left, p, hidden):
    """Load the mask of a tile with tokens as lanes. `p` is scratch for as many rows."""
    copy_rows(seen, step, count, left, ONE, p, BLOCK, TILE, splat(MINUS_INFINITY))
    for r in range(0, TILE, LANES):
        turn(p + 4 * r, 4 * TILE, hidden + 4 * BLOCK * r, 4 * BLOCK)
        turn(p + 4 * (LANES * TILE + r), 4 * TILE, hidden + 4 * BLOCK * r + 64, 4 * BLOCK)


@part
def meet(a, count, union, hidden, slope, queries, state, result, place):
    """Process a block of tokens of one head with a tile: scores, weights, results."""
    keys, values, p, _, bits, fades, _, _, _ = place
    size, wide = ARGS.size(a), round_up(ARGS.width(a), BLOCK)
    low, high = reach(union)
    row = 4 * round_up(size, LANES)
    for r in range(low, high, ROWS):
        add_products(keys + r * row, row, 4, queries, 4 * BLOCK, size, p + 4 * BLOCK * r, 4 * BLOCK, 0)
    soften(p, hidden, low, high, ARGS.cap(a), slope, state, fades)
    for t in range(0, count, ROWS):
        low, high = reach(load_long(bits + t))
        at, to = values + 4 * low * wide, result + 4 * t * wide
        for c in range(0, 4 * wide, 4 * BLOCK):
            weights = p + 4 * (BLOCK * low + t)
            add_products(weights, 4, 4 * BLOCK, at + c, 4 * wide, high - low, to + c, 4 * wide, fades + 4 * t)


def _meet_all(k: DType, v: DType) -> Part:
    """Make the part that processes all tokens of a unit with a tile. The tile is copied only if a token sees a key."""
    take_tile = _take_tile(k, v)

    def meet_all(a, heads, start, end, s, place):
        shared, keys, step = ARGS.shared(a), ARGS.keys(a), ARGS.mask_step(a)
        _, _, _, hidden, bits, _, queries, states, results = place
        deep, wide = round_up(ARGS.size(a), LANES), round_up(ARGS.width(a), BLOCK)
        ready = False
        for first in range(start, end, BLOCK):
            known, union, plain, count = 0, 0, False, min(BLOCK, end - first)
            for h in range(shared):
                head = heads + h * HEAD
                seen = load_long(head + MASK) + first * step
                if seen != known:
                    union, plain = survey(seen, step, count, s, keys, bits)
                    known = seen
                    if union != 0 and not plain:
                        take_mask(seen + 4 * s, step, count, keys - s, place[2], hidden)
                if union != 0:
                    if not ready:
                        take_tile(a, heads, s, place)
                        ready = True
                    slope = load_scalar(head + SLOPE)
                    meet(a, count, union, 0 if plain else hidden, slope, queries, states, results, place)
                queries += 4 * BLOCK * deep
                states += 8 * BLOCK
                results += 4 * BLOCK * wide

    return part(meet_all)


@part
def put_results(a, heads, start, end, place):
    """Store ``results / weights`` of all tokens of a unit."""
    width, states, results = ARGS.width(a), place[7], place[8]
    wide = round_up(width, BLOCK)
    for first in range(start, end, BLOCK):
        for h in range(ARGS.shared(a)):
            target = load_long(heads + h * HEAD + OUT) + first * ARGS.out_step(a)
            for t in range(min(BLOCK, end - first)):
                weight = load_scalar(states + 128 + 4 * t)
                f = splat(ONE / weight if weight != NONE else NONE)  # NaN stays NaN
                for c in range(0, width, LANES):
                    x = mul(load(results + 4 * (t * wide + c)), f)
                    put(target + t * ARGS.out_step(a), c, width, x)
            states += 8 * BLOCK
            results += 4 * BLOCK * wide


def in_spans(
    name: str, places: Part, take: Part, meet_all: Part, put: Part, begin: Operation, end: Operation
) -> Kernel:
    """Make an attention kernel that processes some token blocks of a group of heads at a time, last blocks first.

    Args:
        name: The name of the kernel.
        places: ``(a, thread)`` returns the scratch layout; its first address is `memory`.
        take: ``(a, heads, start, stop, place)`` loads the queries of tokens.
        meet_all: ``(a, heads, start, stop, key, place)`` processes these tokens with the tile at `key`.
        put: Stores results; arguments as `take`.
        begin: Called with ``(memory)`` first.
        end: Called with ``(memory)`` last.
    """

    def body(a, thread, threads):
        tokens, units, span, place = ARGS.tokens(a), ARGS.units(a), ARGS.span(a), places(a, thread)
        tickets, spans = ARGS.tickets(a), (tokens + span - 1) // span
        piece, mine = 0, draw(tickets, 0)
        begin(place[0])
        for number in range(spans):
            start = (spans - 1 - number) * span
            stop = min(tokens, start + span)
            for unit in range(units):
                if piece == mine:
                    heads = ARGS.heads(a) + unit * ARGS.shared(a) * HEAD
                    take(a, heads, start, stop, place)
                    for s in range(0, ARGS.keys(a), TILE):
                        meet_all(a, heads, start, stop, s, place)
                    put(a, heads, start, stop, place)
                    mine = draw(tickets, piece + 1)
                piece += 1
        settle(tickets, mine, piece, threads)
        end(place[0])
        return 0

    return Kernel(name, body)


@cache
def attend(k: DType, v: DType) -> Kernel:
    """Make the prefill kernel by vectors for keys of type `k` and values of type `v`."""
    name = f"attention_many.attend.{k}.{v}"
    return in_spans(name, places, take_queries, _meet_all(k, v), put_results, nothing, nothing)
