"""Making a graph from a graph.  A rule looks at one node whose sources are already rewritten."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .errors import GraphError
from .graph import Graph
from .node import Node, Value

Rule = Callable[[Node], "Sequence[Value] | Value | None"]


def rewrite(graph: Graph, rule: Rule) -> Graph:
    """Apply `rule` to every node, sources first.

    `rule` gets the node with its rewritten sources and returns the values that take the place of its results, or None
    to keep it.  Specs must not change; `graph` itself is untouched, and nodes below no change are shared with it.
    """
    became: dict[Value, Value] = {}
    for old in graph.nodes:
        src = tuple(None if s is None else became[s] for s in old.src)
        node = old if src == old.src else old.with_src(src)
        replacement = rule(node)
        values = (
            node.results
            if replacement is None
            else (replacement,)
            if isinstance(replacement, Value)
            else tuple(replacement)
        )
        assert [v.spec for v in values] == list(old.specs), f"a rewrite of {old!r} gave {values}"
        became.update(zip(old.results, values, strict=True))
    return Graph(
        {name: became[v] for name, v in graph.outputs.items()},
        {became[old]: became[new] for old, new in graph.updates.items()},
    )


def substitute(graph: Graph, replacements: Mapping[Value, Value]) -> Graph:
    """`graph` with some values replaced wherever they are read.  Raises `GraphError` if a spec would change."""
    for old, new in replacements.items():
        if old.spec != new.spec:
            raise GraphError(f"cannot put {new!r} in the place of {old!r}; shape and dtype must stay the same")

    def rule(node: Node) -> Sequence[Value] | None:
        results = node.results
        return [replacements.get(v, v) for v in results] if any(v in replacements for v in results) else None

    return rewrite(graph, rule)
