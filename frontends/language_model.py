"""`hocket.Model`: a language model for Python programs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Self, Unpack

import numpy as np
import numpy.typing as npt

from ..distributed import SINGLE_PROCESS, World
from ..graph import validate_arguments
from ..graph.errors import format_count
from ..graph.old_names import RenamedAttribute
from ..graph.validation import ANY, BOOL, CALLABLE, FILE_KIND, NONE, TEXT, instance_of, integer_between, list_of
from ..scheduler import Plan, format_bytes
from .completion import Completion, Token, complete_text, compute_logprobs, decode_tokens
from .config_options import accept_config_fields_as_keywords, format_options_as_args_section
from .errors import ModelError
from .generation import speculative
from .generation.generate import GenerationParams, generate_texts, sample_tokens_of_all_sequences, stream_text
from .generation.options import MESSAGES_KIND, OBJECTS_KIND, PROMPT_KIND, Options, resolve_options
from .gguf.chat import choose_chat_template_and_variables
from .gguf.tokenization.tokenizer import Tokenizer, has_vocabulary, tokenizer_from_metadata
from .inference.pooling import EMBED_BATCH_TEXTS, read_pooling_function
from .inference.prefill_chunks import TokenIds, convert_to_token_ids
from .inference.saved_state import convert_os_errors_to_model_error, load_state, save_state
from .inference.session import F32, Session
from .inference.session_lease import IdleSessions, SessionLease, sum_bytes_by_device_and_kind
from .open_model import open_adapted_model, open_model, open_session
from .run_config import RunConfig
from .serving.requests import GenerationRequest, TokenEvent
from .serving.running_requests import make_token_event
from .serving.shared_engine import SharedEngine, can_run_in_shared_engine
from .text_limits import require_nonempty_texts_fit

TOKEN_ROWS_KIND = list_of(list_of(ANY, "a sequence of tokens"), "a sequence of sequences of tokens")


class Model:
    """A language model on one or many devices.

    Threads may share a model. Calls of `generate`, `tokens` and `chat` that overlap run in one batch, so several
    threads together are faster, and each text is the same as alone. Other calls take turns, and so do all calls with
    drafts, a context shift, a loaded state or pipelined devices. A prompt that begins with the prompt of an earlier
    call is read from there on. A forked process opens a model of its own. Raises `hocket.ModelError` if a file or an
    option cannot be used, or if a text is longer than the context.

    The arguments are the fields of `run_config.RunConfig`. `path` is a GGUF file, a Hugging Face folder, or `None` for
    the embedded model.

    >>> with hocket.Model() as model:
    ...     text = "".join(model.generate("It is a truth", max_tokens=8, temperature=0))
    >>> text
    ' which I am not at all in love'
    """

    _first = RenamedAttribute("session")

    @validate_arguments(ModelError)
    @accept_config_fields_as_keywords(RunConfig)
    def __init__(self, config: RunConfig) -> None:
        self._open(config, SINGLE_PROCESS)

    @classmethod
    @validate_arguments(ModelError, config=instance_of(RunConfig), world=instance_of(World))
    def open_on_ranks(cls, config: RunConfig, world: World) -> Self:
        """Open a model on the devices of all ranks. Each rank makes the same calls."""
        model = cls.__new__(cls)
        model._open(config, world)
        return model

    def _open(self, config: RunConfig, world: World) -> None:
        model, draft, draft_max = open_adapted_model(config), config.draft, config.draft_max
        self._model = model.with_mtp_blocks() if draft is None and draft_max else model
        self._group, self._lock = config.group, threading.Lock()
        first = open_session(self._model, on=self._group, context=config.context, batch=config.batch, world=world)
        self._idle_sessions, self._draft_max = IdleSessions(first), draft_max or speculative.DEFAULT_DRAFT_TOKENS
        self._drafting = None if draft is None else self._open_draft_session(draft)
        self._can_share_steps = draft is None and can_run_in_shared_engine(first)
        self._shared_engine: SharedEngine | None = None
        self._leases_before_shared_call = -1
        self._tokenizer: Tokenizer | None = None

    @validate_arguments(ModelError, prompt=PROMPT_KIND)
    def generate(self, prompt: str | TokenIds, **options: Unpack[Options]) -> Iterator[str]:
        """Return an iterator over the text that continues `prompt` (text, or token ids ``[tokens]``), in pieces.

        >>> "".join(model.generate("It is a truth", max_tokens=3, temperature=0))
        ' which I am'
        """
        return self._generate_text(self._encode_prompt(prompt), resolve_options(options, self.tokenizer))

    @validate_arguments(ModelError, prompt=PROMPT_KIND, top_logprobs=integer_between(0))
    def complete(self, prompt: str | TokenIds, *, top_logprobs: int = 0, **options: Unpack[Options]) -> Completion:
        """Return the text that continues `prompt` at once, with its tokens and the reason why it ended.

        `top_logprobs` is the number of `Token.alternatives`.

        >>> answer = model.complete("It is a truth", max_tokens=3, temperature=0)
        >>> answer.text, answer.finish_reason, answer.prompt_tokens
        (' which I am', 'length', 4)
        """
        ids, tokenizer = self._encode_prompt(prompt), self._tokenizer_or_none
        params, stops = resolve_options(options, tokenizer)
        limit, room = params.limit, self.context - len(ids) + 1
        if params.pinned_tokens is None and not 0 <= limit <= room:
            params, limit = replace(params, limit=-1), room  # the text ends where the context is full
        tokens = self._generate_tokens(ids, params, stops, int(top_logprobs))
        return complete_text(tokens, tokenizer, stops, limit=limit, prompt_tokens=len(ids))

    @validate_arguments(ModelError, prompt=PROMPT_KIND, top_logprobs=integer_between(0))
    def tokens(self, prompt: str | TokenIds, *, top_logprobs: int = 0, **options: Unpack[Options]) -> Iterator[Token]:
        """Return an iterator over the tokens that continue `prompt`, each with its text and its log probability.

        The last token may complete a string of `stop`. A model without a vocabulary takes token ids and gives no text.
        `top_logprobs` is the number of `Token.alternatives`.

        >>> first = next(model.tokens("It is a truth", temperature=0))
        >>> first.text, round(first.logprob, 1)
        (' which', -1.7)
        """
        params, stops = resolve_options(options, self._tokenizer_or_none)
        return self._generate_tokens(self._encode_prompt(prompt), params, stops, int(top_logprobs))

    @validate_arguments(
        ModelError,
        messages=MESSAGES_KIND,
        tools=OBJECTS_KIND,
        documents=OBJECTS_KIND,
        chat_template=TEXT | NONE,
        chat_template_kwargs=instance_of(Mapping) | NONE,
    )
    def chat(
        self,
        messages: str | Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        **options: Unpack[Options],
    ) -> Iterator[str]:
        """Return an iterator over the answer to a conversation, in pieces as they are generated.

        The chat template of the model makes a prompt of the messages. To continue, append the answer and the next
        message. Raises `ModelError` if there is no template, or if it refuses the messages.

        Args:
            messages: The message of a user, or the messages so far with ``role`` and ``content``.
            tools: Descriptions of functions, in the JSON form that the template expects.
            documents: Texts that the answer may cite, likewise.
            chat_template: A template (jinja2) that replaces the template of the model.
            chat_template_kwargs: Further variables of the template, such as ``{"enable_thinking": False}``.
            options: The options of `generate`; the default of `max_tokens` is -1 here.

        >>> "".join(model.chat([{"role": "user", "content": "Say yes."}]))  # doctest: +SKIP
        'Yes.'
        """
        conversation = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        bos, eos = self.tokenizer.bos_text, self.tokenizer.eos_text
        format = choose_chat_template_and_variables(
            self._model.gguf.metadata,
            template=chat_template,
            tools=tools,
            documents=documents,
            variables=chat_template_kwargs,
        )
        ids = self.tokenizer.encode_chat(format.render(conversation, bos=bos, eos=eos))
        return self._generate_text(ids, resolve_options({"max_tokens": -1, **options}, self.tokenizer))

    @validate_arguments(ModelError, prompts=list_of(PROMPT_KIND, "a sequence of prompts"))
    def generate_batch(self, prompts: Sequence[str | TokenIds], **options: Unpack[Options]) -> list[str]:
        """Return the text that continues each of `prompts`. The prompts run together; each text is the same as alone.

        >>> model.generate_batch(["It is", "She was"], max_tokens=2, temperature=0)
        [' to be', ' not so']
        """
        params, stops = resolve_options(options, self.tokenizer)
        ids = [self._encode_prompt(prompt) for prompt in prompts]
        if not ids:
            return []
        if empty := [i for i, new in enumerate(ids) if not new]:
            raise ModelError(f"prompt {empty[0]} is empty and the model adds no BOS token; give some text to continue")
        with self._idle_sessions.lease(len(ids)) as lease:
            lease.reset_all_sequences()
            return generate_texts(lease.session, ids, params, stops, tokenizer=self.tokenizer, known=lease.tokens)

    def _generate_text(self, ids: list[int], options: tuple[GenerationParams, tuple[str, ...]]) -> Iterator[str]:
        params, stops = options
        with closing(self._sample_with_logprobs(ids, params)) as samples:
            yield from stream_text((one.token for one in samples), self.tokenizer, stops)

    def _generate_tokens(
        self, ids: list[int], params: GenerationParams, stops: tuple[str, ...], top_logprobs: int
    ) -> Iterator[Token]:
        with closing(self._sample_with_logprobs(ids, params, top_logprobs)) as samples:
            yield from decode_tokens(samples, self._tokenizer_or_none, stops)

    @property
    def _tokenizer_or_none(self) -> Tokenizer | None:
        """The tokenizer, or `None` if the file has no vocabulary."""
        return self.tokenizer if has_vocabulary(self._model.gguf.metadata) else None

    def _sample_with_logprobs(
        self, ids: list[int], params: GenerationParams, top_logprobs: int | None = None
    ) -> Generator[TokenEvent, None, None]:
        """Yield the tokens that continue a prompt, with log probabilities. Without `top_logprobs` they have none."""
        engine = self._find_shared_engine_if_usable(ids, params)
        if engine is not None:
            try:
                for sample in engine.sample_with_logprobs(ids, params, top_logprobs):
                    yield sample
                    _ = self.session  # raises after `close`
            finally:
                self._leases_before_shared_call = self._idle_sessions.lease_count
            return
        with self._idle_sessions.lease() as lease:
            ahead = self._create_speculative_decoder(lease, params)
            prompts = [lease.reuse_prefix_or_reset(ids)]
            needs_logits = top_logprobs is not None
            for one in sample_tokens_of_all_sequences(
                lease.session, prompts, params, known=lease.tokens, ahead=ahead, needs_logits=needs_logits
            ):
                yield make_token_event(GenerationRequest("", (), params, top_logprobs), one.token, one.logits)
                _ = self.session  # raises after `close`

    def _open_draft_session(self, path: str | Path) -> Session:
        model = open_model(path)
        speculative.require_same_vocabulary(self._model, model)
        if not (self._model.is_causal and model.is_causal):
            raise ModelError("a model that sees all tokens at once (diffusion) has no steps; leave out draft")
        context, world = min(self.session.context, model.context_length), self.session.world
        return open_session(model, on=self._group, context=context, batch=self.session.batch, world=world)

    def _create_speculative_decoder(
        self, lease: SessionLease, params: GenerationParams
    ) -> speculative.SpeculativeDecoder | None:
        """Make the decoder that drafts tokens with MTP blocks or a draft model; `None` without draft options."""
        if (root := self._drafting) is None and not self._model.mtp_block_count:
            return None
        if params.pinned_tokens is not None:
            raise ModelError("a context that shifts has no guesses; leave out draft and draft_max, or context_shift")
        if root is None:
            return speculative.SpeculativeDecoder(
                lease.session_of_only_sequence, speculative.MtpDrafter(lease.session_of_only_sequence), self._draft_max
            )
        if lease.draft_session is None:
            lease.draft_session = Session(root.model, on=self._group, like=root, context=root.context, batch=root.batch)
        lease.draft_session.reset(0)
        return speculative.SpeculativeDecoder(
            lease.session_of_only_sequence, speculative.ModelDrafter(lease.draft_session), self._draft_max
        )

    @validate_arguments(ModelError, prompt=PROMPT_KIND)
    def logits(self, prompt: str | TokenIds) -> F32:
        """Return the logits of a prompt, float32 ``[tokens, vocabulary]``; row i has the logits after token i.

        >>> model.logits([1, 2, 3]).shape
        (3, 2048)
        """
        ids = self._encode_prompt(prompt)
        with self._idle_sessions.lease() as lease:
            lease.reset_all_sequences()
            (rows,) = lease.session.evaluate([ids], every_position=True)
            lease.tokens[0] = list(ids)
        return rows

    @validate_arguments(ModelError, text=PROMPT_KIND)
    def score(self, text: str | TokenIds) -> npt.NDArray[np.float64]:
        """Return the natural log probability of each token after the first, float64 ``[tokens - 1]``.

        The sum is the score of the text; ``exp(-mean)`` is its perplexity.

        >>> round(float(np.exp(-model.score("It is a truth universally acknowledged").mean())), 1)
        26.8
        """
        ids = self._encode_prompt(text)
        return compute_logprobs(self.logits(ids)[:-1], ids[1:])

    @validate_arguments(ModelError, texts=TEXT | list_of(PROMPT_KIND, "a sequence of texts"), normalise=BOOL)
    def embed(self, texts: str | Sequence[str | TokenIds], *, normalise: bool = True) -> F32:
        """Return one embedding for each text, float32 ``[texts, width]``, of length 1 if `normalise` is set.

        The rows of the last layer are pooled as the file says (mean, first or last token). If the file names no pooling
        type, the mean is taken.

        >>> model.embed(["a ball", "a dance"]).shape
        (2, 192)
        """
        ids = [self._encode_prompt(text) for text in ([texts] if isinstance(texts, str) else texts)]
        whole = self.pool_texts(ids, read_pooling_function(self._model.gguf.metadata, self._model.architecture))
        return whole / np.linalg.norm(whole, axis=-1, keepdims=True).clip(1e-12) if normalise else whole

    @validate_arguments(ModelError, ids=TOKEN_ROWS_KIND, pool=CALLABLE)
    def pool_texts(self, ids: Sequence[Sequence[int]], pool: Callable[[F32], F32]) -> F32:
        """Return the pooled row of each tokenized text; `pool` gets the rows of its tokens, f32[tokens, width]."""
        ids = [convert_to_token_ids(i, row) for i, row in enumerate(ids)]
        require_nonempty_texts_fit(ids, self.context, "text")
        vectors: list[F32] = []
        for start in range(0, len(ids), EMBED_BATCH_TEXTS):
            part = ids[start : start + EMBED_BATCH_TEXTS]
            longest = 1 << max(map(len, part)).bit_length()
            with self._idle_sessions.lease(len(part), longest if len(part) > 1 else None) as lease:
                lease.reset_all_sequences()
                vectors += map(pool, lease.session.evaluate(part, every_position=True, hidden=True))
                lease.tokens = [list(new) for new in part]
        for vector in vectors:
            if not isinstance(vector, np.ndarray) or vector.shape != vectors[0].shape:
                raise ModelError("Model.pool_texts: pool must give NumPy arrays of one shape, one for each text")
        return np.stack(vectors) if vectors else np.zeros((0, self._model.hyper.width), np.float32)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the file. Raises `ModelError` if the file has none."""
        if self._tokenizer is None:
            self._tokenizer = tokenizer_from_metadata(self._model.gguf.metadata)
        return self._tokenizer

    def tokenize(self, text: str, *, special: bool = True) -> list[int]:
        """Return the token ids of a text.

        With `special`, BOS and EOS are added, and special tokens in the text are recognised.

        >>> model.detokenize(model.tokenize("It is"))
        'It is'
        """
        return self.tokenizer.encode(text, add_special=special, parse_special=special)

    def detokenize(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Return the text of token ids; `special` includes control tokens."""
        return self.tokenizer.decode(ids, special=special)

    def _encode_prompt(self, prompt: str | TokenIds) -> list[int]:
        return self.tokenize(prompt) if isinstance(prompt, str) else list(convert_to_token_ids(0, prompt))

    @validate_arguments(ModelError, path=FILE_KIND)
    def save(self, path: str | Path) -> None:
        """Save the tokens and states of the last call to a file; another process, on any devices, can load it.

        >>> model.save("talk.bin")
        >>> ids = model.load("talk.bin")
        >>> further = model.generate(ids + model.tokenize(" and then", special=False), max_tokens=2)
        """
        with convert_os_errors_to_model_error():
            is_shared, engine = self._leases_before_shared_call == self._idle_sessions.lease_count, self._shared_engine
            if is_shared and engine is not None:
                if engine.save_last_sequence(path):
                    return
                raise ModelError("save: another call uses the states of the last call; save before other calls begin")
            with self._idle_sessions.lease() as lease:
                save_state(lease.session_of_only_sequence, lease.tokens, path)

    @validate_arguments(ModelError, path=FILE_KIND)
    def load(self, path: str | Path) -> list[int]:
        """Load a saved state and return its tokens. A prompt that begins with these tokens continues from the state."""
        with self._idle_sessions.lease() as lease, convert_os_errors_to_model_error():
            (lease.tokens[0],) = load_state(lease.session_of_only_sequence, path)
            lease.has_saved_state = True
            return list(lease.tokens[0])

    @property
    def plan(self) -> Plan:
        """The execution plan of one token: `plan.explain()` gives the reasons, `plan.view()` shows the plan."""
        return self.session.plan(self.session.make_step(1, 1))

    @property
    def memory(self) -> dict[str, dict[str, int]]:
        """The bytes on each device by kind: ``weight``, ``state`` (with the caches of idle sessions) and ``arena``."""
        first = self.session
        leases, engine = self._idle_sessions.idle_leases, self._shared_engine
        shared = [] if engine is None else [engine.session]
        models = [(first, [*shared, *(one for lease in leases for one in lease.session.sessions)])]
        if self._drafting is not None:
            models.append((self._drafting, [h.draft_session for h in leases if h.draft_session is not None]))
        return sum_bytes_by_device_and_kind(models)

    @property
    def context(self) -> int:
        """The maximum tokens of a text."""
        return self.session.context

    @property
    def draft_session(self) -> Session | None:
        """The session that loaded the weights of the draft model; `None` without one."""
        return self._drafting

    @property
    def draft_max(self) -> int:
        """The largest number of draft tokens of a run."""
        return self._draft_max

    def close(self) -> None:
        """Close the model and free its memory; later calls raise `ModelError`."""
        with self._lock:
            self._idle_sessions.close()
            self._drafting = self._shared_engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        where, model = ", ".join(self._group.devices), self._model
        layers = format_count(self._model.layer_count_without_mtp, "layer")
        state = "closed" if self._idle_sessions.is_closed else f"{layers}, context {self.context}"
        return f"Model({str(model.gguf.path)!r}: {model.architecture} on {where}, {state})"

    def _repr_html_(self) -> str:
        """Return the HTML table of the model that a notebook shows."""
        model = self._model
        rows = {
            "file": model.gguf.path,
            "architecture": f"{model.architecture}, {format_count(model.layer_count_without_mtp, 'layer')}",
        }
        memory = {} if self._idle_sessions.is_closed else self.memory
        rows |= {"context": format_count(self.context, "token")} if memory else {"state": "closed"}
        for device, kinds in memory.items():
            rows[device] = ", ".join(f"{kind} {format_bytes(count)}" for kind, count in kinds.items())
        lines = (f"<tr><th>{escape(str(k))}</th><td>{escape(str(v))}</td></tr>" for k, v in rows.items())
        return f"<table>{''.join(lines)}</table>"

    @property
    def session(self) -> Session:
        """The session that loaded the weights; other sessions share its weights. Raises `ModelError` after `close`."""
        return self._idle_sessions.weight_loading_session

    def _find_shared_engine_if_usable(self, ids: Sequence[int], params: GenerationParams) -> SharedEngine | None:
        """Return the engine that runs a call together with others; `None` for a call that needs its own session."""
        if not self._can_share_steps or params.pinned_tokens is not None or len(ids) >= self.context:
            return None
        if any(one.has_saved_state and one.is_prefix_known(ids) for one in self._idle_sessions.idle_leases):
            return None
        with self._lock:
            first = self.session  # raises after `close`
            if self._shared_engine is None or self._shared_engine.failure:
                self._shared_engine = SharedEngine(first, shares_states=self._idle_sessions.withdraw_first_if_unused())
            return self._shared_engine


Model.__doc__ = f"{Model.__doc__}\n    Args:\n{format_options_as_args_section(RunConfig)}"
