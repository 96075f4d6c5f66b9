"""The state that the endpoints of one server share: the model, its active responses, and whether the server drains."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

from starlette.requests import Request

from ..frontends.serving.requests import GenerationRequest
from ..frontends.serving.service import ModelService
from .bodies.answers import MARKERS
from .errors import ApiError
from .metrics import ServerMetrics
from .options import ServerOptions
from .requests import RequestBuilder
from .streams import AnswerStream, ChoiceFinish, EventBridge

RETRY_SECONDS = 10.0
"""The value of ``Retry-After`` while the server shuts down or its engine has failed."""
MAX_EMBEDDINGS = 64
"""Maximum embedding requests that run or wait at once."""


class ServingState:
    """The served model with its active responses. It is used in the thread of the event loop."""

    def __init__(self, service: ModelService, options: ServerOptions) -> None:
        self.service, self.options = service, options
        self.builder = RequestBuilder(service, options)
        self.metrics = ServerMetrics(service)
        self.is_draining = False
        self.active_streams: set[AnswerStream] = set()
        self.embedding_count = 0
        """Embedding requests that run or wait."""
        self.slot_locks: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        """A lock for each slot, which the present action of the slot holds."""
        self._bridge: EventBridge | None = None

    @cached_property
    def visible_control_tokens(self) -> frozenset[int]:
        """The control tokens that mark thoughts and tool calls; unlike others, their text stays in answers."""
        return frozenset(i for i, text in enumerate(self.service.tokenizer.tokens) if text in MARKERS)

    def find_reason_not_ready(self) -> str:
        """Return the reason why the server cannot generate, or an empty string."""
        if self.is_draining:
            return "the server is shutting down"
        if failure := self.service.engine_end_reason:
            return f"the engine has ended: {failure}"
        if not self.service.is_compiled_and_ready:
            return "the model is loading"
        silence = self.service.seconds_since_heartbeat
        return f"the engine has been silent for {silence:.0f} s" if silence > self.options.heartbeat_seconds else ""

    def require_ready(self) -> None:
        """Require that the server accepts requests.

        Raises:
            ApiError: The server shuts down, or its engine has failed.
        """
        if self.is_draining or self.service.engine_end_reason:
            raise ApiError(503, self.find_reason_not_ready(), retry_seconds=RETRY_SECONDS)

    def submit(
        self, requests: Sequence[GenerationRequest], stops: Sequence[str], *, shows_markers: bool = False
    ) -> AnswerStream:
        """Submit requests to the engine, and return the stream of their updates; `release` ends the stream.

        Raises:
            ApiError: The server shuts down, or its engine has failed.
            HocketError: As `AnswerStream.submit`.
        """
        self.require_ready()
        visible = self.visible_control_tokens if shows_markers else frozenset[int]()
        if self._bridge is None:
            self._bridge = EventBridge(asyncio.get_running_loop())
        stream = AnswerStream(self.service, self._bridge, self.options, requests, stops=stops, visible=visible)
        stream.submit_all_or_none()
        self.active_streams.add(stream)
        return stream

    def close_and_forget_stream(self, stream: AnswerStream) -> None:
        """Close a stream, which cancels its running requests, and remove it from the active ones."""
        self.active_streams.discard(stream)
        stream.cancel_requests_and_drop_references()

    @contextmanager
    def close_stream_at_exit(self, stream: AnswerStream) -> Iterator[AnswerStream]:
        """Return a context that closes the stream at its end."""
        try:
            yield stream
        finally:
            self.close_and_forget_stream(stream)

    @contextmanager
    def count_running_embedding(self) -> Iterator[None]:
        """Count one running embedding request in this context.

        Raises:
            ApiError: `MAX_EMBEDDINGS` requests run or wait already.
        """
        if self.embedding_count >= MAX_EMBEDDINGS:
            raise ApiError(429, f"{MAX_EMBEDDINGS} embedding requests wait already", retry_seconds=1)
        self.embedding_count += 1
        try:
            yield
        finally:
            self.embedding_count -= 1

    @property
    def is_idle(self) -> bool:
        """Whether no response is being generated."""
        return not self.active_streams and not self.embedding_count

    def begin_drain_and_end_queued(self) -> None:
        """Refuse new requests from now on, and end the responses that wait for a slot; running ones may finish."""
        self.is_draining = True
        for stream in list(self.active_streams):
            if stream.are_all_requests_queued:
                stream.end_with_error(ApiError(503, "the server is shutting down", retry_seconds=RETRY_SECONDS))

    def end_all_for_shutdown(self) -> None:
        """End all running responses with the error that the server shuts down."""
        for stream in list(self.active_streams):
            stream.end_with_error(ApiError(503, "the server is shutting down", retry_seconds=RETRY_SECONDS))

    def record_finish(self, finish: ChoiceFinish) -> None:
        """Add the times of a finished choice to the metrics."""
        self.metrics.record_timing(finish.timing, finish.token_count)


def get_serving_state(request: Request) -> ServingState:
    """Return the state of the server that received a request."""
    state: ServingState = request.app.state.serving
    return state
