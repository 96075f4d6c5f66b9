"""The endpoints of llama-server: ``/completion``, tokenizer, chat template, and state of the server."""

from __future__ import annotations

import math
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...frontends.errors import ModelError
from ...frontends.gguf.chat import select_chat_template
from ...frontends.serving.requests import GenerationRequest, TokenEvent
from ..bodies.schemas import DetokenizeBody, NativeCompletionBody, TemplateBody, TokenizeBody
from ..errors import ApiError
from ..grammars import list_ignored_schema_keywords
from ..metrics import CONTENT_TYPE, StreamedChoiceStopwatch, describe_timing
from ..requests import create_random_id
from ..responses import PING, JsonResponse, add_ignored_fields, format_event, read_body, respond_as_stream_or_json
from ..state import ServingState, get_serving_state
from ..streams import ChoiceFinish, CompleteText, PromptProgress, TextUpdate, Update
from .chat import require_slots_for_choices
from .logprobs import describe_chat_logprobs

NO_SLOT = -1
"""Value of ``id_slot`` in a stream before its end, because the engine may still choose another slot."""
UNLIMITED = -1
"""Default of ``n_predict``: until the context is full."""
NEUTRAL_SAMPLERS = {
    "dynatemp_range": 0.0,
    "typical_p": 1.0,
    "top_n_sigma": -1.0,
    "xtc_probability": 0.0,
    "dry_multiplier": 0.0,
    "mirostat": 0,
    "adaptive_target": -1.0,
    "adaptive_decay": 0.9,
    "n_keep": 0,
    "n_discard": 0,
    "min_keep": 0,
    "samplers": ["penalties", "top_k", "top_p", "min_p", "temperature"],
}
"""Reported settings of samplers that hocket lacks, with the values of llama-server that have no effect."""


async def create_native_completion(request: Request) -> Response:
    """Handle ``POST /completion``: continue one text or several, in the format of llama-server."""
    state = get_serving_state(request)
    state.require_ready()
    body, headers = await read_body(request, NativeCompletionBody)
    state.builder.require_served_model_if_strict(body.model)
    limits = (body.n_predict, body.max_tokens, body.max_completion_tokens, UNLIMITED)
    limit = next(limit for limit in limits if limit is not None)
    choices = body.n if body.n_cmpl is None else body.n_cmpl
    require_slots_for_choices(state, choices)
    prompts = await state.builder.encode_prompts(body.prompt)
    top = body.n_probs if body.n_probs is not None else body.logprobs
    requests = await state.builder.build_text_requests(
        body, prompts, limit=limit, choices=choices, top_logprobs=top or None, id=create_random_id("native-")
    )
    add_ignored_fields(headers, list_ignored_schema_keywords(requests[0].params.grammar))
    answer = NativeAnswerFormatter(state, body, requests)
    stream = state.submit(requests, body.nonempty_stop_strings)
    build = answer.build_results
    return await respond_as_stream_or_json(
        state, request, stream, answer, build, count=len(requests), is_streamed=body.stream, headers=headers
    )


