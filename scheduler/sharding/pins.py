"""Pins: nodes that only one device computes, each with the reason.

There are three reasons: a placement rule of the user, an op that other devices do not support, and a discrete choice
that one device must make. A pin holds in every split mode. Weights and states that only pinned nodes read are on the
devices of these nodes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ...backends.base import Backend, Device
from ...backends.capabilities import find_class_of_equal_devices
from ...graph.errors import PlanError
from ...graph.graph import Graph, assign_names
from ...graph.node import Node, Value
from ...ops import op_of
from ...ops.registry import find_view_base
from ..ir.execution_plan import PinnedNodes
from ..ir.layout import Layout, Local, Replicate, Shard
from .factor_layouts import EarlierPlanShard

PlacementRules = Sequence[tuple[str, str]]
"""Placement rules: pairs (regular expression, device) of ``--place REGEX=DEVICE``. The first match counts."""


@dataclass(frozen=True, slots=True)
class Pin:
    """The assignment of a node to one device, which alone computes the node, with the reason."""

    device: int
    reason: str
    is_relocated: bool = False
    """Whether the reason is that other devices do not support the node; such a node is not moved again."""


NodePins = Mapping[Node, Pin]


@dataclass(frozen=True, slots=True)
class Pins:
    """All placements that the search may not change: nodes on one device, and fixed layouts of weights and states."""

    nodes: NodePins = field(default_factory=dict)
    leaves: Mapping[Value, Local | Replicate | EarlierPlanShard] = field(default_factory=dict)


NO_PINS = Pins()


def find_weight_or_state_under_views(value: Value) -> Node | None:
    """Find the weight or state that `value` is or views; None if it is neither."""
    node = find_view_base(value).node
    return node if node.op in ("weight", "state") else None


# -------------------------------------------------------------------------------------------------------- the reasons


def find_user_pins(
    graph: Graph, placement_rules: PlacementRules, device_names: Sequence[str], *, strict: bool = True
) -> dict[Node, Pin]:
    """Find the device of each node that one of the user's placement rules matches, as pins.

    A rule matches the name of the node, or of a weight or state that the node reads. The first matching rule counts.

    Args:
        graph: The graph to pin.
        placement_rules: Pairs (regular expression, device name).
        device_names: The names of all devices.
        strict: Whether each rule must match a node.

    Raises:
        PlanError: A pattern is not a regular expression, a device is unknown, or with `strict` a rule matches no node.
    """
    pins: dict[Node, Pin] = {}
    if not placement_rules:
        return pins
    node_names = assign_names(graph)
    for pattern, device in placement_rules:
        expression, rule_text = _compile_pattern(pattern), f"place='{pattern}={device}'"
        if device not in device_names:
            raise PlanError(
                f"{rule_text}: there is no device {device!r} in the group; it has {', '.join(device_names)}"
            )
        matching = {
            n for n, name in node_names.items() if n.op not in ("input", "constant") and expression.search(name)
        }
        if strict and not matching:
            raise PlanError(f"{rule_text}: no node, weight or state has such a name; `hocket dump` lists them")
        pin = Pin(device_names.index(device), rule_text)
        for node in graph.nodes:
            read = {node, *filter(None, map(find_weight_or_state_under_views, node.inputs))}
            if not node.is_leaf and not matching.isdisjoint(read):
                pins.setdefault(node, pin)
    return pins


def _compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile the pattern of a placement rule; raise `PlanError` if it is no regular expression."""
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError, Warning) as why:  # Warning: Python may be set to raise warnings
        raise PlanError(f"place={pattern!r:.80}: not a regular expression: {why}") from None


def pin_discrete_choices_if_backends_differ(graph: Graph, group: Sequence[tuple[Backend, Device]]) -> dict[Node, Pin]:
    """Pin all nodes with a discrete choice, such as an argmax, to device 0, if the backends of the group differ.

    Backends round differently, so near a tie they would choose differently. Such a node has float operands and integer
    results. The result is empty if all backends are equal.
    """
    if len({(type(backend), backend.name) for backend, _ in group}) == 1:
        return {}
    pin = Pin(0, "backends are mixed and round differently, so one of them makes discrete choices")
    return {n: pin for n in graph.nodes if not n.is_leaf and _is_discrete_choice(n)}


