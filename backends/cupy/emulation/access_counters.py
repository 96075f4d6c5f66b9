"""Counts the memory accesses of launches in the emulator: sectors of global memory, wavefronts of shared memory."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ...base import Device
from ..device.device_limits import LARGEST_LIMITS, KernelLimits
from ..device.driver import DriverStep, KernelLaunch, LaunchError, flatten_steps
from .compile_host import COUNTER_OPTIONS, load_emulated_library
from .emulated_driver import EmulatedDriver, FaultReport, make_launch_shape
from .guard_pages import Bytes
from .source_lines import find_inlined_frames, select_innermost_kernel_line

MAX_SITES = 4096
"""Maximum number of distinct accesses in the code of one launch."""
BUFFER_ALIGNMENT = 512
"""Alignment of buffers in bytes, as a device has it."""


class _SiteRecord(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("code", "is_shared", "is_store", "bytes", "requests", "cost", "least")
    )


@dataclass(frozen=True, slots=True)
class AccessSiteCounters:
    """The counters of one memory access in the code of a kernel, summed over all warps of a launch.

    Attributes:
        source_line: ``file:line`` of the innermost kernel frame.
        nbytes: Bytes per warp lane.
        requests: How often a warp executed the access.
        cost: Sectors of 32 bytes of global memory, or wavefronts of shared memory.
        minimum_cost: The cost if the lanes of each warp accessed adjacent bytes.
        frames: ``file:line`` of all inlined frames, innermost first.
    """

    source_line: str
    is_shared: bool
    is_store: bool
    nbytes: int
    requests: int
    cost: int
    minimum_cost: int
    frames: tuple[str, ...] = ()

    @property
    def access_kind(self) -> str:
        """The kind of access as a phrase, such as ``global load of 16 bytes``."""
        memory, access = "shared" if self.is_shared else "global", "store" if self.is_store else "load"
        return f"{memory} {access} of {self.nbytes} bytes"

    def __str__(self) -> str:
        return f"{self.source_line}, a {self.access_kind} a lane"


@dataclass(frozen=True, slots=True)
class LaunchCounters:
    """The counters of all memory accesses of one launch.

    Attributes:
        launch: The launch.
        sites: The counters of each access in the code.
        sector_bytes: Bytes of all distinct sectors.
        requested_bytes: Bytes of all distinct addresses that the launch accesses.
        block_requested_bytes: Bytes of all sectors, where a sector counts once for each thread block that requests it.
        copies_in_flight: The largest number of groups of asynchronous copies that a thread has in flight while it reads
            earlier ones. `None` if the launch waits for no such group; bulk copies are not counted.
    """

    launch: KernelLaunch
    sites: tuple[AccessSiteCounters, ...]
    sector_bytes: int
    requested_bytes: int
    block_requested_bytes: int
    copies_in_flight: int | None

    @property
    def block_threads(self) -> int:
        """The number of threads of a block."""
        return math.prod(self.launch.block)

    @property
    def kernel(self) -> str:
        """The name of the kernel, with its source file."""
        return str(self.launch.kernel)


class AccessCountingDriver(EmulatedDriver):
    """A driver of emulated devices that counts the memory accesses of each launch.

    `counters` has the counters of the last launch of each kernel, by kernel name. `counted_run` is the number of the
    only run that is counted; by default all runs are. Counting takes several times as long as running.
    """

    def __init__(self, limits: KernelLimits = LARGEST_LIMITS, counted_run: int | None = None) -> None:
        super().__init__(order=0, limits=limits)
        self.counters: dict[str, LaunchCounters] = {}
        self.counted_run = counted_run

    def alloc(self, nbytes: int, on: Device) -> Bytes:
        buffer = np.zeros(nbytes + BUFFER_ALIGNMENT, np.uint8)
        start = -buffer.ctypes.data % BUFFER_ALIGNMENT
        return buffer[start : start + nbytes]

    def record(self, steps: Sequence[DriverStep], on: Device) -> Callable[[], None]:
        launches = [step for step in flatten_steps(steps) if isinstance(step, KernelLaunch)]
        run_uncounted = super().record(steps, on) if self.counted_run is not None else None
        runs = itertools.count()

        def run() -> None:
            if next(runs) != self.counted_run and run_uncounted is not None:
                return run_uncounted()
            for launch in launches:
                self.counters[str(launch.kernel)] = run_with_counters(launch)

        return run


def run_with_counters(launch: KernelLaunch) -> LaunchCounters:
    """Run a launch in the emulator with access counters, and return the counters.

    Raises:
        LaunchError: The first fault that the emulator found.
    """
    library = load_emulated_library(launch.kernel.single_kernel_source, COUNTER_OPTIONS)
    words = np.array(launch.words, np.uint64)
    shape = make_launch_shape(launch, words)
    report, sites, totals = FaultReport(), (_SiteRecord * MAX_SITES)(), (ctypes.c_int64 * 6)()
    spans = sorted({(span.low, span.high) for span in launch.spans if span.high > span.low})
    operand_spans = np.array(_merge_spans(spans), np.uint64).reshape(-1, 2)
    library.counters_begin(ctypes.c_void_p(operand_spans.ctypes.data), ctypes.c_int64(len(operand_spans)))
    library.launch_0.restype, library.counters_end.restype = None, ctypes.c_int64
    library.launch_0(ctypes.byref(shape), ctypes.byref(report))
    site_count = library.counters_end(sites, ctypes.c_int64(MAX_SITES), totals)
    if report.status:
        raise LaunchError(launch.number, f"{launch.kernel}: {report.text.decode()}")
    frames = find_inlined_frames(library, [site.code for site in sites[:site_count]])
    counted_sites = (
        AccessSiteCounters(
            select_innermost_kernel_line(at),
            bool(s.is_shared),
            bool(s.is_store),
            s.bytes,
            s.requests,
            s.cost,
            s.least,
            at,
        )
        for at, s in zip(frames, sites[:site_count], strict=True)
    )
    copies_in_flight = totals[5] if totals[5] >= 0 else None
    sector_bytes, requested_bytes = totals[0] + totals[2], totals[1] + totals[3]
    return LaunchCounters(launch, tuple(counted_sites), sector_bytes, requested_bytes, totals[4], copies_in_flight)


def _merge_spans(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge the overlapping spans of a list of (begin, end) in ascending order; return disjoint spans."""
    merged: list[tuple[int, int]] = []
    for low, high in spans:
        if merged and low < merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], high)
        else:
            merged.append((low, high))
    return merged
