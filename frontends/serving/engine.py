"""The engine of a model server: it schedules requests step by step, and reports events.

A caller drives the engine step by step and gives it a clock, so tests need neither threads nor sockets. A step reads a
chunk of one prompt, or decodes one token of every running request, or does both. Where a mixed step does not save time,
both kinds alternate. A chunk takes about as long as a decode step, so two tokens are at most two such steps apart.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from dataclasses import replace
from functools import partial

from ...graph.errors import HocketError, StatesLostError
from ..errors import ModelError
from ..generation.generate import EMPTY_PROMPT_ERROR
from ..inference.prefill_chunks import F32
from .prefix_cache import PrefixCache
from .requests import (
    ContextExceededError,
    EndEvent,
    EngineStatus,
    EngineTotals,
    Event,
    GenerationRequest,
    PromptProgressEvent,
    QueueFullError,
    RetainedSlotSequence,
    is_fault_of_request,
)
from .running_requests import (
    DecodeBlockRotation,
    QueuedRequest,
    RunningRequest,
    build_engine_status,
    choose_move_to_shrink_window,
    choose_token,
    decode_to_logits_or_candidates,
    gather_next_and_known_tokens,
    is_prefix_being_read,
    make_token_event,
    reserve_cells_and_select_preempted,
    start_request,
    will_repeat_decode_step,
)
from .step_history import SMOOTHING, StepHistory
from .step_runner import StepOutput, StepRunner, count_window_slots
from .step_times import StepTimes

IDLE_CHUNK_SECONDS = 1.0
"""Largest predicted seconds of a prompt chunk while no request decodes; a cancellation waits for the end of a chunk."""


class Engine:
    """Schedules generation requests over the slots of a pool, step by step. One thread makes all calls.

    Requests start in the order of their submission as soon as a slot is free. A request that fails ends alone.

    Args:
        pool: Runs the steps.
        cache: Finds the slot that shares the longest prefix with a prompt.
        queue_size: Maximum requests that wait for a slot.
        max_gap_seconds: Largest predicted time of a chunk while requests decode.
        clock: Returns the time in seconds.
        idle_chunk_seconds: Largest predicted time of a chunk while no request decodes; infinity needs no prediction.
        max_window: Largest number of slots of a decode step; a power of two, or `None` for all slots.
        fills_context: Whether a request with a full context gets the token after it, which needs no cell.
        mixes_steps: Whether a step may read a chunk and decode tokens, where this is predicted to save time.
    """

    def __init__(
        self,
        pool: StepRunner,
        cache: PrefixCache,
        *,
        queue_size: int,
        max_gap_seconds: float,
        clock: Callable[[], float],
        idle_chunk_seconds: float = IDLE_CHUNK_SECONDS,
        max_window: int | None = None,
        fills_context: bool = False,
        mixes_steps: bool = True,
    ) -> None:
        self._pool, self._cache, self._clock = pool, cache, clock
        self._queue_size, self._blocks = queue_size, DecodeBlockRotation(max_window)
        self._times = StepTimes(
            pool, max_gap_seconds=max_gap_seconds, idle_chunk_seconds=idle_chunk_seconds, mixes_steps=mixes_steps
        )
        self._max_tokens = pool.context + fills_context
        self._queue: deque[QueuedRequest] = deque()
        self._running: dict[int, RunningRequest] = {}
        self._reads_next, self._request_seconds, self._sums = True, 0.0, EngineTotals()
        self.last_end: RetainedSlotSequence | None = None
        """The sequence of the request that has ended last."""
        self._events: list[Event] = []
        """The events of a step that has not ended; after an exception `restart_and_requeue_requests` returns them."""
        self.requests_in_step: tuple[str, ...] = ()
        """The ids of the requests for which the present step works; after an exception they are to end."""
        self.failed_slots: set[int] = set()
        """The slots in which a run failed for one request alone; the caller may probe one of them and clear this."""
        self.history = StepHistory()

    # ------------------------------------------------------------------------------------------------------ orders

    def submit(self, request: GenerationRequest) -> None:
        """Submit a request to the queue, in which it waits for a free slot.

        Raises:
            QueueFullError: The queue is full.
            ContextExceededError: The prompt leaves no room for a token.
            ModelError: The prompt is empty.
        """
        self.check_request(request)
        if len(self._queue) >= self._queue_size:
            raise QueueFullError(len(self._queue), self.predict_seconds_until_queue_has_room())
        now = self._clock()
        self._queue.append(QueuedRequest(request, now))
        self.history.record_submission(request.id, now, len(request.prompt))

    def check_request(self, request: GenerationRequest) -> None:
        """Raise the errors of `submit` that do not depend on the queue; any thread may call this."""
        if not request.prompt:
            raise ModelError(EMPTY_PROMPT_ERROR)
        if len(request.prompt) >= self._pool.context:
            raise ContextExceededError(len(request.prompt), self._pool.context)

    def cancel(self, request: str) -> list[Event]:
        """Cancel the queued or running request with this id; return its last event. An unknown id has none."""
        for queued in self._queue:
            if queued.request.id == request:
                self._queue.remove(queued)
                return [self._end_queued(queued, "cancelled")]
        running = next((one for one in self._running.values() if one.request.id == request), None)
        return [] if running is None else [self._end(running, "cancelled")]

    @property
    def has_work(self) -> bool:
        """Whether a request is queued or running."""
        return bool(self._queue or self._running)

    @property
    def status(self) -> EngineStatus:
        """The present counts of slots, requests and tokens."""
        return build_engine_status(self._pool, self._cache, self._running, len(self._queue), self._sums)

    # -------------------------------------------------------------------------------------------------------- steps

    def step(self, paused: Container[str] = ()) -> list[Event]:
        """Run one step: start queued requests, then read a prompt chunk or decode one token of each running request.

        After an exception, such as `StatesLostError`, call `restart_and_requeue_requests`. An interrupt of the
        compilation needs no restart; the next step returns the events before it.

        Args:
            paused: The ids of requests that decode no token in this step.

        Returns:
            The events of the step, for the clients of the requests.
        """
        for event in self._run_step(paused):
            self._events.append(event)
        self.requests_in_step = ()
        events, self._events = self._events, []
        return events

    def _run_step(self, paused: Container[str]) -> Iterator[Event]:
        yield from self._start_queued_and_yield_cached_counts()
        reading = [one for one in self._running.values() if one.unread_tokens]
        awake = (one for one in self._running.values() if one.request.id not in paused)
        decoding = self._blocks.select_next([one for one in awake if one.next_token is not None])
        drafts = {one.slot: self._pool.list_evaluated_draft_tokens(one.slot) for one in decoding}
        if drafted := [one for one in decoding if [*drafts[one.slot][:1]] == [one.next_token]]:
            yield from self._advance_by_accepted_drafts(drafted)
            return
        if reading and (self._reads_next or not decoding):
            one = min(reading, key=lambda one: one.submitted)
            chunk = self._choose_chunk(one, decoding)
            if self._times.is_mixing_faster(one, chunk, decoding):
                yield from self._read_chunk_and_decode(one, chunk, decoding)
                return
            self._reads_next = False
            yield from self._read_chunk(one, chunk)
            return
        self._reads_next = True
        yield from self._decode(decoding)

    def restart_and_requeue_requests(self, failed_requests: Collection[str], message: str) -> list[Event]:
        """Build all plans and states anew after a failure, and return the events of the failed step.

        The failed requests end with an error. The other running requests return to the front of the queue. The tokens
        that their clients have are computed again, without events, so a text goes on as it would have.

        Args:
            failed_requests: The ids of the requests that end.
            message: The reason, for their clients.
        """
        events, self._events, self.requests_in_step = self._events, [], ()
        for queued in [queued for queued in self._queue if queued.request.id in failed_requests]:
            self._queue.remove(queued)
            events.append(self._end_queued(queued, "error", message))
        for one in sorted(self._running.values(), key=lambda one: one.submitted, reverse=True):
            if one.request.id in failed_requests:
                events.append(self._end(one, "error", message))
            else:
                self._queue.appendleft(one.requeue_with_sent_tokens())
        self._running.clear()
        self.failed_slots.clear()
        self._pool.rebind_plans_and_zero_states()
        self._cache.forget_all_slots()
        self._sums.restarts += 1
        return events

    def _start_queued_and_yield_cached_counts(self) -> Iterator[Event]:
        """Start queued requests in free slots, in order, and yield the number of cached prompt tokens of each.

        A request waits while another slot is reading a prompt that shares a long prefix with it. After that, more of
        its prompt can be copied from that slot.
        """
        for queued in tuple(self._queue):
            free = [slot for slot in range(self._pool.slots) if slot not in self._running]
            if not free:
                return
            request = queued.request
            if request.slot is not None:
                if request.slot in self._running:
                    continue
                free = [request.slot]
            self.requests_in_step = (request.id,)
            known = request.prompt if request.uses_cache else ()
            match = self._cache.find_slot_for_prompt(known, free, partial(count_window_slots, self._running))
            if request.uses_cache and is_prefix_being_read(request.prompt, match.tokens, self._running.values()):
                continue
            limit, sent = request.params.limit, len(queued.sent_tokens)
            if not self._cache.has_room_for_request(match, request.prompt, limit, sent):
                return
            self._queue.remove(queued)
            try:
                running = start_request(queued, match.target, self._clock(), match.tokens)
            except HocketError as error:
                yield replace(self._end_queued(queued, "error", str(error)), is_fault_of_request=True)
                continue
            self._running[match.target] = running
            self._cache.prepare_target_slot(match, request.prompt, request.params.limit)
            if queued.started is None:
                self._sums.prompt_tokens += len(request.prompt)
                self._sums.cached_tokens += match.tokens
            self.history.record_start(request.id, self._clock(), match.target, match.tokens)
            yield from self._report_prompt_progress(running)

    def _report_prompt_progress(self, running: RunningRequest) -> Iterator[Event]:
        """Yield the progress of a request in its prompt, unless its client knows it from an earlier start."""
        if len(running.tokens) > running.reported_tokens:
            running.reported_tokens = len(running.tokens)
            yield PromptProgressEvent(running.request.id, len(running.tokens))

    def _end_queued(self, queued: QueuedRequest, reason: str, message: str = "") -> EndEvent:
        now, request = self._clock(), queued.request
        self.history.record_end(request.id, now, reason, len(queued.sent_tokens))
        return EndEvent(request.id, reason, queued.measure_timing_and_token_counts(now), message)

    def _move_request_to_shrink_window(self, decoding: Sequence[RunningRequest]) -> None:
        """Move one request, which takes a few ms, if the decoding requests then fit into a smaller window of slots."""
        if (move := choose_move_to_shrink_window(decoding, self._running, self._pool.slots)) is not None:
            outside, target = move
            self._cache.move_running_request(outside.slot, target, len(outside.tokens))
            self._running[target] = self._running.pop(outside.slot)
            outside.slot = target

    def _choose_chunk(self, running: RunningRequest, decoding: Sequence[RunningRequest]) -> tuple[int, ...]:
        """Choose the prompt tokens that the next chunk of a request reads."""
        before, size = len(running.tokens), self._times.choose_power_of_two_chunk_size(len(decoding))
        size = self._cache.limit_chunk_to_save_position(running.slot, before, size)
        return running.request.prompt[before : before + size]

    def _read_chunk(self, running: RunningRequest, chunk: tuple[int, ...]) -> Iterator[Event]:
        self.requests_in_step = (running.request.id,)
        start, planned = self._clock(), self._pool.planning_seconds
        try:
            logits = self._pool.read_prompt(running.slot, chunk, running.tokens)
        except HocketError as error:
            self.failed_slots.add(running.slot)
            yield self._end_with_error_and_zero_slot(running, error)
            return
        seconds, planning = self._clock() - start, self._pool.planning_seconds - planned
        self._times.record_chunk(len(chunk), seconds - planning)
        self._sums.prompt_seconds += seconds
        self.history.record_step("prompt", start, seconds, [(running.request.id, len(chunk))])
        yield from self._advance_by_chunk(running, chunk, logits)

    def _advance_by_chunk(self, running: RunningRequest, chunk: tuple[int, ...], logits: F32) -> Iterator[Event]:
        running.tokens.extend(chunk)
        self._cache.record_read_tokens(running.slot, running.tokens)
        yield from self._report_prompt_progress(running)
        if running.unread_tokens:
            return
        if running.request.params.limit == 0:
            yield self._end(running, "length")
        else:
            yield from self._sample_next_token(running, logits)

    def _read_chunk_and_decode(
        self, reading: RunningRequest, chunk: tuple[int, ...], decoding: Sequence[RunningRequest]
    ) -> Iterator[Event]:
        """Run a mixed step. After an error the two kinds of step run apart, to find the request that fails."""
        decoding = self._reserve_cells_or_preempt(decoding)
        is_reading = self._running.get(reading.slot) is reading
        if not (is_reading and decoding):
            yield from self._read_chunk(reading, chunk) if is_reading else self._decode(decoding)
            return
        self._move_request_to_shrink_window(decoding)
        self.requests_in_step = (reading.request.id, *(one.request.id for one in decoding))
        start, planned = self._clock(), self._pool.planning_seconds
        try:
            tokens, before = gather_next_and_known_tokens(decoding, self._running)
            rows = self._pool.read_prompt_and_decode(reading.slot, chunk, tokens, before)
        except StatesLostError:
            raise
        except HocketError:
            yield from self._read_chunk(reading, chunk)
            yield from self._decode(decoding)
            return
        seconds, planning = self._clock() - start, self._pool.planning_seconds - planned
        self._times.record_mixed(len(chunk), len(decoding), seconds - planning)
        decode_seconds = min(seconds, self._times.get_decode_seconds(len(decoding)))
        self._sums.add_decode_step(decode_seconds)
        self._sums.prompt_seconds += seconds - decode_seconds
        counts = [(one.request.id, 1) for one in decoding]
        self.history.record_step("mixed", start, seconds, [(reading.request.id, len(chunk)), *counts])
        for one in decoding:
            yield from self._advance(one, rows[one.slot])
        yield from self._advance_by_chunk(reading, chunk, rows[reading.slot])

    def _decode(self, decoding: Sequence[RunningRequest]) -> Iterator[Event]:
        if not (decoding := self._reserve_cells_or_preempt(decoding)):
            return
        self.requests_in_step = tuple(one.request.id for one in decoding)
        self._move_request_to_shrink_window(decoding)
        start, planned = self._clock(), self._pool.planning_seconds
        try:
            is_followed = not self._queue and will_repeat_decode_step(decoding, self._running, self._max_tokens)
            rows = decode_to_logits_or_candidates(self._pool, decoding, self._running, is_followed=is_followed)
        except HocketError as error:
            yield from self._retry_decode_one_by_one(decoding, error)
            return
        seconds, planning = self._clock() - start, self._pool.planning_seconds - planned
        self._times.record_decode(len(decoding), seconds - planning)
        self._sums.add_decode_step(seconds)
        self.history.record_step("decode", start, seconds, [(one.request.id, 1) for one in decoding])
        for one in decoding:
            one.drafted_tokens += (drafted := len(self._pool.list_evaluated_draft_tokens(one.slot)))
            self._sums.add_evaluated_draft_tokens(drafted)
            yield from self._advance(one, rows[one.slot])

    def _reserve_cells_or_preempt(self, decoding: Sequence[RunningRequest]) -> list[RunningRequest]:
        """Reserve a cell for the next token of each request; without a free one, the youngest request queues again."""
        for one in reserve_cells_and_select_preempted(self._cache, self._running, decoding):
            self._queue.appendleft(self._running.pop(one.slot).requeue_with_sent_tokens())
            self._sums.preemptions += 1
        return [one for one in decoding if self._running.get(one.slot) is one]

    def _advance_by_accepted_drafts(self, drafted: Sequence[RunningRequest]) -> Iterator[Event]:
        """Advance each request by a draft token that was sampled too, so that its logits need no run."""
        self.requests_in_step, start = tuple(one.request.id for one in drafted), self._clock()
        rows = decode_to_logits_or_candidates(self._pool, drafted, self._running)
        self.history.record_step("decode", start, self._clock() - start, [(one.request.id, 1) for one in drafted])
        self._sums.accepted_tokens += len(drafted)
        for one in drafted:
            one.accepted_tokens += 1
            yield from self._advance(one, rows[one.slot])

    def _retry_decode_one_by_one(self, decoding: Sequence[RunningRequest], error: HocketError) -> Iterator[Event]:
        """Repeat a failed decode step for each request alone; only the requests that fail again end with an error."""
        if len(decoding) == 1 or isinstance(error, StatesLostError):
            self.failed_slots.add(decoding[0].slot)
            yield self._end_with_error_and_zero_slot(decoding[0], error)
            return
        for one in decoding:
            try:
                rows = decode_to_logits_or_candidates(self._pool, [one], self._running)
            except HocketError as why:
                self.failed_slots.add(one.slot)
                yield self._end_with_error_and_zero_slot(one, why)
            else:
                yield from self._advance(one, rows[one.slot])

    def _advance(self, one: RunningRequest, logits: StepOutput) -> Iterator[Event]:
        assert one.next_token is not None
        one.tokens.append(one.next_token)
        self._cache.record_decoded_length(one.slot, len(one.tokens))
        yield from self._sample_next_token(one, logits)

    def _sample_next_token(self, one: RunningRequest, logits: StepOutput) -> Iterator[Event]:
        """Sample the next token of a request from its logits or candidates, and yield the events for its client.

        The request ends at an end token, at its limit or after an error.
        """
        params, one.next_token, is_repeated = one.request.params, None, bool(one.repeated_tokens)
        try:
            token = one.repeated_tokens.popleft() if is_repeated else choose_token(one, logits)
        except HocketError as error:
            yield self._end_with_error_and_zero_slot(one, error)
            return
        if one.first_token is None:
            one.first_token = self._clock()
        if token in params.end_tokens:
            yield self._end(one, "stop")
            return
        one.new_tokens += 1
        one.context_tokens.append(token)
        if not is_repeated:
            self._sums.new_tokens += 1
            yield make_token_event(one.request, token, logits)
        try:
            is_complete = one.grammar is not None and not one.grammar.accept_token_and_can_continue(token)
        except HocketError as error:
            yield self._end_with_error_and_zero_slot(one, error)
            return
        if is_complete:
            yield self._end(one, "stop")
        elif one.new_tokens == params.limit or len(one.context_tokens) >= self._max_tokens:
            yield self._end(one, "length")
        else:
            one.next_token = token

    def _end_with_error_and_zero_slot(self, one: RunningRequest, error: HocketError) -> EndEvent:
        """End a request with an error, and zero its slot, which may hold NaN. `StatesLostError` is raised again."""
        if isinstance(error, StatesLostError):
            raise error
        self._cache.zero_and_forget_slot(one.slot)
        end = self._end(one, "error", " ".join(str(error).split()))
        return replace(end, is_fault_of_request=is_fault_of_request(error))

    def _end(self, one: RunningRequest, reason: str, message: str = "") -> EndEvent:
        now = self._clock()
        del self._running[one.slot]
        if reason != "error":
            self._cache.record_slot_contents(one.slot, one.context_tokens, len(one.tokens))
        self._request_seconds += SMOOTHING * (now - one.started - self._request_seconds)
        self._sums.finished_requests += 1
        self.last_end = RetainedSlotSequence(one.slot, one.tokens, one.context_tokens) if reason != "error" else None
        self.history.record_end(one.request.id, now, reason, one.new_tokens)
        return EndEvent(one.request.id, reason, one.measure_timing_and_token_counts(now), message)

    def predict_seconds_until_queue_has_room(self) -> float:
        """Predict the seconds until a place in the queue is free, from the mean time of a request."""
        return max(1.0, math.ceil(self._request_seconds / self._pool.slots))
