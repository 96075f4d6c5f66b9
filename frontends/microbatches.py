"""Sequences in micro-batches: sessions whose steps follow each other through the devices of one model's layers.

A micro-batch is a session over the same weights with states of its own.  While the tokens of one are on the second
device, the next one's are on the first, and a micro-batch's next tokens begin as soon as its logits are there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import accumulate, islice, pairwise
from typing import TYPE_CHECKING, Protocol

from ..distributed import World
from ..graph.validation import ANY, BOOL, integer_between, list_of, require, validate_arguments
from ..scheduler import InterruptsKept, Plan
from .errors import ModelError
from .models import Model
from .parts import F32, Part, Reading, bucket, joined, parts_of, token_ids
from .rewinding import back, mark
from .session import DEFAULT_BATCH, Session

if TYPE_CHECKING:
    from ..scheduler import Dealing, Succession, Trace


class Microbatches:
    """A `Session` to those who use it: its sequences are those of `sessions`, one after the other, dealt as `dealing`
    says."""

    def __init__(self, sessions: Sequence[Session], dealing: Dealing) -> None:
        self.sessions, self.dealing = tuple(sessions), dealing
        first = sessions[0]
        self.model: Model = first.model
        self.world: World = first.world
        self.context, self.batch = first.context, first.batch
        ends = accumulate((one.sequences for one in sessions), initial=0)
        self.places = tuple(range(start, end) for start, end in pairwise(ends))
        """The numbers of each micro-batch's sequences."""
        self.sequences = self.places[-1].stop
        self.turn = first.store.turn

    @property
    def lengths(self) -> list[int]:
        return [length for one in self.sessions for length in one.lengths]

    @property
    def recent(self) -> list[list[int]]:
        return [tokens for one in self.sessions for tokens in one.recent]

    @property
    def planning(self) -> float:
        return sum(one.planning for one in self.sessions)

    @property
    def is_traced(self) -> bool:
        return any(one.trace is not None for one in self.sessions)

    @validate_arguments(
        ModelError, tokens=list_of(ANY, "a sequence of sequences of tokens"), every_position=BOOL, hidden=BOOL
    )
    def evaluate(
        self, tokens: Sequence[Sequence[int]], *, every_position: bool = False, hidden: bool = False
    ) -> list[F32]:
        """As `Session.evaluate`: all sequences get their tokens, or none does."""
        given = [token_ids(i, new) for i, new in enumerate(tokens)]
        if len(given) != self.sequences:
            raise ModelError(f"got tokens for {len(given)} sequences, the session has {self.sequences}")
        dealt = [given[place.start : place.stop] for place in self.places]
        with self.turn:
            for one, own, place in zip(self.sessions, dealt, self.places, strict=True):
                one.check(own, hidden, place.start)
            if self.is_traced:
                return self._one_by_one(dealt, every_position, hidden)
            return self._in_turn(dealt, every_position, hidden)

    def _one_by_one(self, dealt: Sequence[Part], every_position: bool, hidden: bool) -> list[F32]:
        """Each micro-batch by itself, so that each step of it is seen."""
        marks = [mark(one) for one in self.sessions]
        try:
            answers = [
                one.evaluate(own, every_position=every_position, hidden=hidden)
                for one, own in zip(self.sessions, dealt, strict=True)
            ]
        except BaseException:
            for one, before in zip(self.sessions, marks, strict=True):
                back(one, before)
            raise
        return [rows for answer in answers for rows in answer]

    def _in_turn(self, dealt: Sequence[Part], every_position: bool, hidden: bool) -> list[F32]:
        from ..scheduler import in_turn

        parts = [
            parts_of(own, one.part_sizes(max(map(len, own)), max(one.lengths)))
            for one, own in zip(self.sessions, dealt, strict=True)
        ]
        readings = [one.reading(p, every_position, hidden) for one, p in zip(self.sessions, parts, strict=True)]
        runs = [run for one, reading in zip(self.sessions, readings, strict=True) for run in one.runs(reading)]
        with InterruptsKept():  # states and lengths belong together
            outputs = iter(in_turn(runs))
            rows = [
                one.settle(reading, list(islice(outputs, len(reading.parts))))
                for one, reading in zip(self.sessions, readings, strict=True)
            ]
        nothing, answers = self.sessions[0].no_rows(hidden), zip(dealt, parts, rows, strict=True)
        return [rows for read in answers for rows in joined(*read, every_position, nothing)]

    @validate_arguments(ModelError, sequence=integer_between(0))
    def reset(self, sequence: int) -> None:
        """Forget a sequence, as `Session.reset`."""
        require(ModelError, "reset", "sequence", sequence, integer_between(0, self.sequences - 1))
        for one, place in zip(self.sessions, self.places, strict=True):
            if sequence in place:
                one.reset(sequence - place.start)

    @contextmanager
    def tracing(self) -> Iterator[Trace]:
        """As `Session.tracing`; micro-batches then run one by one."""
        with ExitStack() as stack:
            trace = stack.enter_context(self.sessions[0].tracing())
            for other in self.sessions[1:]:
                stack.enter_context(other.tracing(trace))
            yield trace

    def __repr__(self) -> str:
        return f"Microbatches({self.model!r}, {', '.join(str(one.sequences) for one in self.sessions)} sequences)"


