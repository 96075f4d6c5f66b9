"""Attention of few tokens: lanes are keys, and keys and values are read once for all heads that share them.

Keys may be cut into parts, which threads share; `join` puts the parts together.
"""

from __future__ import annotations

from functools import cache

from .....graph.dtypes import DType
from ...compiler import Kernel, Part, kernel, part
from ...simd.order import fold_1, fold_2
from ...simd.tiles import tile
from ...simd.vectors import (
    LANES,
    MANY,
    add,
    fma,
    largest,
    load,
    load_long,
    load_scalar,
    load_some,
    mul,
    prefetch_far,
    splat,
    splat_from,
    store,
    store_scalar,
    sub,
    total,
    vectors_in_registers,
    zeros,
)
from ...words import words
from ..blocks import BLOCK
from ..cells import CELLS, Cells
from ..packing import share
from ..rows import put
from . import attention_keys
from .attention_keys import SQUARE, dots
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
    power_of,
    round_up,
    seen_lanes,
    sink_of,
)

ARGS = words(f"{COMMON} partial chunks")
"""Partial results, and into how many parts the keys are cut."""

LINE = 64
"""Bytes of a cache line."""
COLUMNS = 64
"""Elements of a value that are summed at once."""
RUN = 32
"""Keys whose values are summed before the next head takes them."""
AHEAD = 64
"""Keys ahead of their use at which they and their values are fetched, into the second cache: those of one head may lie
so far apart that the first has few places for them."""
MOST_ROWS = 4 if vectors_in_registers() == MANY else 1
"""Rows that meet keys and values at once: what is loaded, and made float32, is used for all of them."""
VECTOR = 4 * LANES
SUM, VALUES = 4, 64
"""Bytes into a partial result: the highest score, the sum of weights, the sum of weighted values."""