def _is_discrete_choice(node: Node) -> bool:
    """Return whether a node makes a discrete choice, such as an argmax: float operands and integer results."""
    return any(s.dtype.is_float for s in node.inputs) and any(v.dtype.is_integer for v in node.results)


def pin_earlier_layouts_of_changed_leaves(
    pins: Pins, graph: Graph, leaf_layouts: Mapping[str, Layout], earlier_layouts: Mapping[str, Layout]
) -> Pins:
    """Keep the earlier layout of each weight and state that the new plan would lay out differently; return all pins.

    Both plans share the memory of weights and states. Two graphs may slice one weight differently, so a factor of one
    graph need not exist in the other.

    Args:
        pins: The pins so far.
        graph: The graph of the new plan.
        leaf_layouts: The layouts of leaves in the new plan.
        earlier_layouts: The layouts of leaves in the earlier plan.
    """
    others: dict[Value, Replicate | EarlierPlanShard] = {}
    for value in (*graph.weights, *graph.states):
        layout = earlier_layouts.get(value.node.name)
        if isinstance(layout, Shard | Replicate) and layout != leaf_layouts[value.node.name]:
            others[value] = EarlierPlanShard(layout) if isinstance(layout, Shard) else layout
    return Pins(pins.nodes, {**pins.leaves, **others})


def pin_readers_to_devices_of_leaves(graph: Graph, earlier_layouts: Mapping[str, Layout]) -> Pins:
    """Pin each node that reads a weight or state that an earlier plan placed on some devices only.

    The node runs on the first device that has the weight or state. The weight or state keeps its layout.
    """
    homes = {
        n.results[0]: earlier_layouts[n.name]
        for n in graph.nodes
        if n.op in ("weight", "state") and n.name in earlier_layouts
    }
    fixed_layouts = {value: layout for value, layout in homes.items() if isinstance(layout, Local)}
    pins: dict[Node, Pin] = {}
    for node in graph.nodes:
        for leaf in filter(None, map(find_weight_or_state_under_views, node.inputs)):
            if (home := fixed_layouts.get(leaf.results[0])) is not None:
                pins.setdefault(node, Pin(home.devices[0], "its weights or states are on this device"))
    return Pins(pins, fixed_layouts)


@dataclass(frozen=True, slots=True)
class UnsupportedNode:
    """A node of a device's graph that the device does not support, with the reason.

    `local_node` is in the graph of the device. `source_node` is the node of the user's graph for which it was emitted,
    or None for other nodes.
    """

    source_node: Node | None
    local_node: Node
    device: int
    reason: str


def find_unsupported_nodes(
    graphs: Sequence[Graph], source_nodes: Sequence[Mapping[Node, Node]], group: Sequence[tuple[Backend, Device]]
) -> list[UnsupportedNode]:
    """Find the nodes in the graph of each device that this device does not support.

    Args:
        graphs: The graph of each device.
        source_nodes: For each device, the user's node of each node.
        group: The backend and the device of each member.
    """
    refused = []
    asked: dict[Hashable, dict[Node, str]] = {}  # by graph and grade of device: reasons by unsupported node
    for number, (graph, origin, (backend, device)) in enumerate(zip(graphs, source_nodes, group, strict=True)):
        key = (graph, find_class_of_equal_devices(backend, device))
        if key not in asked:
            work = (n for n in graph.nodes if not n.is_leaf and not op_of(n).is_view)
            answers = ((n, backend.supports(n, device)) for n in work)
            asked[key] = {n: answer.reason for n, answer in answers if not answer.ok}
        if cannot := asked[key]:
            known: dict[Node, Node | None] = dict(origin)
            for node in reversed(graph.nodes):  # nodes of the planner serve the node that reads them
                for source in node.inputs:
                    known.setdefault(source.node, known.get(node))
            refused += [UnsupportedNode(known.get(n), n, number, why) for n, why in cannot.items()]
    return refused


