"""Benchmark the device itself: its limits, the cost of a launch, and the compilation of every kernel."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from hocket.backends.cupy.binding.launches import Launches
from hocket.backends.cupy.device.driver import Beside, Source, Step
from hocket.backends.cupy.table import BINDINGS, SOURCES
from hocket.backends.operands import Bound

from .bench import Bench, Case, Memory, Row

MEBI = 1 << 20
IN_A_GRAPH = 36
"""The number of layers with a delta net in Qwen3-Next."""


def cases(bench: Bench) -> Iterator[Case]:
    yield Case("device", lambda: [bench.machine.about()])
    for mebibytes in bench.choose((16, 256, 1024, 4096), (1,)):
        yield Case(f"copy of {mebibytes} MiB", partial(_copy, bench, mebibytes * MEBI))
    yield Case("launch of one element", partial(_launches, bench))
    yield Case("launches at each other's side", partial(_beside, bench))


def _copy(bench: Bench, nbytes: int) -> Iterator[Row]:
    """Measure the copy of the driver, and hocket's ``cont`` kernel."""
    yield {"by": "the driver", "GB/s": bench.copied(nbytes) / 1e9}
    memory = Memory(bench)
    x, out = memory.filled((nbytes // 4,), bench.random.standard_normal(4096, dtype="f4")), memory.empty((nbytes // 4,))
    launches = bench.bound(memory, partial(bound, Bound("cont", (x,), (out,), {})))
    yield {"by": "hocket's cont", **bench.time_launches([launches]).row(2 * nbytes, copy=bench.copy_bandwidth)}


def _launches(bench: Bench) -> Iterator[Row]:
    """Measure the smallest launch: its cost on the host, on the device, and inside a graph."""
    memory = Memory(bench)
    x, out = memory.empty((1,)), memory.empty((1,))
    (one,) = bench.bound(memory, partial(bound, Bound("neg", (x,), (out,), {})))
    record = partial(bench.driver.driver.record, on=bench.on)
    count = bench.choose(2000, 3)
    single = record([one])
    host = bench.host_seconds(single, count) * 1e6
    yield {"how": "plain", **bench.time([single]).row(), "host µs": host}
    for inside in (2, IN_A_GRAPH, bench.choose(500, 40)):
        graph = record([one] * inside)
        host = bench.host_seconds(graph, bench.choose(200, 2)) * 1e6
        yield {"how": f"in a graph of {inside}", **bench.time([graph], inside).row(), "host µs of a graph": host}


def _beside(bench: Bench) -> Iterator[Row]:
    """Measure two launches of one block each in sequence and in parallel branches of a graph, and check their sum.

    The sum must wait for both launches. Only a device shows whether a graph forks and joins as it was captured.
    """
    memory, record = Memory(bench), partial(bench.driver.driver.record, on=bench.on)
    count = bench.choose(1 << 20, 256)
    x = [memory.array(bench.random.standard_normal((1, count), dtype="f4")) for _ in range(2)]
    norms = [memory.empty((1, count)) for _ in range(2)]
    total = memory.empty((1, count))
    calls = [Bound("rms_norm", (a,), (b,), {"eps": 1e-6}) for a, b in zip(x, norms, strict=True)]
    first, second = (bench.bound(memory, partial(bound, call))[0] for call in calls)
    last = bench.bound(memory, partial(bound, Bound("add", tuple(norms), (total,), {})))[0]
    ways: dict[str, list[Step]] = {
        "in turn": [first, second, last],
        "side by side": [Beside((first,), (second,)), last],
    }
    wanted = None
    for how, launches in ways.items():
        run, same = record(launches), True
        for _ in range(bench.choose(50, 2)):
            for norm in norms:
                memory.view(norm)[...] = np.float32(np.nan)
            bench.driver.synchronise(bench.on)
            run()
            bench.driver.synchronise(bench.on)
            result = np.array(memory.view(total))
            wanted = result if wanted is None else wanted
            same = same and np.array_equal(result, wanted)
        yield {"how": how, **bench.time([run]).row(), "right": same and bool(np.isfinite(result).all())}


def bound(call: Bound, to: Launches) -> None:
    """Bind one instruction: add its launches to `to`."""
    BINDINGS[call.op](to, call)


# ---------------------------------------------------------------------------------------------------- compilation


def compile_cases(bench: Bench) -> Iterator[Case]:
    """Make the case that compiles all kernels at once, so that later parts find them in the disk cache."""
    sources = bench.choose(SOURCES, SOURCES[:2])
    yield Case(f"{len(sources)} sources", partial(_compiled, bench, sources))


def _compiled(bench: Bench, sources: tuple[Source, ...]) -> Iterator[Row]:
    def compiled(source: Source) -> Row | None:
        kernel, start = source[source.names[0]], time.perf_counter()
        try:
            bench.driver.prepare(kernel, bench.on)
        except Exception as why:  # compilers and drivers may raise anything; the other sources go on
            return {"source": str(kernel), "error": f"{type(why).__name__}: {why}"}
        taken = time.perf_counter() - start
        return {"source": str(kernel), "s": taken} if taken > 1 else None

    start = time.perf_counter()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from filter(None, pool.map(compiled, sources))
    yield {"source": "all", "s": time.perf_counter() - start, "threads": os.cpu_count()}
