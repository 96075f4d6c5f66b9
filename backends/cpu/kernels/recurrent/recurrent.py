"""The gated delta rule. Each head has a state S [value, key], a decay f = exp(g) and an update rate beta.

``S = f * S``, then ``d = beta * (v - S k)``, then ``S = S + d k^T``, then ``out = S q / sqrt(size)``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache, partial

import numpy as np

from ....chains import changed_state
from ....flow import Flow, apart
from ....operands import Bound, Operand, need
from ...compiler import Kernel, Part, part
from ...simd.crossings import FOUR, add_products, crossed, no_products
from ...simd.crosswise import add_rows, bytes_at_once, no_sums, rows_at_once, store_sums
from ...simd.order import fourth_0, fourth_1, fourth_2, fourth_3, turn
from ...simd.vectors import (
    LANES,
    fma,
    lane_0,
    load,
    load_scalar,
    load_some,
    mul,
    prefetch,
    prefetch_far,
    splat,
    splat_from,
    store,
    store_past,
    store_scalar,
    store_some,
    sub,
    total,
    word,
    zeros,
)
from ...steps import Chain, Fused, Steps
from ...words import words
from ..functions import exp
from ..packing import share

BLOCK = 32
"""Rows of a state that process all tokens before the next rows do: they stay in the first cache."""


ARGS = words("sequences tokens keyed heads size width q[4] k[4] v[4] g[4] beta[4] out[4] state new[3] kept scratch")
"""Words of q to out: the address, and bytes from sequence to sequence, token to token, head to head.

The states are dense. `new`: the address of the first token's state, bytes from sequence to sequence and from token to
token. The token stride is 0 if only the last state is stored. Each thread has `compute_delta_net_scratch_bytes` of
memory.
"""
Q, K, V, G, BETA, OUT = (ARGS.start(name) for name in ("q", "k", "v", "g", "beta", "out"))


MANY = 8
"""Tokens from which on a block of rows is transposed: two transpositions cost as much as three token pairs save."""
DELTAS = 4 * FOUR * BLOCK
FADES = DELTAS + 2 * 4 * BLOCK
"""Offset in a thread's scratch: decays, the four vectors, the written keys, a transposed block.

Before `DELTAS_OFFSET` are the products of the rows of a block and four vectors, then the deltas of two tokens.
"""


@part
def scratch_bytes(size):
    """Return the scratch bytes of a thread for keys of `size` elements."""
    return FADES + (6 + BLOCK) * 4 * size


@part
def turn_block(source, step, to, pace, rows, columns):
    """Transpose a block of rows that are `step` bytes apart to columns with rows `pace` bytes apart."""
    for r in range(0, rows, LANES):
        for c in range(0, columns, LANES):
            turn(source + r * step + 4 * c, step, to + c * pace + 4 * r, pace)


@part
def address(a, first, n, t, h):
    """Return the address of a head's vector for sequence `n` and token `t`. The words begin at number `first`."""
    return word(a, first) + n * word(a, first + 1) + t * word(a, first + 2) + h * word(a, first + 3)


