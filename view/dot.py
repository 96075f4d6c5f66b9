"""Graphviz source (DOT) of a graph, with each repeated layer drawn once, in a cluster with the count of repetitions.

A drawing of all nodes is useless for a model, and Graphviz takes minutes for 1,155 nodes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from ..graph.errors import GraphError
from ..graph.graph import Graph, assign_names
from ..graph.layer_folding import Item, NodeBlock, RepeatedGroup, fold_layers, iterate_blocks_of_all_repetitions
from ..graph.node import Node
from ..graph.validation import BOOL, instance_of, validate_arguments
from ..ops import REGISTRY
from ..scheduler import format_bytes
from .graph_data import format_non_default_attributes
from .labels import BlockLabels

NODE_SHAPES = {"input": "cds", "weight": "box3d", "state": "cylinder", "constant": "note"}
MAX_ATTRIBUTE_CHARACTERS = 60
"""The largest number of characters of the attributes in one box."""


@validate_arguments(GraphError, graph=instance_of(Graph), folded=BOOL)
def to_dot(graph: Graph, *, folded: bool = True) -> str:
    """Return a graph as Graphviz source (DOT), with repeated layers folded by default.

    Nodes show attributes and cost, leaves have a shape for each kind, and edges have specs. State updates are dashed.
    Raises `GraphError` for an argument that is not a graph.

    Args:
        graph: The graph to draw.
        folded: Whether only the first repetition of a repeated layer is drawn, in a cluster with the count. A dotted
            edge leads to the next repetition. Otherwise every node is drawn.
    """
    return "\n".join(["digraph hocket {", *_DotWriter(graph, folded).format_lines(), "}", ""])


class _DotWriter:
    """Writes one graph as DOT text (Graphviz source).

    `drawn` maps each node of a later repetition to the corresponding node of the first repetition. Only the latter is
    drawn.
    """

    def __init__(self, graph: Graph, folded: bool) -> None:
        self.graph, self.called = graph, assign_names(graph)
        self.number = {node: i for i, node in enumerate(graph.nodes)}
        self.items = fold_layers(graph) if folded else ()
        self.labels = BlockLabels(self.items)
        self.drawn: dict[Node, Node] = {}
        self._map_to_first_repetition(self.items)
        self.clusters = 0

    def _map_to_first_repetition(self, items: Sequence[Item]) -> None:
        """Map each node and leaf of a later repetition to the corresponding one of the first repetition.

        Inner groups are mapped before the groups that contain them.
        """
        for item in items:
            if isinstance(item, RepeatedGroup):
                for one in item.repetitions:
                    self._map_to_first_repetition(one)
                first = [n for b in iterate_blocks_of_all_repetitions(item.repetitions[0]) for n in b.nodes]
                for later in item.repetitions[1:]:
                    for first_node, node in zip(
                        first, (n for b in iterate_blocks_of_all_repetitions(later) for n in b.nodes), strict=True
                    ):
                        self.drawn[node] = self._of(first_node)
                        for mine, other in zip(first_node.inputs, node.inputs, strict=True):
                            if other.node.is_leaf and other.node is not mine.node:
                                self.drawn[other.node] = self._of(mine.node)

    def _of(self, node: Node) -> Node:
        return self.drawn.get(node, node)

    def format_lines(self) -> Iterator[str]:
        yield '  node [shape=box, fontname="Helvetica", fontsize=11];'
        yield '  edge [fontname="Helvetica", fontsize=9];'
        yield from self._format_clusters(self.items, "  ")
        inside = {n for b in iterate_blocks_of_all_repetitions(self.items) for n in b.nodes}
        drawn_nodes = [n for n in self.graph.nodes if self._of(n) is n]
        yield from (self._format_node(n, "  ") for n in drawn_nodes if n not in inside)
        yield from self._format_edges()
        for i, (name, value) in enumerate(self.graph.outputs.items()):
            yield f"  out{i} [label={_text(name)}, shape=ellipse];"
            yield f"  n{self.number[self._of(value.node)]} -> out{i};"
        for old, new in self.graph.updates.items():
            if self._of(old.node) is old.node:
                ends = f"n{self.number[self._of(new.node)]} -> n{self.number[old.node]}"
                yield f'  {ends} [style=dashed, label="update", constraint=false];'

    def _format_clusters(self, items: Sequence[Item], indent: str) -> Iterator[str]:
        for item in items:
            if isinstance(item, NodeBlock):
                yield from (self._format_node(n, indent) for n in item.nodes)
                continue
            self.clusters += 1
            yield f"{indent}subgraph cluster_{self.clusters} {{"
            yield f"{indent}  label={_text(f'{self.labels.label_of([item])}  × {len(item.repetitions)}')};"
            yield f'{indent}  fontname="Helvetica";'
            yield from self._format_clusters(item.repetitions[0], indent + "  ")
            yield f"{indent}}}"

    def _format_node(self, node: Node, indent: str) -> str:
        about = [node.op, self.called[node], *self._format_attributes_and_cost(node)]
        shape = NODE_SHAPES.get(node.op, "box")
        return f"{indent}n{self.number[node]} [label={_text(chr(10).join(about))}, shape={shape}];"

    def _format_attributes_and_cost(self, node: Node) -> Iterator[str]:
        """Format the attributes of a node, and its cost or its size, as lines of its label."""
        if attrs := format_non_default_attributes(node):
            yield attrs if len(attrs) <= MAX_ATTRIBUTE_CHARACTERS else f"{attrs[: MAX_ATTRIBUTE_CHARACTERS - 1]}…"
        declared = REGISTRY.get(node.op)
        if node.is_leaf:
            yield f"{node.specs[0]}, {format_bytes(node.specs[0].nbytes)}"
        elif declared is not None and not declared.is_view:
            yield f"{declared.count_flops(node) / 1e6:.3g} MFLOP, {format_bytes(declared.count_bytes(node))}"

    def _format_edges(self) -> Iterator[str]:
        """Format the edges, one for each operand of a drawn node. Dotted edges connect successive repetitions."""
        done: set[tuple[Node, Node]] = set()
        for node in self.graph.nodes:
            if self._of(node) is node:
                for s in node.inputs:
                    done.add((self._of(s.node), node))
                    yield f'  n{self.number[self._of(s.node)]} -> n{self.number[node]} [label="{s.spec}"];'
        for node in self.graph.nodes:
            ends = (
                {(self._of(s.node), self._of(node)) for s in node.inputs} - done if self._of(node) is not node else ()
            )
            for source, target in ends:
                done.add((source, target))
                yield f"  n{self.number[source]} -> n{self.number[target]} [style=dotted, constraint=false];"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
