"""The programs of a plan as stages on a common clock: work between two meetings of devices, and the meetings.

A stage is what people can read: a model of a hundred layers has a thousand instructions a device, but a few hundred
stages, most of them alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from ..backends.abilities import OTHERS, overlaps
from ..backends.base import Instruction
from ..graph.lazy_dataclass import dataclass
from ..graph.node import Node
from ..ops.collectives import POINT_TO_POINT_OPS, as_integer, find_collective_number
from .lowering.alike import structure
from .lowering.lane import Lane, first_alike, teams_of
from .machines.hardware import Counts, Estimate, Hardware, Work, leaf_of
from .machines.stand_ins import NUMPY_SLOWDOWNS

WORK = "work"
AT_ONCE = 0.05
"""The part of the time in which others may do what is small, as masks, where devices are said to take turns."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Instructions `first` to `first + count` of each of `devices`, which do the same.

    `op` is ``work`` or that of a collective; `reads` are bytes that go through memory on the busiest device, `moved`
    those it sends; `uncut` is what the stage would take at least if every weight and state it reads were whole on each
    device, None where none is cut.  Work that is `beside` does not wait for the meeting before it.
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
    beside: bool = False


@dataclass(frozen=True, slots=True)
class StepCost:
    """What one instruction is predicted to do: floating-point operations, bytes read and written, bytes sent to other
    devices, seconds; and the seconds it would take if nothing that it reads were cut, None where nothing is."""

    flops: float
    nbytes: float
    moved: float
    seconds: float
    uncut: float | None = None


class Prices:
    """The predicted cost of every instruction of a program, by position."""

    def __init__(
        self,
        lane: Lane,
        hardware: Hardware,
        whole: Mapping[str, int],
        counts: Counts,
        number: int = 0,
        team: Sequence[int] = (0,),
        launches: Sequence[float] | None = None,
    ) -> None:
        """`number` is that of the device, `team` are those whom it meets in collectives, itself among them; `launches`
        are those of the instructions, where that is known already."""
        self.nodes, self.program = lane.graph.nodes, lane.program
        self.launches = lane.launches() if launches is None else launches
        self.stand_ins = lane.stand_ins()
        self.hardware, self.whole, self.counts, self.number, self.team = hardware, whole, counts, number, team

    def of(self, at: int) -> StepCost:
        """The cost of the instruction at a position."""
        return self._costs[at]

    @cached_property
    def _costs(self) -> list[StepCost]:
        return [self._cost(at, i) for at, i in enumerate(self.program.instructions)]

    def _cost(self, at: int, i: Instruction) -> StepCost:
        if find_collective_number(i.op, i.attrs) is not None:
            met = self.hardware.collective(i.op, met_bytes(i), self._there(i))
            return StepCost(0.0, 0.0, met.moved, met.seconds)
        if i.index < 0:  # a copy of a state: of the new one over the old one, or to undo that
            copied = Work(0.0, _copied(i), _copied(i), (OTHERS,))
            return StepCost(0.0, copied.nbytes, 0.0, self.hardware.compute(*copied, launches=self.launches[at]))
        node = self.nodes[i.index]
        own = self.counts.of(node)
        times, more = self._missing(node)
        more = min(own.nbytes * (times - 1), more)
        whole = own._replace(flops=own.flops * times, nbytes=own.nbytes + more, kept=own.kept + more)
        slowdown = NUMPY_SLOWDOWNS.get(i.op, 1.0) if at in self.stand_ins else 1.0

        def seconds(work: Work) -> float:
            return slowdown * self.hardware.compute(*work, launches=self.launches[at])

        return StepCost(own.flops, own.nbytes, 0.0, seconds(own), seconds(whole) if more else None)

    def _there(self, i: Instruction) -> Sequence[int]:
        """The devices that a meeting joins."""
        if i.op not in POINT_TO_POINT_OPS:
            return self.team
        return self.number, as_integer(i.attrs["to" if i.op == "send" else "source"])

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


def prices_of(lanes: Sequence[Lane], speeds: Sequence[Hardware], whole: Mapping[str, int]) -> list[Prices]:
    """The prices of each device's program, made once for those that run the same; `speeds` are those of each device,
    `whole` gives the bytes of weights and states before they were cut."""
    prices: list[Prices] = []
    counts, teams = Counts(), teams_of([lane.program for lane in lanes])
    launches: dict[Hashable, Sequence[float]] = {}  # programs that are alike have the same
    for number, first in enumerate(first_alike(lanes)):
        if first < number:
            prices.append(prices[first])
            continue
        lane = lanes[number]
        key = (type(lane.backend), lane.device.kind, structure(lane.program))
        if key not in launches:
            launches[key] = lane.launches()
        prices.append(Prices(lane, speeds[number], whole, counts, number, teams[number], launches[key]))
    return prices


def stages(lanes: Sequence[Lane], prices: Sequence[Prices]) -> list[Stage]:
    """All stages, in the order of the meetings."""
    goes_on = overlaps([(lane.backend, lane.device) for lane in lanes])
    own: list[_Parts] = []
    for number, first in enumerate(first_alike(lanes)):
        own.append(_Parts(lanes[number], prices[number], goes_on) if first == number else own[first])
    timeline: list[Stage] = []
    for number in sorted({n for p in own for n in p.meetings}):
        there = [d for d, p in enumerate(own) if number in p.meetings]
        timeline += _alike({d: own[d].before[number] for d in there})
        timeline.append(_meeting(there, own, number))
        timeline += _alike({d: own[d].beside[number] for d in there})
    return timeline + _alike({d: p.rest for d, p in enumerate(own)})


