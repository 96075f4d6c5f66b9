"""The hybrid split: a layer split over groups of devices, with tensor parallelism inside each group.

1. Each pipeline stage is a graph of its own; its inputs are values of earlier stages (`split_into_stage_graphs`).
2. Each stage is partitioned over its group, as a whole graph over all devices.
3. A value for another stage ends whole on every device of the group. Each device of the other group receives it from
   one of them.

All collectives of a stage come before its messages, and both come before the collectives of the next stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...backends.base import Program
from ...graph.errors import PlanError
from ...graph.graph import Graph, assign_names
from ...graph.node import Node, Value, input
from ...graph.rewrite import rewrite_graph
from ...ops.collectives import COLLECTIVES, find_collective_sequence_number, receive, send
from ..costs.hardware import Hardware
from ..ir.layout import REPLICATE, Layout, Local, Replicate, Shard
from ..lowering.device_plan import find_collective_group_of_each_device
from .factors import Factors
from .layer_split import Placement, find_devices_of_values_and_states
from .overlap_chunks import (
    SINGLE_CHUNK,
    OverlapChunkOptions,
    find_chunkable_token_factor,
    partition_graph_in_token_chunks,
)
from .partitioner import PartitionedGraphs, keep_unused_collectives, make_unused_name, partition_graph
from .pins import Pins, pin_earlier_layouts_of_changed_leaves
from .propagation import ShardingAssignment
from .search.greedy_search import assign_shard_ranges, factors_from_positions, list_one_position_per_factor
from .sequence_parallel import SequenceParallelChooser

ShardedFactors = frozenset[tuple[str, int, int, int]]
"""The sharded factors: (leaf, axis, segment, position in the segment)."""
StageGroups = Sequence[Sequence[int]]
"""The devices of each pipeline stage."""


@dataclass(frozen=True)
class PipelineStage:
    """One stage of a pipeline: its graph, with inputs from earlier stages and outputs for later stages.

    - `input_values` maps the names of these inputs to values of the whole graph.
    - `output_values` maps the names of these outputs to values of the whole graph.
    """

    graph: Graph
    input_values: Mapping[str, Value]
    output_values: Mapping[str, Value]


def split_devices_into_groups(devices_per_machine: int, device_count: int) -> list[list[int]]:
    """Split the devices into groups of consecutive devices of equal size; return the device numbers of each group.

    A group has the devices of one machine. If all devices are in one machine, the number of groups is the largest
    divisor of `device_count` that does not exceed the group size: 8 devices form 2 groups of 4.

    Args:
        devices_per_machine: The number of devices of each machine; 0 for a single machine.
        device_count: The number of devices.

    Raises:
        PlanError: There is no such division.
    """
    size = devices_per_machine
    if not 0 < devices_per_machine < device_count:
        size = device_count // max(
            d for d in range(1, device_count + 1) if device_count % d == 0 and d * d <= device_count
        )
    if size in (1, device_count) or device_count % size:
        raise PlanError(
            f"split mode layer,tensor needs device groups of equal size, each of several devices; "
            f"{device_count} devices have no such groups; use layer or tensor, or another number of devices"
        )
    return [list(range(start, start + size)) for start in range(0, device_count, size)]


def find_pipeline_stage_groups(programs: Sequence[Program]) -> list[list[int]] | None:
    """Find the device groups of the pipeline stages of a plan, from the collectives in its programs.

    The result is None for a plan without several stages of several devices each.
    """
    devices, groups = len(programs), find_collective_group_of_each_device(programs)
    if not any(1 < len(group) < devices for group in groups):
        return None
    size = next(len(group) for group in groups if len(group) > 1)
    return [list(range(start, start + size)) for start in range(0, devices, size)]


@dataclass(frozen=True)
class HybridGraphs:
    """The graphs of all devices after a hybrid split: pipeline stages, with tensor parallelism within each stage.

    `has_chunks` states whether at least one stage has enough tokens for overlap chunks. Such chunks are parts of the
    tokens: one is sent while the next is computed.
    """

    partitioned_graphs: PartitionedGraphs
    sharded_factors: ShardedFactors
    has_chunks: bool


def partition_hybrid(
    graph: Graph,
    stage_by_node: Placement,
    groups: StageGroups,
    sharded_factors: ShardedFactors,
    proportions: Sequence[float],
    hardware: Hardware,
    earlier_layouts: Mapping[str, Layout] | None = None,
    chunks: OverlapChunkOptions = SINGLE_CHUNK,
) -> HybridGraphs:
    """Partition a graph into pipeline stages, and each stage over its own group of devices.

    A weight or state that two stages would shard along different axes is replicated.

    Args:
        graph: The graph to partition.
        stage_by_node: The stage of each node.
        groups: The devices of each stage.
        sharded_factors: The factors to shard.
        proportions: The share of each device.
        hardware: The speeds of devices and links.
        earlier_layouts: Layouts of weights and states from an earlier plan.
        chunks: The overlap chunks of stages with enough tokens.

    Raises:
        PlanError: A value would have to go back to an earlier stage.
    """
    stages = split_into_stage_graphs(graph, stage_by_node, groups, earlier_layouts or {})
    whole = frozenset[str]()  # leaves that stages would shard along different axes
    while True:
        partitioner = _HybridPartitioner(
            graph, stages, groups, sharded_factors, proportions, hardware, whole, earlier_layouts, chunks
        )
        if partitioner.conflicting_leaves <= whole:
            return HybridGraphs(
                partitioner.build_graphs_with_stage_messages(), partitioner.sharded_factors, partitioner.has_chunks
            )
        whole |= partitioner.conflicting_leaves


def split_into_stage_graphs(
    graph: Graph, stage_by_node: Placement, groups: StageGroups, earlier_layouts: Mapping[str, Layout]
) -> list[PipelineStage]:
    """Split a graph into one graph for each pipeline stage; values of earlier stages become inputs.

    A state stays in the stage of the devices that store it in the earlier plan.

    Args:
        graph: The graph to split.
        stage_by_node: The stage of each node.
        groups: The devices of each stage.
        earlier_layouts: Layouts of weights and states from an earlier plan.

    Raises:
        PlanError: A value would have to go back to an earlier stage.
    """
    home, node_names, stages = find_devices_of_values_and_states(graph, stage_by_node), assign_names(graph), len(groups)
    for state in graph.states:
        if (layout := earlier_layouts.get(state.node.name)) is not None and not _has_part_in_group(
            layout, groups[home[state]]
        ):
            there = [stage for stage, group in enumerate(groups) if _has_part_in_group(layout, group)]
            home[state] = next(iter([s for s in there if s > home[state]] or there), home[state])
    leaves = {n.name for n in graph.nodes if n.is_leaf}
    local: dict[tuple[int, Value], Value] = {}
    taken: list[dict[str, Value]] = [{} for _ in range(stages)]
    output_values: list[dict[str, Value]] = [{} for _ in range(stages)]

    def on(stage: int, value: Value) -> Value:
        """Return `value` in a stage: computed there, a leaf, or an input."""
        at = home.get(value, stage)
        if at > stage:
            raise PlanError(f"{value!r} would go back from stage {at} to {stage}; use split mode layer or tensor")
        if (stage, value) not in local and at < stage:
            label = f"{node_names[value.node]}#{value.index}"
            name = make_unused_name(f"{label}.from.{at}", leaves)
            local[stage, value] = input(name, value.shape, value.dtype)
            taken[stage][name] = value
            output_values[at].setdefault(make_unused_name(f"{label}.out", graph.outputs), value)
        return local.setdefault((stage, value), value)

    for node in graph.nodes:
        if not node.is_leaf:
            stage = stage_by_node[node]
            src = tuple(None if s is None else on(stage, s) for s in node.src)
            copy = Node(node.op, src, node.attrs, node.specs, node_names[node])
            local.update(((stage, v), new) for v, new in zip(node.results, copy.results, strict=True))
    outputs: list[dict[str, Value]] = [{} for _ in range(stages)]
    updates: list[dict[Value, Value]] = [{} for _ in range(stages)]
    for name, value in graph.outputs.items():
        stage = home.get(value, 0)
        outputs[stage][name] = on(stage, value)
    for state, new in graph.updates.items():
        stage = home[state]
        updates[stage][on(stage, state)] = on(stage, new)
    for stage in range(stages):
        outputs[stage].update((name, on(stage, value)) for name, value in output_values[stage].items())
    return [PipelineStage(Graph(outputs[s], updates[s]), taken[s], output_values[s]) for s in range(stages)]


class _HybridPartitioner:
    """Partitions each pipeline stage over its device group, and connects the stages by numbered messages.

    `conflicting_leaves` are the weights and states that two stages shard along different axes.
    """

    def __init__(
        self,
        graph: Graph,
        stages: Sequence[PipelineStage],
        groups: StageGroups,
        sharded_factors: ShardedFactors,
        proportions: Sequence[float],
        hardware: Hardware,
        replicated_leaves: frozenset[str],
        earlier_layouts: Mapping[str, Layout] | None,
        chunks: OverlapChunkOptions,
    ) -> None:
        self.graph, self.stages, self.stage_groups, self.proportions = graph, stages, groups, proportions
        self.requested_factors, self.hardware, self.replicated_leaves, self.earlier_layouts = (
            sharded_factors,
            hardware,
            replicated_leaves,
            earlier_layouts,
        )
        self.chunks, self.has_chunks, self.next_sequence_number = chunks, False, 0
        self.sharded_factors: ShardedFactors = frozenset()
        self.sent_messages: list[list[tuple[str, int, int]]] = [
            [] for _ in proportions
        ]  # output, receiver and sequence number
        self.received_messages: list[dict[str, tuple[int, int]]] = [
            {} for _ in proportions
        ]  # by input: sender and sequence number
        self.stage_graphs: list[PartitionedGraphs] = []
        for number, stage in enumerate(stages):
            part = self._partition_stage(number, stage)
            self.stage_graphs.append(part)
            self._assign_message_endpoints_and_numbers(number, stage)
        self.leaf_layouts = {leaf.name: self._join_leaf_layouts(leaf) for leaf in graph.nodes if leaf.is_leaf}
        self.conflicting_leaves = frozenset(name for name, layout in self.leaf_layouts.items() if layout is None)

    def _partition_stage(self, stage_number: int, stage: PipelineStage) -> PartitionedGraphs:
        """Partition one pipeline stage over its device group; return the graph of each device of the group."""
        graph, group, factors = stage.graph, self.stage_groups[stage_number], Factors(stage.graph)
        chosen = factors_from_positions(graph, factors, self.requested_factors) if len(group) > 1 else frozenset()
        chosen = frozenset(f for f in chosen if f.can_be_sharded)
        own = [self.proportions[d] for d in group]
        shares = assign_shard_ranges(
            graph,
            factors,
            list_one_position_per_factor(graph, factors, chosen, {}),
            own if sum(own) else [1.0] * len(group),
        )
        replicated_values = {graph.outputs[name] for name in stage.output_values}
        stored, earlier = [*graph.weights, *graph.states], self.earlier_layouts or {}
        before = {
            v.node.name: _find_layout_in_group(earlier[v.node.name], v.shape, group)
            for v in stored
            if v.node.name in earlier
        }
        pins = Pins({}, {v: REPLICATE for v in stored if v.node.name in self.replicated_leaves})
        while True:
            sequence_options = SequenceParallelChooser(
                graph, factors, chosen, pins, len(group), self.hardware, replicated_values
            )
            part = partition_graph(
                graph,
                factors,
                sequence_options.choose_sharded_rows_at_min_gain(),
                shares,
                first_sequence_number=self.next_sequence_number,
                replicated_outputs=replicated_values,
            )
            known, pins = pins, pin_earlier_layouts_of_changed_leaves(pins, graph, part.leaves, before)
            if pins == known:
                self.sharded_factors |= list_one_position_per_factor(graph, factors, chosen, part.leaves)
                break
        if (tokens := find_chunkable_token_factor(sequence_options.replicated_rows_assignment, factors)) is not None:
            of: ShardingAssignment | None = sequence_options.replicated_rows_assignment
            if (saving := self.chunks.required_saving_seconds) is not None:
                of = sequence_options.shard_rows_if_saving(tokens, saving / len(self.stages))
            self.has_chunks |= of is not None
            if (count := self.chunks.chunk_count) > 1:
                of, first = of or sequence_options.replicated_rows_assignment, self.next_sequence_number
                part = (
                    partition_graph_in_token_chunks(
                        graph,
                        factors,
                        of,
                        shares,
                        tokens,
                        count,
                        first_sequence_number=first,
                        replicated_outputs=replicated_values,
                    )
                    or part
                )
        collective_numbers = (
            find_collective_sequence_number(node.op, node.attrs) for own in part.graphs for node in own.nodes
        )
        self.next_sequence_number = max(
            (number + 1 for number in collective_numbers if number is not None), default=self.next_sequence_number
        )
        return part

    def _assign_message_endpoints_and_numbers(self, stage_number: int, stage: PipelineStage) -> None:
        """Assign a sender, a receiver and a sequence number to each message from one stage to later stages."""
        for name, value in stage.output_values.items():
            for later in range(stage_number + 1, len(self.stages)):
                for label in (n for n, v in self.stages[later].input_values.items() if v == value):
                    group = self.stage_groups[stage_number]
                    for place, device in enumerate(self.stage_groups[later]):
                        sender = group[place % len(group)]
                        self.sent_messages[sender].append((name, device, self.next_sequence_number))
                        self.received_messages[device][label] = sender, self.next_sequence_number
                        self.next_sequence_number += 1

    def _join_leaf_layouts(self, leaf: Node) -> Layout | None:
        """Join the layouts that a weight or state has in the pipeline stages to one layout over all devices.

        The result is None if the stages shard it along different axes.
        """
        if leaf.op not in ("weight", "state"):
            return REPLICATE
        if self.earlier_layouts is not None and leaf.name in self.earlier_layouts:
            return self.earlier_layouts[leaf.name]
        own: dict[int, tuple[Layout, int]] = {}
        for group, part in zip(self.stage_groups, self.stage_graphs, strict=True):
            layout = part.leaves.get(leaf.name)
            for place, device in enumerate(group if layout is not None else ()):
                assert layout is not None
                if not isinstance(layout, Local) or place in layout.devices:
                    own[device] = layout, place
        sharded_axes = {layout.axis for layout, _ in own.values() if isinstance(layout, Shard)}
        if not sharded_axes:
            return Local(tuple(sorted(own)) or (0,))
        if len(sharded_axes) > 1:
            return None
        (axis,) = sharded_axes
        all_of_it = ((0, leaf.specs[0].shape[axis]),)
        runs = [
            layout.index_ranges[place] if isinstance(layout, Shard) else all_of_it if layout is not None else ()
            for layout, place in (own.get(d, (None, 0)) for d in range(len(self.proportions)))
        ]
        return Shard(axis, tuple(runs))

    def build_graphs_with_stage_messages(self) -> PartitionedGraphs:
        """Build the graph of each device, with the messages between stages.

        The result also has the layouts of leaves and outputs over all devices.
        """
        graphs: dict[int, Graph] = {}
        outputs: dict[str, Layout] = {}
        for number, (group, part) in enumerate(zip(self.stage_groups, self.stage_graphs, strict=True)):
            output_values = self.stages[number].output_values
            for place, device in enumerate(group):
                graphs[device] = self._add_stage_messages(device, part.graphs[place], output_values)
            for name in part.outputs.keys() - output_values.keys():
                layout = part.outputs[name]
                if isinstance(layout, Shard):
                    runs = {device: layout.index_ranges[place] for place, device in enumerate(group)}
                    outputs[name] = Shard(layout.axis, tuple(runs.get(d, ()) for d in range(len(self.proportions))))
                else:
                    outputs[name] = Local((group[0],))
        devices = range(len(self.proportions))
        leaves = {name: layout for name, layout in self.leaf_layouts.items() if layout is not None}
        ordered = {name: outputs[name] for name in self.graph.outputs}
        return PartitionedGraphs(tuple(graphs[d] for d in devices), tuple({} for _ in devices), leaves, ordered)

    def _add_stage_messages(self, device: int, graph: Graph, output_values: Mapping[str, Value]) -> Graph:
        """Replace the stage inputs in a device's graph by receives, and add a send for each value of another stage.

        Args:
            device: The device.
            graph: The graph of the device.
            output_values: The stage outputs for later stages, by name.
        """
        received = self.received_messages[device]

        def rule(node: Node) -> Value | None:
            if node.op != "input" or node.name not in received:
                return None
            source, number = received[node.name]
            spec = node.specs[0]
            return receive(shape=spec.shape, dtype=spec.dtype, source=source, sequence=number, name=node.name)

        graph = rewrite_graph(graph, rule)
        collectives = [n.results[0] for n in graph.nodes if n.op in COLLECTIVES]
        outputs = {name: value for name, value in graph.outputs.items() if name not in output_values}
        for name, to, number in self.sent_messages[device]:
            value = graph.outputs[name]
            label = f"{value.node.name or value.node.op}.to.{to}"
            outputs[make_unused_name(f"sent.{number}", self.graph.outputs)] = send(
                value, to=to, sequence=number, name=label
            )
        return keep_unused_collectives(Graph(outputs, graph.updates), collectives)


def _find_layout_in_group(layout: Layout, shape: Sequence[int], group: Sequence[int]) -> Layout:
    """Return the layout of a weight or state within one device group, given its layout over all devices."""
    if isinstance(layout, Shard):
        runs = tuple(layout.index_ranges[d] for d in group)
        return REPLICATE if set(runs) == {((0, shape[layout.axis]),)} else Shard(layout.axis, runs)
    return REPLICATE if isinstance(layout, Local) and set(group) <= set(layout.devices) else layout


def stages_from_layouts(graph: Graph, leaf_layouts: Mapping[str, Layout], groups: StageGroups) -> Placement:
    """Derive the pipeline stage of each node from the devices that store the graph's weights and states already.

    A node with a stored operand is in a stage with this operand. Any other node is in the latest stage of its operands.

    Args:
        graph: The graph to split.
        leaf_layouts: The layouts of the leaves over all devices.
        groups: The devices of each stage.
    """
    where: dict[Node, int] = {}
    for node in graph.nodes:
        if node.is_leaf:
            continue
        follows = max((where[s.node] for s in node.inputs if not s.node.is_leaf), default=0)
        options = [
            [s for s, group in enumerate(groups) if _has_part_in_group(leaf_layouts[v.node.name], group)]
            for v in node.inputs
            if v.node.op in ("weight", "state") and v.node.name in leaf_layouts
        ]
        where[node] = follows if all(follows in o for o in options if o) else max(max(o) for o in options if o)
    return where


def _has_part_in_group(layout: Layout, group: Sequence[int]) -> bool:
    """Return whether a device group stores any part of a weight or state with this layout."""
    if isinstance(layout, Shard):
        return any(layout.index_ranges[d] for d in group)
    return isinstance(layout, Replicate) or (isinstance(layout, Local) and not set(group).isdisjoint(layout.devices))
