"""The slots of an engine: their windows, their memory, and the protocol of their runs.

Tests of the engine implement the protocol without weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ...graph.errors import format_count
from ...scheduler import format_bytes
from ..errors import ModelError
from ..inference.decoding.device_tokens import TokenCandidates, TokenChoice
from ..inference.prefill_chunks import F32, next_power_of_two
from ..inference.session import Session

StepOutput = F32 | TokenCandidates
"""The logits f32[vocabulary] of a slot after a decode step, or the candidates that the device selected."""
MAX_RESTARTS = 3
"""Restarts of an engine in a row, without a new token between them; the next failure ends the engine."""


class CandidateNeeds(NamedTuple):
    """The requirements of a request for the candidates from which its next token is chosen.

    - `request`: the id of the request.
    - `describe`: describes the choice of the token after the next one or, if true, of the token after that.
    - `compute_mask`: returns the mask of the tokens that a grammar allows among a number of tokens; None without one.
    - `token_count`: the size of the vocabulary, if rows of the logits are longer; else None.
    """

    request: str
    describe: Callable[[bool], TokenChoice]
    compute_mask: Callable[[int], npt.NDArray[np.uint32]] | None
    token_count: int | None

    def count_tokens_without_padding(self, vocabulary: int) -> int:
        """Return the token count of the vocabulary, without the padding columns of a row of logits.

        `vocabulary` is the number of columns.
        """
        return vocabulary if self.token_count is None else min(self.token_count, vocabulary)


def count_window_slots(running: Iterable[int], slot: int) -> int:
    """Count the slots of the smallest window that has `slot` and the slots `running`."""
    return choose_smallest_aligned_slot_window([slot, *running])[1]


def choose_smallest_aligned_slot_window(slots: Sequence[int]) -> tuple[int, int]:
    """Choose the smallest aligned window that has all of `slots`; return its first slot and its number of slots.

    A window has a power of two of slots and begins at a multiple of it. Example: 5, 6 gives 4, 4.
    """
    low, high = min(slots), max(slots)
    count = 1
    while low // count != high // count:
        count *= 2
    return low // count * count, count


def require_slot_memory(like: Session, slots: int) -> None:
    """Require that the states of all slots fit into the memory of the devices, before the states are allocated.

    Raises:
        ModelError: The states are larger; the message has the largest number of slots.
    """
    slot_bytes = sum(like.store.state(name).spec.nbytes for name in like.state_names) // like.sequences
    needed = next_power_of_two(slots) * slot_bytes
    memories = [device.memory for _, device in like.group]
    if not all(memories) or needed <= (available := sum(memory for memory in memories if memory)):
        return
    count = max(1, available // max(1, slot_bytes))
    fitting = 1 << (count.bit_length() - 1)
    raise ModelError(
        f"{format_count(slots, 'slot')} of {format_count(like.context, 'token')} need {format_bytes(needed)}, "
        "but the devices have "
        f"{format_bytes(available)}; use slots={fitting}, or a smaller context"
    )


class StepRunner(Protocol):
    """The operations of `SlotPool` that the engine calls; a test can pass a substitute that needs no weights."""

    slots: int
    context: int
    batch: int

    def read_prompt(self, slot: int, tokens: Sequence[int], before: Sequence[int]) -> F32:
        """Read prompt tokens into a slot, and return the logits after the last one; see `SlotPool.read_prompt`."""

    def decode(self, tokens: dict[int, int], before: dict[int, Sequence[int]]) -> dict[int, F32]:
        """Append one token to each given slot, and return the logits by slot; see `SlotPool.decode`."""

    def list_evaluated_draft_tokens(self, slot: int) -> Sequence[int]:
        """Return the draft tokens that a slot has evaluated after its last token.

        `decode` returns the logits of the first one without a run. All further ones are wrong if another token follows.
        """

    def decode_to_candidates(
        self,
        tokens: Mapping[int, int],
        before: Mapping[int, Sequence[int]],
        needs: Mapping[int, CandidateNeeds],
        is_followed: bool,
    ) -> dict[int, TokenCandidates] | None:
        """Append one token to each given slot, and return the candidates by slot; None if all logits must be read.

        See `SlotPool.decode_to_candidates`.
        """

    @property
    def planning_seconds(self) -> float:
        """The seconds of plans and kernels since the start, which runs may include; see `SlotPool`."""

    def predict_prompt_seconds(self, size: int) -> float:
        """Return the predicted seconds of a prompt chunk of `size` tokens; see `SlotPool.predict_prompt_seconds`."""

    def predict_seconds_saved_by_mixing(self, slots: Collection[int], slot: int, size: int, length: int) -> float:
        """Predict the seconds that a mixed step saves; see `SlotWindows.predict_seconds_saved_by_mixing`."""

    def read_prompt_and_decode(
        self, slot: int, prompt: Sequence[int], tokens: Mapping[int, int], before: Mapping[int, Sequence[int]]
    ) -> dict[int, F32]:
        """Read prompt tokens into a slot and append a token to others; see `SlotWindows.read_prompt_and_decode`."""

    def rebind_plans_and_zero_states(self) -> None:
        """Bind all plans anew and zero all states; see `SlotPool.rebind_plans_and_zero_states`."""
