"""Check every collective of a device group many times, and the end of runs in which a device does not arrive."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hocket.backends.base import BufferSpec, Device, Instruction, Program, Tensor, contiguous_strides
from hocket.backends.cupy.backend import DriverBackend
from hocket.backends.cupy.device.driver import Driver
from hocket.benchmarks.gpu.harness import ResultRow
from hocket.distributed.thread_group import ThreadGroup
from hocket.graph.dtypes import DType
from hocket.graph.errors import HocketError

ABSENCE_TIMEOUT_SECONDS, MAX_FAULT_SECONDS = 2.0, 10.0
"""The timeout of a run without one device, and the seconds in which such a run must end."""
ALIGNMENT = 256
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class CollectiveCall:
    """One collective of one device: its operand (None for a receiver), attributes, and the expected result.

    The collective is linear: with negated operands the result is negated.
    """

    op: str
    source: Floats | None
    expected: Floats
    attrs: Mapping[str, Any]


class CollectiveGroup:
    """Compiled programs of a device group, each run by a thread of its own."""

    def __init__(
        self, driver: Driver, devices: Sequence[Device], programs: Sequence[Program], timeout: float = 60.0
    ) -> None:
        self.backend, self.thread_group = DriverBackend(driver), ThreadGroup(len(devices), timeout, devices=devices)
        self.buffers = [
            self.backend.alloc(program.buffers[0].nbytes, on) for program, on in zip(programs, devices, strict=True)
        ]
        self.runs = [
            self.backend.compile(program, [buffer], on, self.thread_group.member(rank))
            for rank, (program, buffer, on) in enumerate(zip(programs, self.buffers, devices, strict=True))
        ]

    def view(self, rank: int, tensor: Tensor) -> Any:
        """Return the view of a tensor of one device."""
        return self.backend.view(self.buffers[rank], tensor)

    def run(self, absent: frozenset[int] = frozenset()) -> float:
        """Run the programs of all devices except the absent ones, and return the seconds until all have ended.

        Raises:
            HocketError: A program failed; the programs of the other devices have ended too.
        """

        def run_one(run: Callable[[], object]) -> None:
            try:
                run()
            except BaseException as why:  # the other devices must not wait for this one
                self.thread_group.abort(str(why))
                raise

        with ThreadPoolExecutor(len(self.runs)) as pool:
            start = time.perf_counter()
            pending = [pool.submit(run_one, run) for rank, run in enumerate(self.runs) if rank not in absent]
        taken = time.perf_counter() - start
        self.thread_group.clear_messages_and_failures()
        for one in pending:
            one.result()
        return taken


def make_collective_calls(count: int, rng: np.random.Generator) -> dict[str, list[list[CollectiveCall]]]:
    """Return the calls of each device by title: sums by every kernel, and each other collective."""
    titles = {"all_reduce, pushed": 1003, "all_reduce, one block": 12_003, "all_reduce": 300_001}
    calls = {title: _make_all_reduce(count, size, rng) for title, size in titles.items()}
    width, rows = 8, 2 * count
    runs = tuple(((width * d, width),) for d in range(count))
    row_runs = tuple(((2 * d, 2),) for d in range(count))
    whole = rng.standard_normal((rows, width * count), dtype="f4")
    columns = [part.copy() for part in np.split(whole, count, axis=1)]
    terms = rng.integers(-99, 99, (count, rows, width * count)).astype("f4")
    sums = np.split(terms.sum(0), count, axis=1)
    exchange = {"old_axis": 1, "old_runs": runs, "axis": 0, "runs": row_runs}
    calls["all_gather"] = [[CollectiveCall("all_gather", x, whole, {"axis": 1, "runs": runs})] for x in columns]
    calls["reduce_scatter"] = [
        [CollectiveCall("reduce_scatter", terms[d], sums[d], {"axis": 1, "runs": runs, "rank": d})]
        for d in range(count)
    ]
    calls["all_to_all"] = [
        [CollectiveCall("all_to_all", columns[d], whole[2 * d : 2 * d + 2], {**exchange, "rank": d})]
        for d in range(count)
    ]
    calls["send and receive"] = [_make_messages(d, columns) for d in range(count)]
    return calls


def _make_all_reduce(count: int, size: int, rng: np.random.Generator) -> list[list[CollectiveCall]]:
    terms = rng.integers(-99, 99, (count, 1, size)).astype("f4")
    return [[CollectiveCall("all_reduce", x, terms.sum(0), {})] for x in terms]


def _make_messages(d: int, arrays: Sequence[Floats]) -> list[CollectiveCall]:
    """Return the messages of device `d`: it sends its array to the next one, and receives another."""
    messages = []
    if d > 0:
        attrs = {"shape": arrays[0].shape, "dtype": DType.F32, "source": d - 1, "sequence": d - 1}
        messages.append(CollectiveCall("receive", None, arrays[d - 1], attrs))
    if d + 1 < len(arrays):
        messages.append(CollectiveCall("send", arrays[d], arrays[d], {"to": d + 1, "sequence": d}))
    return messages


@dataclass(frozen=True)
class PlacedCall:
    """A collective with the places of its operand and its result."""

    call: CollectiveCall
    source: Tensor | None
    target: Tensor


def place_calls(calls: Sequence[CollectiveCall]) -> tuple[Program, list[PlacedCall]]:
    """Return the program of a device, and its calls with their places."""
    placed: list[PlacedCall] = []
    top = 0

    def place(array: Floats) -> Tensor:
        nonlocal top
        tensor = Tensor(0, top, array.shape, contiguous_strides(array.shape), DType.F32)
        top += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        return tensor

    for call in calls:
        placed.append(PlacedCall(call, None if call.source is None else place(call.source), place(call.expected)))
    instructions = tuple(
        Instruction(
            p.call.op,
            () if p.source is None else (p.source,),
            (p.target,),
            {"sequence": number, **p.call.attrs},
            None,
            f"collective {number}",
        )
        for number, p in enumerate(placed)
    )
    return Program((BufferSpec("arena", "arena", top),), instructions, {}, {}), placed


def check_collective(
    driver: Driver, devices: Sequence[Device], calls: Sequence[Sequence[CollectiveCall]], runs: int
) -> ResultRow:
    """Run one collective `runs` times, and count the runs with a wrong result on any device."""
    programs, placed = zip(*map(place_calls, calls), strict=True)
    group, wrong, taken = CollectiveGroup(driver, devices, programs), 0, []
    for number in range(runs):
        sign = np.float32(1 - 2 * (number % 2))  # a result of the run before is wrong
        _write_sources(group, placed, sign)
        taken.append(group.run())
        wrong += not _has_right_results(group, placed, sign)
    return {"runs": runs, "wrong": wrong, "µs": float(np.median(taken)) * 1e6, "right": not wrong}


def _write_sources(group: CollectiveGroup, placed: Sequence[Sequence[PlacedCall]], sign: np.float32) -> None:
    for rank, own in enumerate(placed):
        for p in own:
            if p.source is not None and p.call.source is not None:
                group.view(rank, p.source)[...] = sign * p.call.source


def _has_right_results(group: CollectiveGroup, placed: Sequence[Sequence[PlacedCall]], sign: np.float32) -> bool:
    return all(
        np.array_equal(np.array(group.view(rank, p.target)), sign * p.call.expected)
        for rank, own in enumerate(placed)
        for p in own
        if p.call.op != "send"
    )


def check_absent_device(driver: Driver, devices: Sequence[Device], *, is_lost: bool) -> ResultRow:
    """Run a sum without the last device: all others must end with an error, and the next sum must be right.

    Args:
        driver: The driver of the devices.
        devices: The group.
        is_lost: Whether the group is lost after the fault, as with a collective library.
    """
    calls = _make_all_reduce(len(devices), 1003, np.random.default_rng(0))
    programs, placed = zip(*map(place_calls, calls), strict=True)
    group, one = CollectiveGroup(driver, devices, programs, ABSENCE_TIMEOUT_SECONDS), np.float32(1)
    _write_sources(group, placed, one)
    group.run()
    start, message = time.perf_counter(), ""
    try:
        group.run(absent=frozenset({len(devices) - 1}))
    except HocketError as why:
        message = " ".join(str(why).split())
    seconds = time.perf_counter() - start
    is_right = bool(message) and seconds < MAX_FAULT_SECONDS
    if not is_lost:
        _write_sources(group, placed, -one)
        group.run()
        is_right = is_right and _has_right_results(group, placed, -one)
    return {"s": seconds, "message": message, "right": is_right}
