"""Multi-token prediction (MTP): extra blocks of a model, with one further predicted token per block.

The first MTP block reads each token together with the model's result for the token before it. Each other block reads
the result of the previous MTP block instead. DeepSeek-AI, DeepSeek-V3, 2024.

Example: the model has read ``a``, and ``b`` was sampled. Block 0 reads ``b`` with the model's result for ``a``, and
drafts ``c``. Block 1 reads ``c`` with the result of block 0 for ``b``, and drafts ``d``. One run of the model then
verifies ``b c d``.
"""

from __future__ import annotations

from functools import reduce

from ... import ops
from ...graph import Graph, Value, input
from .decoder import Decoder
from .layers.blocks import linear, parts


class LookingAhead:
    """Builds the step graphs of a decoder with MTP blocks.

    Blocks without matrices of their own use the matrices of the decoder. A row of ``seen`` or ``hidden`` f32[n, blocks
    * columns] holds the draft inputs of all blocks for the next token.
    """

    def __init__(self, trunk: Decoder) -> None:
        assert trunk.hyper.ahead is not None
        self.trunk, self.hyper, self.weights, self.frame = trunk, trunk.hyper.ahead, trunk.weights, trunk.frame
        self.handed, self.streams = self.hyper.handed, self.hyper.handed // self.hyper.width
        self.decoder = (type(trunk) if self.streams > 1 else Decoder)(self.hyper, self.weights, self.frame)
        seen = input("seen", (self.frame.step.sequences, self.hyper.layers * self.handed))
        self.seen = parts(seen, *[self.handed] * self.hyper.layers) if self.hyper.layers > 1 else [seen]

    def graph(self) -> Graph:
        """Return the graph of the step for its output kind."""
        return self.frame.graph(self.guess() if self.frame.step.gives == "guess" else self.followed())

    def followed(self) -> dict[str, Value]:
        """Return ``logits`` and ``hidden`` of the output rows; all MTP blocks read the same tokens."""
        x = self.trunk.residual()
        normed = self.trunk.read_out(x)
        outputs = {"logits": self.trunk.logits(self.frame.chosen(normed))}
        handed = [self.handed_on(x, normed)]
        for k in range(self.hyper.layers):
            x, normed = self.read(k, self.before(k, handed[k]))
            handed.append(self.handed_on(x, normed))
            # With all logits as outputs, the planner shards the heads as their weights are sharded.
            if self.frame.step.gives == "all":
                outputs[f"guess.{k}"] = self.logits(k, normed)
        *rows, outputs["guess"] = map(self.frame.chosen, handed)
        return {**outputs, "hidden": side_by_side(rows)}

    def guess(self) -> dict[str, Value]:
        """Return ``logits`` of the MTP block ``draft_block``, and ``hidden`` for the next one.

        The blocks after it read the same token. If there are fewer blocks than drafts, the last block makes all further
        drafts.
        """
        first, last = self.frame.step.turn, self.hyper.layers - 1
        answers = [self.read(k, self.seen[k]) for k in range(first, last + 1)]
        after = min(first + 1, last)
        handed = [self.handed_on(x, normed) for x, normed in answers[: last + 1 - after]]
        rows = [self.frame.chosen(row) for row in (*self.seen[:after], *handed)]
        return {"logits": self.logits(first, answers[0][1]), "hidden": side_by_side(rows)}

    def before(self, k: int, handed: Value) -> Value:
        """Return the draft input of block k for each token: ``handed`` f32[B*T, columns], shifted by one token."""
        frame = self.frame
        first = ops.reshape(self.seen[k], shape=(frame.step.sequences, 1, self.handed))
        both = ops.concat(first, frame.split(handed, self.handed), axis=1)
        return frame.rows(ops.slice_(both, axis=1, start=0, stop=frame.step.tokens))

    def read(self, k: int, before: Value) -> tuple[Value, Value]:
        """Return the residual after MTP block k and its norm, f32[n, E].

        The block reads the tokens and the draft inputs ``before``.
        """
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
        """Return the draft input for the next block, f32[n, columns], from a residual and its norm."""
        whole = self.streams > 1 or self.hyper.family.hands_on == "residual"
        return ops.reshape(x, shape=(x.shape[0], self.handed)) if whole else normed

    def logits(self, k: int, normed: Value) -> Value:
        matrix = self.weights.optional(f"{self.name(k)}.shared_head_head.weight", self.table)
        return self.trunk.logits(self.frame.chosen(normed), matrix)

    @property
    def table(self) -> tuple[int, int]:
        return self.hyper.vocabulary_size, self.hyper.width

    def name(self, k: int) -> str:
        """Return the prefix of the names of block k's own weights."""
        return f"blk.{self.hyper.stored + k}.nextn"


def side_by_side(rows: list[Value]) -> Value:
    return reduce(lambda left, right: ops.concat(left, right, axis=-1), rows)
