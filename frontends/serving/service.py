"""The protocol of a served model, so that tests of the HTTP server need no weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..gguf.tokenization.tokenizer import Tokenizer
from .requests import EngineStatus, Event, GenerationRequest


class ModelService(Protocol):
    """A model with an engine that runs in a thread of its own. All members may be called from any thread."""

    @property
    def model_name(self) -> str:
        """The name of the model for clients: its alias, or the name of its file."""

    @property
    def metadata(self) -> Mapping[str, object]:
        """The metadata of the model file, among it the chat template."""

    @property
    def model_info(self) -> Mapping[str, int]:
        """The fields ``n_vocab``, ``n_ctx_train``, ``n_embd``, ``n_params`` and ``size`` (bytes) of llama-server."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""

    @property
    def fingerprint(self) -> str:
        """A digest of all that determines the text: model, version, processor, cache dtypes, devices."""

    @property
    def status(self) -> EngineStatus:
        """The present counts of the engine."""

    @property
    def is_ready(self) -> bool:
        """Whether all steps are compiled; requests wait until then."""

    @property
    def seconds_since_heartbeat(self) -> float:
        """Seconds since the engine ended a step or found that there is no work."""

    @property
    def failure(self) -> str:
        """Why the engine has ended; an empty text while it runs."""

    def submit(self, request: GenerationRequest, on_event: Callable[[Event], None]) -> None:
        """Queue a request. `on_event` is called in the engine's thread for each event; it must not block.

        Raises:
            QueueFullError: The queue is full.
            ContextExceededError: The prompt is too long.
            ModelError: An option does not fit the model.
        """

    def cancel(self, request: str) -> None:
        """End a request within one step, also while it is queued; unknown ids are ignored."""

    def embed(self, texts: Sequence[Sequence[int]], *, normalise: bool) -> npt.NDArray[np.float32]:
        """Return f32[texts, width]; blocks until it is done, so call it in a worker thread.

        Raises:
            ModelError: A text is empty or too long.
        """

    def explain_plans(self) -> str:
        """Return the explanation of the plans that serve, as text."""

    def close(self, grace_seconds: float) -> None:
        """Refuse new requests, end running ones after `grace_seconds`, and end the thread."""
