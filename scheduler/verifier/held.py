"""Facts about device values, and the conversions that keep a value of the user's graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...graph.node import Node
from ...ops.collectives import as_integer
from .indices import Index, has_twice, joined, taken
from .summands import NOTHING, Owed

CONVERSIONS = frozenset({"cont", "send", "scale", "fill", "slice", "concat"})
"""Ops that can keep the value, as `infer_conversion_facts` decides."""


@dataclass(frozen=True, slots=True)
class Held:
    """A fact about a device value: it is the entries `axes` of graph value `value_number`, or a partial sum of them."""

    number: int
    axes: tuple[Index, ...]
    owed: Owed = None


def but(axes: tuple[Index, ...], axis: int) -> tuple[Index, ...]:
    """Return the axes with an empty index for `axis`."""
    return (*axes[:axis], (), *axes[axis + 1 :])


def converted(node: Node, operands: Sequence[Held | None]) -> list[Held]:
    """Return the fact about the result of a conversion that keeps the value, as a list of at most one.

    Such conversions are: a copy, a message, a slice (fewer entries), a concatenation of shards, and zeros as the
    partial sum without terms.
    """
    first, attrs = operands[0] if operands else None, node.attrs
    if first is None or node.op not in CONVERSIONS:
        return []
    if node.op in ("cont", "send"):
        return [first]
    if (node.op == "scale" and attrs["scale"] == attrs["bias"] == 0) or (node.op == "fill" and attrs["value"] == 0):
        return [Held(first.number, first.axes, NOTHING)]
    if node.op not in ("slice", "concat"):
        return []
    axis = as_integer(attrs["axis"]) % len(first.axes)
    if node.op == "slice":
        index = taken(first.axes[axis], as_integer(attrs["start"]), as_integer(attrs["stop"]))
        return [Held(first.number, (*first.axes[:axis], index, *first.axes[axis + 1 :]), first.owed)]
    second = operands[1]
    assert second is not None
    same = first.number == second.number and first.owed == second.owed
    if not same or but(first.axes, axis) != but(second.axes, axis):
        return []
    index = joined([first.axes[axis], second.axes[axis]])
    if has_twice(index):  # no shard has an entry twice; without this rule the number of facts would grow without end
        return []
    return [Held(first.number, (*first.axes[:axis], index, *first.axes[axis + 1 :]), first.owed)]
