"""Sums taken early: one collective for a partial sum in place of one for each of several values computed from it.

A partial sum passes through views and other linear ops, and a collective completes it where a reader needs all of it.
Three slices would need three all-reduces. One all-reduce before the slices moves the same bytes with one latency.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from ...graph.node import Value
from ..layout import REPLICATE
from .assign import Assignment, Conversion
from .axes import Factor
from .states import Cut, State


def find_early_sums(
    assignment: Assignment, seconds: Callable[[Conversion], float], rows: Factor | None = None
) -> list[tuple[Conversion, Sequence[Conversion]]]:
    """Return the sums that cost no more than the later sums that they replace, each with the replaced sums.

    Considered are sums to whole values, and sums scattered by `rows`. If a sum replaces another one of the list, the
    other one comes first, and both savings count.

    Args:
        assignment: The layouts and conversions of the graph.
        seconds: Returns the predicted seconds of a sum.
        rows: The factor that scatters the rows of sums.
    """
    found: list[tuple[Conversion, Sequence[Conversion]]] = []
    for after in (REPLICATE, *(() if rows is None else (Cut(rows),))):
        sums = {c.value: c for c in assignment.conversions if c.before.is_owed and c.after == after}
        if len(sums) > 1:
            found += _early(assignment, sums, after, seconds)
    return found


def _early(
    assignment: Assignment, sums: Mapping[Value, Conversion], after: State, seconds: Callable[[Conversion], float]
) -> Iterator[tuple[Conversion, Sequence[Conversion]]]:
    """Yield the early sums among `sums`, which all convert to the layout `after`."""
    below = _followers(assignment, sums)
    if not any(len(those) + (value in sums) > 1 for value, those in below.items()):
        return
    waiting = {value: len(those) for value, those in below.items()}
    above = {one: value for value, those in below.items() for one in those}
    cheapest: dict[Value, tuple[float, Sequence[Conversion]]] = {}
    ready = [value for value in sums if value not in below]
    while ready:
        value = ready.pop()
        own = sums.get(value) or Conversion(value, assignment.made[value], after, None)
        options = [cheapest[one] for one in below.get(value, ())] + [(seconds(own), [own])] * (value in sums)
        apart, parts = sum(time for time, _ in options), [part for _, those in options for part in those]
        if len(parts) > 1 and (together := seconds(own)) <= apart:
            yield own, parts
            apart, parts = together, [own]
        cheapest[value] = apart, parts
        if (source := above.get(value)) is not None:
            waiting[source] -= 1
            ready += [source] if not waiting[source] else []


def _followers(assignment: Assignment, sums: Iterable[Value]) -> dict[Value, list[Value]]:
    """Return for each value on a path to one of the `sums` the next values on these paths."""
    below: dict[Value, list[Value]] = {}
    seen = set[Value]()
    for value in sums:
        while value not in seen and (source := _source(assignment, value)) is not None:
            seen.add(value)
            below.setdefault(source, []).append(value)
            value = source
    return below


def _source(assignment: Assignment, value: Value) -> Value | None:
    """Return the one partial sum that the node of `value` reads and passes on, or None."""
    node = value.node
    if not assignment.by[node].is_owed:
        return None
    read = zip(node.inputs, assignment.wants[node], strict=True)
    partial = [source for source, want in read if want.is_owed and assignment.made[source].is_owed]
    return partial[0] if len(partial) == 1 else None
