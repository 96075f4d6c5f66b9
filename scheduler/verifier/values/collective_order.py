"""The participants of one collective, and an order of nodes in which the collectives come by sequence number."""

from __future__ import annotations

from ....graph.graph import Graph, topological_order
from ....graph.node import Node, Value
from ....ops.collectives import COLLECTIVES, narrow_to_integer


def make_shared_collective_key(device: int, node: Node) -> object:
    """Return a key that is equal for all participants of one collective, and differs between collectives.

    The key is the sequence number, and for a message also the sender and the receiver.
    """
    number = narrow_to_integer(node.attrs["sequence"])
    if node.op == "send":
        return device, node.attrs["to"], number
    return (node.attrs["source"], device, number) if node.op == "receive" else number


def order_nodes_by_operands_and_sequence(graph: Graph) -> tuple[Node, ...]:
    """Return the nodes of a graph with operands before readers, and collectives by ascending sequence number."""
    collectives = sorted(
        (n for n in graph.nodes if n.op in COLLECTIVES), key=lambda n: narrow_to_integer(n.attrs["sequence"])
    )
    return topological_order(map(Value, (*collectives, *graph.nodes)))
