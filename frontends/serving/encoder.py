"""The service of an encoder, which makes vectors and scores of texts, and generates nothing."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import ModelError
from .requests import EngineStatus, EngineTotals, Event, GenerationRequest
from .served_model import LoadedModel, ServedModel


def has_no_generation(model: LoadedModel) -> bool:
    """Whether a model sees all tokens of a text at once, so that it cannot generate token by token."""
    source = model.session.model
    return source.is_encoder or not source.is_causal


class EncoderService(ServedModel):
    """Serves the vectors and scores of an encoder, without an engine; see `ModelService` for its members."""

    is_ready, seconds_since_heartbeat, failure = True, 0.0, ""
    error: BaseException | None = None

    @property
    def status(self) -> EngineStatus:
        """One slot, which is always free."""
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

    def explain_plans(self) -> str:
        """Explain the plan of a whole text."""
        return f"text, {self._model.context} tokens:\n{self._model.plan.explain()}\n"

    def close(self, grace_seconds: float) -> None:
        """Do nothing, because there is no thread."""
