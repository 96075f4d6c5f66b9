"""Building blocks of all model families: norms, linear layers, gates, activations and the feed-forward network (FFN).

Each function adds ops to a graph and returns the result. Shapes use n for rows (tokens), and E for the model width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from .... import ops
from ....graph import DType, Value
from ....graph.lazy_dataclass import dataclass
from ..inputs.graph_builder import StepGraphBuilder
from ..inputs.weights import ModelWeights

GATE_CUTOFF = 1.6448533535003662
"""Standard deviations above the mean of a normal distribution beyond which 5 % of it lie."""


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm over the last axis: RMS norm, or layer norm if ``is_centred``."""

    eps: float
    is_centred: bool = False
    has_no_weights: bool = False

    def __call__(self, weights: ModelWeights, name: str, x: Value) -> Value:
        """Return ``x`` after the norm, times the weight ``name`` and plus its bias if there is one; the shape is kept.

        The weight has the shape of the last axis or of several last axes.
        """
        if self.has_no_weights:
            return self.apply_without_weights(x, name=name)
        tensor = f"{name}.weight"
        axes = len(weights.tensor_shape(tensor))
        y = ops.mul(self.apply_without_weights(x), weights(tensor, x.shape[-axes:]), name=name)
        bias = weights.optional_leaf(f"{name}.bias", x.shape[-axes:])
        return y if bias is None else ops.add(y, bias)

    def apply_without_weights(self, x: Value, name: str = "") -> Value:
        """Return ``x`` after the norm, without multiplying by a weight or adding a bias."""
        return ops.norm(x, eps=self.eps, name=name) if self.is_centred else ops.rms_norm(x, eps=self.eps, name=name)


def linear(weights: ModelWeights, name: str, x: Value, features: int, *, bias_first: bool = False) -> Value:
    """Apply a linear layer: return ``x`` f32[n, k] times a weight matrix, f32[n, features].

    The file may have a scale and a bias for the layer, which are then applied too.

    Args:
        weights: The weights of the model.
        name: The name of the matrix [features, k] without ``.weight``.
        x: The operand.
        features: Columns of the result.
        bias_first: Add the bias before the scale, as FFNs do.
    """
    y = ops.mul_mat(weights(f"{name}.weight", (features, x.shape[-1])), x, name=name)
    scale, bias = weights.optional_leaf(f"{name}.scale", (1,)), weights.optional_leaf(f"{name}.bias", (features,))
    if bias is not None and bias_first:
        y = ops.add(y, bias)
    if scale is not None:
        y = ops.mul(y, scale)
    return y if bias is None or bias_first else ops.add(y, bias)


def matmul(weights: ModelWeights, name: str, x: Value, features: int) -> Value:
    """Return ``x`` f32[n, k] times the weight matrix ``name``, without scale or bias: f32[n, features].

    A matrix of one row may be a vector in the file.
    """
    shape = weights.tensor_shape(f"{name}.weight")
    matrix = weights(f"{name}.weight", shape if len(shape) == 1 else (features, x.shape[-1]))
    if len(shape) == 1:
        matrix = ops.reshape(matrix, shape=(features, x.shape[-1]))
    return ops.mul_mat(matrix, x, name=name)


def apply_attention_output_gate_if_present(
    weights: ModelWeights,
    frame: StepGraphBuilder,
    block: str,
    layer_input: Value,
    attention_output: Value,
    gate: str = "sigmoid",
) -> Value:
    """Multiply the attention output by a gate that is computed from the layer input, if the file has such a gate.

    Args:
        weights: The weights of the model.
        frame: The builder of the graph.
        block: The prefix of weight names.
        layer_input: The input of the layer, f32[B*T, E].
        attention_output: The results of the heads, f32[B, T, heads, size]; returned unchanged without a gate.
        gate: The function of the gate, a key of `OUTPUT_GATES`.
    """
    name, heads = f"{block}.attn_gate", attention_output.shape[2]
    if not weights.has_used_tensor(f"{name}.weight"):
        return attention_output
    shape = weights.tensor_shape(f"{name}.weight")
    each = shape[0] // heads if len(shape) > 1 else 1
    opening = OUTPUT_GATES[gate](matmul(weights, name, layer_input, heads * each))
    return ops.mul(attention_output, frame.rows_to_sequences(opening, heads, each), name=f"{block}.attn_gated")


