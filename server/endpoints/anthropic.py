"""``POST /v1/messages`` of Anthropic, and the token count of its body.

The body is converted to a chat body of OpenAI, which `prepare_chat` reads. The answer is a list of content blocks:
thoughts, text and tool uses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...frontends.serving.requests import TokenEvent
from ..bodies.answers import AnswerDelta
from ..bodies.messages import join_content
from ..bodies.schemas import BelowOne, ChatBody, Objects, Share, ShortText, StopTexts, Temperature
from ..errors import ApiError, make_bad_request_error
from ..requests import create_random_id
from ..responses import JsonResponse, add_ignored_fields, format_event, read_body, respond_as_stream_or_json
from ..state import ServingState, get_serving_state
from ..streams import ChoiceFinish, PromptProgress, TextUpdate, Update
from .chat import PreparedChat, prepare_chat

TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
"""OpenAI's ``tool_choice`` by the type of Anthropic's."""
THINKING_TYPES = ("enabled", "adaptive", "disabled")
CLIENT_TOOL_TYPES = (None, "custom")
"""Types of tools that the client runs, not the server."""
BLOCK_STARTS: Mapping[str, Objects] = {
    "content": {"type": "text", "text": ""},
    "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
}
DELTA_TYPES = {
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "arguments": ("input_json_delta", "partial_json"),
}
"""For each kind of `AnswerDelta`: Anthropic's delta type, and the field of its text."""


class MessagesBody(msgspec.Struct, kw_only=True):
    """The body of ``POST /v1/messages``. In a token count, `max_tokens` may be missing."""

    messages: Annotated[list[Objects], Meta(min_length=1, max_length=4096)]
    model: ShortText = ""
    max_tokens: Annotated[int, Meta(ge=1, lt=1 << 31)] | None = None
    system: str | list[Objects] | None = None
    stop_sequences: StopTexts = msgspec.field(default_factory=list)
    temperature: Temperature | None = None
    top_k: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    top_p: Share | None = None
    min_p: BelowOne | None = None
    tools: Annotated[list[Objects], Meta(max_length=128)] = msgspec.field(default_factory=list)
    tool_choice: Objects = msgspec.field(default_factory=dict)
    thinking: Objects = msgspec.field(default_factory=dict)
    output_config: Objects = msgspec.field(default_factory=dict)
    chat_template_kwargs: Objects = msgspec.field(default_factory=dict)
    stream: bool = False


async def create_message(request: Request) -> Response:
    """Handle ``POST /v1/messages``: answer a chat. The answer is one JSON object or a stream."""
    state = get_serving_state(request)
    state.require_ready()
    body, headers = await read_body(request, MessagesBody)
    if body.max_tokens is None:
        raise make_bad_request_error("max_tokens is missing", "max_tokens")
    chat = await prepare_chat(state, convert_to_openai_chat(body), "msg_")
    add_ignored_fields(headers, chat.ignored)
    add_ignored_fields(headers, ["thinking.budget_tokens"] if "budget_tokens" in body.thinking else [])
    answer = MessageAnswerFormatter(state, chat)
    stream = state.submit(chat.requests, tuple(filter(None, body.stop_sequences)), shows_markers=True)
    return await respond_as_stream_or_json(
        state,
        request,
        stream,
        answer,
        lambda results: answer.build_message(*results[0]),
        count=1,
        is_streamed=body.stream,
        headers=headers,
    )


async def count_message_tokens(request: Request) -> Response:
    """Handle ``POST /v1/messages/count_tokens``: return the token count of a chat."""
    state = get_serving_state(request)
    body, headers = await read_body(request, MessagesBody)
    chat = convert_to_openai_chat(body)
    prompt = await state.builder.render_chat(chat, uses_tools=chat.tool_choice != "none")
    ids = await state.builder.encode_chat(prompt.text)
    return JsonResponse({"input_tokens": len(ids)}, headers=headers)


# ------------------------------------------------------------------------------------------------------------- requests


def convert_to_openai_chat(body: MessagesBody) -> ChatBody:
    """Convert a body of Anthropic to a chat body of OpenAI.

    Raises:
        ApiError: A block, a tool or a choice has an unknown form.
    """
    messages: list[Objects] = []
    if body.system:
        messages.append({"role": "system", "content": join_content(body.system, "system")})
    for i, message in enumerate(body.messages):
        messages += convert_to_openai_messages(message, f"messages[{i}]")
    variables = dict(body.chat_template_kwargs)
    if (thinking := body.thinking.get("type")) is not None:
        if thinking not in THINKING_TYPES:
            raise make_bad_request_error(
                f"thinking.type is {thinking!a:.40}; need one of {', '.join(THINKING_TYPES)}", "thinking"
            )
        variables.setdefault("enable_thinking", thinking != "disabled")
    return msgspec.convert(
        {
            **_convert_effort_and_schema(body.output_config),
            "model": body.model,
            "messages": messages,
            "max_tokens": body.max_tokens,
            "temperature": body.temperature,
            "top_k": body.top_k,
            "top_p": body.top_p,
            "min_p": body.min_p,
            "tools": [_convert_tool(tool, i) for i, tool in enumerate(body.tools)],
            "tool_choice": _convert_tool_choice(body.tool_choice),
            "parallel_tool_calls": _permits_parallel_calls(body.tool_choice),
            "chat_template_kwargs": variables,
        },
        ChatBody,
    )


