"""Decomposition of ops that no device of a group supports into simpler ops that the devices support."""

from __future__ import annotations

from collections.abc import Sequence

from ...graph.graph import Graph
from ...graph.node import Node, Value
from ...graph.rewrite import rewrite_graph
from ...ops import op_of
from ...ops.decompositions import DECOMPOSITIONS, list_applicable_decompositions
from ..lowering.device_plan import Devices

UNFUSED_DECOMPOSITION = "unfused"
"""The name of the op decomposition that is used here, into simpler ops."""


def decompose_unsupported_ops(graph: Graph, group: Devices) -> Graph:
    """Replace each op of `graph` that no device of `group` supports by simpler ops, and return the new graph.

    An op is replaced only if it has a decomposition and some device supports each op of the decomposition. Without a
    change the result is `graph` itself.
    """

    def runs(node: Node) -> bool:
        return node.is_leaf or op_of(node).is_view or any(b.supports(node, device).ok for b, device in group)

    def rule(node: Node) -> Sequence[Value] | None:
        if UNFUSED_DECOMPOSITION not in DECOMPOSITIONS.get(node.op, ()) or runs(node):
            return None
        named = dict(zip(op_of(node).operand_names, node.src, strict=False))
        operands = {name: value for name, value in named.items() if value is not None}
        if UNFUSED_DECOMPOSITION not in list_applicable_decompositions(node.op, operands, node.attrs):
            return None
        if any(0 in value.shape for value in operands.values()):  # a decomposition into chunks needs at least one token
            return None
        results = DECOMPOSITIONS[node.op][UNFUSED_DECOMPOSITION](operands, node.attrs)
        new_nodes = set(Graph({str(i): value for i, value in enumerate(results)}).nodes)
        return results if all(map(runs, new_nodes)) else None

    if not any(UNFUSED_DECOMPOSITION in DECOMPOSITIONS.get(node.op, ()) and not runs(node) for node in graph.nodes):
        return graph
    return rewrite_graph(graph, rule)
