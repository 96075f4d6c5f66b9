"""The layer split: whole nodes on devices, and messages for the values that another device reads.

The graph is split near the points at which each device has its share of the weights, where the fewest bytes cross. That
is between layers, where one activation crosses; inside a layer, KV caches would cross. Names of layers are not used.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from itertools import accumulate, pairwise
from types import MappingProxyType

from ...graph.graph import Graph, assign_names, order_with_state_updates
from ...graph.node import Node, Value
from ...ops.collectives import receive, send
from ..layout import REPLICATE, Layout, Local
from ..machines.hardware import CPU, Counts, Hardware
from .emit import Sharded, unused

Placement = Mapping[Node, int]
"""The number of the device that runs each node."""
NOTHING_HELD: Mapping[Value, Local] = MappingProxyType({})
"""No value has a device from an earlier plan."""


def layer_split(graph: Graph, proportions: Sequence[float], elsewhere: Container[Node] = ()) -> Placement:
    """Give each device consecutive nodes with about its proportion of the bytes of weights and states.

    Args:
        graph: The graph to split.
        proportions: A number for each device.
        elsewhere: Nodes that do not count: the weights and states that they read are left aside.
    """
    nodes = [n for n in order_with_state_updates(graph) if not n.is_leaf]
    return _dealt(graph, nodes, _held(nodes, elsewhere), proportions)


def even_shares(graph: Graph, devices: int, hardware: Hardware = CPU) -> tuple[float, ...]:
    """Return the proportions of stored bytes with which all devices are predicted to compute for an equal time.

    Args:
        graph: The graph to split.
        devices: The number of devices.
        hardware: The speeds of one device.
    """
    nodes, counts = [n for n in order_with_state_updates(graph) if not n.is_leaf], Counts()
    held, seconds = _held(nodes), [hardware.compute(*counts.of(node)) for node in nodes]
    where = _dealt(graph, nodes, seconds, [1.0] * devices)
    sums = [0.0] * devices
    for node, nbytes in zip(nodes, held, strict=True):
        sums[where[node]] += nbytes
    return tuple(sums)


def _held(nodes: Sequence[Node], elsewhere: Container[Node] = ()) -> list[float]:
    """Return for each node the bytes of weights and states that it is the first to read."""
    seen: set[Value] = set()
    held = []
    for node in nodes:
        fresh = {s for s in node.inputs if s.node.op in ("weight", "state") and node not in elsewhere} - seen
        seen |= fresh
        held.append(float(sum(s.spec.nbytes for s in fresh)))
    return held


def _dealt(graph: Graph, nodes: Sequence[Node], loads: Sequence[float], proportions: Sequence[float]) -> Placement:
    """Give each device consecutive nodes with about its proportion of `loads`, at points where few bytes cross.

    For each boundary of two devices there is a wanted load before it. A point is near if its load differs from the
    wanted load by at most half the smaller share of the two devices. The near point with the fewest crossing bytes is
    taken.
    """
    live = [device for device, proportion in enumerate(proportions) if proportion > 0]
    shares = [proportions[device] / sum(proportions) for device in live]
    held = list(accumulate(loads))
    total, crossing = held[-1] if held else 0, _crossing(graph, nodes)
    ends: list[int] = []
    wanted = 0.0
    for share, following in pairwise(shares):
        wanted += share * total
        reach = min(share, following) * total / 2
        first = ends[-1] if ends else 0
        off = {p: abs((held[p - 1] if p else 0) - wanted) for p in range(first, len(nodes) + 1)}
        near = [p for p in off if off[p] <= reach] or [min(off, key=lambda p: off[p])]
        cheapest = min(crossing[p] for p in near)
        ends.append(min((p for p in near if crossing[p] <= cheapest), key=lambda p: (off[p], p)))
    return {node: live[sum(i >= end for end in ends)] for i, node in enumerate(nodes)}


def placed_like(graph: Graph, leaves: Mapping[str, Layout]) -> Placement:
    """Return the placement of a graph over weights and states that devices have already.

    A node runs on a device that has its weight or state, otherwise on the device of its last operand.
    """
    placement: dict[Node, int] = {}
    for node in graph.nodes:
        if node.is_leaf:
            continue
        follows = max((placement[s.node] for s in node.inputs if not s.node.is_leaf), default=0)
        homes = [leaves.get(s.node.name) for s in node.inputs if s.node.op in ("weight", "state")]
        options = [h.devices for h in homes if isinstance(h, Local)]
        placement[node] = follows if all(follows in o for o in options) else options[0][0]
    return placement


def _crossing(graph: Graph, nodes: Sequence[Node]) -> list[int]:
    """Return for each point between nodes the bytes of live values and used states that cross it."""
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


def homes(graph: Graph, placement: Placement) -> dict[Value, int]:
    """Return the device of each computed value and of each state.

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


