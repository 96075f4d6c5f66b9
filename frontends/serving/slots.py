"""The slots of a serving engine: sequences of one session that run in any subset, each with its own length.

A slot is the memory of one sequence. All states lie in one session of as many sequences as there are slots. A session
over a window of neighbouring slots runs them in the same memory. A prompt is read in the window of its slot alone,
and tokens are decoded in the smallest aligned window that has all decoding slots.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ...distributed.rank_calls import RankCalls, on_all_ranks
from ..errors import ModelError
from ..inference.decoding.device_tokens import TokenCandidates, can_choose_tokens_on_device, make_sampled_step
from ..inference.prefill_chunks import F32, next_power_of_two
from ..inference.rewind import rewind_states
from ..inference.saved_state import SavedSessionState, capture_state, restore_saved_state
from ..inference.session import MIN_CONTEXT_BUCKET, Session
from .candidate_decoder import CandidateDecoder
from .step_runner import CandidateNeeds, choose_smallest_aligned_slot_window, require_slot_memory

MIN_PROMPT_TOKENS = 16
"""Smallest bucket of prompt tokens.

With fewer tokens, kernels for single tokens would compute them, with other rounding. The logits of a prompt would
then depend on how it is cut into chunks.
"""
SlotStates = Mapping[str, npt.NDArray[np.generic]]
"""The recurrent states of one slot (all states except caches), by name, as host arrays."""


class SlotPool:
    """The memory in which a server runs up to `slots` sequences, over the weights of a session.

    A slot is the place of one sequence of at most `context` tokens. Raises `ModelError` for a model without steps, and
    for more slots than the memory of the devices holds. With several ranks, all of them make the same pool. Rank 0
    makes the calls, and the other ranks follow them by `rank_calls`.

    Args:
        like: The session that has the weights.
        slots: Number of slots.
        context: Tokens of a slot.
        batch: Maximum prompt tokens of one run.
        shares_states: Whether the slots are the sequences of `like`, instead of further memory.
        rank_calls: The calls that run on all ranks of `like`.
    """

    def __init__(
        self,
        like: Session,
        slots: int,
        *,
        context: int,
        batch: int,
        shares_states: bool = False,
        rank_calls: RankCalls | None = None,
    ) -> None:
        model = like.model
        if not model.is_causal or model.is_encoder_without_logits:
            raise ModelError(f"{model.architecture} sees all tokens at once; a server generates token by token")
        self.rank_calls: RankCalls = rank_calls or RankCalls(like.world)
        self.slots, self.context = slots, context
        self.batch = min(batch, context)
        if shares_states:
            self._all_slots = like
        else:
            require_slot_memory(like, slots)
            self._all_slots = Session(model, like=like, sequences=slots, context=context, batch=self.batch)
        self._opening_seconds = 0.0
        self._windows: dict[tuple[int, int], Session] = {}
        self._candidate_decoder = CandidateDecoder()
        self._state_names = self._all_slots.state_names
        self._caches = tuple(name for name in self._state_names if self._all_slots.is_per_cell_cache(name))
        self._rings = tuple(
            name for name in self._caches if self._all_slots.cell_count(name) * model.tokens_per_cell(name) < context
        )

    @property
    def has_recurrent_states(self) -> bool:
        """Whether a slot has recurrent states, which exist only for its last token.

        A shorter prefix can then be reused only from a saved copy of the states.
        """
        return len(self._caches) < len(self._state_names)

    @property
    def droppable_last_tokens(self) -> int | None:
        """Number of its last tokens that a slot can drop and still go on from the remaining ones.

        Ring caches limit it, because they overwrite old cells; None without ring caches.
        """
        return next_power_of_two(self.batch) if self._rings else None

    @property
    def all_slots_session(self) -> Session:
        """The session over all slots."""
        return self._all_slots

    def open_window_session(self, first: int, count: int) -> Session:
        """Return the session that runs a window: `count` consecutive slots from slot `first` on.

        The first call opens the session. A window that passes the last slot has fewer slots.
        """
        key = first, min(count, self.slots - first)
        if key not in self._windows:
            self._add_window(*key)
        return self._windows[key]

    @on_all_ranks
    def _add_window(self, first: int, count: int) -> None:
        start = time.perf_counter()
        self._windows[first, count] = Session(
            self._all_slots.model,
            like=self._all_slots,
            first_sequence=first,
            sequences=count,
            context=self.context,
            batch=self.batch,
        )
        self._opening_seconds += time.perf_counter() - start

    @property
    def planning_seconds(self) -> float:
        """The seconds since the start in which windows were opened, and plans and kernels were built."""
        return self._opening_seconds + sum(window.planning_seconds for window in self._windows.values())

    def predict_prompt_seconds(self, size: int) -> float:
        """Return the predicted seconds of a prompt chunk of `size` tokens, from its plan. The chunk begins a slot."""
        window, tokens = self.open_window_session(0, 1), min(size, next_power_of_two(self.batch))
        return window.plan(window.make_step(tokens, min(tokens, self.context))).cost.total

    def compile_short_steps(self, report: Callable[[], object] = lambda: None) -> None:
        """Compile the steps of short texts in advance, so that no request waits for a plan or a kernel.

        There is a step for every bucket of prompt tokens, and one for every number of sequences.

        Args:
            report: Called after each step, because all steps together may take minutes.
        """
        for size in self._list_prompt_sizes():
            self._prepare_prompt(size, size)
            report()
        for count in self._list_window_sizes():
            self._prepare_decoding(count, 1)
            report()

    def compile_longer_steps(self) -> Iterator[None]:
        """Compile the steps of longer texts in advance, shorter ones first, and yield after each of them.

        Otherwise the first text that reaches a new context bucket waits for its plan and kernels, and all other
        requests wait with it.
        """
        length = MIN_CONTEXT_BUCKET
        while length < self.context:
            for count in self._list_window_sizes():
                self._prepare_decoding(count, length + 1)
                yield
            for size in self._list_prompt_sizes():
                if size <= length:
                    self._prepare_prompt(size, length + 1)
                    yield
            length *= 2

    def _list_prompt_sizes(self) -> list[int]:
        largest = next_power_of_two(self.batch)
        smallest = min(MIN_PROMPT_TOKENS, largest)
        return [smallest << i for i in range((largest // smallest).bit_length())]

    def _list_window_sizes(self) -> list[int]:
        return [*(1 << i for i in range((self.slots - 1).bit_length())), self.slots]

    @on_all_ranks
    def _prepare_prompt(self, size: int, length: int) -> None:
        window = self.open_window_session(0, 1)
        window.executor(window.make_step(size, min(length, self.context)))

    @on_all_ranks
    def _prepare_decoding(self, count: int, length: int) -> None:
        window = self.open_window_session(0, count)
        window.executor(window.make_step(1, length, count))
        if can_choose_tokens_on_device(window) and (sampled_step := make_sampled_step(window, length, [None] * count)):
            window.executor(sampled_step[0])

    @on_all_ranks
    def compile_appending_runs(self, count: int, tokens: int, length: int, *, reversible: bool) -> None:
        """Compile runs of `append_tokens` in a window.

        Args:
            count: The number of slots of the window.
            tokens: The bucket of new tokens.
            length: The tokens of the longest slot before the run.
            reversible: As in `append_tokens`.
        """
        window = self.open_window_session(0, count)
        window.lengths = [0] * window.sequences
        window.compile_plans_for_tokens(
            tokens, behind=min(length, self.context - tokens), every_position=reversible, reversible=reversible
        )

    def read_prompt(self, slot: int, tokens: Sequence[int], before: Sequence[int]) -> F32:
        """Read prompt tokens into a slot, after its tokens, and return the logits after the last one, f32[vocabulary].

        Args:
            slot: Number of the slot.
            tokens: One batch of new tokens at most.
            before: The tokens that the slot has already.
        """
        padded = min(MIN_PROMPT_TOKENS, next_power_of_two(self.batch))
        recent = [self._select_tokens_for_n_grams(before)]
        return self._run_window(slot, 1, [len(before)], recent, [list(tokens)], padded)[0][-1]

    def decode(self, tokens: Mapping[int, int], before: Mapping[int, Sequence[int]]) -> dict[int, F32]:
        """Run one decode step: append a token to each given slot, and return the logits f32[vocabulary] by slot.

        Args:
            tokens: The new token of each slot.
            before: The tokens that each slot has already.
        """
        rows = self.append_tokens({slot: [token] for slot, token in tokens.items()}, before)
        return {slot: logits[-1] for slot, logits in rows.items()}

    def append_tokens(
        self,
        tokens: Mapping[int, list[int]],
        before: Mapping[int, Sequence[int]],
        *,
        min_tokens: int = 1,
        reversible: bool = False,
    ) -> dict[int, F32]:
        """Append tokens to each given slot in one run.

        Args:
            tokens: The new tokens of each slot, one batch at most.
            before: The tokens that each slot has already.
            min_tokens: The smallest bucket of new tokens.
            reversible: Return the logits after each token, and save the recurrent states after each one.

        Returns:
            The logits by slot: f32[tokens, vocabulary] if `reversible` is set, else f32[1, vocabulary].
        """
        first, count = choose_smallest_aligned_slot_window([*tokens])
        slots = range(first, min(first + count, self.slots))
        known = [before.get(slot, ()) for slot in slots]
        new = [tokens.get(slot, []) for slot in slots]
        recent = [*map(self._select_tokens_for_n_grams, known)]
        rows = self._run_window(first, count, [*map(len, known)], recent, new, min_tokens, reversible)
        return {slot: rows[slot - first] for slot in tokens}

    def list_drafted_tokens(self, slot: int) -> Sequence[int]:
        """Return the next tokens of a slot that are evaluated already; see `StepRunner.list_drafted_tokens`."""
        return ()

    def _select_tokens_for_n_grams(self, tokens: Sequence[int]) -> list[int]:
        """Return the last tokens of a text that the next token depends on directly, as in n-gram models."""
        return list(tokens[len(tokens) - min(self._all_slots.model.history_token_count, len(tokens)) :])

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
        """Append new tokens to the slots of a window, and return the logits of each slot; none for an idle slot.

        Args:
            first: The first slot of the window.
            count: Its number of slots.
            lengths: The tokens that each slot has.
            recent: The last ones of them, as in `Session.recent`.
            new: The new tokens of each slot; none for an idle slot.
            min_tokens: The smallest bucket of new tokens.
            reversible: As in `append_tokens`.
        """
        window = self.open_window_session(first, count)
        window.lengths, window.recent, window.min_tokens = lengths, recent, min_tokens
        try:
            return window.evaluate(new, every_position=reversible, reversible=reversible)
        finally:
            window.min_tokens = 1

    def decode_to_candidates(
        self,
        tokens: Mapping[int, int],
        before: Mapping[int, Sequence[int]],
        needs: Mapping[int, CandidateNeeds],
        is_followed: bool,
    ) -> dict[int, TokenCandidates] | None:
        """Run one decode step as `decode`, in which the device selects candidates; see `CandidateDecoder.decode`."""
        first, count = choose_smallest_aligned_slot_window([*tokens])
        window = self.open_window_session(first, count)
        return self._candidate_decoder.decode(window, first, tokens, before, needs, is_followed=is_followed)

    def compute_slot_bytes_in_float32(self) -> int:
        """Compute the bytes of all states of one slot in float32, the largest size in a file."""
        store = self.open_window_session(0, 1).store
        return sum(4 * math.prod(store.state(name).shape) for name in self._state_names)

    @on_all_ranks
    def clear_recurrent_states(self, slot: int) -> None:
        """Zero the recurrent states of a slot before its first token; caches stay."""
        for name in self._state_names:
            if name not in self._caches:
                self._all_slots.store.state(name)[slot : slot + 1] = 0

    @on_all_ranks
    def zero_slot_states(self, slot: int) -> None:
        """Zero all states of a slot, including caches, after a run that may have left NaN or infinite numbers."""
        window = self.open_window_session(slot, 1)
        window.lengths = [self.context]
        window.reset(0)

    @on_all_ranks
    def rebind_plans_and_zero_states(self) -> None:
        """Bind all plans anew at their next use, and zero the states of all slots, after a failure of a device."""
        self._opening_seconds = self.planning_seconds
        self._windows.clear()
        for name in self._state_names:
            self._all_slots.store.state(name)[:] = 0

    def can_still_run_steps(self, slot: int) -> bool:
        """Whether the devices still run steps, by a prompt of one token in a free slot, which is empty afterwards."""
        try:
            self.zero_slot_states(slot)
            self.read_prompt(slot, [0], [])
            self.zero_slot_states(slot)
        except Exception:  # a broken backend may raise anything, and then the engine is built anew
            return False
        return True

    @on_all_ranks
    def rewind_recurrent_states(self, first: int, count: int, slot: int, step_tokens: int, retained: int) -> None:
        """Set the recurrent states of a slot to those after the first tokens of a reversible run of `append_tokens`.

        Args:
            first: The first slot of the window that has run.
            count: The number of slots of the window.
            slot: The slot.
            step_tokens: The bucket of tokens of the run.
            retained: How many of its tokens the slot keeps.
        """
        rewind_states(self.open_window_session(first, count), step_tokens, {slot - first: retained})

    @on_all_ranks
    def save_recurrent_states(self, slot: int) -> SlotStates:
        """Return a copy of the recurrent states of a slot. Its caches are left out."""
        names = (name for name in self._state_names if name not in self._caches)
        return {name: self.open_window_session(slot, 1).store.state(name)[:] for name in names}

    @on_all_ranks
    def restore_recurrent_states(self, slot: int, saved: SlotStates) -> None:
        """Set the recurrent states of a slot to saved ones. Its caches stay."""
        for name, array in saved.items():
            self.open_window_session(slot, 1).store.state(name)[:] = array

    @on_all_ranks
    def copy_cache_cells(self, source: int, target: int, tokens: int) -> None:
        """Copy the KV-cache cells of the first `tokens` tokens of a slot to another slot; ring caches as a whole."""
        store, count = self._all_slots.store, self._all_slots.sequences
        for name in self._caches:
            rows = store.state(name).shape[0] // count
            per_cell = self._all_slots.model.tokens_per_cell(name)
            used = rows if name in self._rings else min(rows, -(-tokens // per_cell))
            store.copy_state_rows(name, source * rows, target * rows, used)

    @on_all_ranks
    def capture_slot(self, slot: int, tokens: list[int], length: int) -> SavedSessionState:
        """Copy the states of a slot that has evaluated the first `length` of `tokens`."""
        window = self.open_window_session(slot, 1)
        window.lengths, window.recent = [length], [self._select_tokens_for_n_grams(tokens[:length])]
        return capture_state(window, [tokens])

    @on_all_ranks
    def restore_slot(
        self, slot: int, header: Mapping[str, object], arrays: Mapping[str, npt.NDArray[np.generic]], path: str
    ) -> tuple[list[int], int]:
        """Restore a slot from a saved state, and return its tokens and the number of evaluated ones.

        Args:
            slot: Number of the slot; it is unchanged after an error.
            header: The header of the state.
            arrays: Its arrays.
            path: The file, for messages.

        Raises:
            ModelError: The state is of another model, or does not fit the context.
        """
        window = self.open_window_session(slot, 1)
        window.lengths, window.recent = [0], [[]]
        (tokens,) = restore_saved_state(window, SavedSessionState(header, arrays), path)
        return tokens, window.lengths[0]

    def resize_to_slot_count(self, slots: int, lengths: Sequence[int]) -> None:
        """Move the first slots to memory of `slots` slots, with their states.

        Args:
            slots: The new number of slots.
            lengths: Tokens of each slot that is moved; the cells of these tokens are copied.

        Raises:
            ModelError: The states of all slots are larger than the memory of the devices.
        """
        old, model = self._all_slots, self._all_slots.model
        require_slot_memory(old, slots)
        new = Session(model, like=old, sequences=slots, context=self.context, batch=self.batch)
        with old.store.device_lock:
            for name in self._state_names:
                source, target = old.store.state(name), new.store.state(name)
                rows = source.shape[0] // old.sequences
                per_cell = model.tokens_per_cell(name) if name in self._caches else 1
                for slot, tokens in enumerate(lengths):
                    is_partial = name in self._caches and name not in self._rings
                    used = min(rows, -(-tokens // per_cell)) if is_partial else rows
                    for number, part in source.parts.items():
                        cells = slice(slot * rows, slot * rows + used)
                        target.parts[number].memory_view[cells] = part.memory_view[cells]
        self._opening_seconds = self.planning_seconds
        self._windows.clear()
        self._candidate_decoder = CandidateDecoder()  # the last one refers to the old memory
        self._all_slots, self.slots = new, slots

    def compute_recurrent_state_bytes(self) -> int:
        """Compute the bytes of the recurrent states of one slot, without its caches."""
        store = self.open_window_session(0, 1).store
        return sum(store.state(name).spec.nbytes for name in self._state_names if name not in self._caches)
