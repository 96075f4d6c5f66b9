"""The protocol of a drafter, which proposes the next tokens of several slots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from ...inference.prefill_chunks import next_power_of_two
from ..slots import SlotPool

MAX_DRAFT_TOKENS = 7
"""Largest number of draft tokens of a slot. Kernels round 16 and more tokens of a sequence as in a prompt."""
MAX_DRAFTED_WINDOW = 4
"""Largest window of slots that has drafts; larger batches use the processor well without them."""


class SlotDrafter(Protocol):
    """Proposes draft tokens for the slots of a pool: the interface of `ModelSlotDrafter` and `MtpSlotDrafter`."""

    max_tokens: int
    """The draft tokens of a slot."""

    @property
    def own_pool(self) -> SlotPool | None:
        """The slot pool of the drafter's own model; None if the served model itself drafts."""

    def draft_tokens(self, known: Mapping[int, tuple[int, ...]]) -> dict[int, list[int]]:
        """Propose the most probable next tokens of some slots; a slot may get none.

        Args:
            known: All tokens of each slot; the last one is sampled and not evaluated yet.
        """

    def predict_draft_seconds(self, count: int, length: int) -> float:
        """Predict from plans how many seconds a call of `draft_tokens` takes.

        Args:
            count: The number of slots of the window.
            length: The tokens of the longest slot.
        """

    def compile_draft_steps(self, count: int, length: int) -> Iterator[None]:
        """Compile the steps of `draft_tokens` in a window of `count` slots, and yield after each of them.

        Args:
            count: The number of slots.
            length: The tokens of the longest slot.
        """

    def rebind_plans_and_forget_slots(self) -> None:
        """Bind the drafter's own plans anew at their next use, and forget all tokens, after a failure of a device."""


def choose_draft_bucket(max_tokens: int) -> int:
    """Return the bucket of the tokens of a step with drafts: a sampled token, and `max_tokens` draft tokens."""
    return next_power_of_two(max_tokens + 1)
