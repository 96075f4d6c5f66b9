"""Programs of one device compiled: tables that a loop without the GIL replays, and Python calls for what has no kernel.

Threads of a device walk the same table, each doing its share; they are started once and woken for every run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np

from ...graph.errors import BackendError
from ...ops.collective import COLLECTIVES
from ..base import Comm, Instruction, Program
from .compiler import REPLAY
from .kernels import attention, collective, experts, moves, norms, products, recurrent, reductions, rotary, rows
from .kernels.loop import SHARED_BYTES, STEP, run, timed
from .steps import Binding, Bound, Operand, Steps

BINDINGS: Mapping[str, Binding] = {
    **rows.BINDINGS,
    **norms.BINDINGS,
    **products.BINDINGS,
    **moves.BINDINGS,
    **rotary.BINDINGS,
    **attention.BINDINGS,
    **collective.BINDINGS,
    **experts.BINDINGS,
    **recurrent.BINDINGS,
    **reductions.BINDINGS,
}
STATUS = {
    1: "an id names no row of its table",
    collective.OTHER_FAILED: "another device failed",
    collective.LATE: "a device did not come to a collective in time",
    collective.OUT_OF_STEP: "devices are at different collectives: their plans do not match",
}


class Segment:
    """Consecutive steps of compiled code."""

    def __init__(self, steps: Steps) -> None:
        self.steps, self.threads = steps, steps.threads
        table = [[k.address, block.ctypes.data, meets, number] for k, block, meets, number in steps.steps]
        self.table = np.array(table, np.int64).reshape(-1, STEP)
        self.shared = np.zeros(SHARED_BYTES // 8, np.int64)
        self.begun = np.zeros(1, np.int64)
        words = [self.table.ctypes.data, len(self.table), self.shared.ctypes.data, self.begun.ctypes.data, 0]
        self.arguments = np.array(words, np.int64)
        self.call = REPLAY(run.address)

    def part(self, thread: int) -> int:
        """One thread's part of the run; the status."""
        return int(self.call(self.arguments.ctypes.data, thread, self.threads))

    def measured(self, crew: Crew) -> list[tuple[str, float]]:
        """Run once; the name of each step's kernel, and the seconds it took the first thread."""
        times = np.zeros(len(self.table) + 1, np.int64)
        plain, self.arguments[4], self.call = self.call, times.ctypes.data, REPLAY(timed.address)
        try:
            crew.run(self)
        finally:
            self.call = plain
        return [(k.name, s) for (k, *_), s in zip(self.steps.steps, np.diff(times) * 1e-9, strict=True)]


class Crew:
    """The threads of one device besides the one that calls."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._queues: list[SimpleQueue[Segment]] = [SimpleQueue() for _ in range(threads - 1)]
        self._done = threading.Semaphore(0)
        for i, queue in enumerate(self._queues):
            threading.Thread(target=self._serve, args=(queue, i + 1), name=f"hocket.{i + 1}", daemon=True).start()

    def _serve(self, queue: SimpleQueue[Segment], number: int) -> None:
        while True:
            queue.get().part(number)
            self._done.release()

    def run(self, segment: Segment) -> None:
        """Run a segment on all threads.  Raises `BackendError` if a kernel stopped the run."""
        for queue in self._queues:
            queue.put(segment)
        status = segment.part(0)
        for _ in self._queues:
            self._done.acquire()
        if status:
            segment.shared[:] = 0
            raise BackendError(STATUS.get(status, f"status {status}"))


class Replay:
    """A program ready to run: compiled segments and Python calls, in order."""

    def __init__(self, work: Sequence[Segment | Callable[[], object]], crew: Crew) -> None:
        self.work, self.crew = work, crew

    def __call__(self) -> None:
        with np.errstate(all="ignore"):
            for one in self.work:
                if isinstance(one, Segment):
                    self.crew.run(one)
                else:
                    one()

    def measured(self) -> list[tuple[str, float]]:
        """Run once; what each step was, and its seconds."""
        found: list[tuple[str, float]] = []
        with np.errstate(all="ignore"):
            for one in self.work:
                if isinstance(one, Segment):
                    found += one.measured(self.crew)
                    continue
                start = time.perf_counter()
                one()
                found.append(("NumPy", time.perf_counter() - start))
        return found


def operand(tensor: Any, program: Program, buffers: Sequence[Any]) -> Operand:
    spec = program.buffers[tensor.buffer]
    return Operand(buffers[tensor.buffer].ctypes.data + tensor.offset, tensor, spec.declared, spec.stored)


def bound(number: int, i: Instruction, program: Program, buffers: Sequence[Any]) -> Bound:
    src = tuple(None if t is None else operand(t, program, buffers) for t in i.src)
    return Bound(i.op, src, tuple(operand(t, program, buffers) for t in i.dst), i.attrs, number)


def segments(
    program: Program,
    buffers: Sequence[Any],
    threads: int,
    comm: Comm,
    in_python: Callable[[Instruction], list[Callable[[], object]]],
) -> list[Segment | Callable[[], object]]:
    """What to run, in order: compiled segments, and calls for instructions that have no kernel."""
    found: list[Segment | Callable[[], object]] = []
    steps = Steps(threads, comm)

    def close() -> None:
        nonlocal steps
        if steps.steps:
            found.append(Segment(steps))
        steps = Steps(threads, comm)

    for number, i in enumerate(program.instructions):
        bind = BINDINGS.get(i.op)
        steps.number = number
        if not any(t.spec.size for t in i.dst) and i.op not in COLLECTIVES:
            continue
        if bind is None or not bind(steps, bound(number, i, program, buffers)):
            close()
            found += in_python(i)
    close()
    return found
