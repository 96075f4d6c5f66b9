"""Conversion of engine events to text: decoding, stop strings, logprobs, and the end of each choice.

A choice is one generated text of a response. Events arrive in the thread of the engine and go through an
`asyncio.Queue` to the coroutine of the response. An `AnswerStream` cancels its requests in the engine when it is
closed, also after a disconnect of the client.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress

from ..frontends.generation.stop_strings import StopStringFilter
from ..frontends.gguf.tokenization.tokenizer import Tokenizer, TokenToTextStream
from ..frontends.serving.requests import (
    EndEvent,
    Event,
    GenerationRequest,
    PromptProgressEvent,
    RequestTiming,
    TokenEvent,
)
from ..frontends.serving.service import ModelService
from ..graph.lazy_dataclass import dataclass
from .errors import ApiError
from .options import ServerOptions

TICK_SECONDS = 1.0
"""Interval in seconds at which a stream checks its time limits."""


@dataclass(frozen=True, slots=True)
class TextUpdate:
    """New text of choice number `choice`, with the tokens that belong to it."""

    choice: int
    text: str
    tokens: tuple[TokenEvent, ...]


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """Prompt progress of a choice: `read_tokens` of `prompt_tokens` tokens have been processed."""

    choice: int
    read_tokens: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class ChoiceFinish:
    """The end of a choice: its reason, tokens and times.

    The reason is ``stop`` or ``length``. `stop_string` is the stop string that ended the choice.
    """

    choice: int
    reason: str
    stop_string: str
    token_count: int
    timing: RequestTiming

    @property
    def llama_server_stop_type(self) -> str:
        """The stop type in the terms of llama-server: ``word``, ``limit`` or ``eos``."""
        return "word" if self.stop_string else "limit" if self.reason == "length" else "eos"


Update = TextUpdate | PromptProgress | ChoiceFinish
QueueItem = Event | ApiError | None
"""An item in the queue of a stream; `None` is a timer tick."""


class TokenDecoder(TokenToTextStream):
    """A streaming token decoder that keeps the text of some control tokens and reports incomplete UTF-8 characters."""

    def __init__(self, tokenizer: Tokenizer, visible: frozenset[int] = frozenset()) -> None:
        super().__init__(tokenizer)
        self._visible = visible

    def feed(self, token: int) -> str:
        """Return the text of all characters that the bytes of a further token complete.

        Raises:
            ModelError: As `TokenToTextStream.feed`.
        """
        if token in self._visible:
            return self._decoder.decode(self._tokenizer.token_bytes(token))
        return super().feed(token)

    @property
    def has_partial_character(self) -> bool:
        """Whether bytes of an incomplete UTF-8 character are pending."""
        return bool(self._decoder.getstate()[0])


class StopStringTextBuffer:
    """Holds back the end of the text of one choice while it may become a stop string, and releases the text before it.

    Args:
        choice: The number of the choice.
        decoder: The decoder of its tokens.
        stops: The stop strings.
    """

    def __init__(self, choice: int, decoder: TokenDecoder, stops: Sequence[str]) -> None:
        self.choice = choice
        self.token_count = 0
        self.stop_string = ""
        self._decoder, self._filter = decoder, StopStringFilter(stops)
        self._decoded_characters = self._sent_characters = 0
        self._waiting_tokens: list[tuple[int, int, TokenEvent]] = []
        """Tokens with the positions of their first and behind their last character."""

    def feed(self, event: TokenEvent) -> TextUpdate | None:
        """Add one more token; return the text that is now certain to stay, or `None` if there is none."""
        if self.stop_string:
            return None
        self.token_count += 1
        text, start = self._decoder.feed(event.token), self._decoded_characters
        self._decoded_characters += len(text)
        end = self._decoded_characters + self._decoder.has_partial_character
        self._waiting_tokens.append((start, end, event))
        return self._send(text)

    def finish(self) -> TextUpdate | None:
        """Return the text that was held back until the end of the choice, or `None` if there is none."""
        if self.stop_string:
            return None
        rest = self._decoder.finish()
        self._decoded_characters += len(rest)
        update = self._send(rest)
        if self.stop_string:
            return update
        text = (update.text if update else "") + self._filter.pending_text
        tokens = (*(update.tokens if update else ()), *(event for _, _, event in self._waiting_tokens))
        return TextUpdate(self.choice, text, tokens) if text or tokens else None

    def _send(self, text: str) -> TextUpdate | None:
        whole = self._filter.pending_text + text
        safe = self._filter.feed(text) if text else ""
        self._sent_characters += len(safe)
        if self._filter.has_matched:
            found = [(whole.find(stop), i) for i, stop in enumerate(self._filter.stop_strings) if stop in whole]
            self.stop_string = self._filter.stop_strings[min(found)[1]]
            tokens = tuple(event for start, _, event in self._waiting_tokens if start < self._sent_characters)
            self._waiting_tokens.clear()
        else:
            count = 0
            while count < len(self._waiting_tokens) and self._waiting_tokens[count][1] <= self._sent_characters:
                count += 1
            tokens = tuple(event for _, _, event in self._waiting_tokens[:count])
            del self._waiting_tokens[:count]
        return TextUpdate(self.choice, safe, tokens) if safe or tokens else None


class EventBridge:
    """Passes events from the engine's thread to queues of the event loop.

    All events of a step wake the loop once.

    Args:
        loop: The event loop that reads the queues.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pending: deque[tuple[asyncio.Queue[QueueItem], Event]] = deque()
        self._is_scheduled = False

    def send(self, queue: asyncio.Queue[QueueItem], event: Event) -> None:
        """Send an event to a queue of the event loop; called in the thread of the engine."""
        self._pending.append((queue, event))
        if not self._is_scheduled:
            self._is_scheduled = True
            with suppress(RuntimeError):  # the event loop has been closed
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_scheduled = False  # before the loop, so that no later event is left behind
        while self._pending:
            queue, event = self._pending.popleft()
            queue.put_nowait(event)


