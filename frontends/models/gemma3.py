"""Gemma 3: norms on both sides of mixer and feed-forward, GeGLU, and attention that mostly sees a window of tokens.

Gemma team, Gemma 3 technical report, 2025; graph: llama.cpp ``gemma3.cpp``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ... import ops
from ...graph import Graph, Value
from ..gguf import Gguf
from . import blocks
from .blocks import linear, norm, queries_keys_values
from .decoder import decoder
from .frame import Frame
from .keys import Keys
from .rope import Rope, attention_scale
from .step import Step
from .weights import Weights

PERIOD = 6
"""Every so many layers one sees all tokens, unless ``attention.sliding_window_pattern`` says otherwise."""
LAYERS_OF_27B = 62
"""The model of so many layers scales its scores by the width of a head's share, not by the head size."""


@dataclass(frozen=True, slots=True)
class Hyper:
    """Hyperparameters of a Gemma 3, from ``gemma3.*``; by layer, how it rotates and how many tokens it sees back (0:
    all)."""

    context_length: int
    vocabulary_size: int
    width: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_size: int
    eps: float
    scale: float
    softcap: float
    ropes: tuple[Rope, ...]
    windows: tuple[int, ...]
    taps: int = 0

    @property
    def layers(self) -> int:
        return len(self.windows)

    @classmethod
    def from_gguf(cls, gguf: Gguf) -> Hyper:
        """ModelError for a missing or absurd value."""
        keys = Keys(gguf, "gemma3")
        layers, width = keys.blocks(), keys.count("embedding_length")
        heads = keys.same("attention.head_count", layers)
        head_size = keys.head_size(width, heads)
        windows = _windows(keys, layers)
        rope = Rope.from_keys(keys, "neox", head_size)
        local = Rope(rope.n_dims, rope.mode, Rope.base_from(keys, "rope.freq_base_swa"))
        return cls(
            context_length=keys.count("context_length"),
            vocabulary_size=keys.vocabulary(),
            width=width,
            feed_forward=keys.same("feed_forward_length", layers),
            heads=heads,
            kv_heads=keys.shared_heads(heads, layers),
            head_size=head_size,
            eps=keys.positive("attention.layer_norm_rms_epsilon"),
            scale=attention_scale(keys, width // heads if layers == LAYERS_OF_27B else head_size),
            softcap=keys.optional("final_logit_softcapping") or 0.0,
            ropes=tuple(local if window else rope for window in windows),
            windows=windows,
        )


def _windows(keys: Keys, layers: int) -> tuple[int, ...]:
    """How many tokens each layer sees, its own included; 0 for all."""
    window = keys.count("attention.sliding_window", 0, least=0)
    period = keys.count("attention.sliding_window_pattern", PERIOD)
    return tuple(window if (i + 1) % period else 0 for i in range(layers))


def build(hyper: Hyper, weights: Weights, step: Step) -> Graph:
    """The graph of one step: output ``logits`` f32[outputs, vocabulary], states ``cache_k.N`` and ``cache_v.N``."""
    frame = Frame(step)

    def mix(layer: int, x: Value) -> Value:
        y = attention(hyper, weights, frame, layer, x)
        return norm(weights, f"blk.{layer}.post_attention_norm", y, hyper.eps)

    def feed(layer: int, x: Value) -> Value:
        y = blocks.feed_forward(weights, f"blk.{layer}", x, hyper.feed_forward, unit=ops.geglu)
        return norm(weights, f"blk.{layer}.post_ffw_norm", y, hyper.eps)

    return decoder(hyper, weights, frame, mix, feed, embedding_scale=math.sqrt(hyper.width), softcap=hyper.softcap)


def attention(hyper: Hyper, weights: Weights, frame: Frame, layer: int, x: Value) -> Value:
    """Causal attention over the cells in the layer's window, f32[B*T, E] to f32[B*T, E]."""
    block, size, rope = f"blk.{layer}", hyper.head_size, hyper.ropes[layer]
    q, k, v = queries_keys_values(weights, frame, block, x, (hyper.heads, size), (hyper.kv_heads, size))
    q = norm(weights, f"{block}.attn_q_norm", q, hyper.eps)
    k = norm(weights, f"{block}.attn_k_norm", k, hyper.eps)
    q = rope.rotate(q, frame.pos, name=f"{block}.q_rope")
    k = rope.rotate(k, frame.pos, name=f"{block}.k_rope")
    k, v = frame.cached(f"cache_k.{layer}", k), frame.cached(f"cache_v.{layer}", v)
    mixed = ops.attention(q, k, v, frame.mask(hyper.windows[layer]), scale=hyper.scale, name=f"{block}.attn")
    return linear(weights, f"{block}.attn_output", frame.rows(mixed), hyper.width)