@cache
def alone_of(per_channel: bool) -> Part:
    """Make ``(a, n, h, source, t, first, last, memory)``: process one token with state rows `first` to `last`."""

    def alone(a, n, h, source, t, first, last, memory):
        size, width = ARGS.size(a), ARGS.width(a)
        scale, step = np.float32(1.0 / math.sqrt(size)), 4 * size
        fades = memory + FADES
        faded_q, faded_k = fades + step, fades + 2 * step
        after = ARGS.new(a, 0) + n * ARGS.new(a, 1) + t * ARGS.new(a, 2) + step * h * width
        before = after - ARGS.new(a, 2) if t > 0 else ARGS.state(a) + step * ((n * ARGS.heads(a) + h) * width)
        q, k = address(a, Q, n, t, source), address(a, K, n, t, source)
        v, g, out = address(a, V, n, t, h), address(a, G, n, t, h), address(a, OUT, n, t, h)
        beta = load_scalar(address(a, BETA, n, t, h))
        both, fade = zeros(), exp(splat_from(g))
        for c in range(0, step, 4 * LANES):
            both = fma(load(q + c), load(k + c), both)
            if per_channel:
                fade = exp(load(g + c))
                store(fades + c, fade)
                store(faded_k + c, mul(fade, load(k + c)))
                store(faded_q + c, mul(fade, load(q + c)))
        keys, queries = (faded_k, faded_q) if per_channel else (k, q)
        decay = np.float32(1) if per_channel else lane_0(fade)
        overlap = total(both)
        for row in range(first, last):
            s, z, x, y = before + row * step, after + row * step, zeros(), zeros()
            for c in range(0, step, 4 * LANES):
                held = load(s + c)  # x += S[row, c] f[c] k[c], y += S[row, c] f[c] q[c]
                x, y = fma(held, load(keys + c), x), fma(held, load(queries + c), y)
            delta = (load_scalar(v + 4 * row) - decay * total(x)) * beta
            store_scalar(out + 4 * row, (decay * total(y) + delta * overlap) * scale)
            by = splat(delta)
            for c in range(0, step, 4 * LANES):
                held = mul(load(s + c), load(fades + c) if per_channel else fade)
                store(z + c, fma(by, load(k + c), held))  # S[row, c] = f[c] S[row, c] + delta k[c]

    return part(alone)


@cache
def two_of(per_channel: bool) -> Part:
    """Make ``(a, n, h, source, t, first, last, memory)``: process two tokens with rows of the state, four at a time.

    The state is read twice and written once for both tokens, because the products of the second token follow from the
    old state. With decays f and g: ``(S f + d k^T) g k' = S (f g k') + d (g k . k')``.
    """

    def two(a, n, h, source, t, first, last, memory):
        size, width = ARGS.size(a), ARGS.width(a)
        scale, step = splat(np.float32(1.0 / math.sqrt(size))), 4 * size
        fades, meeting, written = memory + FADES, memory + FADES + step, memory + FADES + 5 * step
        state = ARGS.new(a, 0) + n * ARGS.new(a, 1) + step * h * width
        q, k = address(a, Q, n, t, source), address(a, K, n, t, source)
        next_q, next_k = address(a, Q, n, t + 1, source), address(a, K, n, t + 1, source)
        g, next_g = address(a, G, n, t, h), address(a, G, n, t + 1, h)
        fade, then = exp(splat_from(g)), exp(splat_from(next_g))
        qk, ql, pk, pl = zeros(), zeros(), zeros(), zeros()
        for c in range(0, step, 4 * LANES):
            if per_channel:
                fade, then = exp(load(g + c)), exp(load(next_g + c))
            both, key, last_key, query = mul(fade, then), load(k + c), load(next_k + c), load(next_q + c)
            write = mul(then, key)
            store(fades + c, both)
            store(meeting + c, mul(fade, key))
            store(meeting + step + c, mul(fade, load(q + c)))
            store(meeting + 2 * step + c, mul(both, last_key))
            store(meeting + 3 * step + c, mul(both, query))
            store(written + c, write)
            qk, ql = fma(load(q + c), key, qk), fma(write, last_key, ql)
            pk, pl = fma(query, write, pk), fma(query, last_key, pl)
        for row in range(first, last, FOUR):
            sums = no_products()
            for c in range(0, step, 4 * LANES):
                # sums[r, j] += S[row + r, c] * u[j, c] for u = f k, f q, f g k', f g q'
                sums = add_products(sums, state + row * step + c, step, meeting + c, step)
            store(memory + 4 * FOUR * (row - first), crossed(sums))
        own, next_own, key_first, key_last = splat(total(qk)), splat(total(pl)), splat(total(ql)), splat(total(pk))
        v, next_v = address(a, V, n, t, h), address(a, V, n, t + 1, h)
        out, next_out = address(a, OUT, n, t, h), address(a, OUT, n, t + 1, h)
        beta, next_beta = splat_from(address(a, BETA, n, t, h)), splat_from(address(a, BETA, n, t + 1, h))
        for row in range(first, last, LANES):
            at, left = memory + 4 * FOUR * (row - first), last - row
            m0, m1, m2, m3 = load(at), load(at + 64), load(at + 128), load(at + 192)
            d = mul(sub(load_some(v + 4 * row, left), fourth_0(m0, m1, m2, m3)), beta)
            seen = fma(d, key_first, fourth_2(m0, m1, m2, m3))
            f = mul(sub(load_some(next_v + 4 * row, left), seen), next_beta)
            y = fma(d, own, fourth_1(m0, m1, m2, m3))
            z = fma(f, next_own, fma(d, key_last, fourth_3(m0, m1, m2, m3)))
            store_some(out + 4 * row, mul(y, scale), left)
            store_some(next_out + 4 * row, mul(z, scale), left)
            store(memory + DELTAS + 4 * (row - first), d)
            store(memory + DELTAS + 4 * BLOCK + 4 * (row - first), f)
        fade = mul(fade, then)
        for row in range(first, last, FOUR):
            d = memory + DELTAS + 4 * (row - first)
            f, s0 = d + 4 * BLOCK, state + row * step
            s1, s2, s3 = s0 + step, s0 + 2 * step, s0 + 3 * step
            d0, d1, d2, d3 = splat_from(d), splat_from(d + 4), splat_from(d + 8), splat_from(d + 12)
            f0, f1, f2, f3 = splat_from(f), splat_from(f + 4), splat_from(f + 8), splat_from(f + 12)
            for c in range(0, step, 4 * LANES):  # S[row, c] = f g S[row, c] + d[row] g k[c] + d'[row] k'[c]
                x, y = load(written + c), load(next_k + c)
                if per_channel:
                    fade = load(fades + c)
                store(s0 + c, fma(f0, y, fma(d0, x, mul(load(s0 + c), fade))))
                store(s1 + c, fma(f1, y, fma(d1, x, mul(load(s1 + c), fade))))
                store(s2 + c, fma(f2, y, fma(d2, x, mul(load(s2 + c), fade))))
                store(s3 + c, fma(f3, y, fma(d3, x, mul(load(s3 + c), fade))))

    return part(two)


