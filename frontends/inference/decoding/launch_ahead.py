"""Decode steps that are launched before the host has read the tokens of the step before them.

The device chooses the token of step n, and step n + 1 reads it from the memory of the device. So the host works while
the device does:

1. `LaunchAheadDecoder.run_step` for step n launches step n + 1, and then waits for the outputs of step n.
2. The caller ends some sequences, or begins step n + 1 with the tokens of step n.
3. `run_step` for step n + 1 accepts the launched step. If other tokens or sequences were begun, it undoes the launched
   step and runs the begun one.

Sequences have no tokens of a launched step: lengths change in `run_step` alone. All other users of the devices take
their lock, which undoes the launched step first (`DeviceLock`): another text, a reset, a save of the states. A step
that needs another plan than the step before it is not launched ahead. No step is launched after the last one, nor after
another user of the devices has undone one, because its next step would be undone too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ....graph.errors import BackendError, format_count
from ....scheduler import DeferredInterrupts, Executor, LaunchedRun
from ...models import Batch, Step
from ...models.inputs.graph_builder import NEXT_TOKEN_STATE
from ...models.inputs.step import TOKEN_KIND
from ..cache_rows import has_cells_for_new_tokens
from ..prefill_chunks import F32, PrefillChunk
from ..session import Session
from .device_tokens import (
    DeviceArgmaxToken,
    TokenCandidates,
    TokenChoice,
    evaluate_to_masked_candidates,
    find_longest_length_after,
    make_device_sampling_step,
    make_step_choosing_tokens_on_device,
    split_candidates_by_sequence,
)

DescribeChoice = Callable[[int, bool], TokenChoice]
"""Describes the choice of a token of a sequence: the one after its last known token or, if true, the one after that."""


class _LaunchedStep(NamedTuple):
    """A step that the device has started ahead: its run, its shape, its executor and its named tokens i32[B, m]."""

    run: LaunchedRun
    step: Step
    executor: Executor
    named_ids: npt.NDArray[np.int32] | None


class LaunchAheadDecoder:
    """Runs the decode steps of a session, in which the device chooses the tokens; the module explains the order.

    Args:
        session: A session that `can_choose_tokens_on_device`.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._shares_devices = False
        self._launched: _LaunchedStep | None = None
        """The step after the last finished one, if it is launched."""
        self.step_count, self.accepted_count = 0, 0
        """The number of steps, and the number of launched steps that `run_step` has accepted."""
        self._begun: tuple[PrefillChunk, tuple[int, ...]] = (), ()
        """The tokens that the launched step reads, and the lengths before it."""

    def run_step(
        self, tokens: PrefillChunk, describe: DescribeChoice | None, *, is_last: bool = False
    ) -> Sequence[DeviceArgmaxToken | TokenCandidates] | None:
        """Append at most one token to each sequence, and return the choice of each; None if it needs all logits.

        The choice of an idle sequence has no meaning.

        Args:
            tokens: The new token of each sequence.
            describe: Describes the choice of each sequence; None chooses the largest logit.
            is_last: Whether no step follows.
        """
        session, launched = self._session, self._launched
        self._launched = None
        if launched is not None and self._begun != (tokens, tuple(session.lengths)):
            launched = None
        lock = session.store.device_lock
        with DeferredInterrupts(), lock.accept_launched_or_undo_other(launched and launched.run) as is_launched:
            self._shares_devices |= launched is not None and not is_launched
            self.accepted_count += is_launched
            if launched is None or not is_launched:
                launched = self._launch_step(tokens, describe)
            if launched is None:
                return None
            session.reversible_step = None
            following = None if is_last else self._launch_following_step(launched, tokens, describe)
            results = launched.run.finish(following and following.run)
            session.record_evaluated_chunk(tokens)
            self.step_count += 1
            if following is not None:
                lock.leave_launched_run(following.run)
                self._launched = following
            if launched.named_ids is None:
                chosen = results["token"].tolist()
                answers: Sequence[DeviceArgmaxToken | TokenCandidates] = [
                    *map(DeviceArgmaxToken, chosen, results["logit"].tolist())
                ]
            else:
                chosen, read = results["sampled"].tolist(), [[*new, 0][:1] for new in tokens]
                own = np.concatenate((launched.named_ids, np.array(read, np.int32)), axis=1)
                answers = split_candidates_by_sequence(results, own if launched.named_ids.size else launched.named_ids)
            self._begun = [[token] * len(new) for token, new in zip(chosen, tokens, strict=True)], (*session.lengths,)
            return answers

    def _make_step(
        self, tokens: PrefillChunk, lengths: Sequence[int], describe: DescribeChoice | None, is_ahead: bool
    ) -> tuple[Step, dict[str, npt.NDArray[Any]]] | None:
        """Return the step with these new tokens, and its inputs; None if the host needs all logits."""
        session, longest = self._session, find_longest_length_after(lengths, tokens)
        more: dict[str, npt.NDArray[Any]] = {}
        if describe is None:
            step = make_step_choosing_tokens_on_device(session, longest)
        else:
            choices = [describe(i, is_ahead) if new else None for i, new in enumerate(tokens)]
            if (step_and_inputs := make_device_sampling_step(session, longest, choices)) is None:
                return None
            step, more = step_and_inputs
        return step, session.model.inputs(step, Batch(tokens, lengths, tables=session.tables)) | more

    def _launch(self, executor: Executor, step: Step, inputs: dict[str, npt.NDArray[Any]]) -> _LaunchedStep:
        named_ids = None if step.output_kind == TOKEN_KIND else inputs.get("named_ids", np.zeros((step.sequences, 0)))
        return _LaunchedStep(executor.launch(inputs), step, executor, named_ids)

    def _launch_step(self, tokens: PrefillChunk, describe: DescribeChoice | None) -> _LaunchedStep | None:
        """Launch a step with these tokens, which are written to the device; None if the host needs all logits."""
        session = self._session
        session.require_evaluable_tokens(tokens)
        if (step_and_inputs := self._make_step(tokens, session.lengths, describe, False)) is None:
            return None
        executor = session.executor(step_and_inputs[0])
        first_tokens = [new[0] if len(new) else 0 for new in tokens]
        session.store.state(NEXT_TOKEN_STATE)[...] = np.array(first_tokens, np.int32)
        return self._launch(executor, *step_and_inputs)

    def _launch_following_step(
        self, launched: _LaunchedStep, tokens: PrefillChunk, describe: DescribeChoice | None
    ) -> _LaunchedStep | None:
        """Launch the step after a launched one, in which the same sequences have new tokens.

        The result is None if the step is not to be launched. After an error the sequences have the tokens of the
        launched step.
        """
        session = self._session
        if self._shares_devices or launched.executor.trace is not None:
            return None
        lengths = [length + len(new) for length, new in zip(session.lengths, tokens, strict=True)]
        chosen = [[0] * len(new) for new in tokens]  # the device has the tokens
        if find_longest_length_after(lengths, chosen) > session.context or not has_cells_for_new_tokens(
            session, chosen, lengths
        ):
            return None
        try:
            step_and_inputs = self._make_step(chosen, lengths, describe, True)
            return (
                None
                if step_and_inputs is None or step_and_inputs[0] != launched.step
                else self._launch(launched.executor, *step_and_inputs)
            )
        except BackendError:  # nothing has begun; the next call launches this step again, and raises its error
            return None
        except BaseException:
            launched.run.finish()
            session.record_evaluated_chunk(tokens)
            raise

    def undo_launched_step(self) -> None:
        """Undo the step that was launched ahead, if there is one, by taking the device lock."""
        if self._launched is not None:
            with self._session.store.device_lock:
                self._launched = None


