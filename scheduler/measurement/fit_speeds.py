"""Speed fit: compute the speeds of the hardware model from the seconds of probe runs.

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

from ..costs.hardware import WorkCounter, WorkEstimate
from ..costs.speeds import Speeds
from ..ir.execution_plan import Plan
from .probe_graphs import LONG_CHAIN_WIDTH, SHORT_CHAIN_WIDTH


class SpeedFit:
    """Computes the speeds of a device group from the measured seconds of small graphs, called probes.

    Properties are seconds per unit of work, such as a FLOP or a byte. `compute_speeds` returns their inverses.
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
        self.plans, self.probe_seconds, self.dtypes, self.device_count, self.reread_probes = (
            plans,
            seconds,
            kinds,
            devices,
            again,
        )
        self.launch_counts = {
            name: sum(plan.device_plans[0].predict_launches_by_instruction()) for name, plan in plans.items()
        }
        self.launch_seconds = seconds["launches"] / self.launch_counts["launches"]
        self.work_by_probe = {name: _sum_plan_work(plan) for name, plan in plans.items()}

    def compute_speeds(self) -> Speeds:
        """Return the speeds of the devices. Several devices also have speeds of collectives and messages."""
        own = Speeds(
            {kind: 1 / seconds for kind, seconds in self.seconds_per_weight_byte.items()},
            {kind: 1 / seconds for kind, seconds in self.seconds_per_weight_flop.items()},
            self.launch_seconds,
            plain_flops=1 / self.seconds_per_unweighted_flop,
            recurrent_flops=1 / self.seconds_per_recurrent_flop,
            value_bandwidth=1 / self.seconds_per_activation_byte,
            state_bandwidth=1 / self.seconds_per_state_byte_read,
            unpacking={kind: 1 / byte for kind, (_, byte) in self.prefill_seconds_per_flop_and_byte.items()},
            cached={kind: 1 / seconds for kind, seconds in self.seconds_per_cached_weight_byte.items()},
            held=self.cache_hit_share_by_bytes,
        )
        if self.device_count == 1:
            return own
        link, latency = self.compute_link_bandwidth_and_latency()
        computes, reads = self.compute_solo_speedups()
        return replace(own, link_bandwidth=link, link_latency=latency, alone_flops=computes, alone_bandwidth=reads)

    @property
    def seconds_per_unweighted_flop(self) -> float:
        """The seconds per FLOP of ops without weights, such as attention."""
        return self.seconds_per_unweighted_flop_and_activation_byte[0]

    @property
    def seconds_per_activation_byte(self) -> float:
        """The seconds to read or write one byte of activations."""
        return self.seconds_per_unweighted_flop_and_activation_byte[1]

    @cached_property
    def seconds_per_unweighted_flop_and_activation_byte(self) -> tuple[float, float]:
        """The seconds per FLOP without weights, and the seconds per byte of activations, from two probes together."""
        names = ("attention", "values")
        return _solve_two_work_rate_equations(
            [
                (self.work_by_probe[name].flops, self.work_by_probe[name].nbytes, self.subtract_launch_seconds(name))
                for name in names
            ]
        )

    @property
    def seconds_per_recurrent_flop(self) -> float:
        """The seconds per FLOP of a recurrent op (each token reads the last state), with operands in caches."""
        work = self.work_by_probe["recurrence"]
        return self.compute_dominant_seconds_per_item(
            "recurrence", work.flops, work.nbytes * self.seconds_per_activation_byte
        )

    @property
    def seconds_per_state_byte_read(self) -> float:
        """The seconds to read one byte of a state."""
        work = self.work_by_probe["states"]
        return self.compute_dominant_seconds_per_item(
            "states",
            work.stored_bytes,
            work.flops * self.seconds_per_unweighted_flop
            + (work.nbytes - work.stored_bytes) * self.seconds_per_activation_byte,
        )

    @cached_property
    def prefill_seconds_per_flop_and_byte(self) -> dict[str, tuple[float, float]]:
        """The seconds of one FLOP and of one weight byte in products with many rows (prefill), by weight dtype."""

        def of(kind: str) -> tuple[float, float]:
            names = (f"rows {kind}", f"few {kind}")
            return _solve_two_work_rate_equations(
                [
                    (
                        self.work_by_probe[name].flops,
                        self.work_by_probe[name].stored_bytes,
                        self.subtract_launch_seconds(name),
                    )
                    for name in names
                ]
            )

        return {kind: of(kind) for kind in self.dtypes}

    @property
    def seconds_per_weight_flop(self) -> dict[str, float]:
        """The seconds of one FLOP in matrix products, by dtype of the weights. The products have many rows."""
        return {kind: flop for kind, (flop, _) in self.prefill_seconds_per_flop_and_byte.items()}

    @cached_property
    def seconds_per_weight_byte(self) -> dict[str, float]:
        """The seconds in which a matrix-vector product reads one weight byte from memory, by dtype of the weights."""
        return {kind: self.compute_probe_seconds_per_weight_byte(f"read {kind}", kind) for kind in self.dtypes}

    @cached_property
    def seconds_per_cached_weight_byte(self) -> dict[str, float]:
        """The seconds in which a matrix-vector product reads one weight byte from a cache, by dtype of the weights."""
        return {
            kind: min(
                self.seconds_per_weight_byte[kind], self.compute_probe_seconds_per_weight_byte(f"cached {kind}", kind)
            )
            for kind in self.dtypes
        }

    @property
    def cache_hit_share_by_bytes(self) -> dict[str, float]:
        """The fraction of repeatedly read bytes that caches supply, by the number of bytes that all devices read.

        Measurement errors are smoothed: the fraction never grows with the number of bytes.
        """
        share, shares = 1.0, {}
        for name, probes in self.reread_probes.items():
            weights = [(self.work_by_probe[probe].stored_bytes, probe.split()[1]) for probe in probes]
            others = sum(
                self.estimate_arithmetic_or_activation_seconds(probe, kind)
                for probe, (_, kind) in zip(probes, weights, strict=True)
            )
            reading = (
                self.probe_seconds[name]
                - self.launch_seconds * sum(self.launch_counts[probe] for probe in probes)
                - others
            )
            memory, cache = (
                sum(nbytes * each[kind] for nbytes, kind in weights)
                for each in (self.seconds_per_weight_byte, self.seconds_per_cached_weight_byte)
            )
            share = min(share, max(0.0, (memory - reading) / (memory - cache))) if memory > cache else 0.0
            shares[str(self.device_count * sum(nbytes for nbytes, _ in weights))] = share
        return shares

    def compute_link_bandwidth_and_latency(self) -> tuple[float, float]:
        """Return the bandwidth and the latency of the link between two devices.

        Each figure is from the difference between a probe with communication and one without. The bandwidth is in
        bytes/s of messages, at most 1e13. The latency is the seconds of one small all-reduce.
        """
        short, long, latency = (
            max(0.0, self.probe_seconds[with_it] - self.probe_seconds[without])
            / max(1, self.plans[with_it].cost.collective_count)
            for with_it, without in (
                *((f"there {n}", f"here {n}") for n in (SHORT_CHAIN_WIDTH, LONG_CHAIN_WIDTH)),
                ("sums", "summands"),
            )
        )
        moved = 4 * (LONG_CHAIN_WIDTH - SHORT_CHAIN_WIDTH)
        return moved / max(long - short, moved / 1e13), latency

    def compute_solo_speedups(self) -> tuple[float, float]:
        """Return how much faster one device is while the other devices are idle.

        Returns:
            The factor for arithmetic and the factor for memory reads, each at least 1. Each is the median over the
            dtypes that were also measured on one device.
        """
        names = [name.partition(" ")[2] for name in self.probe_seconds if name.startswith("alone ")]
        ratios = {
            name: self.subtract_launch_seconds(name)
            / self.subtract_launch_seconds(name, self.probe_seconds[f"alone {name}"])
            for name in names
        }
        computes, reads = (
            max(1.0, median(ratio for name, ratio in ratios.items() if name.startswith(what)))
            for what in ("rows", "read")
        )
        return computes, reads

    def subtract_launch_seconds(self, name: str, seconds: float | None = None) -> float:
        """Return the seconds of a probe without its kernel launches.

        The result is at least a tenth of the measured seconds.

        Args:
            name: Name of the probe.
            seconds: Seconds of another run of this probe; None for the seconds of the fit.
        """
        total = self.probe_seconds[name] if seconds is None else seconds
        return max(total - self.launch_seconds * self.launch_counts[name], total / 10)

    def compute_dominant_seconds_per_item(self, name: str, count: float, other_seconds: float) -> float:
        """Return the seconds per item (such as a FLOP or a byte) of the work that dominates a probe.

        The seconds of its other work are subtracted. At least a tenth of the time without launches is left for the
        items.

        Args:
            name: Name of the probe.
            count: Number of items.
            other_seconds: Seconds of the other work of the probe, launches excluded.
        """
        return max(self.subtract_launch_seconds(name) - other_seconds, self.subtract_launch_seconds(name) / 10) / count

    def compute_probe_seconds_per_weight_byte(self, name: str, kind: str) -> float:
        """Return the seconds in which a matrix-vector probe reads one byte of weights.

        Args:
            name: Name of the probe.
            kind: The dtype of its weights.
        """
        return self.compute_dominant_seconds_per_item(
            name, self.work_by_probe[name].stored_bytes, self.estimate_arithmetic_or_activation_seconds(name, kind)
        )

    def estimate_arithmetic_or_activation_seconds(self, name: str, kind: str) -> float:
        """Estimate the seconds of a matrix-vector probe that are neither kernel launches nor reads of weights.

        The result is the longer of the arithmetic time and the activation time, because a product loads activations
        during arithmetic.

        Args:
            name: Name of the probe.
            kind: The dtype of its weights.
        """
        work = self.work_by_probe[name]
        return max(
            work.flops * self.seconds_per_weight_flop[kind],
            (work.nbytes - work.stored_bytes) * self.seconds_per_activation_byte,
        )


def _sum_plan_work(plan: Plan) -> WorkEstimate:
    """Return the FLOPs and bytes of all nodes of a plan's graph together."""
    counts = WorkCounter()
    works = [counts.count_work(node) for node in plan.graph.nodes if not node.is_leaf]
    return WorkEstimate(sum(w.flops for w in works), sum(w.nbytes for w in works), sum(w.stored_bytes for w in works))


def _solve_two_work_rate_equations(equations: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Solve two equations ``a * x + b * y = seconds`` for `x` and `y`, the seconds per unit of two kinds of work.

    Example: two probes with different amounts of FLOPs and bytes give the seconds per FLOP and per byte. `x` must
    dominate the first equation, and `y` the second. Each keeps at least a tenth of the seconds of its equation, so
    both results are positive in spite of measurement errors.

    Args:
        equations: Two tuples of `a`, `b` and `seconds`.
    """
    (a, b, s), (c, d, t) = equations
    first, second = (s * d - t * b) / (a * d - c * b), (t * a - s * c) / (a * d - c * b)
    return max(first, s / a / 10), max(second, t / d / 10)