def pin_unsupported_nodes(
    unsupported_nodes: Iterable[UnsupportedNode], pins: NodePins, group: Sequence[tuple[Backend, Device]]
) -> dict[Node, Pin]:
    """Assign each unsupported node to the first device of the group that supports it; return these new pins.

    Args:
        unsupported_nodes: The unsupported nodes.
        pins: The pins so far.
        group: The backend and the device of each member.

    Raises:
        PlanError: All devices refuse a node, or the node was moved before.
    """
    moved: dict[Node, Pin] = {}
    for one in unsupported_nodes:
        if one.source_node in moved:
            continue
        names_it = f"{group[one.device][1]} cannot run {one.local_node.op}: {one.reason}"
        if one.source_node is None or (one.source_node in pins and pins[one.source_node].is_relocated):
            raise PlanError(f"{one.local_node!r} cannot run on {group[one.device][1]}: {one.reason}")
        answers = [backend.supports(one.source_node, device) for backend, device in group]
        able = [i for i, answer in enumerate(answers) if answer.ok]
        if not able:
            reasons = [f"{device}: {a.reason}" for (_, device), a in zip(group, answers, strict=True)]
            raise PlanError(f"{one.source_node!r} cannot run on {'; nor on '.join(reasons)}")
        asked = f"{pins[one.source_node].reason}, but " if one.source_node in pins else ""
        moved[one.source_node] = Pin(able[0], asked + names_it, is_relocated=True)
    return moved


# --------------------------------------------------------------------------------------------------- consequences


def pin_neighbours_of_pinned_nodes(graph: Graph, pins: NodePins) -> dict[Node, Pin]:
    """Move further nodes to the devices of pinned nodes that they read or feed, to save messages; return all pins.

    A pin assigns a node to one device.

    1. A view is pinned if all its readers are pinned to one device.
    2. A node is pinned if all its computed operands come from pinned nodes of one device, and no other unpinned node
       reads them. It must not read a weight or state.
    """
    if not pins:
        return {}
    found, users = dict(pins), graph.users()
    ends = {v.node for v in (*graph.outputs.values(), *graph.updates.values())}
    for node in reversed(graph.nodes):
        if not node.is_leaf and node not in found and op_of(node).is_view and node not in ends:
            readers = [found.get(u) for v in node.results for u in users[v]]
            if readers and readers[0] and {r and r.device for r in readers} == {readers[0].device}:
                found[node] = Pin(readers[0].device, readers[0].reason)
    for node in graph.nodes:
        if node.is_leaf or node in found or any(map(find_weight_or_state_under_views, node.inputs)):
            continue
        computed_operands = [s for s in node.inputs if not s.node.is_leaf]
        homes = {found[s.node].device if s.node in found else None for s in computed_operands}
        alone = all(u is node or u in found for s in computed_operands for u in users[s]) and not any(
            s.node in ends for s in computed_operands
        )
        if len(homes) == 1 and None not in homes and alone:
            found[node] = Pin(
                found[computed_operands[0].node].device, "only this node reads its operands, which this device computes"
            )
    return found


def pin_leaves_of_only_pinned_nodes(graph: Graph, pins: NodePins) -> Pins:
    """Place each weight and state that only pinned nodes read on the devices of these nodes; return all pins.

    A state is placed on one device, a weight on all devices that read it.
    """
    users = graph.users()
    homes: dict[Value, Local] = {}
    for node in graph.nodes if pins else ():
        if node.op in ("weight", "state"):
            readers = [pins.get(u) for u in users[node.results[0]]]
            where = tuple(sorted({r.device for r in readers if r}))
            if readers and all(readers):
                homes[node.results[0]] = Local(where if node.op == "weight" else where[:1])
    return Pins(pins, homes)


def list_pinned_nodes(graph: Graph, pins: NodePins) -> tuple[PinnedNodes, ...]:
    """List the names of the pinned nodes in groups of equal device and reason, for the record of the plan."""
    if not pins:
        return ()
    called, groups = assign_names(graph), defaultdict[tuple[int, str], list[str]](list)
    for node in graph.nodes:
        if node in pins:
            groups[pins[node].device, pins[node].reason].append(called[node])
    return tuple(PinnedNodes(device, because, tuple(nodes)) for (device, because), nodes in groups.items())
