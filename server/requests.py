"""Conversion of request bodies to token ids and engine requests (`GenerationRequest`).

Templates, tokenizers and grammars run in worker threads: they may take milliseconds to seconds.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ..frontends.errors import ModelError
from ..frontends.generation.generate import EMPTY_PROMPT_ERROR, GenerationParams
from ..frontends.generation.grammar import Grammar
from ..frontends.generation.lazy_grammar import LazyJsonGrammar
from ..frontends.serving.requests import GenerationRequest
from ..frontends.serving.service import ModelService
from .bodies.messages import ChatPrompt, render_messages
from .bodies.schemas import ChatBody, ResponseFormat, SamplingBody, TemplateBody
from .errors import ApiError, make_bad_request_error, make_context_exceeded_error
from .grammars import ANY_OBJECT_SCHEMA, GrammarCache
from .options import ServerOptions

Output = TypeVar("Output")
TEXT_THREADS = 2
"""Worker threads that render templates and tokenize."""
GRAMMAR_THREADS = 2
"""Worker threads that compile grammars. A slow grammar occupies one of them, so they have no other work."""
EMBEDDING_THREADS = 4
"""Worker threads that wait for embeddings."""
MAX_PROMPTS = 2048
"""Maximum prompts of one request."""
MAX_TEXTS = 256
"""Maximum texts that one request generates."""
MIN_TOP_P = 1e-9
"""Top-p that replaces 0: only the most probable token."""
SAMPLING_FIELDS = ("top_k", "min_p", "repeat_penalty", "repeat_last_n", "presence_penalty", "frequency_penalty")
NO_SPACE_KINDS = ("bert", "t5")
"""Tokenizer kinds that drop white space, so that a token count does not bound the characters of a text."""


class RequestBuilder:
    """Builds engine requests for a model from request bodies; any number of coroutines may use it.

    Args:
        service: The served model.
        options: Defaults and limits.
    """

    def __init__(self, service: ModelService, options: ServerOptions) -> None:
        self._service, self._options = service, options
        self._grammars = GrammarCache(service.tokenizer)
        self._workers = ThreadPoolExecutor(TEXT_THREADS, "hocket-text")
        self._grammar_workers = ThreadPoolExecutor(GRAMMAR_THREADS, "hocket-grammar")
        self._embedding_workers = ThreadPoolExecutor(EMBEDDING_THREADS, "hocket-embed")
        self._longest_token = 0

    async def run_in_thread(self, function: Callable[..., Output], *args: object) -> Output:
        """Run a slow function in a worker thread and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._workers, function, *args)

    async def embed(self, texts: Sequence[Sequence[int]], *, normalise: bool) -> npt.NDArray[np.float32]:
        """Return an embedding for each text.

        Raises:
            ModelError: As `ModelService.embed`.
        """
        embed = partial(self._service.embed, texts, normalise=normalise)
        return await asyncio.get_running_loop().run_in_executor(self._embedding_workers, embed)

    async def rank(self, query: str, documents: Sequence[str]) -> tuple[npt.NDArray[np.float32], int]:
        """Return the relevance score of each document for a query, and the token count of all texts.

        Raises:
            ModelError: As `ModelService.rank`.
        """
        rank = partial(self._service.rank, query, documents)
        return await asyncio.get_running_loop().run_in_executor(self._embedding_workers, rank)

    def close(self) -> None:
        """Shut down the worker threads after their current work."""
        for workers in (self._workers, self._grammar_workers, self._embedding_workers):
            workers.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------------------------------------------ prompts

    async def render_chat(self, body: ChatBody | TemplateBody, *, uses_tools: bool = True) -> ChatPrompt:
        """Render the prompt of a chat with the chat template, in a worker thread.

        Raises:
            ApiError, ModelError: As `render_messages`.
        """

        def render() -> ChatPrompt:
            metadata, tokenizer = self._service.metadata, self._service.tokenizer
            return render_messages(
                body,
                metadata,
                tokenizer,
                template=self._options.chat_template,
                variables=self._options.template_variables,
                uses_tools=uses_tools,
            )

        return await self.run_in_thread(render)

    async def encode_chat(self, text: str) -> tuple[int, ...]:
        """Tokenize a rendered chat.

        Raises:
            ApiError: The prompt exceeds the context.
        """
        return await self.run_in_thread(
            self._encode_if_length_fits, text, lambda: self._service.tokenizer.encode_chat(text)
        )

    async def encode_prompts(self, prompt: object) -> list[tuple[int, ...]]:
        """Tokenize one prompt or several.

        A prompt is a text, a list of tokens, a list of tokens and texts, or an object with ``prompt_string``. A list of
        texts, of lists or of objects is a list of prompts.

        Raises:
            ApiError: The prompt has another form, or exceeds the context.
        """
        return await self.run_in_thread(self._encode_prompts, prompt)

    def _encode_prompts(self, prompt: object) -> list[tuple[int, ...]]:
        if not isinstance(prompt, list):
            return [self._encode_prompt(prompt)]
        if not prompt:
            raise make_bad_request_error("the prompt is an empty list; give some text", "prompt")
        if any(isinstance(part, int) for part in prompt):
            return [self._encode_prompt(prompt)]
        if len(prompt) > MAX_PROMPTS:
            raise make_bad_request_error(f"{len(prompt)} prompts; need {MAX_PROMPTS} at most", "prompt")
        return [self._encode_prompt(part) for part in prompt]

    def _encode_prompt(self, prompt: object) -> tuple[int, ...]:
        tokenizer = self._service.tokenizer
        match prompt:
            case str():
                return self._encode_if_length_fits(prompt, lambda: tokenizer.encode(prompt, parse_special=True))
            case {"prompt_string": str(text), **rest} if not rest.get("multimodal_data"):
                return self._encode_if_length_fits(text, lambda: tokenizer.encode(text, parse_special=True))
            case {"content": list(parts), **rest} if not rest and parts:
                texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
                if all(isinstance(text, str) for text in texts):
                    return self._encode_prompt("".join(map(str, texts)))
            case list() if prompt and all(isinstance(part, int | str) for part in prompt):
                return self._encode_prompt_parts(prompt)
        raise make_bad_request_error(
            "a prompt is a text, or a list of tokens and texts; this one has another form", "prompt"
        )

    def _encode_prompt_parts(self, parts: Sequence[int | str]) -> tuple[int, ...]:
        """Tokenize a prompt that is a list of tokens and texts.

        BOS is added only if the first part is a text. llama-server has the same rule.
        """
        ids: list[int] = []
        tokenizer = self._service.tokenizer
        for i, part in enumerate(parts):
            if isinstance(part, str):
                encode = partial(tokenizer.encode, part, add_special=i == 0, parse_special=True)
                ids.extend(self._encode_if_length_fits(part, encode))
            elif isinstance(part, bool) or not 0 <= part < tokenizer.n_tokens:
                raise make_bad_request_error(
                    f"token {part} is not in the vocabulary; need 0 to {tokenizer.n_tokens - 1}", "prompt"
                )
            else:
                ids.append(part)
        return tuple(ids)

    def _encode_if_length_fits(self, text: str, encode: Callable[[], list[int]]) -> tuple[int, ...]:
        """Tokenize a text; refuse it in advance if it has too many characters to fit the context.

        Args:
            text: The text.
            encode: Returns its tokens.

        Raises:
            ApiError: The text exceeds the context.
        """
        tokenizer, context = self._service.tokenizer, self._service.status.context
        if not self._longest_token:
            self._longest_token = max((len(tokenizer.token_bytes(i)) for i in range(tokenizer.n_tokens)), default=1)
        min_tokens = len(text) // max(1, self._longest_token)
        if min_tokens > context and tokenizer.kind not in NO_SPACE_KINDS:
            raise make_context_exceeded_error(min_tokens, context)
        return tuple(encode())

    # ------------------------------------------------------------------------------------------------------ requests

    async def compile_requested_grammar(
        self, body: SamplingBody, format: ResponseFormat | None = None
    ) -> Grammar | None:
        """Compile the grammar that a body asks for (grammar, JSON schema or ``response_format``), or return `None`.

        Raises:
            ApiError: The grammar is wrong, or the body has two of them.
        """
        schema: Mapping[str, object] | bool | str | None = body.json_schema
        is_strict = format is not None and format.json_schema is not None and bool(format.json_schema.strict)
        if format is not None and format.type != "text":
            if body.grammar or schema is not None:
                raise make_bad_request_error("got a response_format and a grammar; give one of them", "response_format")
            schema = _select_response_schema(format)
        if body.grammar and schema is not None:
            raise make_bad_request_error("got a grammar and a json_schema; give one of them", "grammar")
        if body.grammar:
            return await self._compile_with_time_limit(partial(self._grammars.compile_grammar, body.grammar), "grammar")
        return None if schema is None else await self.compile_schema_in_worker(schema, is_strict)

    async def compile_schema_in_worker(
        self, schema: Mapping[str, object] | bool | str, is_strict: bool = False
    ) -> Grammar:
        """Compile a JSON schema to a grammar, in a worker thread.

        Raises:
            ApiError: As `GrammarCache.compile_schema`, or the compilation takes too long.
        """
        return await self._compile_with_time_limit(
            partial(self._grammars.compile_schema, schema, is_strict), "json_schema"
        )

    async def compile_call_schema(self, schema: Mapping[str, object], is_strict: bool) -> Grammar:
        """Compile the JSON schema of a tool call to a grammar.

        The compilation runs in a worker thread.

        Raises:
            ApiError: As `GrammarCache.compile_call_schema`, or the compilation takes too long.
        """
        compile_schema = partial(self._grammars.compile_call_schema, schema, is_strict)
        return await self._compile_with_time_limit(compile_schema, "tools")

    async def _compile_with_time_limit(self, function: Callable[[], Grammar], param: str) -> Grammar:
        """Run a function that compiles a grammar, with a time limit.

        Raises:
            ApiError: The function takes longer than `ServerOptions.grammar_seconds`.
        """
        seconds = self._options.grammar_seconds
        task = asyncio.get_running_loop().run_in_executor(self._grammar_workers, function)
        try:
            return await asyncio.wait_for(task, seconds)
        except TimeoutError:
            raise make_bad_request_error(
                f"the {param} took longer than {seconds:g} s to compile; use a simpler one", param
            ) from None

    def build_generation_params(
        self, body: SamplingBody, limit: int | None, grammar: Grammar | LazyJsonGrammar | None, choice: int = 0
    ) -> GenerationParams:
        """Build the generation parameters of choice number `choice`; each choice has its own seed.

        Raises:
            ModelError: A value does not fit the model.
        """
        tokenizer, default = self._service.tokenizer, self._options.sampling
        changes: dict[str, Any] = {name: getattr(body, name) for name in SAMPLING_FIELDS}
        if body.top_k is not None and body.top_k < 0:
            changes["top_k"] = 0
        if body.top_p is not None:
            changes["top_p"] = max(body.top_p, MIN_TOP_P)
        changes["temperature"] = body.temperature
        changes = {name: value for name, value in changes.items() if value is not None}
        sampling = replace(default, **changes, bias=self._parse_logit_bias(body))
        sampling.check_logit_bias_tokens(tokenizer.n_tokens)
        base_seed = self._options.seed if body.seed is None else body.seed
        seed = secrets.randbits(32) if base_seed == -1 else (base_seed + choice) % (1 << 64)
        return GenerationParams(
            self._options.default_max_tokens if limit is None else limit,
            sampling,
            seed,
            frozenset() if body.ignore_eos else tokenizer.eos_ids,
            grammar,
            None,
            tokenizer.n_tokens,
        )

    def _parse_logit_bias(self, body: SamplingBody) -> tuple[tuple[int, float], ...]:
        """Return the logit bias of a body as pairs (token, bias).

        A key is a token, or a text that stands for all its tokens. The value ``false`` bans a token.
        """
        bias = body.logit_bias
        pairs = list(bias.items()) if isinstance(bias, dict) else bias
        sums: dict[int, float] = {}
        if body.ignore_eos:
            sums = dict.fromkeys(self._service.tokenizer.eos_ids, -math.inf)
        for key, value in pairs:
            if value is True:
                raise make_bad_request_error("a logit bias is a number, or false to ban the token", "logit_bias")
            number = -math.inf if value is False else float(value)
            for token in self._read_bias_key(key):
                sums[token] = sums.get(token, 0.0) + number
        return tuple(sums.items())

    def _read_bias_key(self, key: int | str) -> Sequence[int]:
        if isinstance(key, int):
            return [key]
        if key.isascii() and key.removeprefix("-").isdigit():
            return [int(key)]
        return self._service.tokenizer.encode_continuation(key)

    def build_engine_request(
        self, prompt: Sequence[int], params: GenerationParams, *, top_logprobs: int | None, body: SamplingBody, id: str
    ) -> GenerationRequest:
        """Build an engine request from a tokenized prompt and its parameters.

        The request also has the use of slots that `body` asks for.

        Raises:
            ModelError: The prompt has no tokens.
        """
        if not prompt:
            raise ModelError(EMPTY_PROMPT_ERROR)
        slot = None if body.id_slot < 0 else body.id_slot
        return GenerationRequest(id, tuple(prompt), params, top_logprobs, body.cache_prompt, slot)

    async def build_text_requests(
        self,
        body: SamplingBody,
        prompts: Sequence[tuple[int, ...]],
        *,
        limit: int | None,
        choices: int,
        top_logprobs: int | None,
        id: str,
    ) -> tuple[GenerationRequest, ...]:
        """Build the engine requests of text prompts: for each prompt in turn, as many requests as `choices`.

        Raises:
            ApiError: The grammar is wrong, or there are too many texts.
            ModelError: A prompt is empty, or a value does not fit the model.
        """
        if len(prompts) * choices > MAX_TEXTS:
            raise make_bad_request_error(
                f"{len(prompts)} prompts with {choices} choices; need {MAX_TEXTS} texts at most", "prompt"
            )
        grammar = await self.compile_requested_grammar(body)
        return tuple(
            self.build_engine_request(
                prompt,
                self.build_generation_params(body, limit, grammar, choice),
                top_logprobs=top_logprobs,
                body=body,
                id=f"{id}-{i * choices + choice}",
            )
            for i, prompt in enumerate(prompts)
            for choice in range(choices)
        )

    def require_served_model_if_strict(self, name: str) -> None:
        """Require that this server has the named model, if `ServerOptions.strict_model` is set.

        Raises:
            ApiError: The server has no model of this name.
        """
        names = (self._service.model_name, *self._options.aliases)
        if self._options.strict_model and name and name not in names:
            raise ApiError(404, f"there is no model {name!a:.80}; this server has {names[0]!a}", param="model")


def _select_response_schema(format: ResponseFormat) -> Mapping[str, object] | bool:
    """Select the JSON schema that a ``response_format`` asks for.

    Raises:
        ApiError: The type is unknown, or the schema is missing.
    """
    if format.type == "json_object":
        return ANY_OBJECT_SCHEMA if format.schema is None else format.schema
    if format.type != "json_schema":
        raise make_bad_request_error(
            f"response_format.type is {format.type!a:.40}; need text, json_object or json_schema", "response_format"
        )
    schema = format.schema if format.json_schema is None else format.json_schema.schema
    if schema is None:
        raise make_bad_request_error("response_format.json_schema.schema is missing", "response_format")
    return schema


def create_random_id(prefix: str) -> str:
    """Return a new random id with a prefix, such as ``chatcmpl-``."""
    return f"{prefix}{secrets.token_urlsafe(18)}"
