"""Causal convolution and the gated delta net, token by token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import numpy as np

from ...graph.node import Node
from ..base import Array
from .elementwise import one_result
from .kernel import Call, Calls, Kernel


def ssm_conv(call: Call) -> Calls:
    x, w, out = call.operand(0), call.operand(1), call.out
    term = call.take(*out.shape)
    length = out.shape[-2]
    calls: Calls = [partial(np.multiply, x[..., :length, :], w[:, 0], out=out)]
    for j in range(1, w.shape[1]):
        calls.append(partial(np.multiply, x[..., j : j + length, :], w[:, j], out=term))
        calls.append(partial(np.add, out, term, out=out))
    return calls


def gated_delta_net(call: Call) -> Calls:
    """Per token five small array operations on the whole state [..., heads, value, key]."""
    q, k, v, g, beta, state = (call.operand(i) for i in range(6))
    out, new = call.dst
    tiled = call.attrs["heads"] == "tiled"
    s = _grouped(new, q.shape[-2], tiled, trailing=2)
    decay = call.take(*g.shape[:-3], *g.shape[-2:])
    delta = call.take(*v.shape[:-3], *v.shape[-2:])
    outer = call.take(*new.shape)
    scale = np.float32(1 / math.sqrt(q.shape[-1]))
    decay_of = _grouped(decay[..., None, :], q.shape[-2], tiled, trailing=2)
    delta_of = _grouped(delta, q.shape[-2], tiled, trailing=1)
    outer_of = _grouped(outer, q.shape[-2], tiled, trailing=2)
    calls: Calls = [] if np.shares_memory(state, new) else [partial(np.copyto, new, state)]
    for t in range(v.shape[-3]):
        at = (..., t, slice(None), slice(None))
        key, query = (_shared(x[at], tiled) for x in (k, q))
        value, result = (_grouped(x[at], q.shape[-2], tiled, trailing=1) for x in (v, out))
        strength = _grouped(beta[..., t, :, None], q.shape[-2], tiled, trailing=1)
        calls += [
            partial(np.exp, g[at], out=decay),
            partial(np.multiply, s, decay_of, out=s),
            partial(np.multiply, s, key[..., None, :], out=outer_of),
            partial(np.add.reduce, outer_of, axis=-1, out=delta_of),
            partial(np.subtract, value, delta_of, out=delta_of),
            partial(np.multiply, delta_of, strength, out=delta_of),
            partial(np.multiply, delta_of[..., :, None], key[..., None, :], out=outer_of),
            partial(np.add, s, outer_of, out=s),
            partial(np.multiply, s, query[..., None, :], out=outer_of),
            partial(np.add.reduce, outer_of, axis=-1, out=result),
        ]
    calls.append(partial(np.multiply, out, scale, out=out))
    return calls


def _grouped(x: Array, key_heads: int, tiled: bool, trailing: int) -> Array:
    """Split the head axis of `x` by key head: [r, h] if tiled, [h, r] if interleaved."""
    axis = x.ndim - trailing - 1
    repeat = x.shape[axis] // key_heads if key_heads else 1
    pair = (repeat, key_heads) if tiled else (key_heads, repeat)
    return x.reshape(*x.shape[:axis], *pair, *x.shape[axis + 1 :], copy=False)


def _shared(x: Array, tiled: bool) -> Array:
    """Keys [..., h, d] as they meet grouped values: a new axis of size 1 where the repeats are."""
    return x[..., None, :, :] if tiled else x[..., :, None, :]


def _delta_scratch(node: Node) -> int:
    v, g, state = (node.inputs[i].shape for i in (2, 3, 5))
    return sum(math.prod((*x[:-3], *x[-2:])) for x in (v, g)) + math.prod(state)


KERNELS: Mapping[str, Kernel] = {
    "ssm_conv": Kernel(ssm_conv, one_result),
    "gated_delta_net": Kernel(gated_delta_net, _delta_scratch),
}
