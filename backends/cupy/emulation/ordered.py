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
from .building import ORDER, library
from .emulated import EmulatedDriver, Report, shape_of
from .guarded import Bytes, address_of

EVENT = np.dtype(
    [
        *((name, np.uint64) for name in ("turn", "at", "code", "value")),
        *((name, np.uint32) for name in ("block", "thread", "bytes")),
        *(("kind", np.uint8), ("is_shared", np.uint8), ("unused", np.uint16)),
    ]
)
"""As event.h has it."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A launch of one device, which is at a `place` in one of its streams and behind others, as `Queued` has it; its
    compiled code, and what its threads did, in order."""

    device: int
    stream: int
    place: int
    behind: int
    kernel: str
    code: ctypes.CDLL
    events: npt.NDArray[np.void]

    @property
    def queue(self) -> int:
        """The number of the stream among those of all devices."""
        return self.device * STREAMS + self.stream


STREAMS = 2
MAIN, SIDE = range(STREAMS)


@dataclass(frozen=True, slots=True)
class Queued:
    """A launch in a stream of its device: it follows those before it in its own one, and in the other one those whose
    places are before `behind`."""

    launch: Launch
    stream: int
    behind: int


def queued(steps: Sequence[Step]) -> list[Queued]:
    """Launches in their streams, collectives beside others at the side."""
    made: list[Queued] = []
    for step in steps:
        behind = len(made)
        at_once = ((SIDE, step.meeting), (MAIN, step.meanwhile)) if isinstance(step, Beside) else ((MAIN, (step,)),)
        for stream, singles in at_once:
            for single in singles:
                assert isinstance(single, Launch), "there is no library"
                made.append(Queued(single, stream, behind))
    return made


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a device, from `low` to before `high`: a buffer, which the host fills before a run and reads behind it,
    or what a program keeps, which was filled before the devices knew each other."""

    low: int
    high: int
    device: int
    is_buffer: bool


class OrderedDriver(EmulatedDriver):
    """Keeps all launches since the last `taken`, those of each device in order.

    They go without the barrier or meeting of lanes at `dropped`, a line of a file of kernels, if that is given.
    """

    def __init__(self, dropped: tuple[str, int] = ("", 0)) -> None:
        super().__init__()
        self.dropped = dropped
        self.buffers: set[int] = set()
        self._memory: list[Memory] = []
        self._ran: list[Ran] = []
        self._launched: dict[int, int] = defaultdict(int)  # by device
        self._turns = ctypes.c_uint64(1)
        self._adding = threading.Lock()

    def taken(self) -> list[Ran]:
        with self._adding:
            ran, self._ran = self._ran, []
        return ran

    def alloc(self, nbytes: int, on: Device) -> Bytes:
        memory = super().alloc(nbytes, on)
        low = address_of(memory)
        with self._adding:
            self._memory.append(Memory(low, low + nbytes, on.index, is_buffer=False))
        return memory

    @property
    def memory(self) -> list[Memory]:
        with self._adding:
            return [replace(m, is_buffer=m.low in self.buffers) for m in self._memory]

    def record(self, steps: Sequence[Step], on: Device) -> Callable[[], None]:
        launches = queued(steps)
        codes = [library(one.launch.kernel.alone, ORDER) for one in launches]
        runs = 0

        def run() -> None:
            nonlocal runs
            order = runs % 4
            runs += 1
            first = self._launched[on.index]
            for one, code in zip(launches, codes, strict=True):
                placed = one.stream, self._launched[on.index], first + one.behind
                self._launched[on.index] += 1
                ran = Ran(on.index, *placed, str(one.launch.kernel), code, self._events(one.launch, code, order))
                with self._adding:
                    self._ran.append(ran)

        return run

    def _events(self, launch: Launch, code: ctypes.CDLL, order: int) -> npt.NDArray[np.void]:
        """Make a launch.  Raises `LaunchError` with what the emulation found."""
        words = np.array(launch.words, np.uint64)
        shape = shape_of(launch, words, order)
        report = Report()
        code.launch_0.restype, code.order_end.restype = None, ctypes.c_int64
        memory = np.array(sorted((m.low, m.high) for m in self.memory), np.uint64)
        file, line = ctypes.c_char_p(self.dropped[0].encode()), ctypes.c_int64(self.dropped[1])
        given = ctypes.c_void_p(memory.ctypes.data), ctypes.c_int64(len(memory))
        code.order_begin(ctypes.byref(self._turns), *given, file, line)
        code.launch_0(ctypes.byref(shape), ctypes.byref(report))
        events = np.empty(code.order_end(), EVENT)
        code.order_take(ctypes.c_void_p(events.ctypes.data))
        if report.status:
            raise LaunchError(launch.number, f"{launch.kernel}: {report.text.decode()}")
        return events


class OrderedBackend(DriverBackend):
    """Runs on an `OrderedDriver`, and tells it which memory the host fills."""

    def __init__(self, driver: OrderedDriver) -> None:
        super().__init__(driver)
        self._buffers = driver.buffers

    def alloc(self, nbytes: int, on: Device, lasting: bool = False) -> Any:
        buffer = super().alloc(nbytes, on, lasting)
        self._buffers.add(self.driver.address(buffer))
        return buffer