def convert_to_openai_messages(message: Mapping[str, object], where: str) -> list[Objects]:
    """Convert a message of Anthropic to messages of OpenAI: each tool result becomes a separate message.

    Raises:
        ApiError: The role or a block has an unknown form.
    """
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise make_bad_request_error(f"{where}.role is {role!a:.40}; need user or assistant", "messages")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise make_bad_request_error(f"{where}.content: need a text or a list of blocks", "messages")
    texts: list[object] = []
    results: list[Objects] = []
    calls: list[Objects] = []
    thoughts: list[str] = []
    for i, block in enumerate(content):
        match block:
            case {"type": "text"}:
                texts.append(block)
            case {"type": "tool_result", "tool_use_id": str(id)} if role == "user":
                result = block.get("content")
                text = "" if result is None else join_content(result, f"{where}.content[{i}]")
                results.append({"role": "tool", "tool_call_id": id, "content": text})
            case {"type": "tool_use", "id": str(id), "name": str(name), "input": dict(given)} if role == "assistant":
                function = {"name": name, "arguments": json.dumps(given, ensure_ascii=False)}
                calls.append({"id": id, "type": "function", "function": function})
            case {"type": "thinking", "thinking": str(thought)} if role == "assistant":
                thoughts.append(thought)
            case {"type": "redacted_thinking"} if role == "assistant":
                pass  # its text is known to the service that wrote it alone
            case _:
                kind = block.get("type") if isinstance(block, dict) else None
                raise make_bad_request_error(
                    f"{where}.content[{i}]: a block of type {kind!a:.40} is not supported here", "messages"
                )
    if not texts and results:
        return results
    whole: Objects = {"role": role, "content": join_content(texts, where)}
    if thoughts:
        whole["reasoning_content"] = "\n".join(thoughts)
    return [*results, {**whole, "tool_calls": calls} if calls else whole]


def _convert_effort_and_schema(output: Mapping[str, object]) -> Objects:
    """Convert ``output_config`` to the fields for the reasoning effort and for the JSON schema of the answer."""
    fields: Objects = {}
    for name, value in output.items():
        match name, value:
            case _, None:
                continue
            case "effort", str():
                fields["reasoning_effort"] = value
            case "format", {"type": "json_schema", "schema": dict(schema)}:
                fields["json_schema"] = schema
            case _:
                raise make_bad_request_error(
                    f"output_config.{name!a:.40} is not supported; leave it out", "output_config"
                )
    return fields


def _convert_tool(tool: Mapping[str, object], index: int) -> Objects:
    if tool.get("type") not in CLIENT_TOOL_TYPES:
        raise make_bad_request_error(
            f"tools[{index}].type is {tool.get('type')!a:.40}; this server runs no tools", "tools"
        )
    names = {"name": "name", "description": "description", "input_schema": "parameters", "strict": "strict"}
    return {"type": "function", "function": {names[name]: tool[name] for name in names if name in tool}}


def _permits_parallel_calls(choice: Mapping[str, object]) -> bool:
    """Whether an answer may have several tool calls; raise `ApiError` if ``disable_parallel_tool_use`` is no bool."""
    is_disabled = choice.get("disable_parallel_tool_use")
    if not isinstance(is_disabled, bool | None):
        raise make_bad_request_error("tool_choice.disable_parallel_tool_use: need true or false", "tool_choice")
    return not is_disabled


def _convert_tool_choice(choice: Mapping[str, object]) -> object:
    kind = choice.get("type", "auto")
    if kind == "tool":
        return {"type": "function", "function": {"name": str(choice.get("name"))}}
    if not isinstance(kind, str) or kind not in TOOL_CHOICES:
        raise make_bad_request_error(f"tool_choice.type is {kind!a:.40}; need auto, any, tool or none", "tool_choice")
    return TOOL_CHOICES[kind]


# -------------------------------------------------------------------------------------------------------------- answers


