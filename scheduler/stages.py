"""The programs of a plan as stages on a common clock: work between two meetings of devices, and the meetings.

A stage is what people can read: a model of a hundred layers has a thousand instructions a device, but a few hundred
stages, most of them alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..backends.base import Instruction, Program
from ..graph.node import Node, Value
from ..ops import op_of
from ..ops.collective import sequence_of
from .hardware import Counts, Estimate, Hardware, sent_bytes
from .lowering.lane import Lane, first_alike

WORK = "work"


@dataclass(frozen=True, slots=True)
class Stage:
    """Instructions `first` to `first + count` of each of `devices`, which do the same.

    `op` is ``work`` or that of a collective; `reads` are bytes that go through memory on the busiest device, `moved`
    those it sends; `uncut` is what the stage would take at least if every weight and state it reads were whole on each
    device, None where none is cut.
    """

    op: str
    devices: tuple[int, ...]
    first: int
    count: int
    reads: float
    moved: float
    seconds: float
    uncut: float | None = None
    source: int = 0


def stages(lanes: Sequence[Lane], speeds: Sequence[Hardware], whole: Mapping[str, int]) -> list[Stage]:
    """All stages, in the order of the meetings; `speeds` are those of each device, `whole` gives the bytes of weights
    and states before they were cut."""
    own: list[_Parts] = []
    counts = Counts()
    for number, first in enumerate(first_alike(lanes)):
        lane = lanes[number]
        new = first == number
        own.append(_Parts(lane, speeds[number], whole, counts, len(lanes)) if new else own[first])
    found: list[Stage] = []
    for number in sorted({n for p in own for n in p.meetings}):
        there = [d for d, p in enumerate(own) if number in p.meetings]
        found += _alike({d: own[d].before[number] for d in there})
        found.append(_meeting(there, own, number))
    return found + _alike({d: p.rest for d, p in enumerate(own)})


def estimate(found: Sequence[Stage], devices: int) -> Estimate:
    """The time of one run: each device starts a stage when it has done the one before and, to meet, all are there."""
    clock = [0.0] * devices
    for stage in found:
        if stage.op == WORK:
            for d in stage.devices:
                clock[d] += stage.seconds
        else:
            ready = clock[stage.source] if stage.op == "send" else max(clock[d] for d in stage.devices)
            for d in stage.devices:
                if stage.op != "send" or d != stage.source:
                    clock[d] = max(clock[d], ready + stage.seconds)
    meetings = [s for s in found if s.op != WORK]
    sent = sum(s.seconds for s in meetings)
    return Estimate(max(0.0, max(clock, default=0.0) - sent), sent, len(meetings))


def _copied(i: Instruction) -> float:
    """Bytes read and written by an instruction that copies."""
    return 2.0 * sum(t.spec.nbytes for t in i.dst)


def _alike(work: Mapping[int, tuple[str, Stage]]) -> list[Stage]:
    """One stage for devices that do the same between two meetings; they differ at most in how much."""
    groups: dict[str, list[tuple[int, Stage]]] = defaultdict(list)
    for device, (kind, stage) in work.items():
        if stage.count:
            groups[kind].append((device, stage))
    found = []
    for members in groups.values():
        longest = max((s for _, s in members), key=lambda s: s.seconds)
        first = members[0][1].first
        found.append(replace(longest, devices=tuple(d for d, _ in members), first=first, source=members[0][0]))
    return found


def _meeting(there: Sequence[int], own: Sequence[_Parts], number: int) -> Stage:
    """The stage of one meeting; a send and its receive are one."""
    sender = next((d for d in there if own[d].meetings[number].op == "send"), there[0])
    return replace(own[sender].meetings[number], devices=tuple(there), source=sender)


class _Parts:
    """One program cut at its meetings: `before` each of them a stage of work, with the ops it runs as its kind."""

    def __init__(self, lane: Lane, hardware: Hardware, whole: Mapping[str, int], counts: Counts, devices: int) -> None:
        self.hardware, self.whole, self.counts, self.devices = hardware, whole, counts, devices
        self.nodes, program = lane.graph.nodes, lane.program
        self.meetings: dict[int, Stage] = {}
        self.before: dict[int, tuple[str, Stage]] = {}
        start = 0
        for at, i in enumerate(program.instructions):
            if (number := sequence_of(i.op, i.attrs)) is not None:
                self.before[number] = self._work(program, start, at)
                self.meetings[number] = self._meeting(i, at)
                start = at + 1
        self.rest = self._work(program, start, len(program.instructions))

    def _meeting(self, i: Instruction, at: int) -> Stage:
        nbytes = max(t.spec.nbytes for t in (*i.src, *i.dst) if t is not None)
        moved = sent_bytes(i.op, nbytes, self.devices)
        return Stage(i.op, (), at, 1, 0.0, moved, self.hardware.meeting(moved) if self.devices > 1 else 0.0)

    def _work(self, program: Program, start: int, stop: int) -> tuple[str, Stage]:
        """The stage of the instructions from `start` to `stop`."""
        reads = seconds = uncut = 0.0
        cut = False
        for i in program.instructions[start:stop]:
            node = self.nodes[i.index] if i.index >= 0 else None
            if node is None:  # a copy of a state: of the new one over the old one, or to undo that
                flops, nbytes, more, times = 0.0, _copied(i), 0.0, 1.0
            else:
                flops, nbytes = self.counts.of(node)
                times, more = self._missing(node)
            own = self.hardware.compute(flops, nbytes)
            reads, seconds, cut = reads + nbytes, seconds + own, cut or more > 0
            uncut += self.hardware.compute(flops * times, min(nbytes * times, nbytes + more)) if more else own
        stage = Stage(WORK, (), start, stop - start, reads, 0.0, seconds, uncut if cut else None)
        return " ".join(i.op for i in program.instructions[start:stop]), stage

    def _missing(self, node: Node) -> tuple[float, float]:
        """How many times as much `node` would do if the weights and states it reads were not cut, and the bytes that
        it would read besides; nothing is said of a device that has none of them."""
        times, missing = 1.0, 0.0
        for source in node.inputs:
            leaf = leaf_of(source)
            if leaf.name in self.whole and leaf.op in ("weight", "state"):
                whole, own = self.whole[leaf.name], leaf.specs[0].nbytes
                if 0 < own < whole:
                    times = max(times, whole / own)
                    missing += source.spec.nbytes * (whole / own - 1)
        return times, missing


def leaf_of(value: Value) -> Node:
    """The node whose memory a chain of views shows."""
    node = value.node
    while not node.is_leaf and op_of(node).is_view:
        node = node.inputs[0].node
    return node
