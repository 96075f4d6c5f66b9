"""The protocol between the HTTP server and a served model, so that tests of the server need no weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..gguf.tokenization.tokenizer import Tokenizer
from ..inference.saved_state import SavedSessionState
from .requests import EngineStatus, Event, GenerationRequest
from .step_history import RequestRecord, RequestTrace


class ModelService(Protocol):
    """A served model, with an engine that runs in its own thread. All members may be called from any thread."""

    @property
    def model_name(self) -> str:
        """The name of the model for clients: its alias, or the name of its file."""

    @property
    def metadata(self) -> Mapping[str, object]:
        """The metadata of the model file, such as the chat template."""

    @property
    def llama_server_model_fields(self) -> Mapping[str, int]:
        """The fields ``n_vocab``, ``n_ctx_train``, ``n_embd``, ``n_params`` and ``size`` (bytes) of llama-server."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""

    @property
    def fingerprint(self) -> str:
        """A digest of all that determines the generated text: model, version, processor, cache dtypes, devices."""

    @property
    def status(self) -> EngineStatus:
        """The present counts of the engine, such as running and queued requests."""

    @property
    def is_compiled_and_ready(self) -> bool:
        """Whether all steps are compiled; requests wait until then."""

    @property
    def seconds_since_heartbeat(self) -> float:
        """Seconds since the engine last ended a step or found that there is no work."""

    @property
    def engine_end_reason(self) -> str:
        """The reason why the engine has ended; an empty text while it runs."""

    def submit(self, request: GenerationRequest, on_event: Callable[[Event], None]) -> None:
        """Submit a request to the queue. The engine calls `on_event` in its thread for each event; it must not block.

        Raises:
            QueueFullError: The queue is full.
            ContextExceededError: The prompt is too long.
            ModelError: An option does not fit the model.
        """

    def cancel(self, request: str) -> None:
        """Cancel the request with this id within one step, also while it is queued; unknown ids are ignored."""

    @property
    def max_slot_file_bytes(self) -> int:
        """The largest bytes of a file from which a slot can be restored."""

    def capture_slot(self, slot: int) -> Future[SavedSessionState]:
        """Copy the states of a slot as soon as it is free; the result has the tokens of its last request.

        The result raises `ModelError` if the slot has no tokens.

        Raises:
            ModelError: There is no engine, or it has ended.
        """

    def restore_slot(self, slot: int, state: SavedSessionState, path: str | Path) -> Future[int]:
        """Restore a slot from a saved state, and return a future of the number of its tokens.

        The slot is restored as soon as it is free. The result raises `ModelError` if the state does not fit. `path` is
        the file, for messages.

        Raises:
            ModelError: There is no engine, or it has ended.
        """

    def erase_slot(self, slot: int) -> Future[int]:
        """Erase the tokens of a slot, and return a future of their number.

        The slot is erased as soon as it is free.

        Raises:
            ModelError: There is no engine, or it has ended.
        """

    def list_requests(self) -> Sequence[RequestRecord]:
        """List the last requests. The oldest comes first."""

    def trace_request_or_choices(self, name: str) -> Sequence[RequestTrace]:
        """Return the traces of the request with this id, or of all choices of the response with this id."""

    def embed(self, texts: Sequence[Sequence[int]], *, normalise: bool) -> npt.NDArray[np.float32]:
        """Compute the embedding vectors of tokenized texts, f32[texts, width].

        The call blocks until the vectors are complete, so call it in a worker thread.

        Raises:
            ModelError: A text is empty or too long.
        """

    def rank(self, query: str, documents: Sequence[str]) -> tuple[npt.NDArray[np.float32], int]:
        """Compute the scores of documents for a query, f32[documents], and the tokens of all texts.

        The call blocks until the scores are complete, so call it in a worker thread.

        Raises:
            ModelError: The model has no rank head, or a text is too long.
        """

    def explain_plans(self) -> str:
        """Explain the plans that serve requests, as text."""

    def close(self, grace_seconds: float) -> None:
        """Close the service: refuse new requests, end running ones after `grace_seconds`, and end the thread."""
