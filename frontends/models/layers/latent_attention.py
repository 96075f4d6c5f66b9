"""Multi-head latent attention (MLA): a short cached vector per token holds the keys and values of all heads.

The keys and values of a token are linear functions of its latent vector. DeepSeek-AI, DeepSeek-V2, 2024. Shapes use B
for sequences, T for new tokens per sequence, and E for the model width.
"""

from __future__ import annotations

import math

from .... import ops
from ....graph import Value
from ....graph.lazy_dataclass import dataclass
from ...gguf.hyperparameter_keys import ArchitectureMetadata
from ..inputs.attention_window import AttentionWindow, TemperatureScaling
from ..inputs.family import FamilyTraits
from ..inputs.graph_builder import CACHE_INPUTS, StepGraphBuilder
from ..inputs.weights import ModelWeights
from .feed_forward import Norm, apply_attention_output_gate_if_present, linear, matmul, split_columns
from .rope import Rope, find_frequency_divisors, read_original_context_length


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """The multi-head latent attention (MLA) of one layer; ``rank`` is the length of the latent vector.

    Each head has ``unrotated_columns`` without RoPE and ``rotated_columns`` with RoPE. In keys, all heads share the
    rotated columns.
    """

    norm: Norm
    heads: int
    rank: int
    unrotated_columns: int
    rotated_columns: int
    value_size: int
    scale: float
    rope: Rope | None
    attention_window: AttentionWindow
    original_context: int
    temperature: TemperatureScaling
    taps: int = 0

    @property
    def required_inputs(self) -> frozenset[str]:
        return CACHE_INPUTS if self.attention_window.is_causal else frozenset({"pos"})

    @classmethod
    def from_keys(
        cls,
        keys: ArchitectureMetadata,
        family: FamilyTraits,
        norm: Norm,
        heads: int,
        rope: Rope | None,
        attention_window: AttentionWindow,
        temperature: TemperatureScaling,
    ) -> LatentAttention:
        """Read the sizes of the latent attention of a layer from the metadata.

        Layers with a window may have sizes of their own.

        Args:
            keys: The metadata.
            family: The traits of the architecture.
            norm: The norm of latent vectors.
            heads: Number of heads.
            rope: The rotary embedding, or `None`.
            attention_window: The attention window.
            temperature: The temperature scaling of queries.

        Raises:
            ModelError: A value is missing or invalid.
        """
        sizes = [
            (attention_window.window and keys.read_count_or_default(f"attention.{kind}_length_mla_swa", 0))
            or keys.read_count_or_default(f"attention.{kind}_length_mla", 0)
            or keys.read_count(f"attention.{kind}_length")
            for kind in ("key", "value")
        ]
        rank = (
            attention_window.window and keys.read_count_or_default("attention.kv_lora_rank_swa", 0)
        ) or keys.read_count("attention.kv_lora_rank")
        turning = keys.read_count("rope.dimension_count", 0, minimum=0)
        if turning > sizes[0]:
            raise keys.make_key_error("rope.dimension_count", f"is {turning}; need at most the key length {sizes[0]}")
        scale = _compute_yarn_score_factor(keys, family, rope) / math.sqrt(sizes[0])
        plain, context = sizes[0] - turning, read_original_context_length(keys)
        return cls(norm, heads, rank, plain, turning, sizes[1], scale, rope, attention_window, context, temperature)

    def __call__(self, weights: ModelWeights, frame: StepGraphBuilder, layer: int, x: Value) -> Value:
        """Return the latent attention of ``x`` f32[B*T, E]: f32[B*T, E]."""
        block = f"blk.{layer}"
        q, _ = self.compute_queries_and_their_input(weights, block, x)
        c, pe = self.compute_latents_and_rotated_keys(weights, frame, block, x)
        if weights.has_used_tensor(f"{block}.attn_k_b.weight"):
            y = self.attend_latent(weights, frame, layer, q, c, pe)
        else:
            y = self.cache_and_attend_expanded(weights, frame, layer, q, c, pe)
        return self.gate_and_project_output(weights, frame, block, x, y)

    def compute_queries_and_their_input(self, weights: ModelWeights, block: str, x: Value) -> tuple[Value, Value]:
        """Compute the queries f32[B*T, heads * size] from ``x``; also return the vector that the last projection reads.

        This vector is ``x`` itself, or a shorter normalised vector if the file has a low-rank query projection.
        """
        width = self.heads * (self.unrotated_columns + self.rotated_columns)
        if not weights.has_used_tensor(f"{block}.attn_q_a.weight"):
            return matmul(weights, f"{block}.attn_q", x, width), x
        rank = weights.tensor_shape(f"{block}.attn_q_a.weight")[0]
        short = self.norm(weights, f"{block}.attn_q_a_norm", matmul(weights, f"{block}.attn_q_a", x, rank))
        return matmul(weights, f"{block}.attn_q_b", short, width), short

    def compute_latents_and_rotated_keys(
        self, weights: ModelWeights, frame: StepGraphBuilder, block: str, x: Value
    ) -> tuple[Value, Value | None]:
        """Compute the normalised latent vectors f32[B*T, rank] and the rotated key columns f32[B, T, 1, columns].

        All heads share the rotated key columns; the second result is `None` for a model without RoPE.
        """
        both = matmul(weights, f"{block}.attn_kv_a_mqa", x, self.rank + self.rotated_columns)
        if not self.rotated_columns:
            return self.norm(weights, f"{block}.attn_kv_a_norm", both), None
        c, pe = split_columns(both, self.rank, self.rotated_columns)
        c, pe = self.norm(weights, f"{block}.attn_kv_a_norm", c), frame.rows_to_sequences(pe, 1, self.rotated_columns)
        if weights.has_used_tensor(f"{block}.attn_k_norm.weight"):
            pe = self.norm(weights, f"{block}.attn_k_norm", pe)
        return c, self.apply_rope_to_last_columns(weights, frame, block, pe, name=f"{block}.k_rope")

    def apply_rope_to_last_columns(
        self, weights: ModelWeights, frame: StepGraphBuilder, block: str, x: Value, *, name: str
    ) -> Value:
        """Apply RoPE to the last ``rotated_columns`` of ``x`` f32[B, T, heads, n]."""
        if self.rope is None:
            return x
        factors = find_frequency_divisors(weights, frame, self.rope, self.original_context, block)
        return self.rope.rotate_by_position(x, frame.pos, factors, name=name, offset=x.shape[-1] - self.rotated_columns)

    def attend_latent(
        self, weights: ModelWeights, frame: StepGraphBuilder, layer: int, q: Value, c: Value, pe: Value | None
    ) -> Value:
        """Attend to the cached latent vectors themselves, instead of to keys and values of each head.

        The queries are projected to the latent space. There is one key head, and its latent columns are also the
        value. A matrix per head then maps the attention results to values.

        Args:
            weights: The weights of the model.
            frame: The builder of the graph.
            layer: Number of the layer.
            q: The queries, f32[B*T, heads * size].
            c: The latent vectors, f32[B*T, rank].
            pe: The rotated key columns f32[B, T, 1, columns], or `None`.

        Returns:
            The attention results, f32[B, T, heads, value size].
        """
        block = f"blk.{layer}"
        q, turning = self.project_queries_to_latent(weights, frame, block, q)
        q = q if turning is None else ops.concat(q, turning, axis=-1)
        k = frame.rows_to_sequences(c, 1, self.rank)
        k = k if pe is None else ops.concat(k, pe, axis=-1)
        if self.attention_window.is_causal:
            k = frame.write_and_read_cache(f"cache_k.{layer}", k, attention_window=self.attention_window)
        v = k if pe is None else ops.slice_(k, axis=-1, start=0, stop=self.rank)
        y = self.attend(weights, frame, block, q, k, v)
        return self.matmul_per_head(
            weights, frame, f"{block}.attn_v_b", frame.rows_to_sequences(y, self.heads, self.rank), self.value_size
        )

    def project_queries_to_latent(
        self, weights: ModelWeights, frame: StepGraphBuilder, block: str, q: Value
    ) -> tuple[Value, Value | None]:
        """Project the unrotated columns of the queries to latent vectors f32[B, T, heads, rank].

        The second result has the rotated columns of the queries; it is `None` for a model without RoPE.
        """
        q = frame.rows_to_sequences(q, self.heads, self.unrotated_columns + self.rotated_columns)
        if not self.rotated_columns:
            return self.matmul_per_head(weights, frame, f"{block}.attn_k_b", q, self.rank), None
        plain, turning = split_columns(q, self.unrotated_columns, self.rotated_columns)
        turning = self.apply_rope_to_last_columns(weights, frame, block, turning, name=f"{block}.q_rope")
        return self.matmul_per_head(weights, frame, f"{block}.attn_k_b", plain, self.rank), turning

    def matmul_per_head(
        self, weights: ModelWeights, frame: StepGraphBuilder, name: str, x: Value, features: int
    ) -> Value:
        """Multiply each head of ``x`` f32[B, T, heads, n] by its own matrix: f32[B, T, heads, features]."""
        rows, size = frame.step.padded_token_count, x.shape[-1]
        x = ops.permute(ops.reshape(x, shape=(rows, self.heads, size)), axes=(1, 0, 2))
        # A single head has a matrix without the head axis.
        shape = (self.heads, features, size)[self.heads == 1 :]
        matrix = weights(f"{name}.weight", shape)
        matrix = ops.reshape(matrix, shape=(1, *shape)) if self.heads == 1 else matrix
        y = ops.mul_mat(matrix, x, name=name)
        return frame.rows_to_sequences(ops.permute(y, axes=(1, 0, 2)), self.heads, features)

    def cache_and_attend_expanded(
        self, weights: ModelWeights, frame: StepGraphBuilder, layer: int, q: Value, c: Value, pe: Value | None
    ) -> Value:
        """Expand the latent vectors to keys and values of all heads, cache these, and attend to them.

        Args:
            weights: The weights of the model.
            frame: The builder of the graph.
            layer: Number of the layer.
            q: The queries, f32[B*T, heads * size].
            c: The latent vectors, f32[B*T, rank].
            pe: The rotated key columns f32[B, T, 1, columns], or `None`.

        Returns:
            The attention results, f32[B, T, heads, value size].
        """
        block = f"blk.{layer}"
        q = frame.rows_to_sequences(q, self.heads, self.unrotated_columns + self.rotated_columns)
        q = self.apply_rope_to_last_columns(weights, frame, block, q, name=f"{block}.q_rope")
        both = matmul(weights, f"{block}.attn_kv_b", c, self.heads * (self.unrotated_columns + self.value_size))
        k, v = split_columns(
            frame.rows_to_sequences(both, self.heads, self.unrotated_columns + self.value_size),
            self.unrotated_columns,
            self.value_size,
        )
        if pe is not None:
            k = ops.concat(k, ops.repeat(pe, shape=(*pe.shape[:2], self.heads, self.rotated_columns)), axis=-1)
        return self.attend(weights, frame, block, q, *frame.write_and_read_kv(layer, k, v, self.attention_window))

    def attend(self, weights: ModelWeights, frame: StepGraphBuilder, block: str, q: Value, k: Value, v: Value) -> Value:
        q = frame.scale_queries_by_temperature(q, self.temperature)
        sinks = weights.optional_leaf(f"{block}.attn_sinks.weight", (self.heads,))
        return ops.attention(
            q, k, v, frame.attention_mask(self.attention_window), sinks, scale=self.scale, name=f"{block}.attn"
        )

    def gate_and_project_output(
        self, weights: ModelWeights, frame: StepGraphBuilder, block: str, x: Value, y: Value
    ) -> Value:
        """Apply the output projection to the head results ``y``, after a gate from ``x`` if the file has one.

        The result is f32[B*T, E].
        """
        y = apply_attention_output_gate_if_present(weights, frame, block, x, y)
        return linear(weights, f"{block}.attn_output", frame.sequences_to_rows(y), x.shape[-1])


def _compute_yarn_score_factor(keys: ArchitectureMetadata, family: FamilyTraits, rope: Rope | None) -> float:
    """Return the factor of attention scores that YaRN adds, which is the square of its factor of queries and keys.

    The result is 1 without RoPE.
    """
    if rope is None or rope.freq_scale == 1.0:
        return 1.0 if rope is None else rope.attn_factor**2
    stretch = math.log(1.0 / rope.freq_scale)
    multiplier = (keys.read_positive_zero_as_none("rope.scaling.yarn_log_multiplier") or 0.0) * family.log_multiplier
    return (rope.attn_factor * (1.0 + 0.1 * stretch) * (1.0 + 0.1 * multiplier * stretch)) ** 2
