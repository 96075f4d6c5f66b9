"""The engine of a model in its own thread, as an HTTP server uses it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from ...distributed import RanksError
from ...distributed.rank_calls import RankCalls
from ...graph.errors import HocketError, StatesLostError, format_count
from ...graph.lazy_dataclass import dataclass
from ..errors import ModelError
from ..inference.model_digest import compute_model_digest
from ..inference.saved_state import SavedSessionState
from .blocks.make_pool import make_prefix_cache, make_slot_pool
from .drafting.drafter import SlotDrafter
from .drafting.drafting_pool import DraftingSlotPool
from .drafting.model_drafter import DraftModelSlotPool, ModelSlotDrafter
from .drafting.mtp_drafter import MtpSlotDrafter, MtpSlotPool
from .engine import Engine
from .prefix_cache import PrefixCache
from .request_log import LOG_FORMAT, LoggedEngine, RequestLog
from .requests import EndEvent, EngineStatus, Event, GenerationRequest, QueueFullError, RequestTiming, TokenEvent
from .served_model import LoadedModel, ServedModel
from .slot_files import MAX_HEADER_BYTES, SlotFiles
from .slots import SlotPool
from .step_history import RequestRecord, RequestTrace
from .step_runner import MAX_RESTARTS

LOGGER = logging.getLogger("hocket.serving")
ActionResult = TypeVar("ActionResult")
HEARTBEAT_SECONDS = 1.0
"""Seconds between two heartbeats of an engine without work."""
CLOSE_POLL_SECONDS = 0.05
"""Seconds between two checks of the running requests of an engine that closes."""


@dataclass(frozen=True, slots=True)
class PendingSlotAction:
    """An action on a slot that waits until the slot is free; `future` gets its result."""

    slot: int
    run: Callable[[], None]
    future: Future[Any]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The options of a serving engine.

    - `slots`: sequences that run at once.
    - `queue_size`: requests that wait at most; 0 refuses requests while all slots are busy.
    - `max_gap_seconds`: largest predicted time of a prompt chunk while other requests decode.
    - `saved_state_bytes`: bytes of saved recurrent states in the prefix cache.
    - `pool_tokens`: cells of the KV caches that all slots share in blocks; 0 gives each slot cells for its context.
    - `reserves_whole_texts`: whether a request starts only when the pool has cells for all of its tokens.
    - `retains_contents`: whether slots of a pool keep their tokens after a request, for slot files.
    """

    slots: int = 4
    queue_size: int = 16
    max_gap_seconds: float = 0.1
    saved_state_bytes: int = 1 << 30
    pool_tokens: int = 0
    reserves_whole_texts: bool = False
    retains_contents: bool = False


