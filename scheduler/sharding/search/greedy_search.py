"""The factor search: a greedy search over groups of factors, scored by the predicted time of the whole graph.

A factor is an index of the graph that a plan can shard, such as the KV heads.

1. Group the factors of repeated layers by their use, without names (`group_factors`). So the time of the search grows
   with the number of different subgraphs, not with the number of layers.
2. From no factor, add the group that saves most compute for each second of collectives, while the total time falls.
3. Among results of about equal time, take the one with the fewest bytes on each device.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from ....graph.errors import format_count
from ....graph.graph import Graph
from ....graph.node import Node, Value
from ...costs.hardware import Estimate, Hardware
from ...ir.formatting import format_bytes, format_seconds
from ...ir.layout import Layout, Shard
from ..axes import Factor
from ..cost import AssignmentCost
from ..factors import Factors
from ..propagation import ShardingAssignment
from ..shard_ranges import ShardRanges, factor_ranges_from_layout
from .collapse_layers import CollapsedGraph, collapse_repeated_layers_to_two
from .incremental_propagation import IncrementalLayoutPropagator

NO_MULTIPLICITY: Mapping[Node, int] = MappingProxyType({})
"""Every node stands for itself only."""
NO_LEAF_LAYOUTS: Mapping[str, Layout] = MappingProxyType({})
"""There is no earlier plan."""


@dataclass(frozen=True, slots=True)
class FactorChoice:
    """The chosen factors to shard, the considered alternatives as text, and predictions for one run.

    - `seconds` is the time of a run, and `communication_seconds` the part of it for collectives.
    - `unsharded_seconds` is the time without sharding.
    - `stored_bytes` counts weights and states on each device.
    """

    factors: frozenset[Factor]
    alternatives: tuple[str, ...] = ()
    seconds: float = math.inf
    unsharded_seconds: float = math.inf
    stored_bytes: float = math.inf
    communication_seconds: float = 0.0


class FactorSearch:
    """The search for the best factors (indices such as heads) of a graph to shard, for any number of devices.

    Of a sequence of equal layers only two are scored. The layouts for a set of factors do not depend on the number of
    devices, so they are derived once.
    """

    def __init__(self, graph: Graph, factors: Factors) -> None:
        self.graph, self.factors = graph, factors

    @cached_property
    def _full_graph_search(self) -> _GraphSearch:
        return _GraphSearch(self.graph, self.factors, NO_MULTIPLICITY)

    @cached_property
    def _collapsed_search(self) -> tuple[CollapsedGraph, _GraphSearch] | None:
        small = collapse_repeated_layers_to_two(self.graph)
        return (
            None if small is None else (small, _GraphSearch(small.graph, Factors(small.graph), small.node_multiplicity))
        )

    def choose_fastest_factors(self, device_count: int, hardware: Hardware, *, eager: bool = False) -> FactorChoice:
        """Choose the set of factors to shard that gives the least predicted time on this number of devices.

        Args:
            device_count: The number of devices.
            hardware: The speeds of each device and of the links.
            eager: Whether to shard also where kernels get shorter but collectives take more time than that saves; for
                mode ``tensor``.
        """
        if self._collapsed_search is not None:
            small, search = self._collapsed_search
            choice = search.choose_fastest_factors(device_count, hardware, eager)
            if (
                chosen := _map_factors_to_full_graph(self.graph, self.factors, small, search.factors, choice.factors)
            ) is not None:
                return replace(choice, factors=chosen)
        return self._full_graph_search.choose_fastest_factors(device_count, hardware, eager)


class _GraphSearch:
    """The factor search over one graph; it keeps the layouts that it derived for each set of sharded factors."""

    def __init__(self, graph: Graph, factors: Factors, node_multiplicity: Mapping[Node, int]) -> None:
        self.graph, self.factors, self.node_multiplicity = graph, factors, node_multiplicity
        self.factor_groups = group_factors(graph, factors, node_multiplicity)
        self._propagator = IncrementalLayoutPropagator(graph, factors)
        self._assignments: dict[frozenset[Factor], ShardingAssignment | None] = {
            frozenset(): self._propagator.unsharded_assignment
        }

    def find_or_derive_assignment(
        self, chosen_factors: frozenset[Factor], current_factors: frozenset[Factor]
    ) -> ShardingAssignment | None:
        """Find the layouts for `chosen_factors`; derive them from the layouts for `current_factors` if they are new.

        The result is None if the chosen factors would shard a weight or state along two axes.
        """
        if chosen_factors not in self._assignments:
            base = self._assignments[current_factors]
            assert base is not None
            fits = find_conflicting_leaf(self.graph, self.factors, chosen_factors) is None
            self._assignments[chosen_factors] = (
                self._propagator.propagate_from_base(chosen_factors, base) if fits else None
            )
        return self._assignments[chosen_factors]

    def choose_fastest_factors(self, device_count: int, hardware: Hardware, eager: bool) -> FactorChoice:
        """Choose the factors of this graph with the least predicted time, with the arguments of `FactorSearch`."""
        costs = AssignmentCost(self.graph, device_count, hardware, self.node_multiplicity)
        uncut = _score_assignment(costs, self._propagator.unsharded_assignment)
        notes = [f"uncut, each device does all: {_format_cost(uncut.estimate)}"]
        best = self._add_groups_greedily(costs, uncut, eager, notes)
        if not eager and best is not uncut:
            max_seconds = min(
                best.estimate.total * (1 + EQUAL_TIME_TOLERANCE), uncut.estimate.total * (1 - EQUAL_TIME_TOLERANCE)
            )
            best = self._add_groups_that_reduce_stored_bytes(costs, best, max_seconds, notes)
        return FactorChoice(
            best.factors,
            tuple(notes),
            best.estimate.total,
            uncut.estimate.total,
            best.stored_bytes,
            best.estimate.collectives,
        )

    def _score_added_groups(
        self, costs: AssignmentCost, group_names: Iterable[str], current: _ScoredFactors
    ) -> dict[str, _ScoredFactors]:
        """Score `current` with each of these groups added, by group name; conflicting groups are left out."""
        sets = {name: current.factors.union(self.factor_groups[name]) for name in group_names}
        assignments = {
            n: self.find_or_derive_assignment(chosen, current.factors)
            for n, chosen in sets.items()
            if chosen != current.factors
        }
        return {
            name: _score_assignment(costs, assignment)
            for name, assignment in assignments.items()
            if assignment is not None
        }

    def _add_groups_greedily(
        self, costs: AssignmentCost, unsharded: _ScoredFactors, eager: bool, notes: list[str]
    ) -> _ScoredFactors:
        """Add groups of factors, the best first, until none saves enough; `notes` explains each group."""
        current = unsharded
        while tried := self._score_added_groups(costs, self.factor_groups, current):
            saving_ratios = {
                name: _compute_kernel_saving_per_collective_second(current.estimate, score.estimate, eager)
                for name, score in tried.items()
            }
            ranked = sorted(tried, key=lambda n: -saving_ratios[n])
            name = ranked[0]
            if saving_ratios[name] <= 0:
                notes.append(f"no further cut pays: {name} gives {_format_cost(tried[name].estimate)}")
                break
            if not eager:
                first, pays = tried[name], [n for n in ranked if saving_ratios[n] > 0]
                equally_fast_names = [
                    n
                    for n in pays
                    if abs(tried[n].estimate.total - first.estimate.total)
                    <= EQUAL_TIME_TOLERANCE * first.estimate.total
                ]
                rivals = [
                    n
                    for n in equally_fast_names
                    if n == name
                    or self.find_or_derive_assignment(first.factors | tried[n].factors, first.factors) is None
                ]
                name = min(rivals, key=lambda n: tried[n].stored_bytes)
            beaten = "".join(
                f"; {_explain_choice(tried[name], tried[n], name == ranked[0])} {n}: {_format_cost(tried[n].estimate)}"
                for n in [n for n in ranked if n != name][:1]
            )
            notes.append(f"cut {name}: {_format_cost(tried[name].estimate)}{beaten}")
            current = tried[name]
        return current

    def _add_groups_that_reduce_stored_bytes(
        self, costs: AssignmentCost, current: _ScoredFactors, max_seconds: float, notes: list[str]
    ) -> _ScoredFactors:
        """Add groups of factors that reduce the stored bytes per device, while a run takes at most `max_seconds`."""
        left: Iterable[str] = self.factor_groups
        while True:
            tried = self._score_added_groups(costs, left, current)
            left = [
                n
                for n, score in tried.items()
                if score.estimate.total <= max_seconds and score.stored_bytes < current.stored_bytes
            ]
            if not left:
                return current
            name = min(left, key=lambda n: tried[n].stored_bytes)
            saved = format_bytes(int(current.stored_bytes - tried[name].stored_bytes))
            notes.append(
                f"cut {name}: {_format_cost(tried[name].estimate)}, about as long with {saved} less on each device"
            )
            current = tried[name]


def _map_factors_to_full_graph(
    graph: Graph,
    factors: Factors,
    collapsed: CollapsedGraph,
    collapsed_factors: Factors,
    chosen_factors: frozenset[Factor],
) -> frozenset[Factor] | None:
    """Map the chosen factors of the collapsed graph to the factors at the same positions in all layers of `graph`.

    None means that the layers of the two graphs have different factors.
    """
    leaves = {n.name: n.results[0] for n in graph.nodes if n.op in ("weight", "state")}
    ours = {n.name: n.results[0] for n in collapsed.graph.nodes if n.op in ("weight", "state")}
    everywhere: set[Factor] = set()
    for name, axis, at, i in list_one_position_per_factor(collapsed.graph, collapsed_factors, chosen_factors, {}):
        expected_sizes = [[f.size for f in segment] for segment in collapsed_factors.axes_of(ours[name])[axis]]
        for copy_name in collapsed.leaf_copies.get(name, (name,)):
            parts = factors.axes_of(leaves[copy_name])[axis]
            if [[f.size for f in segment] for segment in parts] != expected_sizes or parts[at][i].blocked:
                return None
            everywhere.add(parts[at][i])
    return frozenset(everywhere) if find_conflicting_leaf(graph, factors, frozenset(everywhere)) is None else None


@dataclass(frozen=True, slots=True)
class _ScoredFactors:
    """A set of factors with its score: the predicted time of a run, and the stored bytes of each device."""

    factors: frozenset[Factor]
    estimate: Estimate
    stored_bytes: float


def _score_assignment(costs: AssignmentCost, assignment: ShardingAssignment) -> _ScoredFactors:
    return _ScoredFactors(
        assignment.sharded_factors, costs.estimate_run_time(assignment), costs.compute_max_stored_bytes(assignment)
    )


EQUAL_TIME_TOLERANCE = 0.02
"""The relative difference up to which two predicted times count as equal; then fewer stored bytes decide.

