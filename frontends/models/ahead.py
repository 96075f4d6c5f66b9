"""Multi-token prediction: blocks behind those of the model, each of which guesses one token further than the last.

The first reads each token together with what the model made of the token before it; each other one, with what the block
before it made of that token.  DeepSeek-AI, DeepSeek-V3, 2024.
"""

from __future__ import annotations

from functools import reduce

from ... import ops
from ...graph import Graph, Value, input
from .decoder import Decoder
from .layers.blocks import linear, parts


class LookingAhead:
    """Builds steps of a decoder in which such blocks take part; its matrices serve them where they have none.

    A row of ``seen`` or ``hidden`` f32[n, blocks * handed] holds what each block is to read with the next token.
    """

    def __init__(self, trunk: Decoder) -> None:
        assert trunk.hyper.ahead is not None
        self.trunk, self.hyper, self.weights, self.frame = trunk, trunk.hyper.ahead, trunk.weights, trunk.frame
        self.handed, self.streams = self.hyper.handed, self.hyper.handed // self.hyper.width
        self.decoder = (type(trunk) if self.streams > 1 else Decoder)(self.hyper, self.weights, self.frame)
        seen = input("seen", (self.frame.step.sequences, self.hyper.layers * self.handed))
        self.seen = parts(seen, *[self.handed] * self.hyper.layers) if self.hyper.layers > 1 else [seen]

    def graph(self) -> Graph:
        return self.frame.graph(self.guess() if self.frame.step.gives == "guess" else self.followed())

    def followed(self) -> dict[str, Value]:
        """``logits`` and ``hidden`` of the wanted rows, while all blocks read the same tokens."""
        x = self.trunk.residual()
        normed = self.trunk.read_out(x)
        outputs = {"logits": self.trunk.logits(self.frame.chosen(normed))}
        handed = [self.handed_on(x, normed)]
        for k in range(self.hyper.layers):
            x, normed = self.read(k, self.before(k, handed[k]))
            handed.append(self.handed_on(x, normed))
            # Nobody asks what blocks guess here, but with all of it heads are cut as their weights lie.
            if self.frame.step.gives == "all":
                outputs[f"guess.{k}"] = self.logits(k, normed)
        *rows, outputs["guess"] = map(self.frame.chosen, handed)
        return {**outputs, "hidden": side_by_side(rows)}

    def guess(self) -> dict[str, Value]:
        """``logits`` of the block whose turn it is, and ``hidden`` for the next one, while those behind it read the
        same token; the last block has all turns that are left."""
        first, last = self.frame.step.turn, self.hyper.layers - 1
        answers = [self.read(k, self.seen[k]) for k in range(first, last + 1)]
        after = min(first + 1, last)
        handed = [self.handed_on(x, normed) for x, normed in answers[: last + 1 - after]]
        rows = [self.frame.chosen(row) for row in (*self.seen[:after], *handed)]
        return {"logits": self.logits(first, answers[0][1]), "hidden": side_by_side(rows)}

    def before(self, k: int, handed: Value) -> Value:
        """What block k reads with each token: ``handed`` f32[B*T, handed] one token later."""
        frame = self.frame
        first = ops.reshape(self.seen[k], shape=(frame.step.sequences, 1, self.handed))
        both = ops.concat(first, frame.split(handed, self.handed), axis=1)
        return frame.rows(ops.slice_(both, axis=1, start=0, stop=frame.step.tokens))

    def read(self, k: int, before: Value) -> tuple[Value, Value]:
        """The residual behind block k, which reads a token with what is ``before`` it, and its norm f32[n, E]."""
        weights, name, width, norm = self.weights, self.name(k), self.hyper.width, self.decoder.norm
        matrix = weights.optional(f"{name}.embed_tokens.weight", self.table)
        matrix = weights("token_embd.weight", self.table) if matrix is None else matrix
        token = norm(weights, f"{name}.enorm", ops.get_rows(matrix, self.frame.tokens))
        if self.streams > 1:
            shape = before.shape[0], self.streams, width
            before = ops.reshape(before, shape=shape)
            token = ops.repeat(ops.reshape(token, shape=(shape[0], 1, width)), shape=shape)
        both = ops.concat(token, norm(weights, f"{name}.hnorm", before), axis=-1)
        both = ops.reshape(both, shape=(before.spec.size // width, 2 * width))
        x = ops.reshape(linear(weights, f"{name}.eh_proj", both, width), shape=before.shape)
        x = self.decoder.block(self.hyper.stored + k, self.hyper.blocks[k], x)
        return x, self.decoder.read_out(x, name)

    def handed_on(self, x: Value, normed: Value) -> Value:
        """What the next block is given of a residual and its last norm: f32[n, handed]."""
        whole = self.streams > 1 or self.hyper.family.hands_on == "residual"
        return ops.reshape(x, shape=(x.shape[0], self.handed)) if whole else normed

    def logits(self, k: int, normed: Value) -> Value:
        matrix = self.weights.optional(f"{self.name(k)}.shared_head_head.weight", self.table)
        return self.trunk.logits(self.frame.chosen(normed), matrix)

    @property
    def table(self) -> tuple[int, int]:
        return self.hyper.vocabulary_size, self.hyper.width

    def name(self, k: int) -> str:
        """What the names of block k's own weights begin with."""
        return f"blk.{self.hyper.stored + k}.nextn"


def side_by_side(rows: list[Value]) -> Value:
    return reduce(lambda left, right: ops.concat(left, right, axis=-1), rows)
