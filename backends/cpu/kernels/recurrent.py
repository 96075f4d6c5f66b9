"""The gated delta rule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache, partial

import numpy as np

from ...chains import changed_state
from ...flow import Flow, apart
from ...operands import Bound, Operand, need
from ..compiler import Kernel, Part, part
from ..simd.order import fold_1, fold_2, fold_4, fold_8
from ..simd.vectors import (
    LANES,
    fma,
    lane_0,
    load,
    load_scalar,
    mul,
    prefetch,
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


TALL = 4
"""Rows that are read together: keys and queries are loaded once for all of them."""


ARGS = words("sequences tokens keyed heads size width q[4] k[4] v[4] g[4] beta[4] out[4] state new[3] kept scratch")
"""Of q to out the address, and bytes from sequence to sequence, token to token, head to head; the states are dense.
Of the new ones the address of the first token's, and bytes from sequence to sequence and from token to token, which are
none where only the last is asked for.  Each thread has `scratch_bytes` of memory."""


@part
def scratch_bytes(size):
    """Sums of some rows; where channels fade apart, how they do, and what this makes of keys and queries."""
    return 64 + 3 * 4 * size


@cache
def change_of(per_channel: bool) -> Part:
    """``(old, new, delta, fades, fade, k, nbytes)``: a row of so many bytes fades, and gets its share of the key."""

    def change(old, new, delta, fades, fade, k, nbytes):
        by = splat(delta)
        for c in range(0, nbytes, 4 * LANES):
            held = mul(load(old + c), load(fades + c) if per_channel else fade)
            store(new + c, fma(by, load(k + c), held))

    return part(change)


@cache
def delta_net(per_channel: bool, tiled: bool) -> Kernel:
    """The rule for `keyed` heads of keys with `size` elements and `heads` of values with `width`; the `state` before is
    kept where `kept` says (0: nowhere) and becomes the `new` one."""

    change = change_of(per_channel)

    def body(a, thread, threads):
        tokens, keyed, heads, size, width = ARGS.tokens(a), ARGS.keyed(a), ARGS.heads(a), ARGS.size(a), ARGS.width(a)
        blocks = (width + BLOCK - 1) // BLOCK
        scale, step = np.float32(1.0 / math.sqrt(size)), 4 * size
        sums = ARGS.scratch(a) + thread * scratch_bytes(size)
        fades, faded_k, faded_q = sums + 64, sums + 64 + step, sums + 64 + 2 * step
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
                both, fade, soon = zeros(), exp(splat_from(g)), min(1, tokens - 1 - t)  # is there a next token?
                for c in range(0, step, 4 * LANES):
                    prefetch(k + soon * ARGS.k(a, 2) + c)
                    prefetch(q + soon * ARGS.q(a, 2) + c)
                    both = fma(load(q + c), load(k + c), both)
                    if per_channel:
                        fade = exp(load(g + c))
                        store(fades + c, fade)
                        store(faded_k + c, mul(fade, load(k + c)))
                        store(faded_q + c, mul(fade, load(q + c)))
                keys, queries = (faded_k, faded_q) if per_channel else (k, q)
                decay = np.float32(1) if per_channel else lane_0(fade)
                overlap = total(both)
                for c in range(4 * first, 4 * last, 4 * LANES):
                    prefetch(v + soon * ARGS.v(a, 2) + c)
                row = first
                while t > 0 and row + TALL <= last:  # the first token's rows come from memory, best one after another
                    s0, s1 = before + row * step, before + (row + 1) * step
                    s2, s3 = s1 + step, s1 + 2 * step
                    x0, x1, x2, x3 = zeros(), zeros(), zeros(), zeros()
                    y0, y1, y2, y3 = zeros(), zeros(), zeros(), zeros()
                    for c in range(0, step, 4 * LANES):
                        x, y = load(keys + c), load(queries + c)
                        held0, held1, held2, held3 = load(s0 + c), load(s1 + c), load(s2 + c), load(s3 + c)
                        x0, x1, x2, x3 = fma(held0, x, x0), fma(held1, x, x1), fma(held2, x, x2), fma(held3, x, x3)
                        y0, y1, y2, y3 = fma(held0, y, y0), fma(held1, y, y1), fma(held2, y, y2), fma(held3, y, y3)
                    x, y = fold_4(fold_8(x0, x1), fold_8(x2, x3)), fold_4(fold_8(y0, y1), fold_8(y2, y3))
                    both = fold_2(x, y)
                    store(sums, fold_1(both, both))
                    d0 = (load_scalar(v + 4 * row) - decay * load_scalar(sums)) * beta
                    d1 = (load_scalar(v + 4 * row + 4) - decay * load_scalar(sums + 4)) * beta
                    d2 = (load_scalar(v + 4 * row + 8) - decay * load_scalar(sums + 8)) * beta
                    d3 = (load_scalar(v + 4 * row + 12) - decay * load_scalar(sums + 12)) * beta
                    store_scalar(out + 4 * row, (decay * load_scalar(sums + 16) + d0 * overlap) * scale)
                    store_scalar(out + 4 * row + 4, (decay * load_scalar(sums + 20) + d1 * overlap) * scale)
                    store_scalar(out + 4 * row + 8, (decay * load_scalar(sums + 24) + d2 * overlap) * scale)
                    store_scalar(out + 4 * row + 12, (decay * load_scalar(sums + 28) + d3 * overlap) * scale)
                    z = after + row * step
                    change(s0, z, d0, fades, fade, k, step)
                    change(s1, z + step, d1, fades, fade, k, step)
                    change(s2, z + 2 * step, d2, fades, fade, k, step)
                    change(s3, z + 3 * step, d3, fades, fade, k, step)
                    row += TALL
                while row < last:
                    s, x, y = before + row * step, zeros(), zeros()
                    for c in range(0, step, 4 * LANES):
                        held = load(s + c)
                        x, y = fma(held, load(keys + c), x), fma(held, load(queries + c), y)
                    delta = (load_scalar(v + 4 * row) - decay * total(x)) * beta
                    store_scalar(out + 4 * row, (decay * total(y) + delta * overlap) * scale)
                    change(s, after + row * step, delta, fades, fade, k, step)
                    row += 1
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
    each = scratch_bytes.body(q.shape[-1])
    memory = steps.scratch(f"delta net {each}", each * steps.threads)
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
        scratch=memory.address,
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
