"""What both kernels of attention share: their words, which keys are seen, how a score is finished, and powers of two.

Scores are kept in units of log2(e), so that their exponentials are powers of two: scale, cap, slopes and sinks come
multiplied by it.
"""

from __future__ import annotations

import numpy as np

from ...compiler import part
from ...simd.vectors import (
    LANES,
    add,
    add_int,
    bits_to_float,
    float_to_bits,
    fma,
    lane_0,
    lanes_above,
    load,
    load_long,
    load_scalar,
    load_some_or,
    mul,
    shift_left,
    splat,
    splat_int,
    sub,
    where_less,
)
from ..functions import tanh

COMMON = (
    "tokens units shared keys size width q_step k_step v_step mask_step out_step factor:f32 cap:f32 heads "
    "scratch scratch_bytes"
)
"""Words of both kernels: tokens; groups of heads, of all sequences; heads of a group; keys; elements of a key and of a
value; bytes from token to token, or from key to key; scale and cap; the words of the heads; scratch, and how much of it
a thread has."""
Q, K, V, MASK, OUT, SLOPE, SINK = range(0, 56, 8)
"""Bytes into the words of a head: addresses for its first token and key, the slope as float32, where its sink is."""
HEAD = 56
"""Bytes of a head."""

LOWEST = np.float32(-3.0e38)
"""Below every score that is not masked."""
ONE, NONE, MINUS_INFINITY = np.float32(1), np.float32(0), np.float32(-np.inf)
"""Numba takes a number of Python for float64."""
LOG2_E = np.float32(np.log2(np.e))
ROUNDS = 12582912.0
"""1.5 * 2**23: added to a small number, it leaves an integer in the low bits."""


@part
def power(x):
    """``2**x`` for x <= 0, relative error below 2e-7; exactly 0 from -127 downwards; NaN stays.

    A polynomial of degree 5 on [-1/2, 1/2], 1 at 0; the integer is added to the exponent.
    """
    held = where_less(x, splat(-127.0), splat(-127.0), x)
    n = add(held, splat(ROUNDS))
    r = sub(held, sub(n, splat(ROUNDS)))
    p = fma(r, splat(1.3264727094e-03), splat(9.6715126824e-03))
    p = fma(p, r, splat(5.5507337439e-02))
    p = fma(p, r, splat(2.4022242085e-01))
    p = fma(p, r, splat(6.9314697760e-01))
    p = fma(p, r, splat(1.0))
    return bits_to_float(add_int(float_to_bits(p), shift_left(float_to_bits(n), splat_int(23))))


@part
def power_of(x):
    return lane_0(power(splat(x)))


@part
def round_up(n, step):
    return (n + step - 1) // step * step


@part
def greater(x, y):
    """The larger of each lane, of y where x is NaN."""
    return where_less(y, x, x, y)


@part
def finished(x, hidden, cap, slope):
    """Scores of scaled products of queries and keys: capped, and the mask added."""
    if cap > NONE:
        x = mul(tanh(x), splat(cap))
    return fma(splat(slope), hidden, x)


@part
def sink_of(head):
    return load_scalar(load_long(head + SINK)) * LOG2_E


@part
def mask_lanes(seen, s, keys):
    """The mask of 16 keys; -inf past the last one."""
    if keys - s >= LANES:
        return load(seen + 4 * s)
    return load_some_or(seen + 4 * s, keys - s, splat(MINUS_INFINITY))


@part
def seen_lanes(mask):
    """A bit for each key that may be seen."""
    return lanes_above(mask, splat(LOWEST))


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
