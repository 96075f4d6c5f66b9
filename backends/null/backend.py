"""Devices without memory: programs run on a virtual clock, which a cost model advances.

The backend exercises every part of a plan except arithmetic. Allocations are counted. Collectives use the same `Comm`
as real devices and synchronise the clocks of the group. A run leaves a track of clock events for each device. Results
have the right shape and no meaning.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from ...graph.node import Node
from ...graph.spec import Spec
from ...ops import REGISTRY
from ...ops.collectives import COLLECTIVES, narrow_to_integer
from ..base import Array, Comm, Device, Instruction, Program, Support, Tensor, run_calls
from ..fusion.overlap import find_instructions_beside_collectives


class CostModel(Protocol):
    """A cost model, such as `hocket.scheduler.Hardware`."""

    def compute_seconds(self, flops: float, nbytes: float) -> float:
        """Return the seconds of a kernel."""

    def collective_seconds(self, nbytes: float) -> float:
        """Return the seconds of a collective in which each device sends `nbytes` bytes."""


@dataclass(frozen=True, slots=True)
class ConstantSpeeds:
    """Constant speeds in FLOP/s and bytes/s, and constant seconds for each instruction."""

    flops: float = 100e9
    bandwidth: float = 20e9
    step: float = 2e-6
    link: float = 10e9

    def compute_seconds(self, flops: float, nbytes: float) -> float:
        return max(flops / self.flops, nbytes / self.bandwidth) + self.step

    def collective_seconds(self, nbytes: float) -> float:
        return self.step + nbytes / self.link


@dataclass(frozen=True, slots=True)
class ClockedInstruction:
    """One instruction in the recorded track of a virtual device: it waits until `start`, then runs until `end`."""

    node: str
    op: str
    start: float
    end: float
    idle_seconds: float = 0.0


class NullBuffer:
    """A buffer that is counted but not allocated."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class NullBackend:
    """A backend that computes and stores nothing.

    A run only advances the virtual clock of its device. The backend runs anywhere as ``null:0`` and any number of
    further devices. With `goes_on`, the clock and the track of a run continue from the previous run on that device; by
    default the clock starts at 0. With `computes_beside`, devices compute during collectives.
    """

    name = "null"

    def __init__(
        self,
        speeds: CostModel | None = None,
        memory: int | None = None,
        *,
        goes_on: bool = False,
        computes_beside: bool = False,
    ) -> None:
        self.speeds: CostModel = speeds or ConstantSpeeds()
        self.memory, self.goes_on, self.computes_beside = memory, goes_on, computes_beside
        self.allocated: dict[str, int] = defaultdict(int)
        self.tracks: dict[str, list[ClockedInstruction]] = {}
        self._lock = threading.Lock()

    def with_threads(self, threads: int) -> NullBackend:
        return self

    def devices(self) -> Sequence[Device]:
        return (self.device(0),)

    def device(self, index: int) -> Device:
        return Device(self.name, index, self.memory, "virtual clock, no memory", memory_of=self.name)

    def supports(self, node: Node, on: Device) -> Support:
        known = node.op in REGISTRY
        return Support(known, "" if known else f"no op {node.op!r} is declared")

    def storage_spec(self, spec: Spec, kind: str = "value") -> Spec:
        return spec

    def scratch(self, node: Node) -> int:
        return 0

    def reads_strided(self, node: Node, operand: int) -> bool:
        return True

    def can_overlap_collectives(self, devices: Sequence[Device]) -> bool:
        return self.computes_beside

    def alloc(self, nbytes: int, on: Device, lasting: bool = False) -> NullBuffer:
        with self._lock:
            self.allocated[str(on)] += nbytes
        return NullBuffer(nbytes)

    def view(self, buffer: NullBuffer, tensor: Tensor) -> Array:
        """Return an array of the shape of `tensor`; all its elements share one memory location."""
        dtype = np.dtype(np.uint8) if tensor.dtype.is_quantised else tensor.dtype.storage
        return np.lib.stride_tricks.as_strided(np.zeros(1, dtype), tensor.shape, (0,) * len(tensor.shape))

    def load(self, data: Array, declared: Spec, buffer: NullBuffer) -> None:
        """Discard the weight."""

    def compile(self, program: Program, buffers: Sequence[Any], on: Device, comm: Comm) -> Callable[[], None]:
        priced = [(i, estimate_instruction_seconds(i, self.speeds, comm.size)) for i in program.instructions]
        overlapped = find_instructions_beside_collectives(program) if self.computes_beside else {}
        waiting = {numbers[-1] + 1 for numbers in overlapped.values()}

        def replay() -> None:
            clock = _DeviceClock(comm, self.tracks.get(str(on), []) if self.goes_on else [])
            steps = [
                partial(clock.advance_and_record_instruction, i, s, at in waiting, at in overlapped)
                for at, (i, s) in enumerate(priced)
            ]
            run_calls(program, on, enumerate(steps))
            self.tracks[str(on)] = clock.track

        return replay


