"""The engine of a model that threads share: the threads that wait for tokens run its steps in turns.

There is no thread of the engine. A thread that needs a token runs the next step, unless another thread runs one; then
it waits for the end of that step. Each step works for all requests, so the requests of several threads are one batch. A
single thread runs all steps itself. A prompt is read and tokens are decoded as in a server, so a text does not depend
on the other threads.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Container, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path

from ...graph.errors import HocketError, StatesLostError
from ...scheduler import DeferredInterrupts
from ..errors import ModelError
from ..generation.generate import GenerationParams, make_full_context_error
from ..inference.prefill_chunks import count_useful_pipeline_stages, next_power_of_two
from ..inference.saved_state import write_state_atomically
from ..inference.session import Session
from .engine import Engine
from .prefix_cache import PrefixCache
from .requests import EndEvent, Event, GenerationRequest, PromptProgressEvent, RequestTiming, TokenEvent
from .slots import SlotPool
from .step_runner import MAX_RESTARTS

MAX_AHEAD_TOKENS = 4
"""Tokens that a request may be ahead of its reader. A thread that reads slowly delays no other thread."""
MAX_WINDOW = 16
"""Largest number of sequences of a decode step; kernels of more rows may round otherwise."""
MAX_HALF_WINDOW = 4
"""The same for models with F16 or BF16 matrices: processors with AMX multiply more than 6 rows in tiles."""
MAX_GAP_SECONDS = 0.1
"""Largest predicted seconds of a prompt chunk while other requests decode."""
MAX_IDLE_SLOTS = 16
"""Number of slots that a pool keeps when few texts overlap any more."""
MIN_SHRINK_RATIO = 4
"""The slots of a pool, divided by the slots that it needs, from which on it shrinks."""
SAVED_STATE_BYTES = 1 << 28
"""Bytes of saved recurrent states in the prefix cache."""


def can_run_in_shared_engine(session: Session) -> bool:
    """Whether an engine can run the model of a session.

    It cannot run encoders, models that see all tokens at once, MTP blocks, watched values, several processes, and
    pipelines of several stages.
    """
    model = session.model
    if not model.is_causal or model.is_encoder_without_logits or model.mtp_block_count or session.watch is not None:
        return False
    return session.world.size == 1 and count_useful_pipeline_stages(session.plan(session.make_step(1, 1))) == 1


class SharedEngine:
    """The engine of a model, driven by the threads that wait for its tokens; any thread may call any member.

    The pool begins with one slot and doubles when more requests overlap, so no request waits for a slot. It shrinks
    when most slots are free.

    Args:
        root: The session that has the weights, with one sequence.
        shares_states: Whether the first slot is the sequence of `root`, instead of further memory.
    """

    def __init__(self, root: Session, *, shares_states: bool) -> None:
        self._pool = SlotPool(root, 1, context=root.context, batch=root.batch, shares_states=shares_states)
        self._cache = PrefixCache(self._pool, state_bytes=SAVED_STATE_BYTES)
        self._engine = Engine(
            self._pool,
            self._cache,
            queue_size=sys.maxsize,
            max_gap_seconds=MAX_GAP_SECONDS,
            clock=time.monotonic,
            idle_chunk_seconds=math.inf,
            max_window=MAX_HALF_WINDOW if _has_half_matrices(root) else MAX_WINDOW,
            fills_context=True,
            mixes_steps=False,
        )
        self._request_numbers = count()
        self._events_by_request: dict[str, deque[TokenEvent | EndEvent]] = {}
        self._orders: deque[partial[list[Event]]] = deque()
        """Submissions and cancellations, which the next step executes first."""
        self._step_ended = threading.Condition()
        self._is_stepping = False
        self._restarts_in_row = 0
        self.failure = ""
        """The error that has ended the engine; an empty text while it can run."""

    @property
    def session(self) -> Session:
        """The session of all slots."""
        return self._pool.all_slots_session

    def sample_with_logprobs(
        self, prompt: Sequence[int], params: GenerationParams, top_logprobs: int | None = None
    ) -> Generator[TokenEvent, None, None]:
        """Yield the tokens that continue a prompt.

        The request ends when the iterator is closed.

        Args:
            prompt: Token ids, fewer than the context.
            params: The parameters of the generation, without a context shift.
            top_logprobs: As in `GenerationRequest`.

        Raises:
            ModelError: The prompt is empty, a token or an option does not fit the model, or the context is full before
                the limit.
        """
        request = GenerationRequest(str(next(self._request_numbers)), tuple(prompt), params, top_logprobs)
        self._engine.check_request(request)
        events = self._events_by_request[request.id] = deque()
        self._orders.append(partial(self._submit_doubling_slots, request))
        is_running = True
        try:
            while True:
                event = self._wait_for_event(events)
                if isinstance(event, EndEvent):
                    is_running = False
                    self._require_good_end(event, params.limit)
                    return
                yield event
        finally:
            del self._events_by_request[request.id]
            if is_running:
                self._orders.append(partial(self._engine.cancel, request.id))

    def _require_good_end(self, end: EndEvent, limit: int) -> None:
        if end.reason == "error":
            raise ModelError(end.message)
        if end.reason == "length" and end.timing.new_tokens < limit:
            raise make_full_context_error(self._pool.context, end.timing.new_tokens)

    def _wait_for_event(self, events: deque[TokenEvent | EndEvent]) -> TokenEvent | EndEvent:
        """Wait for the next event of a request; run steps if no other thread does."""
        while not events:
            with self._step_ended:
                while self._is_stepping and not events:
                    self._step_ended.wait()
            if not events:
                with DeferredInterrupts() as interrupts:  # an interrupt ends the request of this thread only
                    self._run_step_if_free(interrupts)
        return events.popleft()

    def _run_step_if_free(self, interrupts: DeferredInterrupts) -> None:
        """Run a step and deliver its events, unless another thread runs one.

        A first interrupt can raise only during the compilation of a step, which has changed nothing. A second one may
        cut a step anywhere; this ends the engine.
        """
        if not self._try_reserve_engine():
            return
        events: list[Event] = []
        try:
            self._execute_orders(events)
            names = list(self._events_by_request)  # of keys alone: pairs could start a collection, which ends requests
            unread = ((name, self._events_by_request.get(name, ())) for name in names)
            events += self._step_or_restart_engine({name for name, ahead in unread if len(ahead) >= MAX_AHEAD_TOKENS})
            self._shrink_idle_slots()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and not interrupts.is_interrupt_pending:
                raise
            self.failure = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            events += [
                EndEvent(name, "error", RequestTiming(), f"a step of another thread failed: {self.failure}")
                for name in list(self._events_by_request)
            ]
            raise
        finally:
            self._deliver_events_and_release(events)

    def _step_or_restart_engine(self, paused: Container[str]) -> list[Event]:
        """Run a step of the engine and return its events; restart the engine if states are lost.

        Only the requests of a step that has lost the states itself end with an error.

        Raises:
            StatesLostError: As `_restart_engine`.
        """
        try:
            events = self._engine.step(paused)
        except StatesLostError as error:
            return self._restart_engine(() if error.is_of_earlier_run else self._engine.requests_in_step, error)
        if any(isinstance(event, TokenEvent) for event in events):
            self._restarts_in_row = 0
        return events

    def _restart_engine(self, failed_requests: Collection[str], error: StatesLostError) -> list[Event]:
        """Restart the engine: zero all states, end the failed requests with the error, and recompute all other texts.

        Raises:
            StatesLostError: `MAX_RESTARTS` restarts in a row were of no use, or a device may still write to the states.
        """
        self._restarts_in_row += 1
        if self._restarts_in_row > MAX_RESTARTS:
            raise error
        return self._engine.restart_and_requeue_requests(failed_requests, str(error))

    def _try_reserve_engine(self) -> bool:
        """Reserve the engine for this thread; return False if another thread has it."""
        with self._step_ended:
            if self._is_stepping:
                return False
            self._is_stepping = True
            return True

    def _deliver_events_and_release(self, events: Sequence[Event]) -> None:
        """Deliver events to the requests that are still read, and release the engine."""
        for event in events:
            if not isinstance(event, PromptProgressEvent):
                unread = self._events_by_request.get(event.request)
                if unread is not None:
                    unread.append(event)
        with self._step_ended:
            self._is_stepping = False
            self._step_ended.notify_all()

    def _execute_orders(self, events: list[Event]) -> None:
        while self._orders:
            events += self._orders.popleft()()

    def _submit_doubling_slots(self, request: GenerationRequest) -> list[Event]:
        """Submit a request; double the slots if all of them are taken.

        Raises:
            StatesLostError: As `_restart_engine`.
        """
        self._engine.submit(request)
        status, events = self._engine.status, list[Event]()
        if (needed := status.running + status.queued) > self._pool.slots:
            try:
                try:
                    self._cache.resize_to_slot_count(next_power_of_two(needed))
                except StatesLostError as lost:
                    events = self._restart_engine((), lost)
                    self._cache.resize_to_slot_count(next_power_of_two(needed))
            except StatesLostError:
                raise
            except HocketError as error:
                self._engine.cancel(request.id)
                message = f"{needed} texts at once need more memory; end some, or give a smaller context=N ({error})"
                return [*events, EndEvent(request.id, "error", RequestTiming(), message)]
        return events

    def _shrink_idle_slots(self) -> None:
        """Move the slots to less memory if most of them are free; without memory for the move they stay."""
        if self._pool.slots < MIN_SHRINK_RATIO * MAX_IDLE_SLOTS:
            return
        status, end = self._engine.status, self._engine.last_end
        used = [slot for slot, request in enumerate(status.slot_requests) if request or (end and end.slot == slot)]
        needed = next_power_of_two(max(MAX_IDLE_SLOTS, status.queued, *(slot + 1 for slot in used)))
        if MIN_SHRINK_RATIO * needed <= self._pool.slots:
            with suppress(HocketError):
                self._cache.resize_to_slot_count(needed)

    @contextmanager
    def _pause_steps(self) -> Iterator[None]:
        """Return a context in which no step runs. First wait for the end of a step, and execute all orders."""
        while not self._try_reserve_engine():
            with self._step_ended:
                self._step_ended.wait_for(lambda: not self._is_stepping)
        events: list[Event] = []
        try:
            self._execute_orders(events)
            yield
        finally:
            self._deliver_events_and_release(events)

    def save_last_sequence(self, path: str | Path) -> bool:
        """Save the tokens and states of the request that has ended last; return False if its slot is in use again.

        Raises:
            OSError: The file cannot be written.
        """
        with self._pause_steps():
            end = self._engine.last_end
            if end is None or self._engine.status.slot_requests[end.slot]:
                return False
            captured = self._pool.capture_slot(end.slot, list(end.context_tokens), len(end.tokens))
            write_state_atomically(captured, path)
            return True


def _has_half_matrices(session: Session) -> bool:
    """Whether a model has a matrix of F16 or BF16 numbers. The use of the matrix does not matter."""
    return any(
        not tensor.dtype.is_quantised and tensor.dtype.block_bytes == 2 and sum(size > 1 for size in tensor.shape) > 1
        for tensor in session.model.tensors.values()
    )