Memory has no price of its own. A plan that is about as fast as one device is not made slower to save bytes."""
MIN_SAVED_PER_COLLECTIVE = 0.1
"""The least seconds of kernels that a group must save for each second of collectives, if shards are asked for."""


def _compute_kernel_saving_per_collective_second(before: Estimate, after: Estimate, eager: bool) -> float:
    """Compute the gain of sharding more factors: saved kernel seconds per added collective second; -1 if too small."""
    # Too small: with `eager`, against the added collectives; otherwise, if the total time does not decrease.
    saved = before.compute - after.compute
    added = max(0.0, after.collectives - before.collectives)
    pays = saved > 0 and (saved > MIN_SAVED_PER_COLLECTIVE * added if eager else after.total < before.total)
    return saved / (added + 1e-9) if pays else -1.0


def _explain_choice(chosen: _ScoredFactors, other: _ScoredFactors, has_best_ratio: bool) -> str:
    """Explain in a phrase why the set of factors `chosen` was preferred to `other`.

    Args:
        chosen: The chosen set of factors.
        other: Another set of factors.
        has_best_ratio: Whether `chosen` saves most kernel seconds for each second of collectives.
    """
    if not has_best_ratio:
        return "has fewer bytes on each device than"
    faster = chosen.estimate.total <= other.estimate.total
    return "beat" if faster else "saves more kernel time per second of collectives than"


def _format_cost(cost: Estimate) -> str:
    return f"{format_seconds(cost.total)}, {format_count(cost.collective_count, 'collective')}"


def group_factors(
    graph: Graph, factors: Factors, node_multiplicity: Mapping[Node, int] = NO_MULTIPLICITY
) -> dict[str, list[Factor]]:
    """Group factors with equal use, such as the heads of all layers; return the groups by a readable name.

    A group shards a weight, or the whole axis of a state. If this graph slices rows of a state, factors of these rows
    are left out: a later, longer step slices other rows. Factors that may not be sharded are left out, too.

    Args:
        graph: The graph to search.
        factors: The factors of `graph`.
        node_multiplicity: The number of original nodes of each leaf, if more than one.
    """
    uses: dict[Factor, set[str]] = defaultdict(set)
    first: dict[Factor, tuple[Node, int]] = {}
    counts: dict[Factor, int] = {}
    for node in graph.nodes:
        places = [(f"{node.op}.{i}", s) for i, s in enumerate(node.src) if s is not None]
        places += [(f"{node.op}>{v.index}", v) for v in node.results]
        for place, value in places:
            for axis, parts in enumerate(factors.axes_of(value)):
                for at, segment in enumerate(parts):
                    for i, factor in enumerate(segment):
                        uses[factor].add(f"{place}:{axis}.{at}.{i}/{len(segment)}:{value.shape}")
                        if node.op == "weight" or (node.op == "state" and all(factor in part for part in parts)):
                            first.setdefault(factor, (node, axis))
                            counts[factor] = min(
                                counts.get(factor, node_multiplicity.get(node, 1)), node_multiplicity.get(node, 1)
                            )
    grouped: dict[tuple[object, ...], list[Factor]] = defaultdict(list)
    for factor in first:
        if factor.can_be_sharded:
            grouped[(factor.size, frozenset(uses[factor]))].append(factor)
    classes: dict[str, list[Factor]] = {}
    for members in grouped.values():
        name = _describe_factor_group(factors, members[0], first[members[0]], sum(counts[f] for f in members))
        classes[name if name not in classes else f"{name}, part {len(classes)}"] = members
    return classes


def _describe_factor_group(factors: Factors, factor: Factor, leaf: tuple[Node, int], layer_count: int) -> str:
    """Return a name for a group of factors that users can read.

    Examples: ``kv heads of 30 layers (3 each), as in axis 1 of %blk.0.o``, ``axis 0 of %output (128 pieces)``.
    """
    node, axis = leaf
    where, word = f"axis {axis} of %{node.name}", factors.format_signature_name_of_factor(factor)
    of = f" of {format_count(layer_count, 'layer')}" if layer_count > 1 else ""
    if word:
        return f"{word}{of} ({factor.size}{' each' if of else ''}), as in {where}"
    return (
        f"{where}, and {layer_count - 1} alike ({factor.size} pieces each)" if of else f"{where} ({factor.size} pieces)"
    )


def find_conflicting_leaf(graph: Graph, factors: Factors, chosen_factors: frozenset[Factor]) -> Value | None:
    """Find a weight or state that the chosen factors would shard along two axes, which is impossible; else None."""
    for node in graph.nodes:
        if node.op in ("weight", "state"):
            value = node.results[0]
            if chosen_factors.isdisjoint(factors.factors_of(value)):
                continue
            axes = enumerate(factors.axes_of(value))
            places = {(a, f) for a, parts in axes for segment in parts for f in segment if f in chosen_factors}
            if len(places) > 1:
                return value
    return None


def list_one_position_per_factor(
    graph: Graph, factors: Factors, chosen_factors: frozenset[Factor], leaf_layouts: Mapping[str, Layout]
) -> frozenset[tuple[str, int, int, int]]:
    """Return one position in a weight or state for each chosen factor, to find the same factor in another graph.

    Factor objects belong to one graph; positions are equal in all graphs over the same leaves. A position is (leaf,
    axis, segment, place in the segment). A leaf that `leaf_layouts` shards along another axis gives no position.
    """
    named: dict[Factor, tuple[str, int, int, int]] = {}
    for factor, place in _iterate_weight_and_state_factor_positions(graph, factors, chosen_factors):
        layout = leaf_layouts.get(place[0])
        if not (isinstance(layout, Shard) and layout.axis != place[1]):
            named.setdefault(factor, place)
    return frozenset(named.values())


def list_leaf_positions_of_factors(
    graph: Graph, factors: Factors, chosen_factors: frozenset[Factor]
) -> frozenset[tuple[str, int, int, int]]:
    """Name each chosen factor by all its positions (leaf, axis, segment, place), for graphs over some of the leaves."""
    return frozenset(place for _, place in _iterate_weight_and_state_factor_positions(graph, factors, chosen_factors))


def _iterate_weight_and_state_factor_positions(
    graph: Graph, factors: Factors, chosen_factors: frozenset[Factor]
) -> Iterator[tuple[Factor, tuple[str, int, int, int]]]:
    """Yield each position of each chosen factor in weights and states, as pairs (factor, position)."""
    for node in graph.nodes:
        if node.op in ("weight", "state"):
            for axis, parts in enumerate(factors.axes_of(node.results[0])):
                for at, segment in enumerate(parts):
                    yield from ((f, (node.name, axis, at, i)) for i, f in enumerate(segment) if f in chosen_factors)


def factors_from_positions(
    graph: Graph, factors: Factors, factor_positions: frozenset[tuple[str, int, int, int]]
) -> frozenset[Factor]:
    """Find the factors at the given positions, which were listed for another graph over the same leaves.

    Args:
        graph: A graph over leaves of the other graph.
        factors: The factors of `graph`.
        factor_positions: Positions from `list_one_position_per_factor`; a position without a factor here is ignored.
    """
    leaves = {n.name: n.results[0] for n in graph.nodes if n.op in ("weight", "state")}
    named = set()
    for name, axis, at, i in factor_positions:
        if name in leaves:
            parts = factors.axes_of(leaves[name])[axis]
            named |= {s[i] for s in parts[at : at + 1] if i < len(s)}
    return frozenset(named)


def assign_shard_ranges(
    graph: Graph,
    factors: Factors,
    factor_positions: frozenset[tuple[str, int, int, int]],
    proportions: Sequence[float],
    earlier_layouts: Mapping[str, Layout] = NO_LEAF_LAYOUTS,
) -> ShardRanges:
    """Divide the indices of all sharded factors (such as heads) among the devices, in the order of the leaf names.

    The fixed order makes related plans round alike. A leaf with a layout from an earlier plan keeps it.

    Args:
        graph: The graph to shard.
        factors: The factors of `graph`.
        factor_positions: The positions of the sharded factors.
        proportions: The share of each device.
        earlier_layouts: Layouts of leaves from an earlier plan.
    """
    shares = ShardRanges(proportions)
    leaves = {n.name: factors.axes_of(n.results[0]) for n in graph.nodes if n.op in ("weight", "state")}
    for name, axis, at, place in sorted(factor_positions, key=_make_natural_sort_key):
        segments, layout = leaves[name][axis], earlier_layouts.get(name)
        if isinstance(layout, Shard) and layout.axis == axis:
            shares.assign_ranges_if_missing(
                segments[at][place], factor_ranges_from_layout(segments, at, segments[at][place], layout.index_ranges)
            )
        else:
            shares.ranges_of(segments[at][place])
    return shares


def _make_natural_sort_key(position: tuple[str, int, int, int]) -> tuple[object, ...]:
    """Make a sort key that compares numbers in leaf names by value: layer 9 comes before layer 10."""
    name = tuple((part.isdecimal(), int(part) if part.isdecimal() else part) for part in position[0].split("."))
    return (tuple((flag, str(value).zfill(12)) for flag, value in name), *position[1:])
