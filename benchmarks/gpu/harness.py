"""The common base of all parts of the GPU benchmark: a device with recorded launches, device memory, and timing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from hocket.backends.base import Device, Tensor, contiguous_strides
from hocket.backends.cupy.backend import DriverBackend
from hocket.backends.cupy.binding.launch_builder import LaunchBuilder
from hocket.backends.cupy.device.driver import Driver, KernelLaunch
from hocket.backends.fusion.operands import Operand
from hocket.graph import Graph
from hocket.graph.dtypes import DType
from hocket.scheduler import Executor, load, plan_for_group

from .machine import Machine, Run

ResultRow = dict[str, object]
"""The numbers of one measurement by name; the name of a number has its unit."""


class NothingToMeasure(Exception):  # noqa: N818  (an outcome, not an error)
    """There is nothing to measure; the text is the reason."""


@dataclass(frozen=True)
class Case:
    """One thing to measure, with one or more result rows. An error of a case ends only this case."""

    title: str
    rows: Callable[[], Iterable[ResultRow]]


class RecordingDriver:
    """A driver that keeps its recordings, so that launches can be timed without the code around them."""

    def __init__(self, driver: Driver) -> None:
        self.driver, self.kind = driver, driver.kind
        self.recordings: list[tuple[tuple[KernelLaunch, ...], Run]] = []

    def record(self, launches: Sequence[KernelLaunch], on: Device) -> Run:
        run = self.driver.record(launches, on)
        self.recordings.append((tuple(launches), run))
        return run

    def __getattr__(self, name: str) -> Any:
        return getattr(self.driver, name)

    @contextmanager
    def collect_recordings(self) -> Iterator[list[tuple[tuple[KernelLaunch, ...], Run]]]:
        """Collect the recordings that are made inside the block; they are dropped at its end."""
        self.recordings = []
        try:
            yield self.recordings
        finally:
            self.recordings = []


@dataclass(frozen=True)
class MeasuredTime:
    """The median seconds of one of several equal things, and half of the interquartile range of the samples."""

    seconds: float
    spread_seconds: float

    def as_row(self, nbytes: float = 0.0, flops: float = 0.0, copy: float = 0.0) -> ResultRow:
        """Return the time as a result row.

        Args:
            nbytes: Bytes that are read and written, for GB/s.
            flops: Floating-point operations, for TFLOP/s.
            copy: Bandwidth of a copy in bytes/s, for the share of it that is reached.
        """
        figures: ResultRow = {"µs": self.seconds * 1e6, "±µs": self.spread_seconds * 1e6}
        if nbytes:
            figures["GB/s"] = nbytes / self.seconds / 1e9
        if nbytes and copy:
            figures["of copy"] = nbytes / self.seconds / copy
        if flops:
            figures["TFLOP/s"] = flops / self.seconds / 1e12
        return figures


@dataclass
class DeviceMemory:
    """Memory of the device that is freed with this object."""

    bench: BenchmarkDevice
    buffers: list[Any] = field(default_factory=list)

    def make_zeros(self, shape: Sequence[int], dtype: DType = DType.F32) -> Operand:
        """Return a dense operand of zeros."""
        tensor = Tensor(0, 0, tuple(shape), contiguous_strides(shape), dtype)
        buffer = self.bench.driver.alloc(tensor.spec.nbytes, self.bench.on)
        self.buffers.append(buffer)
        return Operand(self.bench.driver.address(buffer), tensor)

    def copy_array(self, values: npt.NDArray[Any], dtype: DType = DType.F32) -> Operand:
        """Copy an array to the device."""
        copy = self.make_zeros(values.shape, dtype)
        self.view_array(copy)[...] = values
        return copy

    def view_array(self, x: Operand) -> Any:
        """Return the array of an operand of this object, to be read and assigned."""
        buffer = next(b for b in self.buffers if self.bench.driver.address(b) == x.address)
        return self.bench.driver.view(buffer, x.tensor)

    def make_repeated(self, shape: Sequence[int], values: npt.NDArray[np.float32]) -> Operand:
        """Return an operand that repeats some values, so that kernels are not timed on zeros."""
        zeros = self.make_zeros(shape)
        whole = 4 * zeros.tensor.spec.size
        first = self.copy_array(values.reshape(-1)[: zeros.tensor.spec.size])
        done = 4 * first.tensor.spec.size
        self.bench.machine.make_copier(zeros.address, first.address, done)()
        while done < whole:
            part = min(done, whole - done)
            self.bench.machine.make_copier(zeros.address + done, zeros.address, part)()
            done += part
        self.bench.driver.synchronise(self.bench.on)
        return zeros


class BenchmarkDevice:
    """A device to measure; `tiny` selects the smallest sizes, as the emulation needs them."""

    def __init__(self, driver: Driver, machine: Machine, on: Device, *, tiny: bool = False, **options: Any) -> None:
        self.driver, self.machine, self.on, self.tiny = RecordingDriver(driver), machine, on, tiny
        self.backend = DriverBackend(self.driver)
        self.models: tuple[Path, ...] = tuple(options.get("models", ()))
        self.folder = Path(options.get("folder", "."))
        self.llama: Path | None = options.get("llama")
        self.rng = np.random.default_rng(5)
        self.uncached_bytes = 1 << (16 if tiny else 30)
        """Bytes of buffers that exceed every cache when they are read in turn."""

    def select_size(self, real: Any, tiny: Any) -> Any:
        """Return `real` for a device, or `tiny` for its emulation."""
        return tiny if self.tiny else real

    def with_driver(self, driver: Driver) -> BenchmarkDevice:
        """Return the same device through another driver; its launches use a stream of their own."""
        options = {"models": self.models, "folder": self.folder, "llama": self.llama}
        bench = BenchmarkDevice(driver, self.machine.with_driver(driver), self.on, tiny=self.tiny, **options)
        bench.copy_bandwidth = self.copy_bandwidth
        return bench

    # ------------------------------------------------------------------------------------------------------ times

    def _measure_seconds(self, runs: Sequence[Run], repeats: int) -> list[float]:
        """Run each of `runs` once to warm up, then `repeats` runs in turn; return their seconds on the device."""
        for run in runs:
            run()
        self.driver.synchronise(self.on)
        taken: list[float] = self.driver.run_timed([runs[i % len(runs)] for i in range(repeats)], self.on)
        return taken

    def measure_time(self, runs: Sequence[Run], each: int = 1) -> MeasuredTime:
        """Measure one of the `each` equal things that a run does.

        The repeats take about 0.1 s in total; there are at least five of them.
        """
        first = median(self._measure_seconds(runs, 1 if self.tiny else 3))
        repeats = 2 if self.tiny else max(5, min(300, int(0.1 / max(first, 1e-6))))
        times = np.array(self._measure_seconds(runs, repeats)) / each
        low, middle, high = np.percentile(times, [25, 50, 75])
        return MeasuredTime(float(middle), float(high - low) / 2)

    def measure_launches(self, sets: Sequence[Sequence[KernelLaunch]], each: int = 1) -> MeasuredTime:
        """Measure sets of launches; each set becomes one graph."""
        return self.measure_time([self.driver.driver.record(launches, self.on) for launches in sets], each)

    def measure_host_seconds(self, run: Run, count: int) -> float:
        """Return the seconds that one run costs the host while the host does not wait for the device."""
        run()
        self.driver.synchronise(self.on)
        start = time.perf_counter()
        for _ in range(count):
            run()
        taken = time.perf_counter() - start
        self.driver.synchronise(self.on)
        return taken / count

    @cached_property
    def copy_bandwidth(self) -> float:
        """Bytes/s (read and written) of the driver's own copy of a gigabyte."""
        return self.measure_copy_bandwidth(self.uncached_bytes)

    def measure_copy_bandwidth(self, nbytes: int) -> float:
        """Return the bytes/s (read and written) of the driver's own copy of `nbytes` bytes."""
        memory = DeviceMemory(self)
        values = self.rng.standard_normal(min(nbytes, 1 << 24) // 4).astype(np.float32)
        source = memory.make_repeated((nbytes // 4,), values)
        into = memory.make_zeros((nbytes // 4,))
        return 2 * nbytes / self.measure_time([self.machine.make_copier(into.address, source.address, nbytes)]).seconds

    # --------------------------------------------------------------------------------------------------- launches

    def bind_launches(self, memory: DeviceMemory, bind: Callable[[LaunchBuilder], object]) -> list[KernelLaunch]:
        """Return the launches of a binding, with the scratch memory that they need."""

        def keep(array: npt.NDArray[Any]) -> int:
            return memory.copy_array(array.reshape(-1).view(np.int8), DType.I8).address

        fault = memory.make_zeros((2,), DType.I64).address
        about: dict[str, Any] = {
            "limits": self.driver.limits(self.on),
            "multiprocessor_count": self.driver.count_multiprocessors(self.on),
        }
        tried = LaunchBuilder(upload_array=lambda array: 1 << 20, **about)
        bind(tried)
        room = memory.make_zeros((max(tried.scratch_bytes, 1),), DType.I8).address
        builder = LaunchBuilder(upload_array=keep, scratch_address=room, fault_address=fault, **about)
        bind(builder)
        return builder.items

    def load_and_record(
        self, graph: Graph, weights: Mapping[str, npt.NDArray[Any]], inputs: Mapping[str, npt.NDArray[Any]]
    ) -> tuple[Executor, list[KernelLaunch]]:
        """Plan and load a graph as a session would, and return its executor and all of its launches."""
        with self.driver.collect_recordings() as recorded:
            executor = load(plan_for_group(graph, [(self.backend, self.on)]), weights)
            everything = [launch for launches, _ in recorded for launch in launches]
        executor.bind(inputs)
        executor.replay()
        return executor, everything


def compute_nmse(got: npt.NDArray[Any], expected: npt.NDArray[Any]) -> float:
    """Return the mean square error divided by the mean square of the wanted values."""
    exact = expected.astype(np.float64)
    return float(np.square(got - exact).sum() / np.square(exact).sum())
