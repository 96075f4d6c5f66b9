"""Qwen3-Next: the layers of Qwen3.5 MoE, whose delta nets keep the value heads of a key head together.

Graph: llama.cpp ``qwen3next.cpp``.
"""

from __future__ import annotations

from ... import ops
from ...graph import Graph, Value
from ..gguf import Gguf
from .blocks import linear
from .delta import Projected, delta_rule
from .frame import Frame
from .keys import Keys
from .moe import Experts
from .qwen35 import Hyper, hybrid
from .step import Step
from .weights import Weights


def read(gguf: Gguf) -> Hyper:
    """Hyperparameters from ``qwen3next.*``; ModelError for a missing or absurd value."""
    keys = Keys(gguf, "qwen3next")
    features, shared = keys.count("expert_feed_forward_length"), keys.count("expert_shared_feed_forward_length")
    return Hyper.from_keys(keys, Experts.from_keys(keys, features, shared))


def build(hyper: Hyper, weights: Weights, step: Step) -> Graph:
    """The graph of one step, with outputs and states as `qwen35.build` has them."""
    return hybrid(hyper, weights, step, delta_net)


def delta_net(hyper: Hyper, weights: Weights, frame: Frame, layer: int, x: Value) -> Value:
    """The recurrent layers, f32[B*T, E] to f32[B*T, E]."""
    parts = projected(hyper, weights, frame, f"blk.{layer}", x)
    o = delta_rule(hyper.delta, weights, frame, layer, parts, heads="interleaved", eps=hyper.eps)
    return linear(weights, f"blk.{layer}.ssm_out", o, hyper.width)


def projected(hyper: Hyper, weights: Weights, frame: Frame, block: str, x: Value) -> Projected:
    """Rates, and in early files q, k, v and z too, come as one matrix, in which the rows of a key head lie together."""
    net = hyper.delta
    rows, repeat = x.shape[0], net.value_heads // net.key_heads

    def by_key_head(name: str, *widths: int) -> list[Value]:
        """Parts of so many columns a key head, each of all key heads side by side: f32[B*T, key_heads * width]."""
        both = linear(weights, f"{block}.{name}", x, net.key_heads * sum(widths))
        both = ops.reshape(both, shape=(rows, net.key_heads, sum(widths)))
        ends = [sum(widths[: i + 1]) for i in range(len(widths))]
        parts = (ops.slice_(both, axis=-1, start=end - n, stop=end) for end, n in zip(ends, widths, strict=True))
        return [ops.reshape(part, shape=(rows, part.spec.size // rows)) for part in parts]

    beta, alpha = by_key_head("ssm_ba", repeat, repeat)
    size, early = net.head_size, net.channels + net.values_width
    if weights.optional(f"{block}.ssm_in.weight", (early, hyper.width)) is None:
        qkv = linear(weights, f"{block}.attn_qkv", x, net.channels)
        z = linear(weights, f"{block}.attn_gate", x, net.values_width)
    else:
        q, k, v, z = by_key_head("ssm_in", size, size, repeat * size, repeat * size)
        qkv = ops.concat(ops.concat(q, k, axis=-1), v, axis=-1)
    return Projected(qkv, z, alpha, beta)
