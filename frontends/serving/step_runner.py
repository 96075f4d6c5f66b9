"""The protocol of the memory and the runs of an engine, so that tests of the engine need no weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..inference.prefill_chunks import F32


class StepRunner(Protocol):
    """The operations of `SlotPool` that the engine calls; a test can pass a substitute that needs no weights."""

    slots: int
    context: int
    batch: int

    def read_prompt(self, slot: int, tokens: Sequence[int], before: Sequence[int]) -> F32:
        """Read prompt tokens into a slot, and return the logits after the last one; see `SlotPool.read_prompt`."""

    def decode(self, tokens: dict[int, int], before: dict[int, Sequence[int]]) -> dict[int, F32]:
        """Append one token to each given slot, and return the logits by slot; see `SlotPool.decode`."""

    def list_drafted_tokens(self, slot: int) -> Sequence[int]:
        """Return the draft tokens that a slot has evaluated after its last token.

        `decode` returns the logits of the first one without a run. All further ones are wrong if another token follows.
        """

    @property
    def planning_seconds(self) -> float:
        """The seconds of plans and kernels since the start, which runs may include; see `SlotPool`."""

    def predict_prompt_seconds(self, size: int) -> float:
        """Return the predicted seconds of a prompt chunk of `size` tokens; see `SlotPool.predict_prompt_seconds`."""

    def zero_slot_states(self, slot: int) -> None:
        """Zero all states of a slot; see `SlotPool.zero_slot_states`."""

    def rebind_plans_and_zero_states(self) -> None:
        """Bind all plans anew and zero all states; see `SlotPool.rebind_plans_and_zero_states`."""