class EngineThread(ServedModel):
    """Runs the engine of a model in its own thread; see `ModelService` for its members.

    Callers never wait for a step: orders (functions that the thread calls) go through a queue, and events come
    through the receiver of each request.

    Args:
        model: The model; its context is the context of each slot.
        options: The options of the engine.
        name: The name of the model for clients.
        version: The version of hocket, for the fingerprint.
        log: Receives all orders and steps, for a replay.
        on_failure: Called in the thread of the engine, with the reason, if the engine ends by an error.
        on_restart: Called in the thread of the engine, with the reason, if the engine was built anew after an error.
    """

    def __init__(
        self,
        model: LoadedModel,
        options: EngineOptions,
        *,
        name: str,
        version: str,
        log: RequestLog | None = None,
        on_failure: Callable[[str], None] = lambda why: None,
        on_restart: Callable[[str], None] = lambda why: None,
    ) -> None:
        super().__init__(model, name=name, version=version)
        self._pool = make_served_pool(model, options.slots, self.rank_calls, options.pool_tokens)
        cache = make_prefix_cache(
            self._pool,
            state_bytes=options.saved_state_bytes,
            reserves_whole_texts=options.reserves_whole_texts,
            retains_contents=options.retains_contents,
        )
        self._slot_files, self._log = SlotFiles(self._pool, cache), log
        self._max_requests = options.slots + options.queue_size
        self._engine = self._make_engine_and_log_header(cache, options)
        self._receivers: dict[str, Callable[[Event], None]] = {}
        self._receivers_lock = threading.Lock()
        self._slot_actions: list[PendingSlotAction] = []
        self._orders: SimpleQueue[Callable[[], list[Event]] | None] = SimpleQueue()
        self._preparations: Iterator[None] = self._pool.compile_longer_steps()
        self._status, self._last_beat = self._engine.status, time.monotonic()
        self._failure, self._is_closing, self._on_failure = "", False, on_failure
        self._on_restart, self._restarts_in_row = on_restart, 0
        self._is_ready = False
        self.error: BaseException | None = None
        """The exception that has ended the engine."""
        self._thread = threading.Thread(target=self._run, name="hocket-engine", daemon=True)
        self._thread.start()

    def _make_engine_and_log_header(self, cache: PrefixCache, options: EngineOptions) -> Engine:
        """Make the engine; if there is a request log, also write the header of this run to it."""
        queue_size, gap = self._max_requests, options.max_gap_seconds
        if self._log is None:
            return Engine(self._pool, cache, queue_size=queue_size, max_gap_seconds=gap, clock=time.monotonic)
        header = {
            "log": LOG_FORMAT,
            "version": self._version,
            "fingerprint": self._fingerprint,
            "model_digest": compute_model_digest(self._model.session.model),
            "time": time.time(),
            "slots": options.slots,
            "queue_size": queue_size,
            "max_gap_seconds": gap,
            "state_bytes": options.saved_state_bytes,
            "pool_tokens": options.pool_tokens,
            "reserves_whole_texts": options.reserves_whole_texts,
            "retains_contents": options.retains_contents,
        }
        self._log.write({**header, "options": self._log.model_options})
        return LoggedEngine(
            self._pool, cache, log=self._log, queue_size=queue_size, max_gap_seconds=gap, clock=time.monotonic
        )

    def explain_plans(self) -> str:
        """Explain two plans as text: a decode step with all slots, and the largest prompt chunk."""
        session = self._pool.all_slots_session
        decode = session.plan(session.make_step(1, session.context, session.sequences))
        window = self._pool.open_window_session(0, 1)
        chunk = window.plan(window.make_step(self._pool.batch, window.context))
        return (
            f"decode, {format_count(session.sequences, 'sequence')}:\n{decode.explain()}\n\n"
            f"prompt, {format_count(self._pool.batch, 'token')} of one sequence:\n{chunk.explain()}\n"
        )

    # ------------------------------------------------------------------------------------------------- the engine

    @property
    def status(self) -> EngineStatus:
        return self._status

    @property
    def is_compiled_and_ready(self) -> bool:
        return self._is_ready

    @property
    def seconds_since_heartbeat(self) -> float:
        return time.monotonic() - self._last_beat

    @property
    def engine_end_reason(self) -> str:
        return self._failure

    def submit(self, request: GenerationRequest, on_event: Callable[[Event], None]) -> None:
        self._engine.check_request(request)
        request.params.sampling.check_logit_bias_tokens(self._model.session.model.vocabulary_size)
        if request.slot is not None and not 0 <= request.slot < self._pool.slots:
            raise ModelError(f"id_slot is {request.slot}; need 0 to {self._pool.slots - 1}, or -1 for any slot")
        with self._receivers_lock:
            if self._failure or self._is_closing:
                raise ModelError(f"the engine has ended: {self._failure or 'the server shuts down'}")
            if len(self._receivers) >= self._max_requests:
                raise QueueFullError(self._status.queued, self._engine.predict_seconds_until_queue_has_room())
            if request.id in self._receivers:
                raise ModelError(f"there is a request {request.id!r:.60} already; give each its own id")
            self._receivers[request.id] = on_event
        self._orders.put(partial(self._submit, request))

    def _submit(self, request: GenerationRequest) -> list[Event]:
        try:
            self._engine.submit(request)
        except HocketError as error:
            return [EndEvent(request.id, "error", RequestTiming(), str(error))]
        return []

    def cancel(self, request: str) -> None:
        self._orders.put(lambda: self._engine.cancel(request))

    def end_service_if_device_lost(self) -> None:
        self._orders.put(self._require_no_lost_device)

    def _require_no_lost_device(self) -> list[Event]:
        self.require_no_lost_device()
        return []

    @property
    def max_slot_file_bytes(self) -> int:
        return self._pool.compute_slot_bytes_in_float32() + MAX_HEADER_BYTES

    def capture_slot(self, slot: int) -> Future[SavedSessionState]:
        return self._queue_action_for_free_slot(slot, partial(self._slot_files.capture, slot))

    def restore_slot(self, slot: int, state: SavedSessionState, path: str | Path) -> Future[int]:
        restore = partial(self._slot_files.restore, slot, state, path := Path(path).absolute())
        if isinstance(self._engine, LoggedEngine):
            restore = partial(self._engine.restore_and_log, restore, slot, str(path))
        return self._queue_action_for_free_slot(slot, restore)

    def erase_slot(self, slot: int) -> Future[int]:
        def erase() -> int:
            count = self._slot_files.erase(slot)
            if isinstance(self._engine, LoggedEngine):
                self._engine.log_erased_slot(slot)
            return count

        return self._queue_action_for_free_slot(slot, erase)

    def list_requests(self) -> list[RequestRecord]:
        return self._engine.history.list_requests()

    def trace_request_or_choices(self, name: str) -> list[RequestTrace]:
        return self._engine.history.trace_request_or_choices(name)

    def _queue_action_for_free_slot(self, slot: int, run: Callable[[], ActionResult]) -> Future[ActionResult]:
        """Queue an action that runs as soon as no request occupies `slot`, and return a future of its result."""
        future: Future[ActionResult] = Future()

        def run_action() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(run())
            except Exception as error:  # every error of the action belongs to the caller, who waits for the future
                future.set_exception(error)

        with self._receivers_lock:
            if self._failure or self._is_closing:
                raise ModelError(f"the engine has ended: {self._failure or 'the server shuts down'}")
            self._slot_actions.append(PendingSlotAction(slot, run_action, future))
        self._orders.put(list)  # an order without events wakes the engine
        return future

    def _run_actions_of_free_slots(self) -> None:
        """Run the queued actions of free slots, unless states are lost; drop cancelled actions."""
        if self._slot_actions and (why := self._pool.lost_states_reason):
            self._restart((), why, None)
        for action in tuple(self._slot_actions):
            if action.future.cancelled() or not self._engine.status.slot_requests[action.slot]:
                self._slot_actions.remove(action)
                action.run()

    def _run(self) -> None:
        try:
            self._pool.compile_short_steps(self._note_status)
            self._is_ready = True
            while self._compile_step_while_idle() or self._execute_queued_orders_unless_ended():
                self._run_step_or_restart_engine()
                self._run_actions_of_free_slots()
                self._note_status()
        except BaseException as error:  # clients must learn of any failure
            self._fail_and_refuse_all_requests(_describe_error(error))
            self.error = error
            self._on_failure(self._failure)
            return
        self._fail_and_refuse_all_requests("the server shuts down")

    def _run_step_or_restart_engine(self) -> None:
        """Run a step of the engine and send its events; build the engine anew after a failure.

        An exception ends the requests of its step, unless an earlier run had lost the states. After a run that failed
        for one request alone, that request has ended already. Then the engine is built anew only if its devices no
        longer run steps.

        Raises:
            DeviceLostError: A device refuses all further calls of this process, so a new engine would fail as well.
        """
        engine = self._engine
        try:
            events = engine.step()
        except RanksError:  # all ranks end
            raise
        except Exception as error:  # a backend may raise anything, and other requests must not end with this one
            self.require_no_lost_device()
            failed = engine.requests_in_step or {*engine.status.slot_requests}
            if isinstance(error, StatesLostError) and error.is_of_earlier_run:
                failed = ()  # this step has not begun
            self._restart(failed, _describe_error(error), error)
            return
        self._send_events(events)
        if any(isinstance(event, TokenEvent) for event in events):
            self._restarts_in_row = 0
        free = [slot for slot in engine.failed_slots if not engine.status.slot_requests[slot]]
        engine.failed_slots.clear()
        if free and not self._pool.can_still_run_steps(free[0]):
            self.require_no_lost_device()
            self._restart((), "the devices run no steps any more", None)

    def _restart(self, failed_requests: Collection[str], why: str, error: Exception | None) -> None:
        """Build the engine anew, and end the failed requests with the error `why`.

        All other requests go on.

        Raises:
            ModelError: The engine does not work after that either.
            Exception: `error`, if it has come after `MAX_RESTARTS` restarts in a row.
        """
        self._restarts_in_row += 1
        if self._restarts_in_row > MAX_RESTARTS:
            raise error or ModelError(f"{why}; the engine has failed after {MAX_RESTARTS} restarts, start it again")
        self._send_events(self._engine.restart_and_requeue_requests(failed_requests, why))
        if not self._pool.can_still_run_steps(0):
            raise ModelError(f"{why}; a new engine does not run either, start the server again")
        self._preparations = self._pool.compile_longer_steps()
        self._on_restart(why)

    def _note_status(self) -> None:
        self._status, self._last_beat = self._engine.status, time.monotonic()

    def _execute_queued_orders_unless_ended(self) -> bool:
        """Execute all orders in the queue, such as submissions; return False when the engine is to end.

        If no request is queued or running, the method waits for the first order. It never waits for further orders, so
        that `status` shows the end of the last request at once.
        """
        waits = not self._engine.has_work
        try:
            while True:
                order = self._orders.get(waits, HEARTBEAT_SECONDS if waits else None)
                if order is None:
                    return False
                self._send_events(order())
                waits = False
        except Empty:
            return True

    def _compile_step_while_idle(self) -> bool:
        """Compile one step for longer texts if the engine has nothing else to do; return whether one was compiled.

        After a failure no further steps are compiled in advance.
        """
        if self._engine.has_work or not self._orders.empty():
            return False
        try:
            for _ in self._preparations:
                return True
        except RanksError:  # all ranks end
            raise
        except Exception as error:  # a backend may raise anything; a request that needs this step gets the error
            self.require_no_lost_device()
            LOGGER.warning("steps for longer texts are not compiled in advance: %s", _describe_error(error))
            self._preparations = iter(())
        return False

    def _send_events(self, events: list[Event]) -> None:
        """Send events to the receivers of their requests; `status` counts the events before a receiver sees them.

        All receivers are looked up under one lock; then they are called without the lock.
        """
        if not events:
            return
        self._note_status()
        with self._receivers_lock:
            calls = [
                (self._receivers.pop(event.request, None), event)
                if isinstance(event, EndEvent)
                else (self._receivers.get(event.request), event)
                for event in events
            ]
        for receiver, event in calls:
            if receiver is not None:
                receiver(event)

    def _fail_and_refuse_all_requests(self, why: str) -> None:
        """End all requests with the error `why`, and refuse further requests."""
        with self._receivers_lock:
            self._failure = self._failure or why
            receivers, self._receivers = self._receivers, {}
            actions, self._slot_actions = self._slot_actions, []
        for request, receiver in receivers.items():
            receiver(EndEvent(request, "error", RequestTiming(), why))
        for action in actions:
            if action.future.set_running_or_notify_cancel():
                action.future.set_exception(ModelError(f"the engine has ended: {why}"))

    def close(self, grace_seconds: float) -> None:
        with self._receivers_lock:
            self._is_closing = True
        until = time.monotonic() + grace_seconds
        while self._receivers and time.monotonic() < until and self._thread.is_alive():
            time.sleep(CLOSE_POLL_SECONDS)
        self._orders.put(None)
        self._thread.join(max(1.0, grace_seconds))
        if self._log is not None:
            self._log.close()


