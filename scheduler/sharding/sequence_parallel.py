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
from ..costs.hardware import Hardware
from ..ir.layout import REPLICATE
from .axes import Factor
from .cost import AssignmentCost, choose_conversion_collective
from .early_sums import find_partial_sums_to_reduce_early
from .factors import Factors
from .pins import Pins
from .propagation import LayoutConversion, ShardingAssignment, propagate_layouts

MIN_GAIN = 0.03
"""The least share of the predicted time that sharded rows must save; predictions are not more exact."""


@dataclass(frozen=True)
class SequenceParallelChooser:
    """Chooses whether each device computes all rows after a sum over devices, or only its shard (sequence parallelism).

    - `chosen_factors`: the factors that are sharded in any case.
    - `pins`: nodes on one device, and leaves with a fixed layout.
    - `replicated_values`: values that end whole on every device.
    """

    graph: Graph
    factors: Factors
    chosen_factors: frozenset[Factor]
    pins: Pins
    device_count: int
    hardware: Hardware
    replicated_values: Collection[Value] = ()

    @cached_property
    def replicated_rows_assignment(self) -> ShardingAssignment:
        """The layouts without sequence parallelism: every device computes all rows after a sum over devices."""
        return self._propagate_and_reduce_sums_early()

    def choose_sharded_rows_at_min_gain(self) -> ShardingAssignment:
        """Choose sequence parallelism if it saves the share `MIN_GAIN` of the predicted time, else replicated rows."""
        if not (
            candidates := list_row_factors_of_whole_sums(
                self.replicated_rows_assignment, self.factors, self.device_count
            )
        ):
            return self.replicated_rows_assignment
        costs = AssignmentCost(self.graph, self.device_count, self.hardware)
        best, best_seconds = (
            self.replicated_rows_assignment,
            costs.estimate_run_time(self.replicated_rows_assignment).total * (1 - MIN_GAIN),
        )
        for rows in candidates:
            assignment = self._propagate_and_reduce_sums_early(rows)
            if (seconds := costs.estimate_run_time(assignment).total) < best_seconds:
                best, best_seconds = assignment, seconds
        return best

    def shard_rows_if_saving(self, row_factor: Factor, min_saving_seconds: float) -> ShardingAssignment | None:
        """Return the assignment with sharded rows if it saves enough seconds of kernels, otherwise None.

        Collective seconds do not count, because the caller overlaps the sums with compute.

        Args:
            row_factor: The factor of the rows.
            min_saving_seconds: The seconds of kernels that sharded rows must save, at least.
        """
        assignment, costs = (
            self._propagate_and_reduce_sums_early(row_factor),
            AssignmentCost(self.graph, self.device_count, self.hardware),
        )
        before, after = costs.estimate_run_time(self.replicated_rows_assignment), costs.estimate_run_time(assignment)
        return assignment if before.compute - after.compute > min_saving_seconds else None

    def _propagate_and_reduce_sums_early(self, row_factor: Factor | None = None) -> ShardingAssignment:
        """Derive the layouts so that one early sum over devices replaces several later ones.

        An early sum is chosen only where it costs no more.

        Args:
            row_factor: The factor that shards the rows; None for replicated rows.
        """
        early = frozenset[Value]()
        while True:
            assignment = propagate_layouts(
                self.graph, self.factors, self.chosen_factors, self.pins, self.replicated_values, row_factor, early
            )
            found = {
                c.value
                for c, _ in find_partial_sums_to_reduce_early(assignment, self._estimate_collective_seconds, row_factor)
            }
            if found <= early:
                return assignment
            early |= found

    def _estimate_collective_seconds(self, conversion: LayoutConversion) -> float:
        """Estimate the seconds of the collective of a layout conversion."""
        return self.hardware.estimate_fastest_collective_cost(
            *choose_conversion_collective(conversion), range(self.device_count)
        ).seconds


def list_row_factors_of_whole_sums(assignment: ShardingAssignment, factors: Factors, device_count: int) -> list[Factor]:
    """List the factors that sequence parallelism may shard: row indices of partial sums that end whole.

    A row factor has at least `device_count` indices, and no weight or state has it.

    Args:
        assignment: An assignment with whole rows.
        factors: The factors of its graph.
        device_count: The number of devices.
    """
    sums = [c.value for c in assignment.conversions if c.source_layout.is_partial and c.target_layout is REPLICATE]
    every = dict.fromkeys(f for value in sums for axis in factors.axes_of(value) for part in axis for f in part)
    if not (enough := [f for f in every if f.can_be_sharded and f.size >= device_count > 1]):
        return []
    stored = {
        f
        for value in assignment.produced_layouts
        if value.node.op in ("weight", "state")
        for f in factors.factors_of(value)
    }
    return [f for f in enough if f not in stored]
