"""Prefill attention by AMX tiles: tiles of 64 keys times blocks of 32 tokens, with online softmax. Lanes are tokens.

Scores ``K Q^T`` and results ``V^T P^T`` are products of matrices (`attention_squares`): keys are rows, values are
columns, and the weights of a pair of keys are adjacent. A job is a block of tokens of one head and a tile. The tile
unit computes its scores, vector code its weights, the tile unit its results. While vector code computes the weights of
one job, the tile unit computes the scores of the next job and the results of the job before. Its products are spread
over the rows of weights.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from .....graph.dtypes import DType
from ...compiler import Kernel, Part, part
from ...simd.amx import NBYTES
from ...simd.order import turn
from ...simd.vectors import (
    LANES,
    add,
    div,
    lanes_above,
    load,
    load_long,
    load_scalar,
    mul,
    splat,
    store,
    store_long,
    sub,
    where_less,
    zeros,
    zeros_above,
    zeros_below,
)
from ..amx import tiles
from ..rows import put
from .attention_many import ARGS, BLOCK, TILE, copy_rows, in_spans, put_two, survey, take_mask
from .attention_squares import (
    DONE,
    FRESH,
    MORE,
    PANEL,
    QUERIES,
    ROW,
    SIDE,
    SQUARE,
    STEP,
    WEIGHTS,
    columns_to_squares,
    end_steps,
    lanes_to_square,
    list_product,
    rows_to_squares,
    start_steps,
    store_weight,
    take_steps,
    terms_of,
)
from .attention_squares import TILE as GROUP
from .scores import HEAD, LOWEST, MASK, NONE, ONE, OUT, SLOPE, K, Q, V, finished, greater, power, sink_of

JOBS = 24
"""Approximate number of jobs of a unit per tile."""
HALVES = TILE // SIDE
DEEP, HEAVY = QUERIES * PANEL, WEIGHTS * PANEL
"""Bytes of a matrix of queries, and of a matrix of weights."""
QUERY, RESULT, STATE, HIDDEN, WHOSE, FIRST, LAST = range(0, 56, 8)
JOB = 64
"""Bytes of a job: addresses of queries, results, softmax state, mask (or 0) and head; range of visible tile halves."""
STEPS = 8
"""Largest number of steps of a product."""
BEGUN, STATES = 256, 320
"""Offset of the word that says whether results exist, behind the softmax state; bytes of a state."""
SLACK = np.float32(8)
"""Largest excess, in powers of two, of a score over the reference score of the weights."""
ROWS = 8
"""Keys with weights between two products."""


def scratch_bytes(rows: int, size: int, width: int) -> int:
    """Return the scratch bytes of a thread. `rows` is heads of a group times tokens of a unit."""
    deep, wide = max(1, math.ceil(size / SIDE)), math.ceil(width / SIDE)
    squares, weights = HALVES * (deep + wide + 2) + deep + 2, 2 * HALVES * HEAVY
    lists = HALVES * (STEPS * (deep + wide) + 1) * STEP + 64
    job = DEEP * deep + SQUARE * (wide + HALVES) + STATES + JOB
    return NBYTES + SQUARE * squares + weights + lists + rows // BLOCK * job


@part
def squares_of(n):
    """Return the matrices for `n` rows or columns."""
    return (n + SIDE - 1) // SIDE


@part
def places(a, thread):
    """Return the addresses of a thread's scratch.

    Registers; matrices of keys and values; scores and weights of two jobs; scratch matrices; bits of visible keys;
    steps; then arrays of queries, results, masks and states of every job.
    """
    deep, wide = max(1, squares_of(ARGS.size(a))), squares_of(ARGS.width(a))
    jobs = ARGS.shared(a) * ARGS.span(a) // BLOCK
    mine = ARGS.scratch(a) + thread * ARGS.scratch_bytes(a)
    keys = mine + NBYTES
    values = keys + HALVES * deep * SQUARE
    scores = values + HALVES * wide * SQUARE
    weights = scores + 2 * HALVES * SQUARE
    between = weights + 2 * HALVES * HEAVY
    bits = between + (deep + 2) * SQUARE
    steps = bits + 64
    queries = steps + HALVES * (STEPS * (deep + wide) + 1) * STEP
    results = queries + jobs * deep * DEEP
    hidden = results + jobs * wide * SQUARE
    states = hidden + jobs * HALVES * SQUARE
    return mine, keys, values, scores, weights, between, bits, steps, queries, results, hidden, states


@part
def take_queries(a, heads, start, end, place):
    """Load the matrices of queries. Set states to the sink alone."""
    _, _, _, _, _, between, _, _, queries, _, _, states = place
    step, size, deep = ARGS.q_step(a), ARGS.size(a), max(1, squares_of(ARGS.size(a)))
    lanes = between + deep * SQUARE
    for first in range(start, end, BLOCK):
        for h in range(ARGS.shared(a)):
            head = heads + h * HEAD
            rows, pace, sink = load_long(head + Q) + first * step, step, sink_of(head)
            if end - first < BLOCK or size != deep * SIDE:
                copy_rows(rows, step, end - first, size, ONE, between, BLOCK, deep * SIDE, zeros())
                rows, pace = between, deep * ROW
            for c in range(0, deep * ROW, ROW):
                for r in range(2):
                    at, to = rows + r * LANES * pace + c, lanes + 64 * r
                    turn(at, pace, to, ROW)
                    turn(at + 64, pace, to + LANES * ROW, ROW)
                lanes_to_square(lanes, ARGS.factor(a), queries)
                queries += DEEP
            top = splat(max(sink, LOWEST))
            put_two(states, top, top)
            put_two(states + 128, power(sub(splat(sink), top)), power(sub(splat(sink), top)))
            store_long(states + BEGUN, 0)
            states += STATES


def _take_tile(k: DType, v: DType) -> Part:
    """Make the part that loads the matrices of keys and values of a tile."""
    take_keys = rows_to_squares(k, TILE)
    take_values = columns_to_squares(v, TILE)

    def take_tile(a, heads, s, place):
        left, deep, wide = ARGS.keys(a) - s, max(1, squares_of(ARGS.size(a))), squares_of(ARGS.width(a))
        step = ARGS.k_step(a)
        take_keys(load_long(heads + K) + s * step, step, left, ARGS.size(a), place[1], deep)
        step = ARGS.v_step(a)
        take_values(load_long(heads + V) + s * step, step, left, ARGS.width(a), place[2], wide, place[5])

    return part(take_tile)


@part
def halves(union):
    """Return the range of halves of a tile with visible keys."""
    return zeros_below(union) // SIDE, (TILE - zeros_above(union) + SIDE - 1) // SIDE


def _list_scores(k: DType) -> Part:
    """Make ``(end, job, keys, scores, deep)``: append the steps of the scores of a job; return the end of the list."""
    list_steps = list_product(terms_of(k), QUERIES)

    def list_scores(end, job, keys, scores, deep):
        queries = load_long(job + QUERY)
        for half in range(load_long(job + FIRST), load_long(job + LAST)):
            for d in range(deep):
                a, b, first, last = keys + (half * deep + d) * SQUARE, queries + d * DEEP, d == 0, d == deep - 1
                end = list_steps(end, a, b, scores + half * SQUARE, FRESH if first else 0, DONE if last else 0)
        return end

    return part(list_scores)


def _list_results(v: DType) -> Part:
    """Make ``(end, job, values, weights, wide)``: append the steps of the results of a job; return the list's end."""
    list_steps = list_product(terms_of(v), WEIGHTS)

    def list_results(end, job, values, weights, wide):
        result, low, high = load_long(job + RESULT), load_long(job + FIRST), load_long(job + LAST)
        begun = load_long(job + STATE) + BEGUN
        begin = MORE if load_long(begun) else FRESH
        store_long(begun, 1)
        for w in range(wide):
            for half in range(low, high):
                a, b, first, last = (
                    values + (w * HALVES + half) * SQUARE,
                    weights + half * HEAVY,
                    half == low,
                    half == high - 1,
                )
                end = list_steps(end, a, b, result + w * SQUARE, begin if first else 0, DONE if last else 0)
        return end

    return part(list_results)


