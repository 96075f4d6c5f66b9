"""A pool of slots that evaluates draft tokens together with the sampled tokens.

The engine does not know how a token was evaluated. It samples each token from the logits of the model, so a text is the
same as without drafts, bit for bit on CPUs. If the sampled token is the next draft token of its slot, its logits are
known already, and the engine advances this slot without a run. Otherwise the rest of the drafts is dropped.

Source: Leviathan et al., 2023; `generation.speculative` does the same for one sequence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ....distributed import RanksError
from ....distributed.rank_calls import RankCalls
from ....graph.errors import HocketError, StatesLostError
from ....graph.lazy_dataclass import dataclass
from ...inference.prefill_chunks import F32
from ...inference.saved_state import SavedSessionState
from ...inference.session import MIN_CONTEXT_BUCKET, Session
from ..slots import SlotStates
from ..step_runner import choose_smallest_aligned_slot_window
from .draft_choice import DraftSlotChooser, compute_break_even_acceptance
from .drafter import MAX_DRAFTED_WINDOW, SlotDrafter, choose_draft_bucket
from .mtp_drafter import MtpSlotPool

LOGGER = logging.getLogger("hocket.serving")


@dataclass(slots=True)
class EvaluatedDrafts:
    """The drafts of a slot that one run has evaluated, with their logits.

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


