"""The gated delta rule as a graph of basic ops: chunks of tokens at once, with a state that passes from chunk to chunk.

`G_r` is the sum of log decays of a chunk up to token r. The update of the state by token r solves a triangular system:
``u_r = beta_r (v_r - e^{G_r} S k_r - sum_{s<r} e^{G_r - G_s} (k_r k_s) u_s)``. Yang et al., 2024.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial, reduce

from ..graph.attrs import Attrs
from ..graph.node import Value
from .elementwise.binary import add, mul, scale, sub
from .elementwise.generators import fill
from .elementwise.unary import exp
from .matrix.matmul import mul_mat
from .movement.arrange import pad, repeat
from .movement.rows import concat
from .movement.triangular import diag, solve_tri, tri
from .movement.views import permute, reshape, slice_, transpose
from .reduction.reductions import cumsum, sum_rows

DELTA_CHUNK_TOKENS = 64
"""Tokens of a chunk if there is one decay per head."""
CHANNEL_DECAY_CHUNK_TOKENS = 16
"""Tokens of a chunk if there are decays per key channel; each pair of tokens then has one decay per channel."""


def build_chunked_delta_rule(operands: Mapping[str, Value], attrs: Attrs) -> tuple[Value, ...]:
    """Build `gated_delta_net` from basic ops that process one chunk of tokens after the other; return its two results.

    If the op returns snapshots, each chunk is a single token.

    Args:
        operands: operands of ``gated_delta_net`` by name, without a pool of states.
        attrs: attributes of ``gated_delta_net``.
    """
    q, k, v, g, beta, state = (operands[name] for name in ("q", "k", "v", "g", "beta", "state"))
    *leading, tokens, heads, width = v.shape
    size, snapshots = q.shape[-1], attrs["snapshots"]
    assert isinstance(snapshots, int)
    chunk = 1 if snapshots > 1 else min(tokens, CHANNEL_DECAY_CHUNK_TOKENS if g.shape[-1] > 1 else DELTA_CHUNK_TOKENS)
    count, rows = -(-tokens // chunk), math.prod(leading) * heads

    def chunks(x: Value) -> Value:
        """Return [..., T, heads, n] as [chunks of all heads, tokens, n], with zeros after the last token."""
        x = reshape(x, shape=(math.prod(leading), *x.shape[len(leading) :]))
        x = permute(x, axes=(0, 2, 1, 3))
        x = pad(x, left=(0, 0, 0, 0), right=(0, 0, count * chunk - tokens, 0))
        return reshape(x, shape=(rows * count, chunk, x.shape[-1]))

    q, k = (chunks(_repeat_key_heads(x, heads, tiled=attrs["heads"] == "tiled")) for x in (q, k))
    v, g, beta = chunks(v), chunks(g), chunks(reshape(beta, shape=(*beta.shape, 1)))
    decay_sums = cumsum(transpose(g))  # [M, 1 or size, tokens]
    decay = _build_pairwise_token_decay(decay_sums)
    decay_from_start = exp(transpose(decay_sums))
    system = add(
        mul(tri(_build_decayed_products(k, k, decay), kind="lower"), beta),
        diag(reshape(fill(beta, value=1.0), shape=v.shape[:2])),
    )
    own_update = solve_tri(system, mul(v, beta))
    state_read = solve_tri(system, mul(mul(k, decay_from_start), beta))
    attention = tri(_build_decayed_products(q, k, decay), kind="lower_diag")
    end = slice_(transpose(decay_sums), axis=1, start=chunk - 1, stop=chunk)
    keys_to_end = mul(k, exp(sub(repeat(end, shape=decay_from_start.shape), transpose(decay_sums))))
    parts = (own_update, state_read, attention, mul(q, decay_from_start), keys_to_end, exp(end))
    s, outputs, states = reshape(state, shape=(rows, width, size)), list[Value](), list[Value]()
    for n in range(count):
        own_update_n, state_read_n, attention_n, q_n, keys_to_end_n, decay_to_end = (
            _slice_chunk(x, n, count) for x in parts
        )
        change = transpose(sub(own_update_n, mul_mat(s, state_read_n)))
        outputs.append(add(mul_mat(s, q_n), mul_mat(change, attention_n)))
        s = add(mul(s, decay_to_end), mul_mat(transpose(keys_to_end_n), change))
        states.append(s)
    out = slice_(reduce(partial(concat, axis=1), outputs), axis=1, start=0, stop=tokens)
    out = permute(reshape(out, shape=(math.prod(leading), heads, tokens, width)), axes=(0, 2, 1, 3))
    out = scale(reshape(out, shape=(*leading, tokens, heads, width)), scale=1.0 / math.sqrt(size))
    return out, _stack_last_snapshots_newest_first(states, state, snapshots)


def _repeat_key_heads(x: Value, heads: int, *, tiled: bool) -> Value:
    """Repeat key heads so that each value head has its own: [..., key heads, d] to [..., heads, d].

    Args:
        x: keys or queries.
        heads: number of value heads.
        tiled: True if value head j reads key head ``j mod key heads``. False if neighbouring value heads share a key
            head.
    """
    *leading, key_heads, size = x.shape
    if tiled or key_heads == heads:
        return repeat(x, shape=(*leading, heads, size))
    flat = reshape(x, shape=(math.prod(leading), key_heads, 1, size))
    repeated = repeat(flat, shape=(math.prod(leading), key_heads, heads // key_heads, size))
    return reshape(repeated, shape=(*leading, heads, size))


def _build_pairwise_token_decay(decay_sums: Value) -> Value:
    """Build the decay of a state between each pair of tokens of a chunk: [M, 1 or size, r, s].

    The entry is the decay from token s to a later or equal token r, and 0 for s after r.

    Args:
        decay_sums: running sums of log decays [M, 1 or size, tokens]; M counts the chunks of all heads.
    """
    m, n, tokens = decay_sums.shape
    ends = repeat(reshape(decay_sums, shape=(m, n, tokens, 1)), shape=(m, n, tokens, tokens))
    # Entries above the diagonal could overflow: they are zeroed before the exponential and after it.
    left = exp(tri(sub(ends, reshape(decay_sums, shape=(m, n, 1, tokens))), kind="lower_diag"))
    return tri(left, kind="lower_diag")


def _build_decayed_products(x: Value, y: Value, decay: Value) -> Value:
    """Build the dot product of each token r of `x` with each token s of `y`, weighted by decay: [M, r, s].

    Args:
        x: rows [M, tokens, size]; M counts the chunks of all heads.
        y: rows [M, tokens, size].
        decay: decay of each pair of tokens [M, 1 or size, r, s].
    """
    m, tokens, size = x.shape
    if decay.shape[1] == 1:
        return mul(mul_mat(y, x), reshape(decay, shape=(m, tokens, tokens)))
    first = repeat(reshape(transpose(x), shape=(m, size, tokens, 1)), shape=decay.shape)
    both = mul(mul(first, reshape(transpose(y), shape=(m, size, 1, tokens))), decay)
    return reshape(sum_rows(permute(both, axes=(0, 2, 3, 1))), shape=(m, tokens, tokens))


def _slice_chunk(x: Value, n: int, count: int) -> Value:
    """Return chunk number `n` of all heads, [heads, tokens, ...].

    Args:
        x: chunks of all heads; each head has `count` chunks.
        n: number of the chunk.
        count: chunks of a head.
    """
    m, *rest = x.shape
    grouped = reshape(x, shape=(m // count, count, *rest))
    return reshape(slice_(grouped, axis=1, start=n, stop=n + 1), shape=(m // count, *rest))


def _stack_last_snapshots_newest_first(states: list[Value], state: Value, snapshots: int) -> Value:
    """Return the last state, or with `snapshots` > 1 a stack of the last states, newest first.

    Snapshots before the first token are zeros.

    Args:
        states: states after each chunk.
        state: the initial state, which gives the shape of the zeros.
        snapshots: number of states to return.
    """
    *leading, heads, width, size = state.shape
    if snapshots == 1:
        return reshape(states[-1], shape=state.shape)
    shape = (math.prod(leading), 1, heads, width, size)
    newest = [reshape(s, shape=shape) for s in reversed(states)][:snapshots]
    newest += [fill(newest[0], value=0.0)] * (snapshots - len(newest))
    return reshape(reduce(partial(concat, axis=1), newest), shape=(*leading, snapshots, heads, width, size))
