"""Rewriting of graphs: rules that replace the results of single nodes, and replacement of given values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .errors import GraphError
from .graph import Graph
from .node import Node, Value
from .validation import CALLABLE, format_value, instance_of, list_of, mapping_of, validate_arguments

VALUES = list_of(instance_of(Value), "a sequence of values")
RewriteRule = Callable[[Node], "Sequence[Value] | Value | None"]


@validate_arguments(GraphError, graph=instance_of(Graph), rule=CALLABLE)
def rewrite_graph(graph: Graph, rule: RewriteRule) -> Graph:
    """Return a new graph in which `rule` has been applied to each node, operands before users.

    The rule sees each node with its operands already rewritten. `graph` stays as it is, and shares all unchanged nodes
    with the new graph. If no node changes, the result is `graph`.

    Args:
        graph: The graph to rewrite.
        rule: Returns the values that replace the results of a node, with equal specs, or None to keep the node.
    """
    replaced_by: dict[Value, Value] = {}  # without unchanged values
    for old in graph.nodes:
        node = old
        if replaced_by and any(s in replaced_by for s in old.src):
            node = old.with_src(tuple([None if s is None else replaced_by.get(s, s) for s in old.src]))
        replacement = rule(node)
        if replacement is None and node is old:
            continue
        values = node.results if replacement is None else replacement
        values = (values,) if isinstance(values, Value) else values
        if not VALUES.accepts(values) or tuple([v.spec for v in values]) != old.specs:
            raise GraphError(f"the rule gives {format_value(values)} for {old!r}; shape and dtype must stay the same")
        replaced_by.update((was, now) for was, now in zip(old.results, values, strict=True) if was != now)
    if not replaced_by:
        return graph
    return Graph(
        {name: replaced_by.get(v, v) for name, v in graph.outputs.items()},
        {replaced_by.get(old, old): replaced_by.get(new, new) for old, new in graph.updates.items()},
    )


@validate_arguments(
    GraphError,
    graph=instance_of(Graph),
    replacements=mapping_of(instance_of(Value), instance_of(Value), "a mapping from values to values"),
)
def replace_values(graph: Graph, replacements: Mapping[Value, Value]) -> Graph:
    """Return a copy of `graph` in which the values of a mapping replace other values.

    Args:
        graph: The graph.
        replacements: The new value of each replaced value.

    Raises:
        GraphError: The spec of a new value differs.
    """
    for old, new in replacements.items():
        if old.spec != new.spec:
            raise GraphError(f"cannot replace {old!r} by {new!r}; shape and dtype must stay the same")

    def rule(node: Node) -> Sequence[Value] | None:
        results = node.results
        return [replacements.get(v, v) for v in results] if any(v in replacements for v in results) else None

    return rewrite_graph(graph, rule)
