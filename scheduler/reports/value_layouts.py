"""The layouts of all values of the user's graph on the devices of a plan, derived from the graphs of the devices.

A layout is a short text:

- ``R``: replicated on each device;
- ``P``: a partial sum on each device;
- ``S1(32|64)``: sharded along axis 1, with the entry count of each device;
- ``L0,2``: complete on the devices 0 and 2 only;
- empty: on no device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from ...graph.graph import Graph, assign_names
from ...graph.node import Node
from ...ops.collectives import COLLECTIVES
from ..ir.execution_plan import Plan
from ..ir.layout import Layout, Local, Shard
from ..lowering.device_plan import find_first_devices_with_same_program

SUM_COLLECTIVES = ("all_reduce", "reduce_scatter")
"""Collectives that add partial sums."""


def format_value_layouts(plan: Plan) -> dict[Node, str]:
    """Return the layout of the first result of each node as a short text, such as ``R`` (replicated) or ``S0(2|2)``."""
    node_names = assign_names(plan.graph)
    users = {name: node for node, name in node_names.items()}
    first = find_first_devices_with_same_program(plan.device_plans)
    own = {d: {name: n for n, name in assign_names(plan.device_plans[d].graph).items()} for d in set(first)}
    graphs = [plan.device_plans[d].graph for d in own]
    whole = {n.name.removesuffix(".zero") for graph in graphs for n in graph.nodes if n.op == "fill"}
    partial_sum_names = set[str]().union(*(_find_partial_sum_names(graph, users, whole) for graph in graphs))
    layouts = {}
    for node in plan.graph.nodes:
        name = node_names[node]
        if node.is_leaf:
            layouts[node] = _format_leaf_layout(plan.leaves[name])
        else:
            local = {d: n for d, nodes in own.items() if (n := nodes.get(name)) is not None and n.op == node.op}
            layouts[node] = _format_computed_layout(node, [local.get(d) for d in first], name in partial_sum_names)
    return layouts


def _format_leaf_layout(layout: Layout) -> str:
    if isinstance(layout, Shard):
        return f"S{layout.axis}({'|'.join(str(layout.count_entries(d)) for d in range(len(layout.index_ranges)))})"
    return f"L{','.join(map(str, layout.devices))}" if isinstance(layout, Local) else str(layout)


def _format_computed_layout(node: Node, local: Sequence[Node | None], is_partial_sum: bool) -> str:
    """Return the layout of a computed value as a short text.

    ``S0(2|2)`` is sharded on axis 0, ``L1`` local on device 1, ``P`` a partial sum, and ``R`` replicated.

    Args:
        node: The node of the user's graph.
        local: For each device, the node that computes the value there; None if the device does not compute it.
        is_partial_sum: Whether the value is a partial sum if each device has its full shape.
    """
    shapes = [None if n is None else n.specs[0].shape for n in local]
    there = [shape for shape in shapes if shape is not None]
    for axis, size in enumerate(node.specs[0].shape):
        if any(shape[axis] != size for shape in there if len(shape) > axis):
            return f"S{axis}({'|'.join('0' if shape is None else str(shape[axis]) for shape in shapes)})"
    if len(there) < len(shapes):
        return f"L{','.join(str(d) for d, shape in enumerate(shapes) if shape is not None)}" if there else ""
    return "P" if is_partial_sum else "R"


def _find_partial_sum_names(graph: Graph, users: Mapping[str, Node], whole: Set[str]) -> set[str]:
    """Return the names of the nodes in a device graph that compute partial sums over devices.

    The search goes back from the operands of collectives that add. It ends at a node that reads a sharded value.

    Args:
        graph: The graph of the device.
        users: The node of the user's graph, by name.
        whole: Names of values that one device alone adds while the others add zeros; they are left out.
    """
    stack = [n.inputs[0].node for n in graph.nodes if n.op in SUM_COLLECTIVES]
    partial_sum_names: set[str] = set()
    while stack:
        node = stack.pop()
        user = users.get(node.name)
        if (
            node.name in partial_sum_names
            or user is None
            or node.is_leaf
            or node.op in COLLECTIVES
            or node.name in whole
        ):
            continue
        partial_sum_names.add(node.name)
        pairs = list(zip(node.inputs, user.inputs, strict=False))
        if all(mine.shape == theirs.shape for mine, theirs in pairs):
            stack += [mine.node for mine, _ in pairs]
    return partial_sum_names
