"""Plans of graphs with repeated layers, built from a shortened graph.

- The deep graph is the graph of the user. A repetition is one of its repeated layers.
- The short graph has a few repetitions, and each stands for several repetitions of the deep graph. Repetitions of one
  kind are repetitions with the same stand-in. There are several kinds, because the shard ranges of a device differ by
  rounding and recur after some repetitions.
- Each kind is partitioned, lowered and verified once (`verifier.repeats`).
- The device plans of the deep graph are unrolled from the device plans of the short graph at the first access.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from ...backends.capabilities import can_group_overlap
from ...graph.graph import Graph
from ...graph.lazy_dataclass import dataclass
from ...graph.node import Node, Value
from ...graph.repeated_runs import PREAMBLE, RepeatedRuns, ShortenedGraph, shorten_graph, split_numbered_name
from ...ops.registry import find_view_base
from ..costs.hardware import Hardware
from ..ir.execution_plan import ShardedFactors
from ..ir.layout import Layout
from ..lowering.device_plan import DevicePlan, Devices, build_device_plans, unroll_device_plans
from ..lowering.unroll import find_short_repetition_of_each_instruction
from ..sharding.axes import Factor
from ..sharding.factors import Factors
from ..sharding.overlap_chunks import OverlapChunkOptions, find_chunkable_token_factor, partition_graph_in_token_chunks
from ..sharding.partitioner import PartitionedGraphs, partition_graph
from ..sharding.pins import NO_PINS, find_unsupported_nodes
from ..sharding.propagation import ShardingAssignment
from ..sharding.search.greedy_search import assign_shard_ranges, factors_from_positions
from ..sharding.sequence_parallel import SequenceParallelChooser
from ..sharding.shard_ranges import ShardRanges

MIN_SAVED_NODES = 2_000
"""The least number of nodes on all devices that a short graph must save; planning and proving them takes 1 to 2 s."""
REPETITION_KIND_COUNTS, IMBALANCE_TOLERANCE = (1, 2, 4, 8), 0.02
"""The numbers of repetition kinds to try, and the largest deviation from the wanted share of a device.