def make_served_pool(model: LoadedModel, slots: int, rank_calls: RankCalls, pool_tokens: int = 0) -> SlotPool:
    """Make the pool of a served model; each slot has the context of the model. All ranks make the same pool.

    If the model has a draft model or MTP blocks, the pool evaluates drafts. `pool_tokens` is as in
    `EngineOptions`.
    """
    root, small = model.session, model.draft_session
    draft_tokens = min(model.draft_max, root.batch - 1)
    if not draft_tokens or (small is None and not root.model.mtp_block_count):
        return make_slot_pool(root, slots, pool_tokens, rank_calls)
    if pool_tokens:
        raise ModelError(
            "slots with drafts have no pool of blocks; start the server without --pool-tokens, or without drafts"
        )

    def make_drafter(pool: MtpSlotPool) -> SlotDrafter:
        if small is None:
            return MtpSlotDrafter(pool, draft_tokens)
        own = DraftModelSlotPool(small, slots, context=small.context, batch=small.batch, rank_calls=rank_calls)
        return ModelSlotDrafter(own, draft_tokens)

    return DraftingSlotPool(
        root, slots, context=root.context, batch=root.batch, make_drafter=make_drafter, rank_calls=rank_calls
    )


def list_pool_and_draft_pool(pool: SlotPool) -> list[SlotPool]:
    """List a pool from `make_served_pool`, and the pool of its draft model, if it has one."""
    own = pool.drafter.own_pool if isinstance(pool, DraftingSlotPool) else None
    return [pool] if own is None else [pool, own]


def _describe_error(error: BaseException) -> str:
    """Describe an exception in one line, by its type and its message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
