"""Drafts by the MTP blocks of the served model itself, for several slots in one step.

An MTP block reads a token together with a row that the model has computed for the token before it. Each run returns
these rows. A slot keeps the rows of its last run, because the run may have had wrong drafts at its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ....distributed.rank_calls import RankCalls, on_all_ranks
from ....graph.lazy_dataclass import dataclass
from ...generation.speculative import draft_tokens_with_mtp, list_mtp_draft_steps
from ...inference.prefill_chunks import F32
from ...inference.session import Session
from ..slots import SlotPool
from ..step_runner import choose_smallest_aligned_slot_window
from .drafter import MAX_DRAFT_TOKENS


@dataclass(frozen=True, slots=True)
class DraftInputRows:
    """The rows that MTP blocks read with the next token of a slot: `rows` f32[tokens, columns] of its last run.

    Row 0 belongs to the token after the first `start` tokens of the slot.
    """

    start: int
    rows: F32

    def find_row(self, length: int) -> F32 | None:
        """Return the row f32[1, columns] after the first `length` tokens of the slot; None for an unknown row."""
        at = length - self.start - 1
        return self.rows[at : at + 1] if 0 <= at < len(self.rows) else None


class MtpSlotPool(SlotPool):
    """A pool of slots that keeps the rows for MTP blocks; without MTP blocks it is a `SlotPool`.

    The logits do not depend on these rows. A slot without a row, as after a restored file, gets worse drafts for a
    few tokens.

    Args:
        like: The session that has the weights.
        slots: Number of slots.
        context: Tokens of a slot.
        batch: Maximum prompt tokens of one run.
        rank_calls: The calls that run on all ranks of `like`.
    """

    mixes_steps = False  # a run with drafts has several tokens of a slot, and rows for MTP blocks

    def __init__(
        self, like: Session, slots: int, *, context: int, batch: int, rank_calls: RankCalls | None = None
    ) -> None:
        super().__init__(like, slots, context=context, batch=batch, rank_calls=rank_calls)
        self._draft_input_rows: dict[int, DraftInputRows] = {}
        """By slot the rows of its last run."""

    @on_all_ranks
    def _run_window(
        self,
        first: int,
        count: int,
        lengths: list[int],
        recent: list[list[int]],
        new: list[list[int]],
        min_tokens: int,
        reversible: bool = False,
    ) -> list[F32]:
        """Append new tokens to the slots of a window; see `SlotPool._run_window`."""
        window = self.open_window_session(first, count)
        if not window.mtp_rows:
            return super()._run_window(first, count, lengths, recent, new, min_tokens, reversible)
        window.mtp_rows = [self._find_draft_input(slot, length) for slot, length in enumerate(lengths, first)]
        logits = super()._run_window(first, count, lengths, recent, new, min_tokens, reversible)
        for i, tokens in enumerate(new):
            if tokens:
                end, rows = lengths[i] + len(tokens), window.mtp_rows[i]
                self._draft_input_rows[first + i] = DraftInputRows(end - len(rows), rows)
        return logits

    @property
    def _mtp_cache_names(self) -> list[str]:
        return [*filter(self.all_slots_session.model.is_mtp_state, self.all_slots_session.store.states)]

    def _find_draft_input(self, slot: int, length: int) -> F32:
        """Return the row f32[1, columns] that MTP blocks read after `length` tokens of a slot; zeros if not known."""
        known = self._draft_input_rows.get(slot)
        row = None if known is None else known.find_row(length)
        return np.zeros((1, self.all_slots_session.model.draft_input_columns), np.float32) if row is None else row

    @on_all_ranks
    def draft_with_mtp_blocks(
        self, first: int, count: int, lengths: list[int], tokens: list[list[int]], draft_tokens: int
    ) -> list[list[int]]:
        """Draft the next tokens of the slots of a window, and return the drafts of each slot; an idle slot has none.

        Args:
            first: The first slot of the window.
            count: Its number of slots.
            lengths: The evaluated tokens of each slot.
            tokens: The sampled token of each slot, which is not evaluated yet; none for an idle slot.
            draft_tokens: The draft tokens of a slot.
        """
        window = self.open_window_session(first, count)
        rows = np.concatenate([self._find_draft_input(slot, length) for slot, length in enumerate(lengths, first)])
        return draft_tokens_with_mtp(window, tokens, lengths, rows, draft_tokens)

    @on_all_ranks
    def compile_mtp_draft_steps(self, count: int, length: int, draft_tokens: int) -> None:
        """Compile the steps of `draft_with_mtp_blocks` for a longest slot of `length` tokens."""
        window = self.open_window_session(0, count)
        for step in list_mtp_draft_steps(window, min(length + draft_tokens, self.context), draft_tokens):
            window.executor(step)

    @on_all_ranks
    def copy_cache_cells(self, source: int, target: int, tokens: int) -> None:
        """Copy KV-cache cells to another slot, also for MTP blocks; see `SlotPool.copy_cache_cells`."""
        super().copy_cache_cells(source, target, tokens)
        store, count, rows = self.all_slots_session.store, self.all_slots_session.sequences, self._draft_input_rows
        for name in self._mtp_cache_names:
            cells = store.state(name).shape[0] // count
            store.copy_state_rows(name, source * cells, target * cells, cells)
        rows.pop(target, None)
        if source in rows and (row := rows[source].find_row(tokens)) is not None:
            rows[target] = DraftInputRows(tokens - 1, row)

    @on_all_ranks
    def rebind_plans_and_zero_states(self) -> None:
        """Bind all plans anew, and zero all states, after a failure of a device; see `SlotPool`."""
        super().rebind_plans_and_zero_states()
        self._draft_input_rows.clear()


class MtpSlotDrafter:
    """Drafts tokens for slots by the MTP blocks of the served model; see `SlotDrafter` for the members.

    Args:
        pool: The slots of the served model.
        max_tokens: Largest number of draft tokens of a slot; at most `MAX_DRAFT_TOKENS` are used.
    """

    own_pool = None

    def __init__(self, pool: MtpSlotPool, max_tokens: int) -> None:
        self.pool, self.max_tokens = pool, min(max_tokens, MAX_DRAFT_TOKENS)

    def draft_tokens(self, known: Mapping[int, tuple[int, ...]]) -> dict[int, list[int]]:
        if not known:
            return {}
        first, count = choose_smallest_aligned_slot_window([*known])
        slots = range(first, min(first + count, self.pool.slots))
        lengths = [len(known[slot]) - 1 if slot in known else 0 for slot in slots]
        tokens = [list(known[slot][-1:]) if slot in known else [] for slot in slots]
        drafts = self.pool.draft_with_mtp_blocks(first, count, lengths, tokens, self.max_tokens)
        return {slot: drafts[slot - first] for slot in known}

    def predict_draft_seconds(self, count: int, length: int) -> float:
        window = self.pool.open_window_session(0, count)
        steps = list_mtp_draft_steps(window, min(length + self.max_tokens, window.context), self.max_tokens)
        return sum(window.plan(step).cost.total for step in steps)

    def compile_draft_steps(self, count: int, length: int) -> Iterator[None]:
        self.pool.compile_mtp_draft_steps(count, length, self.max_tokens)
        yield

    def rebind_plans_and_forget_slots(self) -> None:
        """Do nothing, because the pool of the model has all plans and states."""
