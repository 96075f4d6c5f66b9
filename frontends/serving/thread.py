"""The engine of a model in its own thread, as an HTTP server uses it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from queue import Empty, SimpleQueue

from ...graph.errors import HocketError
from ...graph.lazy_dataclass import dataclass
from ..errors import ModelError
from .engine import Engine
from .prefix_cache import PrefixCache
from .requests import EndEvent, EngineStatus, Event, GenerationRequest, QueueFullError, RequestTiming
from .served_model import LoadedModel, ServedModel
from .slots import SlotPool

HEARTBEAT_SECONDS = 1.0
"""Seconds between two heartbeats of an engine without work."""
CLOSE_POLL_SECONDS = 0.05
"""Seconds between two checks of the running requests of an engine that closes."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The options of a serving engine.

    - `slots`: sequences that run at once.
    - `queue_size`: requests that wait at most; 0 refuses requests while all slots are busy.
    - `max_gap_seconds`: largest predicted time of a prompt chunk while other requests decode.
    - `saved_state_bytes`: bytes of saved recurrent states in the prefix cache.
    """

    slots: int = 4
    queue_size: int = 16
    max_gap_seconds: float = 0.1
    saved_state_bytes: int = 1 << 30


class EngineThread(ServedModel):
    """Runs the engine of a model in its own thread; see `ModelService` for its members.

    Callers never wait for a step: orders (functions that the thread calls) go through a queue, and events come
    through the receiver of each request.

    Args:
        model: The model; its context is the context of each slot.
        options: The options of the engine.
        name: The name of the model for clients.
        version: The version of hocket, for the fingerprint.
        on_failure: Called in the thread of the engine, with the reason, if the engine ends by an error.
    """

    def __init__(
        self,
        model: LoadedModel,
        options: EngineOptions,
        *,
        name: str,
        version: str,
        on_failure: Callable[[str], None] = lambda why: None,
    ) -> None:
        super().__init__(model, name=name, version=version)
        root = model.session
        self._pool = SlotPool(root, options.slots, context=root.context, batch=root.batch)
        cache = PrefixCache(self._pool, state_bytes=options.saved_state_bytes)
        self._max_requests = options.slots + options.queue_size
        self._engine = Engine(
            self._pool,
            cache,
            queue_size=self._max_requests,
            max_gap_seconds=options.max_gap_seconds,
            clock=time.monotonic,
        )
        self._receivers: dict[str, Callable[[Event], None]] = {}
        self._receivers_lock = threading.Lock()
        self._orders: SimpleQueue[Callable[[], list[Event]] | None] = SimpleQueue()
        self._preparations: Iterator[None] = self._pool.compile_longer_steps()
        self._status, self._last_beat = self._engine.status, time.monotonic()
        self._failure, self._is_closing, self._on_failure = "", False, on_failure
        self._is_ready = False
        self.error: BaseException | None = None
        """The exception that has ended the engine."""
        self._thread = threading.Thread(target=self._run, name="hocket-engine", daemon=True)
        self._thread.start()

    def explain_plans(self) -> str:
        """Explain two plans as text: a decode step with all slots, and the largest prompt chunk."""
        session = self._pool.all_slots_session
        decode = session.plan(session.make_step(1, session.context, session.sequences))
        window = self._pool.open_window_session(0, 1)
        chunk = window.plan(window.make_step(self._pool.batch, window.context))
        return (
            f"decode, {session.sequences} sequences:\n{decode.explain()}\n\n"
            f"prompt, {self._pool.batch} tokens of one sequence:\n{chunk.explain()}\n"
        )

    # ------------------------------------------------------------------------------------------------- the engine

    @property
    def status(self) -> EngineStatus:
        return self._status

    @property
    def is_ready(self) -> bool:
        return self._is_ready

    @property
    def seconds_since_heartbeat(self) -> float:
        return time.monotonic() - self._last_beat

    @property
    def failure(self) -> str:
        return self._failure

    def submit(self, request: GenerationRequest, on_event: Callable[[Event], None]) -> None:
        self._engine.check_request(request)
        request.params.sampling.check(self._model.session.model.vocabulary_size)
        with self._receivers_lock:
            if self._failure or self._is_closing:
                raise ModelError(f"the engine has ended: {self._failure or 'the server shuts down'}")
            if len(self._receivers) >= self._max_requests:
                raise QueueFullError(self._status.queued, self._engine.predict_queue_seconds())
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

    def _run(self) -> None:
        try:
            self._pool.compile_short_steps(self._note_status)
            self._is_ready = True
            while self._compile_step_while_idle() or self._execute_orders():
                self._send_events(self._engine.step())
                self._note_status()
        except BaseException as error:  # clients must learn of any failure
            self._fail_all_requests(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
            self.error = error
            self._on_failure(self._failure)
            return
        self._fail_all_requests("the server shuts down")

    def _note_status(self) -> None:
        self._status, self._last_beat = self._engine.status, time.monotonic()

    def _execute_orders(self) -> bool:
        """Execute the functions in the queue, such as submissions; return False when the engine is to end.

        If no request is queued or running, this waits for the first order, but not for a second one: `status` must show
        the end of the last request at once.
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
        except HocketError:  # a request that needs this step gets the error
            self._preparations = iter(())
        return False

    def _send_events(self, events: list[Event]) -> None:
        """Send events to the receivers of their requests.

        All receivers are looked up under one lock; then they are called without the lock.
        """
        if not events:
            return
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

    def _fail_all_requests(self, why: str) -> None:
        """End all requests with the error `why`, and refuse further requests."""
        with self._receivers_lock:
            self._failure = self._failure or why
            receivers, self._receivers = self._receivers, {}
        for request, receiver in receivers.items():
            receiver(EndEvent(request, "error", RequestTiming(), why))

    def close(self, grace_seconds: float) -> None:
        with self._receivers_lock:
            self._is_closing = True
        until = time.monotonic() + grace_seconds
        while self._receivers and time.monotonic() < until and self._thread.is_alive():
            time.sleep(CLOSE_POLL_SECONDS)
        self._orders.put(None)
        self._thread.join(max(1.0, grace_seconds))