@part
def finish(p, n, hidden, cap, slope):
    """Apply cap and mask to the scores of `n` keys in place."""
    for r in range(0, n * ROW, ROW):
        h = g = zeros()
        if hidden != 0:
            h, g = load(hidden + r), load(hidden + r + 64)
        put_two(p + r, finished(load(p + r), h, cap, slope), finished(load(p + r + 64), g, cap, slope))


@part
def highest(p, n, x, y):
    """Return the maxima of `x`, `y` and the scores of `n` keys. Four chains hide the latency."""
    x1 = x2 = x3 = x
    y1 = y2 = y3 = y
    for r in range(p, p + n * ROW, 4 * ROW):
        x, y = greater(load(r), x), greater(load(r + 64), y)
        x1, y1 = greater(load(r + ROW), x1), greater(load(r + ROW + 64), y1)
        x2, y2 = greater(load(r + 2 * ROW), x2), greater(load(r + 2 * ROW + 64), y2)
        x3, y3 = greater(load(r + 3 * ROW), x3), greater(load(r + 3 * ROW + 64), y3)
    return greater(greater(x, x1), greater(x2, x3)), greater(greater(y, y1), greater(y2, y3))


@part
def raise_state(state, x, y, result, rows):
    """Set new reference scores `x`, `y` and rescale the earlier sums."""
    h, g = power(sub(load(state), x)), power(sub(load(state + 64), y))
    put_two(state, x, y)
    put_two(state + 128, mul(load(state + 128), h), mul(load(state + 192), g))
    for r in range(result, result + rows * ROW, ROW):
        put_two(r, mul(load(r), h), mul(load(r + 64), g))


