"""The members of a served model that need no engine: its names, its tokenizer, vectors and scores of texts.

An encoder has no others: `EncoderService`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np

from ...backends.capabilities import require_no_lost_device
from ...backends.cpu.target_cpu import find_host_or_requested_target
from ...distributed.rank_calls import RankCalls, on_all_ranks
from ...graph.errors import DeviceLostError
from ...scheduler import Plan
from ..errors import ModelError
from ..gguf.tokenization.tokenizer import Tokenizer
from ..inference.model_digest import compute_model_digest
from ..inference.prefill_chunks import F32
from ..inference.saved_state import SavedSessionState
from ..inference.session import Session
from ..ranking import TextPooler, rank_documents
from .requests import EngineStatus, EngineTotals, Event, GenerationRequest
from .step_history import RequestRecord, RequestTrace

NO_SLOTS_ERROR = "this model is an encoder, which keeps no tokens in slots"


class LoadedModel(TextPooler, Protocol):
    """The interface of `hocket.Model` that a service uses."""

    @property
    def context(self) -> int:
        """The maximum tokens of a text."""

    @property
    def plan(self) -> Plan:
        """The execution plan of one token."""

    @property
    def draft_session(self) -> Session | None:
        """The session that has loaded the weights of the draft model; `None` without one."""

    @property
    def draft_max(self) -> int:
        """The largest number of draft tokens of a run."""

    def embed(self, texts: Sequence[str | Sequence[int]], *, normalise: bool = True) -> F32:
        """Return one embedding for each text; see `hocket.Model.embed`."""


class ServedModel:
    """A model with its name for clients; see `ModelService` for the members. Any thread may use it.

    With several ranks, all of them make the same object. Rank 0 serves, and the other ranks follow its `rank_calls`.

    Args:
        model: The model.
        name: The name of the model for clients.
        version: The version of hocket, for the fingerprint.
    """

    def __init__(self, model: LoadedModel, *, name: str, version: str) -> None:
        self.rank_calls: RankCalls = RankCalls(model.session.world)
        self._model, self._name, self._version = model, name, version
        self._fingerprint = self._compute_version_plan_and_device_digest(version)

    @property
    def model_name(self) -> str:
        return self._name

    @property
    def metadata(self) -> Mapping[str, object]:
        return self._model.session.model.gguf.metadata

    @property
    def llama_server_model_fields(self) -> Mapping[str, int]:
        model = self._model.session.model
        tensors = model.gguf.tensors.values()
        return {
            "n_vocab": model.vocabulary_size,
            "n_ctx_train": model.context_length,
            "n_embd": model.hyper.width,
            "n_params": sum(int(np.prod(tensor.shape)) for tensor in tensors),
            "size": sum(tensor.nbytes for tensor in tensors),
        }

    @property
    def tokenizer(self) -> Tokenizer:
        return self._model.tokenizer

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    def _compute_version_plan_and_device_digest(self, version: str) -> str:
        """Compute a digest of the version, the model, the plan of a token, the processor's features and the devices."""
        session = self._model.session
        parts = [
            version,
            compute_model_digest(session.model),
            self._model.plan.digest(),
            find_host_or_requested_target().name,
        ]
        parts += [str(dtype) for dtype in session.on.cache_dtypes] + [str(session.on)]
        return f"hocket-{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:16]}"

    def require_no_lost_device(self) -> None:
        """Raise `DeviceLostError` if a device was lost, so that it refuses all further calls of this process."""
        require_no_lost_device(self._model.session.group)

    def end_service_if_device_lost(self) -> None:
        """End the service if a device was lost in a call of `embed` or `rank`; this base class does nothing."""

    @contextmanager
    def _devices_checked_after_failure(self) -> Iterator[None]:
        try:
            yield
        except Exception:  # a backend may raise anything; it is raised again
            self.end_service_if_device_lost()
            raise

    def embed(self, texts: Sequence[Sequence[int]], *, normalise: bool) -> F32:
        with self._devices_checked_after_failure():
            return self._embed_on_all_ranks(texts, normalise=normalise)

    def rank(self, query: str, documents: Sequence[str]) -> tuple[F32, int]:
        with self._devices_checked_after_failure():
            return self._rank_on_all_ranks(query, documents)

    @on_all_ranks
    def _embed_on_all_ranks(self, texts: Sequence[Sequence[int]], *, normalise: bool) -> F32:
        return self._model.embed(texts, normalise=normalise)

    @on_all_ranks
    def _rank_on_all_ranks(self, query: str, documents: Sequence[str]) -> tuple[F32, int]:
        return rank_documents(self._model, query, documents)


def is_non_generative(model: LoadedModel) -> bool:
    """Whether a model cannot generate token by token: an encoder, or a model that sees all tokens of a text at once."""
    source = model.session.model
    return source.is_encoder_without_logits or not source.is_causal


class EncoderService(ServedModel):
    """Serves the vectors and scores of an encoder, without an engine; see `ModelService` for its members.

    Args:
        model: The model.
        name: The name of the model for clients.
        version: The version of hocket, for the fingerprint.
        on_failure: Called with the reason, in the thread of a caller, if a device is lost.
    """

    is_compiled_and_ready, seconds_since_heartbeat = True, 0.0

    def __init__(
        self, model: LoadedModel, *, name: str, version: str, on_failure: Callable[[str], None] = lambda why: None
    ) -> None:
        super().__init__(model, name=name, version=version)
        self._on_failure, self.engine_end_reason = on_failure, ""
        self.error: BaseException | None = None
        """The loss of a device, which has ended the service."""

    def end_service_if_device_lost(self) -> None:
        try:
            self.require_no_lost_device()
        except DeviceLostError as error:
            self.error, self.engine_end_reason = error, str(error)
            self._on_failure(self.engine_end_reason)

    @property
    def status(self) -> EngineStatus:
        """The status of an engine with one slot, which is always free: an encoder keeps nothing between requests."""
        return EngineStatus(1, self._model.context, 0, 0, ("",), (0,), EngineTotals())

    def submit(self, request: GenerationRequest, on_event: Callable[[Event], None]) -> None:
        """Refuse to generate.

        Raises:
            ModelError: Always.
        """
        architecture = self._model.session.model.architecture
        raise ModelError(f"{architecture} is an encoder and generates no text; use /v1/embeddings or /rerank")

    def cancel(self, request: str) -> None:
        """Do nothing, because no request runs."""

    max_slot_file_bytes = 0

    def capture_slot(self, slot: int) -> Future[SavedSessionState]:
        """Refuse: an encoder keeps no tokens. Raises `ModelError` always."""
        raise ModelError(NO_SLOTS_ERROR)

    def restore_slot(self, slot: int, state: SavedSessionState, path: str | Path) -> Future[int]:
        """Refuse: an encoder keeps no tokens. Raises `ModelError` always."""
        raise ModelError(NO_SLOTS_ERROR)

    def erase_slot(self, slot: int) -> Future[int]:
        """Refuse: an encoder keeps no tokens. Raises `ModelError` always."""
        raise ModelError(NO_SLOTS_ERROR)

    def list_requests(self) -> list[RequestRecord]:
        """Return no requests, because none is generated."""
        return []

    def trace_request_or_choices(self, name: str) -> list[RequestTrace]:
        """Return no traces, because nothing is generated."""
        return []

    def explain_plans(self) -> str:
        """Explain the plan of a whole text."""
        return f"text, {self._model.context} tokens:\n{self._model.plan.explain()}\n"

    def close(self, grace_seconds: float) -> None:
        """Do nothing, because there is no thread."""