class AnswerStream:
    """The updates of all choices of one response, from their submission to their end.

    Args:
        service: The served model.
        bridge: Sends the events of the engine to the event loop.
        options: Time limits.
        requests: The engine requests; their positions are the numbers of the choices.
        stops: Strings that end a choice.
        visible: Control tokens with visible text.
    """

    def __init__(
        self,
        service: ModelService,
        bridge: EventBridge,
        options: ServerOptions,
        requests: Sequence[GenerationRequest],
        *,
        stops: Sequence[str] = (),
        visible: frozenset[int] = frozenset(),
    ) -> None:
        self._service, self._bridge, self._options = service, bridge, options
        self._loop, self._queue = asyncio.get_running_loop(), asyncio.Queue[QueueItem]()
        tokenizer = service.tokenizer
        self._requests = {request.id: request for request in requests}
        self._texts = {
            request.id: StopStringTextBuffer(i, TokenDecoder(tokenizer, visible), stops)
            for i, request in enumerate(requests)
        }
        self._open: set[str] = set()
        self._has_begun = False
        self._tick_seconds = min(TICK_SECONDS, options.ping_seconds, options.stall_seconds)
        self._ticker: asyncio.TimerHandle | None = None
        self.sending_since: float | None = None
        """When the response began to send bytes that the client has not taken yet."""
        self.on_stall: Callable[[], object] | None = None
        """Called if the client takes nothing for `ServerOptions.stall_seconds`."""

    @property
    def common_id_prefix(self) -> str:
        """The common part of the ids of all choices."""
        return next(iter(self._requests)).rpartition("-")[0]

    def submit_all_or_none(self) -> None:
        """Submit all requests of the answer to the engine; if it refuses one, submit none.

        Raises:
            QueueFullError: The queue is full.
            ContextExceededError: A prompt is too long.
            ModelError: An option does not fit the model.
        """
        try:
            for request in self._requests.values():
                self._service.submit(request, self._forward_event_to_event_loop)
                self._open.add(request.id)
        except BaseException:
            self.cancel_requests_and_drop_references()
            raise

    def cancel_requests_and_drop_references(self) -> None:
        """Cancel the requests that still run in the engine, and drop the references that would form cycles."""
        for request in self._open:
            self._service.cancel(request)
        self._open.clear()
        self.on_stall = None
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None

    def end_with_error(self, error: ApiError) -> None:
        """End the response with an error. Call it in the thread of the event loop."""
        self._queue.put_nowait(error)

    @property
    def are_all_requests_queued(self) -> bool:
        """Whether all requests of the response still wait for a slot."""
        return not self._has_begun and not self._open & set(self._service.status.slot_requests)

    def _forward_event_to_event_loop(self, event: Event) -> None:
        """Pass an event from the thread of the engine to the event loop."""
        self._bridge.send(self._queue, event)

    def _tick(self) -> None:
        now = self._loop.time()
        is_stalled = self.sending_since is not None and now - self.sending_since > self._options.stall_seconds
        if is_stalled and self.on_stall is not None:
            self.on_stall()
        if self._queue.empty():
            self._queue.put_nowait(None)
        self._ticker = self._loop.call_later(self._tick_seconds, self._tick)

    async def read_updates_with_pings(self) -> AsyncIterator[list[Update]]:
        """Yield lists of updates as they arrive, and an empty list after each `ping_seconds` of silence.

        Raises:
            ApiError: The engine has failed, the server shuts down, or the request took too long.
        """
        start = silent_since = self._loop.time()
        self._ticker = self._loop.call_later(self._tick_seconds, self._tick)
        while self._open:
            items = [await self._queue.get()]
            while not self._queue.empty():
                items.append(self._queue.get_nowait())
            now = self._loop.time()
            if None in items:
                self._check_limits(now - start)
            if updates := list(self._read_items(items)):
                silent_since = now
                yield updates
            elif now - silent_since >= self._options.ping_seconds:
                silent_since = now
                yield []

    def _read_items(self, items: Iterable[QueueItem]) -> Iterable[Update]:
        for event in items:
            if event is None:
                continue
            if isinstance(event, ApiError):
                raise event
            self._has_begun = True
            text = self._texts[event.request]
            match event:
                case TokenEvent():
                    was_stopped = bool(text.stop_string)
                    if update := text.feed(event):
                        yield update
                    if text.stop_string and not was_stopped:
                        self._service.cancel(event.request)
                case PromptProgressEvent():
                    yield PromptProgress(text.choice, event.read_tokens, len(self._requests[event.request].prompt))
                case EndEvent():
                    yield from self._end(text, event)

    def _end(self, text: StopStringTextBuffer, event: EndEvent) -> Iterable[Update]:
        self._open.discard(event.request)
        if update := text.finish():
            yield update
        if text.stop_string:
            yield ChoiceFinish(text.choice, "stop", text.stop_string, text.token_count, event.timing)
        elif event.reason in ("stop", "length"):
            count = max(text.token_count, event.timing.new_tokens)
            yield ChoiceFinish(text.choice, event.reason, "", count, event.timing)
        elif event.reason == "cancelled":
            raise ApiError(503, "the server has ended this request", retry_seconds=1)
        else:
            status = 400 if event.is_fault_of_request else 500
            raise ApiError(status, event.message or "the engine has failed")

    def _check_limits(self, seconds: float) -> None:
        if failure := self._service.engine_end_reason:
            raise ApiError(503, f"the engine has ended: {failure}", retry_seconds=10)
        if seconds > self._options.request_seconds:
            raise ApiError(503, f"the request took longer than {self._options.request_seconds:.0f} s", retry_seconds=10)
        if (
            seconds > self._options.queue_seconds
            and self.are_all_requests_queued
            and self._service.is_compiled_and_ready
        ):
            raise ApiError(503, f"no slot was free for {self._options.queue_seconds:.0f} s", retry_seconds=10)


CompleteText = tuple[str, tuple[TokenEvent, ...], ChoiceFinish]
"""Text, tokens and end of a complete choice."""


async def read_complete_texts(stream: AnswerStream, count: int) -> list[CompleteText]:
    """Wait for the end of all choices, and return the text, the tokens and the end of each.

    Raises:
        ApiError: As `AnswerStream.read_updates_with_pings`.
    """
    texts: list[list[str]] = [[] for _ in range(count)]
    tokens: list[list[TokenEvent]] = [[] for _ in range(count)]
    ends: dict[int, ChoiceFinish] = {}
    async for updates in stream.read_updates_with_pings():
        for update in updates:
            if isinstance(update, TextUpdate):
                texts[update.choice].append(update.text)
                tokens[update.choice].extend(update.tokens)
            elif isinstance(update, ChoiceFinish):
                ends[update.choice] = update
    return [("".join(texts[i]), tuple(tokens[i]), ends[i]) for i in range(count)]