def split_columns(x: Value, *widths: int) -> list[Value]:
    """Split the last axis of ``x`` into slices of the given widths, from left to right."""
    ends = [sum(widths[: i + 1]) for i in range(len(widths))]
    return [ops.slice_(x, axis=-1, start=end - n, stop=end) for end, n in zip(ends, widths, strict=True)]


def round_to_half(x: Value) -> Value:
    """Return the float32 array ``x`` with its numbers rounded to half precision (f16)."""
    return ops.cast(ops.cast(x, dtype=DType.F16), dtype=DType.F32)


def gelu_in_half(x: Value, name: str = "") -> Value:
    """Return the GELU of ``x`` with operand and result rounded to half precision.

    llama.cpp reads GELU from a table over all f16 numbers. The rounding shows in the logits of families without a
    gate in the FFN.
    """
    return round_to_half(ops.gelu(round_to_half(x), name=name))


def geglu_in_half(gate: Value, up: Value, name: str = "") -> Value:
    return ops.mul(gelu_in_half(gate), up, name=name)


def squared_relu(x: Value, name: str = "") -> Value:
    return ops.sqr(ops.relu(x), name=name)


def soft_cap(x: Value, cap: float) -> Value:
    """Return ``cap * tanh(x / cap)``, which limits ``x`` smoothly to the range from ``-cap`` to ``cap``."""
    return ops.scale(ops.tanh(ops.scale(x, scale=1.0 / cap)), scale=cap)


def subtract_gate_threshold_and_clamp(x: Value, deviations: float) -> Value:
    """Keep only the largest gate values of each row of ``x`` f32[n, k]: subtract a threshold, then set negatives to 0.

    The threshold of a row is its mean plus ``deviations`` standard deviations. Gemma team, Gemma 3n, 2025; graph:
    llama.cpp ``gemma3n.cpp``.
    """
    columns = x.shape[-1]
    centred = ops.sub(x, ops.scale(ops.sum_rows(x), scale=1.0 / columns))
    variance = ops.scale(ops.sum_rows(ops.sqr(centred)), scale=1.0 / max(columns - 1, 1))
    return ops.relu(ops.sub(centred, ops.scale(ops.sqrt(variance), scale=deviations)))


PLAIN_ACTIVATIONS: Mapping[str, Callable[..., Value]] = MappingProxyType(
    {
        "silu": ops.silu,
        "gelu": gelu_in_half,
        "gelu erf": ops.gelu_erf,
        "gelu tanh": ops.gelu,
        "gelu or relu": ops.relu,
        "half gelu": gelu_in_half,
        "relu": ops.relu,
        "relu2": squared_relu,
    }
)
"""Activations of an FFN without a gate."""
GATED_ACTIVATIONS: Mapping[str, Callable[..., Value]] = MappingProxyType(
    {
        "silu": ops.swiglu,
        "gelu": ops.geglu,
        "gelu erf": ops.geglu_erf,
        "gelu tanh": ops.geglu,
        "gelu or relu": ops.geglu,
        "half gelu": geglu_in_half,
        "oai": ops.swiglu_oai,
        "relu": ops.reglu,
    }
)
"""Functions of gate and up of a gated FFN."""
OUTPUT_GATES: Mapping[str, Callable[..., Value]] = MappingProxyType(
    {"sigmoid": ops.sigmoid, "silu": ops.silu, "softplus": ops.softplus}
)
"""Functions of the output gates of attention and delta nets."""


