"""Benchmark the division of a device by green contexts: the multiprocessors of each part, and parts at the same time.

Every recording of a part must stay on its multiprocessors: a single launch, a graph, and early launches of a graph.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from hocket.backends.base import Device
from hocket.backends.cupy.binding.launch_builder import LaunchBuilder
from hocket.backends.cupy.device.driver import KernelSource
from hocket.backends.fusion.operands import Operand
from hocket.benchmarks.gpu.harness import BenchmarkDevice, Case, DeviceMemory, NothingToMeasure, ResultRow
from hocket.benchmarks.gpu.machine import Run
from hocket.graph.dtypes import DType
from hocket.graph.errors import BackendError

SOURCE = KernelSource(str(Path(__file__).with_suffix(".cu")), ("visit",))
MULTIPROCESSOR_DIVISOR = 8
"""Multiprocessors of a part are a multiple of it on devices of compute capability 9.0."""
BLOCKS_PER_MULTIPROCESSOR = 4


def divide_device(bench: BenchmarkDevice, count: int) -> list[Device]:
    """Return `count` parts of the device with equal multiprocessors of their own.

    Raises:
        NothingToMeasure: The device or its driver cannot be divided.
    """
    own = bench.driver.count_multiprocessors(bench.on) // count // MULTIPROCESSOR_DIVISOR * MULTIPROCESSOR_DIVISOR
    own = max(MULTIPROCESSOR_DIVISOR, own)
    parts = [replace(bench.on, part=part, multiprocessors=own) for part in range(count)]
    try:
        bench.driver.require_multiprocessors(parts[-1])
    except BackendError as why:
        raise NothingToMeasure(str(why)) from None
    return parts


def make_multiprocessor_cases(bench: BenchmarkDevice, count: int) -> Iterator[Case]:
    yield Case(f"{count} divided parts, multiprocessors", partial(_list_multiprocessors, bench, count))
    yield Case(f"{count} divided parts, at the same time", partial(_measure_concurrency, bench, count))


@dataclass(frozen=True)
class VisitingPart:
    """A part with recorded launches that write the multiprocessor of each block to `numbers`."""

    memory: DeviceMemory
    numbers: Operand
    run: Run


def _record_visits(bench: BenchmarkDevice, on: Device, blocks: int, seconds: float, launches: int = 1) -> VisitingPart:
    memory = DeviceMemory(bench)
    numbers = memory.make_zeros((blocks,), DType.I64)
    builder = LaunchBuilder(upload_array=lambda array: 0)
    for _ in range(launches):
        builder.add_launch(SOURCE["visit"], blocks, 32, [numbers, int(seconds * 1e9)])
    run = bench.driver.driver.record(builder.items, on)

    def run_and_wait() -> None:
        run()
        bench.driver.synchronise(on)

    bench.driver.synchronise(bench.on)  # the zeros come by the stream of the whole device
    return VisitingPart(memory, numbers, run_and_wait)


def _list_multiprocessors(bench: BenchmarkDevice, count: int) -> Iterator[ResultRow]:
    """Count the multiprocessors that each part uses, and which of them another part uses too."""
    parts, seconds = divide_device(bench, count), bench.select_size(200e-6, 1e-6)
    blocks = BLOCKS_PER_MULTIPROCESSOR * bench.driver.count_multiprocessors(bench.on)
    for how, launches in (("a launch", 1), ("a graph", 3)):
        used: list[set[int]] = []
        for on in parts:
            part = _record_visits(bench, on, blocks, seconds, launches)
            part.run()
            used.append(set(np.array(part.memory.view_array(part.numbers)).tolist()))
        shared = sum(len(own & other) for n, own in enumerate(used) for other in used[:n])
        asked, counts = parts[0].multiprocessors, [len(own) for own in used]
        row: ResultRow = {"how": how, "asked": asked, "used": " ".join(map(str, counts)), "shared": shared}
        yield row if bench.tiny else row | {"right": shared == 0 and set(counts) == {asked}}


def _measure_concurrency(bench: BenchmarkDevice, count: int) -> Iterator[ResultRow]:
    """Measure launches of a fixed time, on one part and on all parts at once; the times should be equal."""
    parts, seconds = divide_device(bench, count), bench.select_size(2e-3, 1e-5)
    visits = [
        _record_visits(bench, on, BLOCKS_PER_MULTIPROCESSOR * bench.driver.count_multiprocessors(on), seconds)
        for on in parts
    ]
    for used in (1, count):
        taken = [_run_at_once(visits[:used]) for _ in range(bench.select_size(20, 2))]
        yield {"parts": used, "µs": median(taken[1:]) * 1e6, "µs of a launch": seconds * 1e6}


def _run_at_once(visits: Sequence[VisitingPart]) -> float:
    """Return the seconds until all parts have run, each from a thread of its own."""
    with ThreadPoolExecutor(len(visits)) as pool:
        start = time.perf_counter()
        list(pool.map(lambda part: part.run(), visits))
        return time.perf_counter() - start