The smallest number within the deviation is taken, else the largest number.
"""


@dataclass(frozen=True, slots=True, eq=False)
class RepeatedLayersPlanParts:
    """The parts of a plan for a graph with repeated layers: device plans, and the layouts of leaves and outputs.

    `build_with_chunks(chunks)` builds the same parts with overlap chunks, which are parts of the tokens; it returns
    None if that is impossible. The field is None if the sums over devices have too few tokens, or if the devices do not
    overlap collectives with compute.
    """

    device_plans: tuple[DevicePlan, ...]
    leaf_layouts: Mapping[str, Layout]
    output_layouts: Mapping[str, Layout]
    build_with_chunks: Callable[[OverlapChunkOptions], RepeatedLayersPlanParts | None] | None = None


def plan_repeated_layers(
    graph: Graph,
    repeated_layers: RepeatedRuns | None,
    group: Devices,
    sharded_factors: ShardedFactors,
    proportions: Sequence[float],
    hardware: Hardware,
    fixed_layouts: Mapping[str, Layout] | None = None,
) -> RepeatedLayersPlanParts | None:
    """Plan a graph with many equal layers by a short graph, which keeps only a few of these layers.

    The result is None if the short graph saves too few nodes. It is None, too, if the layers are sharded in different
    ways, or if a weight or state would have another layout than in `fixed_layouts`.

    Args:
        graph: The graph with all layers.
        repeated_layers: The repeated layers of `graph`.
        group: The devices.
        sharded_factors: The factors (shardable indices) to shard, by the weights and states that have them.
        proportions: The share of each device.
        hardware: The hardware model.
        fixed_layouts: The layouts that weights and states must have; None if they may have any.
    """
    required_layouts = (
        {}
        if fixed_layouts is None
        else {v.node.name: fixed_layouts.get(v.node.name) for v in (*graph.weights, *graph.states)}
    )
    if repeated_layers is None or repeated_layers.count * repeated_layers.length * len(group) < MIN_SAVED_NODES:
        return None
    for runs in (
        repeated_layers,
        repeated_layers.without_first_repetition(),
    ):  # before the first repetition, no value may have been summed yet
        once = shorten_graph(graph, runs, 1)
        if once is None or (own := _map_factors_to_short_graph(once, sharded_factors)) is None:
            continue
        first = _ShortenedGraphSharding(once, group, hardware, sharded_factors, proportions, own)
        sharding = first.with_layer_count_of_short_graph(
            min(_choose_layer_count_that_evens_rounding(first), runs.count - 1)
        )
        repeated_plan = None if sharding is None else _plan_by_shortened_graph(sharding)
        if repeated_plan is not None and all(
            repeated_plan.leaf_layouts[name] == layout for name, layout in required_layouts.items()
        ):
            return repeated_plan
    return None


class _ShortenedGraphSharding:
    """The sharding of a short graph over devices; the graph keeps only a few of the repeated layers.

    Args:
        shortened: The short graph, the graph with all layers, and their repetitions.
        group: The devices.
        hardware: The hardware model.
        sharded_factors: The sharded factors (shardable indices) of the graph with all layers.
        proportions: The share of each device.
        short_factors: The sharded factors of the short graph.
    """

    def __init__(
        self,
        shortened: ShortenedGraph,
        group: Devices,
        hardware: Hardware,
        sharded_factors: ShardedFactors,
        proportions: Sequence[float],
        short_factors: ShardedFactors,
    ) -> None:
        self.shortened_graph, self.group, self.hardware = shortened, group, hardware
        self.sharded_factors, self.proportions, self.short_sharded_factors = sharded_factors, proportions, short_factors
        self.factors = Factors(shortened.short_graph)
        self.chosen_factors = factors_from_positions(shortened.short_graph, self.factors, short_factors)

    @cached_property
    def shard_ranges(self) -> ShardRanges:
        """The index ranges that each device has of each factor (shardable index) of the short graph."""
        return assign_shard_ranges(
            self.shortened_graph.short_graph, self.factors, self.short_sharded_factors, self.proportions
        )

    def with_layer_count_of_short_graph(self, kind_count: int) -> _ShortenedGraphSharding | None:
        """Return this sharding for a short graph that keeps `kind_count` of the repeated layers; None if impossible.

        It is impossible without such a short graph, or if its layers would be sharded differently.
        """
        return (
            self
            if kind_count == self.shortened_graph.short_count
            else self._with_shortened_graph(
                shorten_graph(self.shortened_graph.deep_graph, self.shortened_graph.deep_repetitions, kind_count)
            )
        )

    def _with_shortened_graph(self, shortened: ShortenedGraph | None) -> _ShortenedGraphSharding | None:
        """Return this sharding for another short graph (a graph with only a few of the repeated layers).

        The result is None without a short graph, or if the repeated layers of the user's graph are sharded differently.
        """
        own = None if shortened is None else _map_factors_to_short_graph(shortened, self.sharded_factors)
        if shortened is None or own is None:
            return None
        return _ShortenedGraphSharding(
            shortened, self.group, self.hardware, self.sharded_factors, self.proportions, own
        )

    @property
    def distinct_program_count(self) -> int:
        """The number of different programs: devices with equally large shards have the same program."""
        shares = (self.shard_ranges.ranges_of(factor) for factor in self.chosen_factors)
        return len({*zip(*([high - low for low, high in share] for share in shares), strict=True)}) or 1

    @cached_property
    def sequence_parallel_chooser(self) -> SequenceParallelChooser:
        """The chooser of sequence parallelism for the short graph.

        It decides whether, after a sum over devices, each device computes all token rows or only its shard of the rows.
        """
        return SequenceParallelChooser(
            self.shortened_graph.short_graph, self.factors, self.chosen_factors, NO_PINS, len(self.group), self.hardware
        )

    @property
    def replicated_rows_assignment(self) -> ShardingAssignment:
        """The layouts of all values of the short graph without sequence parallelism.

        So each device computes all token rows after a sum over devices.
        """
        return self.sequence_parallel_chooser.replicated_rows_assignment

    def build_partitioned_graphs(self, assignment: ShardingAssignment) -> PartitionedGraphs:
        """Partition the short graph over all devices, with the layouts of `assignment`."""
        return partition_graph(self.shortened_graph.short_graph, self.factors, assignment, self.shard_ranges)

    def build_repeated_plan(self, partitioned_graphs: PartitionedGraphs) -> RepeatedLayersPlanParts | None:
        """Unroll the short graph of each device to all layers, and return the parts of the plan.

        The result is None if a device does not support a node, or if its repeated layers cannot be unrolled.
        """
        of = self.shortened_graph
        if find_unsupported_nodes(partitioned_graphs.graphs, partitioned_graphs.source_nodes, self.group):
            return None
        device_plans = build_device_plans(partitioned_graphs.graphs, self.group, of)
        if not all(
            _has_repeatable_instructions(device_plan, of)
            for device_plan in {id(device_plan.program): device_plan for device_plan in device_plans}.values()
        ):
            return None
        leaves = {
            of.deep_name_in_repetition(name, run, kind): layout
            for run, kind in of.deep_and_short_repetitions
            for name, layout in partitioned_graphs.leaves.items()
            if of.short_repetition_of_name(name) == kind
        }
        return RepeatedLayersPlanParts(unroll_device_plans(device_plans, of), leaves, partitioned_graphs.outputs)

    def build_with_overlap_chunks(self, chunks: OverlapChunkOptions) -> RepeatedLayersPlanParts | None:
        """Build the plan of the repeated layers with overlap chunks (parts of the tokens); None if that is impossible.

        1. First, the last of the repeated layers is planned separately, because its sums over devices may have few
           tokens.
        2. If the values passed from layer to layer then have different layouts, the first layer is planned separately,
           too. Before it no sum may have been reduce-scattered yet.
        """
        inner = self.shortened_graph.deep_repetitions.without_last_repetition()
        for runs in (inner, inner.without_first_repetition()):
            sharding = (
                self._with_shortened_graph(
                    shorten_graph(self.shortened_graph.deep_graph, runs, self.shortened_graph.short_count)
                )
                if runs.count >= self.shortened_graph.short_count
                else None
            )
            if (
                sharding is None
                or (tokens := find_chunkable_token_factor(sharding.replicated_rows_assignment, sharding.factors))
                is None
            ):
                return None
            assignment: ShardingAssignment | None = sharding.replicated_rows_assignment
            if chunks.required_saving_seconds is not None:
                part = len(sharding.shortened_graph.short_graph.nodes) / len(sharding.shortened_graph.deep_graph.nodes)
                assignment = sharding.sequence_parallel_chooser.shard_rows_if_saving(
                    tokens, chunks.required_saving_seconds * part
                )
            if assignment is None:
                return None
            if _has_equal_layouts_of_carried_values(sharding.shortened_graph, assignment):
                sharded = partition_graph_in_token_chunks(
                    sharding.shortened_graph.short_graph,
                    sharding.factors,
                    assignment,
                    sharding.shard_ranges,
                    tokens,
                    chunks.chunk_count,
                )
                return None if sharded is None else sharding.build_repeated_plan(sharded)
        return None


def _plan_by_shortened_graph(sharding: _ShortenedGraphSharding) -> RepeatedLayersPlanParts | None:
    """Plan a graph with repeated layers by a short graph with few of them; None if impossible or if it saves little."""
    of, group = sharding.shortened_graph, sharding.group
    if (
        of.deep_repetitions.count - of.short_count
    ) * of.deep_repetitions.length * sharding.distinct_program_count < MIN_SAVED_NODES:
        return None
    assignment = sharding.sequence_parallel_chooser.choose_sharded_rows_at_min_gain()
    repeated_plan = (
        sharding.build_repeated_plan(sharding.build_partitioned_graphs(assignment))
        if _has_equal_layouts_of_carried_values(of, assignment)
        else None
    )
    if (
        repeated_plan is None
        or not can_group_overlap(group)
        or find_chunkable_token_factor(sharding.replicated_rows_assignment, sharding.factors) is None
    ):
        return repeated_plan
    return replace(repeated_plan, build_with_chunks=sharding.build_with_overlap_chunks)


def _map_factors_to_short_graph(shortened: ShortenedGraph, sharded_factors: ShardedFactors) -> ShardedFactors | None:
    """Map sharded factors (shardable indices) from their positions in the user's graph to positions in the short graph.

    The result is None if the repeated layers of the user's graph are sharded differently.
    """
    number = {node.name: at for at, node in enumerate(shortened.deep_nodes_by_number) if node.is_leaf}
    by_run: dict[int, set[tuple[str, int, int, int]]] = defaultdict(set)
    for name, axis, segment, factor in sharded_factors:
        run = shortened.deep_repetitions.repetition_of(number[name])
        kind = run if run == PREAMBLE else shortened.short_count if run == shortened.deep_repetitions.count else 0
        by_run[run].add((str(number[name] - (run - kind) * shortened.deep_repetitions.length), axis, segment, factor))
    inner = by_run[0]
    if any(by_run[run] != inner for run in range(shortened.deep_repetitions.count)):
        return None
    again = [
        (str(int(name) + kind * shortened.deep_repetitions.length), axis, segment, factor)
        for kind in range(shortened.short_count)
        for name, axis, segment, factor in inner
    ]
    return frozenset([*by_run[PREAMBLE], *by_run[shortened.deep_repetitions.count], *again])


def _choose_layer_count_that_evens_rounding(short_sharding: _ShortenedGraphSharding) -> int:
    """Choose how many layers the short graph keeps, so that uneven shards add up to each device's proportion.

    Example: two devices share 3 heads in each layer. One layer gives 2 and 1 heads, but two layers give 3 and 3.
    """
    inner = frozenset(
        sharded_factor
        for sharded_factor in short_sharding.short_sharded_factors
        if short_sharding.shortened_graph.short_repetition_of_name(sharded_factor[0]) == 0
    )
    sizes = [
        factor.size
        for factor in factors_from_positions(short_sharding.shortened_graph.short_graph, short_sharding.factors, inner)
    ]
    shares = ShardRanges(short_sharding.proportions)
    assigned_sizes: dict[int, list[int]] = {size: [0] * len(short_sharding.proportions) for size in sizes}
    for times in range(1, REPETITION_KIND_COUNTS[-1] + 1):
        for size in sizes:
            assigned_sizes[size] = [
                n + high - low
                for n, (low, high) in zip(assigned_sizes[size], shares.ranges_of(Factor(size)), strict=True)
            ]
        ideal_sizes = {size: [times * sizes.count(size) * size * p for p in shares.proportions] for size in sizes}
        pairs = (pair for size in sizes for pair in zip(assigned_sizes[size], ideal_sizes[size], strict=True))
        if times in REPETITION_KIND_COUNTS and all(
            abs(has - ideal) <= IMBALANCE_TOLERANCE * ideal for has, ideal in pairs
        ):
            return times
    return REPETITION_KIND_COUNTS[-1]


def _has_equal_layouts_of_carried_values(shortened: ShortenedGraph, assignment: ShardingAssignment) -> bool:
    """Return whether the values between layers have the same layout before the first layer and after each layer."""
    firsts = [shortened.short_repetitions.first_node_of(run) for run in range(PREAMBLE, shortened.short_count)]
    carried = [
        [shortened.short_nodes[first + place] for first in firsts]
        for place in shortened.deep_repetitions.carried_positions
    ]
    return all(
        len({tuple(map(assignment.produced_layouts.__getitem__, node.results)) for node in nodes}) == 1
        for nodes in carried
    )


def _has_repeatable_instructions(device_plan: DevicePlan, shortened: ShortenedGraph) -> bool:
    """Return whether a device's instructions for a few repeated layers can be copied to all layers ("unrolled").

    - The instructions of each kind of layer are consecutive, and the kinds are in order.
    - A value that the next layer reads has the same memory offset in all kinds.
    - No state is copied at the end of all layers.
    """
    kinds = find_short_repetition_of_each_instruction(device_plan.graph, device_plan.program, shortened)
    copies = any(
        i.index < 0 and at not in device_plan.program.save_positions
        for at, i in enumerate(device_plan.program.instructions)
    )
    if kinds != sorted(kinds) or {*kinds} != {*range(PREAMBLE, shortened.short_count + 1)} or copies:
        return False
    if device_plan.graph.outputs.keys() != shortened.short_graph.outputs.keys():
        return False
    results_by_node = {
        device_plan.graph.nodes[i.index]: i.dst for i in device_plan.program.instructions if i.index >= 0
    }
    places: dict[tuple[int, str, int], set[int]] = defaultdict(set)
    run_of = shortened.short_repetition_by_node(device_plan.graph)
    for base in _list_carried_values(device_plan.graph, run_of):
        if base.node in results_by_node:
            number, ending = split_numbered_name(base.node.name)
            place = number - shortened.short_repetitions.first_node_of(run_of[base.node])
            places[place, ending, base.index].add(results_by_node[base.node][base.index].offset)
    return all(len(found) == 1 for found in places.values())


def _list_carried_values(graph: Graph, repetition_of_node: Mapping[Node, int]) -> Iterator[Value]:
    """List the values that a repeated layer reads from the layer before it. Views are replaced by their base values."""
    for node in graph.nodes:
        for source in node.inputs:
            base = find_view_base(source)
            if repetition_of_node[base.node] == repetition_of_node[node] - 1:
                yield base
