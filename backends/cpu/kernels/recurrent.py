"""The gated delta rule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache, partial

import numpy as np

from ...chains import changed_state
from ...flow import Flow, apart
from ...operands import Bound, Operand, need
from ..compiler import Kernel, part
from ..simd.vectors import (
    LANES,
    fma,
    lane_0,
    load,
    load_scalar,
    mul,
    prefetch_far,
    splat,
    splat_from,
    store,
    store_past,
    store_scalar,
    total,
    zeros,
)
from ..steps import Chain, Fused, Steps
from ..words import words
from .functions import exp
from .packing import share

BLOCK = 32
"""Rows of a state that see all tokens before the next rows do: they stay in the first cache."""


@part
def decayed(s, g, c):
    return mul(s, exp(load(g + 4 * c)))


ARGS = words("sequences tokens keyed heads size width q[4] k[4] v[4] g[4] beta[4] out[4] state new[3] kept")
"""Of q to out the address, and bytes from sequence to sequence, token to token, head to head; the states are dense.
Of the new ones the address of the first token's, and bytes from sequence to sequence and from token to token, which are
none where only the last is asked for."""


@cache
def delta_net(per_channel: bool, tiled: bool) -> Kernel:
    """The rule for `keyed` heads of keys with `size` elements and `heads` of values with `width`; the `state` before is
    kept where `kept` says (0: nowhere) and becomes the `new` one."""

    def body(a, thread, threads):
        tokens, keyed, heads, size, width = ARGS.tokens(a), ARGS.keyed(a), ARGS.heads(a), ARGS.size(a), ARGS.width(a)
        blocks = (width + BLOCK - 1) // BLOCK
        scale = np.float32(1.0 / math.sqrt(size))
        lo, hi = share(ARGS.sequences(a) * heads * blocks, thread, threads)
        for unit in range(lo, hi):
            first = unit % blocks * BLOCK
            h, n = unit // blocks % heads, unit // blocks // heads
            source = h % keyed if tiled else h // (heads // keyed)
            last = min(width, first + BLOCK)
            old = ARGS.state(a) + 4 * size * ((n * heads + h) * width)
            new = ARGS.new(a, 0) + n * ARGS.new(a, 1) + 4 * size * h * width
            if ARGS.kept(a) != 0:
                kept = ARGS.kept(a) + 4 * size * ((n * heads + h) * width)
                for c in range(first * size, last * size, LANES):
                    prefetch_far(old + 4 * (c + BLOCK * size))  # the next block
                    store_past(kept + 4 * c, load(old + 4 * c))
            for t in range(tokens):
                before = new + (t - 1) * ARGS.new(a, 2) if t > 0 else old
                after = new + t * ARGS.new(a, 2)
                q = ARGS.q(a, 0) + n * ARGS.q(a, 1) + t * ARGS.q(a, 2) + source * ARGS.q(a, 3)
                k = ARGS.k(a, 0) + n * ARGS.k(a, 1) + t * ARGS.k(a, 2) + source * ARGS.k(a, 3)
                v = ARGS.v(a, 0) + n * ARGS.v(a, 1) + t * ARGS.v(a, 2) + h * ARGS.v(a, 3)
                g = ARGS.g(a, 0) + n * ARGS.g(a, 1) + t * ARGS.g(a, 2) + h * ARGS.g(a, 3)
                beta = load_scalar(ARGS.beta(a, 0) + n * ARGS.beta(a, 1) + t * ARGS.beta(a, 2) + h * ARGS.beta(a, 3))
                out = ARGS.out(a, 0) + n * ARGS.out(a, 1) + t * ARGS.out(a, 2) + h * ARGS.out(a, 3)
                decay = np.float32(1) if per_channel else lane_0(exp(splat_from(g)))
                both = zeros()
                for c in range(0, size, LANES):
                    both = fma(load(q + 4 * c), load(k + 4 * c), both)
                overlap, fade = total(both), splat(decay)
                for row in range(first, last):
                    s, x, y = before + 4 * row * size, zeros(), zeros()
                    for c in range(0, size, LANES):
                        held = decayed(load(s + 4 * c), g, c) if per_channel else load(s + 4 * c)
                        x, y = fma(held, load(k + 4 * c), x), fma(held, load(q + 4 * c), y)
                    delta = (load_scalar(v + 4 * row) - decay * total(x)) * beta
                    store_scalar(out + 4 * row, (decay * total(y) + delta * overlap) * scale)
                    change, s_new = splat(delta), after + 4 * row * size
                    for c in range(0, size, LANES):
                        held = decayed(load(s + 4 * c), g, c) if per_channel else mul(load(s + 4 * c), fade)
                        store(s_new + 4 * c, fma(change, load(k + 4 * c), held))
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
    if not plain or call.attrs["pool"] != "none" or call.attrs["snapshots"] not in (1, q.shape[-3]) or not q.shape[-3]:
        return False
    dense = all(o.strides[-1] == 1 for o in (q, k, v, out)) and (g.shape[-1] == 1 or g.strides[-1] == 1)
    return not q.shape[-1] % LANES and dense and len(q.shape) in (3, 4) and q.shape[-2] > 0


def _add_delta_net(steps: Steps, call: Bound, kept: Operand | None) -> None:
    """`kept` is where to keep the state as it was."""
    q, k, v, g, beta, state = (call.operand(i) for i in range(6))
    out, new = call.dst
    sequences = q.shape[0] if len(q.shape) == 4 else 1
    snapshots = new.shape[-4] if len(new.shape) > len(state.shape) else 1
    size = 4 * math.prod(state.shape[-3:])
    q_at, k_at, v_at, g_at, out_at = (head_strides(x, 3, len(q.shape) == 4) for x in (q, k, v, g, out))
    words = ARGS(
        sequences=sequences,
        tokens=q.shape[-3],
        keyed=q.shape[-2],
        heads=v.shape[-2],
        size=q.shape[-1],
        width=v.shape[-1],
        q=q_at,
        k=k_at,
        v=v_at,
        g=g_at,
        beta=head_strides(beta, 2, len(q.shape) == 4),
        out=out_at,
        state=state.address,
        new=[new.address + (snapshots - 1) * size, snapshots * size, 0 if snapshots == 1 else -size],
        kept=0 if kept is None else kept.address,
    )
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


def head_strides(operand: Operand, axes: int, batched: bool) -> list[int]:
    """The address, and bytes from sequence to sequence, token to token, head to head, of (sequence, token, head, ...),
    in which so many `axes` follow the sequence."""
    rank = len(operand.shape)
    head = rank - (axes - 1)
    steps = [4 * operand.strides[head - 1], 4 * operand.strides[head]]
    return [operand.address, 4 * operand.strides[0] if batched else 0, *steps]


FUSED: Mapping[str, tuple[Fused, ...]] = {"cont": (_kept_and_delta_net,)}
BINDINGS = {"gated_delta_net": _delta_net}
