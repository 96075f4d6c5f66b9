"""Decode steps that choose the token on the device: the most probable token of step n is an operand of step n + 1.

The token stays in a state of the graph (`NEXT_TOKEN_STATE`). The host reads the token and its logit, eight bytes for
each sequence, in place of all logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...backends.capabilities import HasSeparateMemory
from ...scheduler import DeferredInterrupts
from ..models import Batch, Step
from ..models.inputs.graph_builder import NEXT_TOKEN_STATE
from ..models.inputs.step import TOKEN_KIND
from .prefill_chunks import PrefillChunk
from .session import Session


class DeviceArgmaxToken(NamedTuple):
    """The most probable token of a sequence, and its logit. The first token wins among equal logits.

    A NaN counts as the largest logit.
    """

    token: int
    logit: float


def can_choose_tokens_on_device(session: object) -> bool:
    """Whether decode steps of a session can choose tokens on its device, and save time by it.

    The model has to be causal, without MTP blocks and without inputs that the host computes from tokens. The session
    has one device with a memory of its own and no value watch.
    """
    return (
        isinstance(session, Session)
        and len(session.group) == 1
        and isinstance(session.group[0][0], HasSeparateMemory)
        and session.world.size == 1
        and session.model.is_causal
        and not session.model.mtp_block_count
        and not session.model.history_token_count
        and session.watch is None
        and session.min_tokens == 1
    )


def make_step_choosing_tokens_on_device(session: Session, length: int) -> Step:
    """Return the decode step that chooses tokens on the device, in the context bucket of `length`."""
    return session.make_step(1, length, session.sequences, kind=TOKEN_KIND)


class DeviceTokenSchedule:
    """A decode schedule for one session in which the device chooses the tokens; all sequences are one group.

    `finish_oldest_step` returns a `DeviceArgmaxToken` for each sequence. The token of an idle sequence has no meaning.
    """

    def __init__(self, session: Session) -> None:
        self.sequence_ranges: tuple[range, ...] = (range(session.sequences),)
        self._session = session
        self._tokens: PrefillChunk = ()
        self._device_tokens: list[int] | None = None
        """The tokens in the state of the device after the last step, or None before the first step."""
        self._lengths: tuple[list[int], tuple[int, ...]] = [], ()
        """The lengths after the last step, as list and as numbers: a step makes a new list, a reset changes it."""

    def begin_step(self, group: int, tokens: PrefillChunk) -> None:
        self._tokens = tokens

    def finish_oldest_step(self) -> Sequence[DeviceArgmaxToken]:
        session, tokens = self._session, self._tokens
        with session.store.device_lock:
            session.require_evaluable_tokens(tokens)
            length = max(n + len(new) for n, new in zip(session.lengths, tokens, strict=True))
            step = make_step_choosing_tokens_on_device(session, length)
            executor = session.executor(step)
            inputs = session.model.inputs(step, Batch(tokens, session.lengths))
            self._write_tokens_unless_chosen_on_device(tokens)
            with DeferredInterrupts():  # states and lengths belong together
                self._device_tokens = None  # unknown after a failure
                results = executor.run(inputs)
                session.reversible_step = None
                session.advance_by(tokens)
            self._device_tokens = results["token"].tolist()
            self._lengths = session.lengths, tuple(session.lengths)
            return [*map(DeviceArgmaxToken, self._device_tokens, results["logit"].tolist())]

    def _write_tokens_unless_chosen_on_device(self, tokens: PrefillChunk) -> None:
        """Write the tokens of a step to the device, unless its last step has chosen exactly these tokens.

        They differ if another generation has run steps of the session since then, or if a reset has zeroed a token.
        """
        lengths, numbers = self._lengths
        is_last_step = self._session.lengths is lengths and tuple(lengths) == numbers
        known = self._device_tokens if self._device_tokens and is_last_step else [-1] * len(tokens)
        if any(len(new) and new[0] != token for new, token in zip(tokens, known, strict=True)):
            first_tokens = [new[0] if len(new) else 0 for new in tokens]
            self._session.store.state(NEXT_TOKEN_STATE)[...] = np.array(first_tokens, np.int32)
