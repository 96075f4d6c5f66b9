"""Whole nodes on devices: the layer split, and what is sent where one device's values are read on another.

No layer is known by name.  The graph is cut where few bytes cross, near the points at which each device has its share
of the weights: between layers that is one activation, inside one it would be caches.
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


def layer_split(graph: Graph, proportions: Sequence[float], elsewhere: Container[Node] = ()) -> Placement:
    """Give each device consecutive nodes, with about its proportion of the bytes of weights and states, those that are
    read `elsewhere` left aside."""
    nodes = [n for n in order_with_state_updates(graph) if not n.is_leaf]
    return _dealt(graph, nodes, _held(nodes, elsewhere), proportions)


def even_shares(graph: Graph, devices: int, hardware: Hardware = CPU) -> tuple[float, ...]:
    """The proportions of bytes of weights and states with which so many devices are predicted to take about equally
    long, each for its own part of `graph`."""
    nodes, counts = [n for n in order_with_state_updates(graph) if not n.is_leaf], Counts()
    held, seconds = _held(nodes), [hardware.compute(*counts.of(node)) for node in nodes]
    where = _dealt(graph, nodes, seconds, [1.0] * devices)
    sums = [0.0] * devices
    for node, nbytes in zip(nodes, held, strict=True):
        sums[where[node]] += nbytes
    return tuple(sums)


def _held(nodes: Sequence[Node], elsewhere: Container[Node] = ()) -> list[float]:
    """For each node the bytes of weights and states that no node before it has read."""
    seen: set[Value] = set()
    held = []
    for node in nodes:
        fresh = {s for s in node.inputs if s.node.op in ("weight", "state") and node not in elsewhere} - seen
        seen |= fresh
        held.append(float(sum(s.spec.nbytes for s in fresh)))
    return held


def _dealt(graph: Graph, nodes: Sequence[Node], loads: Sequence[float], proportions: Sequence[float]) -> Placement:
    """Give each device consecutive nodes with about its proportion of the loads, so that little has to be sent."""
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
    """The placement of a graph over weights and states that lie on devices already.

    A node runs where a weight or state of its own lies, otherwise with the last of its sources.
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
    """For each point between nodes the bytes that would have to cross it: live values, and states in use."""
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
    """Where each computed value is made, and where each state lives: where its new value is made, or it is first
    read."""
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


def place(graph: Graph, placement: Placement, devices: int, held: Mapping[Value, Local] = NOTHING_HELD) -> Sharded:
    """Emit the graph of every device: its nodes, what it receives, what it sends.

    A value is sent at most once to each device.  A weight is kept on every device that reads it; a state lives where
    its new value is made (or where it is first read), and is sent from there.  What is `held` by devices already stays
    there.
    """
    home = homes(graph, placement)
    home.update({value: layout.devices[0] for value, layout in held.items()})
    emitter = _Emitter(graph, placement, home, devices, held)
    leaves: dict[str, Layout] = {}
    for leaf in (n for n in graph.nodes if n.is_leaf):
        having = tuple(d for d in range(devices) if (d, leaf.results[0]) in emitter.local)
        kept = {"weight": having or (0,), "state": (home.get(leaf.results[0], 0),)}
        leaves[leaf.name] = held.get(leaf.results[0]) or (Local(kept[leaf.op]) if leaf.op in kept else REPLICATE)
    outputs: dict[str, Layout] = {name: Local((emitter.where(v),)) for name, v in graph.outputs.items()}
    return Sharded(emitter.graphs(), tuple(emitter.origins), leaves, outputs)


class _Emitter:
    """Walks the graph once, adding each node to the graph of its device."""

    def __init__(
        self,
        graph: Graph,
        placement: Placement,
        home: Mapping[Value, int],
        devices: int,
        held: Mapping[Value, Local],
    ) -> None:
        self.graph, self.placement, self.home, self.devices, self.held = graph, placement, home, devices, held
        self.origins: list[dict[Node, Node]] = [{} for _ in range(devices)]
        self.local: dict[tuple[int, Value], Value] = {}
        self.sent: list[dict[str, Value]] = [{} for _ in range(devices)]
        self.sequence = 0
        self.called = assign_names(graph)
        for node in graph.nodes:
            if not node.is_leaf:
                device = placement[node]
                src = tuple(None if s is None else self._on(device, s) for s in node.src)
                copy = Node(node.op, src, node.attrs, node.specs, self.called[node])
                self.origins[device][copy] = node
                self.local.update(((device, v), new) for v, new in zip(node.results, copy.results, strict=True))
        for state, new in graph.updates.items():
            self._on(home[state], state)
            self._on(home[state], new)
        for value in graph.outputs.values():
            self._on(self.where(value), value)

    def where(self, value: Value) -> int:
        """The device that has a value at the end."""
        return self.home.get(value, 0)

    def _on(self, device: int, value: Value) -> Value:
        """`value` on `device`: its own, a leaf, or received from where it is made."""
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
            graphs.append(Graph({**outputs, **self.sent[device]}, updates))
        return tuple(graphs)
