"""Facts about device values, and the facts about results of conversions.

A conversion is a node that the planner added: a copy, a message, a slice, a concatenation, or zeros. The user's graph
need not have such a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....graph.node import Node
from ....ops.collectives import cast_to_index_ranges, narrow_to_integer
from .index_sets import (
    IndexRanges,
    concatenate_indices,
    has_duplicates,
    select_entries_at_positions,
    slice_and_shift_index,
)
from .partial_sums import NO_TERMS, OptionalPartialSum

CONVERSION_OPS = frozenset({"cont", "send", "scale", "fill", "slice", "concat"})
"""Ops that can keep the value, as `infer_copied_or_sliced_value_facts` decides."""


@dataclass(frozen=True, slots=True)
class DeviceValueFact:
    """A proven statement about a value on a device: it equals given entries of one value of the user's graph.

    The device value may also be a partial sum of these entries.

    - `value_number`: the number of the graph value in `ValueNumbering`.
    - `axes`: for each axis, the entries of the graph value that the device value has, in memory order.
    - `partial_sum`: the terms of the sum that the device value has, if the values of all devices must be added; None
      for a complete value.
    """

    value_number: int
    axes: tuple[IndexRanges, ...]
    partial_sum: OptionalPartialSum = None


def with_empty_index_on_axis(axes: tuple[IndexRanges, ...], axis: int) -> tuple[IndexRanges, ...]:
    """Return the entries of each axis, with none on axis `axis`; two results are equal if all other axes are equal."""
    return (*axes[:axis], (), *axes[axis + 1 :])


def infer_copied_or_sliced_value_facts(node: Node, operands: Sequence[DeviceValueFact | None]) -> list[DeviceValueFact]:
    """Infer which graph value the result of a copy, slice or concatenation is, from the facts about its operands.

    - A copy or a message has the fact of its operand.
    - A slice has fewer entries of the same graph value.
    - A concatenation has the entries of two shards of one graph value.
    - Zeros are a partial sum without terms.

    Args:
        node: The device's node.
        operands: The fact about each operand; None for a missing operand.

    Returns:
        A list with the fact, or an empty list if the node is no such conversion.
    """
    first, attrs = operands[0] if operands else None, node.attrs
    if first is None or node.op not in CONVERSION_OPS:
        return []
    if node.op in ("cont", "send"):
        return [first]
    if (node.op == "scale" and attrs["scale"] == attrs["bias"] == 0) or (node.op == "fill" and attrs["value"] == 0):
        return [DeviceValueFact(first.value_number, first.axes, NO_TERMS)]
    if node.op not in ("slice", "concat"):
        return []
    axis = narrow_to_integer(attrs["axis"]) % len(first.axes)
    if node.op == "slice":
        index = slice_and_shift_index(
            first.axes[axis], narrow_to_integer(attrs["start"]), narrow_to_integer(attrs["stop"])
        )
        return [
            DeviceValueFact(first.value_number, (*first.axes[:axis], index, *first.axes[axis + 1 :]), first.partial_sum)
        ]
    second = operands[1]
    assert second is not None
    same = first.value_number == second.value_number and first.partial_sum == second.partial_sum
    if not same or with_empty_index_on_axis(first.axes, axis) != with_empty_index_on_axis(second.axes, axis):
        return []
    index = concatenate_indices([first.axes[axis], second.axes[axis]])
    if has_duplicates(
        index
    ):  # no shard has an entry twice; without this rule the number of facts would grow without end
        return []
    return [
        DeviceValueFact(first.value_number, (*first.axes[:axis], index, *first.axes[axis + 1 :]), first.partial_sum)
    ]


def infer_shard_fact_after_scatter(
    value_number: int, whole_axes: tuple[IndexRanges, ...], device: int, node: Node
) -> DeviceValueFact:
    """Return the fact about the shard that one device receives when a collective distributes a whole value.

    Args:
        value_number: The number of the graph value.
        whole_axes: The entries of the value before it is distributed, for each axis.
        device: The position of the device in the collective group.
        node: The collective's node; its attributes are the axis and the ranges of each device.
    """
    axis, own = narrow_to_integer(node.attrs["axis"]), cast_to_index_ranges(node.attrs["runs"])[device]
    index = select_entries_at_positions(whole_axes[axis], concatenate_indices([own]))
    return DeviceValueFact(value_number, (*whole_axes[:axis], index, *whole_axes[axis + 1 :]))
