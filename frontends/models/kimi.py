"""Kimi delta attention: the gated delta rule with a decay for each key channel.

Kimi team, Kimi Linear, 2025.  States ``conv_state_q.N`` and those of k and v f32[B, taps-1, heads * size], and
``delta_state.N`` f32[B, heads, value, key].
"""

from __future__ import annotations

from dataclasses import dataclass

from ... import ops
from ...graph import Value
from .blocks import Norm, product
from .family import Family
from .frame import RECURRENT, Frame
from .keys import Keys
from .weights import Weights


@dataclass(frozen=True, slots=True)
class KimiDelta:
    """``floor`` is the lowest log decay of a bounded gate, 0 for one that is not; ``sign`` that of what bounds it."""

    taps: int
    heads: int
    size: int
    floor: float
    sign: float
    norm: Norm
    l2_eps: float
    needs: frozenset[str] = RECURRENT

    @classmethod
    def from_keys(cls, keys: Keys, family: Family, layer: int) -> KimiDelta:
        heads = max(keys.each("attention.head_count", keys.blocks()))
        floor = keys.number("kda.gate_lower_bound", 0.0) if family.bounded_decay else 0.0
        eps = keys.eps("attention.layer_norm_rms_epsilon")
        return cls(
            keys.count("ssm.conv_kernel", least=2),
            heads,
            keys.count("kda.head_dim"),
            floor,
            family.bounded_decay,
            Norm(eps),
            family.l2_eps or eps,
        )

    def __call__(self, weights: Weights, frame: Frame, layer: int, x: Value) -> Value:
        """f32[B*T, E] to f32[B*T, E]."""
        block, heads, size = f"blk.{layer}", self.heads, self.size
        q, k, v = (self.convolved(weights, frame, layer, kind, x) for kind in "qkv")
        q = ops.l2_norm(q, eps=self.l2_eps, name=f"{block}.q_l2")
        k = ops.l2_norm(k, eps=self.l2_eps, name=f"{block}.k_l2")
        beta = frame.split(ops.sigmoid(product(weights, f"{block}.ssm_beta", x, heads)), heads)
        beta = ops.mul(beta, frame.valid, name=f"{block}.beta")
        old = frame.state(f"delta_state.{layer}", heads, size, size)
        o, new = ops.gated_delta_net(
            q, k, v, self.decay(weights, frame, block, x), beta, old, name=f"{block}.delta_net"
        )
        frame.update(old, new)
        gate = frame.split(self.through(weights, block, "ssm_g", x), heads, size)
        y = ops.mul(self.norm(weights, f"{block}.ssm_norm", o), ops.sigmoid(gate), name=f"{block}.ssm_gated")
        return product(weights, f"{block}.attn_output", frame.rows(y), x.shape[-1])

    def convolved(self, weights: Weights, frame: Frame, layer: int, kind: str, x: Value) -> Value:
        """Queries, keys or values f32[B,T,heads,size] after a short convolution."""
        block, width = f"blk.{layer}", self.heads * self.size
        name = f"{block}.ssm_conv1d_{kind}.weight"
        kernel = ops.reshape(weights(name, weights.shape(name)), shape=(width, self.taps))
        y = product(weights, f"{block}.attn_{kind}", x, width)
        tokens = frame.preceded(f"conv_state_{kind}.{layer}", frame.split(y, width), self.taps - 1)
        return frame.split(ops.silu(ops.ssm_conv(tokens, kernel), name=f"{block}.{kind}_conv"), self.heads, self.size)

    def decay(self, weights: Weights, frame: Frame, block: str, x: Value) -> Value:
        """Log decays f32[B,T,heads,size], 0 for padding."""
        width, heads = self.heads * self.size, self.heads
        g = ops.add(self.through(weights, block, "ssm_f", x), weights(f"{block}.ssm_dt.bias", (width,)))
        a = weights(f"{block}.ssm_a", weights.shape(f"{block}.ssm_a"))
        a = ops.reshape(a, shape=(heads, 1))
        if self.floor:
            g = ops.scale(ops.mul(frame.split(g, heads, self.size), a), scale=self.sign)
            g = ops.scale(ops.sigmoid(g), scale=self.floor)
        else:
            g = ops.mul(frame.split(ops.softplus(g), heads, self.size), a)
        valid = ops.reshape(frame.valid, shape=(*frame.pos.shape, 1, 1))
        return ops.mul(g, valid, name=f"{block}.decay")

    def through(self, weights: Weights, block: str, name: str, x: Value) -> Value:
        """``x`` f32[B*T, E] times a matrix f32[B*T, heads * size], which may be a product of two."""
        width = self.heads * self.size
        if weights.has(f"{block}.{name}.weight"):
            return product(weights, f"{block}.{name}", x, width)
        y = product(weights, f"{block}.{name}_a", x, weights.shape(f"{block}.{name}_a.weight")[0])
        return product(weights, f"{block}.{name}_b", y, width) if weights.has(f"{block}.{name}_b.weight") else y
