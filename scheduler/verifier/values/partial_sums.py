"""Partial sums of devices, and the check that all devices together have each term exactly once.

Example: Two devices contract an axis of 8. Device 0 has the entries 0 to 4, device 1 has the entries 5 to 7. If
device 1 also started at entry 0, three terms would be counted twice:

>>> left, right, wrong = (make_contraction_partial_sum((index,), (8,)) for index in (((0, 5),), ((5, 3),), ((0, 3),)))
>>> check_sum_is_complete([left, right])
>>> check_sum_is_complete([left, wrong])
'devices 0 and 1 both have a term'

A residual that only device 0 has is added to the sum. An addition is linear in two sums, and each sum must be
complete:

>>> first = make_linear_partial_sum("a+b", [left, None])
>>> check_sum_is_complete([first, make_linear_partial_sum("a+b", [right, NO_TERMS])])
>>> check_sum_is_complete([first, make_linear_partial_sum("a+b", [right, None])])
'device 0 has the complete value, and devices [1] add to it'

A product is linear in each factor, but only in one factor at a time. Some terms of one factor and the other terms of
the other factor do not form a sum:

>>> check_sum_is_complete([make_linear_partial_sum("a", [left]), make_linear_partial_sum("b", [right])])
'the devices have partial sums of different kinds'

Two equal partial sums of one value have the same terms of the same sum, so the verifier may merge them. For each op
from the contraction to the value, `linear_operands` and `operand_sums` state which operands carry the sum. At the
contraction, `index_box` and `axis_sizes` state which terms the device has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations

from .index_sets import IndexRanges, count_entries, has_common_entries, has_duplicates, has_each_entry_once


@dataclass(frozen=True, slots=True)
class PartialSum:
    """The terms that one device contributes to a sum over all devices.

    Such a sum begins at a contraction, such as a matmul over a sharded axis. Linear ops pass it on, so the record is
    nested with one level for each op. The field `kind` decides which fields are used:

    - ``none``: The device has no term, only zeros.
    - ``terms``: The device has some terms of a contraction. `index_box` has its entries of each contracted axis, and
      `axis_sizes` has the sizes of these axes.
    - ``linear``: The value is the result of an op that is linear in some operands. `linear_operands` has their names,
      such as ``a+b``. `operand_sums` has their partial sums; None stands for the complete operand.

    `routing` is set for rows that are looked up in a table. It is a pair: the value number of the index operand, and
    its number of axes. The index operand has a row number for each index of the leading axes of the result. At such
    an index, the result is zero unless `index_box` has this row.
    """

    kind: str
    index_box: tuple[IndexRanges, ...] = ()
    axis_sizes: tuple[int, ...] = ()
    operand_sums: tuple[PartialSum | None, ...] = ()
    linear_operands: str = ""
    routing: tuple[int, int] | None = None
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(
            self,
            "_hash",
            hash((self.kind, self.index_box, self.axis_sizes, self.operand_sums, self.linear_operands, self.routing)),
        )

    def __hash__(self) -> int:
        """Return the hash, which is computed once: a residual has as many nested parts as layers before it."""
        return self._hash


NO_TERMS = PartialSum("none")
EMPTY_SUM = PartialSum("terms", ((),), (0,))
"""A sum without terms. It is also a valid part of this sum for each device, so the parts may be added."""
OptionalPartialSum = PartialSum | None
"""A partial sum; None if the device has the value itself."""


def make_contraction_partial_sum(index_box: tuple[IndexRanges, ...], axis_sizes: tuple[int, ...]) -> OptionalPartialSum:
    """Return the partial sum of a contraction on a device that has only some entries of the contracted axes.

    Args:
        index_box: For each contracted axis, the entries that the device has.
        axis_sizes: The sizes of the whole contracted axes.

    Returns:
        None if the device has all terms, `NO_TERMS` if it has none, else the partial sum.
    """
    if all(map(has_each_entry_once, index_box, axis_sizes)):
        return None
    if any(not i for i in index_box):
        return NO_TERMS
    return PartialSum("terms", index_box, axis_sizes)


def make_linear_partial_sum(linear_operands: str, operand_sums: Sequence[OptionalPartialSum]) -> OptionalPartialSum:
    """Return the partial sum of a linear op's result, for example of ``a + b`` if `a` is a partial sum.

    Args:
        linear_operands: Names of the operands in which the op is linear together, joined by ``+``.
        operand_sums: Partial sum of each of these operands; None for a complete operand.

    Returns:
        None if all operands are complete, `NO_TERMS` if all are zeros, else the partial sum.
    """
    if all(p is None for p in operand_sums):
        return None
    if all(p is NO_TERMS for p in operand_sums):
        return NO_TERMS
    return PartialSum("linear", operand_sums=tuple(operand_sums), linear_operands=linear_operands)


def check_sum_is_complete(
    partial_sums: Sequence[OptionalPartialSum],
    known_complete: dict[tuple[int, ...], Sequence[OptionalPartialSum]] | None = None,
) -> str | None:
    """Check that all devices together have each term of a sum exactly once; return the reason if not, else None.

    Args:
        partial_sums: The partial sum of each device; None for a device that has the complete value.
        known_complete: Lists of partial sums that are known to be complete. A complete list is added.
    """
    seen: dict[tuple[int, ...], Sequence[OptionalPartialSum]] = {}
    known = {} if known_complete is None else known_complete
    why = _check_nested_partial_sums(partial_sums, known, seen)
    if why is None:
        known |= seen
    return why


def _check_nested_partial_sums(
    partial_sums: Sequence[OptionalPartialSum],
    known_complete: Mapping[tuple[int, ...], object],
    being_checked: dict[tuple[int, ...], Sequence[OptionalPartialSum]],
) -> str | None:
    """Check that the devices have each term of a sum once, through all linear ops back to the contraction.

    Args:
        partial_sums: The partial sum of each device.
        known_complete: Lists that are known to be complete, by the ids of their objects.
        being_checked: Lists that are checked already or now. It holds the objects, because keys are object ids.

    Returns:
        The reason why a term is missing or counted twice; None if the sum is complete.
    """
    key = tuple(map(id, partial_sums))
    if key in known_complete or key in being_checked:
        return None
    being_checked[key] = partial_sums
    there = [(d, s) for d, s in enumerate(partial_sums) if s is not NO_TERMS]
    if any(s is not None and s.kind == "linear" for _, s in there):
        return _check_linear_op_partial_sums(partial_sums, known_complete, being_checked)
    if not there:
        return "no device has a term"
    whole = [d for d, s in there if s is None]
    if whole:
        others = [d for d, _ in there if d != whole[0]]
        return f"device {whole[0]} has the complete value, and devices {others} add to it" if others else None
    boxes = [(d, s) for d, s in there if s is not None]
    return _check_index_boxes_cover_all_terms(boxes)


def _check_linear_op_partial_sums(
    partial_sums: Sequence[OptionalPartialSum],
    known_complete: Mapping[tuple[int, ...], object],
    being_checked: dict[tuple[int, ...], Sequence[OptionalPartialSum]],
) -> str | None:
    """Check that the devices' partial results of a linear op, such as an addition, add up to its whole result.

    The sum over devices of each operand must be complete by itself. A device with the complete result counts as a
    device with the complete operand. A device with zeros counts as a device with zeros in the operand.

    Args:
        partial_sums: The partial sum of each device, of the kind ``linear``.
        known_complete: Lists that are known to be complete, by the ids of their objects.
        being_checked: Lists that are checked already or now. It holds the objects, because keys are object ids.

    Returns:
        The reason why the results do not add up; None if they do.
    """
    forms = {(s.linear_operands, len(s.operand_sums)) for s in partial_sums if s is not None and s.kind == "linear"}
    kinds = {s.kind for s in partial_sums if s is not None}
    if len(forms) > 1 or "terms" in kinds:
        return "the devices have partial sums of different kinds"
    for i in range(forms.pop()[1]):
        parts = [s.operand_sums[i] if s is not None and s.kind == "linear" else s for s in partial_sums]
        if why := _check_nested_partial_sums(parts, known_complete, being_checked):
            return why
    return None


def _check_index_boxes_cover_all_terms(boxes: Sequence[tuple[int, PartialSum]]) -> str | None:
    """Check that the index ranges of all devices cover a contraction once, without gaps and overlaps.

    Args:
        boxes: Pairs of a device number and its partial sum of the kind ``terms``, with an index box: its entries of
            each contracted axis.

    Returns:
        The reason why a term is missing or counted twice; None if all is right.
    """
    sizes, by = boxes[0][1].axis_sizes, boxes[0][1].routing
    for device, box in boxes:
        if box.axis_sizes != sizes:
            return "the devices sum over different axes"
        if box.routing != by:
            return "the devices look up rows by different index values"
        if any(map(has_duplicates, box.index_box)):
            return f"device {device} has a term twice"
    if all(has_duplicates(tuple(chain(*axis))) for axis in zip(*(box.index_box for _, box in boxes), strict=True)):
        for (d, one), (e, two) in combinations(boxes, 2):  # no single axis separates all boxes
            if all(map(has_common_entries, one.index_box, two.index_box)):
                return f"devices {d} and {e} both have a term"
    have = sum(math.prod(map(count_entries, b.index_box)) for _, b in boxes)
    return None if have == math.prod(sizes) else f"{math.prod(sizes) - have} of {math.prod(sizes)} terms are missing"
