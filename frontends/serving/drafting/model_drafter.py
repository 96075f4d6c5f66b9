"""Drafts by a small model, which has a slot of its own for each slot of the served model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..prefix_cache import count_common_prefix_tokens
from ..slots import SlotPool, SlotStates
from .drafter import MAX_DRAFT_TOKENS, choose_draft_bucket


class DraftModelSlotPool(SlotPool):
    """The slots of a draft model.

    Ranks find a call by its class, so the draft model needs another class than the served model.
    """

    rank_label, mixes_steps = "draft model: ", False


class ModelSlotDrafter:
    """Drafts tokens for slots by a small model; see `SlotDrafter` for the members.

    Args:
        pool: The slots of the small model.
        max_tokens: Largest number of draft tokens of a slot; at most `MAX_DRAFT_TOKENS` are used.
    """

    def __init__(self, pool: SlotPool, max_tokens: int) -> None:
        self.own_pool, self.max_tokens = pool, min(max_tokens, MAX_DRAFT_TOKENS)
        self._read: list[tuple[int, ...]] = [()] * pool.slots
        """The tokens that each slot has read, without drafts."""
        self._states: dict[int, SlotStates] = {}
        """The recurrent states of each slot after these tokens, if the model has such states."""
        self._last_drafts: dict[int, tuple[tuple[int, ...], list[int]]] = {}
        """By slot the last text that got drafts, and its drafts."""

    def draft_tokens(self, known: Mapping[int, tuple[int, ...]]) -> dict[int, list[int]]:
        """Propose the most probable next tokens of some slots.

        A slot gets no drafts until the small model has read its tokens. A call reads at most one prompt chunk. A text
        that had drafts in the last call gets the same ones without a run. This happens when a run was refused, and the
        engine repeats the step for each slot alone.

        Args:
            known: All tokens of each slot.
        """
        repeated = {slot: [*self._last_drafts[slot][1]] for slot in known if self._has_drafts_of(slot, known[slot])}
        known = {slot: tokens for slot, tokens in known.items() if slot not in repeated}
        for slot, tokens in known.items():
            self._keep_common_prefix(slot, tokens)
        ready = self._read_chunk_and_select_ready_slots(known)
        if not ready:
            return repeated
        self._undo_drafts_in_recurrent_states(ready)
        rows = self.own_pool.append_tokens(
            {slot: list(known[slot][len(self._read[slot]) :]) for slot in ready},
            {slot: self._read[slot] for slot in ready},
            min_tokens=self.catch_up_bucket,
        )
        for slot in ready:
            self._record_read_tokens(slot, known[slot])
        drafts = {slot: [int(logits[-1].argmax())] for slot, logits in rows.items()}
        for _ in range(1, self.max_tokens):
            before = {slot: (*known[slot], *drafts[slot][:-1]) for slot in ready}
            for slot, logits in self.own_pool.decode({slot: drafts[slot][-1] for slot in ready}, before).items():
                drafts[slot].append(int(logits.argmax()))
        self._last_drafts |= {slot: (known[slot], drafts[slot]) for slot in ready}
        return repeated | {slot: [*tokens] for slot, tokens in drafts.items()}

    def _has_drafts_of(self, slot: int, tokens: tuple[int, ...]) -> bool:
        return slot in self._last_drafts and self._last_drafts[slot][0] == tokens

    @property
    def catch_up_bucket(self) -> int:
        """The token bucket for the tokens that a slot reads before it drafts: the most that one step can add."""
        return choose_draft_bucket(self.max_tokens)

    def _read_chunk_and_select_ready_slots(self, known: Mapping[int, tuple[int, ...]]) -> list[int]:
        """Read a prompt chunk of one slot that lacks many tokens; return the slots that lack few."""
        fitting = [slot for slot, tokens in known.items() if len(tokens) + self.max_tokens <= self.own_pool.context]
        behind = [slot for slot in fitting if len(known[slot]) - len(self._read[slot]) > self.catch_up_bucket]
        if behind:
            slot, read = behind[0], self._read[behind[0]]
            chunk = known[slot][len(read) : -1][: self.own_pool.batch]
            self._undo_drafts_in_recurrent_states([slot])
            self.own_pool.read_prompt(slot, chunk, read)
            self._record_read_tokens(slot, (*read, *chunk))
        return [slot for slot in fitting if len(known[slot]) - len(self._read[slot]) <= self.catch_up_bucket]

    def _keep_common_prefix(self, slot: int, tokens: tuple[int, ...]) -> None:
        """Forget the tokens of the small model that belong to another text. At least one token is left to read."""
        read, slack = self._read[slot], self.own_pool.droppable_last_tokens
        shared = count_common_prefix_tokens(read, tokens[:-1])
        if shared == len(read):
            return
        is_lost = self.own_pool.has_recurrent_states or (
            slack is not None and len(read) + self.max_tokens - shared > slack
        )
        if is_lost:
            self.own_pool.clear_recurrent_states(slot)
            self._states.pop(slot, None)
        self._read[slot] = () if is_lost else read[:shared]

    def _undo_drafts_in_recurrent_states(self, slots: Sequence[int]) -> None:
        """Restore the recurrent states of slots to those before the drafts of the last call."""
        for slot in slots:
            if slot in self._states:
                self.own_pool.restore_recurrent_states(slot, self._states[slot])

    def _record_read_tokens(self, slot: int, tokens: tuple[int, ...]) -> None:
        self._read[slot] = tokens
        if self.own_pool.has_recurrent_states:
            self._states[slot] = self.own_pool.save_recurrent_states(slot)

    def predict_draft_seconds(self, count: int, length: int) -> float:
        window = self.own_pool.open_window_session(0, count)
        reading = window.make_step(
            self.catch_up_bucket, min(length + self.catch_up_bucket, window.context), window.sequences
        )
        drafting = window.make_step(1, min(length + self.max_tokens, window.context), window.sequences)
        return window.plan(reading).cost.total + (self.max_tokens - 1) * window.plan(drafting).cost.total

    def compile_draft_steps(self, count: int, length: int) -> Iterator[None]:
        if length + self.catch_up_bucket <= self.own_pool.context:
            self.own_pool.compile_appending_runs(count, self.catch_up_bucket, length, reversible=False)
            yield

    def rebind_plans_and_forget_slots(self) -> None:
        """Bind all plans anew at their next use, and forget all tokens, after a failure of a device."""
        self._read, self._states, self._last_drafts = [()] * self.own_pool.slots, {}, {}
        self.own_pool.rebind_plans_and_zero_states()
