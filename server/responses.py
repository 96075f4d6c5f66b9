"""HTTP responses: JSON bodies, server-sent events, and cancellation after a disconnect of the client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .bodies.schemas import Body, decode_body
from .errors import ApiError, as_api_error
from .state import ServingState
from .streams import AnswerStream, ChoiceFinish, CompleteText, Update, read_complete_texts

Output = TypeVar("Output")
PING = b": ping\n\n"
"""Comment that keeps a silent stream open, for most APIs."""
DONE = b"data: [DONE]\n\n"
REQUEST_HEADER = "X-Hocket-Request"
"""Header with the id of the answer, for ``/requests/ID/trace``."""
IGNORED_HEADER = "X-Hocket-Ignored"
"""Header that lists ignored fields of the body."""
JSON_ENCODER = msgspec.json.Encoder()


class JsonResponse(Response):
    """An HTTP response with a JSON body."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        """Encode the content as JSON."""
        return JSON_ENCODER.encode(content)


async def read_body(request: Request, body_type: type[Body]) -> tuple[Body, dict[str, str]]:
    """Decode the body of a request, and return it with the headers that name its ignored fields.

    Raises:
        ApiError: The body does not match the schema.
    """
    body, ignored = decode_body(await request.body(), body_type)
    headers: dict[str, str] = {}
    add_ignored_fields(headers, ignored)
    return body, headers


def add_ignored_fields(headers: dict[str, str], names: Iterable[str]) -> None:
    """Add field names to the header of ignored fields."""
    if joined := ", ".join(filter(None, [headers.get(IGNORED_HEADER), *names])):
        headers[IGNORED_HEADER] = joined.encode("unicode_escape").decode()


def format_event(data: object, event: str = "") -> bytes:
    """Format a JSON value as a server-sent event."""
    head = f"event: {event}\n".encode() if event else b""
    return head + b"data: " + JSON_ENCODER.encode(data) + b"\n\n"


class UpdateFormatter(Protocol):
    """The interface of formatters, which format the updates of a stream as server-sent events of one API.

    `ping` is an event without content, which keeps a silent stream open.
    """

    ping: bytes

    def format_updates(self, updates: Sequence[Update]) -> bytes:
        """Format updates as server-sent events."""

    def format_end(self) -> bytes:
        """Format the last events of the stream, after all choices have ended."""

    def format_stream_ending_error(self, error: ApiError) -> bytes:
        """Format an error as the event that ends the stream."""


class EventStream(Response):
    """A response that streams an answer as server-sent events.

    It cancels the answer if the client disconnects or stops reading.
    """

    def __init__(
        self, state: ServingState, stream: AnswerStream, formatter: UpdateFormatter, headers: Mapping[str, str]
    ) -> None:
        super().__init__(
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no", **headers},
            media_type="text/event-stream; charset=utf-8",
        )
        del self.headers["content-length"]
        self._state, self._stream, self._formatter = state, stream, formatter
        self._loop = asyncio.get_running_loop()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until all choices have ended."""
        with self._state.close_stream_at_exit(self._stream):
            worker = asyncio.ensure_future(self._send_all(send))
            self._stream.on_stall = worker.cancel
            await _run_or_return_empty_on_disconnect(receive, worker)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for updates in self._stream.read_updates_with_pings():
                chunk = self._formatter.format_updates(updates) if updates else self._formatter.ping
                for update in updates:
                    if isinstance(update, ChoiceFinish):
                        self._state.record_finish(update)
                if chunk:
                    await self._send(send, chunk)
            last = self._formatter.format_end()
        except Exception as error:  # the stream has begun, so the client gets every error as its last event
            last = self._formatter.format_stream_ending_error(as_api_error(error))
        await self._send(send, last)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, chunk: bytes) -> None:
        self._stream.sending_since = self._loop.time()
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
        self._stream.sending_since = None


async def respond_as_stream_or_json(
    state: ServingState,
    request: Request,
    stream: AnswerStream,
    formatter: UpdateFormatter,
    build_body: Callable[[Sequence[CompleteText]], object],
    *,
    count: int,
    is_streamed: bool,
    headers: Mapping[str, str],
) -> Response:
    """Return the response of submitted requests: a stream of events, or one JSON object after all choices have ended.

    Args:
        state: The state of the server.
        request: The request of the client.
        stream: The updates of the engine.
        formatter: Formats events.
        build_body: Builds the JSON object from text, tokens and end of each choice.
        count: Number of choices.
        is_streamed: Whether the client asks for events.
        headers: Headers of the response.

    Raises:
        ApiError: The client has disconnected, or a choice has failed.
    """
    headers = {**headers, REQUEST_HEADER: stream.common_id_prefix}
    if is_streamed:
        return EventStream(state, stream, formatter, headers)
    with state.close_stream_at_exit(stream):
        results = await run_until_disconnect(request, read_complete_texts(stream, count))
    for _, _, finish in results:
        state.record_finish(finish)
    return JsonResponse(build_body(results), headers=dict(headers))


async def run_until_disconnect(request: Request, work: Coroutine[object, object, Output]) -> Output:
    """Return the result of `work`; cancel it if the client disconnects.

    Raises:
        ApiError: The client has disconnected, so that it receives no response.
    """
    results = await _run_or_return_empty_on_disconnect(request.receive, work)
    if not results:
        raise ApiError(499, "the client has left")
    return results[0]


async def _run_or_return_empty_on_disconnect(receive: Receive, work: Awaitable[Output]) -> list[Output]:
    """Run `work`, and return its result in a list; the list is empty after a disconnect or a cancellation."""
    worker, watcher = asyncio.ensure_future(work), asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        return [worker.result()] if worker.done() and not worker.cancelled() else []
    finally:
        for task in (worker, watcher):
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(worker, watcher, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
