"""``POST /v1/chat/completions`` of OpenAI, with the additional fields of llama-server."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...frontends.serving.requests import TokenEvent
from ..bodies.answers import AnswerDelta, AnswerParser
from ..bodies.schemas import ChatBody, TemplateBody
from ..errors import ApiError
from ..metrics import StreamedChoiceStopwatch, describe_draft_usage, describe_timing
from ..requests import create_random_id
from ..responses import DONE, PING, JsonResponse, add_ignored_fields, format_event, read_body, respond_as_stream_or_json
from ..state import ServingState, get_serving_state
from ..streams import ChoiceFinish, PromptProgress, TextUpdate, Update
from .chat import PreparedChat, prepare_chat
from .logprobs import describe_chat_logprobs

ID_PREFIX = "chatcmpl-"


async def create_chat_completion(request: Request) -> Response:
    """Handle ``POST /v1/chat/completions``: answer a chat, as one JSON object or as a stream."""
    state = get_serving_state(request)
    state.require_ready()
    body, headers = await read_body(request, ChatBody)
    chat = await prepare_chat(state, body, ID_PREFIX)
    add_ignored_fields(headers, chat.ignored)
    answer = ChatAnswerFormatter(state, body, chat)
    stream = state.submit(chat.requests, body.nonempty_stop_strings, shows_markers=True)
    build = answer.build_completion
    return await respond_as_stream_or_json(
        state, request, stream, answer, build, count=body.n, is_streamed=body.stream, headers=headers
    )


async def count_chat_tokens(request: Request) -> Response:
    """Handle ``POST /v1/chat/completions/input_tokens``: return the token count of a chat."""
    state = get_serving_state(request)
    body, headers = await read_body(request, TemplateBody)
    prompt = await state.builder.render_chat(body)
    ids = await state.builder.encode_chat(prompt.text)
    return JsonResponse({"object": "response.input_tokens", "input_tokens": len(ids)}, headers=headers)


class ChatAnswerFormatter:
    """The formatter of an answer to one chat in the format of OpenAI, for streams and complete answers."""

    ping = PING

    def __init__(self, state: ServingState, body: ChatBody, chat: PreparedChat) -> None:
        self._state, self._body, self._chat = state, body, chat
        self._parsers = [chat.make_parser() for _ in range(body.n)]
        self._has_begun = [False] * body.n
        self._waiting_tokens: list[list[TokenEvent]] = [[] for _ in range(body.n)]
        """Tokens of text that the parser holds."""
        self._cached_tokens: list[int | None] = [None] * body.n
        self._finishes: dict[int, ChoiceFinish] = {}
        self._clocks = [StreamedChoiceStopwatch() for _ in range(body.n)]
        self._frame = {
            "id": chat.id,
            "created": int(time.time()),
            "model": state.service.model_name,
            "system_fingerprint": state.service.fingerprint,
        }
        self._chunk = {**self._frame, "object": "chat.completion.chunk"}
        if body.stream_options.include_usage:
            self._chunk["usage"] = None

    # ------------------------------------------------------------------------------------------------ complete answers

    def build_completion(
        self, results: Sequence[tuple[str, tuple[TokenEvent, ...], ChoiceFinish]]
    ) -> dict[str, object]:
        """Build the JSON object of a complete answer."""
        choices = []
        for i, (text, tokens, finish) in enumerate(results):
            self._finishes[i] = finish
            parser = self._parsers[i]
            deltas = [*parser.feed(text), *parser.finish()]
            choice: dict[str, object] = {
                "index": i,
                "message": build_message(deltas, is_call=self._chat.parser_options.is_call),
                "logprobs": self._describe_logprobs(tokens),
                "finish_reason": choose_finish_reason(finish, parser),
            }
            choices.append(choice)
        body = {**self._frame, "object": "chat.completion", "choices": choices, "usage": self._describe_usage()}
        body["timings"] = describe_timing(results[0][2].timing, results[0][2].token_count)
        return self._add_prompt(body)

    # ---------------------------------------------------------------------------------------------------------- streams

    def format_updates(self, updates: Sequence[Update]) -> bytes:
        """Format updates as chunks of a chat completion (server-sent events)."""
        return b"".join(chunk for update in updates for chunk in self._format_update(update))

    def format_end(self) -> bytes:
        """Return the chunk with the token usage, if requested, and the end marker ``[DONE]``."""
        if not self._body.stream_options.include_usage:
            return DONE
        finish = self._finishes[0]
        chunk = {**self._chunk, "choices": [], "usage": self._describe_usage()}
        return format_event({**chunk, "timings": describe_timing(finish.timing, finish.token_count)}) + DONE

    def format_stream_ending_error(self, error: ApiError) -> bytes:
        """Format an error as the server-sent event that ends the stream."""
        return format_event(error.as_openai_body())

    def _format_update(self, update: Update) -> list[bytes]:
        chunks: list[bytes] = []
        i = update.choice
        if isinstance(update, PromptProgress):
            if self._body.return_progress:
                chunks.append(self._format_progress(update))
            return chunks
        if not self._has_begun[i]:
            self._has_begun[i] = True
            chunk = self._build_chunk(i, {"role": "assistant", "content": None})
            chunks.append(format_event(self._add_prompt(chunk)))
        parser = self._parsers[i]
        if isinstance(update, TextUpdate):
            self._waiting_tokens[i] += update.tokens
            deltas = parser.feed(update.text)
        else:
            deltas = parser.finish()
        for j, delta in enumerate(deltas):
            tokens: tuple[TokenEvent, ...] = ()
            if j == len(deltas) - 1:
                tokens, self._waiting_tokens[i] = tuple(self._waiting_tokens[i]), []
            chunk = self._build_chunk(i, describe_delta(delta), tokens)
            chunks.append(format_event({**chunk, **self._describe_times(update)}))
        if isinstance(update, ChoiceFinish):
            self._finishes[i] = update
            tokens = tuple(self._waiting_tokens[i])
            chunk = self._build_chunk(i, {}, tokens, choose_finish_reason(update, parser))
            if not self._body.stream_options.include_usage:
                chunk["timings"] = describe_timing(update.timing, update.token_count)
            chunks.append(format_event(chunk))
        return chunks

    def _build_chunk(
        self, index: int, delta: dict[str, object], tokens: tuple[TokenEvent, ...] = (), reason: str | None = None
    ) -> dict[str, object]:
        choice: dict[str, object] = {"index": index, "delta": delta, "finish_reason": reason}
        if self._body.logprobs and tokens:
            choice["logprobs"] = self._describe_logprobs(tokens)
        return {**self._chunk, "choices": [choice]}

    def _format_progress(self, update: PromptProgress) -> bytes:
        i = update.choice
        if self._cached_tokens[i] is None:  # the first report says how many tokens the cache had
            self._cached_tokens[i] = update.read_tokens
        delta = {} if self._has_begun[i] else {"role": "assistant", "content": None}
        self._has_begun[i] = True
        progress = {"total": update.prompt_tokens, "cache": self._cached_tokens[i], "processed": update.read_tokens}
        chunk = {**self._build_chunk(i, dict(delta)), "prompt_progress": progress}
        return format_event({**chunk, **self._describe_times(update)})

    def _describe_times(self, update: Update) -> dict[str, object]:
        if not self._body.timings_per_token:
            return {}
        return {"timings": self._clocks[update.choice].describe_update(update)}

    def _describe_logprobs(self, tokens: Sequence[TokenEvent]) -> dict[str, object] | None:
        if not self._body.logprobs:
            return None
        return {"content": describe_chat_logprobs(self._state.service.tokenizer, tokens), "refusal": None}

    def _describe_usage(self) -> dict[str, object]:
        return describe_usage_with_shared_prompt(self._finishes.values())

    def _add_prompt(self, body: dict[str, object]) -> dict[str, object]:
        is_verbose = self._body.verbose or self._state.options.shows_prompts
        return {**body, "__verbose": {"prompt": self._chat.prompt_text}} if is_verbose else body


def describe_usage_with_shared_prompt(finishes: Iterable[ChoiceFinish]) -> dict[str, object]:
    """Return the token counts of OpenAI's ``usage``; several choices share one prompt, which counts once."""
    ends = list(finishes)
    prompt, new = ends[0].timing.prompt_tokens, sum(finish.token_count for finish in ends)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": ends[0].timing.cached_tokens},
        **describe_draft_usage([finish.timing for finish in ends]),
    }


