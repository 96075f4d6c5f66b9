"""The service of an encoder, which makes vectors and scores of texts, and generates nothing."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from ..errors import ModelError
from ..inference.saved_state import SavedSessionState
from .requests import EngineStatus, EngineTotals, Event, GenerationRequest
from .served_model import LoadedModel, ServedModel
from .step_history import RequestRecord, RequestTrace

NO_SLOTS_ERROR = "this model is an encoder, which keeps no tokens in slots"


def has_no_generation(model: LoadedModel) -> bool:
    """Whether a model sees all tokens of a text at once, so that it cannot generate token by token."""
    source = model.session.model
    return source.is_encoder_without_logits or not source.is_causal


class EncoderService(ServedModel):
    """Serves the vectors and scores of an encoder, without an engine; see `ModelService` for its members."""

    is_compiled_and_ready, seconds_since_heartbeat, engine_end_reason = True, 0.0, ""
    error: BaseException | None = None

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
