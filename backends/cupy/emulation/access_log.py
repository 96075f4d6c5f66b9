"""Launches of several devices, and all that each of their threads did to memory that others may see."""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ...base import Device
from ..backend import DriverBackend
from ..device.driver import Beside, Launch, LaunchError, Step
from .compile_host import ACCESS_LOG_OPTIONS, load_library
from .emulated_driver import EmulatedDriver, Report, make_launch_shape
from .guard_pages import Bytes, address_of

EVENT_DTYPE = np.dtype(
    [
        *((name, np.uint64) for name in ("turn", "at", "code", "value")),
        *((name, np.uint32) for name in ("block", "thread", "bytes")),
        *(("kind", np.uint8), ("is_shared", np.uint8), ("unused", np.uint16)),
    ]
)
"""As event.h has it."""


@dataclass(frozen=True, slots=True)
class LoggedLaunch:
    """A launch of one device, which is at a `place` in one of its streams and behind others, as `Queued` has it; its
    compiled code, and what its threads did, in order."""

    device: int
    stream: int
    position: int
    predecessors_end: int
    kernel: str
    code: ctypes.CDLL
    events: npt.NDArray[np.void]

    @property
    def queue_index(self) -> int:
        """The number of the stream among those of all devices."""
        return self.device * STREAM_COUNT + self.stream


STREAM_COUNT = 2
MAIN_STREAM, SIDE_STREAM = range(STREAM_COUNT)


@dataclass(frozen=True, slots=True)
class QueuedLaunch:
    """A launch in a stream of its device: it follows those before it in its own one, and in the other one those whose
    places are before `behind`."""

    launch: Launch
    stream: int
    predecessors_end: int


def queue_launches(steps: Sequence[Step]) -> list[QueuedLaunch]:
    """Launches in their streams, collectives beside others at the side."""
    made: list[QueuedLaunch] = []
    for step in steps:
        behind = len(made)
        at_once = (
            ((SIDE_STREAM, step.meeting), (MAIN_STREAM, step.meanwhile))
            if isinstance(step, Beside)
            else ((MAIN_STREAM, (step,)),)
        )
        for stream, singles in at_once:
            for single in singles:
                assert isinstance(single, Launch), "there is no library"
                made.append(QueuedLaunch(single, stream, behind))
    return made


@dataclass(frozen=True, slots=True)
class MemorySpan:
    """Bytes of a device, from `low` to before `high`: a buffer, which the host fills before a run and reads behind it,
    or what a program keeps, which was filled before the devices knew each other."""

    low: int
    high: int
    device: int
    is_buffer: bool


class AccessLogDriver(EmulatedDriver):
    """Keeps all launches since the last `taken`, those of each device in order.

    They go without the barrier or meeting of lanes at `dropped`, a line of a file of kernels, if that is given.
    """

    def __init__(self, dropped: tuple[str, int] = ("", 0)) -> None:
        super().__init__()
        self.dropped_line = dropped
        self.buffers: set[int] = set()
        self._memory: list[MemorySpan] = []
        self._log: list[LoggedLaunch] = []
        self._launch_counts: dict[int, int] = defaultdict(int)  # by device
        self._turns = ctypes.c_uint64(1)
        self._lock = threading.Lock()

    def take_log(self) -> list[LoggedLaunch]:
        with self._lock:
            ran, self._log = self._log, []
        return ran

    def alloc(self, nbytes: int, on: Device) -> Bytes:
        memory = super().alloc(nbytes, on)
        low = address_of(memory)
        with self._lock:
            self._memory.append(MemorySpan(low, low + nbytes, on.index, is_buffer=False))
        return memory

    @property
    def memory(self) -> list[MemorySpan]:
        with self._lock:
            return [replace(m, is_buffer=m.low in self.buffers) for m in self._memory]

    def record(self, steps: Sequence[Step], on: Device) -> Callable[[], None]:
        launches = queue_launches(steps)
        codes = [load_library(one.launch.kernel.alone, ACCESS_LOG_OPTIONS) for one in launches]
        runs = 0

        def run() -> None:
            nonlocal runs
            order = runs % 4
            runs += 1
            first = self._launch_counts[on.index]
            for one, code in zip(launches, codes, strict=True):
                placed = one.stream, self._launch_counts[on.index], first + one.predecessors_end
                self._launch_counts[on.index] += 1
                ran = LoggedLaunch(
                    on.index, *placed, str(one.launch.kernel), code, self._run_logged(one.launch, code, order)
                )
                with self._lock:
                    self._log.append(ran)

        return run

    def _run_logged(self, launch: Launch, code: ctypes.CDLL, order: int) -> npt.NDArray[np.void]:
        """Make a launch.  Raises `LaunchError` with what the emulation found."""
        words = np.array(launch.words, np.uint64)
        shape = make_launch_shape(launch, words, order)
        report = Report()
        code.launch_0.restype, code.order_end.restype = None, ctypes.c_int64
        memory = np.array(sorted((m.low, m.high) for m in self.memory), np.uint64)
        file, line = ctypes.c_char_p(self.dropped_line[0].encode()), ctypes.c_int64(self.dropped_line[1])
        given = ctypes.c_void_p(memory.ctypes.data), ctypes.c_int64(len(memory))
        code.order_begin(ctypes.byref(self._turns), *given, file, line)
        code.launch_0(ctypes.byref(shape), ctypes.byref(report))
        events = np.empty(code.order_end(), EVENT_DTYPE)
        code.order_take(ctypes.c_void_p(events.ctypes.data))
        if report.status:
            raise LaunchError(launch.number, f"{launch.kernel}: {report.text.decode()}")
        return events


class AccessLogBackend(DriverBackend):
    """Runs on an `OrderedDriver`, and tells it which memory the host fills."""

    def __init__(self, driver: AccessLogDriver) -> None:
        super().__init__(driver)
        self._buffers = driver.buffers

    def alloc(self, nbytes: int, on: Device, lasting: bool = False) -> Any:
        buffer = super().alloc(nbytes, on, lasting)
        self._buffers.add(self.driver.address(buffer))
        return buffer
