"""What each pass of planning makes of one repetition of every block: the columns of the page's table of passes; and
which decision of the search is about which leaf.

Layers that repeat are told once, so that the page of a model with a hundred layers is not a hundred times as long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..graph.layer_folding import Item, NodeBlock
from ..graph.node import Value
from ..scheduler.plan import Plan
from ..scheduler.sharding.axes import Factor
from ..scheduler.sharding.factors import Factors
from ..scheduler.sharding.search import classes_of, factors_at
from .graph_data import GraphData
from .interned import Interned


def passes(plan: Plan, graph: GraphData, factors: Factors) -> dict[str, Any]:
    """For the nodes of each different block, and the leaves they read, the factors of every axis: ``a b`` is a product
    of two, ``a | b`` stands for segments.  And of each factor its size, whether it is cut, and whether it may be."""
    cut = factors_at(plan.graph, factors, plan.cuts)
    number: Interned[Factor] = Interned()
    axes: dict[int, list[str]] = {}
    for block in _different(graph.items):
        for node in block.nodes:
            for value in (*node.inputs, Value(node)):
                at = graph.number[value.node]
                if at not in axes and (value.node.is_leaf or value.node is node):
                    axes[at] = [_axis(segments, number) for segments in factors.axes(value)]
    known = [[f.size, f in cut, bool(f.blocked)] for f in number.items]
    return {"axes": axes, "factors": known}


def decisions(plan: Plan, graph: GraphData, factors: Factors) -> dict[int, list[int]]:
    """Of the nodes whose values the search cut: which of the plan's reasons say so, and what else was nearest."""
    cut = factors_at(plan.graph, factors, plan.cuts)
    classes = classes_of(plan.graph, factors) if cut else {}
    said: dict[Factor, int] = {}
    for name, members in classes.items():
        for number, reason in enumerate(plan.reasons):
            if reason.startswith(f"cut {name}: "):
                said |= dict.fromkeys(cut.intersection(members), number)
    nodes = plan.graph.nodes if said else ()
    decided = {graph.number[n]: sorted({said[f] for f in factors.of(Value(n)) if f in said}) for n in nodes}
    return {number: reasons for number, reasons in decided.items() if reasons}


def _axis(segments: Sequence[Sequence[Factor]], number: Interned[Factor]) -> str:
    """One axis: numbers of factors, those of a segment with blanks between them."""
    return "|".join(" ".join(str(number(f)) for f in segment if f.size != 1) for segment in segments)


def _different(items: Sequence[Item]) -> Iterator[NodeBlock]:
    """Blocks, of groups those of the first repetition."""
    for item in items:
        if isinstance(item, NodeBlock):
            yield item
        else:
            yield from _different(item.repetitions[0])
