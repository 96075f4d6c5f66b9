"""The windows of a serving engine: the steps of its slots, in sessions over neighbouring slots.

All states lie in one session of as many sequences as there are slots. A session over a window of neighbouring slots
runs them in the same memory. A prompt is read in the window of its slot alone, and tokens are decoded in the smallest
aligned window that has all decoding slots. A mixed step does both, in a window that has all slots of the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from ....distributed.rank_calls import RankCalls, on_all_ranks
from ...errors import ModelError
from ...inference.decoding.device_tokens import (
    TokenCandidates,
    can_choose_tokens_on_device,
    make_device_sampling_step,
    make_masked_steps,
)
from ...inference.mixed_step import evaluate_mixed_step, make_mixed_step
from ...inference.prefill_chunks import F32, next_power_of_two
from ...inference.session import MIN_CONTEXT_BUCKET, Session
from ..step_runner import CandidateNeeds, choose_smallest_aligned_slot_window, require_slot_memory
from .candidate_decoder import CandidateDecoder
from .mixed_steps import MAX_MIXED_TOKENS, MixedStepPredictor

MIN_PROMPT_TOKENS = 16
"""Smallest bucket of prompt tokens.

With fewer tokens, kernels for single tokens would compute them, with other rounding. The logits of a prompt would
then depend on how it is cut into chunks.
"""


class SlotWindows:
    """The steps of up to `slots` sequences, over the weights of a session; see `SlotPool` for the arguments."""

    mixes_steps = True
    """Whether a step may read a prompt and decode tokens."""

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
        self._mixed_steps = MixedStepPredictor()

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
        for count, size in self._list_time_saving_mixed_step_sizes():
            self._prepare_mixed_step(count, size, size)
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
            for count, size in self._list_time_saving_mixed_step_sizes():
                self._prepare_mixed_step(count, size, length + 1)
                yield
            length *= 2

    def _list_prompt_sizes(self) -> list[int]:
        largest = next_power_of_two(self.batch)
        smallest = min(MIN_PROMPT_TOKENS, largest)
        return [smallest << i for i in range((largest // smallest).bit_length())]

    def _list_window_sizes(self) -> list[int]:
        return [*(1 << i for i in range((self.slots - 1).bit_length())), self.slots]

    def _list_time_saving_mixed_step_sizes(self) -> list[tuple[int, int]]:
        """List the sizes of mixed steps that may save time, as pairs of a slot count and a prompt token count."""
        counts, sizes = self._list_window_sizes()[1:] if self.mixes_steps else [], self._list_prompt_sizes()
        return [(count, size) for count in counts for size in sizes if size <= MAX_MIXED_TOKENS]

    @on_all_ranks
    def _prepare_mixed_step(self, count: int, size: int, length: int) -> None:
        window = self.open_window_session(0, count)
        length = min(length, self.context)
        if self._mixed_steps.predict_saved_seconds(window, self.open_window_session(0, 1), size, length) > 0.0:
            window.executor(make_mixed_step(window, size, length))

    @on_all_ranks
    def _prepare_prompt(self, size: int, length: int) -> None:
        window = self.open_window_session(0, 1)
        window.executor(window.make_step(size, min(length, self.context)))

    @on_all_ranks
    def _prepare_decoding(self, count: int, length: int) -> None:
        window = self.open_window_session(0, count)
        window.executor(window.make_step(1, length, count))
        if can_choose_tokens_on_device(window):
            choices = [None] * window.sequences
            sampled_step = make_device_sampling_step(window, length, choices)
            for step in (*(sampled_step or ())[:1], *(make_masked_steps(window, length, choices) or ())):
                window.executor(step)

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

    def predict_seconds_saved_by_mixing(self, slots: Collection[int], slot: int, size: int, length: int) -> float:
        """Predict the seconds that a mixed step saves, in place of a decode step and a step of a prompt chunk.

        The result is 0 or less if a mixed step saves nothing, or would change the bits of a row.

        Args:
            slots: The decoding slots.
            slot: The slot of the prompt.
            size: The prompt tokens of the chunk.
            length: The tokens of the longest slot after the step.
        """
        if not self.mixes_steps:
            return 0.0
        _, count = choose_smallest_aligned_slot_window([*slots, slot])
        bucket = next_power_of_two(max(size, min(MIN_PROMPT_TOKENS, self.batch)))
        return self._mixed_steps.predict_saved_seconds(
            self.open_window_session(0, count), self.open_window_session(0, 1), bucket, length
        )

    def read_prompt_and_decode(
        self, slot: int, prompt: Sequence[int], tokens: Mapping[int, int], before: Mapping[int, Sequence[int]]
    ) -> dict[int, F32]:
        """Run a mixed step: read prompt tokens into a slot and append one token to each other given slot.

        The logits f32[vocabulary] by slot have the bits of `read_prompt` and of `decode`.

        Args:
            slot: The slot of the prompt.
            prompt: One batch of new prompt tokens at most.
            tokens: The new token of each other slot.
            before: The tokens that each slot has already.
        """
        first, count = choose_smallest_aligned_slot_window([*tokens, slot])
        slots = range(first, min(first + count, self.slots))
        lengths = [len(before.get(each, ())) for each in slots]
        new = [[tokens[each]] if each in tokens else [] for each in slots]
        rows = self._run_mixed_window(first, count, lengths, new, slot - first, list(prompt))
        return {each: rows[each - first][-1] for each in (*tokens, slot)}

    @on_all_ranks
    def _run_mixed_window(
        self, first: int, count: int, lengths: list[int], new: list[list[int]], sequence: int, prompt: list[int]
    ) -> list[F32]:
        window = self.open_window_session(first, count)
        window.lengths, window.recent = lengths, [[]] * len(lengths)
        padded = min(MIN_PROMPT_TOKENS, next_power_of_two(self.batch))
        return evaluate_mixed_step(window, new, sequence, prompt, min_tokens=padded)

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

    def list_evaluated_draft_tokens(self, slot: int) -> Sequence[int]:
        """Return the draft tokens that a slot has evaluated already; see `StepRunner.list_evaluated_draft_tokens`."""
        return ()

    def _select_tokens_for_n_grams(self, tokens: Sequence[int]) -> list[int]:
        """Select the last tokens of a text that models with n-gram inputs read together with the next token."""
        return list(tokens[len(tokens) - min(self._all_slots.model.ngram_history_token_count, len(tokens)) :])

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
