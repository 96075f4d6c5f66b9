"""Programs of one device compiled: tables that a loop without the GIL replays, and Python calls for what has no kernel.

Threads of a device walk tables of equal length, each doing its share; they are started once and woken for every run.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain, pairwise
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np

from ...graph.errors import BackendError, StepError
from ..base import Array, Comm, Device, Program, Timed, run_calls
from .compiler import REPLAY, make_ready
from .kernels import collective
from .kernels.loop import ARGS, MEETS, SHARED_BYTES, STEP, STEP_FAILED, WHOLE, run, timed
from .kernels.packing import NO_ROW
from .steps import Step

STATUS = {
    NO_ROW: "id {value} names no row of its table",
    collective.OTHER_FAILED: "another device failed",
    collective.LATE: "a device did not come to a collective in time",
    collective.OUT_OF_STEP: "devices are at different collectives: their plans do not match",
}


class Loop(NamedTuple):
    """Compiled code that calls steps one after the other, and the words it gets: their address is kept, since asking
    for it takes a microsecond, which a token of a small model feels."""

    call: Callable[[int, int, int], int]
    words: int
    memory: Array


class Segment:
    """Consecutive steps of compiled code."""

    def __init__(self, steps: Sequence[Step], threads: int, memory: object) -> None:
        self.steps = steps
        self._memory = memory  # words know addresses only
        self.threads = threads if any(w is not None for s in steps for w in s.words[1:]) else 1
        make_ready([run, *(step.kernel for step in steps)])
        self.table = np.zeros((self.threads, len(steps), STEP), np.int64)
        for thread, row in np.ndindex(self.table.shape[:2]):
            step = steps[row]
            words = step.words[thread]
            called = (0, 0) if words is None else (step.kernel.address, words.ctypes.data)
            self.table[thread, row] = *called, MEETS * step.meets | WHOLE * step.whole, step.number
        self.shared = np.zeros(SHARED_BYTES // 8, np.int64)
        self._times = np.zeros(len(steps) + 1, np.int64)
        self._loop = self._plain = self._loop_at(run.address, 0)

    @cached_property
    def _timed(self) -> Loop:
        return self._loop_at(timed.address, self._times.ctypes.data)

    def part(self, thread: int) -> int:
        """One thread's part of the run; the status."""
        return self._loop.call(self._loop.words, thread, self.threads)

    def _loop_at(self, address: int, times: int) -> Loop:
        """The loop of that address over these steps; `times` is where it writes when each began, 0 for nowhere."""
        table, shared = self.table.ctypes.data, self.shared.ctypes.data
        words = np.array(ARGS(table=table, steps=len(self.steps), shared=shared, times=times), np.int64)
        return Loop(REPLAY(address), words.ctypes.data, words)

    def measured(self, crew: Crew, together: Mapping[int, tuple[int, ...]]) -> Iterator[Timed]:
        """Run once; when the first thread did each step: told later.  `together` gives the instructions of a step."""
        self._loop = self._timed
        try:
            crew.run(self)
        finally:
            self._loop = self._plain
        return self._told(self._times.copy(), together)

    def _told(self, times: Array, together: Mapping[int, tuple[int, ...]]) -> Iterator[Timed]:
        for step, (start, end) in zip(self.steps, pairwise((times * 1e-9).tolist()), strict=True):
            yield Timed(step.kernel.name, together[step.number], start, end)


class StoppedError(BackendError):
    """A kernel stopped the run; `number` is that of its instruction."""

    def __init__(self, number: int, status: int) -> None:
        super().__init__(STATUS[status & 255].format(value=status >> 8))
        self.number, self.is_late = number, status == collective.LATE


def _serve(queue: SimpleQueue[Segment | None], done: SimpleQueue[int], number: int) -> None:
    """The life of a helper: its part of every segment it is given."""
    while (segment := queue.get()) is not None:
        segment.part(number)
        del segment  # a helper that waits keeps nothing alive
        done.put(number)


def _dismiss(queues: Sequence[SimpleQueue[Segment | None]]) -> None:
    for queue in queues:
        queue.put(None)


