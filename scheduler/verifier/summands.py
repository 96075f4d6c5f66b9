"""Partial sums of devices, and the check that all devices together have each term exactly once.

Example: Two devices contract an axis of 8. Device 0 has the entries 0 to 4, device 1 has the entries 5 to 7. If device
1 also started at entry 0, three terms would be counted twice:

>>> left, right, wrong = (terms((index,), (8,)) for index in (((0, 5),), ((5, 3),), ((0, 3),)))
>>> miscounted([left, right])
>>> miscounted([left, wrong])
'devices 0 and 1 both have a term'

A residual that only device 0 has is added to the sum. An addition is linear in two sums, and each sum must be
complete:

>>> miscounted([linear("a+b", [left, None]), linear("a+b", [right, NOTHING])])
>>> miscounted([linear("a+b", [left, None]), linear("a+b", [right, None])])
'device 0 brings all of it, and devices [1] bring it again'

A product is linear in each factor, but only in one factor at a time. Some terms of one factor and the other terms of
the other factor do not form a sum:

>>> miscounted([linear("a", [left]), linear("b", [right])])
'the devices owe sums of different kinds'

Two equal partial sums of one value have the same terms of the same sum, so the verifier may merge them. For each op on
the way, `linear_operands` and `operand_sums` say which operands carry the sum. At its start, `index_box` and
`axis_sizes` say which terms the device has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations

from .indices import Index, covers, has_twice, length, share_entries


@dataclass(frozen=True, slots=True)
class Summand:
    """A device's part of a sum.

    The kinds are:

    - ``none``: zeros.
    - ``terms``: the terms of a contraction that have their indices in `index_box`; `axis_sizes` are all indices.
    - ``linear``: an op that is linear in the operands of the joint `linear_operands`. `operand_sums` are their partial
      sums; None stands for the value itself, which is the whole sum.

    If `routing` is set, the terms are rows that index numbers look up. `routing` is the value number of these index
    numbers and the number of its axes. At an index of the first axes of the value, the result is zero unless
    `index_box` has the row that is named there.
    """

    kind: str
    box: tuple[Index, ...] = ()
    sizes: tuple[int, ...] = ()
    parts: tuple[Summand | None, ...] = ()
    joint: str = ""
    by: tuple[int, int] | None = None
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.kind, self.box, self.sizes, self.parts, self.joint, self.by)))

    def __hash__(self) -> int:
        """Return the hash, which is computed once: a residual has as many nested parts as layers before it."""
        return self._hash


NOTHING = Summand("none")
EMPTY = Summand("terms", ((),), (0,))
"""A sum without terms. It is also a valid part of this sum for each device, so the parts may be added."""
Owed = Summand | None
"""A partial sum; None if the device has the value itself."""


def terms(box: tuple[Index, ...], sizes: tuple[int, ...]) -> Owed:
    """Make the partial sum of a contraction over the entries of `box`: all terms, no terms, or some of them."""
    if all(map(covers, box, sizes)):
        return None
    if any(not i for i in box):
        return NOTHING
    return Summand("terms", box, sizes)


def linear(joint: str, parts: Sequence[Owed]) -> Owed:
    """Make the partial sum of a linear op.

    Args:
        joint: Names of the operands in which the op is linear, joined by ``+``.
        parts: Partial sum of each of these operands.
    """
    if all(p is None for p in parts):
        return None
    if all(p is NOTHING for p in parts):
        return NOTHING
    return Summand("linear", parts=tuple(parts), joint=joint)


def miscounted(summands: Sequence[Owed], counted: dict[tuple[int, ...], Sequence[Owed]] | None = None) -> str | None:
    """Return why the partial sums of one value are not complete, each term once; None if they are.

    Args:
        summands: The partial sum of each device.
        counted: Partial sums that are known to be complete. If `summands` are complete, they are added.
    """
    seen: dict[tuple[int, ...], Sequence[Owed]] = {}
    known = {} if counted is None else counted
    why = _miscounted(summands, known, seen)
    if why is None:
        known |= seen
    return why


def _miscounted(
    summands: Sequence[Owed], known: Mapping[tuple[int, ...], object], seen: dict[tuple[int, ...], Sequence[Owed]]
) -> str | None:
    """Return the same as `check_complete_sum`.

    `seen` has the sums that are being checked already. It holds the objects, because keys are object ids.
    """
    key = tuple(map(id, summands))
    if key in known or key in seen:
        return None
    seen[key] = summands
    there = [(d, s) for d, s in enumerate(summands) if s is not NOTHING]
    if any(s is not None and s.kind == "linear" for _, s in there):
        return _parts_miscounted(summands, known, seen)
    if not there:
        return "no device brings anything"
    whole = [d for d, s in there if s is None]
    if whole:
        others = [d for d, _ in there if d != whole[0]]
        return f"device {whole[0]} brings all of it, and devices {others} bring it again" if others else None
    boxes = [(d, s) for d, s in there if s is not None]
    return _uncovered(boxes)


def _parts_miscounted(
    summands: Sequence[Owed], known: Mapping[tuple[int, ...], object], seen: dict[tuple[int, ...], Sequence[Owed]]
) -> str | None:
    """Check each operand of a linear op. A device with the whole sum, or with zeros, has the same of each operand."""
    forms = {(s.joint, len(s.parts)) for s in summands if s is not None and s.kind == "linear"}
    kinds = {s.kind for s in summands if s is not None}
    if len(forms) > 1 or "terms" in kinds:
        return "the devices owe sums of different kinds"
    for i in range(forms.pop()[1]):
        parts = [s.parts[i] if s is not None and s.kind == "linear" else s for s in summands]
        if why := _miscounted(parts, known, seen):
            return why
    return None


def _uncovered(boxes: Sequence[tuple[int, Summand]]) -> str | None:
    """Return why index boxes are not a disjoint cover of all indices; None if they are."""
    sizes, by = boxes[0][1].sizes, boxes[0][1].by
    for device, box in boxes:
        if box.sizes != sizes:
            return "the devices sum over different axes"
        if box.by != by:
            return "the devices look rows up by different numbers"
        if any(map(has_twice, box.box)):
            return f"device {device} has a term twice"
    if all(has_twice(tuple(chain(*axis))) for axis in zip(*(box.box for _, box in boxes), strict=True)):
        for (d, one), (e, two) in combinations(boxes, 2):  # no single axis separates all boxes
            if all(map(share_entries, one.box, two.box)):
                return f"devices {d} and {e} both have a term"
    have = sum(math.prod(map(length, b.box)) for _, b in boxes)
    return None if have == math.prod(sizes) else f"{math.prod(sizes) - have} of {math.prod(sizes)} terms are missing"
