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
"""What a layer, given its number, makes of its normalised input: f32[B*T, E] to f32[B*T, E]."""


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


def decoder(hyper: Widths, weights: Weights, frame: Frame, mix: Mixer, second_norm: str = "ffn_norm") -> Graph:
    """The graph of all layers: output ``logits`` f32[outputs, vocabulary], and the states that `mix` updates.

    ``second_norm`` names the norm before the feed-forward.  After the last mixer only the wanted rows go on.
    """
    x = embed(weights, frame.tokens, hyper.vocabulary_size, hyper.width)
    for layer in range(hyper.layers):
        block = f"blk.{layer}"
        mixed = mix(layer, norm(weights, f"{block}.attn_norm", x, hyper.eps))
        x = ops.add(x, mixed, name=f"{block}.attn_residual")
        if layer == hyper.layers - 1:
            x = frame.wanted(x)
        h = norm(weights, f"{block}.{second_norm}", x, hyper.eps)
        x = ops.add(x, feed_forward(weights, block, h, hyper.feed_forward), name=f"{block}.ffn_residual")
    return frame.graph(logits(weights, x, hyper.vocabulary_size, hyper.eps))
