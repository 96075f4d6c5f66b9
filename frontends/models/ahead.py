"""Multi-token prediction: a block behind those of the model, which guesses one token further.

It reads each token together with what the model made of the token before.  DeepSeek-AI, DeepSeek-V3, 2024.
"""

from __future__ import annotations

from functools import cached_property

from ... import ops
from ...graph import Graph, Value, input
from .decoder import Decoder
from .layers.blocks import linear


class LookingAhead(Decoder):
    """Builds steps in which the first such block takes part; its matrices are the model's own where it has none."""

    def graph(self) -> Graph:
        return self.frame.graph(self.guess(self.seen)) if self.frame.step.gives == "guess" else super().graph()

    def ended_by(self, x: Value) -> Graph:
        """``logits`` and ``hidden`` of the wanted rows, while the block reads the same tokens."""
        normed = self.norm(self.weights, self.family.output_norm, x)
        hidden = self.handed_on(x, normed)
        outputs = {"hidden": self.frame.chosen(hidden), "logits": self.logits(self.frame.chosen(normed))}
        # Nobody asks what the block guesses here, but with all of it heads are cut as its weights lie.
        guess = self.guess(self.before(hidden))
        return self.frame.graph({**outputs, "guess": guess["logits" if self.frame.step.gives == "all" else "hidden"]})

    def handed_on(self, x: Value, normed: Value) -> Value:
        """What the block is given, or gives itself, of a residual and its last norm."""
        return x if self.family.hands_on == "residual" else normed

    @property
    def number(self) -> int:
        return self.hyper.stored

    @cached_property
    def seen(self) -> Value:
        """f32[B, E]: what the model, or the block itself, made of the last token before this run."""
        return input("seen", (self.frame.step.sequences, self.hyper.width))

    def before(self, hidden: Value) -> Value:
        """What was made of the token before each, of ``hidden`` f32[B*T, E] that of each: f32[B*T, E]."""
        step, width = self.frame.step, self.hyper.width
        first = ops.reshape(self.seen, shape=(step.sequences, 1, width))
        both = ops.concat(first, self.frame.split(hidden, width), axis=1)
        return self.frame.rows(ops.slice_(both, axis=1, start=0, stop=step.tokens))

    def guess(self, before: Value) -> dict[str, Value]:
        """``logits`` f32[outputs, vocabulary] of the block, and ``hidden`` f32[outputs, E] for the guess after that."""
        weights, name, table = self.weights, f"blk.{self.number}.nextn", (self.hyper.vocabulary_size, self.hyper.width)
        assert self.hyper.ahead is not None
        matrix = weights.optional(f"{name}.embed_tokens.weight", table)
        matrix = weights("token_embd.weight", table) if matrix is None else matrix
        token = self.norm(weights, f"{name}.enorm", ops.get_rows(matrix, self.frame.tokens))
        both = ops.concat(token, self.norm(weights, f"{name}.hnorm", before), axis=-1)
        x = linear(weights, f"{name}.eh_proj", both, self.hyper.width)
        x = self.frame.chosen(self.block(self.number, self.hyper.ahead.blocks[0], x))
        own = weights.has(f"{name}.shared_head_norm.weight")
        normed = self.norm(weights, f"{name}.shared_head_norm" if own else self.family.output_norm, x)
        logits = self.logits(normed, weights.optional(f"{name}.shared_head_head.weight", table))
        return {"logits": logits, "hidden": self.handed_on(x, normed)}
