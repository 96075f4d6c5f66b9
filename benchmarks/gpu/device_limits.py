"""Benchmark the device itself: its limits, the cost of a launch, and the compilation of every kernel."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from hocket.backends.cupy.binding.launch_builder import LaunchBuilder
from hocket.backends.cupy.device.driver import CollectiveOverlap, DriverStep, KernelSource
from hocket.backends.cupy.kernel_table import BINDINGS, SOURCES
from hocket.backends.fusion.operands import BoundInstruction

from .harness import BenchmarkDevice, Case, DeviceMemory, ResultRow

MIB_BYTES = 1 << 20
DELTA_NET_LAYERS = 36
"""The number of layers with a delta net in Qwen3-Next."""


def make_device_cases(bench: BenchmarkDevice) -> Iterator[Case]:
    yield Case("device", lambda: [bench.machine.describe_device()])
    for mebibytes in bench.select_size((16, 256, 1024, 4096), (1,)):
        yield Case(f"copy of {mebibytes} MiB", partial(_measure_copy, bench, mebibytes * MIB_BYTES))
    yield Case("launch of one element", partial(_measure_launches, bench))
    yield Case("launches at each other's side", partial(_measure_parallel_launches, bench))


def _measure_copy(bench: BenchmarkDevice, nbytes: int) -> Iterator[ResultRow]:
    """Measure the copy of the driver, and hocket's ``cont`` kernel."""
    yield {"by": "the driver", "GB/s": bench.measure_copy_bandwidth(nbytes) / 1e9}
    memory = DeviceMemory(bench)
    x, out = (
        memory.make_repeated((nbytes // 4,), bench.rng.standard_normal(4096, dtype="f4")),
        memory.make_zeros((nbytes // 4,)),
    )
    launches = bench.bind_launches(memory, partial(bind_instruction, BoundInstruction("cont", (x,), (out,), {})))
    yield {"by": "hocket's cont", **bench.measure_launches([launches]).as_row(2 * nbytes, copy=bench.copy_bandwidth)}


def _measure_launches(bench: BenchmarkDevice) -> Iterator[ResultRow]:
    """Measure the smallest launch: its cost on the host, on the device, and inside a graph."""
    memory = DeviceMemory(bench)
    x, out = memory.make_zeros((1,)), memory.make_zeros((1,))
    (one,) = bench.bind_launches(memory, partial(bind_instruction, BoundInstruction("neg", (x,), (out,), {})))
    record = partial(bench.driver.driver.record, on=bench.on)
    count = bench.select_size(2000, 3)
    single = record([one])
    host = bench.measure_host_seconds(single, count) * 1e6
    yield {"how": "plain", **bench.measure_time([single]).as_row(), "host µs": host}
    for inside in (2, DELTA_NET_LAYERS, bench.select_size(500, 40)):
        graph = record([one] * inside)
        host = bench.measure_host_seconds(graph, bench.select_size(200, 2)) * 1e6
        yield {
            "how": f"in a graph of {inside}",
            **bench.measure_time([graph], inside).as_row(),
            "host µs of a graph": host,
        }


def _measure_parallel_launches(bench: BenchmarkDevice) -> Iterator[ResultRow]:
    """Measure two launches of one block each in sequence and in parallel branches of a graph, and check their sum.

    The sum must wait for both launches. Only a device shows whether a graph forks and joins as it was captured.
    """
    memory, record = DeviceMemory(bench), partial(bench.driver.driver.record, on=bench.on)
    count = bench.select_size(1 << 20, 256)
    x = [memory.copy_array(bench.rng.standard_normal((1, count), dtype="f4")) for _ in range(2)]
    norms = [memory.make_zeros((1, count)) for _ in range(2)]
    total = memory.make_zeros((1, count))
    calls = [BoundInstruction("rms_norm", (a,), (b,), {"eps": 1e-6}) for a, b in zip(x, norms, strict=True)]
    first, second = (bench.bind_launches(memory, partial(bind_instruction, call))[0] for call in calls)
    last = bench.bind_launches(memory, partial(bind_instruction, BoundInstruction("add", tuple(norms), (total,), {})))[
        0
    ]
    variants: dict[str, list[DriverStep]] = {
        "in turn": [first, second, last],
        "side by side": [CollectiveOverlap((first,), (second,)), last],
    }
    expected = None
    for how, launches in variants.items():
        run, same = record(launches), True
        for _ in range(bench.select_size(50, 2)):
            for norm in norms:
                memory.view_array(norm)[...] = np.float32(np.nan)
            bench.driver.synchronise(bench.on)
            run()
            bench.driver.synchronise(bench.on)
            result = np.array(memory.view_array(total))
            expected = result if expected is None else expected
            same = same and np.array_equal(result, expected)
        yield {"how": how, **bench.measure_time([run]).as_row(), "right": same and bool(np.isfinite(result).all())}


def bind_instruction(call: BoundInstruction, to: LaunchBuilder) -> None:
    """Bind one instruction: add its launches to `to`."""
    BINDINGS[call.op](to, call)


# ---------------------------------------------------------------------------------------------------- compilation


def make_compile_cases(bench: BenchmarkDevice) -> Iterator[Case]:
    """Make the case that compiles all kernels at once, so that later parts find them in the disk cache."""
    sources = bench.select_size(SOURCES, SOURCES[:2])
    yield Case(f"{len(sources)} sources", partial(_compile_sources, bench, sources))


def _compile_sources(bench: BenchmarkDevice, sources: tuple[KernelSource, ...]) -> Iterator[ResultRow]:
    def compile_source(source: KernelSource) -> ResultRow | None:
        kernel, start = source[source.names[0]], time.perf_counter()
        try:
            bench.driver.prepare_kernel(kernel, bench.on)
        except Exception as why:  # compilers and drivers may raise anything; the other sources go on
            return {"source": str(kernel), "error": f"{type(why).__name__}: {why}"}
        taken = time.perf_counter() - start
        return {"source": str(kernel), "s": taken} if taken > 1 else None

    start = time.perf_counter()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from filter(None, pool.map(compile_source, sources))
    yield {"source": "all", "s": time.perf_counter() - start, "threads": os.cpu_count()}
