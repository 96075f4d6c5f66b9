"""``POST /v1/responses`` of OpenAI: answers as lists of items, without stored state."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...frontends.serving.requests import TokenEvent
from ..bodies.answers import AnswerDelta
from ..bodies.response_items import ResponsesBody, convert_to_chat
from ..bodies.schemas import Objects
from ..errors import ApiError
from ..metrics import describe_timing
from ..requests import create_random_id
from ..responses import PING, JsonResponse, add_ignored_fields, format_event, read_body, respond_as_stream_or_json
from ..state import ServingState, get_serving_state
from ..streams import ChoiceFinish, CompleteText, PromptProgress, TextUpdate, TokenDecoder, Update
from .chat import PreparedChat, prepare_chat
from .logprobs import describe_chat_logprobs

UNUSED_FIELDS = ("return_progress", "timings_per_token")
"""Fields of other streams that have no effect here."""
ITEM_KINDS: Mapping[str, str] = {"content": "message", "reasoning": "reasoning", "call": "function_call"}
"""Type of an output item by the kind of its deltas."""
ID_PREFIXES: Mapping[str, str] = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}
TEXT_EVENTS: Mapping[str, str] = {"message": "response.output_text", "reasoning": "response.reasoning_text"}
"""Name of the events of a text, by the type of its item."""


async def create_response(request: Request) -> Response:
    """Handle ``POST /v1/responses``: answer a list of items, as one JSON object or as a stream."""
    state = get_serving_state(request)
    state.require_ready()
    body, headers = await read_body(request, ResponsesBody)
    chat = await prepare_chat(state, convert_to_chat(body), "resp_")
    add_ignored_fields(headers, [*chat.ignored, *(name for name in UNUSED_FIELDS if getattr(body, name))])
    answer = ResponseFormatter(state, body, chat)
    stream = state.submit(chat.requests, body.nonempty_stop_strings, shows_markers=True)
    build = answer.build_response
    return await respond_as_stream_or_json(
        state, request, stream, answer, build, count=1, is_streamed=body.stream, headers=headers
    )


async def count_input_tokens(request: Request) -> Response:
    """Handle ``POST /v1/responses/input_tokens``: return the token count of the input."""
    state = get_serving_state(request)
    body, headers = await read_body(request, ResponsesBody)
    chat = convert_to_chat(body)
    prompt = await state.builder.render_chat(chat, uses_tools=chat.tool_choice != "none")
    ids = await state.builder.encode_chat(prompt.text)
    return JsonResponse({"object": "response.input_tokens", "input_tokens": len(ids)}, headers=headers)


class ResponseFormatter:
    """The formatter of a response of OpenAI: a list of output items, and the events of their growth.

    An output item is a message, a thought or a function call. One item grows at a time.
    """

    ping = PING

    def __init__(self, state: ServingState, body: ResponsesBody, chat: PreparedChat) -> None:
        self._state, self._body, self._chat, self._parser = state, body, chat, chat.make_parser()
        self._created, self._event_count, self._has_begun = int(time.time()), 0, False
        self._items: list[Objects] = []
        """The output items; the last one grows while `_text` is a list."""
        self._text: list[str] | None = None
        """The pieces of the text or of the arguments of the growing item."""
        self._finish: ChoiceFinish | None = None
        self._waiting_tokens: list[TokenEvent] = []
        """Tokens of text that the parser holds."""
        self._logprobs: list[Objects] = []
        """The logprobs of the message that grows."""

    def build_response(self, results: Sequence[CompleteText]) -> dict[str, object]:
        """Build the JSON object of a complete response."""
        ((text, tokens, self._finish),) = results
        if self._body.has_logprobs:
            for new_text, part in split_text_by_tokens(self._state, tokens, text):
                self._apply_deltas_with_tokens(self._parser.feed(new_text), part)
        else:
            self._apply_deltas_with_tokens(self._parser.feed(text))
        self._apply_deltas_with_tokens(self._parser.finish())
        self._end_item()
        return self._describe_response()

    # ---------------------------------------------------------------------------------------------------------- streams

    def format_updates(self, updates: Sequence[Update]) -> bytes:
        """Format updates as server-sent events of the responses API."""
        events: list[bytes] = []
        for update in updates:
            events += self._begin_response()
            if isinstance(update, PromptProgress):
                continue
            deltas = self._parser.feed(update.text) if isinstance(update, TextUpdate) else self._parser.finish()
            events += self._apply_deltas_with_tokens(deltas, update.tokens if isinstance(update, TextUpdate) else ())
            if isinstance(update, ChoiceFinish):
                self._finish = update
        return b"".join(events)

    def format_end(self) -> bytes:
        """Return the events that end the last item and the response."""
        events = self._end_item()
        response = self._describe_response()
        return b"".join([*events, self._format(f"response.{response['status']}", response=response)])

    def format_stream_ending_error(self, error: ApiError) -> bytes:
        """Format an error as the event that ends the stream; a wrong request has the code ``invalid_prompt``."""
        events = self._begin_response()
        reason = {"code": "invalid_prompt" if error.status == 400 else "server_error", "message": error.message}
        response = {**self._describe_response(), "status": "failed", "error": reason}
        return b"".join([*events, self._format("response.failed", response=response)])

    def _begin_response(self) -> list[bytes]:
        """Return the events that begin the stream; after the first call there are none."""
        if self._has_begun:
            return []
        self._has_begun = True
        kinds = ("response.created", "response.in_progress")
        return [self._format(kind, response=self._describe_response()) for kind in kinds]

    def _format(self, kind: str, **fields: object) -> bytes:
        number, self._event_count = self._event_count, self._event_count + 1
        return format_event({"type": kind, "sequence_number": number, **fields}, kind)

    # ------------------------------------------------------------------------------------------------------------ items

    def _apply_deltas_with_tokens(
        self, deltas: Iterable[AnswerDelta], tokens: Sequence[TokenEvent] = ()
    ) -> list[bytes]:
        """Add the deltas of new tokens to the output items, and return the events for the client.

        A delta of a message gets its tokens, also earlier tokens that the parser has held back. Tokens that belong to
        no message, such as marks of thoughts, are dropped.
        """
        if self._body.has_logprobs:
            self._waiting_tokens += tokens
        events: list[bytes] = []
        for delta in deltas:
            logprobs: list[Objects] = []
            if delta.kind == "content" and self._body.has_logprobs:
                logprobs = describe_chat_logprobs(
                    self._state.service.tokenizer, self._take_end_tokens_and_drop_earlier(delta.text)
                )
            events += self._apply_delta_to_item(delta, logprobs)
        return events

    def _take_end_tokens_and_drop_earlier(self, text: str) -> list[TokenEvent]:
        """Return the waiting tokens that make up the end of `text`, and drop all earlier waiting tokens."""
        count, size, left = 0, len(text.encode()), self._waiting_tokens
        while size > 0 and count < len(left):
            count += 1
            size -= len(self._state.service.tokenizer.token_bytes(left[-count].token))
        self._waiting_tokens = []
        return left[len(left) - count :]

    def _apply_delta_to_item(self, delta: AnswerDelta, logprobs: list[Objects]) -> list[bytes]:
        """Add a delta to the output item that grows, or begin a new item, and return the events for the client."""
        kind = ITEM_KINDS["call" if delta.kind == "arguments" else delta.kind]
        events: list[bytes] = []
        if delta.kind == "call" or self._text is None or self._items[-1]["type"] != kind:
            events = [*self._end_item(), *self._begin_item(kind, delta)]
        if delta.kind == "call":
            return events
        assert self._text is not None
        self._text.append(delta.text)
        if kind == "function_call":
            return [*events, self._format_item_event("response.function_call_arguments.delta", delta=delta.text)]
        self._logprobs += logprobs
        extra: Objects = {"logprobs": logprobs} if kind == "message" else {}
        name = f"{TEXT_EVENTS[kind]}.delta"
        return [*events, self._format_item_event(name, content_index=0, delta=delta.text, **extra)]

    def _begin_item(self, kind: str, delta: AnswerDelta) -> list[bytes]:
        item: Objects = {"id": create_random_id(ID_PREFIXES[kind]), "type": kind, "status": "in_progress"}
        if kind == "function_call":
            item |= {"call_id": create_random_id("call_"), "name": delta.text, "arguments": ""}
        elif kind == "message":
            item |= {"role": "assistant", "content": []}
        else:
            item |= {"summary": [], "content": []}
        self._items.append(item)
        self._text = []
        events = [self._format("response.output_item.added", output_index=len(self._items) - 1, item=item)]
        if kind != "function_call":
            part = _create_content_part(kind, "", [])
            events.append(self._format_item_event("response.content_part.added", content_index=0, part=part))
        return events

    def _end_item(self) -> list[bytes]:
        """Complete the growing item, if there is one, and return the events."""
        if self._text is None:
            return []
        item, text = self._items[-1], "".join(self._text)
        logprobs, self._text, self._logprobs = self._logprobs, None, []
        kind = str(item["type"])
        is_truncated = self._finish is not None and self._finish.reason == "length"
        item["status"] = "incomplete" if is_truncated else "completed"
        if kind == "function_call":
            item["arguments"] = text
            name = "response.function_call_arguments.done"
            events = [self._format_item_event(name, name=item["name"], arguments=text)]
        else:
            part = _create_content_part(kind, text, logprobs)
            item["content"] = [part]
            extra: Objects = {"logprobs": logprobs} if kind == "message" else {}
            events = [
                self._format_item_event(f"{TEXT_EVENTS[kind]}.done", content_index=0, text=text, **extra),
                self._format_item_event("response.content_part.done", content_index=0, part=part),
            ]
        return [*events, self._format("response.output_item.done", output_index=len(self._items) - 1, item=item)]

    def _format_item_event(self, kind: str, **fields: object) -> bytes:
        return self._format(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **fields)

    # --------------------------------------------------------------------------------------------------------- response

    def _describe_response(self) -> dict[str, object]:
        body, finish = self._body, self._finish
        sampling = self._chat.requests[0].params.sampling
        is_truncated = finish is not None and finish.reason == "length"
        response: dict[str, object] = {
            "id": self._chat.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None if finish is None else int(time.time()),
            "status": "in_progress" if finish is None else "incomplete" if is_truncated else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_truncated else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._state.service.model_name,
            "output": self._items if finish is not None else [],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.get("effort"), "summary": None},
            "store": False,
            "background": False,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "text": {"format": body.text.get("format") or {"type": "text"}},
            "tool_choice": body.tool_choice,
            "tools": body.tools,
            "truncation": "disabled",
            "metadata": {},
            "usage": None,
        }
        if finish is not None:
            response["usage"] = self._describe_usage(finish)
            response["timings"] = describe_timing(finish.timing, finish.token_count)
        return response

    def _describe_usage(self, finish: ChoiceFinish) -> dict[str, object]:
        """Return the token counts of ``usage``.

        The tokens of thoughts have not been counted, so the text of the thoughts is tokenized again.
        """
        prompt, new = finish.timing.prompt_tokens, finish.token_count
        thoughts = [part["text"] for item in self._items if item["type"] == "reasoning" for part in _list_parts(item)]
        count = sum(len(self._state.service.tokenizer.encode_continuation(str(text))) for text in thoughts)
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": finish.timing.cached_tokens},
            "output_tokens": new,
            "output_tokens_details": {"reasoning_tokens": min(count, new)},
            "total_tokens": prompt + new,
        }


def split_text_by_tokens(
    state: ServingState, tokens: Sequence[TokenEvent], text: str
) -> Iterator[tuple[str, tuple[TokenEvent, ...]]]:
    """Split a complete text into the pieces that a stream would have, each with its tokens.

    The last piece may have no token, if a character was incomplete. A stop string may have cut the last token.
    """
    decoder = TokenDecoder(state.service.tokenizer, state.visible_control_tokens)
    waiting: list[TokenEvent] = []
    position = 0
    for token in tokens:
        waiting.append(token)
        new_text = text[position : position + len(decoder.feed(token.token))]
        if new_text:
            position += len(new_text)
            yield new_text, tuple(waiting)
            waiting.clear()
    if position < len(text) or waiting:
        yield text[position:], tuple(waiting)


def _create_content_part(kind: str, text: str, logprobs: list[Objects]) -> Objects:
    """Make the content part of a message or a thought."""
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _list_parts(item: Mapping[str, object]) -> list[Objects]:
    parts = item["content"]
    assert isinstance(parts, list)
    return parts


def build_response_routes() -> list[Route]:
    """Return the routes of the responses API; llama-server has them with and without ``/v1``."""
    routes = []
    for prefix in ("/v1", ""):
        routes.append(Route(f"{prefix}/responses", create_response, methods=["POST"]))
        routes.append(Route(f"{prefix}/responses/input_tokens", count_input_tokens, methods=["POST"]))
    return routes
