"""The choice of mixed steps: they run where the plans predict that one step takes less time than two."""

from __future__ import annotations

from ...inference.mixed_step import can_run_mixed_steps, make_mixed_step
from ...inference.session import Session

MAX_MIXED_TOKENS = 64
"""Largest number of prompt tokens of a mixed step; longer chunks take longer than a decode step."""


class MixedStepPredictor:
    """Predicts from plans how many seconds a mixed step saves; each size is predicted once."""

    def __init__(self) -> None:
        self._saved_seconds: dict[tuple[int, int, int], float] = {}
        """The seconds by slots of the window, bucket of prompt tokens, and context bucket."""

    def predict_saved_seconds(self, window: Session, alone: Session, size: int, length: int) -> float:
        """Predict the seconds that a mixed step saves; 0 if it cannot run.

        Args:
            window: The session of the slots of the mixed step.
            alone: The session of one slot, which would read the prompt.
            size: The bucket of prompt tokens.
            length: The tokens of the longest slot after the step.
        """
        decode = window.make_step(1, length, window.sequences)
        key = window.sequences, size, decode.cells
        if key not in self._saved_seconds:
            can_run = size <= MAX_MIXED_TOKENS and can_run_mixed_steps(window)
            self._saved_seconds[key] = 0.0
            if can_run:
                steps = ((window, decode), (alone, alone.make_step(size, length)))
                apart = sum(session.plan(step).cost.total for session, step in steps)
                mixed = window.plan(make_mixed_step(window, size, length)).cost.total
                self._saved_seconds[key] = apart - mixed
        return self._saved_seconds[key]
