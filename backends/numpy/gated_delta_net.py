"""NumPy kernels of causal convolution and of the gated delta net, token by token."""

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
from ..host.bindings import Binding, Calls, HostInstruction, count_no_scratch_elements, count_result_elements


def bind_ssm_conv(call: HostInstruction) -> Calls:
    x, w, out = call.operand(0), call.operand(1), call.out
    term = call.take_scratch(*out.shape)
    length = out.shape[-2]
    calls: Calls = [partial(np.multiply, x[..., :length, :], w[:, 0], out=out)]
    for j in range(1, w.shape[1]):
        calls.append(partial(np.multiply, x[..., j : j + length, :], w[:, j], out=term))
        calls.append(partial(np.add, out, term, out=out))
    return calls


def bind_gated_delta_net(call: HostInstruction) -> Calls:
    """Return the NumPy calls that compute the gated delta rule, token by token.

    Each token needs a few array operations on the whole state [..., heads, value, key].
    """
    q, v, g = call.operand(0), call.operand(2), call.operand(3)
    keep = _RunningStateWithSnapshots(call, tokens=v.shape[-3])
    tiled, key_heads = call.attrs["heads"] == "tiled", q.shape[-2]
    decay = call.take_scratch(*g.shape[:-3], *g.shape[-2:])
    delta = call.take_scratch(*v.shape[:-3], *v.shape[-2:])
    outer = call.take_scratch(*keep.running_state.shape)
    step = _TokenBuffers(
        _split_head_axis(keep.running_state, key_heads, tiled, trailing=2),
        decay,
        _split_head_axis(decay[..., None, :], key_heads, tiled, trailing=2),
        _split_head_axis(delta, key_heads, tiled, trailing=1),
        _split_head_axis(outer, key_heads, tiled, trailing=2),
    )
    calls = keep.bind_initial_calls()
    for t in range(v.shape[-3]):
        calls += [*_bind_delta_token(call, t, tiled, step), *keep.make_snapshot_calls_of_token(t)]
    scale = np.float32(1 / math.sqrt(q.shape[-1]))
    return [*calls, partial(np.multiply, call.out, scale, out=call.out)]


@dataclass(frozen=True, slots=True)
class _TokenBuffers:
    """The running state, and the temporary arrays with which each token is computed.

    All except `decay` have a head axis that is split by key head, as in `_split_head_axis`.
    """

    running_state: Array
    decay: Array
    decay_of: Array
    delta: Array
    outer: Array


def _bind_delta_token(call: HostInstruction, t: int, tiled: bool, step: _TokenBuffers) -> Calls:
    q, k, v, g, beta = (call.operand(i) for i in range(5))
    at = (..., t, slice(None), slice(None))
    key, query = (_add_broadcast_axis_to_keys(x[at], tiled) for x in (k, q))
    value, result = (_split_head_axis(x[at], q.shape[-2], tiled, trailing=1) for x in (v, call.out))
    strength = _split_head_axis(beta[..., t, :, None], q.shape[-2], tiled, trailing=1)
    s, delta, outer = step.running_state, step.delta, step.outer
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


class _RunningStateWithSnapshots:
    """The state that the gated delta rule updates token by token, with the copies of it that the op must return.

    A snapshot is the state after one of the last tokens. Without a pool of states, the running state is in the result,
    so no copy is needed. With a pool (`slots_in` and `slots_out` select rows) it is in scratch memory, because one
    sequence may read a row that another sequence writes.
    """

    def __init__(self, call: HostInstruction, tokens: int) -> None:
        self.state, self.new, self.tokens = call.operand(5), call.dst[1], tokens
        self.slots_in, self.slots_out = call.optional_operand(6), call.optional_operand(7)
        self.snapshots = int(call.number_attribute("snapshots"))
        several = self.snapshots > 1
        if self.slots_in is not None:
            self.running_state = call.take_scratch(*self.slots_in.shape, *self.state.shape[1:])
        else:
            self.running_state = self.new[..., 0, :, :, :] if several else self.new

    def bind_initial_calls(self) -> Calls:
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
            calls.append(partial(_gather_states, pool, self.slots_in, self.running_state))
        elif not np.shares_memory(self.state, self.running_state):
            calls.append(partial(np.copyto, self.running_state, self.state))
        return [*calls, *(self._bind_save(0) if not self.tokens else ())]

    def make_snapshot_calls_of_token(self, t: int) -> Calls:
        """Return the calls that save the running state after token `t` as a snapshot.

        The list is empty for a token without snapshot.
        """
        back = self.tokens - 1 - t
        return self._bind_save(back) if back < self.snapshots else []

    def _bind_save(self, back: int) -> Calls:
        if self.slots_out is not None:
            rows = self.slots_out if self.snapshots == 1 else self.slots_out[..., back]
            return [partial(self.new.__setitem__, rows, self.running_state)]
        target = self.new[..., back, :, :, :] if self.snapshots > 1 else self.new
        return [] if np.shares_memory(target, self.running_state) else [partial(np.copyto, target, self.running_state)]


def _gather_states(pool: Array, slots: Array, out: Array) -> None:
    """Copy the states with the numbers `slots` from the pool to `out`.

    The mode "clip" is for speed: in other modes, ``take`` needs a temporary array.
    """
    np.take(pool, require_row_numbers(slots, len(pool), "slots_in"), axis=0, out=out, mode="clip")


def _split_head_axis(x: Array, key_heads: int, tiled: bool, trailing: int) -> Array:
    """Return a view of `x` with the axis of value heads split into two axes: key heads h, and value heads r of each.

    The order is [r, h] if heads are tiled, else [h, r]. `trailing` is the number of axes after the head axis.
    """
    axis = x.ndim - trailing - 1
    repeat = x.shape[axis] // key_heads if key_heads else 1
    pair = (repeat, key_heads) if tiled else (key_heads, repeat)
    return x.reshape(*x.shape[:axis], *pair, *x.shape[axis + 1 :], copy=False)


def _add_broadcast_axis_to_keys(x: Array, tiled: bool) -> Array:
    """Return keys [..., h, d] with a new axis of size 1, which broadcasts to the value heads of each key head."""
    return x[..., None, :, :] if tiled else x[..., :, None, :]


def make_float64_reference_binding(op: Op[Any]) -> Binding:
    """Make a binding that runs the reference function of an op in float64, for recurrences with sums that may cancel.

    The binding allocates, so it serves ops that take little time.
    """

    def bind(call: HostInstruction) -> Calls:
        def run() -> None:
            wide = [None if x is None else as_reference_array(x) for x in call.src]
            for target, result in zip(call.dst, op.run_reference(wide, call.attrs), strict=True):
                np.copyto(target, result, casting="same_kind")

        return [run]

    return Binding(bind, count_no_scratch_elements)


def _delta_scratch(node: Node) -> int:
    v, g, state = (node.inputs[i].shape for i in (2, 3, 5))
    running = math.prod((*v[:-3], *state[-3:]))
    pooled = node.attrs["pool"] != "none"
    return sum(math.prod((*x[:-3], *x[-2:])) for x in (v, g)) + (2 if pooled else 1) * running


KERNELS: Mapping[str, Binding] = {
    "ssm_conv": Binding(bind_ssm_conv, count_result_elements),
    "gated_delta_net": Binding(bind_gated_delta_net, _delta_scratch),
    **{op.name: make_float64_reference_binding(op) for op in (ssm_scan, rwkv_wkv6, rwkv_wkv7, gated_linear_attn)},
}