def finished(found: Sequence[Stage], devices: int) -> float:
    """When the last device is done."""
    return max(clocks(found, [0.0] * devices), default=0.0)


def clocks(found: Sequence[Stage], begins: Sequence[float]) -> list[float]:
    """When each device is done that begins then: it starts a stage when it has done the one before and, to meet, all
    are there; but work beside a meeting when it has come to that."""
    worked, met = [*begins], [*begins]
    for stage in found:
        if stage.op == WORK:
            for d in stage.devices:
                worked[d] = (worked[d] if stage.beside else max(worked[d], met[d])) + stage.seconds
        else:
            there = {d: max(worked[d], met[d]) for d in stage.devices}
            ready = there[stage.source] if stage.op == "send" else max(there.values())
            for d in stage.devices:
                worked[d] = there[d]
                if stage.op != "send" or d != stage.source:
                    met[d] = max(there[d], ready + stage.seconds)
    return [*map(max, worked, met)]


def take_turns(found: Sequence[Stage], devices: int) -> bool:
    """Whether one device at a time is at work, but for a part `AT_ONCE` of the time."""
    took = finished(found, devices)
    busy = sum(s.seconds * (len(s.devices) if s.op == WORK else 1) for s in found)
    return busy <= (1 + AT_ONCE) * took


def estimate(found: Sequence[Stage], devices: int) -> Estimate:
    """The time of one run."""
    meetings = [s for s in found if s.op != WORK]
    sent, took = sum(s.seconds for s in meetings), finished(found, devices)
    one_by_one = took
    if any(s.beside for s in found):
        one_by_one = finished([replace(s, beside=False) for s in found], devices)
    compute = max(0.0, one_by_one - sent)  # messages of several devices may take longer in all than the run
    return Estimate(compute, sent, len(meetings), one_by_one - took + max(0.0, sent - one_by_one))


def met_bytes(i: Instruction) -> int:
    """Bytes of the whole value that a collective is about."""
    return max(t.spec.nbytes for t in (*i.src, *i.dst) if t is not None)


def _copied(i: Instruction) -> float:
    """Bytes read and written by an instruction that copies."""
    return 2.0 * sum(t.spec.nbytes for t in i.dst)


def _alike(work: Mapping[int, tuple[str, Stage]]) -> list[Stage]:
    """One stage for devices that do the same between two meetings; they differ at most in how much."""
    groups: dict[str, list[tuple[int, Stage]]] = defaultdict(list)
    for device, (kind, stage) in work.items():
        if stage.count:
            groups[kind].append((device, stage))
    merged = []
    for members in groups.values():
        longest = max((s for _, s in members), key=lambda s: s.seconds)
        first = members[0][1].first
        merged.append(replace(longest, devices=tuple(d for d, _ in members), first=first, source=members[0][0]))
    return merged


def _meeting(there: Sequence[int], own: Sequence[_Parts], number: int) -> Stage:
    """The stage of one meeting; a send and its receive are one."""
    sender = next((d for d in there if own[d].meetings[number].op == "send"), there[0])
    return replace(own[sender].meetings[number], devices=tuple(there), source=sender)


class _Parts:
    """One program cut at its meetings: `before` each of them a stage of work, and `beside` it another, if the device
    `goes_on` there, with the ops it runs as its kind."""

    def __init__(self, lane: Lane, prices: Prices, goes_on: bool) -> None:
        self.program, self.prices = lane.program, prices
        meanwhile = lane.meanwhile if goes_on else {}
        self.meetings: dict[int, Stage] = {}
        self.before: dict[int, tuple[str, Stage]] = {}
        self.beside: dict[int, tuple[str, Stage]] = {}
        start = 0
        for at, i in enumerate(self.program.instructions):
            if (number := find_collective_number(i.op, i.attrs)) is not None:
                self.before[number] = self._work(start, at)
                cost = prices.of(at)
                self.meetings[number] = Stage(i.op, (), at, 1, 0.0, cost.moved, cost.seconds)
                start = at + 1 + len(meanwhile.get(at, ()))
                self.beside[number] = self._work(at + 1, start, beside=True)
        self.rest = self._work(start, len(self.program.instructions))

    def _work(self, start: int, stop: int, beside: bool = False) -> tuple[str, Stage]:
        """The stage of the instructions from `start` to `stop`."""
        costs = [self.prices.of(at) for at in range(start, stop)]
        reads, seconds = sum(c.nbytes for c in costs), sum(c.seconds for c in costs)
        cut = any(c.uncut is not None for c in costs)
        uncut = sum(c.seconds if c.uncut is None else c.uncut for c in costs) if cut else None
        stage = Stage(WORK, (), start, stop - start, float(reads), 0.0, float(seconds), uncut, beside=beside)
        return " ".join(i.op for i in self.program.instructions[start:stop]), stage
