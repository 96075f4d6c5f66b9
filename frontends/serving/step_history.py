"""The history of an engine: its last requests and its last steps, for the traces of single requests."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...graph.lazy_dataclass import dataclass as lazy_dataclass

MAX_STEPS = 1 << 13
"""Steps that a history keeps; a step of four requests takes about 600 bytes."""
MAX_REQUESTS = 1024
"""Requests that a history keeps."""
SMOOTHING = 0.3
"""Weight of the last measured time of a step in the running mean."""


@lazy_dataclass(frozen=True, slots=True)
class StepRecord:
    """A step of the engine.

    - `number`: the number of the step since the start of the engine.
    - `kind`: ``prompt`` (a chunk of one prompt), ``decode`` (one token of each request) or ``mixed`` (both).
    - `start`, `seconds`: its beginning by the clock of the engine, and its duration.
    - `tokens`: the ids of its requests with the number of tokens that it computed for each.
    """

    number: int
    kind: str
    start: float
    seconds: float
    tokens: tuple[tuple[str, int], ...]


@dataclass(slots=True)
class RequestRecord:
    """The course of a request; moments are seconds by the clock of the engine.

    - `started`, `ended`: `None` before the start and before the end. `reason`: as in `EndEvent`.
    - `slot`, `cached_tokens`: of the last start; `starts`: more than 1 after a restart of the engine.
    """

    id: str
    submitted: float
    prompt_tokens: int
    started: float | None = None
    ended: float | None = None
    slot: int = -1
    cached_tokens: int = 0
    new_tokens: int = 0
    starts: int = 0
    reason: str = ""


@lazy_dataclass(frozen=True, slots=True)
class RequestTrace:
    """The trace of a request: its record, and the steps that it was a part of, in order.

    `unix_offset` plus a moment of the engine is the time in seconds since 1970.
    """

    record: RequestRecord
    steps: tuple[StepRecord, ...]
    unix_offset: float


class StepHistory:
    """Keeps the last requests and the last steps of an engine. The engine writes, and any thread may read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: OrderedDict[str, RequestRecord] = OrderedDict()
        self._steps: deque[StepRecord] = deque(maxlen=MAX_STEPS)
        self._step_count = 0

    def record_submission(self, request: str, now: float, prompt_tokens: int) -> None:
        """Record a new request."""
        with self._lock:
            self._requests[request] = RequestRecord(request, now, prompt_tokens)
            if len(self._requests) > MAX_REQUESTS:
                self._requests.popitem(last=False)

    def record_start(self, request: str, now: float, slot: int, cached_tokens: int) -> None:
        """Record that a request got a slot, and how many of its prompt tokens the slot has already."""
        with self._lock:
            if record := self._requests.get(request):
                record.started = now if record.started is None else record.started
                record.slot, record.cached_tokens, record.starts = slot, cached_tokens, record.starts + 1

    def record_step(self, kind: str, start: float, seconds: float, tokens: Sequence[tuple[str, int]]) -> None:
        """Record a step; see `StepRecord` for the arguments."""
        with self._lock:
            self._steps.append(StepRecord(self._step_count, kind, start, seconds, tuple(tokens)))
            self._step_count += 1

    def record_end(self, request: str, now: float, reason: str, new_tokens: int) -> None:
        """Record the end of a request, with the number of its new tokens."""
        with self._lock:
            if record := self._requests.get(request):
                record.ended, record.reason, record.new_tokens = now, reason, new_tokens

    def list_requests(self) -> list[RequestRecord]:
        """Return copies of all records, oldest first."""
        with self._lock:
            return [replace(record) for record in self._requests.values()]

    def trace_request_or_choices(self, name: str) -> list[RequestTrace]:
        """Return the traces of the request with this id, or of all choices of the response with this id.

        The engine clock must be `time.monotonic`, or `unix_offset` has no meaning.
        """
        with self._lock:
            found = [record for id, record in self._requests.items() if name in (id, id.rpartition("-")[0])]
            records = [replace(record) for record in found]
            steps = tuple(self._steps)
        offset = time.time() - time.monotonic()
        return [
            RequestTrace(record, tuple(step for step in steps if any(record.id == id for id, _ in step.tokens)), offset)
            for record in records
        ]


def update_running_mean(means: dict[int, float], key: int, seconds: float) -> None:
    """Update the running mean of seconds of a key. The first measurement is the mean."""
    means[key] = seconds if key not in means else means[key] + SMOOTHING * (seconds - means[key])