@part
def weigh(p, x, y, to, sums, more):
    """Convert the scores of two keys to weights in pairs, and add the weights to `sums` and `more`."""
    u, v = power(sub(load(p), x)), power(sub(load(p + ROW), x))
    store_weight(to, PANEL, u, v)
    sums = add(sums, add(u, v))
    u, v = power(sub(load(p + 64), y)), power(sub(load(p + ROW + 64), y))
    store_weight(to + GROUP, PANEL, u, v)
    return sums, add(more, add(u, v))


@cache
def _soften() -> Part:
    """Make ``(a, mine, job, p, weights, at, end)``: convert the scores of a job to weights.

    Meanwhile the part runs the steps `at` to `end`.
    """
    take = take_steps()

    def soften(a, mine, job, p, weights, at, end):
        state, hidden, cap = load_long(job + STATE), load_long(job + HIDDEN), ARGS.cap(a)
        first, last = load_long(job + FIRST), load_long(job + LAST)
        stop = min(at + STEP, end)
        take(mine, at, stop)
        if cap > NONE or hidden != 0:
            slope = load_scalar(load_long(job + WHOSE) + SLOPE)
            finish(p + first * SQUARE, (last - first) * SIDE, hidden and hidden + first * SQUARE, cap, slope)
        x, y = load(state), load(state + 64)
        u, v = highest(p + first * SQUARE, (last - first) * SIDE, x, y)
        if lanes_above(u, add(x, splat(SLACK))) | lanes_above(v, add(y, splat(SLACK))):
            x, y = u, v
            rows = load_long(state + BEGUN) * squares_of(ARGS.width(a)) * SIDE
            raise_state(state, x, y, load_long(job + RESULT), rows)
        sums, more = load(state + 128), load(state + 192)
        pace, due, whole = (end - stop) // STEP, 0, (last - first) * LANES * STEP
        for half in range(first, last):
            to, rows = weights + half * HEAVY, p + half * SQUARE
            for r in range(rows, rows + SQUARE, 2 * ROW):
                due += pace * STEP
                while due >= whole:
                    take(mine, stop, stop + STEP)
                    stop, due = stop + STEP, due - whole
                sums, more = weigh(r, x, y, to, sums, more)
                to += 64
        put_two(state + 128, sums, more)

    return part(soften)


