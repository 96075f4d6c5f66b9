"""What devices and links are like, and what one run on them is estimated to take."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import NamedTuple

from ...backends.abilities import OTHER_OPS
from ...graph import Graph
from ...graph.lazy_dataclass import dataclass
from ...graph.node import Node, Value
from ...ops import op_of

KEPT = ("weight", "state")
"""Leaves that a run finds in memory, where others were read since it was there last."""
RECURRENT = "recurrent"
"""Stands for ops whose tokens follow each other through a state, as `OTHERS` does for all that read no weights."""
MANY = 64
"""Rows which weights are unpacked for, as far as they are: one row is multiplied with weights as they are."""


BUILT_IN = "built in"
"""The source of speeds that are a guess."""


class Work(NamedTuple):
    """Floating-point operations; bytes read and written, and those of them that are of weights and states; the op as
    which it is judged, then what stands for several: the first one whose speed is known counts; and the rows that each
    weight is multiplied with."""

    flops: float
    nbytes: float
    kept: float = 0.0
    judged_as: tuple[str, ...] = ()
    rows: float = 0.0


@dataclass(frozen=True, slots=True)
class Hardware:
    """Speeds of one kind of device and of the link between two of them, in FLOP/s, bytes/s and seconds.

    Where devices are in several machines, `machine` is how many each of them has, one machine after the other, and
    `across` are the speeds of the link between two machines; 0 says that all are in one.  `plain_flops` is the
    arithmetic of what reads no weights, as attention, and `recurrent_flops` that of tokens which follow each other
    through a state; 0 says that it is as fast as with weights.  Where speeds of ops are known, `op_flops` and
    `op_bandwidth` have them by name.  Devices may share processors and memory: a device whose fellows wait computes
    `alone_flops` times as fast, and reads memory `alone_bandwidth` times.

    `value_bandwidth` is in bytes/s that of values which ops hand on to each other, which are in caches mostly.  Where
    it is known, as of what was measured, an op takes the time of its weights and states, that of such values, and that
    of arithmetic one after the other, but that products, which use a value again and again, fetch such values behind
    arithmetic; 0 says that nothing is known but what memory can do at most, and that arithmetic and memory hide behind
    each other, as in data sheets.  `unpack_bandwidth` is that of weights in products of `MANY` rows or more, where
    unpacking them may take longer than reading them; 0 says that it does not.  `source` names the origin of the speeds:
    ``built in``, a guess; ``data sheet``; or ``calibrated`` with the date.
    """

    flops: float = 100e9
    bandwidth: float = 20e9
    launch: float = 2e-6
    link_bandwidth: float = 10e9
    link_latency: float = 5e-6
    machine: int = 0
    across_bandwidth: float = 1.25e9
    across_latency: float = 50e-6
    plain_flops: float = 0.0
    alone_flops: float = 1.0
    alone_bandwidth: float = 1.0
    value_bandwidth: float = 0.0
    recurrent_flops: float = 0.0
    unpack_bandwidth: float = 0.0
    op_flops: Mapping[str, float] = field(default_factory=dict)
    op_bandwidth: Mapping[str, float] = field(default_factory=dict)
    source: str = BUILT_IN

    @property
    def alone(self) -> Hardware:
        """A device whose fellows wait."""
        if self.alone_flops == self.alone_bandwidth == 1.0:
            return self
        return replace(
            self,
            flops=self.flops * self.alone_flops,
            bandwidth=self.bandwidth * self.alone_bandwidth,
            plain_flops=self.plain_flops * self.alone_flops,
            value_bandwidth=self.value_bandwidth * self.alone_flops,
            recurrent_flops=self.recurrent_flops * self.alone_flops,
            unpack_bandwidth=self.unpack_bandwidth * self.alone_flops,
            alone_flops=1.0,
            alone_bandwidth=1.0,
            op_flops={op: speed * self.alone_flops for op, speed in self.op_flops.items()},
            op_bandwidth={op: speed * self.alone_bandwidth for op, speed in self.op_bandwidth.items()},
        )

    @property
    def is_possible(self) -> bool:
        """Whether speeds are above zero, what may be zero is not below, all are finite, machines have devices, and no
        device is slower alone."""
        speeds = (self.flops, self.bandwidth, self.link_bandwidth, self.across_bandwidth)
        of_ops = (*self.op_flops.values(), *self.op_bandwidth.values())
        others = (
            self.launch,
            self.link_latency,
            self.across_latency,
            self.plain_flops,
            self.value_bandwidth,
            self.recurrent_flops,
            self.unpack_bandwidth,
        )
        known = type(self.machine) is int and self.machine >= 0
        known = known and all(1 <= times < math.inf for times in (self.alone_flops, self.alone_bandwidth))
        return known and all(0 < s < math.inf for s in (*speeds, *of_ops)) and all(0 <= t < math.inf for t in others)

    def by_machine(self, devices: Iterable[int]) -> list[int]:
        """How many of the devices of these numbers each machine has that has any."""
        return list(Counter(device // self.machine if self.machine else 0 for device in devices).values())

    def machines(self, devices: Iterable[int]) -> int:
        """In how many machines devices of these numbers are."""
        return len(self.by_machine(devices))

    def compute_seconds(
        self,
        flops: float,
        nbytes: float,
        kept: float = 0.0,
        judged_as: Sequence[str] = (),
        rows: float = 0.0,
        *,
        launches: float = 1.0,
    ) -> float:
        """Time of a node that does such `Work`, and of its launches, which are less than one where several nodes share
        one."""
        speed, bandwidth = self.flops, self.bandwidth
        if OTHER_OPS in judged_as:
            speed = self.plain_flops or speed
        if RECURRENT in judged_as:
            speed = self.recurrent_flops or speed
        for op in reversed(judged_as):
            speed, bandwidth = self.op_flops.get(op, speed), self.op_bandwidth.get(op, bandwidth)
        if self.value_bandwidth:
            values, weights = (nbytes - kept) / self.value_bandwidth, kept / bandwidth
            if self.unpack_bandwidth and rows > 1:
                longer = max(0.0, kept / self.unpack_bandwidth - weights)
                weights += min(1.0, (rows - 1) / (MANY - 1)) * longer
            arithmetic = flops / speed
            rest = max(arithmetic, values) if rows else arithmetic + values
            return weights + rest + launches * self.launch
        return max(flops / speed, nbytes / bandwidth) + launches * self.launch

    def collective_seconds(self, nbytes: float, machines: int = 1) -> float:
        """Time of a collective in which each device sends so many bytes, over so many machines: what all machines are
        to know takes a message for each doubling of those that know it."""
        if machines > 1:
            return math.ceil(math.log2(machines)) * self.across_latency + nbytes / self.across_bandwidth
        return self.link_latency + nbytes / self.link_bandwidth

    def collective(self, op: str, nbytes: float, devices: Sequence[int]) -> Collective:
        """What a collective of these devices over a value of `nbytes` in all takes.

        A sum over several machines with equally many devices is either one over all of them, or first one within each,
        of which each device has a piece; then one of each piece across machines, for which each device has a link of
        its own; and then the pieces are gathered within.
        """
        each = self.by_machine(devices)
        machines, count = len(each), len(devices)
        moved = sent_bytes(op, nbytes, count)
        if machines == 1:
            return Collective(moved, self.collective_seconds(moved) if count > 1 else 0.0, 0.0, machines)
        flat = Collective(moved, 0.0, self.collective_seconds(moved, machines), machines)
        if op != "all_reduce" or len(set(each)) > 1 or each[0] == 1:
            return flat
        within = sent_bytes("all_gather", nbytes, each[0])
        piece = sent_bytes(op, nbytes / each[0], machines)
        inside, across = 2 * self.collective_seconds(within), self.collective_seconds(piece, machines)
        return min(flat, Collective(2 * within + piece, inside, across, machines), key=lambda way: way.seconds)


CPU = Hardware()
"""Virtual CPU devices on one machine: a guess that `hocket calibrate` replaces."""


@dataclass(frozen=True, slots=True)
class Collective:
    """Bytes that each device sends in a collective, and its seconds inside machines and across so many of them."""

    moved: float
    inside: float
    across: float
    machines: int

    @property
    def seconds(self) -> float:
        return self.inside + self.across


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of one run: in kernels (of the slowest device) and in collectives, and how many of those; `hidden` are
    those in which there are both."""

    compute: float
    collectives: float
    meetings: int
    hidden: float = 0.0

    @property
    def total(self) -> float:
        return self.compute + self.collectives - self.hidden


