"""The SPMD partitioner: emit one graph for each device, with local shapes, sliced leaves and collectives.

Input is a graph with a sharding assignment and the shard ranges of its factors. Devices with equal parts share one
graph. As in GSPMD (Xu et al., 2021), collectives convert a value between the layouts of its node and its readers.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...graph.attrs import Attrs
from ...graph.graph import Graph, assign_names
from ...graph.node import Node, Value
from ...graph.spec import Spec
from ...ops import concat, fill, op_of, slice_
from ...ops.collectives import all_gather, all_reduce, all_to_all, receive, reduce_scatter, send
from ...ops.declaration.op import Op
from ..ir.layout import PARTIAL, REPLICATE, Layout, Local, Shard, compute_local_shape
from .axes import Factor
from .factor_layouts import EarlierPlanShard, FactorLayout, FactorShard, find_conversion_path
from .factors import Factors
from .propagation import ShardingAssignment
from .shard_ranges import ShardRanges, compute_axis_ranges_of_factor


@dataclass(frozen=True, eq=False)
class PartitionedGraphs:
    """The graphs of all devices after the partition of a graph, and the layouts of its leaves and outputs.

    `source_nodes` has one mapping for each device: from nodes of its graph to nodes of the original graph.
    """

    graphs: tuple[Graph, ...]
    source_nodes: tuple[Mapping[Node, Node], ...]
    leaves: Mapping[str, Layout]
    outputs: Mapping[str, Layout]


def partition_graph(
    graph: Graph,
    factors: Factors,
    assignment: ShardingAssignment,
    shard_ranges: ShardRanges,
    *,
    first_sequence_number: int = 0,
    replicated_outputs: Container[Value] = frozenset(),
) -> PartitionedGraphs:
    """Partition a graph over devices: emit the graph of every device, with local shapes and collectives.

    Args:
        graph: The graph to partition.
        factors: The factors of `graph`.
        assignment: The layout of each value, and the conversions.
        shard_ranges: The shard ranges of the factors.
        first_sequence_number: The sequence number of the first collective.
        replicated_outputs: Outputs that end whole on every device.
    """
    layouts = _LayoutsAndSequenceNumbers(graph, factors, assignment, shard_ranges, first_sequence_number)
    ends = {
        name: REPLICATE
        if v in replicated_outputs
        else _choose_whole_or_produced_output_layout(assignment.produced_layouts[v])
        for name, v in graph.outputs.items()
    }
    outputs = {name: layouts.compute_layout_of_value(v, ends[name]) for name, v in graph.outputs.items()}
    emitted: dict[Hashable, tuple[Graph, Mapping[Node, Node]]] = {}
    for key in (keys := [_make_equal_device_graph_key(d, assignment, shard_ranges) for d in range(len(shard_ranges))]):
        if key not in emitted:
            device = _DeviceEmitter(keys.index(key), layouts)
            emitted[key] = device.emit_graph(graph, ends), device.source_nodes
    graphs = tuple(emitted[key][0] for key in keys)
    leaves = {
        n.name: layouts.compute_layout_of_value(n.results[0], assignment.produced_layouts[n.results[0]])
        for n in graph.nodes
        if n.is_leaf
    }
    leaves.update(_narrow_replicas_to_reading_devices(graph, graphs, leaves, assignment.fixed_leaves))
    return PartitionedGraphs(graphs, tuple(emitted[key][1] for key in keys), leaves, outputs)


def _choose_whole_or_produced_output_layout(layout: FactorLayout) -> FactorLayout:
    """Choose the layout of an output at the end of a run: whole for a partial sum, otherwise its produced layout."""
    return REPLICATE if layout.is_partial else layout


def _make_equal_device_graph_key(device: int, assignment: ShardingAssignment, shard_ranges: ShardRanges) -> Hashable:
    """Return a key that devices with equal graphs share, so that such a graph is built only once.

    Devices have equal graphs if their shards have equal sizes and no node depends on the device number.
    """
    for c in assignment.conversions:
        if isinstance(c.target_layout, FactorShard | Local) or isinstance(c.source_layout, Local):
            return device
    if assignment.index_operands or any(isinstance(by, Local) for by in assignment.node_layouts.values()):
        return device
    if any(isinstance(layout, EarlierPlanShard) for layout in assignment.produced_layouts.values()):
        return device
    return device == 0, *(
        high - low for low, high in (shard_ranges.ranges_of(f)[device] for f in assignment.sharded_factors)
    )


def _narrow_replicas_to_reading_devices(
    graph: Graph, graphs: Sequence[Graph], leaf_layouts: Mapping[str, Layout], fixed_values: Container[Value]
) -> dict[str, Layout]:
    """Limit replicated weights and states to the devices that read them; return the changed layouts.

    Pinned nodes, which run on one device only, can make the copies on other devices useless. Leaves in `fixed_values`
    keep their layouts.
    """
    read = [{n.name for n in local.nodes if n.is_leaf} for local in graphs]
    homes: dict[str, Layout] = {}
    for node in graph.nodes:
        if (
            node.op in ("weight", "state")
            and leaf_layouts[node.name] is REPLICATE
            and node.results[0] not in fixed_values
        ):
            where = tuple(d for d, names in enumerate(read) if node.name in names)
            if 0 < len(where) < len(graphs):
                homes[node.name] = Local(where)
    return homes


def make_unused_name(name: str, taken_names: Container[str]) -> str:
    """Return `name` with as many tildes appended as it takes to differ from all `taken_names`."""
    while name in taken_names:
        name += "~"
    return name


def keep_unused_collectives(graph: Graph, collectives: Sequence[Value]) -> Graph:
    """Return `graph` with an extra output for each collective that nothing reads.

    Without a reader the graph would lose the collective, but all devices have to call it.
    """
    there, missing = set(graph.nodes), {}
    for number, value in reversed(list(enumerate(collectives))):  # the last first, as it may read earlier ones
        if value.node not in there:
            missing[make_unused_name(f"met.{number}", graph.outputs)] = value
            stack = [value.node]
            while stack:
                there.add(node := stack.pop())
                stack += [s.node for s in node.inputs if s.node not in there]
    return Graph({**graph.outputs, **missing}, graph.updates) if missing else graph


@dataclass(frozen=True, slots=True, eq=False)
class _ValueInLayout:
    """A value in one of its layouts, as a dictionary key: there is one object for each pair of value and layout."""

    value: Value
    layout: FactorLayout


@dataclass(frozen=True, slots=True)
class _DeviceIndependentNode:
    """The properties of a node that are equal on all devices: op, attributes, and operands with their layouts."""

    op: Op[Any]
    attrs: Attrs
    operand_forms: tuple[_ValueInLayout | None, ...]


class _LayoutsAndSequenceNumbers:
    """The layouts of all values and the sequence numbers of collectives and messages, which all devices share."""

    def __init__(
        self,
        graph: Graph,
        factors: Factors,
        assignment: ShardingAssignment,
        shard_ranges: ShardRanges,
        first_sequence_number: int,
    ) -> None:
        self.graph, self.factors, self.assignment, self.shard_ranges = graph, factors, assignment, shard_ranges
        self.node_names = assign_names(graph)  # the names in a dump of the user's graph
        self.sequence_numbers: dict[tuple[Value, FactorLayout], int] = {}
        self.message_numbers: dict[Value, dict[int, int]] = {}
        count = first_sequence_number
        for conversion in (c for c in assignment.conversions if not c.needs_no_communication):
            value, before, after = conversion.value, conversion.source_layout, conversion.target_layout
            if not isinstance(before, Local):
                self.sequence_numbers[value, after] = count
                count += 1
                continue
            message_numbers = self.message_numbers.setdefault(value, {})  # receivers of a local value, each once
            for device in after.devices if isinstance(after, Local) else range(len(shard_ranges)):
                if device not in before.devices and device not in message_numbers:
                    message_numbers[device] = count
                    count += 1
        self._cached_shards: dict[tuple[Value, Factor], Shard] = {}
        self._cached_forms: dict[tuple[Value, FactorLayout], _ValueInLayout] = {}
        self._cached_shapes: dict[_ValueInLayout, tuple[tuple[int, ...], ...]] = {}
        self.produced_forms = {
            value: self.intern_value_in_layout(value, state) for value, state in assignment.produced_layouts.items()
        }
        self.node_templates = {node: self._build_node_template(node) for node in graph.nodes if not node.is_leaf}

    def intern_value_in_layout(self, value: Value, factor_layout: FactorLayout) -> _ValueInLayout:
        """Return the unique object for a value in a layout.

        A value on one device is whole there, so it gets the layout `Replicate`. A partial sum gets the layout in
        which its node produces it.
        """
        if isinstance(factor_layout, Local):
            factor_layout = REPLICATE  # whole on that device
        elif factor_layout is PARTIAL and self.assignment.produced_layouts[value].is_partial:
            factor_layout = self.assignment.produced_layouts[value]
        return self._cached_forms.setdefault((value, factor_layout), _ValueInLayout(value, factor_layout))

    def _build_node_template(self, node: Node) -> _DeviceIndependentNode:
        """Build the device-independent part of a node: its op, attributes, and operands with their layouts."""
        declared, wants = op_of(node), iter(self.assignment.operand_layouts[node])
        reads = tuple([None if s is None else self.intern_value_in_layout(s, next(wants)) for s in node.src])
        return _DeviceIndependentNode(declared, declared.normalise_attributes(node.attrs), reads)

    def compute_shape_on_device(self, form: _ValueInLayout, device: int) -> tuple[int, ...]:
        """Compute the shape of the part of a value that a device has."""
        if form not in self._cached_shapes:
            layout = self.compute_layout_of_value(form.value, form.layout)
            self._cached_shapes[form] = tuple(
                compute_local_shape(form.value.shape, layout, d) for d in range(len(self.shard_ranges))
            )
        return self._cached_shapes[form][device]

    def compute_layout_of_value(self, value: Value, factor_layout: FactorLayout) -> Layout:
        """Compute the layout of a value, with the index ranges of each device, from its layout in terms of factors."""
        if isinstance(factor_layout, Local):
            return factor_layout
        if isinstance(factor_layout, EarlierPlanShard):
            return factor_layout.layout
        if not isinstance(factor_layout, FactorShard):
            return PARTIAL if factor_layout.is_partial else REPLICATE
        if (value, factor_layout.factor) not in self._cached_shards:  # cached, as every device asks at every use
            self._cached_shards[value, factor_layout.factor] = self._build_shard_layout(value, factor_layout.factor)
        return self._cached_shards[value, factor_layout.factor]

    def _build_shard_layout(self, value: Value, factor: Factor) -> Shard:
        """Build the layout of a value that `factor` shards: the sharded axis, and the axis entries of each device."""
        for axis, segments in enumerate(self.factors.axes_of(value)):
            if any(factor in s for s in segments):
                ranges = self.shard_ranges.ranges_of(factor)
                return Shard(
                    axis, tuple(compute_axis_ranges_of_factor(segments, factor, low, high) for low, high in ranges)
                )
        raise AssertionError(f"{value!r} does not have the factor {factor}")


class _DeviceEmitter:
    """Emits the graph of one device: its nodes with local shapes, and its collectives and messages."""

    def __init__(self, device: int, layouts: _LayoutsAndSequenceNumbers) -> None:
        self.device_number, self.layouts = device, layouts
        self.local_values: dict[_ValueInLayout, Value] = {}
        self.source_nodes: dict[Node, Node] = {}
        self.collective_values: list[Value] = []

    def emit_graph(self, graph: Graph, output_layouts: Mapping[str, FactorLayout]) -> Graph:
        """Emit the graph of the device: the nodes that it computes, on its parts of the values, and its collectives.

        Args:
            graph: The graph of the user.
            output_layouts: The layout in which each output ends.
        """
        layouts, assignment = self.layouts, self.layouts.assignment
        for node in graph.nodes:
            by = assignment.produced_layouts[node.results[0]] if node.is_leaf else assignment.node_layouts[node]
            if self._is_on_other_device(by):
                for source in node.inputs:
                    self._emit_collective_for_reader_on_other_device(source)
            elif node.is_leaf:
                self._store_and_send_if_sole_owner(node.results[0], self._emit_local_leaf(node))
            else:
                for value, new in zip(node.results, self._emit_local_node(node), strict=True):
                    self._store_and_send_if_sole_owner(value, new)
        updated = {
            old: new
            for old, new in graph.updates.items()
            if not self._is_on_other_device(assignment.produced_layouts[old])
        }
        for old, new in graph.updates.items():
            if old not in updated:
                self._emit_collective_for_reader_on_other_device(new)
        outputs = {
            name: self._find_or_convert_value(layouts.intern_value_in_layout(v, output_layouts[name]))
            for name, v in graph.outputs.items()
            if not self._is_on_other_device(output_layouts[name])
        }
        updates = {
            self._find_or_convert_value(layouts.produced_forms[old]): self._find_or_convert_value(
                layouts.intern_value_in_layout(new, assignment.produced_layouts[old])
            )
            for old, new in updated.items()
        }
        for old in graph.states:  # an unread state of an earlier plan stays on the device
            if (
                old in assignment.fixed_leaves
                and assignment.produced_layouts[old] is REPLICATE
                and old not in graph.updates
            ):
                updates[self.local_values[layouts.produced_forms[old]]] = self.local_values[layouts.produced_forms[old]]
        return keep_unused_collectives(Graph(outputs, updates), self.collective_values)

    def _is_on_other_device(self, layout: FactorLayout) -> bool:
        """Return whether a value with this layout is only on other devices than this one."""
        return isinstance(layout, Local) and self.device_number not in layout.devices

    def _emit_collective_for_reader_on_other_device(self, operand: Value) -> None:
        """Take part in a collective that makes an operand whole for a node which only another device computes."""
        layout = self.layouts.assignment.produced_layouts[operand]
        if layout.is_partial or isinstance(layout, FactorShard | EarlierPlanShard):
            self._find_or_emit_replicated_value(operand)

    def _store_and_send_if_sole_owner(self, value: Value, local_value: Value) -> None:
        """Store the device's part of a value; if only this device has the value, send it to all its readers."""
        self.local_values[self.layouts.produced_forms[value]] = local_value
        layout = self.layouts.assignment.produced_layouts[value]
        if isinstance(layout, Local) and self.device_number == layout.devices[0]:
            for to, number in self.layouts.message_numbers.get(value, {}).items():
                self.collective_values.append(
                    send(local_value, to=to, sequence=number, name=f"{self.layouts.node_names[value.node]}.to.{to}")
                )

    def _emit_local_leaf(self, node: Node) -> Value:
        """Emit a weight, state, input or constant with the shape of the part that the device stores."""
        value = node.results[0]
        shape = self.layouts.compute_shape_on_device(self.layouts.produced_forms[value], self.device_number)
        return Node(node.op, (), node.attrs, (Spec(shape, value.dtype),), node.name).results[0]

    def _emit_local_node(self, node: Node) -> Sequence[Value]:
        """Emit a node on the device's parts of its operands, and return the results."""
        layouts, assignment, work = self.layouts, self.layouts.assignment, self.layouts.node_templates[node]
        src = [None if form is None else self._find_or_convert_value(form) for form in work.operand_forms]
        results, attrs, by = node.results, work.attrs, assignment.node_layouts[node]
        if work.op.localise is not None and isinstance(assignment.produced_layouts[results[0]], FactorShard):
            first, want = node.inputs[0], assignment.operand_layouts[node][0]
            count = partial(self._count_local_entries, layouts.compute_layout_of_value(first, want))
            shape = layouts.compute_shape_on_device(layouts.produced_forms[results[0]], self.device_number)
            attrs = {**attrs, **work.op.localise(attrs, shape, count)}
        if isinstance(by, FactorShard) and by.factor is layouts.factors.find_factor_roles(node).indexed_factor:
            low, _ = layouts.shard_ranges.ranges_of(by.factor)[self.device_number]
            attrs = {**attrs, "first": low, "total": by.factor.size}
        built = work.op.build_node(src, attrs, layouts.node_names[node], is_normalised=attrs is work.attrs)
        self.source_nodes[built] = node
        new_values = built.results
        for value, new in zip(results, new_values, strict=True):
            assert new.shape == layouts.compute_shape_on_device(layouts.produced_forms[value], self.device_number), (
                f"{node!r} on {self.device_number} gave {new!r}"
            )
        return new_values

    def _count_local_entries(self, layout: Layout, axis: int, end_entry: int) -> int:
        """Count how many of the first `end_entry` entries of an axis the device has."""
        return (
            layout.count_entries_below_index(self.device_number, end_entry)
            if isinstance(layout, Shard) and layout.axis == axis
            else end_entry
        )

    # ---------------------------------------------------------------------------------------------- conversions

    def _find_or_convert_value(self, form: _ValueInLayout) -> Value:
        """Return a value of this device in the given layout; emit the conversion if the device lacks it."""
        if (there := self.local_values.get(form)) is None:
            there = self.local_values[form] = self._emit_layout_conversion(form.value, form.layout)
        return there

    def _find_or_emit_replicated_value(self, value: Value) -> Value:
        """Return the whole value; emit the collective that makes it whole if the device has only a part."""
        return self._find_or_convert_value(self.layouts.intern_value_in_layout(value, REPLICATE))

    def _emit_layout_conversion(self, value: Value, target_layout: FactorLayout) -> Value:
        """Emit the conversion of a value to `target_layout`: a receive, slices of the whole value, or a collective."""
        source_layout = self.layouts.assignment.produced_layouts[value]
        if isinstance(source_layout, Local) and target_layout is REPLICATE:
            return self._emit_receive(value, source_layout)
        if len(find_conversion_path(source_layout, target_layout)) > 1:
            self._find_or_emit_replicated_value(value)
        if source_layout is REPLICATE or self.layouts.intern_value_in_layout(value, REPLICATE) in self.local_values:
            return (
                self._emit_partial_on_first_device(value)
                if target_layout is PARTIAL
                else self._emit_shard_from_slices(value, target_layout)
            )
        new = self._emit_collective(value, source_layout, target_layout)
        self.collective_values.append(new)
        return new

    def _emit_receive(self, value: Value, layout: Local) -> Value:
        """Emit the receive of a value from the first device that has it."""
        source, number = layout.devices[0], self.layouts.message_numbers[value][self.device_number]
        name = f"{self.layouts.node_names[value.node]}.from.{source}"
        new = receive(shape=value.shape, dtype=value.dtype, source=source, sequence=number, name=name)
        self.collective_values.append(new)
        return new

    def _emit_collective(self, value: Value, source_layout: FactorLayout, target_layout: FactorLayout) -> Value:
        """Emit the collective that converts a value from one layout to another, such as an all-gather."""
        mine = self.local_values[self.layouts.produced_forms[value]]
        number, label = self.layouts.sequence_numbers[value, target_layout], self.layouts.node_names[value.node]
        before, after = (
            self.layouts.compute_layout_of_value(value, source_layout),
            self.layouts.compute_layout_of_value(value, target_layout),
        )
        if source_layout.is_partial and target_layout is REPLICATE:
            return all_reduce(mine, sequence=number, name=f"{label}.sum")
        if isinstance(before, Shard) and target_layout is REPLICATE:
            return all_gather(mine, axis=before.axis, runs=before.index_ranges, sequence=number, name=f"{label}.whole")
        assert isinstance(after, Shard)
        shard_attributes = {
            "axis": after.axis,
            "runs": after.index_ranges,
            "rank": self.device_number,
            "sequence": number,
        }
        if source_layout.is_partial:
            return reduce_scatter(mine, **shard_attributes, name=f"{label}.part")
        assert isinstance(before, Shard)
        return all_to_all(
            mine, old_axis=before.axis, old_runs=before.index_ranges, **shard_attributes, name=f"{label}.recut"
        )

    def _emit_shard_from_slices(self, value: Value, target_layout: FactorLayout) -> Value:
        """Emit the device's shard of a whole value: slices of the value, concatenated."""
        layout = self.layouts.compute_layout_of_value(value, target_layout)
        assert isinstance(layout, Shard)
        whole = self._find_or_emit_replicated_value(value)
        name = f"{self.layouts.node_names[value.node]}.share"
        slices = [
            slice_(whole, axis=layout.axis, start=offset, stop=offset + n, name=name)
            for offset, n in layout.index_ranges[self.device_number] or [(0, 0)]
        ]
        joined = slices[0]
        for next_slice in slices[1:]:
            joined = concat(joined, next_slice, axis=layout.axis, name=name)
        return joined

    def _emit_partial_on_first_device(self, value: Value) -> Value:
        """Emit a whole value as a partial sum over devices: device 0 keeps the value, all others have zeros."""
        whole = self._find_or_emit_replicated_value(value)
        return (
            whole
            if self.device_number == 0
            else fill(whole, value=0.0, name=f"{self.layouts.node_names[value.node]}.zero")
        )
