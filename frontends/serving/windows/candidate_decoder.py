"""Decode steps of a window of slots in which the device selects candidates for the tokens of each request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from ...generation.grammar import make_full_mask
from ...inference.decoding.device_tokens import (
    DeviceArgmaxToken,
    TokenCandidates,
    can_choose_tokens_on_device,
    evaluate_to_masked_candidates,
)
from ...inference.decoding.launch_ahead import LaunchAheadDecoder
from ...inference.session import Session
from ..step_runner import CandidateNeeds


class CandidateDecoder:
    """Runs steps of windows of slots; the step after a step of the same requests may be launched already."""

    def __init__(self) -> None:
        self._owners: tuple[Session, tuple[str, ...]] | None = None
        """The window of `_ahead`, and the request of each slot."""
        self._ahead: LaunchAheadDecoder | None = None

    def decode(
        self,
        window: Session,
        first: int,
        tokens: Mapping[int, int],
        before: Mapping[int, Sequence[int]],
        needs: Mapping[int, CandidateNeeds],
        *,
        is_followed: bool,
    ) -> dict[int, TokenCandidates] | None:
        """Append a token to each given slot, and return the candidates for its next token by slot.

        The result is None, without a step, if the device cannot select the candidates.

        Args:
            window: The session of a window of slots.
            first: Its first slot.
            tokens: The new token of each slot.
            before: The tokens that each slot has already.
            needs: The candidates that each slot needs.
            is_followed: Whether the next step is expected to decode the same slots. It is launched ahead then, unless
                a grammar needs its tokens first.
        """
        vocabulary = window.model.vocabulary_size
        masks = any(one.compute_mask for one in needs.values())
        if not can_choose_tokens_on_device(window) or not (
            masks or all(one.count_tokens_without_padding(vocabulary) == vocabulary for one in needs.values())
        ):
            return None
        slots = range(first, first + window.sequences)
        window.lengths = [len(before.get(slot, ())) for slot in slots]
        new = [[tokens[slot]] if slot in tokens else [] for slot in slots]
        rows: Sequence[DeviceArgmaxToken | TokenCandidates] | None
        if masks:
            choices = [needs[slot].describe(False) if slot in tokens else None for slot in slots]

            def compute_mask(i: int) -> npt.NDArray[np.uint32]:
                own = needs[first + i]
                return (own.compute_mask or make_full_mask)(own.count_tokens_without_padding(vocabulary))

            rows = evaluate_to_masked_candidates(window, new, choices, compute_mask)
        else:
            owners = window, tuple(needs[slot].request if slot in tokens else "" for slot in slots)
            if self._ahead is None or self._owners != owners:
                self._owners, self._ahead = owners, LaunchAheadDecoder(window)
            rows = self._ahead.run_step(
                new, lambda i, is_ahead: needs[first + i].describe(is_ahead), is_last=not is_followed
            )
        return None if rows is None else {slot: cast(TokenCandidates, rows[slot - first]) for slot in tokens}
