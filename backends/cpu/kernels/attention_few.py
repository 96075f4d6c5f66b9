"""Attention of few tokens: lanes are keys, and keys and values are read once for all heads that share them.

Keys may be cut into parts, which threads share; `join` puts the parts together.
"""

from __future__ import annotations

from functools import cache

from ....graph.dtypes import DType
from ..compiler import Kernel, Part, kernel, part
from ..simd.order import fold_1, fold_2, fold_4, fold_8
from ..simd.vectors import (
    LANES,
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
    zeros,
)
from ..words import words
from . import attention_keys
from .attention_keys import SQUARE, dots
from .blocks import BLOCK
from .cells import CELLS, Cells
from .packing import share
from .rows import put
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
SUM, VALUES = 4, 64
"""Bytes into a partial result: the highest score, the sum of weights, the sum of weighted values."""


def part_bytes(width: int) -> int:
    """Bytes of a partial result."""
    return VALUES + 4 * (-(-width // COLUMNS) * COLUMNS)


def scratch_bytes(rows: int, keys: int, size: int, width: int) -> int:
    """Scores of every row, a partial result that is of no use, and keys or values as float32."""
    tile = max(4 * RUN * COLUMNS, attention_keys.keys_bytes(size) + rows * attention_keys.query_bytes(size))
    return rows * 4 * (-(-keys // LANES) * LANES) + part_bytes(width) + tile


def _eight_dots(cells: Cells) -> Part:
    """The products of a query with eight keys from number i, each as two numbers to be added; a key past the last is
    the last."""
    some = cells.some

    def eight_sums(x, key, offsets, col, size, sums):
        """Sums of products with eight keys, 16 columns further."""
        i, j, k, l, m, n, o, p = offsets
        a, b, c, d, e, f, g, h = sums
        a, b, c, d = (
            fma(some(key + i, col, size), x, a),
            fma(some(key + j, col, size), x, b),
            fma(some(key + k, col, size), x, c),
            fma(some(key + l, col, size), x, d),
        )
        e, f, g, h = (
            fma(some(key + m, col, size), x, e),
            fma(some(key + n, col, size), x, f),
            fma(some(key + o, col, size), x, g),
            fma(some(key + p, col, size), x, h),
        )
        return a, b, c, d, e, f, g, h

    further = part(eight_sums)

    def eight_dots(query, key, step, i, last, size):
        offsets = (
            min(i, last) * step,
            min(i + 1, last) * step,
            min(i + 2, last) * step,
            min(i + 3, last) * step,
            min(i + 4, last) * step,
            min(i + 5, last) * step,
            min(i + 6, last) * step,
            min(i + 7, last) * step,
        )
        sums, c = (zeros(), zeros(), zeros(), zeros(), zeros(), zeros(), zeros(), zeros()), 0
        while c + LANES <= size:
            sums = further(load(query + 4 * c), key, offsets, c, c + LANES, sums)
            c += LANES
        if c < size:
            sums = further(load_some(query + 4 * c, size - c), key, offsets, c, size, sums)
        a, b, d, e, f, g, h, k = sums
        return fold_2(fold_4(fold_8(a, b), fold_8(d, e)), fold_4(fold_8(f, g), fold_8(h, k)))

    return part(eight_dots)


@part
def four_from(p):
    return load(p), load(p + 64), load(p + 128), load(p + 192)


@part
def four_to(p, values):
    a, b, c, d = values
    store(p, a)
    store(p + 64, b)
    store(p + 128, c)
    store(p + 192, d)


def _add_values(cells: Cells) -> Part:
    """Values of `n` keys with the weights of two rows, added to 64 columns from column `col` of each."""
    whole, some, span = cells.whole, cells.some, cells.span

    def four_values(row, c, width):
        if width - c >= COLUMNS:
            return whole(row, c), whole(row, c + 16), whole(row, c + 32), whole(row, c + 48)
        return some(row, c, width), some(row, c + 16, width), some(row, c + 32, width), some(row, c + 48, width)

    four = part(four_values)

    def add_values(p, q, value, pace, n, ahead, to, on, col, width):
        a, b, c, d = four_from(to)
        e, f, g, h = four_from(on)
        for r in range(n):
            row = value + r * pace
            if ahead != 0:
                for line in range(0, span(min(width - col, COLUMNS)), LINE):
                    prefetch_far(row + span(col) + ahead + line)
            k, l, m, o = four(row, col, width)
            u, v = splat_from(p + 4 * r), splat_from(q + 4 * r)
            a, b, c, d = fma(k, u, a), fma(l, u, b), fma(m, u, c), fma(o, u, d)
            e, f, g, h = fma(k, v, e), fma(l, v, f), fma(m, v, g), fma(o, v, h)
        four_to(to, (a, b, c, d))
        four_to(on, (e, f, g, h))

    return part(add_values)


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
    eight_dots, span = _eight_dots(cells), cells.span

    def add_keys(a, heads, low, high, scores, states, pitch, tile):
        tokens, shared, keys, size = ARGS.tokens(a), ARGS.shared(a), ARGS.keys(a), ARGS.size(a)
        q_step, step, mask_step = ARGS.q_step(a), ARGS.k_step(a), ARGS.mask_step(a)
        factor, cap, reach = ARGS.factor(a), ARGS.cap(a), 4 * round_up(keys, LANES)
        key, each = load_long(heads + K), round_up(LANES // 2, tokens * shared) // (tokens * shared)
        for s in range(low, high, LANES):
            soon, end = s + AHEAD, min(high, s + AHEAD + LANES)
            for half in range(0, LANES, LANES // 2):  # so few keys stay in the first cache, however far apart they lie
                to, state = scores + 4 * (s - low), states
                for t in range(tokens):
                    for h in range(shared):
                        head = heads + h * HEAD
                        query, seen = load_long(head + Q) + t * q_step, load_long(head + MASK) + t * mask_step
                        x = eight_dots(query, key + s * step, step, half, keys - 1 - s, size)
                        if half != 0:
                            x, hidden = mul(fold_1(load(to), x), splat(factor)), mask_lanes(seen, s, keys)
                            x = finished(x, hidden, cap, load_scalar(head + SLOPE))
                            store(state, greater(x, load(state)))
                        store(to, x)
                        to += reach
                        state += pitch
                        fetch(key + soon * step, step, min(each, end - soon), span(size))
                        soon += each

    return part(add_keys)


def _add_keys_in_blocks(dtype: DType) -> Part:
    """As `_add_keys`, by integers."""
    round_query, turn_keys, span = attention_keys.round_query(dtype), attention_keys.turn_keys(dtype), CELLS[dtype].span

    def add_keys(a, heads, low, high, scores, states, pitch, tile):
        tokens, shared, keys, size = ARGS.tokens(a), ARGS.shared(a), ARGS.keys(a), ARGS.size(a)
        q_step, step, mask_step = ARGS.q_step(a), ARGS.k_step(a), ARGS.mask_step(a)
        factor, cap, reach = ARGS.factor(a), ARGS.cap(a), 4 * round_up(keys, LANES)
        key, each = load_long(heads + K), round_up(size + size // BLOCK * 8, 64)
        queries = tile + (size // BLOCK + 1) * (SQUARE + 32)
        for t in range(tokens):
            for h in range(shared):
                query = load_long(heads + h * HEAD + Q) + t * q_step
                round_query(query, size, queries + (t * shared + h) * each)
        for s in range(low, high, LANES):
            turn_keys(key + s * step, step, keys - 1 - s, size, tile)
            soon = s + AHEAD
            fetch(key + soon * step, step, min(LANES, high - soon), span(size))
            to, state, query = scores + 4 * (s - low), states, queries
            for t in range(tokens):
                for h in range(shared):
                    head = heads + h * HEAD
                    hidden = mask_lanes(load_long(head + MASK) + t * mask_step, s, keys)
                    x = finished(mul(dots(query, tile, size), splat(factor)), hidden, cap, load_scalar(head + SLOPE))
                    store(state, greater(x, load(state)))
                    store(to, x)
                    to += reach
                    state += pitch
                    query += each

    return part(add_keys)


def _some_values(cells: Cells) -> Part:
    """Where 64 columns from column `c` of `n` values lie: as they are kept, or in `tile` as float32.  Also the bytes
    from value to value, and from which column to before which they are, and `ahead` if that has to be fetched."""
    if cells.expand is None:
        return part(lambda values, step, n, ahead, c, width, tile: (values, step, c, width, ahead))
    expand, span = cells.expand, cells.span

    def some_values(values, step, n, ahead, c, width, tile):
        end = min(width, c + COLUMNS)
        for r in range(n):
            if ahead != 0:
                for line in range(span(c), span(end), LINE):
                    prefetch_far(values + r * step + ahead + line)
            expand(values + r * step, c, end, tile + 4 * r * COLUMNS)
        return tile, 4 * COLUMNS, 0, end - c, 0

    return part(some_values)


def _add_all_values(cells: Cells) -> Part:
    """The weighted values of `n` keys, added to the states of all rows."""
    some_values, add_values = _some_values(cells), _add_values(_as_read(cells))

    def add_all_values(a, value, rows, n, scores, states, pitch, unused, tile):
        step, width, reach = ARGS.v_step(a), ARGS.width(a), 4 * round_up(ARGS.keys(a), LANES)
        for s in range(0, n, RUN):
            count, far = min(RUN, n - s), AHEAD * step if s + AHEAD + RUN <= n else 0
            for c in range(0, width, COLUMNS):
                row, pace, col, end, ahead = some_values(value + s * step, step, count, far, c, width, tile)
                for r in range(0, rows, 2):
                    p, to = scores + r * reach + 4 * s, states + r * pitch + VALUES + 4 * c
                    q, on = (p + reach, to + pitch) if r + 1 < rows else (p, unused + VALUES + 4 * c)
                    add_values(p, q, row, pace, count, ahead if r == 0 else 0, to, on, col, end)

    return part(add_all_values)


@cache
def attend(k: DType, v: DType) -> Kernel:
    """A part of the keys, of type `k`, and of the values, of type `v`, with a group of heads at a time."""
    add_keys = _add_keys_in_blocks(k) if k.is_quantised else _add_keys(CELLS[k])
    add_all_values = _add_all_values(CELLS[v])

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
            unused = scores + rows * reach
            tile = unused + VALUES + 4 * round_up(ARGS.width(a), COLUMNS)
            add_keys(a, heads, low, high, scores, states, pitch, tile)
            for r in range(rows):
                to_weights(scores + r * reach, high - low, states + r * pitch)
            value = load_long(heads + V) + low * ARGS.v_step(a)
            add_all_values(a, value, rows, high - low, scores, states, pitch, unused, tile)
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
