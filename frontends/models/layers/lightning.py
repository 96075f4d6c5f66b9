"""Linear attention with fixed decay per head, and the gated short convolution.

Lightning attention: Qin et al., 2024, in MiniMax-01 (MiniMax, 2025). Short convolution: Liquid AI, LFM2, 2025.
"""

from __future__ import annotations

import math
from functools import partial

from .... import ops
from ....graph import Value
from ....graph.lazy_dataclass import dataclass
from ...gguf.hyperparameter_keys import ArchitectureKeys
from ..family import Family
from ..frame import Frame
from ..weights import Weights
from .blocks import Norm, linear, parts, product


@dataclass(frozen=True, slots=True)
class Lightning:
    """Linear attention in which a head decays by ``exp(-slope)`` per token.

    The slope is the ALiBi slope of the head times ``share``, which depends on the layer. State ``linear_state.N``
    f32[B, heads, key, value].
    """

    heads: int
    size: int
    share: float
    norm: Norm
    taps: int = 1
    needs: frozenset[str] = frozenset({"valid"})

    @classmethod
    def from_keys(cls, keys: ArchitectureKeys, family: Family, layer: int) -> Lightning:
        blocks, heads = keys.block_count(), max(keys.per_block_counts("attention.head_count", keys.block_count()))
        size = keys.count_or_default("attention.key_length", keys.count("embedding_length") // heads)
        share = 1.0 - layer / max(1, blocks - 1) + 1e-5
        return cls(heads, size, share, Norm(keys.eps("attention.layer_norm_rms_epsilon")))

    def __call__(self, weights: Weights, frame: Frame, layer: int, x: Value) -> Value:
        """Return the linear attention of ``x`` f32[B*T, E]: f32[B*T, E]."""
        block, width = f"blk.{layer}", self.heads * self.size
        both = frame.split(ops.silu(product(weights, f"{block}.attn_qkv", x, 3 * width)), self.heads, 3 * self.size)
        q, k, v = parts(both, self.size, self.size, self.size)
        valid = frame.each_token
        old = frame.state(f"linear_state.{layer}", self.heads, self.size, self.size)
        decay = ops.exp(ops.mul(self.rates(k), valid), name=f"{block}.decay")
        rule = partial(ops.gated_linear_attn, scale=1.0, name=f"{block}.linear")
        y = frame.carried(rule, (ops.mul(k, valid), v, q, decay), old)
        y = self.norm(weights, f"{block}.attn_norm_2", frame.rows(y))
        gate = ops.sigmoid(product(weights, f"{block}.attn_gate", x, width))
        return product(weights, f"{block}.attn_output", ops.mul(gate, y), x.shape[-1])

    def rates(self, like: Value) -> Value:
        """Return the log decays of all heads in the shape of ``like``."""
        start = 2.0 ** -(2.0 ** -(math.log2(self.heads) - 3))
        numbers = ops.arange(start=1.0, stop=self.heads + 1.0)
        slopes = ops.scale(ops.exp(ops.scale(numbers, scale=math.log(start))), scale=-self.share)
        return ops.add(ops.fill(like, value=0.0), ops.reshape(slopes, shape=(self.heads, 1)))


@dataclass(frozen=True, slots=True)
class ShortConvolution:
    """A convolution over few tokens between two gates. State ``conv_state.N`` f32[B, taps-1, E]."""

    taps: int
    needs: frozenset[str] = frozenset({"conv_rows"})

    @classmethod
    def from_keys(cls, keys: ArchitectureKeys, family: Family, layer: int) -> ShortConvolution:
        return cls(keys.count("shortconv.l_cache", least=2))

    def __call__(self, weights: Weights, frame: Frame, layer: int, x: Value) -> Value:
        """Return the gated convolution of ``x`` f32[B*T, E]: f32[B*T, E]."""
        block, width = f"blk.{layer}.shortconv", x.shape[-1]
        b, c, x = parts(linear(weights, f"{block}.in_proj", x, 3 * width), width, width, width)
        tokens = frame.preceded(f"conv_state.{layer}", frame.split(ops.mul(b, x), width), self.taps - 1)
        y = ops.ssm_conv(tokens, weights(f"{block}.conv.weight", (width, self.taps)), name=f"{block}.conv")
        return linear(weights, f"{block}.out_proj", ops.mul(c, frame.rows(y)), width)