def sent_bytes(op: str, nbytes: float, devices: int) -> float:
    """Bytes that each device sends in a collective over a value of `nbytes` in all.

    A ring moves (N-1)/N of the bytes to gather them, or to reduce them to shards, and both to reduce them everywhere.
    """
    if op in ("send", "receive"):
        return nbytes
    return (2 if op == "all_reduce" else 1) * (devices - 1) / devices * nbytes


class Counts:
    """Arithmetic and traffic of nodes.  Layers repeat, so what is the same is counted once."""

    def __init__(self) -> None:
        self._known: dict[object, Work] = {}

    def of(self, node: Node) -> Work:
        """What a node does."""
        homes = tuple(home_of(source).op for source in node.inputs)
        read = tuple(None if s is None else s.spec for s in node.src)
        declared = op_of(node)
        key = (homes, node.op, read, node.specs, tuple(node.attrs.items()), declared.active_fraction(node))
        if (work := self._known.get(key)) is None:
            nbytes = float(declared.count_bytes(node))
            kept = sum(s.spec.nbytes for s, home in zip(node.inputs, homes, strict=True) if home in KEPT)
            plain = "weight" not in homes
            weights = sum(s.spec.size for s, home in zip(node.inputs, homes, strict=True) if home == "weight")
            judged_as = (node.op, *[RECURRENT] * (plain and bool(declared.sequential)), *[OTHER_OPS] * plain)
            flops = float(declared.count_flops(node))
            rows = flops / 2 / weights if weights else 0.0
            work = self._known[key] = Work(flops, nbytes, min(nbytes, kept), judged_as, rows)
        return work


def read_by(graph: Graph) -> dict[Node, float]:
    """The weights and states that a run of `graph` reads, with the bytes of each: of a table only rows, of experts only
    those that tokens take."""
    counts, read = Counts(), defaultdict[Node, float](float)
    for node in graph.nodes:
        sizes = [(home, source.spec.nbytes) for source in node.inputs if (home := home_of(source)).op in KEPT]
        if sizes and (kept := counts.of(node).kept):
            whole = sum(size for _, size in sizes)
            for home, size in sizes:
                read[home] += kept * size / whole
    return read


def leaf_of(value: Value) -> Node:
    """The node whose memory a chain of views shows."""
    node = value.node
    while not node.is_leaf and op_of(node).is_view:
        node = node.inputs[0].node
    return node


def home_of(value: Value) -> Node:
    """The leaf where a value lies: in a cache with new rows that cache, most of which is as it was."""
    while not value.node.is_leaf:
        declared, node = op_of(value.node), value.node
        places = declared.inplace_pairs(node.attrs) if declared.overwritten_entries(node.attrs) else ()
        names = [name for at, name in places if at == value.index]
        named = dict(zip(declared.operand_names, node.src, strict=False)) if names else {}
        before = node.src[0] if declared.is_view else next(map(named.get, names), None)
        if before is None:
            break
        value = before
    return value.node
