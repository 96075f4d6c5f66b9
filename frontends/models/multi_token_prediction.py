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
from .layers.feed_forward import linear, split_columns


class MtpGraphBuilder:
    """Builds the step graphs of a decoder with multi-token prediction (MTP) blocks.

    A draft input is the vector that an MTP block reads in addition to the token. A row of ``seen`` or ``hidden``
    f32[n, blocks * columns] holds the draft inputs of all blocks for the next token. Blocks without matrices of their
    own use the matrices of the decoder.
    """

    def __init__(self, trunk: Decoder) -> None:
        assert trunk.hyper.mtp_blocks is not None
        self.trunk, self.hyper, self.weights, self.frame = trunk, trunk.hyper.mtp_blocks, trunk.weights, trunk.frame
        self.draft_columns, self.streams = self.hyper.draft_columns, self.hyper.draft_columns // self.hyper.width
        self.decoder = (type(trunk) if self.streams > 1 else Decoder)(self.hyper, self.weights, self.frame)
        seen = input("seen", (self.frame.step.sequences, self.hyper.layers * self.draft_columns))
        self.draft_inputs = (
            split_columns(seen, *[self.draft_columns] * self.hyper.layers) if self.hyper.layers > 1 else [seen]
        )

    def build_graph(self) -> Graph:
        """Build the graph of the step.

        With the output kind ``guess`` the graph computes a draft. Otherwise it runs the model and all MTP blocks.
        """
        return self.frame.build_graph(
            self.build_draft_step_outputs()
            if self.frame.step.output_kind == "guess"
            else self.build_model_and_mtp_outputs()
        )

    def build_model_and_mtp_outputs(self) -> dict[str, Value]:
        """Build the outputs of a step of the model and all MTP blocks: ``logits``, and the draft inputs ``hidden``.

        All MTP blocks read the same tokens as the model.
        """
        x = self.trunk.embed_and_run_all_blocks()
        normed = self.trunk.apply_output_norm(x)
        outputs = {"logits": self.trunk.compute_logits(self.frame.select_output_rows(normed))}
        handed = [self.create_draft_input_of_next_block(x, normed)]
        for k in range(self.hyper.layers):
            x, normed = self.run_mtp_block_returning_norm(k, self.take_draft_row_of_previous_token(k, handed[k]))
            handed.append(self.create_draft_input_of_next_block(x, normed))
            # With all logits as outputs, the planner shards the heads as their weights are sharded.
            if self.frame.step.output_kind == "all":
                outputs[f"guess.{k}"] = self.compute_logits(k, normed)
        *rows, outputs["guess"] = map(self.frame.select_output_rows, handed)
        return {**outputs, "hidden": concat_columns(rows)}

    def build_draft_step_outputs(self) -> dict[str, Value]:
        """Build the outputs of a draft step: ``logits`` of MTP block ``draft_block``, and the draft inputs ``hidden``.

        The next draft reads ``hidden``. All MTP blocks after this one read the same token. If there are fewer blocks
        than drafts, the last block makes all further drafts.
        """
        first, last = self.frame.step.draft_block, self.hyper.layers - 1
        answers = [self.run_mtp_block_returning_norm(k, self.draft_inputs[k]) for k in range(first, last + 1)]
        after = min(first + 1, last)
        handed = [self.create_draft_input_of_next_block(x, normed) for x, normed in answers[: last + 1 - after]]
        rows = [self.frame.select_output_rows(row) for row in (*self.draft_inputs[:after], *handed)]
        return {"logits": self.compute_logits(first, answers[0][1]), "hidden": concat_columns(rows)}

    def take_draft_row_of_previous_token(self, k: int, draft_rows: Value) -> Value:
        """Return for each token the draft input that block k made at the token before it: f32[B*T, columns].

        The first token of a sequence gets the row that the caller has kept from the previous run. ``draft_rows`` is
        f32[B*T, columns].
        """
        frame = self.frame
        first = ops.reshape(self.draft_inputs[k], shape=(frame.step.sequences, 1, self.draft_columns))
        both = ops.concat(first, frame.rows_to_sequences(draft_rows, self.draft_columns), axis=1)
        return frame.sequences_to_rows(ops.slice_(both, axis=1, start=0, stop=frame.step.tokens))

    def run_mtp_block_returning_norm(self, k: int, before: Value) -> tuple[Value, Value]:
        """Run MTP block k, and return the residual after it and the norm of this residual, both f32[n, E].

        The block reads the tokens and the draft inputs ``before``.
        """
        weights, name, width, norm = self.weights, self.mtp_weight_prefix(k), self.hyper.width, self.decoder.norm
        matrix = weights.optional_leaf(f"{name}.embed_tokens.weight", self.embedding_shape)
        matrix = weights("token_embd.weight", self.embedding_shape) if matrix is None else matrix
        token = norm(weights, f"{name}.enorm", ops.get_rows(matrix, self.frame.tokens))
        if self.streams > 1:
            shape = before.shape[0], self.streams, width
            before = ops.reshape(before, shape=shape)
            token = ops.repeat(ops.reshape(token, shape=(shape[0], 1, width)), shape=shape)
        both = ops.concat(token, norm(weights, f"{name}.hnorm", before), axis=-1)
        both = ops.reshape(both, shape=(before.spec.size // width, 2 * width))
        x = ops.reshape(linear(weights, f"{name}.eh_proj", both, width), shape=before.shape)
        x = self.decoder.run_block(self.hyper.stored_blocks + k, self.hyper.blocks[k], x)
        return x, self.decoder.apply_output_norm(x, name)

    def create_draft_input_of_next_block(self, x: Value, normed: Value) -> Value:
        """Return the vector that the next MTP block reads in addition to the token: the residual ``x`` or its norm.

        It is f32[n, columns].
        """
        whole = self.streams > 1 or self.hyper.family.draft_input == "residual"
        return ops.reshape(x, shape=(x.shape[0], self.draft_columns)) if whole else normed

    def compute_logits(self, k: int, normed: Value) -> Value:
        matrix = self.weights.optional_leaf(
            f"{self.mtp_weight_prefix(k)}.shared_head_head.weight", self.embedding_shape
        )
        return self.trunk.compute_logits(self.frame.select_output_rows(normed), matrix)

    @property
    def embedding_shape(self) -> tuple[int, int]:
        return self.hyper.vocabulary_size, self.hyper.width

    def mtp_weight_prefix(self, k: int) -> str:
        """Return the common prefix of the names of those weights that only MTP block k has."""
        return f"blk.{self.hyper.stored_blocks + k}.nextn"


def concat_columns(rows: list[Value]) -> Value:
    return reduce(lambda left, right: ops.concat(left, right, axis=-1), rows)
