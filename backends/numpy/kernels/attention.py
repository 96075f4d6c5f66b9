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
    fma,
    float_word,
    largest,
    load,
    load_scalar,
    maximum,
    mul,
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
TOKENS = 16
"""Tokens whose queries pass over a tile together."""
LOWEST = -3.0e38
"""Below every score that is not masked."""


@part
def exp_of(x):
    return largest(exp(splat(x)))


@part
def dot(x, y, n):
    first, second, c = zeros(), zeros(), 0
    while c + 2 * LANES <= n:
        first, second = fma(load(x + 4 * c), load(y + 4 * c), first), fma(load(x + 4 * c + 64), load(y + 4 * c + 64), second)
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
        top, last = LOWEST, 0
        for s in range(keys):
            hidden = load_scalar(seen + 4 * s) if mask else 0.0
            if hidden < LOWEST:
                store_scalar(scores + 4 * s, -np.inf)
            else:
                score = dot(query, key + s * step, size) * scale + hidden
                top = max(top, score)
                last = s + 1
                store_scalar(scores + 4 * s, score)
        highest, sums, s = splat(top), zeros(), 0
        while s < last:
            p = exp(sub(load(scores + 4 * s), highest))
            store(scores + 4 * s, p)
            s += LANES
        for r in range(last, s):
            store_scalar(scores + 4 * r, 0.0)
        for r in range(0, s, LANES):
            sums = add(sums, load(scores + 4 * r))
        weight = total(sums)
        factor = splat(1.0 / weight if weight > 0.0 else 0.0)
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
def hidden_tile(seen, s, keys):
    """Whether no key of a tile may be seen."""
    for r in range(s, min(keys, s + KEYS)):
        if load_scalar(seen + 4 * r) >= LOWEST:
            return False
    return True


@part
def turn_tile(key, step, s, keys, size, to):
    """Keys of a tile with their elements outside: [size, 64]; missing keys are zero."""
    for r in range(KEYS):
        if s + r < keys:
            at = key + (s + r) * step
            for c in range(size):
                store_scalar(to + 4 * (c * KEYS + r), load_scalar(at + 4 * c))
        else:
            for c in range(size):
                store_scalar(to + 4 * (c * KEYS + r), 0.0)


@part
def one_tile(query, turned, size, scale, seen, s, keys, p, state, width, value, pace):
    """One query meets one tile.  State: its highest score, its sum, then the sum of values [width]."""
    s0, s1, s2, s3 = zeros(), zeros(), zeros(), zeros()
    for c in range(size):
        x, at = splat_from(query + 4 * c), turned + 4 * c * KEYS
        s0, s1 = fma(load(at), x, s0), fma(load(at + 64), x, s1)
        s2, s3 = fma(load(at + 128), x, s2), fma(load(at + 192), x, s3)
    f, left = splat(scale), min(KEYS, keys - s)
    store(p, mul(s0, f))
    store(p + 64, mul(s1, f))
    store(p + 128, mul(s2, f))
    store(p + 192, mul(s3, f))
    if seen != 0:
        for r in range(left):
            store_scalar(p + 4 * r, load_scalar(p + 4 * r) + load_scalar(seen + 4 * (s + r)))
    for r in range(left, KEYS):
        store_scalar(p + 4 * r, -np.inf)
    tops = maximum(maximum(load(p), load(p + 64)), maximum(load(p + 128), load(p + 192)))
    before = load_scalar(state)
    top = max(max(before, largest(tops)), LOWEST)
    fade, highest, sums = exp_of(before - top), splat(top), zeros()
    for r in range(0, KEYS, LANES):
        e = exp(sub(load(p + 4 * r), highest))
        store(p + 4 * r, e)
        sums = add(sums, e)
    store_scalar(state, top)
    store_scalar(state + 4, load_scalar(state + 4) * fade + total(sums))
    faded, at = splat(fade), value + s * pace
    for c in range(0, width, 2 * LANES):
        to = state + 64 + 4 * c
        if c + LANES < width:
            x, y = mul(load(to), faded), mul(load(to + 64), faded)
            for r in range(left):
                w = splat_from(p + 4 * r)
                x, y = fma(w, load(at + r * pace + 4 * c), x), fma(w, load(at + r * pace + 4 * c + 64), y)
            store(to, x)
            store(to + 64, y)
        else:
            x = mul(load(to), faded)
            for r in range(left):
                x = fma(splat_from(p + 4 * r), load(at + r * pace + 4 * c), x)
            store(to, x)


@kernel
def attend_many(a, thread, threads):
    """Blocks of 16 tokens with all queries that share a key head; tile after tile.  Words as of `attend_few`."""
    tokens, heads, shared, keys, size, width = word(a, 1), word(a, 2), word(a, 3), word(a, 4), word(a, 5), word(a, 6)
    q, k, v, mask, out = word(a, 7), word(a, 11), word(a, 15), word(a, 19), word(a, 22)
    scale, scratch = float_word(a, 26), word(a, 27) + thread * word(a, 28)
    turned, p = scratch, scratch + 4 * KEYS * size
    states, span = p + 4 * KEYS, 64 + 4 * width
    groups, blocks = heads // shared, (tokens + TOKENS - 1) // TOKENS
    lo, hi = share(word(a, 0) * groups * blocks, thread, threads)
    for unit in range(lo, hi):
        b, rest = unit // (groups * blocks), unit % (groups * blocks)
        group, first = rest % groups, rest // groups * TOKENS
        last = min(tokens, first + TOKENS)
        key = k + b * word(a, 12) + group * word(a, 14)
        value = v + b * word(a, 16) + group * word(a, 18)
        for i in range((last - first) * shared):
            store_scalar(states + i * span, LOWEST)
            store_scalar(states + i * span + 4, 0.0)
            for c in range(0, width, LANES):
                store(states + i * span + 64 + 4 * c, zeros())
        for s in range(0, keys, KEYS):
            ready = False
            for t in range(first, last):
                seen = mask + b * word(a, 20) + t * word(a, 21) if mask else 0
                if mask and hidden_tile(seen, s, keys):
                    continue
                if not ready:
                    turn_tile(key, word(a, 13), s, keys, size, turned)
                    ready = True
                for g in range(shared):
                    query = q + b * word(a, 8) + t * word(a, 9) + (group * shared + g) * word(a, 10)
                    state = states + ((t - first) * shared + g) * span
                    one_tile(query, turned, size, scale, seen, s, keys, p, state, width, value, word(a, 17))
        for t in range(first, last):
            for g in range(shared):
                state = states + ((t - first) * shared + g) * span
                target = out + b * word(a, 23) + t * word(a, 24) + (group * shared + g) * word(a, 25)
                weight = load_scalar(state + 4)
                factor = splat(1.0 / weight if weight > 0.0 else 0.0)
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
        scratch = 4 * KEYS * (size + 1) + TOKENS * shared * (64 + 4 * width)
    memory = steps.scratch("attention", scratch * steps.threads)
    words += [call.float("scale"), memory.address, scratch]
    reads = [q, k, v] if mask is None else [q, k, v, mask]
    steps.add(attend_few if few else attend_many, words, reads=reads, writes=[out])
    return True


BINDINGS = {"attention": _attention}
