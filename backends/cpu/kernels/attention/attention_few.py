"""Decode attention: lanes are keys. Keys and values are read once for all heads that share them.

Groups of heads walk through a cache together: memory is read front to back. Threads may split the keys (`join`).
"""

from __future__ import annotations

from functools import cache

from .....graph.dtypes import DType
from .....graph.lazy_dataclass import dataclass
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
    seen_range,
    sink_of,
)

ARGS = words(f"{COMMON} partial chunks beside")
"""The last words: partial results, the number of key splits, groups of heads that walk together."""
LINE = 64
"""Bytes of a cache line."""
COLUMNS = 64
"""Elements of a value that are summed at once."""
RUN = 32
"""Keys per head while values are summed."""
PIECE = 1024
"""Keys per block of scores."""
AHEAD = 32
"""Prefetch distance in keys, to the second cache. Prefetches are spread among the products, which many would delay."""
MOST_ROWS = 4 if vectors_in_registers() == MANY else 1
"""Rows that use keys and values at once. Each load and each conversion to float32 serves all of them."""
VECTOR = 4 * LANES
SUM, VALUES = 4, 64
"""Offsets into a partial result: first the highest score, then the sum of weights, then the weighted values."""


def part_bytes(width: int) -> int:
    """Return the bytes of a partial result."""
    return VALUES + 4 * (-(-width // COLUMNS) * COLUMNS)


def scratch_bytes(rows: int, keys: int, size: int, width: int) -> int:
    """Return the scratch bytes of a thread: scores, highest scores; then values, or queries and products or keys."""
    floats = 4 * MOST_ROWS * VECTOR + rows * 4 * (-(-size // LANES) * LANES)
    blocks = attention_keys.keys_bytes(size) + rows * attention_keys.query_bytes(size)
    scores = rows * 4 * (min(PIECE, -(-keys // LANES) * LANES) + LANES)
    return scores + max(4 * RUN * COLUMNS, floats, blocks)


def _products(cells: Cells, count: int) -> Part:
    """Make the products of `count` queries with 16 keys from key `s` on: four partial sums each at `to`."""
    whole, some, rows, line = cells.whole, cells.some, tile(count, 1), LINE // cells.nbytes
    rows_of, zeros, inner, folded, save = rows.rows, rows.zeros, rows.inner, rows.folded, rows.save
    nbytes = cells.nbytes

    def products(queries, pitch, key, step, s, keys, size, to, ahead):
        x = rows_of(queries, pitch, count)  # each key is converted to float32 once for all of them
        for i in range(s, s + LANES, 4):
            j, k = key + min(i, keys - 1) * step, key + min(i + 1, keys - 1) * step  # the last key repeats
            l, m = key + min(i + 2, keys - 1) * step, key + min(i + 3, keys - 1) * step
            a, b, c, d = zeros(), zeros(), zeros(), zeros()
            for col in range(0, size - LANES + 1, LANES):  # a, b, c, d += key[col] * query[col]
                if col % line == 0:  # prefetch later keys
                    soon = ahead + nbytes * col
                    prefetch_far(j + soon)
                    prefetch_far(k + soon)
                    prefetch_far(l + soon)
                    prefetch_far(m + soon)
                a, b = inner(a, whole(j, col), x, 4 * col), inner(b, whole(k, col), x, 4 * col)
                c, d = inner(c, whole(l, col), x, 4 * col), inner(d, whole(m, col), x, 4 * col)
            if size % LANES > 0:
                col = size - size % LANES
                a, b = inner(a, some(j, col, size), x, 4 * col), inner(b, some(k, col, size), x, 4 * col)
                c, d = inner(c, some(l, col, size), x, 4 * col), inner(d, some(m, col, size), x, 4 * col)
            save(to, folded(a, b, c, d))
            to += count * VECTOR

    return part(products)


def _values(cells: Cells, count: int, lines: int) -> Part:
    """Make ``states[row, c] += sum over n keys of weight[row, key] * value[key, c]`` for 64 columns."""
    whole, some, rows = cells.whole, cells.some, tile(count, COLUMNS // LANES)
    rows_of, outer, held, put, nbytes = rows.rows, rows.outer, rows.held, rows.put, cells.nbytes

    def values(scores, reach, value, pace, n, states, pitch, col, width, ahead):
        weights, to = rows_of(scores, reach, count), rows_of(states, pitch, count)
        acc, row, ahead = held(to), value, ahead + nbytes * col
        if width - col >= COLUMNS:
            for r in range(n):
                k, l, m, o = whole(row, col), whole(row, col + 16), whole(row, col + 32), whole(row, col + 48)
                acc = outer(acc, k, l, m, o, weights, 4 * r)  # acc[row, c] += weight[row, r] * value[r, c]
                for line in range(lines):  # prefetch later values
                    prefetch_far(row + ahead + line * LINE)
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
def fetch(rows, step, count, nbytes):
    """Prefetch `count` rows of `nbytes` bytes, `step` bytes apart."""
    for r in range(count):
        for c in range(0, nbytes, LINE):
            prefetch_far(rows + r * step + c)


@part
def to_weights(scores, n, lanes, state, width):
    """Replace scores of a row by weights; update its online softmax state. `lanes`: highest score of each lane."""
    before = load_scalar(state)
    top = max(largest(load(lanes)), before)
    highest, sums = splat(top), zeros()
    for s in range(0, n, LANES):
        p = power(sub(load(scores + 4 * s), highest))
        store(scores + 4 * s, p)
        sums = add(sums, p)
    fewer = power_of(before - top)
    store_scalar(state, top)
    store_scalar(state + SUM, fewer * load_scalar(state + SUM) + total(sums))
    if fewer < ONE:
        for c in range(VALUES, VALUES + 4 * width, 4 * LANES):
            store(state + c, mul(load(state + c), splat(fewer)))


@part
def put_row(parts, count, span, factors, sink, out, width):
    """Combine `count` partial results of a row. `factors` is scratch for `count` numbers."""
    top, weight = max(sink, LOWEST), NONE
    for i in range(count):
        top = max(top, load_scalar(parts + i * span))
    for i in range(count):
        f = power_of(load_scalar(parts + i * span) - top)
        store_scalar(factors + 4 * i, f)
        weight += f * load_scalar(parts + i * span + SUM)
    weight += power_of(sink - top)
    f = splat(ONE / weight if weight != NONE else NONE)  # NaN stays NaN
    for c in range(0, width, LANES):
        acc = zeros()
        for i in range(count):
            acc = fma(load(parts + i * span + VALUES + 4 * c), splat_from(factors + 4 * i), acc)
        put(out, c, width, mul(acc, f))


@part
def put_group(a, unit, scratch):
    """Combine the partial results of a group of heads."""
    tokens, shared, count, width = ARGS.tokens(a), ARGS.shared(a), ARGS.chunks(a), ARGS.width(a)
    span = VALUES + 4 * round_up(width, COLUMNS)
    for t in range(tokens):
        for h in range(shared):
            head = ARGS.heads(a) + (unit * shared + h) * HEAD
            parts = ARGS.partial(a) + ((unit * tokens + t) * shared + h) * count * span
            out = load_long(head + OUT) + t * ARGS.out_step(a)
            put_row(parts, count, span, scratch, sink_of(head), out, width)


def _as_read(cells: Cells) -> Cells:
    """Return the type of the values that heads read: float32 if they are expanded."""
    return cells if cells.expand is None else CELLS[DType.F32]


@dataclass(frozen=True, slots=True)
class Keys:
    """The operations of queries with keys of one type.

    ``prepare_query(query, size, to)`` writes a query of ``query_bytes(size)``. ``store_scores(a, heads, s, high,
    queries, memory, scores, reach, lanes)`` writes the scores of all rows for 16 keys, `reach` bytes apart, and updates
    the highest of each lane. ``scratch_bytes(size)`` is the size of `memory`.
    """

    take: Part
    each: Part
    own: Part
    add: Part


def _keys_in_floats(cells: Cells) -> Keys:
    """Make the operations with float keys."""
    one, two, three, four = (_products(cells, count) for count in range(1, 5))

    @part
    def finish(a, heads, row, s, count, products, to, lanes):
        """Store the scores of a row from its products, which are `count` vectors apart."""
        shared, keys, apart = ARGS.shared(a), ARGS.keys(a), count * VECTOR
        head = heads + row % shared * HEAD
        hidden = mask_lanes(load_long(head + MASK) + row // shared * ARGS.mask_step(a), s, keys)
        first = fold_2(load(products), load(products + apart))
        x = fold_1(first, fold_2(load(products + 2 * apart), load(products + 3 * apart)))
        x = finished(mul(x, splat(ARGS.factor(a))), hidden, ARGS.cap(a), load_scalar(head + SLOPE))
        store(lanes, greater(x, load(lanes)))
        store(to, x)

    def take(query, size, to):
        for c in range(0, size, LANES):
            store(to + 4 * c, load_some(query + 4 * c, size - c))

    def each(size):
        return 4 * round_up(size, LANES)

    def own(size):
        return 4 * MOST_ROWS * VECTOR

    def add(a, heads, s, high, queries, memory, scores, reach, lanes):
        shared, keys, size, step = ARGS.shared(a), ARGS.keys(a), ARGS.size(a), ARGS.k_step(a)
        key, pitch, rows = load_long(heads + K), 4 * round_up(size, LANES), ARGS.tokens(a) * shared
        row, ahead = 0, AHEAD * step if s + AHEAD < high else 0
        while row < rows:
            count, query = min(MOST_ROWS, rows - row), queries + row * pitch
            if count == 4:
                four(query, pitch, key, step, s, keys, size, memory, ahead)
            elif count == 3:
                three(query, pitch, key, step, s, keys, size, memory, ahead)
            elif count == 2:
                two(query, pitch, key, step, s, keys, size, memory, ahead)
            else:
                one(query, pitch, key, step, s, keys, size, memory, ahead)
            for i in range(count):
                to, highest = scores + (row + i) * reach, lanes + (row + i) * VECTOR
                finish(a, heads, row + i, s, count, memory + i * VECTOR, to, highest)
            row, ahead = row + count, 0

    return Keys(part(take), part(each), part(own), part(add))


def _keys_in_blocks(dtype: DType) -> Keys:
    """Make the operations with keys in blocks: integer dot products."""
    turn_keys, span = attention_keys.turn_keys(dtype), CELLS[dtype].span

    @part
    def each(size):
        return round_up(size + size // BLOCK * 8, 64)

    def own(size):
        return (size // BLOCK + 1) * (SQUARE + 32)

    def add(a, heads, s, high, queries, memory, scores, reach, lanes):
        shared, keys, size, step = ARGS.shared(a), ARGS.keys(a), ARGS.size(a), ARGS.k_step(a)
        factor, cap, key, pitch = ARGS.factor(a), ARGS.cap(a), load_long(heads + K) + s * step, each(size)
        turn_keys(key, step, keys - 1 - s, size, memory)
        fetch(key + AHEAD * step, step, min(LANES, high - s - AHEAD), span(size))
        for t in range(ARGS.tokens(a)):
            for h in range(shared):
                head, row = heads + h * HEAD, t * shared + h
                hidden = mask_lanes(load_long(head + MASK) + t * ARGS.mask_step(a), s, keys)
                x = mul(dots(queries + row * pitch, memory, size), splat(factor))
                x = finished(x, hidden, cap, load_scalar(head + SLOPE))
                store(lanes + row * VECTOR, greater(x, load(lanes + row * VECTOR)))
                store(scores + row * reach, x)

    return Keys(attention_keys.round_query(dtype), each, part(own), part(add))


def _add_keys(keys: Keys) -> Part:
    """Make the scores of all rows of a walk for keys `low` to `high`, and the highest score of each lane in `lanes`."""
    take, each, own, add = keys.take, keys.each, keys.own, keys.add

    def add_keys(a, heads, low, high, scores, reach, lanes, memory):
        tokens, shared, size, beside = ARGS.tokens(a), ARGS.shared(a), ARGS.size(a), ARGS.beside(a)
        rows, pitch, queries = tokens * shared, each(size), memory + own(size)
        for row in range(beside * rows):
            g, t, h = row // rows, row % rows // shared, row % shared
            take(load_long(heads + (g * shared + h) * HEAD + Q) + t * ARGS.q_step(a), size, queries + row * pitch)
            store(lanes + row * VECTOR, splat(MINUS_INFINITY))
        for s in range(low, high, LANES):
            for g in range(beside):
                row, group = g * rows, heads + g * shared * HEAD
                to = scores + row * reach + 4 * (s - low)
                add(a, group, s, high, queries + row * pitch, memory, to, reach, lanes + row * VECTOR)

    return part(add_keys)


def _some_values(cells: Cells) -> Part:
    """Make the part that locates 64 columns of `n` values: address, value stride, first column, end column."""
    if cells.expand is None:
        return part(lambda values, step, n, ahead, c, width, scratch: (values, step, c, width))
    expand, span = cells.expand, cells.span

    def some_values(values, step, n, ahead, c, width, scratch):
        end = min(width, c + COLUMNS)
        for r in range(n):
            expand(values + r * step, c, end, scratch + 4 * r * COLUMNS)
            fetch(values + r * step + ahead + span(c), step, 1, span(end - c))
        return scratch, 4 * COLUMNS, 0, end - c

    return part(some_values)


def _add_values(cells: Cells) -> Part:
    """Make the part that adds the weighted values of keys `low` to `high` to the states of all rows of a walk."""
    lines = 0 if cells.expand else cells.nbytes * COLUMNS // LINE
    one, two, three, four = (_values(_as_read(cells), count, lines) for count in range(1, 5))
    some_values = _some_values(cells)

    @part
    def add(a, value, left, scores, reach, states, pitch, memory):
        step, width, rows, n = ARGS.v_step(a), ARGS.width(a), ARGS.tokens(a) * ARGS.shared(a), min(RUN, left)
        soon = AHEAD * step if left > AHEAD else 0
        for c in range(0, width, COLUMNS):
            at, pace, col, end = some_values(value, step, n, soon, c, width, memory)
            row, ahead = 0, soon
            while row < rows:
                several, p, to = min(MOST_ROWS, rows - row), scores + row * reach, states + row * pitch + VALUES + 4 * c
                if several == 4:
                    four(p, reach, at, pace, n, to, pitch, col, end, ahead)
                elif several == 3:
                    three(p, reach, at, pace, n, to, pitch, col, end, ahead)
                elif several == 2:
                    two(p, reach, at, pace, n, to, pitch, col, end, ahead)
                else:
                    one(p, reach, at, pace, n, to, pitch, col, end, ahead)
                row, ahead = row + several, 0

    def add_values(a, heads, low, high, scores, reach, states, pitch, memory):
        shared, rows, step = ARGS.shared(a), ARGS.tokens(a) * ARGS.shared(a), ARGS.v_step(a)
        for s in range(low, high, RUN):
            for g in range(ARGS.beside(a)):
                value, row = load_long(heads + g * shared * HEAD + V) + s * step, g * rows
                p, to = scores + row * reach + 4 * (s - low), states + row * pitch
                add(a, value, high - s, p, reach, to, pitch, memory)

    return part(add_values)


@cache
def attend(k: DType, v: DType) -> Kernel:
    """Make the decode kernel for keys of type `k` and values of type `v`. A unit is a walk and a split of the keys."""
    add_keys = _add_keys(_keys_in_blocks(k) if k.is_quantised else _keys_in_floats(CELLS[k]))
    add_values = _add_values(CELLS[v])

    def body(a, thread, threads):
        tokens, keys, width, chunks = ARGS.tokens(a), ARGS.keys(a), ARGS.width(a), ARGS.chunks(a)
        beside, span = ARGS.beside(a), VALUES + 4 * round_up(width, COLUMNS)
        heads_of = beside * ARGS.shared(a)
        rows, reach, pitch = tokens * heads_of, 4 * min(PIECE, round_up(keys, LANES)), chunks * span
        scores = ARGS.scratch(a) + thread * ARGS.scratch_bytes(a)
        lanes = scores + rows * reach
        memory = lanes + rows * VECTOR
        lo, hi = share(ARGS.units(a) // beside * chunks, thread, threads)
        for unit in range(lo, hi):
            walk, chunk = unit // chunks, unit % chunks
            heads = ARGS.heads(a) + walk * heads_of * HEAD
            states = ARGS.partial(a) + (walk * rows * chunks + chunk) * span
            start, end = seen_range(heads, heads_of, tokens, ARGS.mask_step(a), keys)
            first, last = share((end - start + LANES - 1) // LANES, chunk, chunks)
            start, end = start + first * LANES, min(end, start + last * LANES)
            for r in range(rows):
                for c in range(0, span, 64):
                    store(states + r * pitch + c, zeros())
                store_scalar(states + r * pitch, LOWEST)
            for low in range(start, end, PIECE):
                high = min(end, low + PIECE)
                add_keys(a, heads, low, high, scores, reach, lanes, memory)
                for r in range(rows):
                    to_weights(scores + r * reach, high - low, lanes + r * VECTOR, states + r * pitch, width)
                add_values(a, heads, low, high, scores, reach, states, pitch, memory)
            if chunks == 1:
                for group in range(walk * beside, walk * beside + beside):
                    put_group(a, group, scores)
        return 0

    return Kernel(f"attention_few.attend.{k}.{v}", body)


@kernel
def join(a, thread, threads):
    """Combine the partial results of every group of heads."""
    lo, hi = share(ARGS.units(a), thread, threads)
    for unit in range(lo, hi):
        put_group(a, unit, ARGS.scratch(a) + thread * ARGS.scratch_bytes(a))
    return 0