@cache
def two_turned_of(per_channel: bool) -> Part:
    """Make ``(a, n, h, source, t, first, memory)``: process two tokens with a transposed block of rows.

    Lanes are rows, so that no sum crosses lanes. A scalar decay is applied after the sums over channels. Tokens are
    pages apart, so the operands of the next two tokens are prefetched, `out` included. A store to an absent line of
    `out` would delay all later stores of the state.
    """

    def two_turned(a, n, h, source, t, first, memory):
        size = ARGS.size(a)
        scale, step, fades = splat(np.float32(1.0 / math.sqrt(size))), 4 * size, memory + FADES
        q, k = address(a, Q, n, t, source), address(a, K, n, t, source)
        next_q, next_k = address(a, Q, n, t + 1, source), address(a, K, n, t + 1, source)
        g, next_g = address(a, G, n, t, h), address(a, G, n, t + 1, h)
        fade, then = exp(splat_from(g)), exp(splat_from(next_g))
        both, written = mul(fade, then), k
        key, query, last_key, last_query = k, q, next_k, next_q
        if per_channel:
            key, query, last_key, last_query = fades + step, fades + 2 * step, fades + 3 * step, fades + 4 * step
            written = fades + 5 * step
        ahead = 2 * (next_k - k)
        qk, ql, pk, pl = zeros(), zeros(), zeros(), zeros()
        for c in range(0, step, 4 * LANES):
            for p in (q, k, next_q, next_k):
                prefetch(p + ahead + c)
            write, x, y, z = load(k + c), load(q + c), load(next_k + c), load(next_q + c)
            qk, pl = fma(x, write, qk), fma(y, z, pl)
            if per_channel:
                fade, then = exp(load(g + c)), exp(load(next_g + c))
                both = mul(fade, then)
                store(fades + c, both)
                store(key + c, mul(fade, write))
                store(query + c, mul(fade, x))
                store(last_key + c, mul(both, y))
                store(last_query + c, mul(both, z))
                write = mul(then, write)
                store(written + c, write)
            ql, pk = fma(write, y, ql), fma(write, z, pk)
        one = splat(np.float32(1))
        if per_channel:
            fade, then, both = one, one, one
        state, at = fades + 6 * step, 0
        while at < 4 * BLOCK:
            sums, c = no_sums(), 0
            while c < step:
                rows = state + BLOCK * c + at
                sums = add_rows(sums, rows, 4 * BLOCK, key + c, query + c, last_key + c, last_query + c)
                c += 4 * rows_at_once()
            store_sums(memory + at, 4 * BLOCK, sums)
            at += bytes_at_once()
        own, last_own = splat(total(qk)), splat(total(pl))
        key_first, key_last = mul(then, splat(total(ql))), mul(then, splat(total(pk)))
        v, next_v = address(a, V, n, t, h) + 4 * first, address(a, V, n, t + 1, h) + 4 * first
        out, next_out = address(a, OUT, n, t, h) + 4 * first, address(a, OUT, n, t + 1, h) + 4 * first
        beta, next_beta = splat_from(address(a, BETA, n, t, h)), splat_from(address(a, BETA, n, t + 1, h))
        deltas = memory + DELTAS
        for c in range(0, 4 * BLOCK, 4 * LANES):
            prefetch(out + 2 * (next_out - out) + c)
            prefetch(next_out + 2 * (next_out - out) + c)
            prefetch(v + 2 * (next_v - v) + c)
            prefetch(next_v + 2 * (next_v - v) + c)
            m0, m1 = mul(fade, load(memory + c)), mul(fade, load(memory + 4 * BLOCK + c))
            m2, m3 = mul(both, load(memory + 8 * BLOCK + c)), mul(both, load(memory + 12 * BLOCK + c))
            d = mul(sub(load(v + c), m0), beta)
            f = mul(sub(load(next_v + c), fma(d, key_first, m2)), next_beta)
            store(out + c, mul(fma(d, own, m1), scale))
            store(next_out + c, mul(fma(f, last_own, fma(d, key_last, m3)), scale))
            store(deltas + c, mul(d, then))
            store(deltas + 4 * BLOCK + c, f)
        for c in range(0, 4 * BLOCK, 8 * LANES):
            d0, d1 = load(deltas + c), load(deltas + c + 4 * LANES)
            f0, f1 = load(deltas + 4 * BLOCK + c), load(deltas + 4 * BLOCK + c + 4 * LANES)
            for i in range(0, step, 4):
                row, x, y = state + BLOCK * i + c, splat_from(written + i), splat_from(next_k + i)
                if per_channel:
                    both = splat_from(fades + i)
                store(row, fma(f0, y, fma(d0, x, mul(both, load(row)))))
                store(row + 4 * LANES, fma(f1, y, fma(d1, x, mul(both, load(row + 4 * LANES)))))

    return part(two_turned)


