"""A graph as the data of a page: columns with an entry for each node, and tables in which equal things stand once."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from ..graph.attrs import format_attribute
from ..graph.graph import Graph, assign_names
from ..graph.layer_folding import Item, NodeBlock, fold_layers, iterate_blocks
from ..graph.node import Node, Value
from ..graph.spec import Spec
from ..ops import REGISTRY
from ..ops.text import select_non_default_attributes
from .interned import Interned
from .labels import Labels

RESULTS = 8
"""A value is written as this times the number of its node, and which result it is."""
LONGEST_TEXT = 400
"""Characters of attributes that a page shows: those of a constant or of ranges may be millions."""


class GraphData:
    """Numbers of nodes, and what a page says of the graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.names = assign_names(graph)
        self.number: Mapping[Node, int] = {node: i for i, node in enumerate(graph.nodes)}
        self.items = fold_layers(graph)
        self.labels = Labels(self.items)
        self.block = {node: at for at, b in enumerate(iterate_blocks(self.items)) for node in b.nodes}

    def value(self, value: Value | None) -> int:
        return -1 if value is None else RESULTS * self.number[value.node] + value.index

    def document(self) -> dict[str, Any]:
        """The graph as plain data."""
        ops, specs, attrs = Interned[str](), Interned[Spec](), Interned[str]("")
        nodes = self.graph.nodes
        columns = {
            "op": [ops(n.op) for n in nodes],
            "name": [self.names[n] for n in nodes],
            "spec": [list(map(specs, n.specs)) for n in nodes],
            "src": [list(map(self.value, n.src)) for n in nodes],
            "attrs": [attrs(attrs_text(n)) for n in nodes],
            "block": [self.block.get(n, -1) for n in nodes],
        }
        return {
            "nodes": columns,
            "ops": [op_text(name) for name in ops.items],
            "specs": list(map(spec_data, specs.items)),
            "attrs": attrs.items,
            "outputs": [[name, self.value(v)] for name, v in self.graph.outputs.items()],
            "updates": [[self.value(old), self.value(new)] for old, new in self.graph.updates.items()],
            "labels": self.labels.blocks,
            "tree": self._tree(self.items),
        }

    def _tree(self, items: Sequence[Item]) -> list[Any]:
        """Blocks by number; groups with their label and the items of each repetition."""
        return [
            self.labels.number[id(item)]
            if isinstance(item, NodeBlock)
            else {
                "label": self.labels.of([item]),
                "each": [{"label": self.labels.of(one), "items": self._tree(one)} for one in item.repetitions],
            }
            for item in items
        ]


def spec_data(spec: Spec) -> tuple[str, int]:
    """A spec as the page has it: its text, and its bytes."""
    return str(spec), spec.nbytes


def attrs_text(node: Node) -> str:
    """Attributes that are not the defaults of the op, as the dump writes them."""
    if node.op == "constant":
        return ""
    shown = ((k, format_attribute(v)) for k, v in select_non_default_attributes(node).items())
    return ", ".join(f"{k}={text if len(text) <= LONGEST_TEXT else text[:LONGEST_TEXT] + '…'}" for k, text in shown)


def op_text(name: str) -> dict[str, Any]:
    """What a page says of an op: its documentation, operands, and the function that is its meaning."""
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
