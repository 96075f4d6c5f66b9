"""Plans with sharded factors: from a factor choice to the graphs of all devices, with pins and overlap chunks.

- A factor is an index of the graph that a plan can shard.
- A pin assigns a node to one device, which alone computes it.
- Overlap chunks are parts of the tokens: one chunk is sent while the next one is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from ...backends.capabilities import can_group_overlap
from ...backends.device_name import DeviceName
from ...graph.errors import PlanError
from ...graph.graph import Graph
from ...graph.node import Node
from ...graph.repeated_runs import RepeatedRuns, find_largest_repeated_runs
from ..costs.hardware import Hardware
from ..ir.execution_plan import Plan, ShardedFactors
from ..ir.layout import Layout
from ..lowering.device_plan import Devices, build_device_plans
from ..sharding.factors import Factors
from ..sharding.overlap_chunks import (
    CHUNK_COUNTS,
    OverlapChunkOptions,
    find_chunkable_token_factor,
    partition_graph_in_token_chunks,
)
from ..sharding.partitioner import PartitionedGraphs, partition_graph
from ..sharding.pins import (
    NO_PINS,
    Pin,
    Pins,
    PlacementRules,
    find_unsupported_nodes,
    find_user_pins,
    list_pinned_nodes,
    pin_discrete_choices_if_backends_differ,
    pin_leaves_of_only_pinned_nodes,
    pin_neighbours_of_pinned_nodes,
    pin_unsupported_nodes,
)
from ..sharding.search.greedy_search import (
    NO_LEAF_LAYOUTS,
    FactorChoice,
    FactorSearch,
    assign_shard_ranges,
    list_leaf_positions_of_factors,
    list_one_position_per_factor,
)
from ..sharding.sequence_parallel import MIN_GAIN, SequenceParallelChooser
from .repeated_layers import RepeatedLayersPlanParts, plan_repeated_layers
from .workload import Workload


class ShardedPlanBuilder:
    """Builds sharded plans for one checked request of the planner: the chosen factors are divided over the devices.

    - `earlier_layouts`: the layouts of an earlier plan over the same weights and states.
    - `user_pins`: the nodes that the placement rules assign to one device.
    - `unrepeated_reasons`: why repeated layers are not planned once, as text for `explain`.

    Args:
        graph: The graph to plan.
        group: The backend and the device of each member.
        proportions: The tensor split; empty for equal shares.
        hardware: The speeds of devices and links.
        placement_rules: Pairs (regular expression, device name).
        earlier_plan: The plan with the layouts to keep.
        workload: The workload for which layouts are scored.
    """

    def __init__(
        self,
        graph: Graph,
        group: Devices,
        proportions: Sequence[float],
        hardware: Hardware,
        placement_rules: PlacementRules = (),
        earlier_plan: Plan | None = None,
        workload: Workload | None = None,
    ) -> None:
        self.graph, self.group, self.hardware, self.workload = graph, group, hardware, workload
        self.placement_rules = [(pattern, str(DeviceName.parse(device))) for pattern, device in placement_rules]
        self.tensor_split = proportions or (() if earlier_plan is None else earlier_plan.shares)
        self.earlier_layouts = NO_LEAF_LAYOUTS if earlier_plan is None else earlier_plan.leaves
        self.proportions = self.tensor_split or [1.0] * len(group)
        self.device_names = [str(device) for _, device in group]
        self.user_pins = find_user_pins(graph, self.placement_rules, self.device_names, strict=earlier_plan is None)

        self.unrepeated_reasons: tuple[str, ...] = ()

    @cached_property
    def factor_search(self) -> FactorSearch:
        """The search for the best factors of the graph to shard."""
        return FactorSearch(self.graph, Factors(self.graph))

    @cached_property
    def repeated_layers(self) -> RepeatedRuns | None:
        """The repeated layers of the graph; None without any."""
        return find_largest_repeated_runs(self.graph)

    @property
    def factors(self) -> Factors:
        """The factors of the graph: its shardable indices."""
        return self.factor_search.factors

    def build_sharded(self, choice: FactorChoice, fixed_pins: Pins | None = None) -> Plan:
        """Build the plan that shards the chosen factors (shardable indices of the graph) over the devices.

        Pinned nodes and leaves are not sharded: they stay on one device. Overlap chunks are used if they make the plan
        faster.

        Args:
            choice: The factors to shard, and the alternatives as reasons.
            fixed_pins: Nodes and leaves with a layout from an earlier plan.
        """
        first = {
            **pin_discrete_choices_if_backends_differ(self.graph, self.group),
            **({} if fixed_pins is None else fixed_pins.nodes),
            **self.user_pins,
        }
        if fixed_pins is None and (short := self._build_from_shortened_graph(choice)) is not None:
            return short
        asked = list_one_position_per_factor(self.graph, self.factors, choice.factors, {})
        shares = assign_shard_ranges(self.graph, self.factors, asked, self.proportions, self.earlier_layouts)

        def make_sequence_options(nodes: Mapping[Node, Pin]) -> SequenceParallelChooser:
            pins = (
                pin_leaves_of_only_pinned_nodes(self.graph, nodes)
                if fixed_pins is None
                else Pins(nodes, fixed_pins.leaves)
            )
            used_pins = pins if nodes or pins.leaves else NO_PINS
            return SequenceParallelChooser(
                self.graph, self.factors, choice.factors, used_pins, len(self.group), self.hardware
            )

        def build(nodes: Mapping[Node, Pin]) -> tuple[Mapping[Node, Pin], PartitionedGraphs]:
            return nodes, partition_graph(
                self.graph, self.factors, make_sequence_options(nodes).choose_sharded_rows_at_min_gain(), shares
            )

        where, sharded = self._pin_nodes_until_supported(first, build)

        def plan(sharded: PartitionedGraphs, *notes: str) -> Plan:
            cuts = list_one_position_per_factor(self.graph, self.factors, choice.factors, sharded.leaves)
            note = ("the factor search ignored nodes that are pinned to one device",) if where and cuts else ()
            return self._assemble_plan(
                sharded, cuts, (*choice.alternatives, *note, *self.unrepeated_reasons, *notes), where
            )

        unchunked_plan = plan(sharded)
        if not can_group_overlap(self.group):
            return unchunked_plan
        of = make_sequence_options(where)
        if (tokens := find_chunkable_token_factor(of.replicated_rows_assignment, self.factors)) is None:
            return unchunked_plan

        def build_with_chunks(chunks: OverlapChunkOptions, note: str) -> Plan | None:
            assignment = (
                of.replicated_rows_assignment
                if chunks.required_saving_seconds is None
                else of.shard_rows_if_saving(tokens, chunks.required_saving_seconds)
            )
            if assignment is None:
                return None
            graphs = partition_graph_in_token_chunks(
                self.graph, self.factors, assignment, shares, tokens, chunks.chunk_count
            )
            return (
                None
                if graphs is None or find_unsupported_nodes(graphs.graphs, graphs.source_nodes, self.group)
                else plan(graphs, note)
            )

        return choose_plan_with_or_without_overlap_chunks(unchunked_plan, build_with_chunks)

    def _build_from_shortened_graph(
        self, choice: FactorChoice, fixed_layouts: Mapping[str, Layout] | None = None
    ) -> Plan | None:
        """Build the plan of a graph with repeated layers from a shortened graph, which has only a few of these layers.

        The result is None if nodes are pinned to devices, if the repetitions differ, or if too few nodes are saved.

        Args:
            choice: The factors to shard, and the alternatives as reasons.
            fixed_layouts: The layouts of an earlier plan; a plan with other layouts is rejected.
        """
        if self.user_pins or self.unrepeated_reasons or pin_discrete_choices_if_backends_differ(self.graph, self.group):
            return None
        every = list_leaf_positions_of_factors(self.graph, self.factors, choice.factors)
        repeated_plan = plan_repeated_layers(
            self.graph, self.repeated_layers, self.group, every, self.proportions, self.hardware, fixed_layouts
        )
        if repeated_plan is None:
            return None
        cuts, shares = (
            list_one_position_per_factor(self.graph, self.factors, choice.factors, repeated_plan.leaf_layouts),
            tuple(self.tensor_split),
        )

        def plan(of: RepeatedLayersPlanParts, *notes: str) -> Plan:
            why = *choice.alternatives, *notes
            return Plan(
                self.graph, of.device_plans, of.leaf_layouts, of.output_layouts, cuts, why, self.hardware, shares=shares
            )

        first, in_chunks = plan(repeated_plan), repeated_plan.build_with_chunks
        if in_chunks is None:
            return first
        return choose_plan_with_or_without_overlap_chunks(
            first, lambda chunks, note: None if (of := in_chunks(chunks)) is None else plan(of, note)
        )

    def _pin_nodes_until_supported(
        self,
        pins: Mapping[Node, Pin],
        build: Callable[[Mapping[Node, Pin]], tuple[Mapping[Node, Pin], PartitionedGraphs]],
    ) -> tuple[Mapping[Node, Pin], PartitionedGraphs]:
        """Move each node that its device does not support to a device that supports it, until all nodes can run.

        A move may change the graphs of the devices, so each round builds them again.

        Args:
            pins: The nodes that must run on one device (pins), so far.
            build: Returns the used pins and the graphs of all devices.

        Returns:
            The pins and the graphs of the last round.
        """
        pins = dict(pins)
        while True:
            where, sharded = build(pin_neighbours_of_pinned_nodes(self.graph, pins))
            if not (found := find_unsupported_nodes(sharded.graphs, sharded.source_nodes, self.group)):
                return where, sharded
            pins.update(pin_unsupported_nodes(found, where, self.group))

    def _raise_if_nodes_unsupported(self, partitioned_graphs: PartitionedGraphs) -> PartitionedGraphs:
        """Require that each device supports its nodes; raise `PlanError` with the first unsupported node.

        Returns `partitioned_graphs` unchanged.
        """
        for found in find_unsupported_nodes(partitioned_graphs.graphs, partitioned_graphs.source_nodes, self.group):
            raise PlanError(f"{found.local_node!r} cannot run on {self.device_names[found.device]}: {found.reason}")
        return partitioned_graphs

    def _assemble_plan(
        self,
        partitioned_graphs: PartitionedGraphs,
        sharded_factors: ShardedFactors,
        reasons: tuple[str, ...],
        pins: Mapping[Node, Pin],
    ) -> Plan:
        """Assemble a plan from the graphs of all devices: lower them to programs, and add layouts, reasons and pins."""
        device_plans = build_device_plans(partitioned_graphs.graphs, self.group)
        placed = list_pinned_nodes(self.graph, pins)
        shares = tuple(self.tensor_split)
        return Plan(
            self.graph,
            device_plans,
            partitioned_graphs.leaves,
            partitioned_graphs.outputs,
            sharded_factors,
            reasons,
            self.hardware,
            placed,
            shares=shares,
        )


def choose_plan_with_or_without_overlap_chunks(
    unchunked_plan: Plan, build_with_chunks: Callable[[OverlapChunkOptions, str], Plan | None]
) -> Plan:
    """Choose the fastest plan: `unchunked_plan`, or a plan in which the tokens are split into overlap chunks.

    1. A chunk is sent while the next one is computed. The chunk count grows while enough collective time has no
       overlap.
    2. A plan with chunks must save the share `MIN_GAIN` of the time, because predictions are not more exact.
    3. With reduce-scattered chunks, two collectives of each sum have no overlap: the reduce-scatter of the last chunk
       and the all-gather of the first. Such a plan must save more than these take.

    Args:
        unchunked_plan: The plan without chunks.
        build_with_chunks: Builds a plan with chunks, and with a text as one more reason; returns None if impossible.
    """
    best, best_seconds = unchunked_plan, unchunked_plan.cost.total * (1 - MIN_GAIN)
    enough, waiting = (
        unchunked_plan.cost.total - best_seconds,
        unchunked_plan.cost.collectives - unchunked_plan.cost.overlapped_seconds,
    )
    for count in CHUNK_COUNTS:
        if (
            waiting < enough
            or (
                one := build_with_chunks(
                    OverlapChunkOptions(count), note := f"tokens go in {count} chunks from sum to sum"
                )
            )
            is None
        ):
            break
        waiting = one.cost.collectives - one.cost.overlapped_seconds
        if one.cost.total < best_seconds:
            best, best_seconds = one, one.cost.total
        saving = max(0.0, one.cost.total - waiting + one.cost.collectives / count - best_seconds)
        if (
            sharded_plan := build_with_chunks(OverlapChunkOptions(count, saving), f"{note}, each dealt to the devices")
        ) is None:
            continue
        if sharded_plan.cost.total < best_seconds:
            best, best_seconds = sharded_plan, sharded_plan.cost.total
    return best
