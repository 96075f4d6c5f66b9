"""Decode steps that choose tokens, or select the tokens that may be chosen, on the device.

- The most probable token of step n is an operand of step n + 1. The token stays in a state of the graph
  (`NEXT_TOKEN_STATE`). The host reads the token and its logit, eight bytes for each sequence, in place of all logits.
- For other choices the device selects the candidates, a few hundred tokens with their logits. The host chooses among
  them in float64 as among all tokens, so a seed gives the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...backends.capabilities import HasSeparateMemory
from ...scheduler import DeferredInterrupts, Executor, LaunchedRun
from ..models import Batch, Step
from ..models.inputs.graph_builder import NEXT_TOKEN_STATE
from ..models.inputs.step import CANDIDATE_KIND, TOKEN_KIND
from .prefill_chunks import F32, PrefillChunk, next_power_of_two
from .session import Session

MIN_CANDIDATES, MAX_CANDIDATES = 64, 512
"""Tokens that a step selects as candidates. More would be sorted and read for little: all logits are read then."""


class DeviceArgmaxToken(NamedTuple):
    """The most probable token of a sequence, and its logit. The first token wins among equal logits.

    A NaN counts as the largest logit.
    """

    token: int
    logit: float


class TokenCandidates(NamedTuple):
    """The possible next tokens of a sequence: the tokens with the largest logits, and tokens that the host named.

    - `largest`: the token with the largest logit, or a NaN.
    - `ids`, `logits`: the tokens in no order, some of them twice, and their logits.
    """

    largest: DeviceArgmaxToken
    ids: npt.NDArray[np.int32]
    logits: F32

    def list_in_token_order(self) -> tuple[npt.NDArray[np.int32], F32]:
        """Return the tokens in ascending order, each once, and their logits."""
        ids, places = np.unique(self.ids, return_index=True)
        return ids, self.logits[places]


class CandidateCount(NamedTuple):
    """The sizes of a step that selects candidates: tokens with the largest logits, and named tokens, per sequence."""

    largest: int
    named: int


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
        and not session.model.used_mtp_block_count
        and not session.model.history_token_count
        and session.watch is None
        and session.min_tokens == 1
    )


def make_step_choosing_tokens_on_device(session: Session, length: int) -> Step:
    """Return the decode step that chooses tokens on the device, in the context bucket of `length`."""
    return session.make_step(1, length, session.sequences, kind=TOKEN_KIND)


def choose_candidate_count(session: Session, largest: int | None, named: int) -> CandidateCount | None:
    """Choose the sizes of a step that selects candidates; None if all logits must be read.

    Few sizes occur, because each needs a plan.

    Args:
        session: The session.
        largest: How many of the largest logits the choice reads; None if it may read all.
        named: How many tokens have a bias or a penalty.
    """
    named = next_power_of_two(max(named, MIN_CANDIDATES)) if named else 0
    if largest is None or (count := next_power_of_two(max(largest + named, MIN_CANDIDATES))) > MAX_CANDIDATES:
        return None
    return CandidateCount(min(count, session.model.vocabulary_size), named)


def make_candidate_step(session: Session, length: int, count: CandidateCount) -> Step:
    """Return the decode step that selects candidates on the device. The step is in the context bucket of `length`."""
    return _with_candidates(session.make_step(1, length, session.sequences, kind="logits"), count)


@lru_cache(maxsize=64)
def _with_candidates(step: Step, count: CandidateCount) -> Step:
    return replace(step, output_kind=CANDIDATE_KIND, candidate_count=count.largest, named_token_count=count.named)


def evaluate_to_candidates(
    session: Session, tokens: PrefillChunk, count: CandidateCount, named: Sequence[Sequence[int]]
) -> list[TokenCandidates]:
    """Append at most one token to each sequence, and return the candidates for its next token.

    Args:
        session: A session that `can_choose_tokens_on_device`.
        tokens: The new token of each sequence; an idle sequence has none, and its candidates have no meaning.
        count: The sizes of the step.
        named: For each sequence the tokens that are candidates in any case.
    """
    with session.store.device_lock:
        ids = np.zeros((session.sequences, count.named), np.int32)
        for row, tokens_of_row in zip(ids, named, strict=True):
            row[: len(tokens_of_row)] = tokens_of_row
        results = _run_decode_step(
            session, tokens, lambda length: make_candidate_step(session, length, count), {"named_ids": ids}
        )
    candidates = []
    for token, top, own, logits in zip(results["token"].tolist(), results["ids"], ids, results["logits"], strict=True):
        logit = float(logits[0]) if token == top[0] else np.nan  # only a NaN comes before the largest number
        candidates.append(TokenCandidates(DeviceArgmaxToken(token, logit), np.concatenate((top, own)), logits))
    return candidates


def _run_decode_step(
    session: Session,
    tokens: PrefillChunk,
    make_step: Callable[[int], Step],
    more_inputs: Mapping[str, npt.NDArray[np.int32]],
) -> Mapping[str, npt.NDArray[Any]]:
    """Run a step with at most one token of each sequence, and return its outputs.

    The caller has the device lock.

    Args:
        session: The session.
        tokens: The new tokens.
        make_step: Returns the step for the largest length after it.
        more_inputs: Further inputs; the graph lacks the empty ones.
    """
    session.require_evaluable_tokens(tokens)
    step = make_step(max(n + len(new) for n, new in zip(session.lengths, tokens, strict=True)))
    executor = session.executor(step)
    inputs = session.model.inputs(step, Batch(tokens, session.lengths))
    inputs |= {name: array for name, array in more_inputs.items() if array.size}
    with DeferredInterrupts():  # states and lengths belong together
        results = executor.run(inputs)
        session.reversible_step = None
        session.advance_lengths_and_tokens_by_chunk(tokens)
    return results


class CandidateSchedule:
    """A decode schedule for one session in which the device selects candidates; all sequences are one group.

    `finish_oldest_step` returns `TokenCandidates` for each sequence, or logits if the candidates would be too many.

    Args:
        session: The session.
        largest: How many of the largest logits the choice of a token reads.
        list_named_tokens: Returns the tokens of a sequence that have a bias or a penalty.
    """

    def __init__(self, session: Session, largest: int, list_named_tokens: Callable[[int], Sequence[int]]) -> None:
        self.sequence_ranges: tuple[range, ...] = (range(session.sequences),)
        self._session, self._largest, self._list_named_tokens = session, largest, list_named_tokens
        self._tokens: PrefillChunk = ()

    def begin_step(self, group: int, tokens: PrefillChunk, *, is_last: bool = False) -> None:
        self._tokens = tokens

    def finish_oldest_step(self) -> Sequence[TokenCandidates | F32]:
        named = [self._list_named_tokens(i) if new else () for i, new in enumerate(self._tokens)]
        count = choose_candidate_count(self._session, self._largest, max(map(len, named)))
        if count is None:
            return self._session.evaluate(self._tokens)
        return evaluate_to_candidates(self._session, self._tokens, count, named)


class _LaunchedStep(NamedTuple):
    """A step that the device has begun: its run, its shape and its executor."""

    run: LaunchedRun
    step: Step
    executor: Executor


class DeviceTokenSchedule:
    """A decode schedule for one session in which the device chooses the tokens; all sequences are one group.

    `finish_oldest_step` returns a `DeviceArgmaxToken` for each sequence. The token of an idle sequence has no meaning.

    A step is launched before the host has read the token of the previous step, because this token is on the device. So
    the host works while the device does:

    1. `finish_oldest_step` of step n launches step n + 1, and then waits for the outputs of step n.
    2. The caller ends some sequences, or begins step n + 1 with the tokens of step n.
    3. `finish_oldest_step` of step n + 1 accepts the launched step. If other tokens or sequences were begun, it undoes
       the launched step and runs the begun one.

    Sequences have no tokens of a launched step: lengths change in `finish_oldest_step` alone. All other users of the
    devices take their lock, which undoes the launched step first (`DeviceLock`): another text, a reset, a save of the
    states. A step that needs another plan than the step before it is not launched ahead. No step is launched after the
    last one, nor after another user of the devices has undone one, because its next step would be undone too.

    Args:
        session: The session.
        around: Its end undoes the launched step.
    """

    def __init__(self, session: Session, around: ExitStack) -> None:
        self.sequence_ranges: tuple[range, ...] = (range(session.sequences),)
        self._session = session
        self._tokens: PrefillChunk = ()
        self._is_last = self._shares_devices = False
        self._launched: _LaunchedStep | None = None
        """The step after the last finished one, if it is launched."""
        self._device_tokens: list[int] | None = None
        """The tokens in the state of the device after the last step, or None before the first step."""
        self._lengths: tuple[list[int], tuple[int, ...]] = [], ()
        """The lengths after the last step, as list and as numbers: a step makes a new list, a reset changes it."""
        self._active: tuple[int, ...] = ()
        """The number of new tokens of each sequence in the last step."""
        around.callback(self._undo_launched_step)

    def begin_step(self, group: int, tokens: PrefillChunk, *, is_last: bool = False) -> None:
        self._tokens, self._is_last = tokens, is_last

    def finish_oldest_step(self) -> Sequence[DeviceArgmaxToken]:
        session, tokens, launched = self._session, self._tokens, self._launched
        self._launched = None
        if launched is not None and not self._is_continued_by(tokens):
            launched = None
        lock = session.store.device_lock
        with DeferredInterrupts(), lock.accept_launched_or_undo_other(launched and launched.run) as is_launched:
            self._shares_devices |= launched is not None and not is_launched
            if launched is None or not is_launched:
                launched = self._launch_step(tokens)
            self._device_tokens, session.reversible_step = None, None  # unknown after a failure
            following = self._launch_following_step(launched, tokens)
            results = launched.run.finish(following and following.run)
            session.advance_lengths_and_tokens_by_chunk(tokens)
            self._device_tokens = results["token"].tolist()
            self._lengths, self._active = (session.lengths, tuple(session.lengths)), tuple(map(len, tokens))
            if following is not None:
                lock.leave_launched(following.run)
                self._launched = following
            return [*map(DeviceArgmaxToken, self._device_tokens, results["logit"].tolist())]

    def _launch_step(self, tokens: PrefillChunk) -> _LaunchedStep:
        """Launch a step with these tokens, which are written to the device if it has other ones."""
        session = self._session
        session.require_evaluable_tokens(tokens)
        step = make_step_choosing_tokens_on_device(
            session, max(n + len(new) for n, new in zip(session.lengths, tokens, strict=True))
        )
        executor = session.executor(step)
        inputs = session.model.inputs(step, Batch(tokens, session.lengths))
        self._write_tokens_unless_chosen_on_device(tokens)
        return _LaunchedStep(executor.launch(inputs), step, executor)

    def _launch_following_step(self, launched: _LaunchedStep, tokens: PrefillChunk) -> _LaunchedStep | None:
        """Launch the step after a launched one, in which the same sequences have new tokens.

        The result is None if the step is not to be launched. After an error the sequences have the tokens of the
        launched step.
        """
        session, step = self._session, launched.step
        if self._is_last or self._shares_devices or launched.executor.trace is not None:
            return None
        lengths = [length + len(new) for length, new in zip(session.lengths, tokens, strict=True)]
        chosen = [[0] * len(new) for new in tokens]  # the device has the tokens
        longest = max(map(sum, zip(lengths, map(len, chosen), strict=True)))
        if longest > session.context or make_step_choosing_tokens_on_device(session, longest) != step:
            return None
        try:
            inputs = session.model.inputs(step, Batch(chosen, lengths))
            return launched._replace(run=launched.executor.launch(inputs))
        except BaseException:
            launched.run.finish()
            session.advance_lengths_and_tokens_by_chunk(tokens)
            raise

    def _is_continued_by(self, tokens: PrefillChunk) -> bool:
        """Whether the sequences of the last step, and no others, go on with the tokens that the device has chosen."""
        return self._has_tokens_on_device(tokens) and tuple(map(len, tokens)) == self._active

    def _undo_launched_step(self) -> None:
        """Undo the launched step. The device lock does so when it is taken."""
        if self._launched is not None:
            with self._session.store.device_lock:
                self._launched = None

    def _has_tokens_on_device(self, tokens: PrefillChunk) -> bool:
        """Whether the device has chosen all tokens itself in the last step.

        They differ if another generation has run steps of the session since then, or if a reset has zeroed a token.
        """
        lengths, numbers = self._lengths
        is_last_step = self._session.lengths is lengths and tuple(lengths) == numbers
        known = self._device_tokens if self._device_tokens and is_last_step else [-1] * len(tokens)
        return all(not new or new[0] == token for new, token in zip(tokens, known, strict=True))

    def _write_tokens_unless_chosen_on_device(self, tokens: PrefillChunk) -> None:
        """Write the tokens of a step to the device, unless it has chosen all of them itself in the last step."""
        if not self._has_tokens_on_device(tokens):
            first_tokens = [new[0] if len(new) else 0 for new in tokens]
            self._session.store.state(NEXT_TOKEN_STATE)[...] = np.array(first_tokens, np.int32)