@cache
def delta_net(per_channel: bool, tiled: bool) -> Kernel:
    """Make the kernel of the rule for `keyed` key heads of `size` elements and `heads` value heads of `width` elements.

    The kernel copies the old `state` to `kept` (0: it is not copied) and writes the `new` state.

    Args:
        per_channel: Whether each channel has its own decay.
        tiled: Whether value head h uses key head ``h % keyed``; else ``h // (heads // keyed)``.
    """

    alone, two, two_turned = (of(per_channel) for of in (alone_of, two_of, two_turned_of))

    def body(a, thread, threads):
        tokens, keyed, heads, size, width = ARGS.tokens(a), ARGS.keyed(a), ARGS.heads(a), ARGS.size(a), ARGS.width(a)
        blocks = (width + BLOCK - 1) // BLOCK
        memory = ARGS.scratch(a) + thread * scratch_bytes(size)
        lo, hi = share(ARGS.sequences(a) * heads * blocks, thread, threads)
        for unit in range(lo, hi):
            first = unit % blocks * BLOCK
            h, n = unit // blocks % heads, unit // blocks // heads
            source = h % keyed if tiled else h // (heads // keyed)
            last = min(width, first + BLOCK)
            if ARGS.kept(a) != 0:
                start = 4 * size * ((n * heads + h) * width)
                for c in range(start + 4 * first * size, start + 4 * last * size, 4 * LANES):
                    prefetch_far(ARGS.state(a) + c + 4 * BLOCK * size)  # the next block
                    store_past(ARGS.kept(a) + c, load(ARGS.state(a) + c))
            is_turned = tokens >= MANY and ARGS.new(a, 2) == 0 and last - first == BLOCK
            in_pairs = not is_turned and ARGS.new(a, 2) == 0 and (last - first) % FOUR == 0
            t = 0
            while t < (tokens % 2 if is_turned else tokens):
                if in_pairs and 0 < t < tokens - 1:  # the first token reads the old state
                    two(a, n, h, source, t, first, last, memory)
                    t += 2
                else:
                    alone(a, n, h, source, t, first, last, memory)
                    t += 1
            if is_turned:
                step, turned = 4 * size, memory + FADES + 6 * 4 * size
                old = ARGS.state(a) + step * ((n * heads + h) * width + first)
                new = ARGS.new(a, 0) + n * ARGS.new(a, 1) + step * (h * width + first)
                turn_block(old if t == 0 else new, step, turned, 4 * BLOCK, BLOCK, size)
                while t < tokens:
                    two_turned(a, n, h, source, t, first, memory)
                    t += 2
                turn_block(turned, 4 * BLOCK, new, step, size, BLOCK)
        return 0

    return Kernel(f"recurrent.delta_net.{'channels' if per_channel else 'heads'}.{'tiled' if tiled else 'runs'}", body)


