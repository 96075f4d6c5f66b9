"""Attention of many tokens: tiles of 64 keys meet blocks of 32 tokens, softmax streaming.

Lanes are tokens.  Scores ``K Q^T`` and results ``P V`` are the same product of small matrices, `add_products`; keys
and values of a tile are copied first, so that rows of any stride and length become dense and padded.
"""

from __future__ import annotations

from ..compiler import kernel, part
from .rows import put
from .scores import (
    CAP,
    FACTOR,
    HEAD,
    HEADS,
    K_STEP,
    KEYS,
    LOWEST,
    MASK,
    MASK_STEP,
    MINUS_INFINITY,
    NONE,
    ONE,
    OUT,
    OUT_STEP,
    Q_STEP,
    SCRATCH,
    SCRATCH_BYTES,
    SHARED,
    SIZE,
    SLOPE,
    TOKENS,
    UNITS,
    V_STEP,
    WIDTH,
    K,
    Q,
    V,
    finished,
    greater,
    mask_lanes,
    power,
    seen_lanes,
    sink_of,
)
from .simd import (
    LANES,
    add,
    float_word,
    fma,
    largest,
    load,
    load_long,
    load_scalar,
    load_some_or,
    maximum,
    minimum,
    mul,
    splat,
    splat_from,
    store,
    store_long,
    sub,
    turn,
    word,
    zeros,
    zeros_above,
    zeros_below,
)

TILE = 64
"""Keys of a tile: a bit of a word each."""
BLOCK = 32
"""Tokens of a block, and columns of a small matrix: two vectors."""
ROWS = 8
"""Rows of a small matrix."""


