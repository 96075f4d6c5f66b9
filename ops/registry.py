"""The table of all ops, and the rules of graphs that need it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from ..graph.arguments import a, needs
from ..graph.errors import GraphError
from ..graph.graph import Graph
from ..graph.node import LEAVES, Node
from ..graph.verify import RULES as GRAPH_RULES
from ..graph.verify import Rule
from ..graph.verify import verify as verify_rules
from . import (
    arrange,
    attend,
    collective,
    elementwise,
    experts,
    gated,
    generators,
    indexer,
    matmul,
    moves,
    norms,
    recurrent,
    reductions,
    rotary,
    scans,
    sorting,
    triangular,
    unary,
    views,
)
from .op import Op
from .signature import Mismatch

_MODULES = (
    *(views, elementwise, unary, gated, norms, reductions, sorting, matmul, moves, arrange, triangular, generators),
    *(attend, rotary, recurrent, scans, experts, indexer, collective),
)

REGISTRY: Mapping[str, Op[Any]] = MappingProxyType(
    {found.name: found for module in _MODULES for found in vars(module).values() if isinstance(found, Op)}
)


def op_of(node: Node) -> Op[Any]:
    """The declaration of a node's op; the graph must have been verified."""
    return REGISTRY[node.op]


def ops_are_declared(graph: Graph) -> Iterator[str]:
    """Every node is a leaf or an op of the registry."""
    for node in graph.nodes:
        if node.op not in REGISTRY and node.op not in LEAVES:
            yield f"%{node.label}: there is no op {node.op!r}; `hocket ops` lists them"


def specs_follow_from_operands(graph: Graph) -> Iterator[str]:
    """A node has the attributes of its op, and its specs are those that the op infers."""
    for node in graph.nodes:
        declared = REGISTRY.get(node.op)
        if declared is None:
            continue
        try:
            if missing := declared.settle(node.attrs).keys() - node.attrs.keys():
                raise Mismatch(f"attribute {min(missing)} is missing")
            inferred = declared.infer([None if s is None else s.spec for s in node.src], node.attrs)
        except (Mismatch, TypeError, KeyError, ValueError) as why:
            yield f"{node!r}: {why}"
        else:
            if inferred != node.specs:
                yield f"{node!r}: operands give {', '.join(map(str, inferred))}"


RULES: tuple[Rule, ...] = (*GRAPH_RULES, ops_are_declared, specs_follow_from_operands)


@needs(GraphError, graph=a(Graph))
def verify(graph: Graph) -> None:
    """Raise `GraphError` unless `graph` obeys every rule, those of its ops included."""
    verify_rules(graph, RULES)
