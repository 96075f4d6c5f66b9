"""The gated delta rule: token by token, in pairs of tokens, or in pairs with a transposed state.

Each head has a state S [value, key], a decay f = exp(g) and an update rate beta. A token computes ``S = f * S``, then
``d = beta * (v - S k)``, then ``S = S + d k^T``, then ``out = S q / sqrt(size)``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache, partial

import numpy as np

from ....fusion.dataflow import Dataflow, require_no_alias
from ....fusion.operands import BoundInstruction, Operand, require_supported
from ....fusion.patterns import match_saved_state_update
from ...compilation.compiler import Kernel, Subroutine, subroutine
from ...compilation.kernel_args import declare_args
from ...simd.four_row_products import (
    CROSS_ROWS,
    add_4x4_row_products,
    add_weighted_rows_to_four_sums,
    reduce_4x4_products,
    row_bytes_per_step,
    rows_per_step,
    store_four_weighted_sums,
    zero_products,
    zero_sums,
)
from ...simd.permute_lanes import fourth_0, fourth_1, fourth_2, fourth_3, transpose_16x16
from ...simd.vectors import (
    LANES,
    fma,
    lane_0,
    lane_sum,
    load,
    load_first_lanes,
    load_scalar,
    mul,
    prefetch,
    prefetch_l2,
    splat,
    splat_from,
    store,
    store_16_floats_streaming,
    store_first_lanes,
    store_scalar,
    sub,
    zeros,
)
from ...steps.partition import compute_thread_range
from ...steps.step_table import FusedBinding, FusionMatcher, StepTableBuilder
from ..vector.vector_functions import exp
from .head_addresses import compute_address_and_strides, compute_head_vector_address

BLOCK_ROWS = 32
"""Rows of a state that process all tokens before the next rows do: they stay in the first cache."""


ARGS = declare_args(
    "sequences tokens keyed heads size width q[4] k[4] v[4] g[4] beta[4] out[4] state new[3] saved_state scratch"
)
"""Words of q to out: the address, and bytes from sequence to sequence, token to token, head to head.

The states are dense. `new`: the address of the first token's state, bytes from sequence to sequence and from token to
token. The token stride is 0 if only the last state is stored. Each thread has `compute_delta_net_scratch_bytes` of
memory.
"""
Q_WORD, K_WORD, V_WORD, G_WORD, BETA_WORD, OUT_WORD = (
    ARGS.first_word_index(name) for name in ("q", "k", "v", "g", "beta", "out")
)


MIN_TRANSPOSED_TOKENS = 8
"""Tokens from which on a block of rows is transposed: two transpositions cost as much as three token pairs save."""
DELTAS_OFFSET = 4 * CROSS_ROWS * BLOCK_ROWS
DECAYS_OFFSET = DELTAS_OFFSET + 2 * 4 * BLOCK_ROWS
"""Offset in a thread's scratch: decays, the four vectors, the written keys, a transposed block.

