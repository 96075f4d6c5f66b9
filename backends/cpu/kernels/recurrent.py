"""The gated delta rule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache, partial

import numpy as np
from llvmlite import ir

from ...chains import changed_state
from ...flow import Flow, apart
from ...operands import Bound, Operand, need
from ..compiler import Kernel, part
from ..simd.vectors import (
    ADDRESS,
    FLOATS,
    LANES,
    NOTHING,
    fma,
    intrinsic,
    lane_0,
    load,
    load_scalar,
    mul,
    prefetch_far,
    splat,
    splat_from,
    store,
    store_scalar,
    total,
    word,
    zeros,
)
from ..steps import Chain, Fused, Steps
from .packing import share
from .rows import exp


@intrinsic(NOTHING, ADDRESS, FLOATS)
def store_past(b, a, v):
    """To an address that is a multiple of 64, past the caches: for what nobody reads soon."""
    done = b.store(v, b.inttoptr(a, v.type.as_pointer()), align=64)
    done.set_metadata("nontemporal", b.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))


BLOCK = 32
"""Rows of a state that see all tokens before the next rows do: they stay in the first cache."""


@part
def decayed(s, g, c):
    return mul(s, exp(load(g + 4 * c)))


@cache
def delta_net(per_channel: bool, tiled: bool) -> Kernel:
    """Words: sequences, tokens, key heads, value heads, size of keys, of values; address and byte strides (sequence,
    token, head) of q, k, v, g, beta and the output; address of the old state, of the new one, and of where to keep the
    old one (0: nowhere), all dense."""

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
            if word(a, 32) != 0:
                kept = word(a, 32) + 4 * size * ((n * heads + h) * width)
                for c in range(first * size, last * size, LANES):
                    prefetch_far(old + 4 * (c + BLOCK * size))  # the next block
                    store_past(kept + 4 * c, load(old + 4 * c))
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
    if not is_compiled(call):
        return False
    _add_delta_net(steps, call, None)
    return True


def is_compiled(call: Bound) -> bool:
    """Whether the kernels of this file do a `gated_delta_net`."""
    q, k, v, g, beta, state = (call.operand(i) for i in range(6))
    out, new = call.dst
    plain = all(o.is_float for o in (q, k, v, g, beta, state, out, new)) and state.is_dense and new.is_dense
    if not plain or call.attrs["pool"] != "none" or call.attrs["snapshots"] != 1:
        return False
    dense = all(o.strides[-1] == 1 for o in (q, k, v, out)) and (g.shape[-1] == 1 or g.strides[-1] == 1)
    return not q.shape[-1] % LANES and dense and len(q.shape) in (3, 4) and q.shape[-2] > 0


def _add_delta_net(steps: Steps, call: Bound, kept: Operand | None) -> None:
    """`kept` is where to keep the state as it was."""
    q, k, v, g, beta, state = (call.operand(i) for i in range(6))
    out, new = call.dst
    sequences = q.shape[0] if len(q.shape) == 4 else 1
    words = [sequences, q.shape[-3], q.shape[-2], v.shape[-2], q.shape[-1], v.shape[-1]]
    for operand, axes in ((q, 3), (k, 3), (v, 3), (g, 3), (beta, 2), (out, 3)):
        words += _strides(operand, axes, len(q.shape) == 4)
    words += [state.address, new.address, 0 if kept is None else kept.address]
    kernel = delta_net(g.shape[-1] != 1, call.attrs["heads"] == "tiled")
    writes = [out, new] if kept is None else [out, new, kept]
    steps.add(kernel, words, reads=[q, k, v, g, beta, state], writes=writes)


def _kept_and_delta_net(flow: Flow, number: int) -> Chain:
    """A state that is kept block by block, while it is in the first cache to be changed."""
    chain = changed_state(flow, number, "gated_delta_net")
    save, change = map(flow.call, chain)
    kept = save.out
    need(save.operand(0).tensor == change.operand(5).tensor, "not all of the state is saved")
    need(kept.is_float and kept.is_dense and kept.address % 64 == 0, "what is kept lies otherwise")
    need(is_compiled(change), "the rule is not compiled")
    apart(kept, [change.operand(i) for i in range(6)])
    return Chain(chain, partial(_add_delta_net, call=change, kept=kept))


def _strides(operand: Operand, axes: int, batched: bool) -> list[int]:
    """The address, and bytes from sequence to sequence, token to token, head to head; the head is `axes` - 2 from the
    end
    of (sequence, token, head, ...)."""
    rank = len(operand.shape)
    head = rank - (axes - 1)
    steps = [4 * operand.strides[head - 1], 4 * operand.strides[head]]
    return [operand.address, 4 * operand.strides[0] if batched else 0, *steps]


FUSED: Mapping[str, tuple[Fused, ...]] = {"cont": (_kept_and_delta_net,)}
BINDINGS = {"gated_delta_net": _delta_net}
