"""Launches whose accesses are counted as a device would make them: sectors of global memory, wavefronts of shared."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ...base import Device
from ..device.driver import Launch, LaunchError, Step, one_by_one
from ..device.limits import MOST, Limits
from .compile_host import COUNTER_OPTIONS, load_library
from .emulated_driver import EmulatedDriver, Report, make_launch_shape
from .guard_pages import Bytes
from .source_lines import find_frames, select_innermost_line

MAX_SITES = 4096
BUFFER_ALIGNMENT = 512
"""Of memory that a device gives."""


class _SiteRecord(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("code", "is_shared", "is_store", "bytes", "requests", "cost", "least")
    )


@dataclass(frozen=True, slots=True)
class AccessSite:
    """All requests of one line: `cost` is in sectors of 32 bytes, of shared memory in wavefronts, and `least` what they
    would be if the lanes of a warp wanted the same bytes side by side.  The line is inlined in those of `frames`."""

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
        """Such as ``global load of 16 bytes``."""
        memory, way = "shared" if self.is_shared else "global", "store" if self.is_store else "load"
        return f"{memory} {way} of {self.nbytes} bytes"

    def __str__(self) -> str:
        return f"{self.source_line}, a {self.access_kind} a lane"


@dataclass(frozen=True, slots=True)
class LaunchCounters:
    """What one launch did: `moved` bytes of distinct sectors, of which it wanted `wanted`; its blocks asked for `asked`
    bytes, if a block asks once for a sector.  Up to `under_way` groups of copies of a thread to shared memory were
    under way while it read others there, None where it waits for none; copies in bulk do not count."""

    launch: Launch
    sites: tuple[AccessSite, ...]
    sector_bytes: int
    requested_bytes: int
    block_requested_bytes: int
    copies_in_flight: int | None

    @property
    def block_threads(self) -> int:
        """Of a block."""
        return math.prod(self.launch.block)

    @property
    def kernel(self) -> str:
        return str(self.launch.kernel)


class CountingDriver(EmulatedDriver):
    """Counts each launch, and keeps in `found`, by the name of its kernel, what the last one did; given `only`, those
    of the run of that number alone, since counting takes several times as long as running."""

    def __init__(self, limits: Limits = MOST, only: int | None = None) -> None:
        super().__init__(order=0, limits=limits)
        self.counters: dict[str, LaunchCounters] = {}
        self.counted_run = only

    def alloc(self, nbytes: int, on: Device) -> Bytes:
        room = np.zeros(nbytes + BUFFER_ALIGNMENT, np.uint8)
        start = -room.ctypes.data % BUFFER_ALIGNMENT
        return room[start : start + nbytes]

    def record(self, steps: Sequence[Step], on: Device) -> Callable[[], None]:
        launches = [step for step in one_by_one(steps) if isinstance(step, Launch)]
        plain = super().record(steps, on) if self.counted_run is not None else None
        runs = itertools.count()

        def run() -> None:
            if next(runs) != self.counted_run and plain is not None:
                return plain()
            for launch in launches:
                self.counters[str(launch.kernel)] = run_counted(launch)

        return run


def run_counted(launch: Launch) -> LaunchCounters:
    """Make a launch and count.  Raises `LaunchError` with what the emulation found."""
    made = load_library(launch.kernel.alone, COUNTER_OPTIONS)
    words = np.array(launch.words, np.uint64)
    shape = make_launch_shape(launch, words)
    report, sites, moved = Report(), (_SiteRecord * MAX_SITES)(), (ctypes.c_int64 * 6)()
    spans = sorted({(span.low, span.high) for span in launch.spans if span.high > span.low})
    given = np.array(_merge_spans(spans), np.uint64).reshape(-1, 2)
    made.counters_begin(ctypes.c_void_p(given.ctypes.data), ctypes.c_int64(len(given)))
    made.launch_0.restype, made.counters_end.restype = None, ctypes.c_int64
    made.launch_0(ctypes.byref(shape), ctypes.byref(report))
    many = made.counters_end(sites, ctypes.c_int64(MAX_SITES), moved)
    if report.status:
        raise LaunchError(launch.number, f"{launch.kernel}: {report.text.decode()}")
    places = find_frames(made, [site.code for site in sites[:many]])
    kept = (
        AccessSite(
            select_innermost_line(at), bool(s.is_shared), bool(s.is_store), s.bytes, s.requests, s.cost, s.least, at
        )
        for at, s in zip(places, sites[:many], strict=True)
    )
    under_way = moved[5] if moved[5] >= 0 else None
    return LaunchCounters(launch, tuple(kept), moved[0] + moved[2], moved[1] + moved[3], moved[4], under_way)


def _merge_spans(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans that overlap, together."""
    merged: list[tuple[int, int]] = []
    for low, high in spans:
        if merged and low < merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], high)
        else:
            merged.append((low, high))
    return merged
