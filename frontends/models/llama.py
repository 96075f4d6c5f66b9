"""LLaMA: RMSNorm, rotary attention with grouped heads, SwiGLU.  Touvron et al., 2023; graph: llama.cpp ``llama.cpp``.

Covers what shares the architecture string: Llama 1 to 3, Mistral, SmolLM2 and others; Mixtral, where experts take the
place of the feed-forward (Jiang et al., Mixtral of experts, 2024).
"""

from __future__ import annotations

from dataclasses import dataclass

from ... import ops
from ...graph import Graph, Value
from ..gguf import Gguf
from .blocks import linear, queries_keys_values
from .decoder import decoder
from .frame import Frame
from .keys import Keys
from .moe import Experts
from .rope import Rope, attention_scale
from .step import Step
from .weights import Weights


@dataclass(frozen=True, slots=True)
class Hyper:
    """Hyperparameters of a LLaMA, from ``llama.*``."""

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
        return cls.from_keys(Keys(gguf, "llama"), "normal")

    @classmethod
    def from_keys(cls, keys: Keys, mode: str) -> Hyper:
        """The same for a family that differs in its pairs of rotated columns alone."""
        layers, width = keys.blocks(), keys.count("embedding_length")
        features = keys.same("feed_forward_length", layers)
        has_experts = keys.count("expert_count", 0, least=0) > 0
        heads = keys.same("attention.head_count", layers)
        head_size = keys.head_size(width, heads)
        rope = Rope.from_keys(keys, mode, head_size)
        if rope.n_dims != head_size:
            raise keys.error("rope.dimension_count", f"is {rope.n_dims}; need the head size {head_size}")
        return cls(
            context_length=keys.count("context_length"),
            vocabulary_size=keys.vocabulary(),
            layers=layers,
            width=width,
            feed_forward=Experts.from_keys(keys, features) if has_experts else features,
            heads=heads,
            kv_heads=keys.shared_heads(heads, layers),
            head_size=head_size,
            eps=keys.positive("attention.layer_norm_rms_epsilon"),
            scale=attention_scale(keys, head_size),
            rope=rope,
        )


def build(hyper: Hyper, weights: Weights, step: Step) -> Graph:
    """The graph of one step: output ``logits`` f32[outputs, vocabulary], states ``cache_k.N`` and ``cache_v.N``."""
    frame = Frame(step)
    return decoder(hyper, weights, frame, lambda layer, x: attention(hyper, weights, frame, layer, x))


def attention(hyper: Hyper, weights: Weights, frame: Frame, layer: int, x: Value) -> Value:
    """Causal attention over the cache, f32[B*T, E] to f32[B*T, E]; key/value heads serve groups of query heads."""
    block, size = f"blk.{layer}", hyper.head_size
    q, k, v = queries_keys_values(weights, frame, block, x, (hyper.heads, size), (hyper.kv_heads, size))
    # Llama 3.1 divides the speed of each pair by a number of its own.
    factors = weights.optional("rope_freqs.weight", (size // 2,))
    q = hyper.rope.rotate(q, frame.pos, factors, name=f"{block}.q_rope")
    k = hyper.rope.rotate(k, frame.pos, factors, name=f"{block}.k_rope")
    k, v = frame.cached(f"cache_k.{layer}", k), frame.cached(f"cache_v.{layer}", v)
    mixed = ops.attention(q, k, v, frame.mask(), scale=hyper.scale, name=f"{block}.attn")
    return linear(weights, f"{block}.attn_output", frame.rows(mixed), hyper.width)
