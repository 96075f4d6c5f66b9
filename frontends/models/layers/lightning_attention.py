"""Lightning attention, which is linear attention with a fixed decay per head, and the gated short convolution.

Lightning attention: Qin et al., 2024, in MiniMax-01 (MiniMax, 2025). Short convolution: Liquid AI, LFM2, 2025. Shapes
use B for sequences, T for new tokens per sequence, and E for the model width.
"""

from __future__ import annotations

import math
from functools import partial

from .... import ops
from ....graph import Value
from ....graph.lazy_dataclass import dataclass
from ...gguf.hyperparameter_keys import ArchitectureMetadata
from ..inputs.family import FamilyTraits
from ..inputs.graph_builder import StepGraphBuilder
from ..inputs.weights import ModelWeights
from .feed_forward import Norm, linear, matmul, split_columns


@dataclass(frozen=True, slots=True)
class LightningAttention:
    """Lightning attention: linear attention in which the state of a head decays by ``exp(-slope)`` per token.

    The slope is the ALiBi slope of the head times ``share``, which depends on the layer. State ``linear_state.N``
    f32[B, heads, key, value].
    """

    heads: int
    size: int
    share: float
    norm: Norm
    taps: int = 1
    required_inputs: frozenset[str] = frozenset({"valid"})

    @classmethod
    def from_keys(cls, keys: ArchitectureMetadata, family: FamilyTraits, layer: int) -> LightningAttention:
        blocks, heads = (
            keys.read_block_count_limited_by_tensor_count(),
            max(keys.read_per_block_counts("attention.head_count", keys.read_block_count_limited_by_tensor_count())),
        )
        size = keys.read_count_or_default("attention.key_length", keys.read_count("embedding_length") // heads)
        share = 1.0 - layer / max(1, blocks - 1) + 1e-5
        return cls(heads, size, share, Norm(keys.read_required_epsilon("attention.layer_norm_rms_epsilon")))

    def __call__(self, weights: ModelWeights, frame: StepGraphBuilder, layer: int, x: Value) -> Value:
        """Return the linear attention of ``x`` f32[B*T, E]: f32[B*T, E]."""
        block, width = f"blk.{layer}", self.heads * self.size
        both = frame.rows_to_sequences(
            ops.silu(matmul(weights, f"{block}.attn_qkv", x, 3 * width)), self.heads, 3 * self.size
        )
        q, k, v = split_columns(both, self.size, self.size, self.size)
        valid = frame.token_validity_mask
        old = frame.make_sequence_state(f"linear_state.{layer}", self.heads, self.size, self.size)
        decay = ops.exp(ops.mul(self.build_log_decays(k), valid), name=f"{block}.decay")
        rule = partial(ops.gated_linear_attn, scale=1.0, name=f"{block}.linear")
        y = frame.run_recurrence_and_set_state(rule, (ops.mul(k, valid), v, q, decay), old)
        y = self.norm(weights, f"{block}.attn_norm_2", frame.sequences_to_rows(y))
        gate = ops.sigmoid(matmul(weights, f"{block}.attn_gate", x, width))
        return matmul(weights, f"{block}.attn_output", ops.mul(gate, y), x.shape[-1])

    def build_log_decays(self, like: Value) -> Value:
        """Build the log decay ``-slope`` of each head, broadcast to the shape of ``like`` f32[B, T, heads, size]."""
        start = 2.0 ** -(2.0 ** -(math.log2(self.heads) - 3))
        numbers = ops.arange(start=1.0, stop=self.heads + 1.0)
        slopes = ops.scale(ops.exp(ops.scale(numbers, scale=math.log(start))), scale=-self.share)
        return ops.add(ops.fill(like, value=0.0), ops.reshape(slopes, shape=(self.heads, 1)))


@dataclass(frozen=True, slots=True)
class GatedShortConvolution:
    """A gated short convolution: a convolution over few tokens between two gates.

    State ``conv_state.N`` f32[B, taps-1, E].
    """

    taps: int
    required_inputs: frozenset[str] = frozenset({"conv_rows"})

    @classmethod
    def from_keys(cls, keys: ArchitectureMetadata, family: FamilyTraits, layer: int) -> GatedShortConvolution:
        return cls(keys.read_count("shortconv.l_cache", minimum=2))

    def __call__(self, weights: ModelWeights, frame: StepGraphBuilder, layer: int, x: Value) -> Value:
        """Return the gated convolution of ``x`` f32[B*T, E]: f32[B*T, E]."""
        block, width = f"blk.{layer}.shortconv", x.shape[-1]
        b, c, x = split_columns(linear(weights, f"{block}.in_proj", x, 3 * width), width, width, width)
        tokens = frame.prepend_previous_rows(
            f"conv_state.{layer}", frame.rows_to_sequences(ops.mul(b, x), width), self.taps - 1
        )
        y = ops.ssm_conv(tokens, weights(f"{block}.conv.weight", (width, self.taps)), name=f"{block}.conv")
        return linear(weights, f"{block}.out_proj", ops.mul(c, frame.sequences_to_rows(y)), width)