Before `DELTAS_OFFSET` are the products of the rows of a block and four vectors, then the deltas of two tokens.
"""


@subroutine
def compute_delta_net_scratch_bytes(size):
    """Return the scratch bytes that one thread of the gated delta rule needs for keys of `size` elements."""
    return DECAYS_OFFSET + (6 + BLOCK_ROWS) * 4 * size


@subroutine
def transpose_row_block(source, step, to, pace, rows, columns):
    """Transpose a block of float32 rows in memory.

    Args:
        source: address of the rows.
        step: bytes from row to row.
        to: address of the transposed rows.
        pace: bytes from row to row of the result.
        rows: count of source rows.
        columns: count of source columns.
    """
    for r in range(0, rows, LANES):
        for c in range(0, columns, LANES):
            transpose_16x16(source + r * step + 4 * c, step, to + c * pace + 4 * r, pace)


@cache
def make_delta_rule_of_one_token(per_channel: bool) -> Subroutine:
    """Make the subroutine that applies the gated delta rule for one token to some rows of a state.

    The subroutine is ``(a, n, h, source, t, first, last, memory)``: arguments, sequence, value head, key head, token,
    rows `first` to `last`, and scratch of the thread. With `per_channel` each channel has its own decay.
    """

    def process_one_token(a, n, h, source, t, first, last, memory):
        size, width = ARGS.size(a), ARGS.width(a)
        scale, step = np.float32(1.0 / math.sqrt(size)), 4 * size
        fades = memory + DECAYS_OFFSET
        faded_q, faded_k = fades + step, fades + 2 * step
        after = ARGS.new(a, 0) + n * ARGS.new(a, 1) + t * ARGS.new(a, 2) + step * h * width
        before = after - ARGS.new(a, 2) if t > 0 else ARGS.state(a) + step * ((n * ARGS.heads(a) + h) * width)
        q = compute_head_vector_address(a, Q_WORD, n, t, source)
        k = compute_head_vector_address(a, K_WORD, n, t, source)
        v, g = compute_head_vector_address(a, V_WORD, n, t, h), compute_head_vector_address(a, G_WORD, n, t, h)
        out = compute_head_vector_address(a, OUT_WORD, n, t, h)
        beta = load_scalar(compute_head_vector_address(a, BETA_WORD, n, t, h))
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
        overlap = lane_sum(both)
        for row in range(first, last):
            s, z, x, y = before + row * step, after + row * step, zeros(), zeros()
            for c in range(0, step, 4 * LANES):
                state_vector = load(s + c)  # x += S[row, c] f[c] k[c], y += S[row, c] f[c] q[c]
                x, y = fma(state_vector, load(keys + c), x), fma(state_vector, load(queries + c), y)
            delta = (load_scalar(v + 4 * row) - decay * lane_sum(x)) * beta
            store_scalar(out + 4 * row, (decay * lane_sum(y) + delta * overlap) * scale)
            by = splat(delta)
            for c in range(0, step, 4 * LANES):
                state_vector = mul(load(s + c), load(fades + c) if per_channel else fade)
                store(z + c, fma(by, load(k + c), state_vector))  # S[row, c] = f[c] S[row, c] + delta k[c]

    return subroutine(process_one_token)


@cache
def make_delta_rule_of_two_tokens(per_channel: bool) -> Subroutine:
    """Make the subroutine that applies the gated delta rule for two tokens to rows of a state, four rows at a time.

    Arguments are as in `make_delta_rule_of_one_token`. The state is read twice and written once for both tokens. The
    reason: the products of the second token follow from the old state. With decays f and g:

    ``(S f + d k^T) g k' = S (f g k') + d (g k . k')``
    """

    def process_two_tokens(a, n, h, source, t, first, last, memory):
        size, width = ARGS.size(a), ARGS.width(a)
        scale, step = splat(np.float32(1.0 / math.sqrt(size))), 4 * size
        fades, multiplied_vectors = memory + DECAYS_OFFSET, memory + DECAYS_OFFSET + step
        written = memory + DECAYS_OFFSET + 5 * step
        state = ARGS.new(a, 0) + n * ARGS.new(a, 1) + step * h * width
        q = compute_head_vector_address(a, Q_WORD, n, t, source)
        k = compute_head_vector_address(a, K_WORD, n, t, source)
        next_q = compute_head_vector_address(a, Q_WORD, n, t + 1, source)
        next_k = compute_head_vector_address(a, K_WORD, n, t + 1, source)
        g, next_g = compute_head_vector_address(a, G_WORD, n, t, h), compute_head_vector_address(a, G_WORD, n, t + 1, h)
        fade, then = exp(splat_from(g)), exp(splat_from(next_g))
        qk, ql, pk, pl = zeros(), zeros(), zeros(), zeros()
        for c in range(0, step, 4 * LANES):
            if per_channel:
                fade, then = exp(load(g + c)), exp(load(next_g + c))
            both, key, last_key, query = mul(fade, then), load(k + c), load(next_k + c), load(next_q + c)
            write = mul(then, key)
            store(fades + c, both)
            store(multiplied_vectors + c, mul(fade, key))
            store(multiplied_vectors + step + c, mul(fade, load(q + c)))
            store(multiplied_vectors + 2 * step + c, mul(both, last_key))
            store(multiplied_vectors + 3 * step + c, mul(both, query))
            store(written + c, write)
            qk, ql = fma(load(q + c), key, qk), fma(write, last_key, ql)
            pk, pl = fma(query, write, pk), fma(query, last_key, pl)
        for row in range(first, last, CROSS_ROWS):
            sums = zero_products()
            for c in range(0, step, 4 * LANES):
                # sums[r, j] += S[row + r, c] * u[j, c] for u = f k, f q, f g k', f g q'
                sums = add_4x4_row_products(sums, state + row * step + c, step, multiplied_vectors + c, step)
            store(memory + 4 * CROSS_ROWS * (row - first), reduce_4x4_products(sums))
        own, next_own, key_first = splat(lane_sum(qk)), splat(lane_sum(pl)), splat(lane_sum(ql))
        key_last = splat(lane_sum(pk))
        v, next_v = compute_head_vector_address(a, V_WORD, n, t, h), compute_head_vector_address(a, V_WORD, n, t + 1, h)
        out = compute_head_vector_address(a, OUT_WORD, n, t, h)
        next_out = compute_head_vector_address(a, OUT_WORD, n, t + 1, h)
        beta = splat_from(compute_head_vector_address(a, BETA_WORD, n, t, h))
        next_beta = splat_from(compute_head_vector_address(a, BETA_WORD, n, t + 1, h))
        for row in range(first, last, LANES):
            at, left = memory + 4 * CROSS_ROWS * (row - first), last - row
            m0, m1, m2, m3 = load(at), load(at + 64), load(at + 128), load(at + 192)
            d = mul(sub(load_first_lanes(v + 4 * row, left), fourth_0(m0, m1, m2, m3)), beta)
            seen = fma(d, key_first, fourth_2(m0, m1, m2, m3))
            f = mul(sub(load_first_lanes(next_v + 4 * row, left), seen), next_beta)
            y = fma(d, own, fourth_1(m0, m1, m2, m3))
            z = fma(f, next_own, fma(d, key_last, fourth_3(m0, m1, m2, m3)))
            store_first_lanes(out + 4 * row, mul(y, scale), left)
            store_first_lanes(next_out + 4 * row, mul(z, scale), left)
            store(memory + DELTAS_OFFSET + 4 * (row - first), d)
            store(memory + DELTAS_OFFSET + 4 * BLOCK_ROWS + 4 * (row - first), f)
        fade = mul(fade, then)
        for row in range(first, last, CROSS_ROWS):
            d = memory + DELTAS_OFFSET + 4 * (row - first)
            f, s0 = d + 4 * BLOCK_ROWS, state + row * step
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

    return subroutine(process_two_tokens)


@cache
def make_transposed_delta_rule_of_two_tokens(per_channel: bool) -> Subroutine:
    """Make the subroutine that applies the gated delta rule for two tokens to a transposed block of state rows.

    The subroutine is ``(a, n, h, source, t, first, memory)``, as in `make_delta_rule_of_one_token`. SIMD lanes are
    rows, so that no sum crosses lanes. The operands and the outputs of the next two tokens are prefetched, because
    tokens are pages apart: a store to an absent line of `out` would delay all later stores of the state.
    """

    def process_two_transposed(a, n, h, source, t, first, memory):
        size = ARGS.size(a)
        scale, step, fades = splat(np.float32(1.0 / math.sqrt(size))), 4 * size, memory + DECAYS_OFFSET
        q = compute_head_vector_address(a, Q_WORD, n, t, source)
        k = compute_head_vector_address(a, K_WORD, n, t, source)
        next_q = compute_head_vector_address(a, Q_WORD, n, t + 1, source)
        next_k = compute_head_vector_address(a, K_WORD, n, t + 1, source)
        g, next_g = compute_head_vector_address(a, G_WORD, n, t, h), compute_head_vector_address(a, G_WORD, n, t + 1, h)
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
        while at < 4 * BLOCK_ROWS:
            sums, c = zero_sums(), 0
            while c < step:
                rows = state + BLOCK_ROWS * c + at
                sums = add_weighted_rows_to_four_sums(
                    sums, rows, 4 * BLOCK_ROWS, key + c, query + c, last_key + c, last_query + c
                )
                c += 4 * rows_per_step()
            store_four_weighted_sums(memory + at, 4 * BLOCK_ROWS, sums)
            at += row_bytes_per_step()
        own, last_own = splat(lane_sum(qk)), splat(lane_sum(pl))
        key_first, key_last = mul(then, splat(lane_sum(ql))), mul(then, splat(lane_sum(pk)))
        v = compute_head_vector_address(a, V_WORD, n, t, h) + 4 * first
        next_v = compute_head_vector_address(a, V_WORD, n, t + 1, h) + 4 * first
        out = compute_head_vector_address(a, OUT_WORD, n, t, h) + 4 * first
        next_out = compute_head_vector_address(a, OUT_WORD, n, t + 1, h) + 4 * first
        beta = splat_from(compute_head_vector_address(a, BETA_WORD, n, t, h))
        next_beta = splat_from(compute_head_vector_address(a, BETA_WORD, n, t + 1, h))
        deltas = memory + DELTAS_OFFSET
        for c in range(0, 4 * BLOCK_ROWS, 4 * LANES):
            prefetch(out + 2 * (next_out - out) + c)
            prefetch(next_out + 2 * (next_out - out) + c)
            prefetch(v + 2 * (next_v - v) + c)
            prefetch(next_v + 2 * (next_v - v) + c)
            m0, m1 = mul(fade, load(memory + c)), mul(fade, load(memory + 4 * BLOCK_ROWS + c))
            m2, m3 = mul(both, load(memory + 8 * BLOCK_ROWS + c)), mul(both, load(memory + 12 * BLOCK_ROWS + c))
            d = mul(sub(load(v + c), m0), beta)
            f = mul(sub(load(next_v + c), fma(d, key_first, m2)), next_beta)
            store(out + c, mul(fma(d, own, m1), scale))
            store(next_out + c, mul(fma(f, last_own, fma(d, key_last, m3)), scale))
            store(deltas + c, mul(d, then))
            store(deltas + 4 * BLOCK_ROWS + c, f)
        for c in range(0, 4 * BLOCK_ROWS, 8 * LANES):
            d0, d1 = load(deltas + c), load(deltas + c + 4 * LANES)
            f0, f1 = load(deltas + 4 * BLOCK_ROWS + c), load(deltas + 4 * BLOCK_ROWS + c + 4 * LANES)
            for i in range(0, step, 4):
                row, x, y = state + BLOCK_ROWS * i + c, splat_from(written + i), splat_from(next_k + i)
                if per_channel:
                    both = splat_from(fades + i)
                store(row, fma(f0, y, fma(d0, x, mul(both, load(row)))))
                store(row + 4 * LANES, fma(f1, y, fma(d1, x, mul(both, load(row + 4 * LANES)))))

    return subroutine(process_two_transposed)


@cache
def make_delta_net_kernel(per_channel: bool, tiled: bool) -> Kernel:
    """Make the gated delta rule kernel, which reads the old `state`, and writes the `new` state and the outputs.

    It has `keyed` key heads of `size` numbers, and `heads` value heads of `width` numbers. The old state is copied to
    `saved_state`, unless that is 0.

    Args:
        per_channel: Whether each channel has its own decay.
        tiled: Whether value head h uses key head ``h % keyed``; else ``h // (heads // keyed)``.
    """

    process_one_token = make_delta_rule_of_one_token(per_channel)
    process_two_tokens = make_delta_rule_of_two_tokens(per_channel)
    process_two_transposed = make_transposed_delta_rule_of_two_tokens(per_channel)

    def body(a, thread, threads):
        tokens, keyed, heads, size, width = ARGS.tokens(a), ARGS.keyed(a), ARGS.heads(a), ARGS.size(a), ARGS.width(a)
        blocks = (width + BLOCK_ROWS - 1) // BLOCK_ROWS
        memory = ARGS.scratch(a) + thread * compute_delta_net_scratch_bytes(size)
        lo, hi = compute_thread_range(ARGS.sequences(a) * heads * blocks, thread, threads)
        for unit in range(lo, hi):
            first = unit % blocks * BLOCK_ROWS
            h, n = unit // blocks % heads, unit // blocks // heads
            source = h % keyed if tiled else h // (heads // keyed)
            last = min(width, first + BLOCK_ROWS)
            if ARGS.saved_state(a) != 0:
                start = 4 * size * ((n * heads + h) * width)
                for c in range(start + 4 * first * size, start + 4 * last * size, 4 * LANES):
                    prefetch_l2(ARGS.state(a) + c + 4 * BLOCK_ROWS * size)  # the next block
                    store_16_floats_streaming(ARGS.saved_state(a) + c, load(ARGS.state(a) + c))
            is_transposed = tokens >= MIN_TRANSPOSED_TOKENS and ARGS.new(a, 2) == 0 and last - first == BLOCK_ROWS
            in_pairs = not is_transposed and ARGS.new(a, 2) == 0 and (last - first) % CROSS_ROWS == 0
            t = 0
            while t < (tokens % 2 if is_transposed else tokens):
                if in_pairs and 0 < t < tokens - 1:  # the first token reads the old state
                    process_two_tokens(a, n, h, source, t, first, last, memory)
                    t += 2
                else:
                    process_one_token(a, n, h, source, t, first, last, memory)
                    t += 1
            if is_transposed:
                step, transposed = 4 * size, memory + DECAYS_OFFSET + 6 * 4 * size
                old = ARGS.state(a) + step * ((n * heads + h) * width + first)
                new = ARGS.new(a, 0) + n * ARGS.new(a, 1) + step * (h * width + first)
                transpose_row_block(old if t == 0 else new, step, transposed, 4 * BLOCK_ROWS, BLOCK_ROWS, size)
                while t < tokens:
                    process_two_transposed(a, n, h, source, t, first, memory)
                    t += 2
                transpose_row_block(transposed, 4 * BLOCK_ROWS, new, step, size, BLOCK_ROWS)
        return 0

    return Kernel(
        f"gated_delta_net.advance.{'channels' if per_channel else 'heads'}.{'tiled' if tiled else 'runs'}", body
    )


def _bind_delta_net(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    if fits := has_delta_net_kernel(call):
        _add_delta_net_and_save_step(steps, call, None)
    return fits


def has_delta_net_kernel(call: BoundInstruction) -> bool:
    """Return whether a kernel can compute this `gated_delta_net`: its shapes, dtypes and strides are supported."""
    q, k, v, g, beta, state = (call.operand(i) for i in range(6))
    out, new = call.dst
    plain = all(o.is_float for o in (q, k, v, g, beta, state, out, new)) and state.is_dense and new.is_dense
    if not plain or call.attrs["pool"] != "none" or call.attrs["snapshots"] not in (1, q.shape[-3]) or not q.shape[-3]:
        return False
    dense = all(o.strides[-1] == 1 for o in (q, k, v, out)) and (g.shape[-1] == 1 or g.strides[-1] == 1)
    return not q.shape[-1] % LANES and dense and len(q.shape) in (3, 4) and q.shape[-2] > 0


def _add_delta_net_and_save_step(steps: StepTableBuilder, call: BoundInstruction, saved_state: Operand | None) -> None:
    """Add the step of a gated delta rule; it also copies the old state to `saved_state` unless that is None."""
    reads = q, k, v, g, beta, state = [call.operand(i) for i in range(6)]
    (out, new), sequences = call.dst, math.prod(q.shape[:-3])
    snapshots = new.shape[-4] if len(new.shape) > len(state.shape) else 1
    size = 4 * math.prod(state.shape[-3:])
    q_at, k_at, v_at, g_at, out_at = (compute_address_and_strides(x, 3, len(q.shape) == 4) for x in (q, k, v, g, out))
    each = compute_delta_net_scratch_bytes.body(q.shape[-1])
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
        beta=compute_address_and_strides(beta, 2, len(q.shape) == 4),
        out=out_at,
        state=state.address,
        new=[new.address + (snapshots - 1) * size, snapshots * size, 0 if snapshots == 1 else -size],
        saved_state=0 if saved_state is None else saved_state.address,
        scratch=steps.scratch(f"delta net {each}", each * steps.threads).address,
    )
    kernel = make_delta_net_kernel(g.shape[-1] != 1, call.attrs["heads"] == "tiled")
    writes = [out, new] if saved_state is None else [out, new, saved_state]
    units = sequences * v.shape[-2] * -(-v.shape[-1] // BLOCK_ROWS)
    of_units = [out] if sequences * q.shape[-3] == 1 and v.shape[-1] % BLOCK_ROWS == 0 else []
    steps.add_units(kernel, words, units, reads=reads, writes=writes, of_units=of_units)


def _fuse_save_and_delta_net(flow: Dataflow, number: int) -> FusedBinding:
    """Fuse the copy that saves a state with the gated delta rule that updates this state.

    Each block of the state is saved while it is in the first cache.
    """
    chain = match_saved_state_update(flow, number, "gated_delta_net")
    save, change = map(flow.bound_instruction, chain)
    saved_state = save.out
    require_supported(save.operand(0).tensor == change.operand(5).tensor, "not all of the state is saved")
    require_supported(
        saved_state.is_float and saved_state.is_dense and saved_state.address % 64 == 0,
        "the copy of the state is not dense float32 at a multiple of 64 bytes",
    )
    require_supported(has_delta_net_kernel(change), "the rule has no kernel")
    require_no_alias(saved_state, [change.operand(i) for i in range(6)])
    return FusedBinding(chain, partial(_add_delta_net_and_save_step, call=change, saved_state=saved_state))


FUSED: Mapping[str, tuple[FusionMatcher, ...]] = {"cont": (_fuse_save_and_delta_net,)}
BINDINGS = {"gated_delta_net": _bind_delta_net}
