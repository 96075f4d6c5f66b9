"""The data of the page about planner passes: the factors of values, and the reasons of the factor search.

Repeated layers have one entry, so that the size of a page does not grow with the number of layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..graph.layer_folding import Item, NodeBlock
from ..graph.node import Value
from ..scheduler.ir.execution_plan import Plan
from ..scheduler.sharding.axes import Factor
from ..scheduler.sharding.factors import Factors
from ..scheduler.sharding.search.greedy_search import factors_from_positions, group_factors
from .graph_data import GraphData
from .intern_table import InternTable


def build_sharding_factor_columns(plan: Plan, graph: GraphData, factors: Factors) -> dict[str, Any]:
    """Build the table of sharding factors of each axis, for one repetition of each repeated layer.

    A sharding factor is a part of an axis that the planner may divide among devices. In the text of an axis, ``a b`` is
    a product of two factors, and ``a | b`` has two segments. Each factor has its size, whether it is sharded, and
    whether it cannot be sharded.
    """
    sharded_factors = factors_from_positions(plan.graph, factors, plan.sharded_factors)
    number: InternTable[Factor] = InternTable()
    axes: dict[int, list[str]] = {}
    for block in _iterate_distinct_blocks(graph.items):
        for node in block.nodes:
            for value in (*node.inputs, Value(node)):
                at = graph.number[value.node]
                if at not in axes and (value.node.is_leaf or value.node is node):
                    axes[at] = [_format_axis_factors(segments, number) for segments in factors.axes_of(value)]
    known = [[f.size, f in sharded_factors, bool(f.blocked)] for f in number.items]
    return {"axes": axes, "factors": known}


def list_search_reasons_by_node(plan: Plan, graph: GraphData, factors: Factors) -> dict[int, list[int]]:
    """Map each node with a sharded value to the reasons why the search sharded it, as indices of ``plan.reasons``."""
    sharded_factors = factors_from_positions(plan.graph, factors, plan.sharded_factors)
    classes = group_factors(plan.graph, factors) if sharded_factors else {}
    reason_numbers: dict[Factor, int] = {}
    for name, members in classes.items():
        for number, reason in enumerate(plan.reasons):
            if reason.startswith(f"cut {name}: "):
                reason_numbers |= dict.fromkeys(sharded_factors.intersection(members), number)
    nodes = plan.graph.nodes if reason_numbers else ()
    decided = {
        graph.number[n]: sorted({reason_numbers[f] for f in factors.factors_of(Value(n)) if f in reason_numbers})
        for n in nodes
    }
    return {number: reasons for number, reasons in decided.items() if reasons}


def _format_axis_factors(segments: Sequence[Sequence[Factor]], number: InternTable[Factor]) -> str:
    """Format the sharding factors of an axis by number, such as ``1 2 | 3``; a bar separates segments."""
    return "|".join(" ".join(str(number(f)) for f in segment if f.size != 1) for segment in segments)


def _iterate_distinct_blocks(items: Sequence[Item]) -> Iterator[NodeBlock]:
    """Yield each block that is drawn; of a repeated group these are the blocks of its first repetition."""
    for item in items:
        if isinstance(item, NodeBlock):
            yield item
        else:
            yield from _iterate_distinct_blocks(item.repetitions[0])
