"""Common parts of the attention kernels: their words, visible keys, the end of a score, and powers of two.

Scores are in units of log2(e), so that their exponentials are powers of two. Scale, cap, slopes and sinks are
multiplied by log2(e).
"""

from __future__ import annotations

import numpy as np

from ...compilation.compiler import subroutine
from ...simd.vectors import (
    LANES,
    add,
    add_int,
    bits_to_float,
    float_to_bits,
    fma,
    greater_bitmask,
    lane_0,
    load,
    load_first_lanes_or,
    load_long,
    load_scalar,
    mul,
    shift_left,
    splat,
    splat_int,
    sub,
    where_less,
)
from ..vector.vector_functions import tanh

COMMON_ARGS = (
    "tokens units shared keys size width q_step k_step v_step mask_step out_step factor:f32 cap:f32 heads pool "
    "scratch scratch_bytes"
)
"""Words of all attention kernels.

- `tokens`, `units` (groups of heads of all sequences), `shared` (heads of a group), `keys`
- `size` and `width`: elements of a key and of a value
- ``*_step``: bytes from token to token or from key to key
- `factor` and `cap`: the scale and the soft cap
- `heads`: the head table; `pool`: the blocks of the pool that block tables name, if any
- `scratch` and the `scratch_bytes` of a thread
"""
HEAD_QUERY, HEAD_KEY, HEAD_VALUE, HEAD_MASK, HEAD_OUT, HEAD_SLOPE, HEAD_SINK, HEAD_TABLE = range(0, 64, 8)
"""Offsets into a row of the head table.

They are addresses for the first token and key, the float32 slope, the address of the sink, and the address of the
block table i32[blocks]. Without a block table it is 0.
"""
HEAD_BYTES = 64
"""Bytes of a row of the head table."""

MIN_SCORE = np.float32(-3.0e38)
"""A number below every score that is not masked."""
FLOAT_ONE, FLOAT_ZERO, MINUS_INFINITY = np.float32(1), np.float32(0), np.float32(-np.inf)
"""float32 constants, because Numba compiles a Python float to float64."""
LOG2_E = np.float32(np.log2(np.e))
ROUNDING_CONSTANT = 12582912.0
"""1.5 * 2**23: added to a small number, it leaves an integer in the low bits."""


@subroutine
def exp2_of_nonpositive(x):
    """Return ``2**x`` for x <= 0 with a relative error below 2e-7; 0 for x <= -127, NaN for NaN.

    The power of the fraction of x is a polynomial of degree 5 on [-1/2, 1/2], which is 1 at 0. The integer part of x is
    added to the exponent.
    """
    clamped = where_less(x, splat(-127.0), splat(-127.0), x)
    n = add(clamped, splat(ROUNDING_CONSTANT))
    r = sub(clamped, sub(n, splat(ROUNDING_CONSTANT)))
    p = fma(r, splat(1.3264727094e-03), splat(9.6715126824e-03))
    p = fma(p, r, splat(5.5507337439e-02))
    p = fma(p, r, splat(2.4022242085e-01))
    p = fma(p, r, splat(6.9314697760e-01))
    p = fma(p, r, splat(1.0))
    return bits_to_float(add_int(float_to_bits(p), shift_left(float_to_bits(n), splat_int(23))))


@subroutine
def exp2_of_nonpositive_scalar(x):
    """Return ``2**x`` of a scalar x <= 0."""
    return lane_0(exp2_of_nonpositive(splat(x)))


@subroutine
def round_up(n, step):
    """Round `n` up to a multiple of `step`."""
    return (n + step - 1) // step * step


@subroutine
def max_or_second(x, y):
    """Return the larger of x and y in each lane, and y where one of them is NaN."""
    return where_less(y, x, x, y)


@subroutine
def apply_soft_cap_and_mask(x, mask, cap, slope):
    """Compute 16 final scores from scaled products, with the mask and the soft cap.

    The score is ``slope * mask + cap * tanh(x)``, or ``slope * mask + x`` without a soft cap.

    Args:
        x: vector of products of a query with 16 keys, times the scale.
        mask: vector of mask values.
        cap: the soft cap, or 0.
        slope: the ALiBi slope of the head.
    """
    if cap > FLOAT_ZERO:
        x = mul(tanh(x), splat(cap))
    return fma(splat(slope), mask, x)


@subroutine
def load_sink_score_in_log2(head):
    """Load the score of the attention sink of a head, multiplied by log2(e)."""
    return load_scalar(load_long(head + HEAD_SINK)) * LOG2_E


@subroutine
def load_16_padded_mask_values(mask, s, keys):
    """Load the mask values of 16 keys from key `s` on; keys from number `keys` on get -inf."""
    if keys - s >= LANES:
        return load(mask + 4 * s)
    return load_first_lanes_or(mask + 4 * s, keys - s, splat(MINUS_INFINITY))


@subroutine
def find_visible_key_bits(mask):
    """Return an integer with one bit for each of 16 keys in a vector of the mask, set if the key is visible."""
    return greater_bitmask(mask, splat(MIN_SCORE))


@subroutine
def find_first_visible_key_aligned_to_16(mask, keys):
    """Find the number of the first visible key in a mask row of `keys` keys, rounded down to a multiple of 16."""
    s = 0
    while s < keys and find_visible_key_bits(load_16_padded_mask_values(mask, s, keys)) == 0:
        s += LANES
    return s


@subroutine
def find_aligned_end_of_visible_keys(mask, keys):
    """Return the end of the visible keys in a mask row, rounded up to a multiple of 16.

    The result is at most `keys`.
    """
    s = (keys + LANES - 1) // LANES * LANES
    while s > 0 and find_visible_key_bits(load_16_padded_mask_values(mask, s - LANES, keys)) == 0:
        s -= LANES
    return min(s, keys)


@subroutine
def find_key_range_visible_to_group(heads, shared, tokens, step, keys):
    """Find the range of keys that at least one token sees in at least one head of a group.

    Args:
        heads: address of the first head in the head table.
        shared: heads of the group.
        tokens: count of tokens.
        step: bytes from token to token of a mask.
        keys: count of keys.
    """
    low, high, known = keys, 0, 0
    for h in range(shared):
        mask = load_long(heads + h * HEAD_BYTES + HEAD_MASK)
        if mask != known:
            for t in range(tokens):
                low = min(low, find_first_visible_key_aligned_to_16(mask + t * step, keys))
                high = max(high, find_aligned_end_of_visible_keys(mask + t * step, keys))
            known = mask
    return min(low, high), high
