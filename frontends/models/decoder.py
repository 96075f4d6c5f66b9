"""The skeleton of every decoder: embedding, then mixer and feed-forward on a residual, then the wanted logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ... import ops
from ...graph import Graph, Value
from .blocks import embed, logits, norm
from .frame import Frame
from .moe import Experts, feed_forward
from .weights import Weights

Mixer = Callable[[int, Value], Value]
"""What a mixer or a feed-forward, given its layer, makes of its normalised input: f32[B*T, E] to f32[B*T, E]."""


class Widths(Protocol):
    """The hyperparameters that the skeleton needs."""

    @property
    def vocabulary_size(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def feed_forward(self) -> int | Experts: ...
    @property
    def eps(self) -> float: ...


def decoder(
    hyper: Widths,
    weights: Weights,
    frame: Frame,
    mix: Mixer,
    feed: Mixer | None = None,
    *,
    second_norm: str = "ffn_norm",
    embedding_scale: float = 1.0,
    softcap: float = 0.0,
) -> Graph:
    """The graph of all layers: output ``logits`` f32[outputs, vocabulary], and the states that `mix` updates.

    ``feed`` is the feed-forward if it is not SwiGLU or experts, and ``second_norm`` names the norm before it.  After
    the last mixer only the wanted rows go on.  ``softcap`` bounds the logits unless it is 0.
    """

    def plain(layer: int, h: Value) -> Value:
        return feed_forward(weights, f"blk.{layer}", h, hyper.feed_forward)

    feed = feed or plain
    x = embed(weights, frame.tokens, hyper.vocabulary_size, hyper.width)
    if embedding_scale != 1.0:
        x = ops.scale(x, scale=embedding_scale, name="embed_scaled")
    for layer in range(hyper.layers):
        block = f"blk.{layer}"
        mixed = mix(layer, norm(weights, f"{block}.attn_norm", x, hyper.eps))
        x = ops.add(x, mixed, name=f"{block}.attn_residual")
        if layer == hyper.layers - 1:
            x = frame.wanted(x)
        h = norm(weights, f"{block}.{second_norm}", x, hyper.eps)
        x = ops.add(x, feed(layer, h), name=f"{block}.ffn_residual")
    y = logits(weights, x, hyper.vocabulary_size, hyper.eps)
    return frame.graph(capped(y, softcap) if softcap else y)


def capped(x: Value, most: float) -> Value:
    """``x`` bent so that it stays within ``most`` of 0, in its shape."""
    return ops.scale(ops.tanh(ops.scale(x, scale=1.0 / most)), scale=most, name="logits_capped")
