"""The gated delta rule, and the short convolution before it."""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from ...operands import Bound, Operand
from ..compiler import Kernel, part
from ..steps import Steps
from .packing import share
from .rows import exp, lanes, put
from .simd import (
    LANES,
    fma,
    fourth_0,
    fourth_1,
    fourth_2,
    fourth_3,
    lane_0,
    load,
    load_scalar,
    mul,
    splat,
    splat_from,
    store,
    store_scalar,
    total,
    word,
    zeros,
)

BLOCK = 32
"""Rows of a state that see all tokens before the next rows do: they stay in the first cache."""
STRIDES = 3


@part
def decayed(s, g, c):
    return mul(s, exp(load(g + 4 * c)))


@cache
def delta_net(per_channel: bool, tiled: bool) -> Kernel:
    """Words: sequences, tokens, key heads, value heads, size of keys, of values; address and byte strides (sequence,
    token, head) of q, k, v, g, beta and the output; address of the old state and of the new one, both dense."""

    def body(a, thread, threads):
        tokens, keyed, heads, size, width = word(a, 1), word(a, 2), word(a, 3), word(a, 4), word(a, 5)
        blocks = (width + BLOCK - 1) // BLOCK
        scale = np.float32(1.0 / math.sqrt(size))
        lo, hi = share(word(a, 0) * heads * blocks, thread, threads)
        for unit in range(lo, hi):
            first = unit % blocks * BLOCK
            h, n = unit // blocks % heads, unit // blocks // heads
            source = h % keyed if tiled else h // (heads // keyed)
            last = min(width, first + BLOCK)
            old = word(a, 30) + 4 * size * ((n * heads + h) * width)
            new = word(a, 31) + 4 * size * ((n * heads + h) * width)
            if old != new:
                for c in range(first * size, last * size, LANES):
                    store(new + 4 * c, load(old + 4 * c))
            for t in range(tokens):
                q = word(a, 6) + n * word(a, 7) + t * word(a, 8) + source * word(a, 9)
                k = word(a, 10) + n * word(a, 11) + t * word(a, 12) + source * word(a, 13)
                v = word(a, 14) + n * word(a, 15) + t * word(a, 16) + h * word(a, 17)
                g = word(a, 18) + n * word(a, 19) + t * word(a, 20) + h * word(a, 21)
                beta = load_scalar(word(a, 22) + n * word(a, 23) + t * word(a, 24) + h * word(a, 25))
                out = word(a, 26) + n * word(a, 27) + t * word(a, 28) + h * word(a, 29)
                decay = np.float32(1) if per_channel else lane_0(exp(splat_from(g)))
                both = zeros()
                for c in range(0, size, LANES):
                    both = fma(load(q + 4 * c), load(k + 4 * c), both)
                overlap, fade = total(both), splat(decay)
                for row in range(first, last):
                    s, x, y = new + 4 * row * size, zeros(), zeros()
                    for c in range(0, size, LANES):
                        held = decayed(load(s + 4 * c), g, c) if per_channel else load(s + 4 * c)
                        x, y = fma(held, load(k + 4 * c), x), fma(held, load(q + 4 * c), y)
                    delta = (load_scalar(v + 4 * row) - decay * total(x)) * beta
                    store_scalar(out + 4 * row, (decay * total(y) + delta * overlap) * scale)
                    change = splat(delta)
                    for c in range(0, size, LANES):
                        held = decayed(load(s + 4 * c), g, c) if per_channel else mul(load(s + 4 * c), fade)
                        store(s + 4 * c, fma(change, load(k + 4 * c), held))
        return 0

    return Kernel(f"recurrent.delta_net.{'channels' if per_channel else 'heads'}.{'tiled' if tiled else 'runs'}", body)