class NativeAnswerFormatter:
    """The formatter of text completions in the format of llama-server, for streams and complete answers."""

    ping = PING

    def __init__(self, state: ServingState, body: NativeCompletionBody, requests: Sequence[GenerationRequest]) -> None:
        self._state, self._body, self._requests = state, body, requests
        self._token_counts = [0] * len(requests)
        self._has_new_line = [False] * len(requests)
        self._cached_tokens: list[int | None] = [None] * len(requests)
        self._clocks = [StreamedChoiceStopwatch() for _ in requests]

    def build_results(self, results: Sequence[CompleteText]) -> object:
        """Return the JSON object of one complete text, or the list of several."""
        objects = [self.build_result(i, *result) for i, result in enumerate(results)]
        return objects if len(objects) > 1 else objects[0]

    def build_result(
        self, i: int, text: str, tokens: Sequence[TokenEvent], finish: ChoiceFinish, *, is_streamed: bool = False
    ) -> dict[str, object]:
        """Build the JSON object of a complete text. In a stream, it is the last object."""
        request, tokenizer = self._requests[i], self._state.service.tokenizer
        limit = request.params.limit
        result: dict[str, object] = {
            "index": i,
            "content": text,
            "tokens": [event.token for event in tokens] if self._body.return_tokens and not is_streamed else [],
            "id_slot": finish.timing.slot,
            "stop": True,
            "model": self._state.service.model_name,
            "tokens_predicted": finish.token_count,
            "tokens_evaluated": finish.timing.prompt_tokens,
            "generation_settings": describe_generation_settings(request, self._body),
            "prompt": tokenizer.decode(request.prompt, special=True),
            "has_new_line": self._has_new_line[i] or "\n" in text,
            "truncated": finish.reason == "length" and (limit < 0 or finish.token_count < limit),
            "stop_type": finish.llama_server_stop_type,
            "stopping_word": finish.stop_string,
            "tokens_cached": finish.timing.prompt_tokens + max(0, finish.token_count - 1),
            "timings": describe_timing(finish.timing, finish.token_count),
        }
        if request.top_logprobs is not None and not is_streamed:
            result["completion_probabilities"] = describe_chat_logprobs(tokenizer, tokens)
        return select_result_fields(result, self._body.response_fields) if self._body.response_fields else result

    def format_updates(self, updates: Sequence[Update]) -> bytes:
        """Format updates as server-sent events of llama-server."""
        return b"".join(map(self._format_update, updates))

    def format_end(self) -> bytes:
        """Return no bytes: this API has no end event, because the last object of each text has ``stop: true``."""
        return b""

    def format_stream_ending_error(self, error: ApiError) -> bytes:
        """Format an error as the server-sent event that ends the stream."""
        return format_event(error.as_openai_body())

    def _format_update(self, update: Update) -> bytes:
        i = update.choice
        if isinstance(update, ChoiceFinish):
            return format_event(self.build_result(i, "", (), update, is_streamed=True))
        tokens = update.tokens if isinstance(update, TextUpdate) else ()
        self._token_counts[i] += len(tokens)
        event: dict[str, object] = {
            "index": i,
            "content": update.text if isinstance(update, TextUpdate) else "",
            "tokens": [token.token for token in tokens],
            "stop": False,
            "id_slot": NO_SLOT,
            "tokens_predicted": self._token_counts[i],
            "tokens_evaluated": len(self._requests[i].prompt),
        }
        if isinstance(update, PromptProgress):
            if not self._body.return_progress:
                return b""
            if self._cached_tokens[i] is None:
                self._cached_tokens[i] = update.read_tokens
            counts = {"total": update.prompt_tokens, "cache": self._cached_tokens[i], "processed": update.read_tokens}
            event["prompt_progress"] = counts
        else:
            self._has_new_line[i] |= "\n" in update.text
            if self._requests[i].top_logprobs is not None:
                event["completion_probabilities"] = describe_chat_logprobs(self._state.service.tokenizer, tokens)
        if self._body.timings_per_token:
            event["timings"] = self._clocks[i].describe_update(update)
        return format_event(event)


def describe_generation_settings(request: GenerationRequest, body: NativeCompletionBody) -> dict[str, object]:
    """Return the object ``generation_settings`` of llama-server: the sampling parameters of a request."""
    params, sampling = request.params, request.params.sampling
    bias = [
        {"token": token, "bias": None if value == -math.inf else value}  # JSON has no infinity
        for token, value in sampling.bias
    ]
    return {
        **NEUTRAL_SAMPLERS,
        "seed": params.seed,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repeat_penalty,
        "repeat_last_n": sampling.repeat_last_n,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "logit_bias": bias,
        "stop": list(body.nonempty_stop_strings),
        "max_tokens": params.limit,
        "n_predict": params.limit,
        "ignore_eos": not params.end_tokens,
        "stream": body.stream,
        "n_probs": request.top_logprobs or 0,
        "grammar": body.grammar,
        "post_sampling_probs": False,
        "timings_per_token": body.timings_per_token,
        "lora": [],
    }


def select_result_fields(result: dict[str, object], names: Sequence[str]) -> dict[str, object]:
    """Return a copy of a result that has only the named fields. The name ``a/b`` is field b of object a."""
    selected = {}
    for name in names:
        value: object = result
        for part in name.split("/"):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            selected[name] = value
    return selected


# ----------------------------------------------------------------------------------------------- tokenizer and template


async def tokenize(request: Request) -> Response:
    """Handle ``POST /tokenize``: return the tokens of a text. They come with their texts if ``with_pieces`` is set."""
    state = get_serving_state(request)
    body, headers = await read_body(request, TokenizeBody)
    tokenizer, content = state.service.tokenizer, body.content
    if not isinstance(content, str):
        (ids,) = await state.builder.encode_prompts([content])
    else:
        text, flags = content, {"add_special": body.add_special, "parse_special": body.parse_special}
        ids = tuple(await state.builder.run_in_thread(lambda: tokenizer.encode(text, **flags)))
    if not body.adds_texts:
        return JsonResponse({"tokens": ids}, headers=headers)
    return JsonResponse({"tokens": [{"id": i, "piece": _describe_token_text(tokenizer.token_bytes(i))} for i in ids]})


