"""Logs the accesses of all threads to shared and global memory, in launches of several devices."""

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
from ..device.driver import CollectiveOverlap, DriverStep, KernelLaunch, LaunchError
from .compile_host import ACCESS_LOG_OPTIONS, load_emulated_library
from .emulated_driver import EmulatedDriver, FaultReport, make_launch_shape
from .guard_pages import Bytes, address_of

EVENT_DTYPE = np.dtype(
    [
        *((name, np.uint64) for name in ("turn", "at", "code", "value")),
        *((name, np.uint32) for name in ("block", "thread", "bytes")),
        *((name, np.uint8) for name in ("kind", "is_shared", "is_in_device", "adds")),
    ]
)
"""The layout of an event in event.h."""


@dataclass(frozen=True, slots=True)
class LoggedLaunch:
    """One launch in the access log, with all memory accesses and synchronisations of its threads.

    Attributes:
        device: Index of the device.
        stream: `MAIN_STREAM` or `SIDE_STREAM`.
        position: Index among all launches of the device.
        predecessors_end: This launch follows the launches of the other stream with a position below this one.
        kernel: Name of the kernel.
        code: Compiled library of the kernel.
        events: Accesses and synchronisations in order, of dtype `EVENT_DTYPE`.
    """

    device: int
    stream: int
    position: int
    predecessors_end: int
    kernel: str
    code: ctypes.CDLL
    events: npt.NDArray[np.void]


STREAM_COUNT = 2
MAIN_STREAM, SIDE_STREAM = range(STREAM_COUNT)


@dataclass(frozen=True, slots=True)
class StreamAssignedLaunch:
    """A launch with the stream (queue) of its device in which it runs, and the launches that must end before it.

    It follows all earlier launches of its stream. It also follows the launches of the other stream with an index
    below `predecessors_end`.
    """

    launch: KernelLaunch
    stream: int
    predecessors_end: int


def assign_launches_to_streams(steps: Sequence[DriverStep]) -> list[StreamAssignedLaunch]:
    """Return the launches of `steps` in order, each with its stream, as the CUDA driver would queue them.

    Overlapped collectives go to the side stream, all other launches to the main stream.
    """
    launches: list[StreamAssignedLaunch] = []
    for step in steps:
        predecessors_end = len(launches)
        by_stream = (
            ((SIDE_STREAM, step.collective), (MAIN_STREAM, step.overlapped))
            if isinstance(step, CollectiveOverlap)
            else ((MAIN_STREAM, (step,)),)
        )
        for stream, singles in by_stream:
            for single in singles:
                assert isinstance(single, KernelLaunch), "there is no library"
                launches.append(StreamAssignedLaunch(single, stream, predecessors_end))
    return launches


@dataclass(frozen=True, slots=True)
class DeviceMemorySpan:
    """The bytes [`low`, `high`) of a device's memory, which are a buffer or belong to a program.

    - A buffer (`is_buffer`) is written by the host before a run and read by the host after it.
    - Other memory belongs to a program, and was filled before the devices exchanged operand addresses.
    """

    low: int
    high: int
    device: int
    is_buffer: bool


class AccessLogDriver(EmulatedDriver):
    """A driver of emulated devices that logs the memory accesses of all launches, in order for each device.

    `dropped_line` is a file and a line of a kernel source. All launches skip the block or warp barrier in that line.
    """

    def __init__(self, dropped_line: tuple[str, int] = ("", 0)) -> None:
        super().__init__()
        self.dropped_line = dropped_line
        self.buffers: set[int] = set()
        self._memory: list[DeviceMemorySpan] = []
        self._log: list[LoggedLaunch] = []
        self._launch_counts: dict[int, int] = defaultdict(int)  # by device
        self._turns = ctypes.c_uint64(1)
        self._lock = threading.Lock()

    def take_log(self) -> list[LoggedLaunch]:
        """Return the launches that were logged since the last call, and clear the log."""
        with self._lock:
            log, self._log = self._log, []
        return log

    def alloc(self, nbytes: int, on: Device) -> Bytes:
        memory = super().alloc(nbytes, on)
        low = address_of(memory)
        with self._lock:
            self._memory.append(DeviceMemorySpan(low, low + nbytes, on.index, is_buffer=False))
        return memory

    @property
    def memory(self) -> list[DeviceMemorySpan]:
        """The memory spans of all devices."""
        with self._lock:
            return [replace(m, is_buffer=m.low in self.buffers) for m in self._memory]

    def record(self, steps: Sequence[DriverStep], on: Device) -> Callable[[], None]:
        launches = assign_launches_to_streams(steps)
        codes = [load_emulated_library(one.launch.kernel.single_kernel_source, ACCESS_LOG_OPTIONS) for one in launches]
        runs = 0

        def run() -> None:
            nonlocal runs
            order = runs % 4
            runs += 1
            first = self._launch_counts[on.index]
            for one, code in zip(launches, codes, strict=True):
                position = one.stream, self._launch_counts[on.index], first + one.predecessors_end
                self._launch_counts[on.index] += 1
                logged = LoggedLaunch(
                    on.index, *position, str(one.launch.kernel), code, self._run_logged(one.launch, code, order)
                )
                with self._lock:
                    self._log.append(logged)

        return run

    def _run_logged(self, launch: KernelLaunch, code: ctypes.CDLL, order: int) -> npt.NDArray[np.void]:
        """Run a launch with an access log, and return its events.

        Args:
            launch: The launch.
            code: Compiled library of its kernel.
            order: Order of threads and blocks; see `EmulatedDriver`.

        Raises:
            LaunchError: The first fault that the emulator found.
        """
        words = np.array(launch.words, np.uint64)
        shape = make_launch_shape(launch, words, order)
        report = FaultReport()
        code.launch_0.restype, code.order_end.restype = None, ctypes.c_int64
        memory = np.array(sorted((m.low, m.high) for m in self.memory), np.uint64)
        file, line = ctypes.c_char_p(self.dropped_line[0].encode()), ctypes.c_int64(self.dropped_line[1])
        spans = ctypes.c_void_p(memory.ctypes.data), ctypes.c_int64(len(memory))
        code.order_begin(ctypes.byref(self._turns), *spans, file, line)
        code.launch_0(ctypes.byref(shape), ctypes.byref(report))
        events = np.empty(code.order_end(), EVENT_DTYPE)
        code.order_take(ctypes.c_void_p(events.ctypes.data))
        if report.status:
            raise LaunchError(launch.number, f"{launch.kernel}: {report.text.decode()}")
        return events


class AccessLogBackend(DriverBackend):
    """A backend with an `AccessLogDriver`. It tells the driver the addresses of all buffers."""

    def __init__(self, driver: AccessLogDriver) -> None:
        super().__init__(driver)
        self._buffers = driver.buffers

    def alloc(self, nbytes: int, on: Device, lasting: bool = False) -> Any:
        buffer = super().alloc(nbytes, on, lasting)
        self._buffers.add(self.driver.address(buffer))
        return buffer
