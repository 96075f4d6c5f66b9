"""Attention over a cache with a streaming softmax: few queries go key by key, many in tiles of 64 keys."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..compiler import kernel, part
from ..steps import Bound, Operand, Steps
from .packing import share
from .rows import exp
from .simd import (
    LANES,
    add,
    float_word,
    fma,
    largest,
    load,
    load_scalar,
    load_some_or,
    maximum,
    mul,
    prefetch,
    splat,
    splat_from,
    store,
    store_scalar,
    sub,
    total,
    word,
    zeros,
)

KEYS = 64
"""Keys of a tile."""
LINE, AHEAD = 64, 8
"""Bytes of a cache line, and keys ahead of their use at which they are fetched."""
TOKENS = 32
"""Tokens whose queries pass over a tile together."""
LOWEST = np.float32(-3.0e38)
"""Below every score that is not masked."""
ONE, NONE, MINUS_INFINITY = np.float32(1), np.float32(0), np.float32(-np.inf)
"""Numba takes a number of Python for float64."""


@part
def exp_of(x):
    return largest(exp(splat(x)))


@part
def dot(x, y, n):
    first, second, c = zeros(), zeros(), 0
    while c + 2 * LANES <= n:
        first, second = (
            fma(load(x + 4 * c), load(y + 4 * c), first),
            fma(load(x + 4 * c + 64), load(y + 4 * c + 64), second),
        )
        c += 2 * LANES
    if c < n:
        first = fma(load(x + 4 * c), load(y + 4 * c), first)
    return total(add(first, second))


@kernel
def attend_few(a, thread, threads):
    """A query at a time: scores of all keys, their softmax, the sum of values.

    Words: counts B T H G S D E, then address and byte strides of q (b t h), k (b s h), v (b s h), mask (b t) and out
    (b t h), scale, scratch, its bytes for each thread.
    """
    tokens, heads, shared, keys, size, width = word(a, 1), word(a, 2), word(a, 3), word(a, 4), word(a, 5), word(a, 6)
    q, k, v, mask, out = word(a, 7), word(a, 11), word(a, 15), word(a, 19), word(a, 22)
    scale, scores = float_word(a, 26), word(a, 27) + thread * word(a, 28)
    lo, hi = share(word(a, 0) * tokens * heads, thread, threads)
    for unit in range(lo, hi):
        b, rest = unit // (tokens * heads), unit % (tokens * heads)
        t, h = rest // heads, rest % heads
        query = q + b * word(a, 8) + t * word(a, 9) + h * word(a, 10)
        key = k + b * word(a, 12) + h // shared * word(a, 14)
        value = v + b * word(a, 16) + h // shared * word(a, 18)
        seen = mask + b * word(a, 20) + t * word(a, 21)
        target = out + b * word(a, 23) + t * word(a, 24) + h * word(a, 25)
        step, pace = word(a, 13), word(a, 17)
        top, last = LOWEST, seen_end(seen, keys) if mask else keys
        for s in range(last):
            for c in range(0, 4 * size, LINE):
                prefetch(key + (s + AHEAD) * step + c)
            for c in range(0, 4 * width, LINE):
                prefetch(value + s * pace + c)
            hidden = load_scalar(seen + 4 * s) if mask else NONE
            if hidden < LOWEST:
                store_scalar(scores + 4 * s, MINUS_INFINITY)
            else:
                score = dot(query, key + s * step, size) * scale + hidden
                top = max(top, score)
                store_scalar(scores + 4 * s, score)
        highest, sums, s = splat(top), zeros(), 0
        while s < last:
            p = exp(sub(load(scores + 4 * s), highest))
            store(scores + 4 * s, p)
            s += LANES
        for r in range(last, s):
            store_scalar(scores + 4 * r, NONE)
        for r in range(0, s, LANES):
            sums = add(sums, load(scores + 4 * r))
        weight = total(sums)
        factor = splat(ONE / weight if weight > NONE else NONE)
        for c in range(0, width, LANES):
            first, second, r = zeros(), zeros(), 0
            at = value + 4 * c
            while r + 2 <= last:
                first = fma(splat_from(scores + 4 * r), load(at + r * pace), first)
                second = fma(splat_from(scores + 4 * r + 4), load(at + (r + 1) * pace), second)
                r += 2
            if r < last:
                first = fma(splat_from(scores + 4 * r), load(at + r * pace), first)
            store(target + 4 * c, mul(add(first, second), factor))
    return 0


@part
def mask_lanes(seen, s, keys):
    """The mask of 16 keys; -inf past the last one."""
    if keys - s >= LANES:
        return load(seen + 4 * s)
    return load_some_or(seen + 4 * s, keys - s, splat(MINUS_INFINITY))


@part
def seen_end(seen, keys):
    """One past the last key that may be seen, or a little more."""
    s = (keys + LANES - 1) // LANES * LANES
    while s > 0 and largest(mask_lanes(seen, s - LANES, keys)) < LOWEST:
        s -= LANES
    return min(s, keys)


@part
def hidden_tile(seen, s, keys):
    """Whether no key of a tile may be seen."""
    while_hidden = True
    for r in range(s, min(keys, s + KEYS), LANES):
        while_hidden = while_hidden and largest(mask_lanes(seen, r, keys)) < LOWEST
    return while_hidden


@part
def turn_tile(key, step, s, keys, size, to):
    """Keys of a tile with their elements outside: [size, 64]; missing keys are zero."""
    for c in range(0, size, LANES):
        for r in range(KEYS):
            if s + r < keys:
                at = key + (s + r) * step + 4 * c
                for i in range(LANES):
                    store_scalar(to + 4 * ((c + i) * KEYS + r), load_scalar(at + 4 * i))
            else:
                for i in range(LANES):
                    store_scalar(to + 4 * ((c + i) * KEYS + r), NONE)


@part
def soften(p, seen, s, keys, scale, state):
    """Raw scores of a tile to weights, in place.  Returns what earlier sums fade by.

    State: the highest score so far, the sum of weights, then the sum of values.
    """
    f, tops = splat(scale), splat(MINUS_INFINITY)
    for r in range(0, KEYS, LANES):
        score = mul(load(p + 4 * r), f)
        if s + r >= keys:
            score = splat(MINUS_INFINITY)
        elif seen != 0:
            score = add(score, mask_lanes(seen, s + r, keys))
        elif s + r + LANES > keys:
            score = load_some_or(p + 4 * r, keys - s - r, splat(MINUS_INFINITY))
            score = mul(score, f)
        store(p + 4 * r, score)
        tops = maximum(tops, score)
    before = load_scalar(state)
    top = max(max(before, largest(tops)), LOWEST)
    highest, sums = splat(top), zeros()
    for r in range(0, KEYS, LANES):
        e = exp(sub(load(p + 4 * r), highest))
        store(p + 4 * r, e)
        sums = add(sums, e)
    fade = exp_of(before - top)
    store_scalar(state, top)
    store_scalar(state + 4, load_scalar(state + 4) * fade + total(sums))
    return fade


@part
def two_tiles(x, y, turned, size, scale, seen, other, s, keys, p, q, state, second, width, value, pace):
    """Two queries meet one tile."""
    a0, a1, a2, a3 = zeros(), zeros(), zeros(), zeros()
    b0, b1, b2, b3 = zeros(), zeros(), zeros(), zeros()
    for c in range(size):
        at, u, v = turned + 4 * c * KEYS, splat_from(x + 4 * c), splat_from(y + 4 * c)
        k0, k1, k2, k3 = load(at), load(at + 64), load(at + 128), load(at + 192)
        a0, a1, a2, a3 = fma(k0, u, a0), fma(k1, u, a1), fma(k2, u, a2), fma(k3, u, a3)
        b0, b1, b2, b3 = fma(k0, v, b0), fma(k1, v, b1), fma(k2, v, b2), fma(k3, v, b3)
    store(p, a0)
    store(p + 64, a1)
    store(p + 128, a2)
    store(p + 192, a3)
    store(q, b0)
    store(q + 64, b1)
    store(q + 128, b2)
    store(q + 192, b3)
    f, g = splat(soften(p, seen, s, keys, scale, state)), splat(soften(q, other, s, keys, scale, second))
    at, left = value + s * pace, min(KEYS, keys - s)
    for c in range(0, width, 2 * LANES):
        to, on = state + 64 + 4 * c, second + 64 + 4 * c
        if c + LANES < width:
            a0, a1, b0, b1 = mul(load(to), f), mul(load(to + 64), f), mul(load(on), g), mul(load(on + 64), g)
            for r in range(left):
                v0, v1 = load(at + r * pace + 4 * c), load(at + r * pace + 4 * c + 64)
                w, z = splat_from(p + 4 * r), splat_from(q + 4 * r)
                a0, a1, b0, b1 = fma(v0, w, a0), fma(v1, w, a1), fma(v0, z, b0), fma(v1, z, b1)
            store(to, a0)
            store(to + 64, a1)
            store(on, b0)
            store(on + 64, b1)
        else:
            a0, b0 = mul(load(to), f), mul(load(on), g)
            for r in range(left):
                v0 = load(at + r * pace + 4 * c)
                a0, b0 = fma(v0, splat_from(p + 4 * r), a0), fma(v0, splat_from(q + 4 * r), b0)
            store(to, a0)
            store(on, b0)


@kernel
def attend_many(a, thread, threads):
    """Blocks of 16 tokens with all queries that share a key head; tile after tile.  Words as of `attend_few`."""
    tokens, heads, shared, keys, size, width = word(a, 1), word(a, 2), word(a, 3), word(a, 4), word(a, 5), word(a, 6)
    q, k, v, mask, out = word(a, 7), word(a, 11), word(a, 15), word(a, 19), word(a, 22)
    scale, scratch = float_word(a, 26), word(a, 27) + thread * word(a, 28)
    turned, p = scratch, scratch + 4 * KEYS * size
    states, span = p + 8 * KEYS, 64 + 4 * width
    groups, blocks = heads // shared, (tokens + TOKENS - 1) // TOKENS
    lo, hi = share(word(a, 0) * groups * blocks, thread, threads)
    for unit in range(lo, hi):
        b, rest = unit // (groups * blocks), unit % (groups * blocks)
        group, first = rest % groups, rest // groups * TOKENS
        count = (min(tokens, first + TOKENS) - first) * shared
        key = k + b * word(a, 12) + group * word(a, 14)
        value = v + b * word(a, 16) + group * word(a, 18)
        for i in range(count + 1):
            store_scalar(states + i * span, LOWEST)
            store_scalar(states + i * span + 4, NONE)
            for c in range(0, width, LANES):
                store(states + i * span + 64 + 4 * c, zeros())
        heads_at, mask_at = q + b * word(a, 8) + group * shared * word(a, 10), mask + b * word(a, 20)
        for s in range(0, keys, KEYS):
            ready = False
            for i in range(0, count, 2):
                j = min(i + 1, count - 1)
                t, u = first + i // shared, first + j // shared
                seen, other = mask_at + t * word(a, 21) if mask else 0, mask_at + u * word(a, 21) if mask else 0
                if mask and hidden_tile(seen, s, keys) and hidden_tile(other, s, keys):
                    continue
                if not ready:
                    turn_tile(key, word(a, 13), s, keys, size, turned)
                    ready = True
                x = heads_at + t * word(a, 9) + i % shared * word(a, 10)
                y = heads_at + u * word(a, 9) + j % shared * word(a, 10)
                state, second = states + i * span, states + (i + 1) * span
                two_tiles(
                    x,
                    y,
                    turned,
                    size,
                    scale,
                    seen,
                    other,
                    s,
                    keys,
                    p,
                    p + 4 * KEYS,
                    state,
                    second,
                    width,
                    value,
                    word(a, 17),
                )
        for i in range(count):
            state = states + i * span
            target = (
                out
                + b * word(a, 23)
                + (first + i // shared) * word(a, 24)
                + (group * shared + i % shared) * word(a, 25)
            )
            weight = load_scalar(state + 4)
            factor = splat(ONE / weight if weight > NONE else NONE)
            for c in range(0, width, LANES):
                store(target + 4 * c, mul(load(state + 64 + 4 * c), factor))
    return 0


def _strides(operand: Operand, axes: Sequence[int]) -> list[int]:
    """The address and strides in bytes; 0 for axes of length 1."""
    return [operand.address, *(4 * operand.strides[i] if operand.shape[i] != 1 else 0 for i in axes)]


def _attention(steps: Steps, call: Bound) -> bool:
    q, k, v, mask, out = call.operand(0), call.operand(1), call.operand(2), call.optional(3), call.out
    plain = all(o.is_float and (o.strides[-1] == 1) for o in (q, k, v, out)) and len(q.shape) == 4
    size, width = k.shape[-1], v.shape[-1]
    if not plain or size % LANES or width % LANES or call.optional(4) is not None:
        return False
    if call.attrs["max_bias"] or call.attrs["softcap"] or call.attrs["mask_heads"] != "one":
        return False
    batch, tokens, heads, _ = q.shape
    keys, groups = k.shape[1], k.shape[2]
    if mask is not None and (not mask.is_float or mask.shape != (batch, tokens, keys) or mask.strides[-1] != 1):
        return False
    if not groups or not keys:
        return False
    shared = heads // groups
    words = [batch, tokens, heads, shared, keys, size, width]
    for operand, axes in ((q, (0, 1, 2)), (k, (0, 1, 2)), (v, (0, 1, 2))):
        words += _strides(operand, axes)
    words += [0, 0, 0] if mask is None else _strides(mask, (0, 1))
    words += _strides(out, (0, 1, 2))
    few = tokens * shared < 2 * LANES
    if few:
        scratch = 4 * (keys + LANES) // 64 * 64 + 64
    else:
        scratch = 4 * KEYS * (size + 2) + (TOKENS * shared + 1) * (64 + 4 * width)
    memory = steps.scratch("attention", scratch * steps.threads)
    words += [call.float("scale"), memory.address, scratch]
    reads = [q, k, v] if mask is None else [q, k, v, mask]
    steps.add(attend_few if few else attend_many, words, reads=reads, writes=[out])
    return True


BINDINGS = {"attention": _attention}