def order_by_hops(graph: Graph, placement: Placement) -> Sequence[Node]:
    """Return the nodes that compute by the largest number of messages on a path to each.

    So a device sends the results of its independent nodes before the results that wait for other devices.
    """
    hops: dict[Node, int] = {}
    for node in graph.nodes:
        if not node.is_leaf:
            sources = (source.node for source in node.inputs if not source.node.is_leaf)
            hops[node] = max((hops[source] + (placement[source] != placement[node]) for source in sources), default=0)
    return sorted(hops, key=hops.__getitem__)


def place(
    graph: Graph,
    placement: Placement,
    devices: int,
    held: Mapping[Value, Local] = NOTHING_HELD,
    order: Sequence[Node] = (),
) -> Sharded:
    """Emit the graph of every device: its nodes, and the messages that it receives and sends.

    1. A value is sent at most once to each device, as soon as it is computed.
    2. A weight is on every device that reads it.
    3. A state is on the device that computes its new value, or else that first reads it; other readers receive it.

    Args:
        graph: The graph to split.
        placement: The device of each node.
        devices: The number of devices.
        held: Devices of weights and states from an earlier plan, which stay.
        order: The nodes that compute, in order; by default by the number of messages before each.
    """
    home = homes(graph, placement)
    home.update({value: layout.devices[0] for value, layout in held.items()})
    emitter = _Emitter(graph, placement, home, devices, held, order)
    leaves: dict[str, Layout] = {}
    for leaf in (n for n in graph.nodes if n.is_leaf):
        having = tuple(d for d in range(devices) if (d, leaf.results[0]) in emitter.local)
        kept = {"weight": having or (0,), "state": (home.get(leaf.results[0], 0),)}
        leaves[leaf.name] = held.get(leaf.results[0]) or (Local(kept[leaf.op]) if leaf.op in kept else REPLICATE)
    outputs: dict[str, Layout] = {name: Local((emitter.where(v),)) for name, v in graph.outputs.items()}
    return Sharded(emitter.graphs(), tuple(emitter.origins), leaves, outputs)


class _Emitter:
    """Visits each node once and adds it to the graph of its device."""

    def __init__(
        self,
        graph: Graph,
        placement: Placement,
        home: Mapping[Value, int],
        devices: int,
        held: Mapping[Value, Local],
        order: Sequence[Node] = (),
    ) -> None:
        users = graph.users()
        self.graph, self.placement, self.home, self.devices, self.held = graph, placement, home, devices, held
        self.origins: list[dict[Node, Node]] = [{} for _ in range(devices)]
        self.local: dict[tuple[int, Value], Value] = {}
        self.sent: list[dict[str, Value]] = [{} for _ in range(devices)]
        self.sequence = 0
        self.called = assign_names(graph)
        for node in order or order_by_hops(graph, placement):
            if not node.is_leaf:
                device = placement[node]
                src = tuple(None if s is None else self._on(device, s) for s in node.src)
                copy = Node(node.op, src, node.attrs, node.specs, self.called[node])
                self.origins[device][copy] = node
                self.local.update(((device, v), new) for v, new in zip(node.results, copy.results, strict=True))
                for value in node.results:
                    for reader in users[value]:
                        self._on(placement[reader], value)
        for state, new in graph.updates.items():
            self._on(home[state], state)
            self._on(home[state], new)
        for value in graph.outputs.values():
            self._on(self.where(value), value)

    def where(self, value: Value) -> int:
        """Return the device that has a value at the end."""
        return self.home.get(value, 0)

    def _on(self, device: int, value: Value) -> Value:
        """Return `value` on `device`: computed there, a leaf, or received."""
        key = (device, value)
        if key not in self.local:
            home = self.home.get(value, device)
            if value in self.held and device in self.held[value].devices:
                home = device
            if value.node.is_leaf and home == device:
                self.local[key] = value
            else:
                self.local[key] = self._send(self._on(home, value), home, device)
        return self.local[key]

    def _send(self, value: Value, home: int, device: int) -> Value:
        number, self.sequence = self.sequence, self.sequence + 1
        name = f"{value.node.name}.to.{device}"
        self.sent[home][unused(f"sent.{number}", self.graph.outputs)] = send(
            value, to=device, sequence=number, name=name
        )
        return receive(
            shape=value.shape, dtype=value.dtype, source=home, sequence=number, name=f"{value.node.name}.from.{home}"
        )

    def graphs(self) -> tuple[Graph, ...]:
        graphs = []
        for device in range(self.devices):
            outputs = {name: self.local[device, v] for name, v in self.graph.outputs.items() if self.where(v) == device}
            updates = {
                self.local[device, state]: self.local[device, new]
                for state, new in self.graph.updates.items()
                if self.home[state] == device
            }
            graphs.append(Graph({**self.sent[device], **outputs}, updates))
        return tuple(graphs)
