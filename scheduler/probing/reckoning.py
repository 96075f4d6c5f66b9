"""Speed fit: compute the speeds of the cost model from the seconds of probe runs.

The seconds of a run are the sum of its launches, its arithmetic and its reads. One of these parts dominates each probe.
The fit computes the other parts from other probes and subtracts them. Example for a matrix-vector product with 64 MiB
of weights:

1. The run takes 2.7 ms.
2. Its launches take 0.1 ms and its arithmetic takes 0.3 ms, by the results of other probes.
3. The remaining 2.3 ms are the time of reading 64 MiB.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from statistics import median

from ..machines.hardware import Counts, Work
from ..machines.speeds import Speeds
from ..plan import Plan
from .probe_graphs import LONG, SHORT


class Reckoning:
    """Speeds of a device group, computed from the plans and the seconds of its probes.

    The properties are seconds per unit of work. `compute_speeds` returns their inverses.
    """

    def __init__(
        self,
        plans: Mapping[str, Plan],
        seconds: Mapping[str, float],
        kinds: Sequence[str],
        devices: int,
        again: Mapping[str, Sequence[str]],
    ) -> None:
        """Store the probes, and compute the seconds of a launch and the work of each probe.

        Args:
            plans: The plan of each probe by name.
            seconds: The seconds of one run of each probe by name.
            kinds: Names of the dtypes of weights that were measured.
            devices: Number of devices that worked at once.
            again: Groups of matrix-vector probes that ran in turn, by name. A cache holds a share of the weights of a
                group.
        """
        self.plans, self.seconds, self.kinds, self.devices, self.again = plans, seconds, kinds, devices, again
        self.launches = {name: sum(plan.lanes[0].launches()) for name, plan in plans.items()}
        self.launch = seconds["launches"] / self.launches["launches"]
        self.work = {name: _work(plan) for name, plan in plans.items()}

    def speeds(self) -> Speeds:
        """Return the speeds of the devices, and of collectives and messages if there are several devices."""
        own = Speeds(
            {kind: 1 / seconds for kind, seconds in self.far.items()},
            {kind: 1 / seconds for kind, seconds in self.flop.items()},
            self.launch,
            plain_flops=1 / self.plain,
            recurrent_flops=1 / self.recurrent,
            value_bandwidth=1 / self.value,
            state_bandwidth=1 / self.state,
            unpacking={kind: 1 / byte for kind, (_, byte) in self.of_many.items()},
            cached={kind: 1 / seconds for kind, seconds in self.near.items()},
            held=self.held,
        )
        if self.devices == 1:
            return own
        link, latency = self.links()
        computes, reads = self.alone()
        return replace(own, link_bandwidth=link, link_latency=latency, alone_flops=computes, alone_bandwidth=reads)

    @property
    def plain(self) -> float:
        """The seconds of a FLOP of ops without weights."""
        return self.plain_and_value[0]

    @property
    def value(self) -> float:
        """The seconds of a byte of activations."""
        return self.plain_and_value[1]

    @cached_property
    def plain_and_value(self) -> tuple[float, float]:
        """The seconds of a FLOP without weights and of a byte of activations, solved from two probes."""
        names = ("attention", "values")
        return _each([(self.work[name].flops, self.work[name].nbytes, self.beyond(name)) for name in names])

    @property
    def recurrent(self) -> float:
        """The seconds of a FLOP of a recurrence; repeated runs read their operands from caches."""
        work = self.work["recurrence"]
        return self.each("recurrence", work.flops, work.nbytes * self.value)

    @property
    def state(self) -> float:
        """The seconds of a byte of states."""
        work = self.work["states"]
        return self.each("states", work.kept, work.flops * self.plain + (work.nbytes - work.kept) * self.value)

    @cached_property
    def of_many(self) -> dict[str, tuple[float, float]]:
        """The seconds of a FLOP and of a weight byte in matrix products with many rows, by dtype."""

        def of(kind: str) -> tuple[float, float]:
            names = (f"rows {kind}", f"few {kind}")
            return _each([(self.work[name].flops, self.work[name].kept, self.beyond(name)) for name in names])

        return {kind: of(kind) for kind in self.kinds}

    @property
    def flop(self) -> dict[str, float]:
        """The seconds of a FLOP in matrix products with many rows, by dtype."""
        return {kind: flop for kind, (flop, _) in self.of_many.items()}

    @cached_property
    def far(self) -> dict[str, float]:
        """The seconds of a weight byte that a matrix-vector product reads from memory, by dtype."""
        return {kind: self.each_byte(f"read {kind}", kind) for kind in self.kinds}

    @cached_property
    def near(self) -> dict[str, float]:
        """The seconds of a weight byte that a matrix-vector product reads from a cache, by dtype."""
        return {kind: min(self.far[kind], self.each_byte(f"cached {kind}", kind)) for kind in self.kinds}

    @property
    def held(self) -> dict[str, float]:
        """The share of repeatedly read bytes that come from caches, by the bytes that all devices read.

        The share never grows with the number of bytes.
        """
        share, shares = 1.0, {}
        for name, probes in self.again.items():
            weights = [(self.work[probe].kept, probe.split()[1]) for probe in probes]
            others = sum(self.beside(probe, kind) for probe, (_, kind) in zip(probes, weights, strict=True))
            reading = self.seconds[name] - self.launch * sum(self.launches[probe] for probe in probes) - others
            memory, cache = (sum(nbytes * each[kind] for nbytes, kind in weights) for each in (self.far, self.near))
            share = min(share, max(0.0, (memory - reading) / (memory - cache))) if memory > cache else 0.0
            shares[str(self.devices * sum(nbytes for nbytes, _ in weights))] = share
        return shares

    def links(self) -> tuple[float, float]:
        """Return the bytes/s of messages between two devices, and the seconds of one all-reduce of theirs.

        Each is the difference of two probes: with communication and without. The bandwidth is at most 1e13 bytes/s.
        """
        short, long, latency = (
            max(0.0, self.seconds[with_it] - self.seconds[without]) / max(1, self.plans[with_it].cost.meetings)
            for with_it, without in (*((f"there {n}", f"here {n}") for n in (SHORT, LONG)), ("sums", "summands"))
        )
        moved = 4 * (LONG - SHORT)
        return moved / max(long - short, moved / 1e13), latency

    def alone(self) -> tuple[float, float]:
        """Return how many times as fast a device computes, and reads memory, while all other devices wait.

        Each factor is the median over the dtypes that were measured on one device too, and at least 1.
        """
        names = [name.partition(" ")[2] for name in self.seconds if name.startswith("alone ")]
        ratios = {name: self.beyond(name) / self.beyond(name, self.seconds[f"alone {name}"]) for name in names}
        computes, reads = (
            max(1.0, median(ratio for name, ratio in ratios.items() if name.startswith(what)))
            for what in ("rows", "read")
        )
        return computes, reads

    def beyond(self, name: str, seconds: float | None = None) -> float:
        """Return the seconds of a probe without its launches, and at least a tenth of its seconds.

        Args:
            name: Name of the probe.
            seconds: Seconds of another run of this probe; None for the seconds of the fit.
        """
        total = self.seconds[name] if seconds is None else seconds
        return max(total - self.launch * self.launches[name], total / 10)

    def each(self, name: str, count: float, others: float) -> float:
        """Return the seconds of one item of the work that dominates a probe.

        At least a tenth of the seconds without launches count as the time of these items.

        Args:
            name: Name of the probe.
            count: Number of items, for example FLOPs or bytes.
            others: Seconds of the other work of the probe, launches excluded.
        """
        return max(self.beyond(name) - others, self.beyond(name) / 10) / count

    def each_byte(self, name: str, kind: str) -> float:
        """Return the seconds in which a matrix-vector probe reads a byte of weights of dtype `kind`."""
        return self.each(name, self.work[name].kept, self.beside(name, kind))

    def beside(self, name: str, kind: str) -> float:
        """Return the seconds of a matrix-vector probe except launches and weight reads.

        These are the longer of two times: arithmetic and activations. A product loads activations during arithmetic.
        """
        work = self.work[name]
        return max(work.flops * self.flop[kind], (work.nbytes - work.kept) * self.value)


def _work(plan: Plan) -> Work:
    """Return the FLOPs, the bytes, and the bytes of weights and states of all nodes of the graph of a plan."""
    counts = Counts()
    works = [counts.of(node) for node in plan.graph.nodes if not node.is_leaf]
    return Work(sum(w.flops for w in works), sum(w.nbytes for w in works), sum(w.kept for w in works))


def _each(equations: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Solve two equations ``a * x + b * y = seconds`` for the seconds per unit `x` and `y` of two kinds of work.

    `x` dominates the first equation and `y` the second one. At least a tenth of the seconds of each equation counts as
    the time of its dominant kind.

    Args:
        equations: Two tuples of `a`, `b` and `seconds`.
    """
    (a, b, s), (c, d, t) = equations
    first, second = (s * d - t * b) / (a * d - c * b), (t * a - s * c) / (a * d - c * b)
    return max(first, s / a / 10), max(second, t / d / 10)
