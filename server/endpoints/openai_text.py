"""The other endpoints of OpenAI: text completions, embeddings and models."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np
import numpy.typing as npt
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...frontends.serving.requests import GenerationRequest, TokenEvent
from ..bodies.schemas import EmbeddingBody, TextCompletionBody
from ..errors import ApiError, make_bad_request_error
from ..grammars import list_ignored_schema_keywords
from ..metrics import StreamedChoiceStopwatch, describe_draft_usage, describe_timing
from ..requests import create_random_id
from ..responses import DONE, PING, JsonResponse, add_ignored_fields, format_event, read_body, respond_as_stream_or_json
from ..state import ServingState, get_serving_state
from ..streams import ChoiceFinish, PromptProgress, TextUpdate, Update
from .chat import require_slots_for_choices
from .logprobs import describe_legacy_logprobs

NORMALISED = 2
"""Value of ``embd_normalize`` for vectors of length 1; -1 leaves vectors unchanged."""


async def create_completion(request: Request) -> Response:
    """Handle ``POST /v1/completions``: continue one text or several. The answer is one JSON object or a stream."""
    state = get_serving_state(request)
    state.require_ready()
    body, headers = await read_body(request, TextCompletionBody)
    state.builder.require_served_model_if_strict(body.model)
    require_slots_for_choices(state, body.n)
    limit = body.n_predict if body.max_tokens is None else body.max_tokens
    if body.echo and body.logprobs is not None:
        raise make_bad_request_error("logprobs of prompts are not supported; leave out echo or logprobs", "echo")
    prompts = await state.builder.encode_prompts(body.prompt)
    id = create_random_id("cmpl-")
    requests = await state.builder.build_text_requests(
        body, prompts, limit=limit, choices=body.n, top_logprobs=body.logprobs, id=id
    )
    add_ignored_fields(headers, list_ignored_schema_keywords(requests[0].params.grammar))
    answer = TextAnswerFormatter(state, body, requests, id)
    stream = state.submit(requests, body.nonempty_stop_strings)
    build = answer.build_completion
    return await respond_as_stream_or_json(
        state, request, stream, answer, build, count=len(requests), is_streamed=body.stream, headers=headers
    )


class TextAnswerFormatter:
    """The formatter of text completions in the format of OpenAI, for streams and complete answers."""

    ping = PING

    def __init__(
        self, state: ServingState, body: TextCompletionBody, requests: Sequence[GenerationRequest], completion_id: str
    ) -> None:
        self._state, self._body = state, body
        tokenizer = state.service.tokenizer
        self._echoes = [tokenizer.decode(request.prompt) if body.echo else "" for request in requests]
        if body.echo and isinstance(body.prompt, str):
            self._echoes = [body.prompt] * len(requests)
        self._offsets = [0] * len(requests)
        """Characters that each choice has sent."""
        self._finishes: dict[int, ChoiceFinish] = {}
        self._clocks = [StreamedChoiceStopwatch() for _ in requests]
        self._frame: dict[str, object] = {
            "id": completion_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": state.service.model_name,
            "system_fingerprint": state.service.fingerprint,
        }

    def build_completion(
        self, results: Sequence[tuple[str, tuple[TokenEvent, ...], ChoiceFinish]]
    ) -> dict[str, object]:
        """Build the JSON object of complete texts."""
        choices = []
        for i, (text, tokens, finish) in enumerate(results):
            self._finishes[i] = finish
            choices.append(self._build_choice(i, text, tokens, finish.reason))
        first = results[0][2]
        timings = describe_timing(first.timing, first.token_count)
        return {**self._frame, "choices": choices, "usage": self._describe_usage(), "timings": timings}

    def format_updates(self, updates: Sequence[Update]) -> bytes:
        """Format updates as chunks of a text completion (server-sent events)."""
        return b"".join(map(self._format_update, updates))

    def format_end(self) -> bytes:
        """Return the chunk with the token usage, if requested, and the end marker ``[DONE]``."""
        if not self._body.stream_options.include_usage:
            return DONE
        return format_event({**self._frame, "choices": [], "usage": self._describe_usage()}) + DONE

    def format_stream_ending_error(self, error: ApiError) -> bytes:
        """Format an error as the server-sent event that ends the stream."""
        return format_event(error.as_openai_body())

    def _format_update(self, update: Update) -> bytes:
        i = update.choice
        if isinstance(update, TextUpdate):
            choice = self._build_choice(i, update.text, update.tokens, None)
            return format_event({**self._frame, "choices": [choice], **self._describe_times(update)})
        if isinstance(update, PromptProgress):
            if not self._body.return_progress:
                return b""
            progress = {"total": update.prompt_tokens, "processed": update.read_tokens}
            chunk = {**self._frame, "choices": [self._build_choice(i, "", (), None)], "prompt_progress": progress}
            return format_event({**chunk, **self._describe_times(update)})
        self._finishes[i] = update
        choice = self._build_choice(i, "", (), update.reason)
        timings = describe_timing(update.timing, update.token_count)
        return format_event({**self._frame, "choices": [choice], "timings": timings})

    def _describe_times(self, update: Update) -> dict[str, object]:
        if not self._body.timings_per_token:
            return {}
        return {"timings": self._clocks[update.choice].describe_update(update)}

    def _build_choice(self, i: int, text: str, tokens: Sequence[TokenEvent], reason: str | None) -> dict[str, object]:
        logprobs = None
        if self._body.logprobs is not None and (tokens or reason is None):
            logprobs = describe_legacy_logprobs(self._state.service.tokenizer, tokens, self._offsets[i])
        whole, self._echoes[i] = self._echoes[i] + text, ""
        self._offsets[i] += len(whole)
        return {"text": whole, "index": i, "logprobs": logprobs, "finish_reason": reason}

    def _describe_usage(self) -> dict[str, object]:
        firsts = [finish for i, finish in self._finishes.items() if i % self._body.n == 0]
        prompt = sum(finish.timing.prompt_tokens for finish in firsts)
        new = sum(finish.token_count for finish in self._finishes.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": sum(finish.timing.cached_tokens for finish in firsts)},
            **describe_draft_usage([finish.timing for finish in self._finishes.values()]),
        }


# ---------------------------------------------------------------------------------------------------------- embeddings


async def create_embeddings(request: Request) -> Response:
    """Handle ``POST /v1/embeddings``: return the embeddings of texts, in the format of OpenAI."""
    state = get_serving_state(request)
    state.require_ready()
    body, headers = await read_body(request, EmbeddingBody)
    if body.encoding_format not in ("float", "base64"):
        raise make_bad_request_error(
            f"encoding_format is {body.encoding_format!a:.40}; need float or base64", "encoding_format"
        )
    vectors, count = await _embed_texts(state, body)
    is_float = body.encoding_format == "float"
    data = [
        {
            "object": "embedding",
            "index": i,
            "embedding": row.tolist() if is_float else base64.b64encode(row.astype("<f4").tobytes()).decode(),
        }
        for i, row in enumerate(vectors)
    ]
    usage = {"prompt_tokens": count, "total_tokens": count}
    answer = {"object": "list", "data": data, "model": state.service.model_name, "usage": usage}
    return JsonResponse(answer, headers=headers)


async def create_native_embeddings(request: Request) -> Response:
    """Handle ``POST /embeddings``: return the embeddings of texts, in the format of llama-server."""
    state = get_serving_state(request)
    state.require_ready()
    body, headers = await read_body(request, EmbeddingBody)
    vectors, _ = await _embed_texts(state, body)
    rows = [{"index": i, "embedding": [row.tolist()]} for i, row in enumerate(vectors)]
    return JsonResponse(rows, headers=headers)


async def _embed_texts(state: ServingState, body: EmbeddingBody) -> tuple[npt.NDArray[np.float32], int]:
    """Return the embedding of each text in the body, and the total token count."""
    state.builder.require_served_model_if_strict(body.model)
    content = body.content if body.input is None else body.input
    if content is None:
        raise make_bad_request_error("input is missing", "input")
    if body.embd_normalize not in (NORMALISED, -1):
        raise make_bad_request_error(f"embd_normalize is {body.embd_normalize}; need 2 or -1", "embd_normalize")
    width = state.service.llama_server_model_fields["n_embd"]
    if body.dimensions not in (None, width):
        reason = f"dimensions is {body.dimensions}; the vectors of this model have {width} numbers"
        raise make_bad_request_error(reason, "dimensions")
    texts = await state.builder.encode_prompts(content)
    with state.count_running_embedding():
        vectors = await state.builder.embed(texts, normalise=body.embd_normalize == NORMALISED)
    count = sum(map(len, texts))
    state.metrics.record_embedding(count)
    return vectors, count


# -------------------------------------------------------------------------------------------------------------- models


async def list_models(request: Request) -> Response:
    """Handle ``GET /v1/models``: return a list of the one served model. The list has the page fields of Anthropic."""
    model = _describe_model_for_all_apis(get_serving_state(request))
    page = {"has_more": False, "first_id": model["id"], "last_id": model["id"]}
    return JsonResponse({"object": "list", "data": [model], **page})


async def show_model(request: Request) -> Response:
    """Handle ``GET /v1/models/NAME``: return the served model, if it has this name or alias."""
    state = get_serving_state(request)
    if (name := request.path_params["name"]) not in (state.service.model_name, *state.options.aliases):
        raise ApiError(404, f"there is no model {name!a:.80}")
    return JsonResponse(_describe_model_for_all_apis(state))


def _describe_model_for_all_apis(state: ServingState) -> dict[str, object]:
    """Describe the served model with the fields of OpenAI, llama-server and Anthropic."""
    start = int(state.metrics.start_time)
    return {
        "id": state.service.model_name,
        "aliases": list(dict.fromkeys((state.service.model_name, *state.options.aliases))),
        "object": "model",
        "created": start,
        "owned_by": "hocket",
        "type": "model",
        "display_name": state.service.model_name,
        "created_at": datetime.fromtimestamp(start, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "meta": dict(state.service.llama_server_model_fields),
    }


def build_completion_embedding_and_model_routes() -> list[Route]:
    """Return the routes of the OpenAI endpoints for completions, embeddings and models."""
    routes = [Route("/v1/completions", create_completion, methods=["POST"])]
    routes.append(Route("/v1/embeddings", create_embeddings, methods=["POST"]))
    for path in ("/embeddings", "/embedding"):
        routes.append(Route(path, create_native_embeddings, methods=["POST"]))
    for prefix in ("/v1", ""):
        routes.append(Route(f"{prefix}/models", list_models, methods=["GET"]))
        routes.append(Route(f"{prefix}/models/{{name:path}}", show_model, methods=["GET"]))
    return routes
