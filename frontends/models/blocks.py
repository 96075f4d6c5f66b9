"""What all families have in common: embedding, normalised and linear layers, the gated feed-forward, the output."""

from __future__ import annotations

from itertools import accumulate

from ... import ops
from ...graph import Value
from ...ops.op import Op
from .frame import Frame
from .weights import Weights


def embed(weights: Weights, tokens: Value, vocabulary: int, width: int) -> Value:
    """Rows of the token embedding: i32[n] to f32[n, width]."""
    return ops.get_rows(weights("token_embd.weight", (vocabulary, width)), tokens, name="embed")


def norm(weights: Weights, name: str, x: Value, eps: float) -> Value:
    """RMSNorm over the last axis times the weight ``name``; same shape as ``x``."""
    return ops.mul(ops.rms_norm(x, eps=eps), weights(f"{name}.weight", x.shape[-1:]), name=name)


def linear(weights: Weights, name: str, x: Value, features: int) -> Value:
    """``x`` f32[n, k] times the matrix ``name`` [features, k], plus its bias if the file has one: f32[n, features]."""
    y = ops.mul_mat(weights(f"{name}.weight", (features, x.shape[-1])), x, name=name)
    bias = weights.optional(f"{name}.bias", (features,))
    return y if bias is None else ops.add(y, bias)


def queries_keys_values(
    weights: Weights, frame: Frame, block: str, x: Value, queries: tuple[int, int], keys: tuple[int, int]
) -> list[Value]:
    """q, k and v f32[B,T,heads,size] of ``x`` f32[B*T, E]; ``queries`` is (heads, size), ``keys`` that of k and v.

    Their matrices, and biases if there are any, may be one tensor: rows of q first, then of k, then of v.
    """
    shapes = {"attn_q": queries, "attn_k": keys, "attn_v": keys}
    widths = [heads * size for heads, size in shapes.values()]
    ends = list(accumulate(widths))
    if weights.optional(f"{block}.attn_qkv.weight", (ends[-1], x.shape[-1])) is None:
        parts = [linear(weights, f"{block}.{name}", x, n) for name, n in zip(shapes, widths, strict=True)]
    else:
        whole = linear(weights, f"{block}.attn_qkv", x, ends[-1])
        parts = [ops.slice_(whole, axis=-1, start=end - n, stop=end) for end, n in zip(ends, widths, strict=True)]
    return [frame.split(part, *shape) for part, shape in zip(parts, shapes.values(), strict=True)]


def feed_forward(
    weights: Weights, block: str, x: Value, features: int, suffix: str = "", *, unit: Op[Value] = ops.swiglu
) -> Value:
    """A gated linear unit between two widths: f32[n, E] to f32[n, E]; ``suffix`` tells such layers of a block apart.

    Shazeer, GLU variants, 2020.
    """
    gate = linear(weights, f"{block}.ffn_gate{suffix}", x, features)
    up = linear(weights, f"{block}.ffn_up{suffix}", x, features)
    inner = unit(gate, up, name=f"{block}.ffn_glu{suffix}")
    return linear(weights, f"{block}.ffn_down{suffix}", inner, x.shape[-1])


def logits(weights: Weights, x: Value, vocabulary: int, eps: float) -> Value:
    """Final norm and output matrix, which is the token embedding where the file has none: f32[n, vocabulary]."""
    x = norm(weights, "output_norm", x, eps)
    shape = (vocabulary, x.shape[-1])
    matrix = weights.optional("output.weight", shape)
    if matrix is None:
        matrix = weights("token_embd.weight", shape)
    y = ops.mul_mat(matrix, x, name="logits")
    bias = weights.optional("output.bias", (vocabulary,))
    return y if bias is None else ops.add(y, bias)
