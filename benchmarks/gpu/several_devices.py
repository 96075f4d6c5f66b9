"""Benchmark several devices, or parts of one: all-reduces by each transport, and models on all devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor as Threads
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from hocket.backends.base import BufferSpec, Device, Instruction, Program, Tensor
from hocket.backends.cupy.backend import DriverBackend
from hocket.backends.cupy.collectives.transport import choose_transport
from hocket.backends.cupy.device.driver import CollectiveLibrary, Driver, DriverStep, flatten_steps
from hocket.backends.fusion.overlap import find_instructions_beside_collectives
from hocket.distributed.thread_group import ThreadGroup
from hocket.frontends import models
from hocket.frontends.models import Batch, Model
from hocket.frontends.open_model import open_model
from hocket.graph.dtypes import DType
from hocket.graph.spec import Spec
from hocket.scheduler import Executor, Store, plan_for_group

from . import random_models
from .harness import BenchmarkDevice, Case, NothingToMeasure, ResultRow, compute_nmse

SUMS_PER_PROGRAM = 16
"""The number of all-reduces in a program."""


@dataclass(frozen=True)
class TransportDriver:
    """A driver that uses only one transport between its devices.

    If `overlaps` is false, plans do not overlap compute with collectives. If `runs_in_turn` is true, overlapped compute
    runs after the collective.
    """

    driver: Driver
    transport: str
    can_overlap_collectives: bool = True
    runs_in_turn: bool = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.driver, name)

    def enable_peer_access(self, devices: Sequence[Device]) -> bool:
        return self.transport == "peers" and self.driver.enable_peer_access(devices)

    def record(self, steps: Sequence[DriverStep], on: Device) -> Callable[[], None]:
        return self.driver.record(flatten_steps(steps) if self.runs_in_turn else steps, on)

    def find_collective_library(self, devices: Sequence[Device]) -> CollectiveLibrary | str:
        return (
            self.driver.find_collective_library(devices)
            if self.transport == "library"
            else f"they are to meet by {self.transport}"
        )


TRANSPORTS = ("peers", "library", "the host")
"""The transports: kernels over peer memory, NCCL or RCCL, and host memory."""


def make_transport_drivers(
    bench: BenchmarkDevice, devices: Sequence[Device], transports: Sequence[str] = TRANSPORTS
) -> Iterator[TransportDriver]:
    """Yield one driver for each transport that these devices can use."""
    for transport in transports:
        driver = TransportDriver(bench.driver.driver, transport)
        if transport == TRANSPORTS[-1] or choose_transport(devices, driver).has_device_collectives:
            yield driver


def make_sharded_cases(bench: BenchmarkDevice) -> Iterator[Case]:
    """Make the cases: two parts of the device, then two and more devices if there are several."""
    parts, known = [replace(bench.on, part=part) for part in range(2)], list_models(bench)
    for name, find in known.items():
        yield Case(f"{name}, two parts of a device", partial(_compare_decode, bench, find, parts))
    there = bench.select_size(len(bench.driver.devices()), 2)
    if there < 2:
        yield Case("several devices", partial(_refuse_single_device, there))
    for count in (count for count in (2, 4, 8) if count <= there):
        devices = [bench.driver.device(index) for index in range(count)]
        for kibibytes in bench.select_size((16, 64, 1024, 8192, 65536), (1, 64)):
            yield Case(
                f"sum of {kibibytes} KiB, {count} devices", partial(_measure_sums, bench, devices, kibibytes << 10)
            )
        for name, find in known.items():
            yield Case(f"{name}, {count} devices", partial(_compare_decode, bench, find, devices))
            yield Case(f"{name}, {count} devices, a prompt", partial(_compare_prompt, bench, find, devices))


def list_models(bench: BenchmarkDevice) -> dict[str, Callable[[], Path | None]]:
    """Return functions by model name; each returns the path of a model (None for the embedded one).

    A function may write the file at its first call.
    """
    known: dict[str, Callable[[], Path | None]] = {"hocket's embedded model": lambda: None}
    known |= {path.name: lambda path=path: path for path in bench.models}
    if not bench.tiny:
        known["Qwen3.5-4B, random Q4_K"] = cache(partial(random_models.write_qwen35_4b, bench.folder))  # written once
    return known


def _refuse_single_device(count: int) -> Iterator[ResultRow]:
    """Raise `NothingToMeasure`: there is only one device."""
    raise NothingToMeasure(f"sums and models on several devices need two; there is {count}")


# ------------------------------------------------------------------------------------------------------------- sums


def _measure_sums(bench: BenchmarkDevice, devices: Sequence[Device], nbytes: int) -> Iterator[ResultRow]:
    """Measure all-reduces by the clock of the host, from the start of the first device to the end of the last one."""
    vectors = [bench.rng.standard_normal(nbytes // 4, dtype="f4") for _ in devices]
    expected = np.sum(vectors, axis=0, dtype=np.float64)
    x, out = (Tensor(0, at * nbytes, (1, nbytes // 4), (nbytes // 4, 1), DType.F32) for at in range(2))
    steps = [
        Instruction("all_reduce", (x,), (out,), {"sequence": n}, None, f"sum.{n}") for n in range(SUMS_PER_PROGRAM)
    ]
    program = Program((BufferSpec("arena", "arena", 2 * nbytes),), tuple(steps), {}, {})
    for driver in make_transport_drivers(bench, devices):
        backend, thread_group = DriverBackend(driver), ThreadGroup(len(devices), devices=devices)
        buffers = [backend.alloc(2 * nbytes, on) for on in devices]
        members = map(thread_group.member, range(len(devices)))
        own = zip(buffers, devices, members, strict=True)
        runs = [backend.compile(program, [buffer], on, member) for buffer, on, member in own]
        for buffer, array in zip(buffers, vectors, strict=True):
            backend.view(buffer, x)[...] = array[None]
        with ThreadPoolExecutor(len(devices)) as pool:
            rounds = [_run_all(pool, runs, thread_group) for _ in range(bench.select_size(20, 3))]
        results = [np.array(backend.view(buffer, out))[0] for buffer in buffers]
        same = all(np.array_equal(result, results[0]) for result in results)
        seconds, error = median(rounds[1:]) / SUMS_PER_PROGRAM, compute_nmse(results[0], expected)
        figures = {"µs": seconds * 1e6, "GB/s": nbytes / seconds / 1e9, "NMSE": error}
        yield {"by": driver.transport, **figures, "right": same}


def _run_all(pool: Threads, runs: Sequence[Callable[[], object]], thread_group: ThreadGroup) -> float:
    """Return the seconds until all devices have run their program."""

    def one(run: Callable[[], object]) -> None:
        try:
            run()
        except BaseException as why:  # the other devices must not wait for this one
            thread_group.abort(str(why))
            raise

    start = time.perf_counter()
    list(pool.map(one, runs))
    taken = time.perf_counter() - start
    thread_group.clear_messages_and_failures()
    return taken


# ----------------------------------------------------------------------------------------------------------- models


def _compare_decode(
    bench: BenchmarkDevice, find: Callable[[], Path | None], devices: Sequence[Device]
) -> Iterator[ResultRow]:
    """Decode the same tokens on one device, and on several devices by each transport."""
    model, count = open_model(find()), bench.select_size(32, 2)
    tokens = bench.rng.integers(0, model.vocabulary_size, count + 1).tolist()
    one = None
    for transport, driver in [
        ("one device", bench.driver.driver),
        *((d.transport, d) for d in make_transport_drivers(bench, devices)),
    ]:
        group = [(DriverBackend(driver), on) for on in (devices if one is not None else devices[:1])]
        run, step = _make_executor(model, group, 1, count + 1)
        found, times = [], []
        for n, token in enumerate(tokens):
            start = time.perf_counter()
            found.append(run.run(model.inputs(step, Batch([[token]], [n], None)))["logits"])
            times.append(time.perf_counter() - start)
        logits, row = np.concatenate(found), {"by": transport, "µs": median(times[1:]) * 1e6, "step": "a token"}
        yield row if one is None else row | {"NMSE against one": compute_nmse(logits, one)}
        one = logits if one is None else one


def _compare_prompt(
    bench: BenchmarkDevice, find: Callable[[], Path | None], devices: Sequence[Device]
) -> Iterator[ResultRow]:
    """Measure a prompt in three ways: planned without overlap, overlapped work after the sums, and overlapped work.

    The last two ways give the same bits.
    """
    model, count, own = open_model(find()), bench.select_size(2048, 8), bench.driver.driver
    tokens = bench.rng.integers(0, model.vocabulary_size, count).tolist()
    for transport in (driver.transport for driver in make_transport_drivers(bench, devices, TRANSPORTS[:-1])):
        behind = None
        for how, driver in (
            ("planned apart", TransportDriver(own, transport, can_overlap_collectives=False)),
            ("behind sums", TransportDriver(own, transport, runs_in_turn=True)),
            ("beside sums", TransportDriver(own, transport)),
        ):
            backend = DriverBackend(driver)
            run, step = _make_executor(model, [(backend, on) for on in devices], count, count)
            inputs, times, logits = model.inputs(step, Batch([tokens], [0], None)), [], []
            for _ in range(bench.select_size(10, 2)):  # states go on from run to run
                start = time.perf_counter()
                logits.append(run.run(inputs)["logits"].copy())
                times.append(time.perf_counter() - start)
            sums = (
                len(find_instructions_beside_collectives(run.plan.device_plans[0].program))
                if driver.can_overlap_collectives
                else 0
            )
            row: ResultRow = {"by": transport, "how": how, "tok/s": count / median(times), "sums beside work": sums}
            if how == "beside sums":
                row["right"] = bool(np.isfinite(logits).all() and np.array_equal(logits, behind))
            yield row
            behind = logits


def _make_executor(
    model: Model, group: Sequence[tuple[DriverBackend, Device]], tokens: int, cells: int
) -> tuple[Executor, models.Step]:
    """Plan and load a model for steps of `tokens` tokens, with a context of `cells` tokens."""
    context = max(64, cells)
    step = models.Step(1, tokens, context, context, 1)
    plan = plan_for_group(model.graph(step), group, split_mode="tensor" if len(group) > 1 else "auto")
    store = Store(group)
    for value in plan.graph.weights:
        tensor = model.gguf.tensors[value.node.name]
        store.bind(
            value.node.name, tensor.stored_elements, Spec(tensor.shape, tensor.dtype), plan.leaves[value.node.name]
        )
    return Executor(plan, store), step