def part_bytes(width: int) -> int:
    """Bytes of a partial result."""
    return VALUES + 4 * (-(-width // COLUMNS) * COLUMNS)


def scratch_bytes(rows: int, keys: int, size: int, width: int) -> int:
    """Scores of every row, and values as float32, or queries with products or keys in blocks."""
    floats = 4 * MOST_ROWS * VECTOR + rows * 4 * (-(-size // LANES) * LANES)
    blocks = attention_keys.keys_bytes(size) + rows * attention_keys.query_bytes(size)
    return rows * 4 * (-(-keys // LANES) * LANES) + max(4 * RUN * COLUMNS, floats, blocks)


def _products(cells: Cells, count: int) -> Part:
    """Products of so many queries with sixteen keys from number `s` on, each as four numbers to be folded, to `to`: a
    key is made float32 once for all of them, and one past the last is the last."""
    whole, some, rows = cells.whole, cells.some, tile(count, 1)
    rows_of, zeros, inner, folded, save = rows.rows, rows.zeros, rows.inner, rows.folded, rows.save

    def products(queries, pitch, key, step, s, keys, size, to):
        x = rows_of(queries, pitch, count)
        for i in range(s, s + LANES, 4):
            j, k = key + min(i, keys - 1) * step, key + min(i + 1, keys - 1) * step
            l, m = key + min(i + 2, keys - 1) * step, key + min(i + 3, keys - 1) * step
            a, b, c, d = zeros(), zeros(), zeros(), zeros()
            for col in range(0, size - LANES + 1, LANES):
                a, b = inner(a, whole(j, col), x, 4 * col), inner(b, whole(k, col), x, 4 * col)
                c, d = inner(c, whole(l, col), x, 4 * col), inner(d, whole(m, col), x, 4 * col)
            if size % LANES > 0:
                col = size - size % LANES
                a, b = inner(a, some(j, col, size), x, 4 * col), inner(b, some(k, col, size), x, 4 * col)
                c, d = inner(c, some(l, col, size), x, 4 * col), inner(d, some(m, col, size), x, 4 * col)
            save(to, folded(a, b, c, d))
            to += count * VECTOR

    return part(products)


def _values(cells: Cells, count: int) -> Part:
    """Values of `n` keys with the weights of so many rows, added to 64 columns from column `col` of each."""
    whole, some, rows = cells.whole, cells.some, tile(count, COLUMNS // LANES)
    rows_of, outer, held, put = rows.rows, rows.outer, rows.held, rows.put

    def values(scores, reach, value, pace, n, states, pitch, col, width):
        weights, to = rows_of(scores, reach, count), rows_of(states, pitch, count)
        acc, row = held(to), value
        if width - col >= COLUMNS:
            for r in range(n):
                k, l, m, o = whole(row, col), whole(row, col + 16), whole(row, col + 32), whole(row, col + 48)
                acc = outer(acc, k, l, m, o, weights, 4 * r)
                row += pace
        else:
            for r in range(n):
                k, l = some(row, col, width), some(row, col + 16, width)
                m, o = some(row, col + 32, width), some(row, col + 48, width)
                acc = outer(acc, k, l, m, o, weights, 4 * r)
                row += pace
        put(to, acc, COLUMNS)

    return part(values)


@part
def seen_from(seen, keys):
    """The first key that may be seen, or fewer than 16 before it."""
    s = 0
    while s < keys and seen_lanes(mask_lanes(seen, s, keys)) == 0:
        s += LANES
    return s


@part
def seen_to(seen, keys):
    """One past the last key that may be seen, or fewer than 16 more."""
    s = (keys + LANES - 1) // LANES * LANES
    while s > 0 and seen_lanes(mask_lanes(seen, s - LANES, keys)) == 0:
        s -= LANES
    return min(s, keys)


@part
def seen_range(heads, shared, tokens, step, keys):
    """From the first to past the last key that any token may see in any head of a group."""
    low, high, known = keys, 0, 0
    for h in range(shared):
        seen = load_long(heads + h * HEAD + MASK)
        if seen != known:
            for t in range(tokens):
                low = min(low, seen_from(seen + t * step, keys))
                high = max(high, seen_to(seen + t * step, keys))
            known = seen
    return min(low, high), high


@part
def fetch(rows, step, count, nbytes):
    """Rows that are needed soon."""
    for r in range(count):
        for c in range(0, nbytes, LINE):
            prefetch_far(rows + r * step + c)


@part
def to_weights(scores, n, state):
    """Scores of a row to weights, in place; its highest score and their sum to its state, where the highest of each
    lane stands."""
    top = max(largest(load(state)), LOWEST)
    highest, sums = splat(top), zeros()
    for s in range(0, n, LANES):
        p = power(sub(load(scores + 4 * s), highest))
        store(scores + 4 * s, p)
        sums = add(sums, p)
    store_scalar(state, top)
    store_scalar(state + SUM, total(sums))


@part
def put_row(parts, count, span, factors, sink, out, width):
    """The result of a row from `count` parts of it; `factors` is scratch for as many numbers."""
    top, weight = max(sink, LOWEST), NONE
    for i in range(count):
        top = max(top, load_scalar(parts + i * span))
    for i in range(count):
        f = power_of(load_scalar(parts + i * span) - top)
        store_scalar(factors + 4 * i, f)
        weight += f * load_scalar(parts + i * span + SUM)
    weight += power_of(sink - top)
    f = splat(ONE / weight if weight > NONE else NONE)
    for c in range(0, width, LANES):
        acc = zeros()
        for i in range(count):
            acc = fma(load(parts + i * span + VALUES + 4 * c), splat_from(factors + 4 * i), acc)
        put(out, c, width, mul(acc, f))


@part
def put_group(a, unit, scratch):
    """The results of a group of heads from all parts."""
    tokens, shared, count, width = ARGS.tokens(a), ARGS.shared(a), ARGS.chunks(a), ARGS.width(a)
    span = VALUES + 4 * round_up(width, COLUMNS)
    for t in range(tokens):
        for h in range(shared):
            head = ARGS.heads(a) + (unit * shared + h) * HEAD
            parts = ARGS.partial(a) + ((unit * tokens + t) * shared + h) * count * span
            out = load_long(head + OUT) + t * ARGS.out_step(a)
            put_row(parts, count, span, scratch, sink_of(head), out, width)


def _as_read(cells: Cells) -> Cells:
    """The type that heads see."""
    return cells if cells.expand is None else CELLS[DType.F32]


def _add_keys(cells: Cells) -> Part:
    """Scores of all rows for keys from `low` to before `high`; the highest of each lane to their states."""
    one, two, three, four = (_products(cells, count) for count in range(1, 5))
    span = cells.span

    @part
    def finish(a, heads, row, s, count, products, to, state):
        """Scores of a row from its products, which stand `count` vectors apart."""
        shared, keys, apart = ARGS.shared(a), ARGS.keys(a), count * VECTOR
        head = heads + row % shared * HEAD
        hidden = mask_lanes(load_long(head + MASK) + row // shared * ARGS.mask_step(a), s, keys)
        first = fold_2(load(products), load(products + apart))
        x = fold_1(first, fold_2(load(products + 2 * apart), load(products + 3 * apart)))
        x = finished(mul(x, splat(ARGS.factor(a))), hidden, ARGS.cap(a), load_scalar(head + SLOPE))
        store(state, greater(x, load(state)))
        store(to, x)

    def add_keys(a, heads, low, high, scores, states, pitch, scratch):
        tokens, shared, keys, size = ARGS.tokens(a), ARGS.shared(a), ARGS.keys(a), ARGS.size(a)
        step, reach, rows = ARGS.k_step(a), 4 * round_up(keys, LANES), tokens * shared
        key, each, products = load_long(heads + K), 4 * round_up(size, LANES), scratch
        queries = scratch + 4 * MOST_ROWS * VECTOR
        for row in range(rows):
            query = load_long(heads + row % shared * HEAD + Q) + row // shared * ARGS.q_step(a)
            for c in range(0, size, LANES):
                store(queries + row * each + 4 * c, load_some(query + 4 * c, size - c))
        for s in range(low, high, LANES):
            fetch(key + (s + AHEAD) * step, step, min(LANES, high - s - AHEAD), span(size))
            row = 0
            while row < rows:
                count, query = min(MOST_ROWS, rows - row), queries + row * each
                if count == 4:
                    four(query, each, key, step, s, keys, size, products)
                elif count == 3:
                    three(query, each, key, step, s, keys, size, products)
                elif count == 2:
                    two(query, each, key, step, s, keys, size, products)
                else:
                    one(query, each, key, step, s, keys, size, products)
                for i in range(count):
                    to, state = scores + (row + i) * reach + 4 * (s - low), states + (row + i) * pitch
                    finish(a, heads, row + i, s, count, products + i * VECTOR, to, state)
                row += count

    return part(add_keys)


def _add_keys_in_blocks(dtype: DType) -> Part:
    """As `_add_keys`, by integers."""
    round_query, turn_keys, span = attention_keys.round_query(dtype), attention_keys.turn_keys(dtype), CELLS[dtype].span

    def add_keys(a, heads, low, high, scores, states, pitch, scratch):
        tokens, shared, keys, size = ARGS.tokens(a), ARGS.shared(a), ARGS.keys(a), ARGS.size(a)
        q_step, step, mask_step = ARGS.q_step(a), ARGS.k_step(a), ARGS.mask_step(a)
        factor, cap, reach = ARGS.factor(a), ARGS.cap(a), 4 * round_up(keys, LANES)
        key, each = load_long(heads + K), round_up(size + size // BLOCK * 8, 64)
        queries = scratch + (size // BLOCK + 1) * (SQUARE + 32)
        for t in range(tokens):
            for h in range(shared):
                query = load_long(heads + h * HEAD + Q) + t * q_step
                round_query(query, size, queries + (t * shared + h) * each)
        for s in range(low, high, LANES):
            turn_keys(key + s * step, step, keys - 1 - s, size, scratch)
            soon = s + AHEAD
            fetch(key + soon * step, step, min(LANES, high - soon), span(size))
            to, state, query = scores + 4 * (s - low), states, queries
            for t in range(tokens):
                for h in range(shared):
                    head = heads + h * HEAD
                    hidden = mask_lanes(load_long(head + MASK) + t * mask_step, s, keys)
                    x = finished(mul(dots(query, scratch, size), splat(factor)), hidden, cap, load_scalar(head + SLOPE))
                    store(state, greater(x, load(state)))
                    store(to, x)
                    to += reach
                    state += pitch
                    query += each

    return part(add_keys)


def _some_values(cells: Cells) -> Part:
    """Where 64 columns from column `c` of `n` values lie: as they are kept, or in `tile` as float32.  Also the bytes
    from value to value, and from which column to before which they are."""
    if cells.expand is None:
        return part(lambda values, step, n, c, width, scratch: (values, step, c, width))
    expand = cells.expand

    def some_values(values, step, n, c, width, scratch):
        end = min(width, c + COLUMNS)
        for r in range(n):
            expand(values + r * step, c, end, scratch + 4 * r * COLUMNS)
        return scratch, 4 * COLUMNS, 0, end - c

    return part(some_values)


def _add_all_values(cells: Cells) -> Part:
    """The weighted values of `n` keys, added to the states of all rows."""
    one, two, three, four = (_values(_as_read(cells), count) for count in range(1, 5))
    some_values, span = _some_values(cells), cells.span

    def add_all_values(a, value, rows, n, scores, states, pitch, scratch):
        step, width, reach = ARGS.v_step(a), ARGS.width(a), 4 * round_up(ARGS.keys(a), LANES)
        for s in range(0, n, RUN):
            count = min(RUN, n - s)
            fetch(value + (s + AHEAD) * step, step, min(RUN, n - s - AHEAD), span(width))
            for c in range(0, width, COLUMNS):
                at, pace, col, end = some_values(value + s * step, step, count, c, width, scratch)
                row = 0
                while row < rows:
                    several, p, to = min(MOST_ROWS, rows - row), scores + row * reach + 4 * s, states + row * pitch
                    to += VALUES + 4 * c
                    if several == 4:
                        four(p, reach, at, pace, count, to, pitch, col, end)
                    elif several == 3:
                        three(p, reach, at, pace, count, to, pitch, col, end)
                    elif several == 2:
                        two(p, reach, at, pace, count, to, pitch, col, end)
                    else:
                        one(p, reach, at, pace, count, to, pitch, col, end)
                    row += several

    return part(add_all_values)


@cache
def attend(k: DType, v: DType) -> Kernel:
    """A part of the keys, of type `k`, and of the values, of type `v`, with a group of heads at a time."""
    add_keys = _add_keys_in_blocks(k) if k.is_quantised else _add_keys(CELLS[k])
    add_all_values = _add_all_values(CELLS[v])
    key_span, value_span = CELLS[k].span, CELLS[v].span

    def body(a, thread, threads):
        tokens, shared, keys, chunks = ARGS.tokens(a), ARGS.shared(a), ARGS.keys(a), ARGS.chunks(a)
        rows, reach, span = tokens * shared, 4 * round_up(keys, LANES), VALUES + 4 * round_up(ARGS.width(a), COLUMNS)
        scores, pitch = ARGS.scratch(a) + thread * ARGS.scratch_bytes(a), chunks * span
        lo, hi = share(ARGS.units(a) * chunks, thread, threads)
        for unit in range(lo, hi):
            group, chunk = unit // chunks, unit % chunks
            heads = ARGS.heads(a) + group * shared * HEAD
            states = ARGS.partial(a) + (group * rows * chunks + chunk) * span
            low, high = seen_range(heads, shared, tokens, ARGS.mask_step(a), keys)
            first, last = share((high - low + LANES - 1) // LANES, chunk, chunks)
            low, high = low + first * LANES, min(high, low + last * LANES)
            for r in range(rows):
                store(states + r * pitch, splat(MINUS_INFINITY))
                for c in range(VALUES, span, 64):
                    store(states + r * pitch + c, zeros())
            memory, soon = scores + rows * reach, min(AHEAD, high - low)
            key, value = load_long(heads + K) + low * ARGS.k_step(a), load_long(heads + V) + low * ARGS.v_step(a)
            fetch(key, ARGS.k_step(a), soon, key_span(ARGS.size(a)))
            fetch(value, ARGS.v_step(a), soon, value_span(ARGS.width(a)))
            add_keys(a, heads, low, high, scores, states, pitch, memory)
            for r in range(rows):
                to_weights(scores + r * reach, high - low, states + r * pitch)
            add_all_values(a, value, rows, high - low, scores, states, pitch, memory)
            if chunks == 1:
                put_group(a, group, scores)
        return 0

    return Kernel(f"attention_few.attend.{k}.{v}", body)


@kernel
def join(a, thread, threads):
    """The parts of every group of heads put together."""
    lo, hi = share(ARGS.units(a), thread, threads)
    for unit in range(lo, hi):
        put_group(a, unit, ARGS.scratch(a) + thread * ARGS.scratch_bytes(a))
    return 0