@dataclass(frozen=True, slots=True)
class Activation:
    """The activation function of an FFN: ``silu`` or another key of the tables above.

    - ``limit``, if not 0, clamps both factors of SiLU or ``oai``; with ``first`` it clamps the gate before SiLU.
    - ``gate_cutoff``, if not 0, applies `subtract_gate_threshold_and_clamp` before the activation.
    - ``xielu`` holds the attributes of `ops.xielu`.
    - The kind ``situ`` is ``beta tanh(gate / beta) sigmoid(gate) * linear tanh(up / linear)``. The second factor is
      ``up`` if ``linear`` is 0 (Kimi K3).
    """

    kind: str = "silu"
    limit: float = 0.0
    first: bool = False
    beta: float = 1.0
    linear: float = 0.0
    gate_cutoff: float = 0.0
    xielu: tuple[float, ...] = ()

    def apply(self, x: Value, name: str = "") -> Value:
        if self.kind == "xielu":
            alpha_n, alpha_p, beta, eps = self.xielu
            return ops.xielu(x, alpha_n=alpha_n, alpha_p=alpha_p, beta=beta, eps=eps, name=name)
        return PLAIN_ACTIVATIONS[self.kind](x, name=name)

    def apply_gated(self, gate: Value, up: Value, name: str) -> Value:
        gate = subtract_gate_threshold_and_clamp(gate, self.gate_cutoff) if self.gate_cutoff else gate
        if self.kind == "situ":
            activated_gate = ops.mul(soft_cap(gate, self.beta), ops.sigmoid(gate))
            return ops.mul(activated_gate, soft_cap(up, self.linear) if self.linear else up, name=name)
        if self.limit and self.kind == "oai":
            return ops.swiglu_oai(gate, up, limit=self.limit, name=name)
        if not self.limit or self.kind != "silu":
            return GATED_ACTIVATIONS[self.kind](gate, up, name=name)
        if self.first:
            return ops.swiglu_clamp(gate, up, limit=self.limit, name=name)
        bounded = ops.clamp(ops.silu(gate), min=-3.0e38, max=self.limit)
        return ops.mul(bounded, ops.clamp(up, min=-self.limit, max=self.limit), name=name)

    def apply_to_fused_gate_up(self, both: Value, name: str) -> Value:
        """Apply the gated activation to a tensor that holds gate and up side by side: f32[..., 2n] to f32[..., n]."""
        if not self.limit and not self.gate_cutoff and (kind := getattr(GATED_ACTIVATIONS.get(self.kind), "name", "")):
            return ops.glu(both, kind=kind, name=name)
        gate, up = split_columns(both, both.shape[-1] // 2, both.shape[-1] // 2)
        return self.apply_gated(gate, up, name)


def apply_feed_forward(
    weights: ModelWeights, block: str, x: Value, unit: Activation, norm: Norm, suffix: str = ""
) -> Value:
    """Apply a feed-forward network (FFN) to ``x``: f32[n, E] to f32[n, E].

    The tensors in the file decide its form: gate and up as two matrices, both in one matrix with twice the columns of
    down, or up alone. Shazeer, GLU variants, 2020.

    Args:
        weights: The weights of the model.
        block: The prefix of weight names.
        x: The operand.
        unit: The activation.
        norm: The norm before the down matrix, if the file has its weight.
        suffix: The end of weight names, which distinguishes several FFNs of a block.
    """
    width = x.shape[-1]
    down, name = f"{block}.ffn_down{suffix}", f"{block}.ffn_glu{suffix}"
    features = weights.tensor_shape(f"{down}.weight")[-1]
    if weights.has_used_tensor(f"{block}.ffn_gate{suffix}.weight"):
        gate = linear(weights, f"{block}.ffn_gate{suffix}", x, features, bias_first=True)
        up = linear(weights, f"{block}.ffn_up{suffix}", x, features, bias_first=True)
        inner = unit.apply_gated(gate, up, name)
    elif weights.tensor_shape(f"{block}.ffn_up{suffix}.weight")[0] == 2 * features:
        both = linear(weights, f"{block}.ffn_up{suffix}", x, 2 * features, bias_first=True)
        inner = unit.apply_to_fused_gate_up(both, name)
    else:
        inner = unit.apply(linear(weights, f"{block}.ffn_up{suffix}", x, features, bias_first=True), name)
        divisors = weights.optional_leaf(f"{block}.ffn.act.scales", (features,))
        inner = inner if divisors is None else ops.div(inner, divisors)
    if weights.has_used_tensor(f"{block}.ffn_sub_norm{suffix}.weight"):
        inner = norm(weights, f"{block}.ffn_sub_norm{suffix}", inner)
    return linear(weights, down, inner, width, bias_first=True)


def soft_cap_logits(x: Value, cap: float) -> Value:
    """Return the logits ``x`` limited smoothly to the range from ``-cap`` to ``cap``: ``cap * tanh(x / cap)``."""
    return ops.scale(ops.tanh(ops.scale(x, scale=1.0 / cap)), scale=cap, name="logits_capped")