class MessageAnswerFormatter:
    """The formatter of an answer to one chat in the format of Anthropic, for streams and complete answers."""

    ping = format_event({"type": "ping"}, "ping")

    def __init__(self, state: ServingState, chat: PreparedChat) -> None:
        self._state, self._chat, self._parser = state, chat, chat.make_parser()
        self._has_begun = False
        self._block, self._block_count = "", 0
        self._finish: ChoiceFinish | None = None

    def build_message(self, text: str, tokens: Sequence[TokenEvent], finish: ChoiceFinish) -> dict[str, object]:
        """Build the JSON object of a complete answer."""
        blocks: list[Objects] = []
        inputs: list[str] = []
        for delta in [*self._parser.feed(text), *self._parser.finish()]:
            if delta.kind == "arguments":
                inputs[-1] += delta.text
                blocks[-1]["input"] = parse_tool_input_or_empty(inputs[-1])
            else:
                blocks.append(_make_content_block(delta, delta.text))
                inputs.append("")
        return {
            **self._describe_message(blocks),
            "stop_reason": self._choose_stop_reason(finish),
            "stop_sequence": finish.stop_string or None,
            "usage": describe_anthropic_usage(finish),
        }

    def format_updates(self, updates: Sequence[Update]) -> bytes:
        """Format updates as server-sent events of Anthropic."""
        events: list[bytes] = []
        for update in updates:
            if isinstance(update, PromptProgress):
                continue
            if not self._has_begun:
                self._has_begun = True
                usage = {"input_tokens": len(self._chat.requests[0].prompt), "output_tokens": 0}
                message = {**self._describe_message([]), "stop_reason": None, "stop_sequence": None, "usage": usage}
                events.append(_format("message_start", message=message))
            deltas = self._parser.feed(update.text) if isinstance(update, TextUpdate) else self._parser.finish()
            for delta in deltas:
                events += self._format_delta(delta)
            if isinstance(update, ChoiceFinish):
                self._finish = update
        return b"".join(events)

    def format_end(self) -> bytes:
        """Return the events that end the last content block and the message."""
        assert self._finish is not None
        finish = self._finish
        reason = {"stop_reason": self._choose_stop_reason(finish), "stop_sequence": finish.stop_string or None}
        events = [*self._end_block(), _format("message_delta", delta=reason, usage=describe_anthropic_usage(finish))]
        return b"".join([*events, _format("message_stop")])

    def format_stream_ending_error(self, error: ApiError) -> bytes:
        """Format an error as the server-sent event that ends the stream."""
        return format_event(error.as_anthropic_body(), "error")

    def _format_delta(self, delta: AnswerDelta) -> list[bytes]:
        events = []
        block = "call" if delta.kind == "arguments" else delta.kind
        if delta.kind == "call" or block != self._block:
            events += self._end_block()
            self._block = block
            events.append(
                _format("content_block_start", index=self._block_count, content_block=_make_content_block(delta))
            )
        if delta.kind in DELTA_TYPES:
            kind, name = DELTA_TYPES[delta.kind]
            events.append(
                _format("content_block_delta", index=self._block_count, delta={"type": kind, name: delta.text})
            )
        return events

    def _end_block(self) -> list[bytes]:
        if not self._block:
            return []
        events = []
        if self._block == "reasoning":
            signature = {"type": "signature_delta", "signature": ""}
            events.append(_format("content_block_delta", index=self._block_count, delta=signature))
        events.append(_format("content_block_stop", index=self._block_count))
        self._block, self._block_count = "", self._block_count + 1
        return events

    def _describe_message(self, blocks: list[Objects]) -> dict[str, object]:
        name = self._state.service.model_name
        return {"id": self._chat.id, "type": "message", "role": "assistant", "model": name, "content": blocks}

    def _choose_stop_reason(self, finish: ChoiceFinish) -> str:
        if finish.reason == "length":
            return "max_tokens"
        if finish.stop_string:
            return "stop_sequence"
        return "tool_use" if self._parser.call_count else "end_turn"


def _format(kind: str, **fields: object) -> bytes:
    return format_event({"type": kind, **fields}, kind)


def _make_content_block(delta: AnswerDelta, text: str = "") -> Objects:
    """Make a content block that begins with `text`, or a tool-use block without input."""
    if delta.kind == "call":
        return {"type": "tool_use", "id": create_random_id("toolu_"), "name": delta.text, "input": {}}
    start = BLOCK_STARTS[delta.kind]
    return {**start, DELTA_TYPES[delta.kind][1]: text}


def parse_tool_input_or_empty(arguments: str) -> object:
    """Parse the arguments of a tool call, or return an empty object if they are incomplete."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return {}


def describe_anthropic_usage(finish: ChoiceFinish) -> dict[str, int]:
    """Return the token counts of Anthropic's ``usage``. The count `input_tokens` excludes cached tokens."""
    timing = finish.timing
    return {
        "input_tokens": timing.prompt_tokens - timing.cached_tokens,
        "cache_read_input_tokens": timing.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": finish.token_count,
    }


def build_message_routes() -> list[Route]:
    """Return the routes of the Anthropic endpoints."""
    return [
        Route("/v1/messages", create_message, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_message_tokens, methods=["POST"]),
    ]
