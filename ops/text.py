"""Graphs as text without the attributes that an op has by default, and reading them back."""

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
    """The whole graph as text, one line a node; `parse` reads it back.  Raises `GraphError` for anything else."""
    return format_graph(graph, select_non_default_attributes)


@validate_arguments(GraphError, text=TEXT)
def parse(text: str) -> Graph:
    """The graph that `dump` wrote, with or without defaults.

    Raises `GraphError` with line and column; whether ops exist and fit is for `verify` to say.
    """
    return parse_all(text, add_default_attributes)


def select_non_default_attributes(node: Node) -> Attrs:
    """The attributes of a node that differ from the defaults of its op."""
    if node.op not in REGISTRY:
        return node.attrs
    defaults = REGISTRY[node.op].defaults
    return {k: v for k, v in node.attrs.items() if k not in defaults or not _is_same_value(defaults[k], v)}


def add_default_attributes(op: str, attrs: Attrs) -> Attrs:
    """`attrs` and the defaults of the op, in declared order."""
    if op not in REGISTRY:
        return attrs
    declared = REGISTRY[op]
    known = {
        k: attrs.get(k, declared.defaults.get(k))
        for k in declared.attribute_types
        if k in attrs or k in declared.defaults
    }
    return {**known, **{k: v for k, v in attrs.items() if k not in known}}


def _is_same_value(one: object, two: object) -> bool:
    """Equal and of one kind: 1 is not 1.0 or true."""
    return type(one) is type(two) and repr(one) == repr(two)