class DeviceTokenSchedule:
    """A decode schedule for one session in which the device chooses the tokens; all sequences are one group.

    `finish_oldest_step` returns for each sequence a `DeviceArgmaxToken` or, with `describe`, `TokenCandidates`. The
    device has chosen one of the candidates. It returns logits if the candidates would be too many.

    Args:
        session: The session.
        around: Its end undoes the launched step.
        describe: As for `LaunchAheadDecoder.run_step`.
    """

    def __init__(self, session: Session, around: ExitStack, describe: DescribeChoice | None = None) -> None:
        self.sequence_ranges: tuple[range, ...] = (range(session.sequences),)
        self._session, self._describe, self._decoder = session, describe, LaunchAheadDecoder(session)
        self._tokens: PrefillChunk = ()
        self._is_last = False
        around.callback(self._decoder.undo_launched_step)

    def begin_step(self, group: int, tokens: PrefillChunk, *, is_last: bool = False) -> None:
        self._tokens, self._is_last = tokens, is_last

    def describe_token_path(self) -> str:
        """Describe in one phrase how the tokens were chosen so far, such as ``samples on the device``.

        The phrase has the number of steps that were launched ahead.
        """
        decoder = self._decoder
        how = "largest logits" if self._describe is None else "samples"
        ahead = f"{decoder.accepted_count} of {format_count(decoder.step_count, 'step')} launched ahead"
        return f"{how} on the device, {ahead}" if decoder.step_count else "all logits read"

    def finish_oldest_step(self) -> Sequence[DeviceArgmaxToken | TokenCandidates | F32]:
        answers = self._decoder.run_step(self._tokens, self._describe, is_last=self._is_last)
        return self._session.evaluate(self._tokens) if answers is None else answers


class MaskedSchedule:
    """A decode schedule for one session with grammars; all sequences are one group, and no step is launched ahead.

    `finish_oldest_step` returns the `TokenCandidates` that the grammars allow, or logits if they would be too many.

    Args:
        session: The session.
        describe: As for `LaunchAheadDecoder.run_step`.
        compute_mask: As for `evaluate_to_masked_candidates`.
    """

    def __init__(
        self,
        session: Session,
        describe: DescribeChoice,
        compute_mask: Callable[[int], npt.NDArray[np.uint32]],
    ) -> None:
        self.sequence_ranges: tuple[range, ...] = (range(session.sequences),)
        self._session, self._describe, self._compute_mask = session, describe, compute_mask
        self._tokens: PrefillChunk = ()

    def begin_step(self, group: int, tokens: PrefillChunk, *, is_last: bool = False) -> None:
        self._tokens = tokens

    def describe_token_path(self) -> str:
        """Describe in one phrase how the tokens are chosen: by grammar masks on the device."""
        return "grammar masks on the device"

    def finish_oldest_step(self) -> Sequence[TokenCandidates | F32]:
        choices = [self._describe(i, False) if new else None for i, new in enumerate(self._tokens)]
        answers = evaluate_to_masked_candidates(self._session, self._tokens, choices, self._compute_mask)
        return self._session.evaluate(self._tokens) if answers is None else answers
