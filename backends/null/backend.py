"""Devices without memory: programs run on a virtual clock that a model of cost moves on.

Everything of a plan is exercised but the arithmetic: allocation is counted, collectives meet through the same `Comm`
as on real devices and take the latest clock of the group.  What a run leaves is a track of steps for each device.
Results have the right shape and mean nothing.
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
from ...ops.collectives import COLLECTIVES, as_integer
from ..base import Array, Comm, Device, Instruction, Program, Support, Tensor, run_calls
from ..beside import beside


class Speeds(Protocol):
    """A model of cost; `hocket.scheduler.Hardware` is one."""

    def compute(self, flops: float, nbytes: float) -> float:
        """Seconds of a kernel."""

    def meeting(self, nbytes: float) -> float:
        """Seconds of a collective in which each device sends so many bytes."""


@dataclass(frozen=True, slots=True)
class Steady:
    """A device that computes and moves so much a second, with a fixed time for each step."""

    flops: float = 100e9
    bandwidth: float = 20e9
    step: float = 2e-6
    link: float = 10e9

    def compute(self, flops: float, nbytes: float) -> float:
        return max(flops / self.flops, nbytes / self.bandwidth) + self.step

    def meeting(self, nbytes: float) -> float:
        return self.step + nbytes / self.link


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction on the clock: it waited for others until `start`, and then took until `end`."""

    node: str
    op: str
    start: float
    end: float
    waited: float = 0.0


class NullBuffer:
    """Bytes that are counted and not there."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class NullBackend:
    """Runs anywhere as ``null:0`` (and any number of further ones).  `goes_on`: a run begins on the clock when the last
    one on that device has ended, and not at 0, and its steps follow those in the track.  `computes_beside`: its devices
    compute while they meet others."""

    name = "null"

    def __init__(
        self,
        speeds: Speeds | None = None,
        memory: int | None = None,
        *,
        goes_on: bool = False,
        computes_beside: bool = False,
    ) -> None:
        self.speeds: Speeds = speeds or Steady()
        self.memory, self.goes_on, self.computes_beside = memory, goes_on, computes_beside
        self.allocated: dict[str, int] = defaultdict(int)
        self.tracks: dict[str, list[Step]] = {}
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

    def stored(self, spec: Spec, kind: str = "value") -> Spec:
        return spec

    def scratch(self, node: Node) -> int:
        return 0

    def reads_strided(self, node: Node, operand: int) -> bool:
        return True

    def overlaps(self, devices: Sequence[Device]) -> bool:
        return self.computes_beside

    def alloc(self, nbytes: int, on: Device, lasting: bool = False) -> NullBuffer:
        with self._lock:
            self.allocated[str(on)] += nbytes
        return NullBuffer(nbytes)

    def view(self, buffer: NullBuffer, tensor: Tensor) -> Array:
        """An array of that shape whose elements are all one element of its own."""
        dtype = np.dtype(np.uint8) if tensor.dtype.is_quantised else tensor.dtype.storage
        return np.lib.stride_tricks.as_strided(np.zeros(1, dtype), tensor.shape, (0,) * len(tensor.shape))

    def load(self, data: Array, declared: Spec, buffer: NullBuffer) -> None:
        """Nothing is kept."""

    def compile(self, program: Program, buffers: Sequence[Any], on: Device, comm: Comm) -> Callable[[], None]:
        priced = [(i, price(i, self.speeds, comm.size)) for i in program.instructions]
        meanwhile = beside(program) if self.computes_beside else {}
        waiting = {numbers[-1] + 1 for numbers in meanwhile.values()}

        def replay() -> None:
            clock = _Clock(comm, self.tracks.get(str(on), []) if self.goes_on else [])
            steps = [partial(clock.run, i, s, at in waiting, at in meanwhile) for at, (i, s) in enumerate(priced)]
            run_calls(program, on, enumerate(steps))
            self.tracks[str(on)] = clock.track

        return replay


class _Clock:
    """The time on one device, from 0 at the start of a run, or from the end of what it did before; `met` is when the
    collective ends that is on its way."""

    def __init__(self, comm: Comm, before: Sequence[Step]) -> None:
        self.comm, self.now = comm, max((step.end for step in before), default=0.0)
        self.met = self.now
        self.track: list[Step] = [*before]

    def run(self, i: Instruction, seconds: float, waits: bool, goes_on: bool) -> None:
        """Run an instruction, which `waits` for the collective before it; the device `goes_on` beside it."""
        came = self.now
        if waits:
            self.now = max(self.now, self.met)
        start = self._meet(i.op, i.attrs) if i.op in COLLECTIVES else self.now
        self.track.append(Step(i.node, i.op, start, start + seconds, start - came))
        if goes_on:
            self.met = start + seconds
            return
        self.now = start + seconds
        if i.op == "send":  # what is sent is there once it is sent
            to, number = as_integer(i.attrs["to"]), as_integer(i.attrs["sequence"])
            self.comm.send(np.array([self.now]), to, number)

    def _meet(self, op: str, attrs: Mapping[str, Any]) -> float:
        """When everybody is there: the clocks of the group are what the devices tell each other."""
        number = as_integer(attrs["sequence"])
        if op == "send":
            return self.now
        if op == "receive":
            came = np.zeros(1)
            self.comm.receive(came, as_integer(attrs["source"]), number)
            return max(self.now, float(came[0]))
        clocks = np.zeros(self.comm.size)
        places = [[(slice(d, d + 1), slice(0, 1))] for d in range(self.comm.size)]
        self.comm.all_gather(np.array([self.now]), clocks, places, number)
        return float(clocks.max())


def price(i: Instruction, speeds: Speeds, devices: int) -> float:
    """Seconds of one instruction once it has begun; a receiver gets what was paid for by the sender."""
    if i.op == "receive":
        return 0.0
    if i.op in COLLECTIVES:
        nbytes = float(max(t.spec.nbytes for t in (*i.src, *i.dst) if t is not None))
        rounds = 2 if i.op == "all_reduce" else 1
        return speeds.meeting(nbytes if i.op == "send" else rounds * (devices - 1) / devices * nbytes)
    node = _node(i)
    declared = REGISTRY[i.op]
    return speeds.compute(float(declared.count_flops(node)), float(declared.count_bytes(node)))


def _node(i: Instruction) -> Node:
    """An instruction as a node again, which is what ops count."""
    src = tuple(None if t is None else Node("input", (), {}, (t.spec,), "x").results[0] for t in i.src)
    return Node(i.op, src, i.attrs, tuple(t.spec for t in i.dst))