class _DeviceClock:
    """The virtual clock of one device: its time in seconds, and the instructions that it has executed.

    `collective_end` is the end of the collective in progress.
    """

    def __init__(self, comm: Comm, before: Sequence[ClockedInstruction]) -> None:
        self.comm, self.now = comm, max((step.end for step in before), default=0.0)
        self.collective_end = self.now
        self.track: list[ClockedInstruction] = [*before]

    def advance_and_record_instruction(self, i: Instruction, seconds: float, waits: bool, goes_on: bool) -> None:
        """Advance the clock by an instruction of `seconds`, and record the instruction in the track.

        Args:
            i: The instruction.
            seconds: Its cost.
            waits: Whether it waits for the collective in progress.
            goes_on: Whether later instructions overlap with it.
        """
        came = self.now
        if waits:
            self.now = max(self.now, self.collective_end)
        start = self._exchange_clocks_and_take_latest(i.op, i.attrs) if i.op in COLLECTIVES else self.now
        self.track.append(ClockedInstruction(i.node, i.op, start, start + seconds, start - came))
        if goes_on:
            self.collective_end = start + seconds
            return
        self.now = start + seconds
        if i.op == "send":  # the message arrives when the send ends
            to, number = narrow_to_integer(i.attrs["to"]), narrow_to_integer(i.attrs["sequence"])
            self.comm.send(np.array([self.now]), to, number)

    def _exchange_clocks_and_take_latest(self, op: str, attrs: Mapping[str, Any]) -> float:
        """Exchange clocks with the devices of a collective or a message, and return the latest time."""
        number = narrow_to_integer(attrs["sequence"])
        if op == "send":
            return self.now
        if op == "receive":
            came = np.zeros(1)
            self.comm.receive(came, narrow_to_integer(attrs["source"]), number)
            return max(self.now, float(came[0]))
        clocks = np.zeros(self.comm.size)
        places = [[(slice(d, d + 1), slice(0, 1))] for d in range(self.comm.size)]
        self.comm.all_gather(np.array([self.now]), clocks, places, number)
        return float(clocks.max())


def estimate_instruction_seconds(i: Instruction, speeds: CostModel, devices: int) -> float:
    """Estimate the seconds of one instruction. A receive takes 0 seconds, because the send counts the transfer."""
    if i.op == "receive":
        return 0.0
    if i.op in COLLECTIVES:
        nbytes = float(max(t.spec.nbytes for t in (*i.src, *i.dst) if t is not None))
        rounds = 2 if i.op == "all_reduce" else 1
        return speeds.collective_seconds(nbytes if i.op == "send" else rounds * (devices - 1) / devices * nbytes)
    node = _make_node_for_work_estimate(i)
    declared = REGISTRY[i.op]
    return speeds.compute_seconds(float(declared.count_flops(node)), float(declared.count_bytes(node)))


def _make_node_for_work_estimate(i: Instruction) -> Node:
    """Return an instruction as a node, for the work estimate of its op."""
    src = tuple(None if t is None else Node("input", (), {}, (t.spec,), "x").results[0] for t in i.src)
    return Node(i.op, src, i.attrs, tuple(t.spec for t in i.dst))