def _delta_net(steps: Steps, call: Bound) -> bool:
    if not is_compiled(call):
        return False
    _add_delta_net(steps, call, None)
    return True


def is_compiled(call: Bound) -> bool:
    """Return whether the kernels of this file can compute a `gated_delta_net`."""
    q, k, v, g, beta, state = (call.operand(i) for i in range(6))
    out, new = call.dst
    plain = all(o.is_float for o in (q, k, v, g, beta, state, out, new)) and state.is_dense and new.is_dense
    if not plain or call.attrs["pool"] != "none" or call.attrs["snapshots"] not in (1, q.shape[-3]) or not q.shape[-3]:
        return False
    dense = all(o.strides[-1] == 1 for o in (q, k, v, out)) and (g.shape[-1] == 1 or g.strides[-1] == 1)
    return not q.shape[-1] % LANES and dense and len(q.shape) in (3, 4) and q.shape[-2] > 0


def _add_delta_net(steps: Steps, call: Bound, kept: Operand | None) -> None:
    """Add the step. `kept` receives a copy of the old state."""
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
    """Fuse saving a state and the rule: each block is saved while it is in the first cache."""
    chain = changed_state(flow, number, "gated_delta_net")
    save, change = map(flow.call, chain)
    kept = save.out
    need(save.operand(0).tensor == change.operand(5).tensor, "not all of the state is saved")
    need(
        kept.is_float and kept.is_dense and kept.address % 64 == 0,
        "the copy of the state is not dense float32 at a multiple of 64 bytes",
    )
    need(is_compiled(change), "the rule has no kernel")
    apart(kept, [change.operand(i) for i in range(6)])
    return Chain(chain, partial(_add_delta_net, call=change, kept=kept))


def head_strides(operand: Operand, axes: int, batched: bool) -> list[int]:
    """Return the address of an operand, and its bytes from sequence to sequence, token to token, head to head.

    `axes` is the number of axes behind the sequence axis: token, head and, if it is 3, element.
    """
    rank = len(operand.shape)
    head = rank - (axes - 1)
    steps = [4 * operand.strides[head - 1], 4 * operand.strides[head]]
    return [operand.address, 4 * operand.strides[0] if batched else 0, *steps]


FUSED: Mapping[str, tuple[Fused, ...]] = {"cont": (_kept_and_delta_net,)}
BINDINGS = {"gated_delta_net": _delta_net}
