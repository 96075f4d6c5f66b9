"""Incremental propagation: derive the layouts of a set of factors from an assignment for a similar set.

The factor search tries each of many factors together with the chosen ones. A node is visited again only if one of
these has changed:

- the choice of a factor of its operands or results,
- the layout of an operand,
- the other users of an operand.

The result equals the result of `propagate_layouts`.
"""

from __future__ import annotations

from collections import defaultdict
from heapq import heapify, heappop, heappush

from ....graph.graph import Graph
from ....graph.node import Node, Value
from ..axes import Factor
from ..factor_layouts import FactorLayout
from ..factors import Factors
from ..propagation import (
    LayoutConversion,
    LayoutPropagation,
    ShardingAssignment,
    propagate_until_no_weight_is_gathered,
)


class IncrementalLayoutPropagator:
    """Derives the layouts for many sets of sharded factors, fast: each set starts from the layouts of a similar one."""

    def __init__(self, graph: Graph, factors: Factors) -> None:
        self.graph, self.factors, self.users_of_value = graph, factors, graph.users()
        self.node_positions = {node: at for at, node in enumerate(graph.nodes)}
        nodes_of_factor: dict[Factor, set[Node]] = defaultdict(set)
        for node in graph.nodes:
            for value in (*node.inputs, *node.results):
                for factor in factors.factors_of(value):
                    nodes_of_factor[factor].add(node)
        self.nodes_of_factor = nodes_of_factor
        uncut = LayoutPropagation(graph, factors, frozenset(), self.users_of_value, frozenset())
        self.unsharded_assignment, self.stored_values = uncut.propagate_and_convert_outputs(), uncut.stored_values

    def propagate_from_base(
        self, chosen_factors: frozenset[Factor], base_assignment: ShardingAssignment
    ) -> ShardingAssignment:
        """Derive the layouts for a set of factors from a base assignment; only nodes that may differ are visited.

        The result equals the result of `propagate_layouts`.

        Args:
            chosen_factors: The factors to shard.
            base_assignment: An assignment of the same graph, as similar as possible.
        """
        changed = set[Node]()
        for factor in chosen_factors ^ base_assignment.sharded_factors:
            changed |= self.nodes_of_factor[factor]
        changed |= {user for node in changed for source in node.inputs for user in self.users_of_value[source]}
        return propagate_until_no_weight_is_gathered(
            lambda whole: _ChangedNodesPropagation(self, chosen_factors, whole, base_assignment).propagate_changes(
                changed
            )
        )


class _ChangedNodesPropagation(LayoutPropagation):
    """A layout propagation that starts from a base assignment and visits only the nodes that may differ from it.

    Args:
        propagator: The graph, its factors and node positions.
        chosen_factors: The factors to shard.
        replicated_weights: Weights that stay whole though they have a chosen factor.
        base_assignment: The assignment from which this one is derived.
    """

    def __init__(
        self,
        propagator: IncrementalLayoutPropagator,
        chosen_factors: frozenset[Factor],
        replicated_weights: frozenset[Value],
        base_assignment: ShardingAssignment,
    ) -> None:
        super().__init__(
            propagator.graph, propagator.factors, chosen_factors, propagator.users_of_value, replicated_weights
        )
        produced_layouts, by, wants = (
            dict(base_assignment.produced_layouts),
            dict(base_assignment.node_layouts),
            dict(base_assignment.operand_layouts),
        )
        index_operands = dict(base_assignment.index_operands)
        self.assignment = ShardingAssignment(
            chosen_factors,
            produced_layouts,
            by,
            wants,
            index_operands,
            replicated_weights=replicated_weights,
            base_assignment=base_assignment,
        )
        self.node_positions, self.current_position, self.end_position = (
            propagator.node_positions,
            0,
            len(propagator.node_positions),
        )
        self.conversions_of_value: dict[Value, list[tuple[int, int, LayoutConversion]]] = defaultdict(
            list
        )  # position of the reader, and number
        for number, conversion in enumerate(base_assignment.conversions):
            if conversion.reader_node is not None:
                self.conversions_of_value[conversion.value].append(
                    (self.node_positions[conversion.reader_node], number, conversion)
                )
        self.conversion_count = len(base_assignment.conversions)
        self.stored_values, self.base_assignment = propagator.stored_values, base_assignment

    def propagate_changes(self, changed_nodes: set[Node]) -> ShardingAssignment:
        """Assign layouts again to the changed nodes, and to all nodes that depend on a layout that changes by that.

        Returns the new assignment of the whole graph.
        """
        nodes, out, base = self.graph.nodes, self.assignment, self.base_assignment
        leaves = {value.node for value in self.replicated_weights ^ base.replicated_weights}
        waiting = [self.node_positions[node] for node in {*changed_nodes, *leaves}]
        heapify(waiting)
        seen, fresh = set(waiting), list[Node]()
        while waiting:
            self.current_position = heappop(waiting)
            node = nodes[self.current_position]
            for source in node.inputs:
                if conversions := self.conversions_of_value.get(source):
                    self.conversions_of_value[source] = [
                        entry for entry in conversions if entry[0] != self.current_position
                    ]
            out.index_operands.pop(node, None)
            self._assign_node_layouts(node)
            fresh.append(node)
            differ = [v for v in node.results if out.produced_layouts[v] != base.produced_layouts[v]]
            if not node.is_leaf:
                operand_layouts = zip(node.inputs, out.operand_layouts[node], base.operand_layouts[node], strict=True)
                differ += [s for s, now, then in operand_layouts if now != then]
            for value in differ:
                for user in self.users_of_value[value]:
                    place = self.node_positions[user]
                    if place > self.current_position and place not in seen:
                        seen.add(place)
                        heappush(waiting, place)
        self.current_position = self.end_position
        self._add_output_conversions()
        entries = sorted(
            (entry for some in self.conversions_of_value.values() for entry in some), key=lambda entry: entry[:2]
        )
        out.conversions = [conversion for *_, conversion in entries]
        out.recomputed_nodes = tuple(fresh)
        return out

    def _is_converted_to_layout(self, value: Value, layout: FactorLayout) -> bool:
        """Return whether a conversion for an earlier node of the graph already gives `value` in this layout."""
        return any(
            c.target_layout == layout
            for place, _, c in self.conversions_of_value.get(value, ())
            if place <= self.current_position
        )

    def _is_weight_or_state(self, value: Value) -> bool:
        """Return whether `value` is a weight, a state or a view of one, as known when the current node is visited.

        Values that come after the current node do not count.
        """
        return value in self.stored_values and self.node_positions[value.node] < self.current_position

    def _record_conversion(self, conversion: LayoutConversion) -> None:
        """Record a layout conversion together with the position of the current node.

        If the node is visited again, the conversion can be replaced.
        """
        self.conversions_of_value[conversion.value].append((self.current_position, self.conversion_count, conversion))
        self.conversion_count += 1
