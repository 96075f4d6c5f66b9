"""A model service without weights: a small engine with texts that a test writes, and a server around it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt

from hocket.frontends.errors import ModelError
from hocket.frontends.generation.grammar import GrammarState
from hocket.frontends.gguf.tokenization.tokenizer import BYTE_OF_CHARACTER, Tokenizer, tokenizer_from_metadata
from hocket.frontends.serving.requests import (
    ContextExceededError,
    EndEvent,
    EngineStatus,
    EngineTotals,
    Event,
    GenerationRequest,
    PromptProgressEvent,
    QueueFullError,
    RequestTiming,
    TokenEvent,
)
from hocket.server.app import create_app
from hocket.server.lifecycle import DrainingServer, bind_sockets
from hocket.server.options import ServerOptions

from ..waits import WAIT_SECONDS

SPECIAL_TOKENS = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<think>", "</think>")
CALL_TOKENS = ("<tool_call>", "</tool_call>")
WORDS = ("he", "the", "st", "op", "stop")
MERGES = ("h e", "t he", "s t", "o p", "st op")
CHAT_TEMPLATE = """{%- if tools %}<|system|>{{ tools | tojson }} <tool_call>{% endif %}
{%- for message in messages %}<|{{ message.role }}|>{{ message.content }}
{%- for call in message.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% if enable_thinking %}<think>{% endif %}{% endif %}"""
THOUGHTFUL_TEMPLATE = CHAT_TEMPLATE + "{# </think> #}"


def build_metadata(template: str = THOUGHTFUL_TEMPLATE) -> dict[str, object]:
    """Return metadata of a byte-level vocabulary with few words, special tokens and a chat template."""
    tokens = [*BYTE_OF_CHARACTER, *WORDS, *SPECIAL_TOKENS, *CALL_TOKENS]
    types = [1] * (len(BYTE_OF_CHARACTER) + len(WORDS)) + [3] * len(SPECIAL_TOKENS) + [4] * len(CALL_TOKENS)
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": types,
        "merges": list(MERGES),
        "eos_token_id": tokens.index("<|end|>"),
        "bos_token_id": tokens.index("<|end|>"),
        "add_bos_token": False,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()} | {"tokenizer.chat_template": template}


@dataclass
class RunningRequest:
    """A request with a slot, or one that waits for it."""

    request: GenerationRequest
    send: Callable[[Event], None]
    script: list[int]
    tokens: list[int] = field(default_factory=list)
    grammar: GrammarState | None = None
    start: float = field(default_factory=time.monotonic)
    is_cancelled: bool = False


class FakeService:
    """A `ModelService` that answers every prompt by `answer`, token by token, in a thread of its own.

    Args:
        answer: The text, or a function from the text of the prompt to it.
        slots: Requests that run at once; `queue`: requests that may wait.
        context: Tokens of a slot.
        delay: Seconds of a step.
        template: The chat template.
    """

    def __init__(
        self,
        answer: str | Callable[[str], str] = "the answer",
        *,
        slots: int = 4,
        queue: int = 8,
        context: int = 2048,
        delay: float = 0.0,
        template: str = THOUGHTFUL_TEMPLATE,
    ) -> None:
        self.answer, self.slots, self.queue, self.context, self.delay = answer, slots, queue, context, delay
        self.metadata: Mapping[str, object] = build_metadata(template)
        self.tokenizer: Tokenizer = tokenizer_from_metadata(self.metadata)
        self.model_name, self.fingerprint = "fake-model", "b0-fake"
        self.llama_server_model_fields = {
            "n_vocab": self.tokenizer.n_tokens,
            "n_ctx_train": 4096,
            "n_embd": 4,
            "n_params": 1,
            "size": 2,
        }
        self.engine_end_reason, self.seconds_since_heartbeat, self.is_compiled_and_ready = "", 0.0, True
        self.requests: list[GenerationRequest] = []
        """All requests that were submitted."""
        self.cancelled: list[str] = []
        self.pauses = False
        """Whether the engine makes no steps."""
        self.fails_after: int | None = None
        """Tokens after which a request ends with an error."""
        self.ranks = True
        """Whether the model has a rank head."""
        self.embedded: list[Sequence[Sequence[int]]] = []
        self._sums = EngineTotals()
        self._lock, self._wakes = threading.Lock(), threading.Event()
        self._waiting: deque[RunningRequest] = deque()
        self._running: list[RunningRequest] = []
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def status(self) -> EngineStatus:
        """The present counts."""
        with self._lock:
            names = [each.request.id for each in self._running]
            tokens = [len(each.request.prompt) + len(each.tokens) for each in self._running]
            idle = self.slots - len(names)
            return EngineStatus(
                self.slots,
                self.context,
                len(names),
                len(self._waiting),
                (*names, *[""] * idle),
                (*tokens, *[0] * idle),
                replace(self._sums),
            )

    def submit(self, request: GenerationRequest, on_event: Callable[[Event], None]) -> None:
        """Queue a request."""
        if len(request.prompt) >= self.context:
            raise ContextExceededError(len(request.prompt), self.context)
        request.params.sampling.check_logit_bias_tokens(self.tokenizer.n_tokens)
        text = self.tokenizer.decode(request.prompt, special=True)
        answer = self.answer if isinstance(self.answer, str) else self.answer(text)
        script = [*self.tokenizer.encode(answer, parse_special=True), self.tokenizer.eos_id or 0]
        grammar = request.params.grammar.make_state() if request.params.grammar else None
        with self._lock:
            if len(self._waiting) + len(self._running) >= self.slots + self.queue:
                raise QueueFullError(len(self._waiting), 7.0)
            self.requests.append(request)
            self._waiting.append(RunningRequest(request, on_event, script, grammar=grammar))
        self._wakes.set()

    def cancel(self, request: str) -> None:
        """End a request within one step."""
        with self._lock:
            self.cancelled.append(request)
            for each in (*self._waiting, *self._running):
                each.is_cancelled |= each.request.id == request
        self._wakes.set()

    def embed(self, texts: Sequence[Sequence[int]], *, normalise: bool) -> npt.NDArray[np.float32]:
        """Return vectors with the counts and sums of the tokens."""
        if any(not text for text in texts):
            raise ModelError("text 1 has no tokens; give some text to embed")
        while self.pauses and not self._is_closed:
            time.sleep(0.01)
        self.embedded.append(texts)
        rows = np.array([[len(text), sum(text), 1.0, 0.5] for text in texts], np.float32)
        return rows / np.linalg.norm(rows, axis=-1, keepdims=True) if normalise else rows

    def rank(self, query: str, documents: Sequence[str]) -> tuple[npt.NDArray[np.float32], int]:
        """Return the number of words of the query in each document, and the tokens of all texts."""
        if not self.ranks:
            raise ModelError("this model has no head that ranks documents")
        words = query.split()
        counts = [sum(word in document for word in words) for document in documents]
        texts = [self.tokenizer.encode(query + document) for document in documents]
        return np.array(counts, np.float32), sum(map(len, texts))

    def explain_plans(self) -> str:
        """Return a text in place of plans."""
        return "the plan of a fake\n"

    def close(self, grace_seconds: float) -> None:
        """End the thread."""
        self._is_closed = True
        self._wakes.set()
        self._thread.join(5)

    def _run(self) -> None:
        while not self._is_closed:
            if self.pauses or not (self._running or self._waiting):
                self._wakes.wait(0.01)
                self._wakes.clear()
            if self.pauses:
                self._end_cancelled()
                continue
            if self.delay:
                time.sleep(self.delay)
            self._admit()
            self._sums.decode_steps += bool(self._running)
            for each in list(self._running):
                self._step(each)
            self._end_cancelled()

    def _admit(self) -> None:
        with self._lock:
            admitted = [
                self._waiting.popleft() for _ in range(min(len(self._waiting), self.slots - len(self._running)))
            ]
            self._running += admitted
        for each in admitted:
            self._sums.prompt_tokens += len(each.request.prompt)
            each.send(PromptProgressEvent(each.request.id, len(each.request.prompt)))

    def _end_cancelled(self) -> None:
        with self._lock:
            ended = [each for each in (*self._waiting, *self._running) if each.is_cancelled]
        for each in ended:
            self._end(each, "cancelled")

    def _end(self, each: RunningRequest, reason: str, message: str = "") -> None:
        with self._lock:
            if each in self._running:
                self._running.remove(each)
            else:
                self._waiting.remove(each)
            self._sums.finished_requests += 1
        timing = RequestTiming(len(each.request.prompt), 1, len(each.tokens), 0.25, 0.5, 2.0)
        each.send(EndEvent(each.request.id, reason, timing, message))

    def _step(self, each: RunningRequest) -> None:
        params, count = each.request.params, len(each.tokens)
        if count == self.fails_after:
            return self._end(each, "error", "the engine has lost a device")
        if params.limit == 0:
            return self._end(each, "length")
        logits = -np.arange(self.tokenizer.n_tokens, dtype=np.float32)
        logits[each.script[min(count, len(each.script) - 1)]] = 50.0
        masked = each.grammar.mask_logits(logits) if each.grammar else logits
        rng = np.random.default_rng([params.seed, count])
        token = params.sampling.choose_token(masked, rng, [*each.request.prompt, *each.tokens])
        if token in params.end_tokens:
            return self._end(each, "stop")
        each.tokens.append(token)
        self._sums.new_tokens += 1
        top = each.request.top_logprobs
        if top is None:
            each.send(TokenEvent(each.request.id, token))
        else:
            others = tuple((i, -0.5 - i) for i in range(top))
            each.send(TokenEvent(each.request.id, token, -0.25, others))
        if each.grammar is not None and not each.grammar.accept_token_and_can_continue(token):
            return self._end(each, "stop")
        if len(each.tokens) == params.limit or len(each.request.prompt) + len(each.tokens) >= self.context:
            self._end(each, "length")


@dataclass
class RunningServer:
    """A server in a thread, with its address."""

    service: FakeService
    server: DrainingServer
    thread: threading.Thread
    port: int

    @property
    def url(self) -> str:
        """The address."""
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str, **options: Any) -> httpx.Response:
        """Send a GET request."""
        return httpx.get(self.url + path, timeout=WAIT_SECONDS, **options)

    def post(self, path: str, body: object = None, **options: Any) -> httpx.Response:
        """Send a POST request with a JSON body."""
        return httpx.post(self.url + path, json=body, **{"timeout": WAIT_SECONDS, **options})


@contextmanager
def serve(service: FakeService | None = None, **options: Any) -> Iterator[RunningServer]:
    """Serve a fake model at a free port while the context is open."""
    service = service or FakeService()
    settings = ServerOptions(port=0, **options)
    ready = threading.Event()
    (listener,) = bind_sockets(settings)
    app = create_app(service, settings)
    server = DrainingServer(app, settings, lambda _: ready.set())
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]), daemon=True)
    thread.start()
    assert ready.wait(WAIT_SECONDS)
    try:
        yield RunningServer(service, server, thread, listener.getsockname()[1])
    finally:
        server.request_exit()
        server.request_exit()
        thread.join(WAIT_SECONDS)
        listener.close()
        app.state.serving.builder.close()
        service.close(0)
