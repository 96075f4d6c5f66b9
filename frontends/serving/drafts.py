"""Drafts in batches: a small model proposes the next tokens of several slots, and one run evaluates all of them.

The engine does not know how a token was evaluated. It samples each token from the logits of the large model, so a text
is the same as without drafts, bit for bit on CPUs. If the sampled token is the next draft token of its slot, its logits
are known already, and the engine advances this slot without a run. Otherwise the rest of the drafts is dropped.

Source: Leviathan et al., 2023; `generation.speculative` does the same for one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...distributed.rank_calls import RankCalls
from ...graph.lazy_dataclass import dataclass
from ..inference.prefill_chunks import F32, next_power_of_two
from ..inference.saved_state import SavedSessionState
from ..inference.session import MIN_CONTEXT_BUCKET, Session
from .prefix_cache import count_common_prefix_tokens
from .slots import SlotPool, SlotStates
from .step_runner import choose_smallest_aligned_slot_window

MAX_DRAFT_TOKENS = 7
"""Largest number of draft tokens of a slot. Kernels round 16 and more tokens of a sequence as in a prompt."""
MAX_DRAFTED_WINDOW = 4
"""Largest window of slots that has drafts; larger batches use the processor well without them."""

MAX_PAUSE = 64
"""Largest number of tokens that a slot runs without drafts after wrong ones."""


class SlotDrafter:
    """Drafts tokens for slots by a small model, which has a slot of its own for each of them.

    Args:
        pool: The slots of the small model.
        max_tokens: Largest number of draft tokens of a slot; at most `MAX_DRAFT_TOKENS` are used.
    """

    def __init__(self, pool: SlotPool, max_tokens: int) -> None:
        self.pool, self.max_tokens = pool, min(max_tokens, MAX_DRAFT_TOKENS)
        self._read: list[tuple[int, ...]] = [()] * pool.slots
        """The tokens that each slot has read, without drafts."""
        self._states: dict[int, SlotStates] = {}
        """The recurrent states of each slot after these tokens, if the model has such states."""

    def draft_tokens(self, known: Mapping[int, tuple[int, ...]]) -> dict[int, list[int]]:
        """Propose the most probable next tokens of some slots.

        A slot gets no drafts until the small model has read its tokens. A call reads at most one prompt chunk.

        Args:
            known: All tokens of each slot.
        """
        for slot, tokens in known.items():
            self._keep_common_prefix(slot, tokens)
        ready = self._read_chunk_and_select_ready_slots(known)
        if not ready:
            return {}
        self._restore_states(ready)
        rows = self.pool.append_tokens(
            {slot: list(known[slot][len(self._read[slot]) :]) for slot in ready},
            {slot: self._read[slot] for slot in ready},
            min_tokens=self.catch_up_bucket,
        )
        for slot in ready:
            self._record_read_tokens(slot, known[slot])
        drafts = {slot: [int(logits[-1].argmax())] for slot, logits in rows.items()}
        for _ in range(1, self.max_tokens):
            before = {slot: (*known[slot], *drafts[slot][:-1]) for slot in ready}
            for slot, logits in self.pool.decode({slot: drafts[slot][-1] for slot in ready}, before).items():
                drafts[slot].append(int(logits.argmax()))
        return drafts

    @property
    def catch_up_bucket(self) -> int:
        """The bucket of the tokens that a slot reads before it drafts: all that a step can have added."""
        return next_power_of_two(self.max_tokens + 1)

    def _read_chunk_and_select_ready_slots(self, known: Mapping[int, tuple[int, ...]]) -> list[int]:
        """Read a prompt chunk of one slot that lacks many tokens; return the slots that lack few."""
        fitting = [slot for slot, tokens in known.items() if len(tokens) + self.max_tokens <= self.pool.context]
        behind = [slot for slot in fitting if len(known[slot]) - len(self._read[slot]) > self.catch_up_bucket]
        if behind:
            slot, read = behind[0], self._read[behind[0]]
            chunk = known[slot][len(read) : -1][: self.pool.batch]
            self._restore_states([slot])
            self.pool.read_prompt(slot, chunk, read)
            self._record_read_tokens(slot, (*read, *chunk))
        return [slot for slot in fitting if len(known[slot]) - len(self._read[slot]) <= self.catch_up_bucket]

    def _keep_common_prefix(self, slot: int, tokens: tuple[int, ...]) -> None:
        """Forget the tokens of the small model that belong to another text. At least one token is left to read."""
        read, slack = self._read[slot], self.pool.droppable_last_tokens
        shared = count_common_prefix_tokens(read, tokens[:-1])
        if shared == len(read):
            return
        is_lost = self.pool.has_recurrent_states or (slack is not None and len(read) + self.max_tokens - shared > slack)
        if is_lost:
            self.pool.clear_recurrent_states(slot)
            self._states.pop(slot, None)
        self._read[slot] = () if is_lost else read[:shared]

    def _restore_states(self, slots: Sequence[int]) -> None:
        """Undo the drafts of the last call in recurrent states."""
        for slot in slots:
            if slot in self._states:
                self.pool.restore_recurrent_states(slot, self._states[slot])

    def _record_read_tokens(self, slot: int, tokens: tuple[int, ...]) -> None:
        self._read[slot] = tokens
        if self.pool.has_recurrent_states:
            self._states[slot] = self.pool.save_recurrent_states(slot)

    def rebind_plans_and_forget_slots(self) -> None:
        """Bind all plans anew at their next use, and forget all tokens, after a failure of a device."""
        self._read, self._states = [()] * self.pool.slots, {}
        self.pool.rebind_plans_and_zero_states()


@dataclass(slots=True)
class EvaluatedDrafts:
    """The drafts of a slot that one run has evaluated.

    - `tokens`: a sampled token and the draft tokens after it; `logits`: f32[tokens, vocabulary], after each of them.
    - `start`: the tokens of the slot before them; `retained`: how many of them the text has so far.
    - `window`: the first slot of the window of the run, and its number of slots; `step_tokens`: its bucket of tokens.
    """

    tokens: list[int]
    logits: F32
    start: int
    window: tuple[int, int]
    step_tokens: int
    retained: int = 1


class DraftingSlotPool(SlotPool):
    """A pool of slots that evaluates draft tokens together with the sampled token of each slot.

    Before another use of a slot, its recurrent states are set to those after its last sampled token. KV caches need
    nothing: cells behind the end of a text are not read. After a step with wrong drafts alone, a slot runs without
    drafts for a number of tokens, which doubles with each such step in a row.

    Args:
        like: The session that has the weights.
        slots: Number of slots.
        context: Tokens of a slot.
        batch: Maximum prompt tokens of one run.
        drafter: Drafts tokens for as many slots.
        rank_calls: The calls that run on all ranks of `like`.
    """

    def __init__(
        self, like: Session, slots: int, *, context: int, batch: int, drafter: SlotDrafter, rank_calls: RankCalls
    ) -> None:
        super().__init__(like, slots, context=context, batch=batch, rank_calls=rank_calls)
        self._drafter = drafter
        self._evaluated: dict[int, EvaluatedDrafts] = {}
        self._wrong_steps = [0] * slots
        """Per slot the steps in a row with wrong drafts alone."""
        self._pauses = [0] * slots
        """Per slot the tokens until its next drafts."""

    @property
    def droppable_last_tokens(self) -> int | None:
        """As of `SlotPool`; rejected drafts have overwritten further cells of ring caches."""
        slack = super().droppable_last_tokens
        return None if slack is None else max(0, slack - self._drafter.max_tokens)

    @property
    def planning_seconds(self) -> float:
        """As of `SlotPool`, with the plans of the small model."""
        return super().planning_seconds + self._drafter.pool.planning_seconds

    def list_drafted_tokens(self, slot: int) -> Sequence[int]:
        """Return the draft tokens that a slot has evaluated after its last token."""
        one = self._evaluated.get(slot)
        return () if one is None else one.tokens[one.retained :]

    def decode(self, tokens: Mapping[int, int], before: Mapping[int, Sequence[int]]) -> dict[int, F32]:
        """Append a token to each given slot, and return the logits by slot; a token that was drafted needs no run."""
        taken = {slot: self._take_drafted(slot, token) for slot, token in tokens.items()}
        rows = {slot: logits for slot, logits in taken.items() if logits is not None}
        rest = {slot: token for slot, token in tokens.items() if slot not in rows}
        return rows | self._evaluate_with_drafts(rest, before) if rest else rows

    def decode_to_candidates(self, *_: object) -> None:
        """Let the engine read all logits: drafts are checked by the logits after each token."""

    def _take_drafted(self, slot: int, token: int) -> F32 | None:
        """Return the logits after `token` if it is the next draft token of a slot; it then belongs to the text."""
        if list(self.list_drafted_tokens(slot)[:1]) != [token]:
            return None
        one = self._evaluated[slot]
        one.retained += 1
        return np.asarray(one.logits[one.retained - 1])

    def _evaluate_with_drafts(self, tokens: Mapping[int, int], before: Mapping[int, Sequence[int]]) -> dict[int, F32]:
        """Run a decode step for all given slots, with drafts where there are some."""
        self._finish_drafts(*self._evaluated)
        window = choose_smallest_aligned_slot_window([*tokens])
        drafts: dict[int, list[int]] = {}
        if window[1] <= MAX_DRAFTED_WINDOW:
            asked = [slot for slot in tokens if self._is_draft_due(slot, len(before[slot]))]
            drafts = self._drafter.draft_tokens({slot: (*before[slot], tokens[slot]) for slot in asked})
        if not drafts:
            return super().decode(tokens, before)
        new = {slot: [token, *drafts.get(slot, ())] for slot, token in tokens.items()}
        bucket = self._drafter.catch_up_bucket
        rows = self.append_tokens(new, before, min_tokens=bucket, reversible=True)
        for slot in drafts:
            self._evaluated[slot] = EvaluatedDrafts(new[slot], rows[slot], len(before[slot]), window, bucket)
        return {slot: logits[0] for slot, logits in rows.items()}

    def _is_draft_due(self, slot: int, length: int) -> bool:
        """Whether a slot of `length` tokens is to have drafts now, or else count one token of its pause."""
        if self._pauses[slot]:
            self._pauses[slot] -= 1
            return False
        return length < self.context - self._drafter.max_tokens

    def _finish_drafts(self, *slots: int) -> None:
        """Drop the drafts of some slots that were not sampled, and set their recurrent states to the sampled end."""
        dropped = {slot: one for slot in slots if (one := self._evaluated.pop(slot, None)) is not None}
        for slot, one in dropped.items():
            self._wrong_steps[slot] = self._wrong_steps[slot] + 1 if one.retained == 1 else 0
            self._pauses[slot] = min(2 ** self._wrong_steps[slot] - 1, MAX_PAUSE)
        if not self.has_recurrent_states:
            return
        for slot, one in dropped.items():
            if one.retained < len(one.tokens):
                self.rewind_recurrent_states(*one.window, slot, one.step_tokens, one.retained)

    def compile_short_steps(self, report: Callable[[], object] = lambda: None) -> None:
        """Compile the steps of short texts, with and without drafts."""
        super().compile_short_steps(report)
        self._drafter.pool.compile_short_steps(report)
        for _ in self._compile_drafted_steps(1):
            report()

    def compile_longer_steps(self) -> Iterator[None]:
        """Compile the steps of longer texts, with and without drafts, and yield after each of them."""
        yield from super().compile_longer_steps()
        yield from self._drafter.pool.compile_longer_steps()
        length = MIN_CONTEXT_BUCKET
        while length < self.context:
            yield from self._compile_drafted_steps(length + 1)
            length *= 2

    def _compile_drafted_steps(self, length: int) -> Iterator[None]:
        """Compile the runs of the small and of the large model that have several tokens of a slot."""
        bucket = self._drafter.catch_up_bucket
        for count in [count for count in self._list_window_sizes() if count <= MAX_DRAFTED_WINDOW]:
            self.prepare_appending(count, bucket, length, reversible=True)
            yield
            if length + bucket <= self._drafter.pool.context:
                self._drafter.pool.prepare_appending(count, bucket, length, reversible=False)
                yield

    def read_prompt(self, slot: int, tokens: Sequence[int], before: Sequence[int]) -> F32:
        """Read prompt tokens into a slot; see `SlotPool.read_prompt`."""
        self._finish_drafts(slot)
        self._wrong_steps[slot] = self._pauses[slot] = 0
        return super().read_prompt(slot, tokens, before)

    def clear_recurrent_states(self, slot: int) -> None:
        """Zero the recurrent states of a slot before its first token; see `SlotPool.clear_recurrent_states`."""
        self._evaluated.pop(slot, None)
        super().clear_recurrent_states(slot)

    def zero_slot_states(self, slot: int) -> None:
        """Zero all states of a slot; see `SlotPool.zero_slot_states`."""
        self._evaluated.pop(slot, None)
        super().zero_slot_states(slot)

    def rebind_plans_and_zero_states(self) -> None:
        """Bind all plans anew and zero all states, also of the small model."""
        self._evaluated.clear()
        super().rebind_plans_and_zero_states()
        self._drafter.rebind_plans_and_forget_slots()

    def save_recurrent_states(self, slot: int) -> SlotStates:
        """Return a copy of the recurrent states of a slot; see `SlotPool.save_recurrent_states`."""
        self._finish_drafts(slot)
        return super().save_recurrent_states(slot)

    def restore_recurrent_states(self, slot: int, saved: SlotStates) -> None:
        """Set the recurrent states of a slot to saved ones; see `SlotPool.restore_recurrent_states`."""
        self._evaluated.pop(slot, None)
        super().restore_recurrent_states(slot, saved)

    def copy_cache_cells(self, source: int, target: int, tokens: int) -> None:
        """Copy KV-cache cells to another slot, and drop its drafts of another text; see `SlotPool.copy_cache_cells`."""
        self._evaluated.pop(target, None)
        super().copy_cache_cells(source, target, tokens)

    def capture_slot(self, slot: int, tokens: list[int], length: int) -> SavedSessionState:
        """Copy the states of a slot; see `SlotPool.capture_slot`."""
        self._finish_drafts(slot)
        return super().capture_slot(slot, tokens, length)

    def restore_slot(
        self, slot: int, header: Mapping[str, object], arrays: Mapping[str, npt.NDArray[np.generic]], path: str | Path
    ) -> tuple[list[int], int]:
        """Restore a slot from a saved state; see `SlotPool.restore_slot`."""
        self._finish_drafts(slot)
        return super().restore_slot(slot, header, arrays, str(path))
