"""Programs of one device compiled: tables that a loop without the GIL replays, and Python calls for what has no kernel.

Threads of a device walk the same table, each doing its share; they are started once and woken for every run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np

from ...graph.errors import BackendError
from ...ops.collective import COLLECTIVES
from ..base import Comm, Instruction, Program
from .compiler import REPLAY
from .kernels import attention, collective, experts, moves, norms, products, recurrent, reductions, rotary, rows
from .kernels.loop import SHARED_BYTES, STEP, STEP_FAILED, run
from .kernels.packing import NO_ROW
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
    NO_ROW: "id {value} names no row of its table",
    collective.OTHER_FAILED: "another device failed",
    collective.LATE: "a device did not come to a collective in time",
    collective.OUT_OF_STEP: "devices are at different collectives: their plans do not match",
}


class Segment:
    """Consecutive steps of compiled code."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.threads = 1 if all(s.alone for s in steps.steps) else steps.threads
        table = [[s.kernel.address, s.words.ctypes.data, s.meets + 2 * s.alone, s.number] for s in steps.steps]
        self.table = np.array(table, np.int64).reshape(-1, STEP)
        self.shared = np.zeros(SHARED_BYTES // 8, np.int64)
        words = [self.table.ctypes.data, len(self.table), self.shared.ctypes.data]
        self.arguments = np.array(words, np.int64)
        self.call = REPLAY(run.address)

    def part(self, thread: int) -> int:
        """One thread's part of the run; the status."""
        return int(self.call(self.arguments.ctypes.data, thread, self.threads))


class StoppedError(BackendError):
    """A kernel stopped the run; `number` is that of its instruction."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(why)
        self.number = number


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
        """Run a segment on all threads.  Raises `StoppedError` if a kernel stopped the run."""
        helpers = self._queues if segment.threads > 1 else []
        for queue in helpers:
            queue.put(segment)
        status = segment.part(0)
        for _ in helpers:
            self._done.acquire()
        if status:
            number = int(segment.shared[STEP_FAILED // 8])
            segment.shared[:] = 0
            raise StoppedError(number, STATUS[status & 255].format(value=status >> 8))


def operand(tensor: Any, program: Program, buffers: Sequence[Any]) -> Operand:
    spec = program.buffers[tensor.buffer]
    return Operand(buffers[tensor.buffer].ctypes.data + tensor.offset, tensor, spec.declared, spec.stored)


def bound(number: int, i: Instruction, program: Program, buffers: Sequence[Any]) -> Bound:
    src = tuple(None if t is None else operand(t, program, buffers) for t in i.src)
    return Bound(i.op, src, tuple(operand(t, program, buffers) for t in i.dst), i.attrs, number)


Calls = list[tuple[int, Callable[[], object]]]
"""What to run in order, each with the number of its (first) instruction."""


def calls(
    program: Program,
    buffers: Sequence[Any],
    crew: Crew,
    comm: Comm,
    in_python: Callable[[Instruction], list[Callable[[], object]]],
) -> Calls:
    """Compiled segments, and calls for instructions that have no kernel."""
    found: Calls = []
    steps = Steps(crew.threads, comm)

    def close() -> None:
        nonlocal steps
        if steps.steps:
            found.append((steps.steps[0].number, partial(crew.run, Segment(steps))))
        steps = Steps(crew.threads, comm)

    for number, i in enumerate(program.instructions):
        bind = BINDINGS.get(i.op)
        steps.number = number
        if not any(t.spec.size for t in i.dst) and i.op not in COLLECTIVES:
            continue
        if bind is None or not bind(steps, bound(number, i, program, buffers)):
            close()
            found += [(number, call) for call in in_python(i)]
    close()
    return found
