"""The fixed shape of a run (`Step`), and the input arrays that a batch fills.

All values that change between runs (tokens, positions, cache rows, lengths, output rows) are inputs of fixed shape. One
plan per `Step` therefore serves every batch that fits; shorter sequences are padded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ....graph.dtypes import DType
from ....graph.errors import format_count
from ....graph.lazy_dataclass import dataclass
from ....graph.validation import format_value
from ....ops.matrix.attention import BLOCK_KEYS
from ...errors import ModelError

TOKEN_KIND, SAMPLED_KIND = "token", "sampled"
"""The output kinds of decode steps that choose tokens on the device, for the next step."""
UNMASKED_KIND, MASKED_KIND = "unmasked", "masked"
"""The output kinds of the two steps around a grammar mask: the model, and the selection of candidates for the host."""
STATE_TOKEN_KINDS = frozenset({TOKEN_KIND, SAMPLED_KIND})
"""The output kinds of steps that read their tokens from a state."""
SELECTING_KINDS = frozenset({SAMPLED_KIND, MASKED_KIND})
"""The output kinds of steps that select candidates."""
DEVICE_KINDS = frozenset({UNMASKED_KIND, MASKED_KIND}) | STATE_TOKEN_KINDS
"""The output kinds of steps after which the host does not read all logits."""
PLAIN_KINDS = frozenset({"logits", "hidden"}) | DEVICE_KINDS
"""The output kinds of steps without MTP blocks."""
MAX_CACHE_ROW = 2**31 - 1
"""Largest index of a cache row, which is an i32."""
CACHE_ROW_MULTIPLE = BLOCK_KEYS
"""The number of cache rows of a sequence is a multiple of this number.

