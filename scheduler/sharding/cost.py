"""The predicted time of one run of a graph over equal devices, for a sharding assignment.

The time is the sum of the kernels on the busiest device and of the collectives, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ...graph.graph import Graph
from ...graph.node import Node, Value
from ...ops import op_of
from ...ops.movement.sharded_tables import estimate_busiest_device_entries
from ..costs.hardware import (
    STORED_LEAF_OPS,
    Estimate,
    Hardware,
    WorkCounter,
    find_memory_owner_node,
)
from .early_sums import find_partial_sums_to_reduce_early
from .factor_layouts import FactorShard
from .propagation import LayoutConversion, ShardingAssignment


class AssignmentCost:
    """Estimates the time of one run for each way to shard a graph that the planner considers.

    A sharding assignment gives each value its layout over the devices, which are all equally fast.

    Args:
        graph: The graph.
        device_count: The number of devices.
        hardware: The speeds of each device and of the links.
        node_multiplicity: For a graph in which one layer stands for several, the number of original nodes of each
            node.
    """

    def __init__(
        self, graph: Graph, device_count: int, hardware: Hardware, node_multiplicity: Mapping[Node, int] | None = None
    ) -> None:
        self.device_count, self.hardware, self.node_multiplicity = device_count, hardware, node_multiplicity or {}
        counts = WorkCounter()
        self.node_work = {n: counts.count_work(n) for n in graph.nodes if not n.is_leaf and not op_of(n).is_view}
        self.stored_values = [n.results[0] for n in graph.nodes if n.op in ("weight", "state")]
        self._item_positions = {
            node: at for at, node in enumerate((*self.node_work, *(v.node for v in self.stored_values)))
        }
        self._cached_costs: dict[int, tuple[ShardingAssignment, list[float]]] = {}
        self._collective_seconds: dict[tuple[str, int], float] = {}

    def estimate_run_time(self, assignment: ShardingAssignment) -> Estimate:
        """Estimate the time of one run: the kernels of the busiest device and all collectives, one after the other.

        A partial sum may be reduced early: one all-reduce then replaces several later ones, if it costs no more.
        """
        times, compute = (
            self.node_multiplicity,
            sum(self._compute_node_seconds_and_leaf_bytes(assignment)[: len(self.node_work)]),
        )
        sent = [c for c in assignment.conversions if not c.needs_no_communication]
        seconds, count = (
            sum(map(self._estimate_conversion_seconds_of_all_layers, sent)),
            sum(times.get(c.value.node, 1) for c in sent),
        )
        for one, sums in find_partial_sums_to_reduce_early(assignment, self._estimate_conversion_seconds_of_all_layers):
            seconds -= sum(
                map(self._estimate_conversion_seconds_of_all_layers, sums)
            ) - self._estimate_conversion_seconds_of_all_layers(one)
            count -= sum(times.get(c.value.node, 1) for c in sums) - times.get(one.value.node, 1)
        return Estimate(compute, seconds, count)

    def _estimate_conversion_seconds_of_all_layers(self, conversion: LayoutConversion) -> float:
        """Estimate the seconds of a layout conversion's collective in all layers for which its node stands."""
        return self.node_multiplicity.get(conversion.value.node, 1) * self.estimate_conversion_seconds(conversion)

    def compute_max_stored_bytes(self, assignment: ShardingAssignment) -> float:
        """Compute the bytes of weights and states on the device that stores most of them."""
        return sum(self._compute_node_seconds_and_leaf_bytes(assignment)[len(self.node_work) :])

    def _compute_node_seconds_and_leaf_bytes(self, assignment: ShardingAssignment) -> list[float]:
        """Return a list of the seconds of each node that computes, followed by the bytes of each weight and state.

        Bytes are those on the device with the largest shard. If the assignment was derived from another one, only the
        items of recomputed nodes are computed again.
        """
        base = assignment.base_assignment
        if base is None:
            return [self._compute_node_seconds_or_leaf_bytes(node, assignment) for node in self._item_positions]
        if id(base) not in self._cached_costs:
            self._cached_costs[id(base)] = base, self._compute_node_seconds_and_leaf_bytes(base)
        each = list(self._cached_costs[id(base)][1])
        for node in assignment.recomputed_nodes:
            if (at := self._item_positions.get(node)) is not None:
                each[at] = self._compute_node_seconds_or_leaf_bytes(node, assignment)
        return each

    def _compute_node_seconds_or_leaf_bytes(self, node: Node, assignment: ShardingAssignment) -> float:
        """Compute the seconds of a node, or the bytes of a weight or state.

        The bytes are those on the device with the largest shard.
        """
        if not node.is_leaf:
            return self.node_multiplicity.get(node, 1) * self.estimate_node_seconds(node, assignment)
        layout = assignment.produced_layouts[node.results[0]]
        size = layout.factor.size if isinstance(layout, FactorShard) else 0
        share = -(-size // self.device_count) / size if size else 1.0
        return self.node_multiplicity.get(node, 1) * node.specs[0].nbytes * share

    def estimate_node_seconds(self, node: Node, assignment: ShardingAssignment) -> float:
        """Estimate the seconds of the kernels of `node` on the device with the largest shard."""
        work = self.node_work[node]
        by = assignment.node_layouts[node]
        if isinstance(by, FactorShard):
            size = by.factor.size
            own = -(-size // self.device_count)
            share = max_share = own / size if size else 1.0
            if (ids := assignment.index_operands.get(node)) is not None and ids.spec.size:
                entries = ids.spec.size
                busy = estimate_busiest_device_entries(entries, own, size)
                share, max_share = busy / entries, min(own, busy) / min(size, entries)
            wants, layouts = assignment.operand_layouts[node], assignment.produced_layouts
            read = [v for v, w in zip(node.inputs, wants, strict=True) if not isinstance(w, FactorShard)]
            uncut = read + [v for v in node.results if not isinstance(layouts[v], FactorShard)]
            nbytes = _estimate_bytes_accessed_per_device(work.nbytes, uncut, max_share)
            stored_bytes = _estimate_bytes_accessed_per_device(
                work.stored_bytes,
                [v for v in read if find_memory_owner_node(v).op in STORED_LEAF_OPS],
                max_share,
            )
            work = work._replace(flops=work.flops * share, nbytes=nbytes, stored_bytes=stored_bytes)
        return self.hardware.compute_seconds(*work)

    def estimate_conversion_seconds(self, conversion: LayoutConversion) -> float:
        """Estimate the seconds of the collective of a layout conversion. The result is 0 if no bytes are sent."""
        if conversion.needs_no_communication or self.device_count == 1:
            return 0.0
        collective = choose_conversion_collective(conversion)
        if collective not in self._collective_seconds:
            self._collective_seconds[collective] = self.hardware.estimate_fastest_collective_cost(
                *collective, range(self.device_count)
            ).seconds
        return self._collective_seconds[collective]


def choose_conversion_collective(conversion: LayoutConversion) -> tuple[str, int]:
    """Choose the collective that stands for a layout conversion in estimates; return (op name, bytes of the value).

    It is an all-reduce for a partial sum that ends whole. It is an all-gather for all other conversions.
    """
    is_all_reduce = conversion.source_layout.is_partial and not isinstance(conversion.target_layout, FactorShard)
    return "all_reduce" if is_all_reduce else "all_gather", conversion.value.spec.nbytes


def _estimate_bytes_accessed_per_device(total_bytes: float, whole_values: Iterable[Value], share: float) -> float:
    """Estimate the bytes that one device reads and writes for a sharded node.

    Args:
        total_bytes: The bytes of all operands and results on one device without sharding.
        whole_values: The operands and results that each device has whole.
        share: The share of all other operands and results that the device has.
    """
    whole = min(total_bytes, sum(v.spec.nbytes for v in whole_values))
    return whole + (total_bytes - whole) * share
