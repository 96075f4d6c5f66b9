"""The builder of a mixed step: one new token of each of B sequences, and T prompt tokens of one of them.

Norms, products and experts read the N = B + T rows of both segments together. Attention and recurrences run for each
segment, so that a row has the bits that it has in a step of its segment alone. All rows are written to the caches
before any row attends. Sarathi-Serve (Agrawal et al., 2024) mixes steps the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from .... import ops
from ....graph import DType, Value, input
from ....ops.matrix.attention import BLOCK_KEYS
from .attention_window import FULL_WINDOW, AttentionWindow
from .graph_builder import StepGraphBuilder
from .step import PROMPT_ROW, Step, make_prompt_table_input_name


class MixedStepGraphBuilder(StepGraphBuilder):
    """Builds the graph of a mixed step, which decodes one token of several sequences and reads the prompt of another.

    All tokens are rows of one batch, except in attention and recurrences, which run for both parts separately.
    """

    def __init__(self, step: Step, *, taps: int, steered: Callable[[int, Value], Value]) -> None:
        super().__init__(step, taps=taps, steered=steered)
        self._decoding, self._prompt = _Segment(self, 0, step.sequences), _PromptSegment(self)

    def write_and_read_cache(
        self,
        name: str,
        new: Value,
        slot: Value | None = None,
        *,
        ratio: int = 1,
        attention_window: AttentionWindow = FULL_WINDOW,
        dtype: DType | None = None,
    ) -> Value:
        cells = super().write_and_read_cache(
            name, new, slot, ratio=ratio, attention_window=attention_window, dtype=dtype
        )
        heads, size = new.shape[2:]
        cache = find_state_update(self._updates, name)
        pool = ops.reshape(cache, shape=(cache.shape[0] // BLOCK_KEYS, BLOCK_KEYS, heads, size))
        self._decoding.shared_values[name], self._prompt.shared_values[name] = cells, pool
        return cells

    def _write_and_return_block_pool(self, name: str, new: Value, dtype: DType) -> Value:
        pool = super()._write_and_return_block_pool(name, new, dtype)
        self._decoding.shared_values[name] = self._prompt.shared_values[name] = pool
        return pool

    def attend_by_segment(
        self, attend: Callable[[StepGraphBuilder, Value, Value, Value], Value], q: Value, layer: int
    ) -> Value:
        results = [
            segment.attend_by_segment(attend, segment.slice_segment_rows_as_sequences(q), layer)
            for segment in (self._decoding, self._prompt)
        ]
        rows = [ops.reshape(y, shape=(y.shape[0] * y.shape[1], 1, *y.shape[2:])) for y in results]
        return ops.concat(*rows, axis=0)

    def run_mixer_by_segment(
        self, mixer: Callable[[StepGraphBuilder, Value], Value], x: Value, *, is_recurrent: bool
    ) -> Value:
        if not is_recurrent:
            return mixer(self, x)
        rows = [mixer(one, one.slice_segment_rows(x)) for one in (self._decoding, self._prompt)]
        return ops.concat(*rows, axis=0)


class _Segment(StepGraphBuilder):
    """One part of a mixed step (the decoded tokens or the prompt), seen as a step of its own over the same states.

    Args:
        whole: The mixed step.
        first: The first row.
        sequences: The number of sequences.
        tokens: Tokens of each sequence.
    """

    def __init__(self, whole: MixedStepGraphBuilder, first: int, sequences: int, tokens: int = 1) -> None:
        step = replace(whole.step, sequences=sequences, tokens=tokens, prompt_tokens=0)
        super().__init__(step, taps=whole.taps, steered=whole.steered)
        self._whole, self._first, self._updates = whole, first, whole._updates
        self.pos, self.valid = (
            self.slice_segment_rows_as_sequences(whole.pos),
            self.slice_segment_rows_as_sequences(whole.valid),
        )

    def slice_segment_rows(self, x: Value) -> Value:
        """Return the rows of this segment from the rows ``x`` [N, ...] of the mixed step."""
        return ops.slice_(x, axis=0, start=self._first, stop=self._first + self.step.padded_token_count)

    def slice_segment_rows_as_sequences(self, x: Value) -> Value:
        """Return the rows of this segment from ``x`` [N, 1, ...], reshaped to sequences [B, T, ...]."""
        return ops.reshape(self.slice_segment_rows(x), shape=(*self.step.grid, *x.shape[2:]))

    @property
    def conv_rows(self) -> Value:
        rows = self._whole.make_shared_integer_input("conv_rows", self._whole.step.sequences + 1, self.taps - 1)
        start = self._whole.step.sequences if self._first else 0
        return ops.slice_(rows, axis=0, start=start, stop=start + self.step.sequences)


class _PromptSegment(_Segment):
    """The prompt of a mixed step: one sequence, with its row of the recurrent states of all sequences."""

    def __init__(self, whole: MixedStepGraphBuilder) -> None:
        super().__init__(whole, whole.step.sequences, 1, whole.step.prompt_tokens)
        self._row = input(PROMPT_ROW, (1,), DType.I32)
        self._states: dict[Value, Value] = {}
        """The state of all sequences by the row that a mixer has of it."""

    def find_block_table(self, attention_window: AttentionWindow) -> Value:
        step = self.step
        window = attention_window.cell_lifetime_tokens
        ring = step.ring_cells(window)
        columns = -(-min(ring or step.cells, step.cells) // BLOCK_KEYS)
        return self._whole.make_shared_integer_input(make_prompt_table_input_name(window if ring else 0), 1, columns)

    def make_sequence_state(self, name: str, *shape: int) -> Value:
        """Return the row of a state f32[B, *shape] for the prompt, f32[1, *shape], after the decoded tokens."""
        rows = find_state_update(self._updates, name)
        flat = ops.reshape(rows, shape=(rows.shape[0], math.prod(shape)))
        row = ops.reshape(ops.get_rows(flat, self._row), shape=(1, *shape))
        self._states[row] = next(old for old in self._updates if old.node.name == name)
        return row

    def _set_update(self, old: Value, new: Value) -> None:
        state_of_all = self._states[old]
        rows = self._updates[state_of_all]
        flat = ops.reshape(rows, shape=(rows.shape[0], old.spec.size))
        flat = ops.set_rows(flat, ops.reshape(new, shape=(1, old.spec.size)), self._row)
        self._updates[state_of_all] = ops.reshape(flat, shape=rows.shape)


def find_state_update(updates: dict[Value, Value], name: str) -> Value:
    """Find the value in `updates` that replaces the state ``name`` at the end of the run."""
    return next(new for old, new in updates.items() if old.node.name == name)
