"""The choice when drafts are worth their time, by the predicted times of plans and the measured acceptance.

A step without drafts gives each slot one token. A step with drafts takes longer, and gives a slot one more token for
each accepted draft token. The number of accepted tokens of a slot, at which both have the same speed, is the break-even
acceptance. Example: a step with drafts takes 1.5 times as long, drafting included. Then drafts are worth it if more
than 0.5 of them are accepted in a step.
"""

from __future__ import annotations

from collections.abc import Collection

ACCEPTANCE_SMOOTHING = 0.2
"""Weight of the last step in the mean of the accepted draft tokens."""
MAX_PAUSE = 64
"""Largest number of tokens that a slot runs without drafts before they are tried again."""


def compute_break_even_acceptance(plain_seconds: float, verify_seconds: float, draft_seconds: float) -> float:
    """Compute how many draft tokens of each slot must be accepted in a step, so that drafts cost no time.

    Args:
        plain_seconds: The time of a step without drafts.
        verify_seconds: The time of a step that evaluates draft tokens.
        draft_seconds: The time of the drafter.
    """
    return (verify_seconds + draft_seconds) / plain_seconds - 1.0


class DraftSlotChooser:
    """Chooses the slots that get drafts.

    A slot begins with the assumption that all its draft tokens are right. After a step with wrong drafts alone, it
    pauses for a number of tokens, which doubles with each such step in a row. A slot with drafts that are not worth
    their time pauses for `MAX_PAUSE` tokens.

    Args:
        slots: Number of slots.
        max_tokens: The draft tokens of a slot in a step.
    """

    def __init__(self, slots: int, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._accepted = [float(max_tokens)] * slots
        """Per slot the mean number of accepted draft tokens of a step."""
        self._wrong_steps = [0] * slots
        """Per slot the steps in a row with wrong drafts alone."""
        self._pauses = [0] * slots
        """Per slot the tokens until its next drafts."""
        self._excluded = set[int]()

    def choose_slots(self, slots: Collection[int], break_even: float) -> list[int]:
        """Choose the slots of a step that get drafts, and shorten the pauses of the others by one token.

        Args:
            slots: The slots of the step.
            break_even: The break-even acceptance of its window, from `compute_break_even_acceptance`.
        """
        if break_even >= self._max_tokens:
            return []
        due = [slot for slot in slots if not self._pauses[slot] and slot not in self._excluded]
        for slot in slots:
            self._pauses[slot] = max(0, self._pauses[slot] - 1)
        if sum(self._accepted[slot] for slot in due) > len(slots) * break_even:
            return due
        for slot in due:
            if self._accepted[slot] <= break_even:
                self._pauses[slot], self._accepted[slot] = MAX_PAUSE, float(self._max_tokens)
        return []

    def record_accepted_tokens(self, slot: int, count: int) -> None:
        """Record how many draft tokens of a step of a slot were accepted."""
        self._accepted[slot] += ACCEPTANCE_SMOOTHING * (count - self._accepted[slot])
        self._wrong_steps[slot] = 0 if count else self._wrong_steps[slot] + 1
        self._pauses[slot] = min(2 ** self._wrong_steps[slot] - 1, MAX_PAUSE)

    def exclude_slot(self, slot: int) -> None:
        """Choose a slot no more until it has another text."""
        self._excluded.add(slot)

    def forget_slot(self, slot: int) -> None:
        """Forget the acceptance of a slot, which has another text now."""
        self._excluded.discard(slot)
        self._accepted[slot], self._wrong_steps[slot], self._pauses[slot] = float(self._max_tokens), 0, 0
