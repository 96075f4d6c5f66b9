"""Compiled programs of one device: step tables that a compiled loop replays without the GIL, and Python calls.

The threads of a device walk through tables of equal length. Each thread does its part of every step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from functools import cached_property, partial
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ....graph.errors import BackendError, StepError
from ...base import Array, Comm, Device, Program, run_calls
from ...capabilities import STAND_IN, TimedKernel
from ...fusion.dataflow import Dataflow
from ..compilation.compiler import KERNEL_FUNCTION, compile_missing_kernels
from ..kernels import collectives
from ..kernels.packed.weight_packing import INVALID_ROW
from ..steps.step_loop import (
    ARGS,
    BARRIER_FLAG,
    SHARED_BYTES,
    STEP_FAILED_OFFSET,
    STEP_WORDS,
    WHOLE_FLAG,
    run_step_table,
    run_step_table_timed,
)
from ..steps.step_table import TableStep
from ..steps.thread_sync import RUN_ARGS
from .thread_pool import ThreadPool

I64 = npt.NDArray[np.int64]
STATUS_MESSAGES = {
    INVALID_ROW: "id {value} names no row of its table",
    collectives.OTHER_FAILED: "another device failed",
    collectives.TIMED_OUT: "a device did not come to a collective in time",
    collectives.OUT_OF_STEP: "devices are at different collectives: their plans do not match",
}


class BoundStepLoop(NamedTuple):
    """A compiled loop with the step table that it runs: argument words for the loop and for the thread pool.

    It has addresses in place of arrays: reading the address of an array takes a microsecond, which is noticeable in the
    decode time of a small model.
    """

    call: Callable[[int, int, int], int]
    words: int
    order: int
    memory: tuple[Array, Array]


def build_step_table(
    steps: Sequence[TableStep],
    threads: int,
    get_kernel_entry: Callable[[TableStep], int],
    get_words_entry: Callable[[I64], int],
    idle_entries: tuple[int, int] = (0, 0),
) -> I64:
    """Build the integer table [threads, steps, words of a step] from which the compiled loop runs the steps.

    Args:
        steps: The steps.
        threads: Thread count.
        get_kernel_entry: Returns the entry for the kernel of a step, such as its address.
        get_words_entry: Returns the entry for argument words, such as their address.
        idle_entries: Both entries for a thread without work.
    """
    table = np.zeros((threads, len(steps), STEP_WORDS), np.int64)
    for thread, row in np.ndindex(table.shape[:2]):
        step = steps[row]
        words = step.words[thread]
        called = idle_entries if words is None else (get_kernel_entry(step), get_words_entry(words))
        table[thread, row] = (
            *called,
            BARRIER_FLAG * step.has_barrier | WHOLE_FLAG * step.is_presplit,
            step.instruction_number,
        )
    return table


class CompiledSegment:
    """Consecutive steps of compiled code, as one step table that a compiled loop runs without Python.

    It also has the names of the kernels, for reports.
    """

    def __init__(self, kernels: Sequence[str], table: I64, memory: object) -> None:
        self.kernel_names, self.instruction_numbers = kernels, table[0, :, 3].tolist()
        self._memory = memory  # words have addresses only
        self.threads = len(table) if table[1:, :, 0].any() else 1
        self.table = np.ascontiguousarray(table[: self.threads])
        self.shared_words = np.zeros(SHARED_BYTES // 8, np.int64)
        self.times = np.zeros(len(kernels) + 3, np.int64)
        self._loop = self._bind_loop_to_step_table(run_step_table.address, 0)

    @classmethod
    def from_steps(cls, steps: Sequence[TableStep], threads: int, memory: object) -> CompiledSegment:
        """Build a segment from steps.

        Missing kernels are compiled first. `memory` is the object that keeps alive the memory to which the argument
        words point, except buffers.
        """
        compile_missing_kernels([run_step_table, *(kernel for step in steps for kernel in step.kernels)])
        for step in steps:
            step.set_kernel_words(lambda kernel: kernel.address)
        table = build_step_table(steps, threads, lambda step: step.kernel.address, lambda words: int(words.ctypes.data))
        return cls([step.kernel.name for step in steps], table, (steps, memory))

    @cached_property
    def timed_segment(self) -> CompiledSegment:
        """A copy of the segment that also measures the start time of each step (`convert_step_starts_to_seconds`)."""
        segment = copy(self)
        segment._loop = self._bind_loop_to_step_table(run_step_table_timed.address, self.times.ctypes.data)
        return segment

    @staticmethod
    def convert_step_starts_to_seconds(times: bytes) -> Array:
        """Convert the times of a timed run to seconds: the start of each step, then the end of the last step.

        Args:
            times: 64-bit integers. First the cycle counter at each of these moments, then the clock in nanoseconds at
                the first and at the last moment.

        Returns:
            float64 [steps + 1].
        """
        *ticks, start, end = np.frombuffer(times, np.int64).tolist()
        return 1e-9 * np.interp(ticks, (ticks[0], ticks[-1]), (start, end))

    def run(self, thread_pool: ThreadPool) -> None:
        """Run all steps of the segment once, on all threads that have work.

        Raises:
            KernelStoppedError: A kernel stopped the run.
        """
        loop = self._loop
        status = thread_pool.run(loop.order) if self.threads > 1 else loop.call(loop.words, 0, 1)
        if status:
            number = int(self.shared_words[STEP_FAILED_OFFSET // 8])
            self.shared_words[:] = 0
            raise KernelStoppedError(number, status)

    def _bind_loop_to_step_table(self, loop_address: int, times_address: int) -> BoundStepLoop:
        """Bind the compiled loop at `loop_address` to the table; `times_address` receives start times, 0 means none."""
        table, shared = self.table.ctypes.data, self.shared_words.ctypes.data
        words = np.array(ARGS(table=table, steps=len(self.kernel_names), shared=shared, times=times_address), np.int64)
        order = np.array(RUN_ARGS(loop=loop_address, words=words.ctypes.data), np.int64)
        return BoundStepLoop(KERNEL_FUNCTION(loop_address), words.ctypes.data, order.ctypes.data, (words, order))


class KernelStoppedError(BackendError):
    """The error that a kernel stopped the run, for example because of an invalid row id or a late device.

    `instruction_number` is the instruction of the kernel. `is_late` is true if a collective timed out.
    """

    def __init__(self, number: int, status: int) -> None:
        super().__init__(STATUS_MESSAGES[status & 255].format(value=status >> 8))
        self.instruction_number, self.is_late = number, status == collectives.TIMED_OUT


def describe_missing_devices(comm: Comm, sequence: object) -> str:
    """Return an error message that names the devices which did not arrive at collective number `sequence`."""
    board = comm.signal_pad if comm.shared_buffers is None else comm.shared_buffers.signal_pad
    assert board is not None
    at = board[collectives.SLOTS_OFFSET // 8 :].reshape(comm.size, -1)[:, 2:4] - 1
    late = ", ".join(
        str(comm.devices[d]) if comm.shared_buffers else str(d) for d in range(comm.size) if sequence not in at[d]
    )
    who = f"device {late}" if late else "a device"  # it may have arrived since
    return f"collective {sequence} on device {comm.rank} of {comm.size}: {who} did not arrive within {comm.timeout:g} s"


Calls = list[tuple[int, Callable[[], object]]]
ReplayItems = list[tuple[int, CompiledSegment | Callable[[], object]]]
"""The items of a run in order: segments and Python calls, each with the number of its first instruction."""


class Replay:
    """A program that is ready to run: compiled segments and Python calls, in order."""

    def __init__(
        self,
        program: Program,
        on: Device,
        work: ReplayItems,
        flow: Callable[[], Dataflow],
        thread_pool: ThreadPool,
        comm: Comm,
        memory: Sequence[object],
    ) -> None:
        """Store the program and its items; the first failure or timed run calls `flow` to build the dataflow."""
        self.program, self.on, self.work, self.thread_pool, self.comm = program, on, work, thread_pool, comm
        self._build_dataflow = flow
        self._memory = memory  # compiled steps have addresses only
        self._calls = [
            (n, partial(one.run, thread_pool) if isinstance(one, CompiledSegment) else one) for n, one in work
        ]

    @cached_property
    def _dataflow(self) -> Dataflow:
        return self._build_dataflow()

    def __call__(self) -> None:
        self._run(self._calls)

    def _run(self, calls: Calls) -> None:
        try:
            run_calls(self.program, self.on, calls)
        except StepError as error:
            if (why := error.__cause__) is not None and not isinstance(why, Exception):
                raise why from None  # an interrupt: the number of finished steps is unknown
            if not isinstance(why, KernelStoppedError):
                if isinstance(error.finished_instructions, int):
                    error.finished_instructions = self._dataflow.find_instructions_finished_before(
                        error.finished_instructions
                    )
                raise
            at = self.program.instructions[why.instruction_number]
            message = describe_missing_devices(self.comm, at.attrs["sequence"]) if why.is_late else str(why)
            raise StepError(
                at.node, str(self.on), self._dataflow.find_instructions_finished_before(why.instruction_number), message
            ) from why

    def kernels(self) -> list[str]:
        """Return the names of the kernels that a run calls, in order."""
        names = (one.kernel_names if isinstance(one, CompiledSegment) else [STAND_IN] for _, one in self.work)
        return [*chain.from_iterable(names)]

    def run_timed(self) -> Iterable[TimedKernel]:
        """Run the program once and return the start and end time of each kernel.

        The times are computed from the clock buffers after the run. During the run this would be slow: after a token
        the caches hold only weights, and a line of Python takes five times as long.
        """
        self._run(self._timed_calls)
        return self._make_timed_kernels([*map(bytes, self._timing_buffers_by_segment)])

    @cached_property
    def _timing_buffers_by_segment(self) -> list[memoryview]:
        """One buffer per segment or Python call, for the times of a timed run: starts of the steps, then the end."""
        return [(one.times if isinstance(one, CompiledSegment) else np.zeros(2, np.int64)).data for _, one in self.work]

    @cached_property
    def _timed_calls(self) -> Calls:
        return [
            (
                number,
                partial(one.timed_segment.run, self.thread_pool)
                if isinstance(one, CompiledSegment)
                else partial(_record_call_times, clock, one),
            )
            for (number, one), clock in zip(self.work, self._timing_buffers_by_segment, strict=True)
        ]

    def _make_timed_kernels(self, clocks: Sequence[bytes]) -> Iterator[TimedKernel]:
        together = self._dataflow.groups_by_instruction()
        for (number, one), clock in zip(self.work, clocks, strict=True):
            if isinstance(one, CompiledSegment):
                steps, times = (
                    [*zip(one.kernel_names, one.instruction_numbers, strict=True)],
                    CompiledSegment.convert_step_starts_to_seconds(clock),
                )
            else:
                steps, times = [(STAND_IN, number)], 1e-9 * np.frombuffer(clock, np.int64)
            for (kernel, first), (start, end) in zip(steps, pairwise(times.tolist()), strict=True):
                yield TimedKernel(kernel, together[first], start, end)


def _record_call_times(clock: memoryview, call: Callable[[], object]) -> None:
    """Make a Python call, and write its start and end in nanoseconds into `clock`."""
    clock[0] = time.monotonic_ns()
    call()
    clock[1] = time.monotonic_ns()