def padded(n: int, step: int) -> int:
    return -(-n // step) * step


def scratch_bytes(shared: int, size: int, width: int) -> int:
    """As `attend` lays it out."""
    deep, wide = padded(size, LANES), padded(width, BLOCK)
    return 4 * (TILE * (deep + wide + 2 * BLOCK) + 16 + BLOCK + shared * BLOCK * (deep + wide + 2))


@part
def copy_rows(source, step, rows, size, to, count, wide, otherwise):
    """`rows` rows of `size` numbers to `count` dense ones of `wide`; what is missing is `otherwise`."""
    for r in range(count):
        for c in range(0, wide, LANES):
            left, at = size - c, source + r * step + 4 * c
            if r >= rows or left <= 0:
                value = otherwise
            elif left >= LANES:
                value = load(at)
            else:
                value = load_some_or(at, left, otherwise)
            store(to + 4 * (r * wide + c), value)


@part
def add_products(a, row, column, b, step, n, to, pace, fresh):
    """``to[j] += sum_i a[j, i] b[i]``: 8 rows j of 32 columns; `row` and `column` bytes between elements of a, `step`
    and `pace` between rows of b and `to`.  `fresh`: what `to` held does not count."""
    p0, p1, p2, p3, p4, p5, p6, p7 = zeros(), zeros(), zeros(), zeros(), zeros(), zeros(), zeros(), zeros()
    q0, q1, q2, q3, q4, q5, q6, q7 = p0, p1, p2, p3, p4, p5, p6, p7
    if not fresh:
        p0, q0, p1, q1 = load(to), load(to + 64), load(to + pace), load(to + pace + 64)
        p2, q2, p3, q3 = load(to + 2 * pace), load(to + 2 * pace + 64), load(to + 3 * pace), load(to + 3 * pace + 64)
        p4, q4, p5, q5 = load(to + 4 * pace), load(to + 4 * pace + 64), load(to + 5 * pace), load(to + 5 * pace + 64)
        p6, q6, p7, q7 = load(to + 6 * pace), load(to + 6 * pace + 64), load(to + 7 * pace), load(to + 7 * pace + 64)
    for _ in range(n):
        x, y = load(b), load(b + 64)
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
def put_two(to, x, y):
    store(to, x)
    store(to + 64, y)


@part
def survey(seen, step, tokens, s, keys, to):
    """Which keys of a tile each eight tokens may see, as words of bits.  Returns those that any may, and whether the
    mask is zero throughout."""
    low, high, union = zeros(), zeros(), 0
    for first in range(0, BLOCK, ROWS):
        bits = 0
        for r in range(0, TILE, LANES):
            tops = splat(MINUS_INFINITY)
            for t in range(first, min(tokens, first + ROWS)):
                mask = mask_lanes(seen + t * step, s + r, keys)
                low, high, tops = minimum(low, mask), maximum(high, mask), maximum(tops, mask)
            bits |= seen_lanes(tops) << r
        store_long(to + first, bits)
        union |= bits
    return union, largest(maximum(high, sub(zeros(), low))) == NONE


@part
def reach(bits):
    """From the first key that is seen to past the last one, in steps of eight."""
    return zeros_below(bits) // ROWS * ROWS, (TILE - zeros_above(bits) + ROWS - 1) // ROWS * ROWS


@part
def soften(p, hidden, low, high, factor, cap, slope, state, fades):
    """Products of a tile to weights, in place; what earlier sums fade by.  `hidden`: the mask with tokens as lanes, or
    0.  State: the highest score and the sum of weights of each token."""
    x, y, h, g = load(state), load(state + 64), zeros(), zeros()
    before, other = x, y
    for r in range(low, high):
        at = p + 4 * BLOCK * r
        if hidden != 0:
            h, g = load(hidden + 4 * BLOCK * r), load(hidden + 4 * BLOCK * r + 64)
        u, v = finished(load(at), h, factor, cap, slope), finished(load(at + 64), g, factor, cap, slope)
        put_two(at, u, v)
        x, y = greater(u, x), greater(v, y)
    put_two(state, x, y)
    sums, more = zeros(), zeros()
    for r in range(low, high):
        at = p + 4 * BLOCK * r
        u, v = power(sub(load(at), x)), power(sub(load(at + 64), y))
        put_two(at, u, v)
        sums, more = add(sums, u), add(more, v)
    h, g = power(sub(before, x)), power(sub(other, y))
    put_two(fades, h, g)
    put_two(state + 128, fma(load(state + 128), h, sums), fma(load(state + 192), g, more))


@part
def fade_rows(rows, wide, tokens, fades):
    for t in range(tokens):
        if load_scalar(fades + 4 * t) != ONE:
            f = splat_from(fades + 4 * t)
            for c in range(0, 4 * wide, 64):
                at = rows + 4 * t * wide + c
                store(at, mul(load(at), f))


@kernel
def attend(a, thread, threads):
    """A block of tokens of a group of heads at a time; the blocks go round the threads, since later ones see more."""
    tokens, units, shared, keys, size, width = (
        word(a, TOKENS),
        word(a, UNITS),
        word(a, SHARED),
        word(a, KEYS),
        word(a, SIZE),
        word(a, WIDTH),
    )
    deep, wide = (size + LANES - 1) // LANES * LANES, (width + BLOCK - 1) // BLOCK * BLOCK
    factor, cap, step = float_word(a, FACTOR), float_word(a, CAP), word(a, MASK_STEP)
    key_tile = word(a, SCRATCH) + thread * word(a, SCRATCH_BYTES)
    value_tile = key_tile + 4 * TILE * deep
    p = value_tile + 4 * TILE * wide
    hidden = p + 4 * TILE * BLOCK
    bits = hidden + 4 * TILE * BLOCK
    fades = bits + 64
    turned = fades + 4 * BLOCK
    states = turned + 4 * shared * BLOCK * deep
    results = states + 8 * shared * BLOCK
    for unit in range(thread, units * ((tokens + BLOCK - 1) // BLOCK), threads):
        heads, first = word(a, HEADS) + unit % units * shared * HEAD, unit // units * BLOCK
        count = min(BLOCK, tokens - first)
        for h in range(shared):
            head = heads + h * HEAD
            query, sink = load_long(head + Q) + first * word(a, Q_STEP), sink_of(head)
            copy_rows(query, word(a, Q_STEP), count, size, key_tile, BLOCK, deep, zeros())
            for c in range(0, deep, LANES):
                to = turned + 4 * BLOCK * (h * deep + c)
                turn(key_tile + 4 * c, 4 * deep, to, 4 * BLOCK)
                turn(key_tile + 4 * (LANES * deep + c), 4 * deep, to + 64, 4 * BLOCK)
            top, state = max(sink, LOWEST), states + 8 * BLOCK * h
            put_two(state, splat(top), splat(top))
            put_two(state + 128, power(splat(sink - top)), power(splat(sink - top)))
        for i in range(0, 4 * shared * BLOCK * wide, 64):
            store(results + i, zeros())
        for s in range(0, keys, TILE):
            ready, known, union, plain = False, 0, 0, False
            for h in range(shared):
                head = heads + h * HEAD
                seen = load_long(head + MASK) + first * step
                if seen != known:
                    union, plain = survey(seen, step, count, s, keys, bits)
                    known = seen
                    if union != 0 and not plain:
                        copy_rows(seen + 4 * s, step, count, keys - s, p, BLOCK, TILE, splat(MINUS_INFINITY))
                        for r in range(0, TILE, LANES):
                            turn(p + 4 * r, 4 * TILE, hidden + 4 * BLOCK * r, 4 * BLOCK)
                            turn(p + 4 * (LANES * TILE + r), 4 * TILE, hidden + 4 * BLOCK * r + 64, 4 * BLOCK)
                if union == 0:
                    continue
                if not ready:
                    source, pace = load_long(heads + K) + s * word(a, K_STEP), word(a, K_STEP)
                    copy_rows(source, pace, keys - s, size, key_tile, TILE, deep, zeros())
                    source, pace = load_long(heads + V) + s * word(a, V_STEP), word(a, V_STEP)
                    copy_rows(source, pace, keys - s, width, value_tile, TILE, wide, zeros())
                    ready = True
                low, high = reach(union)
                queries, result = turned + 4 * BLOCK * h * deep, results + 4 * BLOCK * h * wide
                for r in range(low, high, ROWS):
                    at, to = key_tile + 4 * r * deep, p + 4 * BLOCK * r
                    add_products(at, 4 * deep, 4, queries, 4 * BLOCK, size, to, 4 * BLOCK, True)
                masked, state = 0 if plain else hidden, states + 8 * BLOCK * h
                soften(p, masked, low, high, factor, cap, load_scalar(head + SLOPE), state, fades)
                fade_rows(result, wide, count, fades)
                for t in range(0, count, ROWS):
                    low, high = reach(load_long(bits + t))
                    weights, at, to = p + 4 * (BLOCK * low + t), value_tile + 4 * low * wide, result + 4 * t * wide
                    for c in range(0, 4 * wide, 4 * BLOCK):
                        add_products(weights, 4, 4 * BLOCK, at + c, 4 * wide, high - low, to + c, 4 * wide, False)
        for h in range(shared):
            target, state = load_long(heads + h * HEAD + OUT), states + 8 * BLOCK * h
            for t in range(count):
                weight = load_scalar(state + 128 + 4 * t)
                f = splat(ONE / weight if weight > NONE else NONE)
                source, to = results + 4 * (h * BLOCK + t) * wide, target + (first + t) * word(a, OUT_STEP)
                for c in range(0, width, LANES):
                    put(to, c, width, mul(load(source + 4 * c), f))
    return 0
