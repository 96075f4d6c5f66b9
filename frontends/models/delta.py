"""The gated delta net of Qwen3-Next and Qwen3.5: convolution, gates, rule, gated norm.

Yang, Kautz and Hatamizadeh, Gated delta networks, 2024.
"""

from __future__ import annotations

from dataclasses import dataclass

from ... import ops
from ...graph import Value
from .blocks import linear, norm, parts
from .family import Family
from .frame import RECURRENT, Frame
from .keys import Keys
from .weights import Weights


@dataclass(frozen=True, slots=True)
class Projected:
    """What linear layers make of each token: q, k and v side by side f32[B*T, channels], what gates the output
    f32[B*T, values_width], and for each value head what its decay and its learning rate come from, f32[B*T, heads]."""

    qkv: Value
    z: Value
    alpha: Value
    beta: Value


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Sizes of the recurrent layers, from ``ssm.*`` of the architecture."""

    taps: int
    key_heads: int
    value_heads: int
    head_size: int
    eps: float
    gate: str = "silu"
    """What gates the answer: SiLU or the sigmoid of another projection."""

    @property
    def needs(self) -> frozenset[str]:
        return RECURRENT

    @classmethod
    def from_keys(cls, keys: Keys, family: Family, layer: int) -> DeltaNet:
        """ModelError if heads do not divide or do not fill the inner size."""
        size, key_heads = keys.count("ssm.state_size"), keys.count("ssm.group_count")
        value_heads, inner = keys.count("ssm.time_step_rank"), keys.count("ssm.inner_size")
        if value_heads % key_heads:
            raise keys.error("ssm.time_step_rank", f"is {value_heads}; need a multiple of group_count {key_heads}")
        if inner != value_heads * size:
            raise keys.error("ssm.inner_size", f"is {inner}; need time_step_rank * state_size {value_heads * size}")
        # One tap would leave no state to keep, and no such model exists.
        taps, eps = keys.count("ssm.conv_kernel", least=2), keys.positive("attention.layer_norm_rms_epsilon")
        return cls(taps, key_heads, value_heads, size, eps, family.delta_gate)

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

    def __call__(self, weights: Weights, frame: Frame, layer: int, x: Value) -> Value:
        """The gated delta rule over convolved queries, keys and values, gated: f32[B*T, E] to f32[B*T, E].

        States ``conv_state.N`` f32[B, taps-1, channels] and ``delta_state.N`` f32[B, heads, value, key].  Files in
        which rates come by key head keep the value heads of a key head together.
        """
        block = f"blk.{layer}"
        by_key_head = weights.has(f"{block}.ssm_ba.weight")
        made = self.by_key_head(weights, block, x) if by_key_head else self.projected(weights, block, x)
        q, k, v = self.convolved(weights, frame, layer, made.qkv)
        decay, beta = self.gates(weights, frame, block, made)
        old = frame.state(f"delta_state.{layer}", self.value_heads, self.head_size, self.head_size)
        heads = "interleaved" if by_key_head else "tiled"
        o, new = ops.gated_delta_net(q, k, v, decay, beta, old, heads=heads, name=f"{block}.delta_net")
        frame.update(old, new)
        z = frame.split(made.z, self.value_heads, self.head_size)
        opened = ops.silu(z) if self.gate == "silu" else ops.sigmoid(z)
        o = ops.mul(norm(weights, f"{block}.ssm_norm", o, self.eps), opened, name=f"{block}.ssm_gated")
        return linear(weights, f"{block}.ssm_out", frame.rows(o), x.shape[-1])

    def projected(self, weights: Weights, block: str, x: Value) -> Projected:
        widths = {
            "attn_qkv": self.channels,
            "attn_gate": self.values_width,
            "ssm_alpha": self.value_heads,
            "ssm_beta": self.value_heads,
        }
        return Projected(*(linear(weights, f"{block}.{name}", x, n) for name, n in widths.items()))

    def by_key_head(self, weights: Weights, block: str, x: Value) -> Projected:
        """Rates, and in early files q, k, v and z too, come as one matrix, in which the rows of a key head lie
        together."""
        rows, repeat, size = x.shape[0], self.value_heads // self.key_heads, self.head_size

        def columns(name: str, *widths: int) -> list[Value]:
            """Parts of so many columns a key head, each of all key heads side by side: f32[B*T, key_heads * width]."""
            both = linear(weights, f"{block}.{name}", x, self.key_heads * sum(widths))
            both = ops.reshape(both, shape=(rows, self.key_heads, sum(widths)))
            return [ops.reshape(part, shape=(rows, part.spec.size // rows)) for part in parts(both, *widths)]

        beta, alpha = columns("ssm_ba", repeat, repeat)
        if weights.has(f"{block}.attn_qkv.weight"):
            qkv = linear(weights, f"{block}.attn_qkv", x, self.channels)
            z = linear(weights, f"{block}.attn_gate", x, self.values_width)
        else:
            q, k, v, z = columns("ssm_in", size, size, repeat * size, repeat * size)
            qkv = ops.concat(ops.concat(q, k, axis=-1), v, axis=-1)
        return Projected(qkv, z, alpha, beta)

    def convolved(self, weights: Weights, frame: Frame, layer: int, qkv: Value) -> tuple[Value, Value, Value]:
        """q, k f32[B,T,key heads,size], of length one, and v f32[B,T,value heads,size] after a short convolution."""
        block = f"blk.{layer}"
        kernel = weights(f"{block}.ssm_conv1d.weight", (self.channels, self.taps))
        tokens = frame.preceded(f"conv_state.{layer}", frame.split(qkv, self.channels), self.taps - 1)
        mixed = ops.ssm_conv(tokens, kernel, name=f"{block}.ssm_conv1d")
        mixed = ops.silu(mixed, name=f"{block}.conv_silu")
        q, k, v = parts(mixed, self.keys_width, self.keys_width, self.values_width)
        q, k = (frame.split(y, self.key_heads, self.head_size) for y in (q, k))
        q = ops.l2_norm(q, eps=self.eps, name=f"{block}.q_l2")
        k = ops.l2_norm(k, eps=self.eps, name=f"{block}.k_l2")
        return q, k, frame.split(v, self.value_heads, self.head_size)

    def gates(self, weights: Weights, frame: Frame, block: str, made: Projected) -> tuple[Value, Value]:
        """Log decay f32[B,T,heads,1] and learning rate f32[B,T,heads]; both 0 for padding, which leaves the state
        alone."""
        heads = self.value_heads
        steps = ops.softplus(ops.add(made.alpha, weights(f"{block}.ssm_dt.bias", (heads,))))
        # The file holds -exp(A_log).
        decay = ops.mul(steps, weights(f"{block}.ssm_a", (heads,)))
        decay = ops.mul(frame.split(decay, heads), frame.valid, name=f"{block}.decay")
        beta = ops.mul(frame.split(ops.sigmoid(made.beta), heads), frame.valid, name=f"{block}.beta")
        return frame.split(decay, heads, 1), beta
