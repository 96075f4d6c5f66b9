"""What holds of a device's value, and the conversions that leave a value of the user's graph what it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...graph.node import Node
from ...ops.collectives import as_integer
from .indices import Index, has_twice, joined, taken
from .summands import NOTHING, Owed

CONVERSIONS = frozenset({"cont", "send", "scale", "fill", "slice", "concat"})
"""Ops that may leave the value as it is."""


@dataclass(frozen=True, slots=True)
class Held:
    """What holds of a device's value: it is these entries of value number `number`, or a summand of them."""

    number: int
    axes: tuple[Index, ...]
    owed: Owed = None


def but(axes: tuple[Index, ...], axis: int) -> tuple[Index, ...]:
    """The axes without what is there of one."""
    return (*axes[:axis], (), *axes[axis + 1 :])


def converted(node: Node, operands: Sequence[Held | None]) -> list[Held]:
    """What `node` is as a conversion that leaves the value as it is: fewer entries, shares joined, a summand of 0."""
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
    if has_twice(index):  # no share has an entry twice, and there would be ever more of such
        return []
    return [Held(first.number, (*first.axes[:axis], index, *first.axes[axis + 1 :]), first.owed)]
