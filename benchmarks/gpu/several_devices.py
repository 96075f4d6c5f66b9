"""Benchmark several devices, or parts of one: all-reduces by each transport, and models on all devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from hocket.frontends import models
from hocket.frontends.models import Batch, Model
from hocket.frontends.open_model import open_model
from hocket.graph.dtypes import DType
from hocket.graph.spec import Spec
from hocket.scheduler import Executor, Store, plan_for_group

from . import random_models
from .device_parts.collectives import (
    CollectiveGroup,
    check_absent_device,
    check_collective,
    make_collective_calls,
)
from .device_parts.multiprocessors import divide_device, make_multiprocessor_cases
from .harness import BenchmarkDevice, Case, NothingToMeasure, ResultRow, compute_nmse

PART_COUNTS = (2, 4)
"""The numbers of parts into which one device is divided."""
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
    """Make the cases: parts with multiprocessors of their own, parts that share them, and several devices."""
    known = list_models(bench)
    for count in bench.select_size(PART_COUNTS, PART_COUNTS[:1]):
        yield from make_multiprocessor_cases(bench, count)
        yield from _make_group_cases(bench, f"{count} divided parts", partial(divide_device, bench, count), known)
    parts = [replace(bench.on, part=part) for part in range(2)]
    for name, find in known.items():
        yield Case(f"{name}, two parts of a device", partial(_compare_decode, bench, find, lambda: parts))
    there = bench.select_size(len(bench.driver.devices()), 2)
    if there < 2:
        yield Case("several devices", partial(_refuse_single_device, there))
    for count in (count for count in (2, 4, 8) if count <= there):
        devices = [bench.driver.device(index) for index in range(count)]
        yield from _make_group_cases(bench, f"{count} devices", lambda devices=devices: devices, known)


def _make_group_cases(
    bench: BenchmarkDevice,
    name: str,
    find_devices: Callable[[], Sequence[Device]],
    known: Mapping[str, Callable[[], Path | None]],
) -> Iterator[Case]:
    """Make the cases of one device group: collectives, a device that does not arrive, sums, and models."""
    yield Case(f"collectives, {name}", partial(_check_collectives, bench, find_devices))
    yield Case(f"an absent device, {name}", partial(_check_absent_devices, bench, find_devices))
    for kibibytes in bench.select_size((16, 64, 1024, 8192, 65536), (1, 64)):
        yield Case(f"sum of {kibibytes} KiB, {name}", partial(_measure_sums, bench, find_devices, kibibytes << 10))
    for model, find in known.items():
        yield Case(f"{model}, {name}", partial(_compare_decode, bench, find, find_devices))
        yield Case(f"{model}, {name}, a prompt", partial(_compare_prompt, bench, find, find_devices))


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


def _measure_sums(
    bench: BenchmarkDevice, find_devices: Callable[[], Sequence[Device]], nbytes: int
) -> Iterator[ResultRow]:
    """Measure all-reduces by the clock of the host, from the start of the first device to the end of the last one."""
    devices = find_devices()
    vectors = [bench.rng.standard_normal(nbytes // 4, dtype="f4") for _ in devices]
    expected = np.sum(vectors, axis=0, dtype=np.float64)
    x, out = (Tensor(0, at * nbytes, (1, nbytes // 4), (nbytes // 4, 1), DType.F32) for at in range(2))
    steps = [
        Instruction("all_reduce", (x,), (out,), {"sequence": n}, None, f"sum.{n}") for n in range(SUMS_PER_PROGRAM)
    ]
    program = Program((BufferSpec("arena", "arena", 2 * nbytes),), tuple(steps), {}, {})
    for driver in make_transport_drivers(bench, devices):
        group = CollectiveGroup(driver, devices, [program] * len(devices))
        for rank, array in enumerate(vectors):
            group.view(rank, x)[...] = array[None]
        rounds = [group.run() for _ in range(bench.select_size(20, 3))]
        results = [np.array(group.view(rank, out))[0] for rank in range(len(devices))]
        same = all(np.array_equal(result, results[0]) for result in results)
        seconds, error = median(rounds[1:]) / SUMS_PER_PROGRAM, compute_nmse(results[0], expected)
        figures = {"µs": seconds * 1e6, "GB/s": nbytes / seconds / 1e9, "NMSE": error}
        yield {"by": driver.transport, **figures, "right": same}


def _check_collectives(bench: BenchmarkDevice, find_devices: Callable[[], Sequence[Device]]) -> Iterator[ResultRow]:
    """Run each collective 1,000 times by each transport, and compare every result with the exact one."""
    devices = find_devices()
    for title, calls in make_collective_calls(len(devices), bench.rng).items():
        for driver in make_transport_drivers(bench, devices):
            yield {
                "collective": title,
                "by": driver.transport,
                **check_collective(driver, devices, calls, bench.select_size(1000, 3)),
            }


def _check_absent_devices(bench: BenchmarkDevice, find_devices: Callable[[], Sequence[Device]]) -> Iterator[ResultRow]:
    """Run sums in which one device does not arrive, by each transport."""
    devices = find_devices()
    for driver in make_transport_drivers(bench, devices):
        is_lost = driver.transport == TRANSPORTS[1]
        yield {"by": driver.transport, **check_absent_device(driver, devices, is_lost=is_lost)}


# ----------------------------------------------------------------------------------------------------------- models


def _compare_decode(
    bench: BenchmarkDevice, find: Callable[[], Path | None], find_devices: Callable[[], Sequence[Device]]
) -> Iterator[ResultRow]:
    """Decode the same tokens on one device, and on several devices by each transport."""
    devices = find_devices()
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
    bench: BenchmarkDevice, find: Callable[[], Path | None], find_devices: Callable[[], Sequence[Device]]
) -> Iterator[ResultRow]:
    """Measure a prompt in three ways: planned without overlap, overlapped work after the sums, and overlapped work.

    The last two ways give the same bits.
    """
    devices = find_devices()
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
