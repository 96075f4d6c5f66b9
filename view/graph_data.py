"""The data of a graph for a page: columns with an entry for each node, and tables of distinct specs and ops."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from ..graph.attrs import format_attribute
from ..graph.graph import Graph, assign_names
from ..graph.layer_folding import Item, NodeBlock, fold_layers, iterate_blocks_of_all_repetitions
from ..graph.node import Node, Value
from ..graph.spec import Spec
from ..ops import REGISTRY
from ..ops.text import select_non_default_attributes
from .intern_table import InternTable
from .labels import BlockLabels

RESULT_FACTOR = 8
"""The number of a value is this factor times the number of its node, plus the index of the result."""
MAX_TEXT_CHARACTERS = 400
"""The largest number of characters of an attribute on a page; a constant or a list of ranges may have millions."""


class GraphData:
    """The data of a graph for an HTML page. It also has the index that the page uses for each node and value."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.names = assign_names(graph)
        self.number: Mapping[Node, int] = {node: i for i, node in enumerate(graph.nodes)}
        self.items = fold_layers(graph)
        self.labels = BlockLabels(self.items)
        self.block = {
            node: at for at, b in enumerate(iterate_blocks_of_all_repetitions(self.items)) for node in b.nodes
        }

    def number_of_value(self, value: Value | None) -> int:
        return -1 if value is None else RESULT_FACTOR * self.number[value.node] + value.index

    def build_page_data(self) -> dict[str, Any]:
        """Build the page data of the graph, as plain data for JSON."""
        ops, specs, attrs = InternTable[str](), InternTable[Spec](), InternTable[str]("")
        nodes = self.graph.nodes
        columns = {
            "op": [ops(n.op) for n in nodes],
            "name": [self.names[n] for n in nodes],
            "spec": [list(map(specs, n.specs)) for n in nodes],
            "src": [list(map(self.number_of_value, n.src)) for n in nodes],
            "attrs": [attrs(format_non_default_attributes(n)) for n in nodes],
            "block": [self.block.get(n, -1) for n in nodes],
        }
        return {
            "nodes": columns,
            "ops": [build_op_documentation(name) for name in ops.items],
            "specs": list(map(format_spec_and_bytes, specs.items)),
            "attrs": attrs.items,
            "outputs": [[name, self.number_of_value(v)] for name, v in self.graph.outputs.items()],
            "updates": [
                [self.number_of_value(old), self.number_of_value(new)] for old, new in self.graph.updates.items()
            ],
            "labels": self.labels.blocks,
            "tree": self._build_block_tree(self.items),
        }

    def _build_block_tree(self, items: Sequence[Item]) -> list[Any]:
        """Build the tree of blocks for the page.

        A block is its number. A group is its label and the items of each repetition.
        """
        return [
            self.labels.number[id(item)]
            if isinstance(item, NodeBlock)
            else {
                "label": self.labels.label_of([item]),
                "each": [
                    {"label": self.labels.label_of(one), "items": self._build_block_tree(one)}
                    for one in item.repetitions
                ],
            }
            for item in items
        ]


def format_spec_and_bytes(spec: Spec) -> tuple[str, int]:
    """Return a spec as text, and the bytes of a value with this spec."""
    return str(spec), spec.nbytes


def format_non_default_attributes(node: Node) -> str:
    """Format the attributes of a node that differ from the defaults of its op."""
    if node.op == "constant":
        return ""
    attrs = ((k, format_attribute(v)) for k, v in select_non_default_attributes(node).items())
    return ", ".join(
        f"{k}={text if len(text) <= MAX_TEXT_CHARACTERS else text[:MAX_TEXT_CHARACTERS] + '…'}" for k, text in attrs
    )


def build_op_documentation(name: str) -> dict[str, Any]:
    """Build the documentation of an op for a page: the text, the operands, and the source of the reference function."""
    if name not in REGISTRY:
        return {"name": name, "leaf": True}
    declared = REGISTRY[name]
    return {
        "name": name,
        "view": declared.is_view,
        "operands": list(declared.operand_names),
        "about": declared.documentation,
        "meaning": inspect.getsource(declared.reference),
    }