def _meet(k: DType, v: DType) -> Part:
    """Make the part that processes jobs. Round i: scores of job i, weights of job i - 1, results of job i - 2."""
    take, start, soften = take_steps(), start_steps(), _soften()
    list_scores, list_results = _list_scores(k), _list_results(v)

    def meet(a, jobs, count, place):
        mine, keys, values, scores, weights, _, _, steps, _, _, _, _ = place
        deep, wide = max(1, squares_of(ARGS.size(a))), squares_of(ARGS.width(a))
        for i in range(count + 2):
            end, job, even, odd = steps, jobs + i * JOB, i % 2 * HALVES, (i + 1) % 2 * HALVES
            if i < count:
                end = list_scores(end, job, keys, scores + even * SQUARE, deep)
            if i >= 2:
                end = list_results(end, job - 2 * JOB, values, weights + even * HEAVY, wide)
            if end > steps:
                end_steps(end)
                start(mine, steps)
            if 0 < i <= count:
                soften(a, mine, job - JOB, scores + odd * SQUARE, weights + odd * HEAVY, steps, end)
            else:
                take(mine, steps, end)

    return part(meet)


def _meet_all(k: DType, v: DType) -> Part:
    """Make the part that processes all tokens of a unit with a tile. The tile is loaded only if a token sees a key."""
    take_tile, meet = _take_tile(k, v), _meet(k, v)

    def meet_all(a, heads, start, end, s, place):
        shared, keys, step = ARGS.shared(a), ARGS.keys(a), ARGS.mask_step(a)
        _, _, _, _, _, between, bits, _, queries, results, masks, states = place
        deep, wide = max(1, squares_of(ARGS.size(a))), squares_of(ARGS.width(a))
        jobs = states + shared * ARGS.span(a) // BLOCK * STATES
        job = jobs
        for first in range(start, end, BLOCK):
            known, union, hidden, count = 0, 0, 0, min(BLOCK, end - first)
            for h in range(shared):
                head = heads + h * HEAD
                seen = load_long(head + MASK) + first * step
                if seen != known:
                    union, plain = survey(seen, step, count, s, keys, bits)
                    known, hidden = seen, 0
                    if union != 0 and not plain:
                        hidden = masks
                        take_mask(seen + 4 * s, step, count, keys - s, between, hidden)
                if union != 0:
                    low, high = halves(union)
                    store_long(job + QUERY, queries)
                    store_long(job + RESULT, results)
                    store_long(job + STATE, states)
                    store_long(job + HIDDEN, hidden)
                    store_long(job + WHOSE, head)
                    store_long(job + FIRST, low)
                    store_long(job + LAST, high)
                    job += JOB
                queries += deep * DEEP
                results += wide * SQUARE
                states += STATES
                masks += HALVES * SQUARE
        if job != jobs:
            take_tile(a, heads, s, place)
            meet(a, jobs, (job - jobs) // JOB, place)

    return part(meet_all)


@part
def put_results(a, heads, start, end, place):
    """Store ``results / weights`` of all tokens of a unit."""
    _, _, _, _, _, between, _, _, _, results, _, states = place
    width, step = ARGS.width(a), ARGS.out_step(a)
    for first in range(start, end, BLOCK):
        for h in range(ARGS.shared(a)):
            if load_long(states + BEGUN) == 0:
                for r in range(0, squares_of(width) * SQUARE, ROW):
                    put_two(results + r, zeros(), zeros())
            for group in range(0, BLOCK, LANES):
                weight = load(states + 128 + 4 * group)
                f = where_less(zeros(), weight, div(splat(ONE), weight), mul(weight, zeros()))  # NaN stays
                target = load_long(heads + h * HEAD + OUT) + (first + group) * step
                for c in range(0, width, LANES):
                    for r in range(LANES):
                        store(between + 64 * r, mul(load(results + (c + r) * ROW + 4 * group), f))
                    if end - first >= BLOCK and c + LANES <= width:
                        turn(between, 64, target + 4 * c, step)
                    else:
                        turn(between, 64, between + SQUARE, 64)
                        for t in range(min(LANES, end - first - group)):
                            put(target + t * step, c, width, load(between + SQUARE + 64 * t))
            states += STATES
            results += squares_of(width) * SQUARE


@cache
def attend(k: DType, v: DType) -> Kernel:
    """Make the prefill kernel by AMX tiles for keys of type `k` and values of type `v`."""
    unit, name = tiles(), f"attention_tiled.attend.{k}.{v}"
    return in_spans(name, places, take_queries, _meet_all(k, v), put_results, unit.configure, unit.release)
