"""Micro-batches: several sessions over the same weights that run pipelined through the devices.

Each micro-batch has its own states. While the tokens of one micro-batch are on the second device, the tokens of the
next one are on the first. A micro-batch starts its next tokens as soon as its logits are there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import accumulate, islice, pairwise
from typing import TYPE_CHECKING, Protocol

from ...distributed import World
from ...graph.errors import format_count
from ...graph.validation import ANY, BOOL, integer_between, list_of, require, validate_arguments
from ...scheduler import DeferredInterrupts, Plan
from ..errors import ModelError
from ..models import Model
from .decoding.device_tokens import DeviceArgmaxToken, TokenCandidates
from .prefill_chunks import (
    F32,
    PipelinedPrefill,
    PrefillChunk,
    convert_to_token_ids,
    join_chunk_rows,
    next_power_of_two,
    split_tokens_into_chunks,
)
from .rewind import make_checkpoint, restore_checkpoint
from .session import DEFAULT_BATCH, Session

if TYPE_CHECKING:
    from ...scheduler import MicroBatchChoice, PipelinedRuns, Trace


class MicroBatchedSession:
    """A session that is split into micro-batches: several sessions behind the interface of one `Session`.

    Sequence numbers go on from one session to the next. `choice` tells how the micro-batches were chosen by predicted
    time.
    """

    def __init__(self, sessions: Sequence[Session], choice: MicroBatchChoice) -> None:
        self.sessions, self.choice = tuple(sessions), choice
        first = sessions[0]
        self.model: Model = first.model
        self.world: World = first.world
        self.context, self.batch = first.context, first.batch
        ends = accumulate((one.sequences for one in sessions), initial=0)
        self.sequence_ranges = tuple(range(start, end) for start, end in pairwise(ends))
        """The numbers of the sequences in each micro-batch."""
        self.sequences = self.sequence_ranges[-1].stop
        self.device_lock = first.store.device_lock

    @property
    def lengths(self) -> list[int]:
        return [length for one in self.sessions for length in one.lengths]

    @property
    def recent(self) -> list[list[int]]:
        return [tokens for one in self.sessions for tokens in one.recent]

    @property
    def planning_seconds(self) -> float:
        return sum(one.planning_seconds for one in self.sessions)

    @property
    def is_traced(self) -> bool:
        return any(one.trace is not None for one in self.sessions)

    @validate_arguments(
        ModelError, tokens=list_of(ANY, "a sequence of sequences of tokens"), every_position=BOOL, hidden=BOOL
    )
    def evaluate(
        self, tokens: Sequence[Sequence[int]], *, every_position: bool = False, hidden: bool = False
    ) -> list[F32]:
        """Append new tokens to all sequences, and return the logits of each, as `Session.evaluate` does.

        If a micro-batch fails, no sequence is changed.
        """
        token_ids = [convert_to_token_ids(i, new) for i, new in enumerate(tokens)]
        if len(token_ids) != self.sequences:
            raise ModelError(
                f"got tokens for {format_count(len(token_ids), 'sequence')}, the session has {self.sequences}"
            )
        microbatch_tokens = [token_ids[place.start : place.stop] for place in self.sequence_ranges]
        with self.device_lock:
            for one, own, place in zip(self.sessions, microbatch_tokens, self.sequence_ranges, strict=True):
                one.require_evaluable_tokens(own, hidden, place.start)
            if self.is_traced:
                return self._run_sequentially(microbatch_tokens, every_position, hidden)
            return self._run_pipelined(microbatch_tokens, every_position, hidden)

    def _run_sequentially(
        self, microbatch_tokens: Sequence[PrefillChunk], every_position: bool, hidden: bool
    ) -> list[F32]:
        """Run the micro-batches one after the other, so that each step can be traced.

        After an error, all micro-batches return to their state before the call.
        """
        marks = [make_checkpoint(one) for one in self.sessions]
        try:
            answers = [
                one.evaluate(own, every_position=every_position, hidden=hidden)
                for one, own in zip(self.sessions, microbatch_tokens, strict=True)
            ]
        except BaseException:
            for one, before in zip(self.sessions, marks, strict=True):
                restore_checkpoint(one, before)
            raise
        return [rows for answer in answers for rows in answer]

    def _run_pipelined(
        self, microbatch_tokens: Sequence[PrefillChunk], every_position: bool, hidden: bool
    ) -> list[F32]:
        from ...scheduler import run_pipelined

        parts = [
            split_tokens_into_chunks(own, one.choose_chunk_sizes(max(map(len, own)), max(one.lengths)))
            for one, own in zip(self.sessions, microbatch_tokens, strict=True)
        ]
        readings = [
            one.make_chunked_prefill(p, every_position, hidden) for one, p in zip(self.sessions, parts, strict=True)
        ]
        runs = [run for one, reading in zip(self.sessions, readings, strict=True) for run in one.bind_chunks(reading)]
        with DeferredInterrupts():  # states and lengths belong together
            outputs = iter(run_pipelined(runs))
            rows = [
                one.end_prefill(reading, list(islice(outputs, len(reading.chunks))))
                for one, reading in zip(self.sessions, readings, strict=True)
            ]
        nothing, answers = (
            self.sessions[0].create_empty_idle_rows(hidden),
            zip(microbatch_tokens, parts, rows, strict=True),
        )
        return [rows for read in answers for rows in join_chunk_rows(*read, every_position, nothing)]

    @validate_arguments(ModelError, sequence=integer_between(0))
    def reset(self, sequence: int) -> None:
        """Reset a sequence: forget its tokens, as `Session.reset` does."""
        require(ModelError, "reset", "sequence", sequence, integer_between(0, self.sequences - 1))
        for one, place in zip(self.sessions, self.sequence_ranges, strict=True):
            if sequence in place:
                one.reset(sequence - place.start)

    @contextmanager
    def tracing(self) -> Iterator[Trace]:
        """Trace the runs of all sessions in this context, as `Session.tracing` does.

        The micro-batches then run one after the other.
        """
        with ExitStack() as stack:
            trace = stack.enter_context(self.sessions[0].tracing())
            for other in self.sessions[1:]:
                stack.enter_context(other.tracing(trace))
            yield trace

    def __repr__(self) -> str:
        return (
            f"MicroBatchedSession({self.model!r}, {', '.join(str(one.sequences) for one in self.sessions)} sequences)"
        )


class DecodeSchedule(Protocol):
    """Runs decode steps for groups of sequences; steps of different groups may overlap in time.

    `sequence_ranges` has the sequence numbers of each group. Steps end in the order in which they begin.
    """

    sequence_ranges: tuple[range, ...]

    def begin_step(self, group: int, tokens: PrefillChunk, *, is_last: bool = False) -> None:
        """Begin a step of a group that has no pending step, with new tokens for each of its sequences.

        After the last step (`is_last`) the group begins no other.
        """

    def finish_oldest_step(self) -> Sequence[F32 | DeviceArgmaxToken | TokenCandidates]:
        """Finish the oldest pending step, and return the logits, token or candidates of each sequence.

        This advances the sequences of the step.
        """


class _SingleGroupDecodeSchedule:
    """A decode schedule without overlap: all sequences are one group, and `finish_oldest_step` runs the whole step."""

    def __init__(self, session: Session | MicroBatchedSession) -> None:
        self.sequence_ranges: tuple[range, ...] = (range(session.sequences),)
        self._session = session
        self._tokens: PrefillChunk = ()

    def begin_step(self, group: int, tokens: PrefillChunk, *, is_last: bool = False) -> None:
        self._tokens = tokens

    def finish_oldest_step(self) -> list[F32]:
        return self._session.evaluate(self._tokens)


class _PipelinedDecodeSchedule:
    """A decode schedule with one group per micro-batch; the steps run pipelined through the devices."""

    def __init__(self, all_of_them: MicroBatchedSession, around: ExitStack) -> None:
        self.sequence_ranges, self._sessions = all_of_them.sequence_ranges, all_of_them.sessions
        self._exit_stack = around
        self._pipelined_runs: PipelinedRuns | None = None
        self._pending_steps: deque[tuple[Session, PipelinedPrefill]] = deque()

    def begin_step(self, group: int, tokens: PrefillChunk, *, is_last: bool = False) -> None:
        from ...scheduler import PipelinedRuns

        session = self._sessions[group]
        session.require_evaluable_tokens(tokens, first=self.sequence_ranges[group].start)
        reading = session.make_chunked_prefill([tokens])
        if self._pipelined_runs is not None and not session.has_bound_pipelines(reading):
            self._pipelined_runs.wait_for_all()  # planning needs idle devices
        runs = session.bind_chunks(reading)
        if self._pipelined_runs is None:
            self._pipelined_runs = self._exit_stack.enter_context(PipelinedRuns(runs[0][0]))
        self._pipelined_runs.enqueue(runs)
        self._pending_steps.append((session, reading))

    def finish_oldest_step(self) -> list[F32]:
        assert self._pipelined_runs is not None
        session, reading = self._pending_steps[0]
        (rows,) = session.end_prefill(reading, [self._pipelined_runs.wait_for_outputs()])
        self._pending_steps.popleft()
        return rows


DeviceScheduleMaker = Callable[[Session, ExitStack], DecodeSchedule]
"""Makes a schedule for a session on one device; the stack ends with the schedule."""


@contextmanager
def open_decode_schedule(
    session: Session | MicroBatchedSession,
    *,
    alone: bool = False,
    on_device: DeviceScheduleMaker | None = None,
) -> Iterator[DecodeSchedule]:
    """Open a decode schedule for a session; the steps of different micro-batches then overlap in time.

    The schedule reserves the devices from its first step until its end. At the end, unfinished steps are rolled back.
    Logits that were returned stay valid after an error.

    Args:
        session: The session; without micro-batches no steps overlap.
        alone: Whether each step waits for all steps before it.
        on_device: Makes a schedule in which the device chooses or selects tokens, as `can_choose_tokens_on_device`
            permits.
    """
    with ExitStack() as around:
        if on_device is not None and isinstance(session, Session):
            yield on_device(session, around)
        elif isinstance(session, Session) or session.is_traced or alone:
            yield _SingleGroupDecodeSchedule(session)
        else:
            yield _PipelinedDecodeSchedule(session, around)


def make_session_micro_batched_if_faster(
    like: Session, sequences: int, *, context: int | None = None, batch: int = DEFAULT_BATCH
) -> Session | MicroBatchedSession:
    """Make a session for `sequences` sequences; it has micro-batches if they are predicted to be faster.

    Args:
        like: The session that has the weights.
        sequences: Number of sequences.
        context: Tokens per sequence; by default the context of `like`.
        batch: Maximum new tokens of one run.
    """

    def of(count: int) -> Session:
        return Session(like.model, like=like, sequences=count, context=context, batch=batch)

    if len(like.group) == 1 or like.model.mtp_block_count or not like.model.is_causal or like.watch is not None:
        return of(sequences)
    cells = context or like.context
    step = replace(
        like.make_step(1, 1), cells=cells, context=cells, max_new_tokens=next_power_of_two(min(batch, cells))
    )

    def plan_of(count: int) -> Plan:
        """Return the plan of one token per sequence with a full context."""
        return like.plan(replace(step, sequences=count, outputs=count))

    from ...scheduler import choose_micro_batches

    how = choose_micro_batches(sequences, plan_of)
    return of(sequences) if len(how.batch_sizes) == 1 else MicroBatchedSession(list(map(of, how.batch_sizes)), how)