def choose_finish_reason(finish: ChoiceFinish, parser: AnswerParser) -> str:
    """Return the ``finish_reason``: ``length`` for a truncated answer, ``tool_calls`` after a complete tool call."""
    return finish.reason if finish.reason == "length" or not parser.call_count else "tool_calls"


def build_message(deltas: Sequence[AnswerDelta], *, is_call: bool = False) -> dict[str, object]:
    """Build the assistant's message from all deltas of an answer. The content of a call without text is ``null``."""
    content = "".join(delta.text for delta in deltas if delta.kind == "content")
    thoughts = "".join(delta.text for delta in deltas if delta.kind == "reasoning")
    calls: dict[int, dict[str, str]] = {}
    for delta in deltas:
        if delta.kind == "call":
            calls[delta.index] = {"name": delta.text, "arguments": ""}
        elif delta.kind == "arguments":
            calls[delta.index]["arguments"] += delta.text
    has_null_content = not content and bool(calls or is_call)
    message: dict[str, object] = {"role": "assistant", "content": None if has_null_content else content}
    if thoughts:
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = [
            {"id": create_random_id("call_"), "type": "function", "function": call} for call in calls.values()
        ]
    return message


def describe_delta(delta: AnswerDelta) -> dict[str, object]:
    """Convert a parsed delta to the object ``delta`` of a stream chunk."""
    match delta.kind:
        case "content":
            return {"content": delta.text}
        case "reasoning":
            return {"reasoning_content": delta.text}
        case "call":
            function = {"name": delta.text, "arguments": ""}
            call = {"index": delta.index, "id": create_random_id("call_"), "type": "function", "function": function}
            return {"tool_calls": [call]}
    return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}


def build_chat_routes() -> list[Route]:
    """Return the routes of the chat endpoints; llama-server has them with and without ``/v1``."""
    routes = []
    for prefix in ("/v1", ""):
        routes.append(Route(f"{prefix}/chat/completions", create_chat_completion, methods=["POST"]))
        routes.append(Route(f"{prefix}/chat/completions/input_tokens", count_chat_tokens, methods=["POST"]))
    return routes
