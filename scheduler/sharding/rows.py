"""Rows between sums: where a sum over all devices is followed by work on its rows, each device does that for its own.

After an all-reduce every device has the whole sum, and all of them add the residual and take the norm of it.  A
reduce-scatter gives each its rows of the sum; the all-gather, which follows where rows are needed whole, sends what
the all-reduce would have sent in its second half (sequence parallelism: Korthikanti et al., 2022).
"""

from __future__ import annotations

from collections.abc import Collection

from ...graph.graph import Graph
from ...graph.node import Value
from ..layout import REPLICATE
from ..machines.hardware import Hardware
from .assign import Assignment, assign
from .axes import Factor
from .cost import Costs
from .factors import Factors
from .pins import Pins

GAIN = 0.03
"""Part of the time of a run that it has to save: what is predicted is not known better."""


def with_rows(
    graph: Graph,
    factors: Factors,
    chosen: frozenset[Factor],
    pins: Pins,
    devices: int,
    hardware: Hardware,
    plain: Assignment,
    shown: Collection[Value] = (),
) -> Assignment:
    """`plain`, which `assign` gave, or the same with the rows of sums dealt where that is predicted to be faster."""
    if not (candidates := rows_of(plain, factors, devices)):
        return plain
    costs = Costs(graph, devices, hardware)
    best, least = plain, costs.estimate(plain).total * (1 - GAIN)
    for rows in candidates:
        dealt = assign(graph, factors, chosen, pins, shown, rows)
        if (seconds := costs.estimate(dealt).total) < least:
            best, least = dealt, seconds
    return best


def with_less_work(
    graph: Graph,
    factors: Factors,
    chosen: frozenset[Factor],
    pins: Pins,
    devices: int,
    hardware: Hardware,
    plain: Assignment,
    rows: Factor,
    least: float,
    shown: Collection[Value] = (),
) -> Assignment | None:
    """`plain` with these rows dealt, if that saves more seconds of the devices' own work than `least`: where sums are
    hidden beside work, nothing else can be saved."""
    dealt, costs = assign(graph, factors, chosen, pins, shown, rows), Costs(graph, devices, hardware)
    before, after = costs.estimate(plain), costs.estimate(dealt)
    return dealt if before.compute - after.compute > least else None


def rows_of(plain: Assignment, factors: Factors, devices: int) -> list[Factor]:
    """Factors of sums that end whole on every device, enough for each to have some: those of no weight or state."""
    sums = [c.value for c in plain.conversions if c.before.is_owed and c.after is REPLICATE]
    every = dict.fromkeys(f for value in sums for axis in factors.axes(value) for part in axis for f in part)
    if not (enough := [f for f in every if f.can_be_cut and f.size >= devices > 1]):
        return []
    stored = {f for value in plain.made if value.node.op in ("weight", "state") for f in factors.of(value)}
    return [f for f in enough if f not in stored]
