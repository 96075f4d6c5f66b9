"""The text format of graphs, in which attributes that equal the defaults of their op are left out."""

from __future__ import annotations

from ..graph import Graph, format_graph
from ..graph import parse as parse_all
from ..graph.attrs import Attrs
from ..graph.errors import GraphError
from ..graph.node import Node
from ..graph.validation import TEXT, instance_of, validate_arguments
from .registry import REGISTRY


@validate_arguments(GraphError, graph=instance_of(Graph))
def dump(graph: Graph) -> str:
    """Return the graph as text, one line per node; `parse` reads it back.

    Raises:
        GraphError: `graph` is no graph.
    """
    return format_graph(graph, select_non_default_attributes)


@validate_arguments(GraphError, text=TEXT)
def parse(text: str) -> Graph:
    """Parse a graph from the text of `dump`, with or without default attributes.

    `verify` checks whether ops exist and fit.

    Raises:
        GraphError: the text is no graph; the message has line and column.
    """
    return parse_all(text, add_default_attributes)


def select_non_default_attributes(node: Node) -> Attrs:
    """Return the attributes of a node that differ from the defaults of its op."""
    if node.op not in REGISTRY:
        return node.attrs
    defaults = REGISTRY[node.op].defaults
    return {k: v for k, v in node.attrs.items() if k not in defaults or not _is_same_type_and_value(defaults[k], v)}


def add_default_attributes(op: str, attrs: Attrs) -> Attrs:
    """Return `attrs` with the defaults of the op added. They are in declared order."""
    if op not in REGISTRY:
        return attrs
    declared = REGISTRY[op]
    known = {
        k: attrs.get(k, declared.defaults.get(k))
        for k in declared.attribute_types
        if k in attrs or k in declared.defaults
    }
    return {**known, **{k: v for k, v in attrs.items() if k not in known}}


def _is_same_type_and_value(one: object, two: object) -> bool:
    """Return whether two values are equal and have the same type; 1, 1.0 and True all differ."""
    return type(one) is type(two) and repr(one) == repr(two)
