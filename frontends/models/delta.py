"""The gated delta net that the recurrent layers of several families share: convolution, gates, rule, gated norm.

Yang, Kautz and Hatamizadeh, Gated delta networks, 2024.  A family says how the file projects a token to the parts, and
which key head a value head belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass

from ... import ops
from ...graph import Value
from .blocks import norm
from .frame import Frame
from .keys import Keys
from .weights import Weights


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Sizes of the recurrent layers, from ``ssm.*`` of the architecture."""

    taps: int
    key_heads: int
    value_heads: int
    head_size: int

    @classmethod
    def from_keys(cls, keys: Keys) -> DeltaNet:
        """ModelError if heads do not divide or do not fill the inner size."""
        size, key_heads = keys.count("ssm.state_size"), keys.count("ssm.group_count")
        value_heads, inner = keys.count("ssm.time_step_rank"), keys.count("ssm.inner_size")
        if value_heads % key_heads:
            raise keys.error("ssm.time_step_rank", f"is {value_heads}; need a multiple of group_count {key_heads}")
        if inner != value_heads * size:
            raise keys.error("ssm.inner_size", f"is {inner}; need time_step_rank * state_size {value_heads * size}")
        # One tap would leave no state to keep, and no such model exists.
        return cls(keys.count("ssm.conv_kernel", least=2), key_heads, value_heads, size)

    @property
    def keys_width(self) -> int:
        return self.key_heads * self.head_size

    @property
    def values_width(self) -> int:
        return self.value_heads * self.head_size

    @property
    def channels(self) -> int:
        """Channels of the convolution: q, k and v side by side."""
        return 2 * self.keys_width + self.values_width


@dataclass(frozen=True, slots=True)
class Projected:
    """What linear layers make of each token: q, k and v side by side f32[B*T, channels], what gates the output
    f32[B*T, values_width], and for each value head what its decay and its learning rate come from, f32[B*T, heads]."""

    qkv: Value
    z: Value
    alpha: Value
    beta: Value


def delta_rule(
    net: DeltaNet, weights: Weights, frame: Frame, layer: int, parts: Projected, *, heads: str, eps: float
) -> Value:
    """The gated delta rule over convolved queries, keys and values, gated: f32[B*T, values_width].

    ``heads`` as in `ops.gated_delta_net`.  States ``conv_state.N`` f32[B, taps-1, channels] and ``delta_state.N``
    f32[B, heads, value, key].
    """
    block = f"blk.{layer}"
    q, k, v = convolved(net, weights, frame, layer, parts.qkv, eps)
    decay, beta = gates(net, weights, frame, block, parts)
    old = frame.state(f"delta_state.{layer}", net.value_heads, net.head_size, net.head_size)
    o, new = ops.gated_delta_net(q, k, v, decay, beta, old, heads=heads, name=f"{block}.delta_net")
    frame.update(old, new)
    z = frame.split(parts.z, net.value_heads, net.head_size)
    return frame.rows(ops.mul(norm(weights, f"{block}.ssm_norm", o, eps), ops.silu(z), name=f"{block}.ssm_gated"))


def convolved(
    net: DeltaNet, weights: Weights, frame: Frame, layer: int, qkv: Value, eps: float
) -> tuple[Value, Value, Value]:
    """q, k f32[B,T,key heads,size], of length one, and v f32[B,T,value heads,size] after a short convolution."""
    block = f"blk.{layer}"
    kernel = weights(f"{block}.ssm_conv1d.weight", (net.channels, net.taps))
    tokens = frame.preceded(f"conv_state.{layer}", frame.split(qkv, net.channels))
    mixed = ops.ssm_conv(tokens, kernel, name=f"{block}.ssm_conv1d")
    mixed = ops.silu(mixed, name=f"{block}.conv_silu")

    def heads(start: int, count: int) -> Value:
        part = ops.slice_(mixed, axis=-1, start=start, stop=start + count * net.head_size)
        return frame.split(part, count, net.head_size)

    q, k = heads(0, net.key_heads), heads(net.keys_width, net.key_heads)
    q = ops.l2_norm(q, eps=eps, name=f"{block}.q_l2")
    k = ops.l2_norm(k, eps=eps, name=f"{block}.k_l2")
    return q, k, heads(2 * net.keys_width, net.value_heads)


def gates(net: DeltaNet, weights: Weights, frame: Frame, block: str, parts: Projected) -> tuple[Value, Value]:
    """Log decay f32[B,T,heads,1] and learning rate f32[B,T,heads]; both 0 for padding, which leaves the state alone."""
    heads = net.value_heads
    steps = ops.softplus(ops.add(parts.alpha, weights(f"{block}.ssm_dt.bias", (heads,))))
    # The file holds -exp(A_log).
    decay = ops.mul(steps, weights(f"{block}.ssm_a", (heads,)))
    decay = ops.mul(frame.split(decay, heads), frame.valid, name=f"{block}.decay")
    beta = ops.mul(frame.split(ops.sigmoid(parts.beta), heads), frame.valid, name=f"{block}.beta")
    return frame.split(decay, heads, 1), beta