def _describe_token_text(data: bytes) -> str | list[int]:
    """Return the text of a token, or the list of its bytes if they are not valid UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


async def detokenize(request: Request) -> Response:
    """Handle ``POST /detokenize``: return the text of tokens."""
    state = get_serving_state(request)
    body, headers = await read_body(request, DetokenizeBody)
    text = await state.builder.run_in_thread(lambda: state.service.tokenizer.decode(body.tokens, special=True))
    return JsonResponse({"content": text}, headers=headers)


async def apply_template(request: Request) -> Response:
    """Handle ``POST /apply-template``: return the rendered prompt of a chat."""
    body, headers = await read_body(request, TemplateBody)
    prompt = await get_serving_state(request).builder.render_chat(body)
    return JsonResponse({"prompt": prompt.text}, headers=headers)


# ---------------------------------------------------------------------------------------------------- server state


async def show_health(request: Request) -> Response:
    """Handle ``GET /health``: return status 200 if the server can generate, otherwise 503."""
    if problem := get_serving_state(request).find_reason_not_ready():
        raise ApiError(503, problem, retry_seconds=1)
    return JsonResponse({"status": "ok"})


async def show_properties(request: Request) -> Response:
    """Handle ``GET /props``: return the read-only properties of the model and the server."""
    state = get_serving_state(request)
    service, options = state.service, state.options
    try:
        template = options.chat_template or select_chat_template(service.metadata)
    except ModelError:
        template = ""
    sampling = options.sampling
    params = {**NEUTRAL_SAMPLERS, "seed": options.seed, "n_predict": options.default_max_tokens, "stream": False}
    params |= {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    params |= {"min_p": sampling.min_p, "repeat_penalty": sampling.repeat_penalty}
    return JsonResponse(
        {
            "default_generation_settings": {"n_ctx": service.status.context, "params": params},
            "total_slots": service.status.slots,
            "model_alias": service.model_name,
            "model_path": options.model_file or service.model_name,
            "modalities": {"vision": False, "audio": False, "video": False},
            "endpoint_slots": options.has_slots,
            "endpoint_metrics": options.has_metrics,
            "endpoint_props": False,
            "chat_template": template,
            "bos_token": service.tokenizer.bos_text,
            "eos_token": service.tokenizer.eos_text,
            "fingerprint": service.fingerprint,
            "build_info": service.fingerprint,
        }
    )


async def show_slots(request: Request) -> Response:
    """Handle ``GET /slots``: return the state of each slot; with ``fail_on_no_slot`` status 503 if no slot is free."""
    state = get_serving_state(request)
    if not state.options.has_slots:
        raise ApiError(501, "this server does not list its slots")
    status = state.service.status
    slots = [
        {
            "id": i,
            "n_ctx": status.context,
            "speculative": False,
            "is_processing": bool(request_id),
            "n_prompt_tokens_cache": tokens,
        }
        for i, (request_id, tokens) in enumerate(zip(status.slot_requests, status.slot_tokens, strict=True))
    ]
    if request.query_params.get("fail_on_no_slot") and all(slot["is_processing"] for slot in slots):
        raise ApiError(503, "no slot is free", retry_seconds=1)
    return JsonResponse(slots)


async def show_metrics(request: Request) -> Response:
    """Handle ``GET /metrics``: return the metrics in the text format of Prometheus."""
    state = get_serving_state(request)
    if not state.options.has_metrics:
        raise ApiError(501, "this server has no metrics")
    headers = {"Process-Start-Time-Unix": str(int(state.metrics.start_time))}
    return Response(state.metrics.format_metrics(), headers=headers, media_type=CONTENT_TYPE)


async def show_plan(request: Request) -> Response:
    """Handle ``GET /plan``: return the explanation of the execution plans in use."""
    text = await get_serving_state(request).builder.run_in_thread(get_serving_state(request).service.explain_plans)
    return Response(text, media_type="text/plain; charset=utf-8")


async def show_welcome_line(request: Request) -> Response:
    """Handle ``GET /``: return one line for people who open the address in a browser."""
    return Response("hocket serves models here; the API is below /v1\n", media_type="text/plain; charset=utf-8")


def build_native_routes() -> list[Route]:
    """Return the routes of the llama-server endpoints."""
    posts = {
        "/completion": create_native_completion,
        "/completions": create_native_completion,
        "/tokenize": tokenize,
        "/detokenize": detokenize,
        "/apply-template": apply_template,
    }
    gets = {
        "/": show_welcome_line,
        "/health": show_health,
        "/v1/health": show_health,
        "/props": show_properties,
        "/slots": show_slots,
        "/metrics": show_metrics,
        "/plan": show_plan,
    }
    return [
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()),
        *(Route(path, endpoint, methods=["GET"]) for path, endpoint in gets.items()),
    ]
