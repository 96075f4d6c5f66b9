"""What the seconds of probes say: the speeds by which plans predict seconds.

A run takes the seconds of its launches, of its arithmetic and of what it reads.  Each probe is mostly about one of
them.  The others are known from other probes, and what they take is subtracted: a product of a vector with weights of
64 MiB in 2.7 ms, with launches of 0.1 ms and arithmetic of 0.3 ms, reads them in 2.3 ms.
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
    """Speeds of so many devices from the plans of probes and the seconds of their runs, by name; `again` names the
    probes of products with a vector that were run in turn, so that caches hold a share of what these read."""

    def __init__(
        self,
        plans: Mapping[str, Plan],
        seconds: Mapping[str, float],
        kinds: Sequence[str],
        devices: int,
        again: Mapping[str, Sequence[str]],
    ) -> None:
        self.plans, self.seconds, self.kinds, self.devices, self.again = plans, seconds, kinds, devices, again
        self.launches = {name: sum(plan.lanes[0].launches()) for name, plan in plans.items()}
        self.launch = seconds["launches"] / self.launches["launches"]
        self.work = {name: _work(plan) for name, plan in plans.items()}

    def speeds(self) -> Speeds:
        """Of devices; of sums and messages if there are several."""
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
        """Seconds of a FLOP without weights."""
        return self.plain_and_value[0]

    @property
    def value(self) -> float:
        """Seconds of a byte that ops hand on."""
        return self.plain_and_value[1]

    @cached_property
    def plain_and_value(self) -> tuple[float, float]:
        names = ("attention", "values")
        return _each([(self.work[name].flops, self.work[name].nbytes, self.beyond(name)) for name in names])

    @property
    def recurrent(self) -> float:
        """Seconds of a FLOP of tokens that follow each other; a run after another finds in caches what it reads."""
        work = self.work["recurrence"]
        return self.each("recurrence", work.flops, work.nbytes * self.value)

    @property
    def state(self) -> float:
        """Seconds of a byte of states."""
        work = self.work["states"]
        return self.each("states", work.kept, work.flops * self.plain + (work.nbytes - work.kept) * self.value)

    @cached_property
    def of_many(self) -> dict[str, tuple[float, float]]:
        """Seconds of a FLOP and of a byte of weights where these are multiplied with many vectors."""

        def of(kind: str) -> tuple[float, float]:
            names = (f"rows {kind}", f"few {kind}")
            return _each([(self.work[name].flops, self.work[name].kept, self.beyond(name)) for name in names])

        return {kind: of(kind) for kind in self.kinds}

    @property
    def flop(self) -> dict[str, float]:
        return {kind: flop for kind, (flop, _) in self.of_many.items()}

    @cached_property
    def far(self) -> dict[str, float]:
        """Seconds of a byte of weights that come from memory, multiplied with one vector."""
        return {kind: self.each_byte(f"read {kind}", kind) for kind in self.kinds}

    @cached_property
    def near(self) -> dict[str, float]:
        """Those of a byte that caches hold."""
        return {kind: min(self.far[kind], self.each_byte(f"cached {kind}", kind)) for kind in self.kinds}

    @property
    def held(self) -> dict[str, float]:
        """The share of what runs read again that they find in caches, by the bytes that all devices read; it is never
        more of more."""
        least, shares = 1.0, {}
        for name, probes in self.again.items():
            kept = [(self.work[probe].kept, probe.split()[1]) for probe in probes]
            beside = sum(self.beside(probe, kind) for probe, (_, kind) in zip(probes, kept, strict=True))
            reading = self.seconds[name] - self.launch * sum(self.launches[probe] for probe in probes) - beside
            far, near = (sum(nbytes * each[kind] for nbytes, kind in kept) for each in (self.far, self.near))
            least = min(least, max(0.0, (far - reading) / (far - near))) if far > near else 0.0
            shares[str(self.devices * sum(nbytes for nbytes, _ in kept))] = least
        return shares

    def links(self) -> tuple[float, float]:
        """Bytes/s of messages between two devices, and seconds in which these meet."""
        short, long, latency = (
            max(0.0, self.seconds[with_it] - self.seconds[without]) / max(1, self.plans[with_it].cost.meetings)
            for with_it, without in (*((f"there {n}", f"here {n}") for n in (SHORT, LONG)), ("sums", "summands"))
        )
        moved = 4 * (LONG - SHORT)
        return moved / max(long - short, moved / 1e13), latency

    def alone(self) -> tuple[float, float]:
        """How many times as fast a device computes whose fellows wait, and reads memory."""
        names = [name.partition(" ")[2] for name in self.seconds if name.startswith("alone ")]
        ratios = {name: self.beyond(name) / self.beyond(name, self.seconds[f"alone {name}"]) for name in names}
        computes, reads = (
            max(1.0, median(ratio for name, ratio in ratios.items() if name.startswith(what)))
            for what in ("rows", "read")
        )
        return computes, reads

    def beyond(self, name: str, seconds: float | None = None) -> float:
        """The seconds that are no launches; at least a tenth."""
        whole = self.seconds[name] if seconds is None else seconds
        return max(whole - self.launch * self.launches[name], whole / 10)

    def each(self, name: str, count: float, others: float) -> float:
        """Seconds of one of so many that a run is mostly about; `others` are those of all else, which are few."""
        return max(self.beyond(name) - others, self.beyond(name) / 10) / count

    def each_byte(self, name: str, kind: str) -> float:
        return self.each(name, self.work[name].kept, self.beside(name, kind))

    def beside(self, name: str, kind: str) -> float:
        """Seconds of products with a vector that are not those of reading weights."""
        work = self.work[name]
        return max(work.flops * self.flop[kind], (work.nbytes - work.kept) * self.value)


def _work(plan: Plan) -> Work:
    """What the first device does in all."""
    counts = Counts()
    each = [counts.of(node) for node in plan.graph.nodes if not node.is_leaf]
    return Work(sum(w.flops for w in each), sum(w.nbytes for w in each), sum(w.kept for w in each))


def _each(equations: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Seconds of one of a first thing and of one of a second, where so many of them take so many seconds together; the
    first equation is mostly about the first thing, the other about the second, whose tenth each takes at least."""
    (a, b, s), (c, d, t) = equations
    first, second = (s * d - t * b) / (a * d - c * b), (t * a - s * c) / (a * d - c * b)
    return max(first, s / a / 10), max(second, t / d / 10)
