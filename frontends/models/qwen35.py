"""Qwen3.5: most layers a gated delta net, every few one gated attention.

Gated attention: Qiu et al., 2025; graph: llama.cpp ``qwen35.cpp``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ... import ops
from ...graph import Graph, Value
from ..gguf import Gguf
from .blocks import linear, norm, queries_keys_values
from .decoder import decoder
from .delta import DeltaNet, Projected, delta_rule
from .frame import Frame
from .keys import Keys
from .moe import Experts
from .rope import Rope, attention_scale
from .step import Step
from .weights import Weights


@dataclass(frozen=True, slots=True)
class Hyper:
    """Hyperparameters of a Qwen3.5, from ``qwen35.*``; ``recurrent`` says of each layer that is run what it is."""

    context_length: int
    vocabulary_size: int
    width: int
    feed_forward: int | Experts
    recurrent: tuple[bool, ...]
    delta: DeltaNet
    heads: int
    kv_heads: int
    head_size: int
    eps: float
    scale: float
    rope: Rope

    @property
    def layers(self) -> int:
        return len(self.recurrent)

    @property
    def taps(self) -> int:
        """Taps of the convolutions, which `step_inputs` asks for; 0 if there are none."""
        return self.delta.taps if any(self.recurrent) else 0

    @classmethod
    def from_gguf(cls, gguf: Gguf) -> Hyper:
        """ModelError for a missing or absurd value."""
        keys = Keys(gguf, "qwen35")
        return cls.from_keys(keys, keys.same("feed_forward_length", keys.blocks()))

    @classmethod
    def from_keys(cls, keys: Keys, feed_forward: int | Experts) -> Hyper:
        """The same for a family that differs in its feed-forward alone."""
        blocks, width = keys.blocks(), keys.count("embedding_length")
        recurrent = _recurrent(keys, blocks)
        attending = [i for i, is_recurrent in enumerate(recurrent) if not is_recurrent]
        heads = keys.same("attention.head_count", blocks, layers=attending)
        head_size = keys.head_size(width, heads)
        return cls(
            context_length=keys.count("context_length"),
            vocabulary_size=keys.vocabulary(),
            width=width,
            feed_forward=feed_forward,
            recurrent=recurrent,
            delta=DeltaNet.from_keys(keys),
            heads=heads,
            kv_heads=keys.shared_heads(heads, blocks, attending),
            head_size=head_size,
            eps=keys.positive("attention.layer_norm_rms_epsilon"),
            scale=attention_scale(keys, head_size),
            # Qwen3.5 has interleaved multi-axis RoPE: a pair turns by the time, height or width of its token, as
            # rope.dimension_sections says.  Of text all three are its position, so it equals plain neox.
            rope=Rope.from_keys(keys, "neox", head_size),
        )


def _recurrent(keys: Keys, blocks: int) -> tuple[bool, ...]:
    """Which layers are delta nets.  Blocks at the end that predict further tokens (MTP) are counted, but not run."""
    extra = keys.count("nextn_predict_layers", 0, least=0)
    if extra >= blocks:
        raise keys.error("nextn_predict_layers", f"is {extra}; need fewer than block_count {blocks}")
    if keys.has("attention.recurrent_layers"):
        return keys.flags("attention.recurrent_layers", blocks)[: blocks - extra]
    interval = keys.count("full_attention_interval", 4)
    return tuple((i + 1) % interval != 0 for i in range(blocks - extra))


Mixer = Callable[[Hyper, Weights, Frame, int, Value], Value]
"""A layer's mixer: f32[B*T, E] to f32[B*T, E]."""


def build(hyper: Hyper, weights: Weights, step: Step) -> Graph:
    """The graph of one step: output ``logits`` f32[outputs, vocabulary]; states ``cache_k.N`` and ``cache_v.N`` of
    attention layers, ``conv_state.N`` and ``delta_state.N`` of recurrent ones (see `delta_rule`).  A sequence starts
    anew when the host zeroes its rows of the latter two.
    """
    return hybrid(hyper, weights, step, delta_net)


def hybrid(hyper: Hyper, weights: Weights, step: Step, recurrent: Mixer) -> Graph:
    """The same for a family that differs in its recurrent layers."""
    frame = Frame(step, taps=hyper.taps)

    def mix(layer: int, x: Value) -> Value:
        mixer = recurrent if hyper.recurrent[layer] else gated_attention
        return mixer(hyper, weights, frame, layer, x)

    return decoder(hyper, weights, frame, mix, second_norm="post_attention_norm")


def gated_attention(hyper: Hyper, weights: Weights, frame: Frame, layer: int, x: Value) -> Value:
    """Attention whose output is gated by a sigmoid of the input, f32[B*T, E] to f32[B*T, E]."""
    block, size = f"blk.{layer}", hyper.head_size
    # Each head of attn_q gives its query and then its gate.
    both, k, v = queries_keys_values(weights, frame, block, x, (hyper.heads, 2 * size), (hyper.kv_heads, size))
    q, gate = ops.slice_(both, axis=-1, start=0, stop=size), ops.slice_(both, axis=-1, start=size, stop=2 * size)
    q = norm(weights, f"{block}.attn_q_norm", q, hyper.eps)
    k = norm(weights, f"{block}.attn_k_norm", k, hyper.eps)
    q = hyper.rope.rotate(q, frame.pos, name=f"{block}.q_rope")
    k = hyper.rope.rotate(k, frame.pos, name=f"{block}.k_rope")
    k, v = frame.cached(f"cache_k.{layer}", k), frame.cached(f"cache_v.{layer}", v)
    mixed = ops.attention(q, k, v, frame.mask(), scale=hyper.scale, name=f"{block}.attn")
    mixed = ops.mul(mixed, ops.sigmoid(gate), name=f"{block}.attn_gated")
    return linear(weights, f"{block}.attn_output", frame.rows(mixed), hyper.width)


def delta_net(hyper: Hyper, weights: Weights, frame: Frame, layer: int, x: Value) -> Value:
    """The recurrent layers, f32[B*T, E] to f32[B*T, E]."""
    block, net = f"blk.{layer}", hyper.delta
    parts = Projected(
        qkv=linear(weights, f"{block}.attn_qkv", x, net.channels),
        z=linear(weights, f"{block}.attn_gate", x, net.values_width),
        alpha=linear(weights, f"{block}.ssm_alpha", x, net.value_heads),
        beta=linear(weights, f"{block}.ssm_beta", x, net.value_heads),
    )
    # The converter has reordered the value heads, so that head j belongs to key head j mod key_heads.
    o = delta_rule(net, weights, frame, layer, parts, heads="tiled", eps=hyper.eps)
    return linear(weights, f"{block}.ssm_out", o, hyper.width)