def _delta_net(steps: Steps, call: Bound) -> bool:
    q, k, v, g, beta, state = (call.operand(i) for i in range(6))
    out, new = call.dst
    plain = all(o.is_float for o in (q, k, v, g, beta, state, out, new)) and state.is_dense and new.is_dense
    if not plain or call.attrs["pool"] != "none" or call.attrs["snapshots"] != 1:
        return False
    size, width = q.shape[-1], v.shape[-1]
    dense = all(o.strides[-1] == 1 for o in (q, k, v, out)) and (g.shape[-1] == 1 or g.strides[-1] == 1)
    if size % LANES or not dense or len(q.shape) not in (3, 4) or not q.shape[-2]:
        return False
    sequences = q.shape[0] if len(q.shape) == 4 else 1
    words = [sequences, q.shape[-3], q.shape[-2], v.shape[-2], size, width]
    for operand, axes in ((q, 3), (k, 3), (v, 3), (g, 3), (beta, 2), (out, 3)):
        words += _strides(operand, axes, len(q.shape) == 4)
    words += [state.address, new.address]
    kernel = delta_net(g.shape[-1] != 1, call.attrs["heads"] == "tiled")
    steps.add(kernel, words, reads=[q, k, v, g, beta, state], writes=[out, new])
    return True


def _strides(operand: Operand, axes: int, batched: bool) -> list[int]:
    """The address, and bytes from sequence to sequence, token to token, head to head; the head is `axes` - 2 from the
    end
    of (sequence, token, head, ...)."""
    rank = len(operand.shape)
    head = rank - (axes - 1)
    steps = [4 * operand.strides[head - 1], 4 * operand.strides[head]]
    return [operand.address, 4 * operand.strides[0] if batched else 0, *steps]


@cache
def convolution() -> Kernel:
    """Four taps.  Words: sequences, tokens, channels; x with byte strides of sequence and row; weights [channels, 4];
    the output with its strides."""

    def body(a, thread, threads):
        tokens, channels = word(a, 1), word(a, 2)
        blocks = (channels + LANES - 1) // LANES
        lo, hi = share(word(a, 0) * blocks, thread, threads)
        for unit in range(lo, hi):
            n, c = unit // blocks, unit % blocks * LANES
            x, y = word(a, 3) + n * word(a, 4), word(a, 7) + n * word(a, 8)
            w = word(a, 6) + 16 * c
            w0, w1 = lanes(w, 0, 4 * (channels - c), 4), lanes(w, LANES, 4 * (channels - c), 4)
            w2, w3 = lanes(w, 2 * LANES, 4 * (channels - c), 4), lanes(w, 3 * LANES, 4 * (channels - c), 4)
            k0, k1 = fourth_0(w0, w1, w2, w3), fourth_1(w0, w1, w2, w3)
            k2, k3 = fourth_2(w0, w1, w2, w3), fourth_3(w0, w1, w2, w3)
            step = word(a, 5)
            x0, x1, x2 = lanes(x, c, channels, 4), lanes(x + step, c, channels, 4), lanes(x + 2 * step, c, channels, 4)
            for t in range(tokens):
                x3 = lanes(x + (t + 3) * step, c, channels, 4)
                put(y + t * word(a, 9), c, channels, fma(x0, k0, fma(x1, k1, fma(x2, k2, mul(x3, k3)))))
                x0, x1, x2 = x1, x2, x3
        return 0

    return Kernel("recurrent.convolution", body)


def _convolution(steps: Steps, call: Bound) -> bool:
    x, w, y = call.operand(0), call.operand(1), call.out
    plain = all(o.is_float and o.strides[-1] == 1 for o in (x, y)) and w.is_float and w.is_dense
    if not plain or w.shape[-1] != 4 or len(x.shape) not in (2, 3):
        return False
    batched = len(x.shape) == 3
    words = [x.shape[0] if batched else 1, y.shape[-2], y.shape[-1]]
    words += [x.address, 4 * x.strides[0] if batched else 0, 4 * x.strides[-2], w.address]
    words += [y.address, 4 * y.strides[0] if batched else 0, 4 * y.strides[-2]]
    steps.add(convolution(), words, reads=[x, w], writes=[y])
    return True


BINDINGS = {"gated_delta_net": _delta_net, "ssm_conv": _convolution}