class DraftingSlotPool(MtpSlotPool):
    """A pool of slots that evaluates draft tokens together with the sampled token of each slot.

    Before another use of a slot, its recurrent states are set to those after its last sampled token. KV caches need
    nothing: cells behind the end of a text are not read.

    Args:
        like: The session that has the weights.
        slots: Number of slots.
        context: Tokens of a slot.
        batch: Maximum prompt tokens of one run.
        make_drafter: Makes the drafter of this pool.
        rank_calls: The calls that run on all ranks of `like`.
    """

    def __init__(
        self,
        like: Session,
        slots: int,
        *,
        context: int,
        batch: int,
        make_drafter: Callable[[MtpSlotPool], SlotDrafter],
        rank_calls: RankCalls | None = None,
    ) -> None:
        super().__init__(like, slots, context=context, batch=batch, rank_calls=rank_calls)
        self.drafter = make_drafter(self)
        self._evaluated: dict[int, EvaluatedDrafts] = {}
        self._choice = DraftSlotChooser(slots, self.drafter.max_tokens)
        self._break_even: dict[tuple[int, int], float] = {}
        """The break-even acceptance by the slots of the window and the context bucket."""

    @property
    def _draft_bucket(self) -> int:
        return choose_draft_bucket(self.drafter.max_tokens)

    @property
    def droppable_last_tokens(self) -> int | None:
        """Number of its last tokens that a slot can drop and still go on; see `SlotPool.droppable_last_tokens`.

        It is smaller than without drafts, because rejected drafts have overwritten further cells of ring caches.
        """
        slack = super().droppable_last_tokens
        return None if slack is None else max(0, slack - self.drafter.max_tokens)

    @property
    def planning_seconds(self) -> float:
        """The seconds since the start for plans and kernels, also of the drafter's own model."""
        own = self.drafter.own_pool
        return super().planning_seconds + (0.0 if own is None else own.planning_seconds)

    def predict_break_even_acceptance(self, count: int, length: int) -> float:
        """Predict the break-even acceptance of a step from its plans; see `compute_break_even_acceptance`.

        Args:
            count: The number of slots of the window.
            length: The tokens of the longest slot.
        """
        window, bucket = self.open_window_session(0, count), self._draft_bucket
        plain = window.make_step(1, min(length + 1, self.context), window.sequences)
        key = count, plain.cells
        if key not in self._break_even:
            verify = window.make_step(bucket, min(length + bucket, self.context), window.sequences * bucket)
            self._break_even[key] = compute_break_even_acceptance(
                window.plan(plain).cost.total,
                window.plan(replace(verify, reversible=True)).cost.total,
                self.drafter.predict_draft_seconds(count, length),
            )
        return self._break_even[key]

    def list_evaluated_draft_tokens(self, slot: int) -> Sequence[int]:
        """Return the draft tokens that a slot has evaluated after its last token."""
        one = self._evaluated.get(slot)
        return () if one is None else one.tokens[one.retained :]

    def decode(self, tokens: Mapping[int, int], before: Mapping[int, Sequence[int]]) -> dict[int, F32]:
        """Append a token to each given slot, and return the logits by slot; a token that was drafted needs no run."""
        taken = {slot: self._accept_draft_token(slot, token) for slot, token in tokens.items()}
        rows = {slot: logits for slot, logits in taken.items() if logits is not None}
        rest = {slot: token for slot, token in tokens.items() if slot not in rows}
        return rows | self._evaluate_with_drafts(rest, before) if rest else rows

    def decode_to_candidates(self, *_: object) -> None:
        """Return None, so that the engine reads all logits: drafts are checked by the logits after each token."""

    def _accept_draft_token(self, slot: int, token: int) -> F32 | None:
        """Accept `token` if it is the next draft token of a slot, and return the logits after it; else return None."""
        if list(self.list_evaluated_draft_tokens(slot)[:1]) != [token]:
            return None
        one = self._evaluated[slot]
        one.retained += 1
        return np.asarray(one.logits[one.retained - 1])

    def _evaluate_with_drafts(self, tokens: Mapping[int, int], before: Mapping[int, Sequence[int]]) -> dict[int, F32]:
        """Run a decode step for all given slots, with drafts where they are worth it."""
        self._drop_unsampled_drafts(*self._evaluated)
        window = choose_smallest_aligned_slot_window([*tokens])
        drafts: dict[int, list[int]] = {}
        if window[1] <= MAX_DRAFTED_WINDOW:
            break_even = self.predict_break_even_acceptance(window[1], max(len(before[slot]) for slot in tokens))
            room = self.context - self.drafter.max_tokens
            chosen = [slot for slot in self._choice.choose_slots(tokens, break_even) if len(before[slot]) < room]
            drafts = self._draft_where_possible({slot: (*before[slot], tokens[slot]) for slot in chosen})
        if not drafts:
            return super().decode(tokens, before)
        new = {slot: [token, *drafts.get(slot, ())] for slot, token in tokens.items()}
        rows = self.append_tokens(new, before, min_tokens=self._draft_bucket, reversible=True)
        for slot in drafts:
            self._evaluated[slot] = EvaluatedDrafts(
                new[slot], rows[slot], len(before[slot]), window, self._draft_bucket
            )
        return {slot: logits[0] for slot, logits in rows.items()}

    def _draft_where_possible(self, known: Mapping[int, tuple[int, ...]]) -> dict[int, list[int]]:
        """Draft tokens for some slots; after a failure, a slot gets no drafts until it has another text.

        Args:
            known: All tokens of each slot.

        Raises:
            StatesLostError: The states of the served model are lost.
            RanksError: A rank failed, so all ranks end.
        """
        try:
            return self.drafter.draft_tokens(known)
        except RanksError:
            raise
        except HocketError as error:
            if isinstance(error, StatesLostError):
                if self.drafter.own_pool is None:
                    raise
                self.drafter.rebind_plans_and_forget_slots()
            if len(known) > 1:
                alone = [self._draft_where_possible({slot: tokens}) for slot, tokens in known.items()]
                return {slot: drafts for found in alone for slot, drafts in found.items()}
            (slot,) = known
            self._choice.exclude_slot(slot)
            LOGGER.warning("slot %d goes on without drafts: %s", slot, " ".join(str(error).split()))
            return {}

    def _drop_unsampled_drafts(self, *slots: int) -> None:
        """Drop the drafts of some slots that were not sampled, and set their recurrent states to the sampled end."""
        dropped = {slot: one for slot in slots if (one := self._evaluated.pop(slot, None)) is not None}
        for slot, one in dropped.items():
            self._choice.record_accepted_tokens(slot, one.retained - 1)
            if self.has_recurrent_states and one.retained < len(one.tokens):
                self.rewind_recurrent_states(*one.window, slot, one.step_tokens, one.retained)

    def compile_short_steps(self, report: Callable[[], object] = lambda: None) -> None:
        """Compile the steps of short texts, with and without drafts."""
        super().compile_short_steps(report)
        if self.drafter.own_pool is not None:
            self.drafter.own_pool.compile_short_steps(report)
        for _ in self._compile_drafted_steps(1):
            report()

    def compile_longer_steps(self) -> Iterator[None]:
        """Compile the steps of longer texts, with and without drafts, and yield after each of them."""
        yield from super().compile_longer_steps()
        if self.drafter.own_pool is not None:
            yield from self.drafter.own_pool.compile_longer_steps()
        length = MIN_CONTEXT_BUCKET
        while length < self.context:
            yield from self._compile_drafted_steps(length + 1)
            length *= 2

    def _compile_drafted_steps(self, length: int) -> Iterator[None]:
        """Compile the steps with drafts after `length` tokens, in windows in which drafts can be worth their time."""
        for count in [count for count in self._list_window_sizes() if count <= MAX_DRAFTED_WINDOW]:
            if self.predict_break_even_acceptance(count, length) < self.drafter.max_tokens:
                self.compile_appending_runs(count, self._draft_bucket, length, reversible=True)
                yield
                yield from self.drafter.compile_draft_steps(count, length)

    def read_prompt(self, slot: int, tokens: Sequence[int], before: Sequence[int]) -> F32:
        """Read prompt tokens into a slot; see `SlotPool.read_prompt`."""
        self._drop_unsampled_drafts(slot)
        self._choice.forget_slot(slot)
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
        self.drafter.rebind_plans_and_forget_slots()

    def save_recurrent_states(self, slot: int) -> SlotStates:
        """Return a copy of the recurrent states of a slot; see `SlotPool.save_recurrent_states`."""
        self._drop_unsampled_drafts(slot)
        return super().save_recurrent_states(slot)

    def restore_recurrent_states(self, slot: int, saved: SlotStates) -> None:
        """Set the recurrent states of a slot to saved ones; see `SlotPool.restore_recurrent_states`."""
        self._evaluated.pop(slot, None)
        super().restore_recurrent_states(slot, saved)

    def copy_cache_cells(self, source: int, target: int, tokens: int) -> None:
        """Copy KV-cache cells to another slot, and drop its drafts of another text; see `SlotPool.copy_cache_cells`."""
        self._evaluated.pop(target, None)
        self._choice.forget_slot(target)
        super().copy_cache_cells(source, target, tokens)

    def capture_slot(self, slot: int, tokens: list[int], length: int) -> SavedSessionState:
        """Copy the states of a slot; see `SlotPool.capture_slot`."""
        self._drop_unsampled_drafts(slot)
        return super().capture_slot(slot, tokens, length)

    def restore_slot(
        self, slot: int, header: Mapping[str, object], arrays: Mapping[str, npt.NDArray[np.generic]], path: str | Path
    ) -> tuple[list[int], int]:
        """Restore a slot from a saved state; see `SlotPool.restore_slot`."""
        self._drop_unsampled_drafts(slot)
        return super().restore_slot(slot, header, arrays, str(path))
