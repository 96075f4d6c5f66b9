"""The layer split: whole nodes on devices, and messages for the values that another device reads.

Each device should store its share of the weights. Near each ideal split point, the point with the fewest crossing bytes
is taken. It is between layers, where one activation crosses; inside a layer, KV caches would cross. Names of layers are
not used.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from itertools import accumulate, pairwise
from types import MappingProxyType

from ...graph.errors import PlanError
from ...graph.graph import Graph, assign_names, order_updates_directly_after_operands
from ...graph.node import Node, Value
from ...graph.validation import instance_of, integer_between, validate_arguments
from ...ops.collectives import receive, send
from ..costs.hardware import DEFAULT_HARDWARE, Hardware, WorkCounter
from ..ir.layout import REPLICATE, Layout, Local
from .partitioner import PartitionedGraphs, make_unused_name

Placement = Mapping[Node, int]
"""The number of the device that runs each node."""
NO_FIXED_VALUES: Mapping[Value, Local] = MappingProxyType({})
"""No value has a device from an earlier plan."""


def split_layers(graph: Graph, proportions: Sequence[float], excluded_nodes: Container[Node] = ()) -> Placement:
    """Split a graph into consecutive nodes for each device, in proportion to the stored bytes.

    The result is the device of each node. Stored bytes are the bytes of weights and states. Each counts for the first
    node that reads it.

    Args:
        graph: The graph to split.
        proportions: The proportion of each device; they need not add up to 1.
        excluded_nodes: Nodes with weights and states that do not count, because pins place them.
    """
    nodes = [n for n in order_updates_directly_after_operands(graph) if not n.is_leaf]
    return _split_nodes_by_load(graph, nodes, _compute_first_read_leaf_bytes(nodes, excluded_nodes), proportions)


@validate_arguments(
    PlanError, graph=instance_of(Graph), device_count=integer_between(1, 1 << 16), hardware=instance_of(Hardware)
)
def compute_balanced_proportions(
    graph: Graph, device_count: int, hardware: Hardware = DEFAULT_HARDWARE
) -> tuple[float, ...]:
    """Compute how to divide the stored bytes, so that `split_layers` gives all devices equal predicted times.

    Args:
        graph: The graph to split.
        device_count: The number of devices.
        hardware: The speeds of one device.

    Returns:
        The proportion of stored bytes for each device.
    """
    nodes, counts = [n for n in order_updates_directly_after_operands(graph) if not n.is_leaf], WorkCounter()
    stored_bytes, seconds = (
        _compute_first_read_leaf_bytes(nodes),
        [hardware.compute_seconds(*counts.count_work(node)) for node in nodes],
    )
    where = _split_nodes_by_load(graph, nodes, seconds, [1.0] * device_count)
    sums = [0.0] * device_count
    for node, nbytes in zip(nodes, stored_bytes, strict=True):
        sums[where[node]] += nbytes
    return tuple(sums)


def _compute_first_read_leaf_bytes(nodes: Sequence[Node], excluded_nodes: Container[Node] = ()) -> list[float]:
    """Compute for each node the bytes of weights and states that it is the first to read."""
    seen: set[Value] = set()
    new_bytes = []
    for node in nodes:
        fresh = {s for s in node.inputs if s.node.op in ("weight", "state") and node not in excluded_nodes} - seen
        seen |= fresh
        new_bytes.append(float(sum(s.spec.nbytes for s in fresh)))
    return new_bytes


def _split_nodes_by_load(
    graph: Graph, nodes: Sequence[Node], loads: Sequence[float], proportions: Sequence[float]
) -> Placement:
    """Split consecutive nodes over devices so that each device has about its proportion of the load.

    1. For each boundary between two devices, compute the ideal load before it.
    2. Consider the points near the ideal: the load differs by at most half the smaller share of the two devices.
    3. Choose the point among them with the fewest bytes that cross it.

    Args:
        graph: The graph to split.
        nodes: The nodes that compute, in order.
        loads: The load of each node, such as its seconds or stored bytes.
        proportions: The proportion of each device.
    """
    live = [device for device, proportion in enumerate(proportions) if proportion > 0]
    shares = [proportions[device] / sum(proportions) for device in live]
    cumulative_loads = list(accumulate(loads))
    total, crossing = (
        cumulative_loads[-1] if cumulative_loads else 0,
        _compute_bytes_crossing_each_split_point(graph, nodes),
    )
    ends: list[int] = []
    ideal_load = 0.0
    for share, following in pairwise(shares):
        ideal_load += share * total
        reach = min(share, following) * total / 2
        first = ends[-1] if ends else 0
        off = {p: abs((cumulative_loads[p - 1] if p else 0) - ideal_load) for p in range(first, len(nodes) + 1)}
        candidate_points = [p for p in off if off[p] <= reach] or [min(off, key=lambda p: off[p])]
        cheapest = min(crossing[p] for p in candidate_points)
        ends.append(min((p for p in candidate_points if crossing[p] <= cheapest), key=lambda p: (off[p], p)))
    return {node: live[sum(i >= end for end in ends)] for i, node in enumerate(nodes)}


def place_nodes_where_leaves_are_stored(graph: Graph, leaf_layouts: Mapping[str, Layout]) -> Placement:
    """Derive the device of each node from the devices that store the graph's weights and states already.

    A node with a stored operand runs on a device with this operand. Any other node runs on the last device of its
    operands.
    """
    placement: dict[Node, int] = {}
    for node in graph.nodes:
        if node.is_leaf:
            continue
        follows = max((placement[s.node] for s in node.inputs if not s.node.is_leaf), default=0)
        homes = [leaf_layouts.get(s.node.name) for s in node.inputs if s.node.op in ("weight", "state")]
        options = [h.devices for h in homes if isinstance(h, Local)]
        placement[node] = follows if all(follows in o for o in options) else options[0][0]
    return placement


def _compute_bytes_crossing_each_split_point(graph: Graph, nodes: Sequence[Node]) -> list[int]:
    """Compute the bytes that would cross a split at each point between two nodes.

    These are the bytes of values and states that nodes before and after the point use.
    """
    at = {node: i for i, node in enumerate(nodes)}
    change = [0] * (len(nodes) + 2)
    spans: dict[Value, list[int]] = {}
    for node in nodes:
        for value in node.results:
            spans.setdefault(value, []).append(at[node])
        for source in node.inputs:
            if not source.node.is_leaf or source.node.op == "state":
                spans.setdefault(source, []).append(at[node])
    for state, new in graph.updates.items():
        if new.node in at:
            spans.setdefault(state, []).append(at[new.node])
    for value, places in spans.items():
        change[min(places) + 1] += value.spec.nbytes
        change[max(places) + 1] -= value.spec.nbytes
    return list(accumulate(change))


def find_devices_of_values_and_states(graph: Graph, placement: Placement) -> dict[Value, int]:
    """Find the device of each computed value and of each state, for a placement of nodes.

    A state is on the device that computes its new value, or else on the device that first reads it.
    """
    home: dict[Value, int] = {}
    for node in graph.nodes:
        for value in node.results:
            if not node.is_leaf:
                home[value] = placement[node]
    users = graph.users()
    for state in graph.states:
        new = graph.updates.get(state)
        readers = [placement[n] for n in users[state]]
        home[state] = home[new] if new in home else (readers or [0])[0]
    return home


def order_nodes_by_preceding_message_count(graph: Graph, placement: Placement) -> Sequence[Node]:
    """Order the nodes by the largest number of messages on a path that leads to each node, fewest first.

    So a device first computes and sends the results that need no values from other devices. Leaves are left out.
    """
    hops: dict[Node, int] = {}
    for node in graph.nodes:
        if not node.is_leaf:
            sources = (source.node for source in node.inputs if not source.node.is_leaf)
            hops[node] = max((hops[source] + (placement[source] != placement[node]) for source in sources), default=0)
    return sorted(hops, key=hops.__getitem__)


def emit_placed_graphs(
    graph: Graph,
    placement: Placement,
    device_count: int,
    fixed_layouts: Mapping[Value, Local] = NO_FIXED_VALUES,
    order: Sequence[Node] = (),
) -> PartitionedGraphs:
    """Emit the graph of every device for a placement of whole nodes: its nodes, and the messages between devices.

    1. A value is sent at most once to each device, as soon as it is computed.
    2. A weight is on every device that reads it.
    3. A state is on the device that computes its new value, or else on the device of its first reader. Other readers
       receive it.

    Args:
        graph: The graph to split.
        placement: The device of each node.
        device_count: The number of devices.
        fixed_layouts: Devices of weights and states from an earlier plan, which stay.
        order: The nodes that compute, in order; by default fewest messages on a path to the node first.
    """
    home = find_devices_of_values_and_states(graph, placement)
    home.update({value: layout.devices[0] for value, layout in fixed_layouts.items()})
    emitter = _PlacedEmitter(graph, placement, home, device_count, fixed_layouts, order)
    leaves: dict[str, Layout] = {}
    for leaf in (n for n in graph.nodes if n.is_leaf):
        having = tuple(d for d in range(device_count) if (d, leaf.results[0]) in emitter.local_values)
        devices_by_op = {"weight": having or (0,), "state": (home.get(leaf.results[0], 0),)}
        leaves[leaf.name] = fixed_layouts.get(leaf.results[0]) or (
            Local(devices_by_op[leaf.op]) if leaf.op in devices_by_op else REPLICATE
        )
    outputs: dict[str, Layout] = {name: Local((emitter.find_device_of_value(v),)) for name, v in graph.outputs.items()}
    return PartitionedGraphs(emitter.build_graphs(), tuple(emitter.source_nodes), leaves, outputs)


class _PlacedEmitter:
    """Emits each node in the graph of its device, with messages for readers on other devices."""

    def __init__(
        self,
        graph: Graph,
        placement: Placement,
        home_devices: Mapping[Value, int],
        device_count: int,
        fixed_layouts: Mapping[Value, Local],
        order: Sequence[Node] = (),
    ) -> None:
        users = graph.users()
        self.graph, self.placement, self.home_devices, self.device_count, self.fixed_layouts = (
            graph,
            placement,
            home_devices,
            device_count,
            fixed_layouts,
        )
        self.source_nodes: list[dict[Node, Node]] = [{} for _ in range(device_count)]
        self.local_values: dict[tuple[int, Value], Value] = {}
        self.sent_values: list[dict[str, Value]] = [{} for _ in range(device_count)]
        self.next_sequence_number = 0
        self.node_names = assign_names(graph)
        for node in order or order_nodes_by_preceding_message_count(graph, placement):
            if not node.is_leaf:
                device = placement[node]
                src = tuple(None if s is None else self._find_or_receive_value(device, s) for s in node.src)
                copy = Node(node.op, src, node.attrs, node.specs, self.node_names[node])
                self.source_nodes[device][copy] = node
                self.local_values.update(((device, v), new) for v, new in zip(node.results, copy.results, strict=True))
                for value in node.results:
                    for reader in users[value]:
                        self._find_or_receive_value(placement[reader], value)
        for state, new in graph.updates.items():
            self._find_or_receive_value(home_devices[state], state)
            self._find_or_receive_value(home_devices[state], new)
        for value in graph.outputs.values():
            self._find_or_receive_value(self.find_device_of_value(value), value)

    def find_device_of_value(self, value: Value) -> int:
        """Find the device that stores a value at the end of a run; 0 for values without a device, such as inputs."""
        return self.home_devices.get(value, 0)

    def _find_or_receive_value(self, device: int, value: Value) -> Value:
        """Find `value` in the graph of `device`, or emit a message from the device that has it."""
        key = (device, value)
        if key not in self.local_values:
            home = self.home_devices.get(value, device)
            if value in self.fixed_layouts and device in self.fixed_layouts[value].devices:
                home = device
            if value.node.is_leaf and home == device:
                self.local_values[key] = value
            else:
                self.local_values[key] = self._emit_message(self._find_or_receive_value(home, value), home, device)
        return self.local_values[key]

    def _emit_message(self, value: Value, sender: int, receiver: int) -> Value:
        """Emit a message: the send of `value` on one device and its receive on the other; return the received value."""
        number, self.next_sequence_number = self.next_sequence_number, self.next_sequence_number + 1
        name = f"{value.node.name}.to.{receiver}"
        self.sent_values[sender][make_unused_name(f"sent.{number}", self.graph.outputs)] = send(
            value, to=receiver, sequence=number, name=name
        )
        return receive(
            shape=value.shape,
            dtype=value.dtype,
            source=sender,
            sequence=number,
            name=f"{value.node.name}.from.{sender}",
        )

    def build_graphs(self) -> tuple[Graph, ...]:
        """Build the graph of every device; the sends are extra outputs, because nothing reads them."""
        graphs = []
        for device in range(self.device_count):
            outputs = {
                name: self.local_values[device, v]
                for name, v in self.graph.outputs.items()
                if self.find_device_of_value(v) == device
            }
            updates = {
                self.local_values[device, state]: self.local_values[device, new]
                for state, new in self.graph.updates.items()
                if self.home_devices[state] == device
            }
            graphs.append(Graph({**self.sent_values[device], **outputs}, updates))
        return tuple(graphs)
