"""Early sums: one all-reduce for a partial sum, in place of one for each of several values that are computed from it.

In a partial sum, each device has only some of the terms. It passes unsummed through views and other linear ops, until a
reader needs all terms. Then an all-reduce completes it. Three slices of a partial sum would need three all-reduces. One
all-reduce before the slices moves the same bytes with one latency.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from ...graph.node import Value
from ..ir.layout import REPLICATE
from .axes import Factor
from .factor_layouts import FactorLayout, FactorShard
from .propagation import LayoutConversion, ShardingAssignment


def find_partial_sums_to_reduce_early(
    assignment: ShardingAssignment,
    estimate_seconds: Callable[[LayoutConversion], float],
    row_factor: Factor | None = None,
) -> list[tuple[LayoutConversion, Sequence[LayoutConversion]]]:
    """Find sums over devices to complete early, where one collective replaces several later ones at no higher cost.

    The values are partial sums, which later ops would otherwise pass on. A sum is an all-reduce or a reduce-scatter
    of rows. If an early sum of the list replaces another one of the list, the replaced sum comes first, and the
    savings of both count.

    Args:
        assignment: The layouts and conversions of the graph.
        estimate_seconds: Returns the predicted seconds of the collective of a sum.
        row_factor: The factor of the rows that reduce-scatters divide over the devices; None without reduce-scatters.

    Returns:
        Each early sum with the sums that it replaces.
    """
    found: list[tuple[LayoutConversion, Sequence[LayoutConversion]]] = []
    for after in (REPLICATE, *(() if row_factor is None else (FactorShard(row_factor),))):
        sums = {c.value: c for c in assignment.conversions if c.source_layout.is_partial and c.target_layout == after}
        if len(sums) > 1:
            found += _choose_partial_sums_to_reduce_early(assignment, sums, after, estimate_seconds)
    return found


def _choose_partial_sums_to_reduce_early(
    assignment: ShardingAssignment,
    sums: Mapping[Value, LayoutConversion],
    target_layout: FactorLayout,
    estimate_seconds: Callable[[LayoutConversion], float],
) -> Iterator[tuple[LayoutConversion, Sequence[LayoutConversion]]]:
    """Choose partial sums to reduce early.

    The choice goes from the last values of the graph to the first. Yields each early sum with the later sums that it
    replaces.

    Args:
        assignment: The layouts and conversions of the graph.
        sums: The conversion of each value with a sum to `target_layout`.
        target_layout: The layout after the sum, whole or scattered by rows.
        estimate_seconds: Returns the predicted seconds of the collective of a sum.
    """
    below = _find_next_values_on_paths_to_sums(assignment, sums)
    if not any(len(those) + (value in sums) > 1 for value, those in below.items()):
        return
    waiting = {value: len(those) for value, those in below.items()}
    above = {one: value for value, those in below.items() for one in those}
    cheapest: dict[Value, tuple[float, Sequence[LayoutConversion]]] = {}
    ready = [value for value in sums if value not in below]
    while ready:
        value = ready.pop()
        own = sums.get(value) or LayoutConversion(value, assignment.produced_layouts[value], target_layout, None)
        options = [cheapest[one] for one in below.get(value, ())] + [(estimate_seconds(own), [own])] * (value in sums)
        apart, parts = sum(time for time, _ in options), [part for _, those in options for part in those]
        if len(parts) > 1 and (together := estimate_seconds(own)) <= apart:
            yield own, parts
            apart, parts = together, [own]
        cheapest[value] = apart, parts
        if (source := above.get(value)) is not None:
            waiting[source] -= 1
            ready += [source] if not waiting[source] else []


def _find_next_values_on_paths_to_sums(
    assignment: ShardingAssignment, sums: Iterable[Value]
) -> dict[Value, list[Value]]:
    """Map each partial sum to the partial sums that are computed directly from it, on the paths to `sums`."""
    below: dict[Value, list[Value]] = {}
    seen = set[Value]()
    for value in sums:
        while value not in seen and (source := _find_partial_sum_operand_passed_on(assignment, value)) is not None:
            seen.add(value)
            below.setdefault(source, []).append(value)
            value = source
    return below


def _find_partial_sum_operand_passed_on(assignment: ShardingAssignment, value: Value) -> Value | None:
    """Find the partial sum that the node of `value` reads and passes on without summing it.

    The result is None if the node passes on no partial sum, or reads several.
    """
    node = value.node
    if not assignment.node_layouts[node].is_partial:
        return None
    read = zip(node.inputs, assignment.operand_layouts[node], strict=True)
    partial = [source for source, want in read if want.is_partial and assignment.produced_layouts[source].is_partial]
    return partial[0] if len(partial) == 1 else None
