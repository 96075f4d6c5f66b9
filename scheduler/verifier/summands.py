"""What a device has of a sum that is still owed, and whether the devices together have each term once.

Two devices contract an axis of 8: device 0 over entries 0 to 5, device 1 over the others.  Together that is the sum; if
both began at 0, three terms would be counted twice.

>>> left, right, wrong = (terms((index,), (8,)) for index in (((0, 5),), ((5, 3),), ((0, 3),)))
>>> miscounted([left, right])
>>> miscounted([left, wrong])
'devices 0 and 1 both have a term'

A residual that device 0 alone brings is added to it: a linear op of two sums, each of which has to come out.

>>> miscounted([linear("a+b", [left, None]), linear("a+b", [right, NOTHING])])
>>> miscounted([linear("a+b", [left, None]), linear("a+b", [right, None])])
'device 0 brings all of it, and devices [1] bring it again'

A product is linear in each factor, but in one at a time: some terms of the one and the other terms of the other make
no sum.

>>> miscounted([linear("a", [left]), linear("b", [right])])
'the devices owe sums of different kinds'

So summands of one value that are equal have the same terms of the same sum, and may become one: for each op on its way
`joint` and `parts` tell by which operands the sum comes, `box` and `sizes` which terms there are where it begins.
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

    ``none``: zeros.  ``terms``: the terms of a contraction whose indices lie in `box`, of `sizes` in all.  ``linear``:
    an op that is linear in the operands that `joint` names, of which `parts` are owed (None: the value itself, all of
    the sum).  `by`: the terms are rows that are looked up by numbers, a value and how many axes it has; then what is at
    an index of the value's first axes is zero, unless the row named there is in `box`.
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
        """Found once: a residual is a sum of as many parts as there are layers before."""
        return self._hash


NOTHING = Summand("none")
EMPTY = Summand("terms", ((),), (0,))
"""What a sum of no terms also is, besides all of itself: everybody's part of it, so that its parts may be added."""
Owed = Summand | None
"""None: the device has the value itself."""


def terms(box: tuple[Index, ...], sizes: tuple[int, ...]) -> Owed:
    """A contraction over the entries of `box`: all of it, nothing of it, or some."""
    if all(map(covers, box, sizes)):
        return None
    if any(not i for i in box):
        return NOTHING
    return Summand("terms", box, sizes)


def linear(joint: str, parts: Sequence[Owed]) -> Owed:
    """An op that is linear in the operands that `joint` names, of which these may be owed."""
    if all(p is None for p in parts):
        return None
    if all(p is NOTHING for p in parts):
        return NOTHING
    return Summand("linear", parts=tuple(parts), joint=joint)


def miscounted(summands: Sequence[Owed], counted: dict[tuple[int, ...], Sequence[Owed]] | None = None) -> str | None:
    """Why the devices' summands of one value do not add up to it, each term once; None if they do.

    `counted` are summands that are known to add up; those of `summands` are added to it.
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
    """The same, where `seen` is being asked about already; it keeps what it names by identity."""
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
    """The same question for each part of a linear op; a device that has all or nothing has so of each part."""
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
    """Why boxes of indices are no disjoint cover of all of them."""
    sizes, by = boxes[0][1].sizes, boxes[0][1].by
    for device, box in boxes:
        if box.sizes != sizes:
            return "the devices sum over different axes"
        if box.by != by:
            return "the devices look rows up by different numbers"
        if any(map(has_twice, box.box)):
            return f"device {device} has a term twice"
    if all(has_twice(tuple(chain(*axis))) for axis in zip(*(box.box for _, box in boxes), strict=True)):
        for (d, one), (e, two) in combinations(boxes, 2):  # no axis alone keeps all boxes apart
            if all(map(share_entries, one.box, two.box)):
                return f"devices {d} and {e} both have a term"
    have = sum(math.prod(map(length, b.box)) for _, b in boxes)
    return None if have == math.prod(sizes) else f"{math.prod(sizes) - have} of {math.prod(sizes)} terms are missing"
