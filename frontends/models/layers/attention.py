"""Attention over a KV cache, in all variants that differ only by hyperparameters and by the tensors of the file.

Vaswani et al., 2017. Groups of query heads share a key/value head (Ainslie et al., GQA, 2023). Shapes use B for
sequences, T for new tokens per sequence, and E for the model width.
"""

from __future__ import annotations

from functools import partial

from .... import ops
from ....graph import Value
from ....graph.lazy_dataclass import dataclass
from ...errors import ModelError
from ...gguf.hyperparameter_keys import CONVERT_REMEDY
from ..inputs.attention_window import AttentionWindow, TemperatureScaling
from ..inputs.family import FamilyTraits
from ..inputs.graph_builder import CACHE_INPUTS, StepGraphBuilder
from ..inputs.weights import ModelWeights
from .feed_forward import Norm, apply_attention_output_gate_if_present, linear, split_columns
from .rope import Rope, find_frequency_divisors


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention of one layer: ``heads`` queries of ``key_size``, ``kv_heads`` keys, and values of ``value_size``.

    ``head_norm`` is the norm of q and k, ``rope`` the rotary embedding (`None`: none). ``cap`` is the soft cap of
    scores; ``clamp`` limits q, k and v; 0 means neither. A layer with ``source`` reads the KV cache of that layer and
    has none of its own.
    """

    family: FamilyTraits
    norm: Norm
    head_norm: Norm
    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    scale: float
    attention_window: AttentionWindow
    rope: Rope | None = None
    factors: bool = False
    original_context: int = 0
    qk_norm: str = "maybe"
    cap: float = 0.0
    clamp: float = 0.0
    alibi: float = 0.0
    value_scale: float = 1.0
    temperature: TemperatureScaling = None
    source: int | None = None

    @property
    def taps(self) -> int:
        return 0

    @property
    def required_inputs(self) -> frozenset[str]:
        return CACHE_INPUTS if self.attention_window.is_causal else frozenset({"pos"})

    def __call__(self, weights: ModelWeights, frame: StepGraphBuilder, layer: int, x: Value) -> Value:
        """Return the attention of ``x`` f32[B*T, E]: f32[B*T, E]."""
        block, size = f"blk.{layer}", self.key_size
        q, k, v = self.project_qkv(weights, frame, block, x)
        gate = None
        if self.family.gated_queries:
            gate = ops.slice_(q, axis=-1, start=size, stop=2 * size)
            q = ops.slice_(q, axis=-1, start=0, stop=size)
        if self.family.value_norm and v is not None:
            v = self.norm.apply_without_weights(v)
        q = self.apply_qk_norm_and_rope(weights, frame, f"{block}.attn_q_norm", q, name=f"{block}.q_rope")
        if k is not None:
            k = self.apply_qk_norm_and_rope(weights, frame, f"{block}.attn_k_norm", k, name=f"{block}.k_rope")
        q = frame.scale_queries_by_temperature(q, self.temperature)
        if k is not None and v is not None:
            frame.write_and_read_kv(layer, k, v, self.attention_window)
        attend = partial(self.attend, weights, block=block)
        y = frame.attend_by_segment(attend, q, layer if self.source is None else self.source)
        if gate is not None:
            y = ops.mul(y, ops.sigmoid(gate), name=f"{block}.attn_gated")
        return self.gate_and_project_output(weights, frame, block, x, y)

    def project_qkv(
        self, weights: ModelWeights, frame: StepGraphBuilder, block: str, x: Value
    ) -> tuple[Value, Value | None, Value | None]:
        """Project ``x`` f32[B*T, E] to queries, keys and values, each f32[B, T, heads, size].

        A layer that reads the cache of another layer has queries only. The file may have one matrix for all three,
        and values may equal keys.
        """
        shapes = {
            "attn_q": (self.heads, 2 * self.key_size if self.family.gated_queries else self.key_size),
            "attn_k": (self.kv_heads, self.key_size),
            "attn_v": (self.kv_heads, self.value_size),
        }
        widths = [heads * size for heads, size in shapes.values()]
        if self.source is not None:
            return (
                frame.rows_to_sequences(linear(weights, f"{block}.attn_q", x, widths[0]), *shapes["attn_q"]),
                None,
                None,
            )
        if weights.has_used_tensor(f"{block}.attn_qkv.weight"):
            rows = self.project_fused_qkv(weights, f"{block}.attn_qkv", x, widths)
        elif self.family.value_norm and not weights.has_used_tensor(f"{block}.attn_v.weight"):
            q, k = (linear(weights, f"{block}.{name}", x, n) for name, n in zip(shapes, widths[:2], strict=False))
            rows = [q, k, k]
        else:
            rows = [linear(weights, f"{block}.{name}", x, n) for name, n in zip(shapes, widths, strict=True)]
        if self.clamp:
            rows = [ops.clamp(row, min=-self.clamp, max=self.clamp) for row in rows]
        q, k, v = (frame.rows_to_sequences(row, *shape) for row, shape in zip(rows, shapes.values(), strict=True))
        return q, k, v

    def project_fused_qkv(self, weights: ModelWeights, name: str, x: Value, widths: list[int]) -> list[Value]:
        """Multiply ``x`` by one matrix that holds q, k and v side by side, and return the three results.

        The matrix may have as many key heads as query heads. Then only the first ``kv_heads`` heads of keys and values
        are used.
        """
        rows = weights.tensor_shape(f"{name}.weight")[0]
        if rows == sum(widths) or rows != 3 * widths[0]:
            return split_columns(linear(weights, name, x, sum(widths)), *widths)
        three = split_columns(linear(weights, name, x, rows), widths[0], widths[0], widths[0])
        return [ops.slice_(y, axis=-1, start=0, stop=n) for y, n in zip(three, widths, strict=True)]

    def apply_qk_norm_and_rope(
        self, weights: ModelWeights, frame: StepGraphBuilder, norm: str, x: Value, *, name: str
    ) -> Value:
        """Apply the norm of queries or keys and RoPE to ``x``, in the order of the family.

        Args:
            weights: The weights of the model.
            frame: The builder of the graph.
            norm: The name of the norm.
            x: Queries or keys, f32[B, T, heads, size].
            name: The name of the rotated value.
        """
        before = self.qk_norm == "before" or (
            self.qk_norm == "maybe" and weights.has_used_tensor(f"{norm.replace('attn_k', 'attn_q')}.weight")
        )
        if before:
            x = self.norm_each_head_or_all_heads(weights, norm, x)
        if self.rope is not None:
            block = norm.partition(".attn")[0]
            factors = (
                find_frequency_divisors(weights, frame, self.rope, self.original_context, block)
                if self.factors
                else None
            )
            x = self.rope.rotate_by_position(x, frame.pos, factors, name=name)
        if self.qk_norm == "after":
            x = self.norm_each_head_or_all_heads(weights, norm, x)
        if self.qk_norm == "bare" or (self.qk_norm == "bare rotated" and self.rope is not None):
            x = self.norm.apply_without_weights(x)
            # A factor for each query head, if any.
            factors = weights.optional_leaf(f"{norm}.weight", (self.heads, 1))
            x = x if factors is None else ops.mul(x, factors)
        return x

    def norm_each_head_or_all_heads(self, weights: ModelWeights, name: str, x: Value) -> Value:
        """Normalise queries or keys ``x``: each head alone, or all heads of a token as one row.

        The length of the norm weight in the file tells which.
        """
        heads, size = x.shape[-2:]
        if weights.tensor_shape(f"{name}.weight") != (heads * size,) or heads == 1:
            return self.head_norm(weights, name, x)
        row = ops.reshape(x, shape=(*x.shape[:-2], heads * size))
        return ops.reshape(self.head_norm(weights, name, row), shape=x.shape)

    def attend(
        self, weights: ModelWeights, frame: StepGraphBuilder, q: Value, k: Value, v: Value, *, block: str
    ) -> Value:
        """Return the attention of queries to all cells of keys and values: f32[B, T, heads, value size]."""
        biases = self.find_relative_position_biases(weights, block)
        sinks = weights.optional_leaf(f"{block}.attn_sinks.weight", (self.heads,))
        table = frame.find_block_table(self.attention_window)
        return ops.attention(
            *(q, k, v, frame.attention_mask(self.attention_window, biases), sinks, table),
            pool="none" if table is None else "blocks",
            mask_heads="one" if biases is None else "each",
            scale=self.scale,
            softcap=self.cap or 0.0,
            max_bias=self.alibi or 0.0,
            name=f"{block}.attn",
        )

    def find_relative_position_biases(self, weights: ModelWeights, block: str) -> Value | None:
        """Find the relative position biases of the heads, f32[buckets, heads]; return `None` if the file has none.

        A bucket is a range of distances between two tokens. A file may have the tensor in block 0 only.
        """
        own, first = (f"{name}.attn_rel_b.weight" for name in (block, "blk.0"))
        name = own if weights.has_used_tensor(own) else first
        if not weights.has_used_tensor(name):
            return None
        buckets = weights.tensor_shape(name)[0]
        if not 4 <= buckets < 512:
            raise ModelError(
                f"{weights.gguf.path}: tensor {name} has {buckets} buckets; need 4 to 511; {CONVERT_REMEDY}"
            )
        return weights(name, (buckets, self.heads))

    def gate_and_project_output(
        self, weights: ModelWeights, frame: StepGraphBuilder, block: str, x: Value, y: Value
    ) -> Value:
        """Apply the output projection to the head results ``y``, after a gate from ``x`` if the file has one.

        The result is f32[B*T, E].
        """
        y = apply_attention_output_gate_if_present(weights, frame, block, x, y, self.family.gate)
        y = frame.sequences_to_rows(y)
        if weights.has_used_tensor(f"{block}.attn_sub_norm.weight"):
            y = self.norm(weights, f"{block}.attn_sub_norm", y)
        y = linear(weights, f"{block}.attn_output", y, x.shape[-1])
        return y if self.value_scale == 1.0 else ops.scale(y, scale=self.value_scale)


@dataclass(frozen=True, slots=True)
class MatrixInsteadOfAttention:
    """A layer that applies one matrix in place of attention: each token is computed alone, f32[n, E] to f32[n, E]."""

    taps: int = 0
    required_inputs: frozenset[str] = frozenset()

    def __call__(self, weights: ModelWeights, frame: StepGraphBuilder, layer: int, x: Value) -> Value:
        return linear(weights, f"blk.{layer}.attn_output", x, x.shape[-1])
