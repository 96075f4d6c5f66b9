"""Per-layer embeddings: every block also sees a short vector of the token that belongs to it alone.

Gemma team, Gemma 3n and Gemma 4; graph: llama.cpp ``gemma4.cpp``.
"""

from __future__ import annotations

import math

from ... import ops
from ...graph import Value
from .blocks import product
from .decoder import Decoder
from .hyper import Layer


class PerLayer(Decoder):
    """Adds, at the end of each block, what it makes of its short vector; then it scales its output."""

    def embedded(self) -> Value:
        x = super().embedded()
        self.short = self.shortened(x) if self.weights.has("per_layer_token_embd.weight") else None
        return x

    def shortened(self, x: Value) -> Value:
        """f32[B*T, layers * P]: a projection of the embedding, plus rows of a table of their own."""
        hyper, weights = self.hyper, self.weights
        columns = weights.shape("per_layer_token_embd.weight")[1]
        each = columns // hyper.layers
        rows = ops.get_rows(
            weights("per_layer_token_embd.weight", (hyper.vocabulary_size, columns)), self.frame.tokens, name="places"
        )
        y = ops.scale(product(weights, "per_layer_model_proj", x, columns), scale=1.0 / math.sqrt(hyper.width))
        y = ops.reshape(y, shape=(x.shape[0], hyper.layers, each))
        y = ops.reshape(self.norm(weights, "per_layer_proj_norm", y), shape=(x.shape[0], columns))
        return ops.scale(ops.add(y, ops.scale(rows, scale=math.sqrt(each))), scale=math.sqrt(0.5), name="short")

    def block(self, i: int, layer: Layer, x: Value) -> Value:
        block, x = f"blk.{i}", super().block(i, layer, x)
        if self.short is not None:
            each = self.short.shape[-1] // self.hyper.layers
            short = ops.slice_(self.short, axis=-1, start=i * each, stop=(i + 1) * each)
            short = self.frame.wanted(short) if self.is_last(i) else short
            y = ops.mul(ops.gelu(product(self.weights, f"{block}.inp_gate", x, each)), short)
            y = self.normed(i, "post_norm", product(self.weights, f"{block}.proj", y, x.shape[-1]))
            x = ops.add(x, y, name=f"{block}.short_residual")
        factor = self.weights.optional(f"{block}.layer_output_scale.weight", (1,))
        return x if factor is None else ops.mul(x, factor)
