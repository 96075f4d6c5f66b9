"""Making a graph from a graph.  A rule looks at one node whose sources are already rewritten."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .errors import GraphError
from .graph import Graph
from .node import Node, Value

RewriteRule = Callable[[Node], "Sequence[Value] | Value | None"]


def rewrite_graph(graph: Graph, rule: RewriteRule) -> Graph:
    """Apply `rule` to every node, sources first.

    `rule` gets the node with its rewritten sources and returns the values that take the place of its results, or None
    to keep it.  Specs must not change; `graph` itself is untouched, nodes below no change are shared with it, and where
    nothing changes it is what comes back.
    """
    became: dict[Value, Value] = {}  # only what changes
    for old in graph.nodes:
        node = old
        if became and any(s in became for s in old.src):
            node = old.with_src(tuple([None if s is None else became.get(s, s) for s in old.src]))
        replacement = rule(node)
        if replacement is None and node is old:
            continue
        values = node.results if replacement is None else replacement
        values = (values,) if isinstance(values, Value) else tuple(values)
        assert tuple([v.spec for v in values]) == old.specs, f"a rewrite of {old!r} gave {values}"
        became.update((was, now) for was, now in zip(old.results, values, strict=True) if was != now)
    if not became:
        return graph
    return Graph(
        {name: became.get(v, v) for name, v in graph.outputs.items()},
        {became.get(old, old): became.get(new, new) for old, new in graph.updates.items()},
    )


def replace_values(graph: Graph, replacements: Mapping[Value, Value]) -> Graph:
    """`graph` with some values replaced wherever they are read.  Raises `GraphError` if a spec would change."""
    for old, new in replacements.items():
        if old.spec != new.spec:
            raise GraphError(f"cannot put {new!r} in the place of {old!r}; shape and dtype must stay the same")

    def rule(node: Node) -> Sequence[Value] | None:
        results = node.results
        return [replacements.get(v, v) for v in results] if any(v in replacements for v in results) else None

    return rewrite_graph(graph, rule)