Each sequence then begins at a multiple of 64 bytes, and its rows are whole blocks, which a block table can name.
"""


def count_cache_rows_with_spare(cells: int) -> int:
    """Return how many cache rows a sequence with `cells` cells has: some more, for padding tokens and for alignment.

    Padding tokens write the first spare row.
    """
    return -(-(cells + 1) // CACHE_ROW_MULTIPLE) * CACHE_ROW_MULTIPLE


@dataclass(frozen=True, slots=True)
class Step:
    """The shape of a run: all sizes that a plan depends on. Equal steps use the same plan.

    - ``sequences`` (B): sequences that run together; ``tokens`` (T): the largest number of new tokens of each.
    - ``context``: cache cells of each sequence; ``cells``: the first of them, which attention reads.
    - ``outputs``: rows that the run returns.
    - ``max_new_tokens``: if no run of a session adds more tokens, layers with an attention window use a ring cache.

    Raises `ModelError` unless all sizes are positive and ``cells <= context``.
    """

    sequences: int
    tokens: int
    cells: int
    context: int
    outputs: int
    output_kind: str = "logits"
    """The kind of output per row.

    - ``logits``.
    - ``hidden``: the input row of the output matrix.
    - ``token``: the token with the largest logit, and this logit. The step has one new token and one output row per
      sequence. It reads the token from a state, and sets the state to the token that it chooses.
    - ``sampled``: candidates, and a token that the device samples among them. Candidates are the ``candidate_count``
      tokens with the largest logits, and ``named_token_count`` tokens that an input names, with their logits. As with
      ``token``, the step reads its token from a state, and sets the state to the sampled token.
    - ``unmasked``: nothing. A state has the logits, for a step of the kind ``masked``.
    - ``masked``: the candidates among the tokens that an input allows, from the logits of the last step of the kind
      ``unmasked``. The step runs no model.
    - ``both``: logits, and as ``hidden`` the draft inputs of all MTP blocks, which read the same tokens.
    - ``guess``: logits and draft inputs of the MTP block ``draft_block``.
    - ``all``: as ``both``, with the logits of all MTP blocks.
    """
    max_new_tokens: int = 0
    """0 if unknown; then no layer uses a ring cache."""
    reversible: bool = False
    """Whether recurrent states are saved after each token, see `StepGraphBuilder.set_state`."""
    draft_block: int = 0
    keys: DType = DType.F32
    values: DType = DType.F32
    """Dtypes of the cache: of keys, or of the vectors that keys and values are computed from, and of values."""
    candidate_count: int = 0
    named_token_count: int = 0
    blocks: int = 0
    """The blocks of 64 cells in the pool that the KV caches of all sequences share; 0 for a region per sequence.

    Padding writes block 0, so no sequence may have it. There are no ring caches.
    """
    prompt_tokens: int = 0
    """Prompt tokens of one of the sequences that a mixed step reads, in addition to one new token of the others."""

    def __post_init__(self) -> None:
        for name in ("sequences", "tokens", "cells", "context", "outputs"):
            size = getattr(self, name)
            if type(size) is not int or not 1 <= size <= MAX_CACHE_ROW:
                raise ModelError(f"step: {name} is {format_value(size)}; need an integer from 1 to {MAX_CACHE_ROW}")
        if self.output_kind in STATE_TOKEN_KINDS and not self.tokens == 1 <= self.outputs == self.sequences:
            raise ModelError(
                f"step: {format_count(self.tokens, 'new token')} and {format_count(self.outputs, 'output')} of "
                f"{format_count(self.sequences, 'sequence')}; the output "
                f"kind {self.output_kind} needs one new token and one output per sequence"
            )
        if (self.output_kind in SELECTING_KINDS) != (self.candidate_count > 0) or self.named_token_count < 0:
            raise ModelError(
                f"step: {format_count(self.candidate_count, 'candidate')} of the output kind "
                f"{self.output_kind}; the kinds "
                f"{', '.join(sorted(SELECTING_KINDS))}, and no others, need at least 1"
            )
        if self.prompt_tokens and (self.tokens > 1 or self.reversible or self.output_kind != "logits"):
            raise ModelError(
                f"step: {format_count(self.tokens, 'new token')}, reversible {self.reversible}, output kind "
                f"{self.output_kind}; a step "
                "with prompt tokens needs one new token, and logits"
            )
        if self.cells > self.context:
            raise ModelError(
                f"step: reads {format_count(self.cells, 'cell')} of {self.context}; need cells of at most the context"
            )
        if (self.blocks * BLOCK_KEYS or self.sequences * count_cache_rows_with_spare(self.context)) > MAX_CACHE_ROW:
            raise ModelError(
                f"step: {format_count(self.sequences, 'sequence')} of {format_count(self.context, 'cell')}; "
                f"need at most {MAX_CACHE_ROW} in all; "
                "use a smaller context"
            )

    def ring_cells(self, window: int) -> int:
        """Return how many rows for each sequence a ring cache has for an attention window of `window` tokens.

        A ring cache overwrites rows that have left the window. The result is 0 without a ring cache.
        """
        cells = window + self.max_new_tokens
        return cells if window and self.max_new_tokens and cells < self.context and not self.blocks else 0

    @property
    def table_columns(self) -> int:
        """The number of cache blocks of a sequence that attention reads."""
        return -(-self.cells // BLOCK_KEYS)

    @property
    def label(self) -> str:
        """The label of runs in traces, with the output kind if tokens are chosen or selected on the device."""
        text = f"{format_count(self.tokens, 'token')}, {format_count(self.cells, 'cell')}"
        text += f", {format_count(self.prompt_tokens, 'prompt token')}" if self.prompt_tokens else ""
        return f"{text}, {self.output_kind}" if self.output_kind in DEVICE_KINDS else text

    @property
    def padded_token_count(self) -> int:
        """The number of token rows that a run computes, padding and prompt tokens included.

        It is ``sequences * tokens``, and in a mixed step the tokens of the prompt.
        """
        return self.sequences * self.tokens + self.prompt_tokens

    @property
    def grid(self) -> tuple[int, int]:
        """How the tokens of the step are arranged for layers: (number of groups, tokens of a group).

        A group is a sequence, or in a mixed step a single token.
        """
        return (self.padded_token_count, 1) if self.prompt_tokens else (self.sequences, self.tokens)


@dataclass(frozen=True, slots=True)
class Batch:
    """The input of one run: for each sequence its new tokens (none if it is idle) and its length so far.

    ``output_positions`` lists the output rows as (sequence, index of the new token), in this order. `None` means the
    last new token of each sequence, so that row i belongs to sequence i; an idle sequence then has a row without
    meaning. ``history_tokens`` has the earlier tokens of each sequence, or the last `Model.ngram_history_token_count`.
    ``draft_inputs`` f32[B, `Model.draft_input_columns`] has the rows that MTP blocks read with the next token.
    ``tables`` has the blocks of each sequence in a pool of blocks: cell s is cell ``s % 64`` of block ``s // 64``.
    ``first_sequence`` is the number of the first sequence in caches without blocks. A mixed step reads
    ``prompt`` as well as ``tokens``: the number of an idle sequence, and its new tokens.
    """

    tokens: Sequence[Sequence[int]]
    lengths: Sequence[int]
    output_positions: Sequence[tuple[int, int]] | None = None
    history_tokens: Sequence[Sequence[int]] = ()
    draft_inputs: npt.NDArray[np.float32] | None = None
    tables: Sequence[Sequence[int]] = ()
    first_sequence: int = 0
    prompt: tuple[int, Sequence[int]] | None = None


PROMPT_ROW = "prompt_row"
"""The input i32[1] of a mixed step: the number of the sequence of the prompt."""


def make_prompt_table_input_name(window: int) -> str:
    """Return the name of the graph input with the cache blocks of the prompt in a mixed step.

    Ring caches for a `window` have an input of their own; 0 names the input of all other caches.
    """
    return f"prompt_table.{window}" if window else "prompt_table"


def split_mixed_batch(step: Step, batch: Batch) -> tuple[tuple[Step, Batch], tuple[Step, Batch]]:
    """Split a mixed step and its batch into two: the decoded tokens, and the prompt."""
    assert batch.prompt is not None, "a mixed step reads a prompt"
    sequence, tokens = batch.prompt
    alone = replace(step, sequences=1, tokens=step.prompt_tokens, prompt_tokens=0, outputs=1)
    tables = [batch.tables[sequence]] if step.blocks else ()
    prompt = Batch([tokens], [batch.lengths[sequence]], tables=tables, first_sequence=sequence)
    decoding = replace(step, prompt_tokens=0, outputs=step.sequences)
    return (decoding, replace(batch, prompt=None)), (alone, prompt)


def build_prompt_table(step: Step, batch: Batch, cells: int, context: int) -> npt.NDArray[np.int32]:
    """Build the table of the cache blocks in which a prompt's sequence lies, i32[1, blocks], for caches without a pool.

    Args:
        step: The mixed step.
        batch: Its batch.
        cells: The cells that attention reads.
        context: The cells of a sequence.
    """
    assert batch.prompt is not None, "a mixed step reads a prompt"
    first = batch.prompt[0] * count_cache_rows_with_spare(context) // BLOCK_KEYS
    return np.arange(first, first - (-cells // BLOCK_KEYS), dtype=np.int32)[None]


def _build_mixed_step_inputs(step: Step, batch: Batch, taps: int) -> dict[str, npt.NDArray[np.generic]]:
    (decoding, prompt) = (build_step_inputs(*part, taps=taps) for part in split_mixed_batch(step, batch))
    both = {name: (decoding[name], prompt[name]) for name in prompt}
    assert batch.prompt is not None, "a mixed step reads a prompt"
    table = prompt["table"] if step.blocks else build_prompt_table(step, batch, step.cells, step.context)
    arrays: dict[str, npt.NDArray[np.generic]] = {
        "tokens": np.concatenate(both["tokens"]),
        "slot": np.concatenate(both["slot"]),
        "pos": np.concatenate([pos.reshape(-1, 1) for pos in both["pos"]]),
        "out_ids": np.append(decoding["out_ids"], step.sequences + np.asarray(prompt["out_ids"], np.int32)),
        make_prompt_table_input_name(0): table,
        PROMPT_ROW: np.array(batch.prompt[:1], np.int32),
    }
    if taps:
        arrays["valid"] = np.concatenate([valid.reshape(-1, 1, 1) for valid in both["valid"]])
        arrays["conv_rows"] = np.concatenate(both["conv_rows"])
    return arrays | ({"table": decoding["table"]} if step.blocks else {})


@dataclass(frozen=True, slots=True)
class RingRowNumberInput:
    """The graph input with the row of a ring cache that each token writes, for layers with an attention window.

    The input is ``ring_slot.W`` i32[B*T] for a window of W tokens. Padding writes the first spare row of its
    sequence.
    """

    window: int

    @property
    def input_name(self) -> str:
        return f"ring_slot.{self.window}"

    def build_inputs(self, step: Step, batch: Batch) -> Mapping[str, npt.NDArray[np.generic]]:
        """Build the input array of a batch, or nothing if the step has no ring cache for this window.

        A mixed step also has the table of the prompt; see `build_prompt_table`.
        """
        if not (cells := step.ring_cells(self.window)):
            return {}
        if step.prompt_tokens:
            parts = [self.build_inputs(*part)[self.input_name] for part in split_mixed_batch(step, batch)]
            table = build_prompt_table(step, batch, min(cells, step.cells), cells)
            return {self.input_name: np.concatenate(parts), make_prompt_table_input_name(self.window): table}
        rows, slot = count_cache_rows_with_spare(cells), list[int]()
        for i, (new, length) in enumerate(zip(batch.tokens, batch.lengths, strict=True), batch.first_sequence):
            slot += [i * rows + at % cells for at in range(length, length + len(new))]
            slot += [i * rows + cells] * (step.tokens - len(new))
        return {self.input_name: np.array(slot, np.int32)}


def build_step_inputs(
    step: Step, batch: Batch, *, taps: int = 0, causal: bool = True
) -> dict[str, npt.NDArray[np.generic]]:
    """Build the input arrays of the graph for a step from a batch, by input name.

    - ``tokens`` i32[B*T].
    - ``pos`` i32[B, T]: positions, 0 for padding.
    - ``slot`` i32[B*T]: the cache row that a token writes, ``sequence * count_cache_rows_with_spare(context) +
      position``; padding writes the first spare row of its sequence.
    - ``out_ids`` i32[outputs]: output rows; row 0 is repeated after the last one.
    - ``valid`` f32[B, T, 1], with taps: 0 for padding.
    - ``conv_rows`` i32[B, taps-1], with taps: the rows of [state, new tokens] that become the next convolution state.
    - ``last`` i32[B, T], unless ``causal``: the last position of the sequence.
    - ``table`` i32[B, `Step.table_columns`], with blocks: the blocks of each sequence, then 0. ``slot`` then follows
      from the table, and padding writes row 0.

    A mixed step has N = B + prompt tokens rows; the rows of the prompt are the last ones:

    - ``tokens`` and ``slot`` i32[N], ``pos`` i32[N, 1], ``valid`` f32[N, 1, 1], ``conv_rows`` i32[B+1, taps-1].
    - ``out_ids``: the last one is the last prompt token.
    - ``prompt_table``: the blocks of the prompt; ``prompt_row``: its sequence.

    Example: B = 2, T = 2, a context of 8. Sequence 0 has 3 tokens and gets 1, sequence 1 is empty and gets 2. Then
    ``pos`` is 3 0 and 0 1, ``slot`` is 3 8 64 65, and ``out_ids`` is 0 3.

    Args:
        step: The shape of the run.
        batch: The new tokens.
        taps: Taps of the convolutions of a recurrent model, else 0.
        causal: Whether tokens attend to earlier tokens only.

    Raises:
        ModelError: The batch does not fit the step.
    """
    if step.prompt_tokens:
        return _build_mixed_step_inputs(step, batch, taps)
    _require_fit(step, batch)
    shape, rows = (step.sequences, step.tokens), count_cache_rows_with_spare(step.context)
    tokens: list[int] = []
    pos: list[int] = []
    slot: list[int] = []
    for i, (new, length) in enumerate(zip(batch.tokens, batch.lengths, strict=True)):
        end, padding = length + len(new), step.tokens - len(new)
        tokens += [*new, *[0] * padding]
        pos += [*range(length, end), *[0] * padding]
        if step.blocks:
            table = batch.tables[i]
            slot += [table[at // BLOCK_KEYS] * BLOCK_KEYS + at % BLOCK_KEYS for at in range(length, end)]
            slot += [0] * padding
        else:
            first = (batch.first_sequence + i) * rows
            slot += [*range(first + length, first + end), *[first + step.context] * padding]
    arrays: dict[str, npt.NDArray[np.generic]] = {
        "tokens": np.array(tokens, np.int32),
        "pos": np.array(pos, np.int32).reshape(shape),
        "slot": np.array(slot, np.int32),
        **_build_inputs_from_new_token_counts(
            step, tuple(map(len, batch.tokens)), taps, batch.output_positions is None
        ),
    }
    if (positions := batch.output_positions) is not None:
        if bad := [(i, t) for i, t in positions if not (0 <= i < step.sequences and 0 <= t < len(batch.tokens[i]))]:
            raise ModelError(f"batch: wants the logits of {bad[0]}; need (sequence, index of one of its new tokens)")
        arrays["out_ids"] = _compute_output_rows(step, positions)
    if step.blocks:
        columns = step.table_columns
        tables = [[*blocks[:columns], *[0] * (columns - len(blocks))] for blocks in batch.tables]
        arrays["table"] = np.array(tables, np.int32)
    if not causal:
        ends = [length + len(new) - 1 for new, length in zip(batch.tokens, batch.lengths, strict=True)]
        arrays["last"] = np.repeat(np.array(ends, np.int32)[:, None], step.tokens, axis=1)
    return arrays


def _require_fit(step: Step, batch: Batch) -> None:
    if len(batch.tokens) != step.sequences or len(batch.lengths) != step.sequences:
        raise ModelError(
            f"batch: has tokens of {len(batch.tokens)} and lengths of "
            f"{format_count(len(batch.lengths), 'sequence')}, the step runs "
            f"{step.sequences}; give an idle sequence no tokens"
        )
    for i, (new, length) in enumerate(zip(batch.tokens, batch.lengths, strict=True)):
        if len(new) > step.tokens:
            raise ModelError(
                f"batch: sequence {i} has {format_count(len(new), 'new token')}, the step takes {step.tokens}; "
                "split them or use a larger step"
            )
        if step.blocks and length + len(new) > BLOCK_KEYS * len(batch.tables[i]) and new:
            raise ModelError(
                f"batch: sequence {i} would have {format_count(length + len(new), 'token')} in "
                f"{format_count(len(batch.tables[i]), 'block')} of "
                f"{format_count(BLOCK_KEYS, 'cell')}; add blocks to its table"
            )
        if length < 0 or (new and length + len(new) > step.cells):
            raise ModelError(
                f"batch: sequence {i} would grow from {length} to {format_count(length + len(new), 'token')}, "
                "the step reads "
                f"{format_count(step.cells, 'cell')}; use a step with more cells"
            )


@lru_cache(maxsize=64)
def _build_inputs_from_new_token_counts(
    step: Step, new_token_counts: tuple[int, ...], taps: int, last_only: bool
) -> Mapping[str, npt.NDArray[np.generic]]:
    """Build the graph inputs that depend only on how many new tokens each sequence has; they are cached for decoding.

    The arrays are read-only, because several runs share them.
    """
    arrays: dict[str, npt.NDArray[np.generic]] = {}
    if last_only:
        arrays["out_ids"] = _compute_output_rows(step, [(i, max(n - 1, 0)) for i, n in enumerate(new_token_counts)])
    if taps:
        column = np.array(new_token_counts, np.int32)[:, None]
        arrays["valid"] = (np.arange(step.tokens) < column).astype(np.float32)[:, :, None]
        arrays["conv_rows"] = column + np.arange(taps - 1, dtype=np.int32)
    for array in arrays.values():
        array.setflags(write=False)
    return arrays


def _compute_output_rows(step: Step, positions: Sequence[tuple[int, int]]) -> npt.NDArray[np.int32]:
    if len(positions) > step.outputs:
        raise ModelError(
            f"batch: wants {format_count(len(positions), 'row')} of logits, the step gives {step.outputs}; use "
            "a step with more outputs"
        )
    rows = [i * step.tokens + t for i, t in positions]
    return np.array([*rows, *[0] * (step.outputs - len(rows))], np.int32)
