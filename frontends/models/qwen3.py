"""Qwen3: LLaMA's blocks with an RMSNorm on each query and key head.

Yang et al., Qwen3 technical report, 2025; graph: llama.cpp ``qwen3.cpp``.
"""

from __future__ import annotations

from dataclasses import dataclass

from ... import ops
from ...graph import Graph, Value
from ..gguf import Gguf
from .blocks import linear, norm, queries_keys_values
from .decoder import decoder
from .frame import Frame
from .keys import Keys
from .moe import Experts
from .rope import Rope, attention_scale
from .step import Step
from .weights import Weights


@dataclass(frozen=True, slots=True)
class Hyper:
    """Hyperparameters of a Qwen3, from ``qwen3.*``.  Heads times head size need not be the width."""

    context_length: int
    vocabulary_size: int
    layers: int
    width: int
    feed_forward: int | Experts
    heads: int
    kv_heads: int
    head_size: int
    eps: float
    scale: float
    rope: Rope
    taps: int = 0

    @classmethod
    def from_gguf(cls, gguf: Gguf) -> Hyper:
        """ModelError for a missing or absurd value."""
        keys = Keys(gguf, "qwen3")
        return cls.from_keys(keys, keys.same("feed_forward_length", keys.blocks()))

    @classmethod
    def from_keys(cls, keys: Keys, feed_forward: int | Experts) -> Hyper:
        """The same for a family that differs in its feed-forward alone."""
        layers, width = keys.blocks(), keys.count("embedding_length")
        heads = keys.same("attention.head_count", layers)
        head_size = keys.head_size(width, heads)
        return cls(
            context_length=keys.count("context_length"),
            vocabulary_size=keys.vocabulary(),
            layers=layers,
            width=width,
            feed_forward=feed_forward,
            heads=heads,
            kv_heads=keys.shared_heads(heads, layers),
            head_size=head_size,
            eps=keys.positive("attention.layer_norm_rms_epsilon"),
            scale=attention_scale(keys, head_size),
            rope=Rope.from_keys(keys, "neox", head_size),
        )


def build(hyper: Hyper, weights: Weights, step: Step) -> Graph:
    """The graph of one step: output ``logits`` f32[outputs, vocabulary], states ``cache_k.N`` and ``cache_v.N``."""
    frame = Frame(step)
    return decoder(hyper, weights, frame, lambda layer, x: attention(hyper, weights, frame, layer, x))


def attention(hyper: Hyper, weights: Weights, frame: Frame, layer: int, x: Value) -> Value:
    """Causal attention over the cache, f32[B*T, E] to f32[B*T, E]; heads are normalised before they are rotated."""
    block, size = f"blk.{layer}", hyper.head_size
    q, k, v = queries_keys_values(weights, frame, block, x, (hyper.heads, size), (hyper.kv_heads, size))
    q = norm(weights, f"{block}.attn_q_norm", q, hyper.eps)
    k = norm(weights, f"{block}.attn_k_norm", k, hyper.eps)
    q = hyper.rope.rotate(q, frame.pos, name=f"{block}.q_rope")
    k = hyper.rope.rotate(k, frame.pos, name=f"{block}.k_rope")
    k, v = frame.cached(f"cache_k.{layer}", k), frame.cached(f"cache_v.{layer}", v)
    mixed = ops.attention(q, k, v, frame.mask(), scale=hyper.scale, name=f"{block}.attn")
    return linear(weights, f"{block}.attn_output", frame.rows(mixed), hyper.width)
