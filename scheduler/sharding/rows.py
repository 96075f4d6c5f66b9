"""Sequence parallelism: after a sum over all devices, each device computes only its rows.

After an all-reduce, every device has the whole sum, adds the residual and computes the norm of all rows. A
reduce-scatter gives each device its rows of the sum instead. The all-gather follows where all rows are needed. Both
together send the bytes of the all-reduce (Korthikanti et al., 2022).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from ...graph.graph import Graph
from ...graph.node import Value
from ..layout import REPLICATE
from ..machines.hardware import Hardware
from .assign import Assignment, Conversion, assign
from .axes import Factor
from .cost import Costs, collective_of
from .early import find_early_sums
from .factors import Factors
from .pins import Pins

GAIN = 0.03
"""The least share of the predicted time that sharded rows must save; predictions are not more exact."""


@dataclass(frozen=True)
class Laying:
    """A graph with chosen factors on `device_count` devices: rows between sums are replicated or sharded."""

    graph: Graph
    factors: Factors
    chosen: frozenset[Factor]
    pins: Pins
    devices: int
    hardware: Hardware
    shown: Collection[Value] = ()

    @cached_property
    def plain(self) -> Assignment:
        """The assignment with all rows whole."""
        return self._laid()

    def fastest(self) -> Assignment:
        """Return the assignment with whole rows, or with sharded rows where that is predicted to be faster."""
        if not (candidates := rows_of(self.plain, self.factors, self.devices)):
            return self.plain
        costs = Costs(self.graph, self.devices, self.hardware)
        best, least = self.plain, costs.estimate(self.plain).total * (1 - GAIN)
        for rows in candidates:
            dealt = self._laid(rows)
            if (seconds := costs.estimate(dealt).total) < least:
                best, least = dealt, seconds
        return best

    def with_less_work(self, rows: Factor, least: float) -> Assignment | None:
        """Return the assignment with sharded `rows` if that saves more than `least` seconds of compute, otherwise None.

        Where sums overlap with compute, only compute seconds can be saved.
        """
        dealt, costs = self._laid(rows), Costs(self.graph, self.devices, self.hardware)
        before, after = costs.estimate(self.plain), costs.estimate(dealt)
        return dealt if before.compute - after.compute > least else None

    def _laid(self, rows: Factor | None = None) -> Assignment:
        """Return the assignment, with sums taken early where that costs no more."""
        early = frozenset[Value]()
        while True:
            assignment = assign(self.graph, self.factors, self.chosen, self.pins, self.shown, rows, early)
            found = {c.value for c, _ in find_early_sums(assignment, self._seconds, rows)}
            if found <= early:
                return assignment
            early |= found

    def _seconds(self, conversion: Conversion) -> float:
        """Return the seconds of a collective."""
        return self.hardware.collective(*collective_of(conversion), range(self.devices)).seconds


def rows_of(plain: Assignment, factors: Factors, devices: int) -> list[Factor]:
    """Return the row factors of sums that end whole, which sequence parallelism may shard.

    Args:
        plain: An assignment with whole rows.
        factors: The factors of its graph.
        devices: The number of devices; a row factor has at least as many indices, and no weight or state has it.
    """
    sums = [c.value for c in plain.conversions if c.before.is_owed and c.after is REPLICATE]
    every = dict.fromkeys(f for value in sums for axis in factors.axes(value) for part in axis for f in part)
    if not (enough := [f for f in every if f.can_be_cut and f.size >= devices > 1]):
        return []
    stored = {f for value in plain.made if value.node.op in ("weight", "state") for f in factors.of(value)}
    return [f for f in enough if f not in stored]