class Crew:
    """The threads of one device besides the one that calls; they start with the first work that is worth sharing, and
    end with the crew."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._queues: list[SimpleQueue[Segment | None]] = []
        self._done: SimpleQueue[int] = SimpleQueue()  # a semaphore is Python code, and four times slower

    def _start(self) -> None:
        self._queues = [SimpleQueue() for _ in range(self.threads - 1)]
        for i, queue in enumerate(self._queues):
            given = (queue, self._done, i + 1)
            threading.Thread(target=_serve, args=given, name=f"hocket.{i + 1}", daemon=True).start()
        weakref.finalize(self, _dismiss, self._queues)

    def run(self, segment: Segment) -> None:
        """Run a segment on all threads.  Raises `StoppedError` if a kernel stopped the run."""
        if segment.threads > 1 and not self._queues:
            self._start()
        helpers = self._queues if segment.threads > 1 else []
        for queue in helpers:
            queue.put(segment)
        try:
            status = segment.part(0)
        finally:  # an interrupt comes when the part is done
            for _ in helpers:
                self._done.get()
        if status:
            number = int(segment.shared[STEP_FAILED // 8])
            segment.shared[:] = 0
            raise StoppedError(number, status)


def missing(comm: Comm, sequence: object) -> str:
    """Who did not come to a collective."""
    board = comm.board if comm.slabs is None else comm.slabs.board
    assert board is not None
    at = board[collective.SLOTS // 8 :].reshape(comm.size, -1)[:, 2:4] - 1
    late = ", ".join(str(comm.devices[d]) if comm.slabs else str(d) for d in range(comm.size) if sequence not in at[d])
    who = f"device {late}" if late else "a device"  # it may have come since
    return f"collective {sequence} on device {comm.rank} of {comm.size}: {who} did not arrive within {comm.timeout:g} s"


Work = list[tuple[int, Segment | Callable[[], object]]]
"""What to run in order, each with the number of its (first) instruction."""


class Replay:
    """A program ready to run: compiled segments and Python calls, in order."""

    def __init__(
        self,
        program: Program,
        on: Device,
        work: Work,
        together: Mapping[int, tuple[int, ...]],
        finished: Callable[[int], int | frozenset[int]],
        crew: Crew,
        comm: Comm,
        memory: Sequence[object],
    ) -> None:
        """`together` gives for each instruction those that run with it, `finished` what has run where one fails, as
        `StepError` says it."""
        self.program, self.on, self.work, self.crew, self.comm = program, on, work, crew, comm
        self._together, self._finished = together, finished
        self._memory = memory  # compiled steps know addresses only
        self._calls = [(n, partial(crew.run, one) if isinstance(one, Segment) else one) for n, one in work]

    def __call__(self) -> None:
        self._run(self._calls)

    def _run(self, calls: Iterable[tuple[int, Callable[[], object]]]) -> None:
        try:
            run_calls(self.program, self.on, calls)
        except StepError as error:
            if (why := error.__cause__) is not None and not isinstance(why, Exception):
                raise why from None  # an interrupt: nobody knows how much of a segment has run
            if not isinstance(why, StoppedError):
                if isinstance(error.finished, int):
                    error.finished = self._finished(error.finished)
                raise
            at = self.program.instructions[why.number]
            said = missing(self.comm, at.attrs["sequence"]) if why.is_late else str(why)
            raise StepError(at.node, str(self.on), self._finished(why.number), said) from why

    def kernels(self) -> list[str]:
        """The names of the kernels that a run calls, in order."""
        names = ([s.kernel.name for s in one.steps] if isinstance(one, Segment) else ["NumPy"] for _, one in self.work)
        return [*chain.from_iterable(names)]

    def measured(self) -> Iterator[Timed]:
        """Run once; when each of these kernels ran, for whom asks after the run."""
        told: list[Iterable[Timed]] = []
        self._run((number, partial(self._timed, told, number, one)) for number, one in self.work)
        return chain.from_iterable(told)

    def _timed(self, told: list[Iterable[Timed]], number: int, one: Segment | Callable[[], object]) -> None:
        if isinstance(one, Segment):
            told.append(one.measured(self.crew, self._together))
            return
        start = time.monotonic()
        one()
        told.append([Timed("NumPy", self._together[number], start, time.monotonic())])