# --------------------------------------------------------------------------------------------------------- decoding


class Decoding(Protocol):
    """Steps of sequences that are in groups, the numbers of each in `places`: those that begin first end first."""

    places: tuple[range, ...]

    def begin(self, group: int, tokens: Part) -> None:
        """Let a step of a group begin that has none under way: new tokens of each of its sequences."""

    def ended(self) -> list[F32]:
        """What the first step that is under way gives for each sequence of its group, which has grown by it."""


class _OneByOne:
    """Sequences in one group, whose steps run when they are asked for."""

    def __init__(self, session: Session | Microbatches) -> None:
        self.places: tuple[range, ...] = (range(session.sequences),)
        self._session = session
        self._tokens: Part = ()

    def begin(self, group: int, tokens: Part) -> None:
        self._tokens = tokens

    def ended(self) -> list[F32]:
        return self._session.evaluate(self._tokens)


class _Following:
    """Micro-batches whose steps follow each other."""

    def __init__(self, all_of_them: Microbatches, around: ExitStack) -> None:
        self.places, self._sessions = all_of_them.places, all_of_them.sessions
        self._around = around
        self._succession: Succession | None = None
        self._under_way: deque[tuple[Session, Reading]] = deque()

    def begin(self, group: int, tokens: Part) -> None:
        from ..scheduler import Succession

        session = self._sessions[group]
        session.check(tokens, first=self.places[group].start)
        reading = session.reading([tokens])
        if self._succession is not None and not session.has_planned(reading):
            self._succession.wait()  # plans are made for devices that do nothing else
        runs = session.runs(reading)
        if self._succession is None:
            self._succession = self._around.enter_context(Succession(runs[0][0]))
        self._succession.begin(runs)
        self._under_way.append((session, reading))

    def ended(self) -> list[F32]:
        assert self._succession is not None
        session, reading = self._under_way[0]
        (rows,) = session.settle(reading, [self._succession.ended()])
        self._under_way.popleft()
        return rows


@contextmanager
def decoding(session: Session | Microbatches, *, alone: bool = False) -> Iterator[Decoding]:
    """Steps that wait for nothing but the tokens of their own micro-batch, or `alone` for all before them.

    Devices belong to it from its first step until its end, when steps that nobody waited for are taken back; what was
    given out stays, whatever fails.
    """
    with ExitStack() as around:
        if isinstance(session, Session) or session.is_traced or alone:
            yield _OneByOne(session)
        else:
            yield _Following(session, around)


# ---------------------------------------------------------------------------------------------------------- dealing


def dealt(
    like: Session, sequences: int, *, context: int | None = None, batch: int = DEFAULT_BATCH
) -> Session | Microbatches:
    """So many sequences over the weights of a session: in micro-batches where that is predicted to be faster."""

    def of(count: int) -> Session:
        return Session(like.model, like=like, sequences=count, context=context, batch=batch)

    if len(like.group) == 1 or like.model.guessers or not like.model.is_causal or like.watch is not None:
        return of(sequences)
    cells = context or like.context
    step = replace(like.step(1, 1), cells=cells, context=cells, most=bucket(min(batch, cells)))

    def plan_of(count: int) -> Plan:
        """When the context is full."""
        return like.plan(replace(step, sequences=count, outputs=count))

    from ..scheduler import dealing

    how = dealing(sequences, plan_of)
    return of(sequences) if len(how.sizes) == 1 else Microbatches(list(map(of, how.sizes)), how)
