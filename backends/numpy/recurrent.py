"""Causal convolution and the gated delta net, token by token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ...graph.node import Node
from ...ops import Op, as_reference_array
from ...ops.movement.sharded_tables import require_row_numbers
from ...ops.recurrent.linear_attention import gated_linear_attn, rwkv_wkv6, rwkv_wkv7, ssm_scan
from ..base import Array
from ..calls import Binding, Call, Calls, no_scratch, one_result


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
    """Bind the delta rule: five small array operations per token on the whole state [..., heads, value, key]."""
    q, v, g = call.operand(0), call.operand(2), call.operand(3)
    keep = _Keep(call, tokens=v.shape[-3])
    tiled, key_heads = call.attrs["heads"] == "tiled", q.shape[-2]
    decay = call.take(*g.shape[:-3], *g.shape[-2:])
    delta = call.take(*v.shape[:-3], *v.shape[-2:])
    outer = call.take(*keep.s.shape)
    step = _Step(
        _grouped(keep.s, key_heads, tiled, trailing=2),
        decay,
        _grouped(decay[..., None, :], key_heads, tiled, trailing=2),
        _grouped(delta, key_heads, tiled, trailing=1),
        _grouped(outer, key_heads, tiled, trailing=2),
    )
    calls = keep.before()
    for t in range(v.shape[-3]):
        calls += [*_delta_token(call, t, tiled, step), *keep.after(t)]
    scale = np.float32(1 / math.sqrt(q.shape[-1]))
    return [*calls, partial(np.multiply, call.out, scale, out=call.out)]


@dataclass(frozen=True, slots=True)
class _Step:
    """The state and the temporaries of one token; all but `decay` have the head axis split by key head."""

    s: Array
    decay: Array
    decay_of: Array
    delta: Array
    outer: Array


def _delta_token(call: Call, t: int, tiled: bool, step: _Step) -> Calls:
    q, k, v, g, beta = (call.operand(i) for i in range(5))
    at = (..., t, slice(None), slice(None))
    key, query = (_shared(x[at], tiled) for x in (k, q))
    value, result = (_grouped(x[at], q.shape[-2], tiled, trailing=1) for x in (v, call.out))
    strength = _grouped(beta[..., t, :, None], q.shape[-2], tiled, trailing=1)
    s, delta, outer = step.s, step.delta, step.outer
    return [
        partial(np.exp, g[at], out=step.decay),
        partial(np.multiply, s, step.decay_of, out=s),
        partial(np.multiply, s, key[..., None, :], out=outer),
        partial(np.add.reduce, outer, axis=-1, out=delta),
        partial(np.subtract, value, delta, out=delta),
        partial(np.multiply, delta, strength, out=delta),
        partial(np.multiply, delta[..., :, None], key[..., None, :], out=outer),
        partial(np.add, s, outer, out=s),
        partial(np.multiply, s, query[..., None, :], out=outer),
        partial(np.add.reduce, outer, axis=-1, out=result),
    ]


class _Keep:
    """The running state of a recurrence: its memory, its initial contents and its snapshots.

    Without a pool of states it lies in the result, so nothing is copied. With a pool it lies in scratch, because one
    sequence may read a row that another sequence writes.
    """

    def __init__(self, call: Call, tokens: int) -> None:
        self.state, self.new, self.tokens = call.operand(5), call.dst[1], tokens
        self.slots_in, self.slots_out = call.optional(6), call.optional(7)
        self.snapshots = int(call.number("snapshots"))
        several = self.snapshots > 1
        if self.slots_in is not None:
            self.s = call.take(*self.slots_in.shape, *self.state.shape[1:])
        else:
            self.s = self.new[..., 0, :, :, :] if several else self.new

    def before(self) -> Calls:
        calls: Calls = []
        if self.slots_out is not None:
            if not np.shares_memory(self.state, self.new):
                calls.append(partial(np.copyto, self.new, self.state))
            calls.append(partial(require_row_numbers, self.slots_out, len(self.new), "slots_out"))
        elif self.snapshots > max(self.tokens, 1):
            missing = self.new[..., max(self.tokens, 1) :, :, :, :]
            calls.append(partial(np.copyto, missing, np.float32(0)))
        if self.slots_in is not None:
            pool = self.new if self.slots_out is not None else self.state
            calls.append(partial(_gather, pool, self.slots_in, self.s))
        elif not np.shares_memory(self.state, self.s):
            calls.append(partial(np.copyto, self.s, self.state))
        return [*calls, *(self._save(0) if not self.tokens else ())]

    def after(self, t: int) -> Calls:
        """Return the calls that save the state after token `t`."""
        back = self.tokens - 1 - t
        return self._save(back) if back < self.snapshots else []

    def _save(self, back: int) -> Calls:
        if self.slots_out is not None:
            rows = self.slots_out if self.snapshots == 1 else self.slots_out[..., back]
            return [partial(self.new.__setitem__, rows, self.s)]
        target = self.new[..., back, :, :, :] if self.snapshots > 1 else self.new
        return [] if np.shares_memory(target, self.s) else [partial(np.copyto, target, self.s)]


def _gather(pool: Array, slots: Array, out: Array) -> None:
    """Gather the states of `slots`; ``take`` writes into `out` without a buffer only in mode "clip"."""
    np.take(pool, require_row_numbers(slots, len(pool), "slots_in"), axis=0, out=out, mode="clip")


def _grouped(x: Array, key_heads: int, tiled: bool, trailing: int) -> Array:
    """Split the head axis of `x` by key head: [r, h] if tiled, [h, r] if interleaved."""
    axis = x.ndim - trailing - 1
    repeat = x.shape[axis] // key_heads if key_heads else 1
    pair = (repeat, key_heads) if tiled else (key_heads, repeat)
    return x.reshape(*x.shape[:axis], *pair, *x.shape[axis + 1 :], copy=False)


def _shared(x: Array, tiled: bool) -> Array:
    """Return keys [..., h, d] with an axis of size 1 that broadcasts over the repeats of split values."""
    return x[..., None, :, :] if tiled else x[..., :, None, :]


def widely(op: Op[Any]) -> Binding:
    """Return a binding that runs the reference of an op in float64, for recurrences with sums that may cancel.

    It allocates, so it is for ops that take little time.
    """

    def bind(call: Call) -> Calls:
        def run() -> None:
            wide = [None if x is None else as_reference_array(x) for x in call.src]
            for target, result in zip(call.dst, op.run_reference(wide, call.attrs), strict=True):
                np.copyto(target, result, casting="same_kind")

        return [run]

    return Binding(bind, no_scratch)


def _delta_scratch(node: Node) -> int:
    v, g, state = (node.inputs[i].shape for i in (2, 3, 5))
    running = math.prod((*v[:-3], *state[-3:]))
    pooled = node.attrs["pool"] != "none"
    return sum(math.prod((*x[:-3], *x[-2:])) for x in (v, g)) + (2 if pooled else 1) * running


KERNELS: Mapping[str, Binding] = {
    "ssm_conv": Binding(ssm_conv, one_result),
    "gated_delta_net": Binding(gated_delta_net, _delta_scratch),
    **{op.name: widely(op) for op in (ssm_scan, rwkv_wkv6, rwkv_wkv7, gated_linear_attn)},
}
