"""The arena planner: values with disjoint lifetimes share memory; it assigns byte offsets in the arena of a device.

Values with overlapping lifetimes get disjoint bytes. The method is best fit. At its first step, a value takes the
smallest free gap that is large enough, or bytes at the end of the arena. At a step with several values the largest
value comes first. Sizes are rounded up to `ALIGNMENT` (64 bytes).

Example: A lives in the steps 0 to 1, B in 1 to 2, and C in 2 to 3. C takes bytes of A, which ended before step 2:

>>> sizes = [(128, 0, 1), (64, 1, 2), (64, 2, 3)]
>>> assign_arena_offsets(Lifetime(*size) for size in sizes)
Arena(offsets=(0, 128, 0), nbytes=192)
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Iterable, Sequence

from ...backends.base import ALIGNMENT
from ...graph.lazy_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Lifetime:
    """The steps from `first_step` to `last_step`, both inclusive, in which a value of `nbytes` bytes needs memory."""

    nbytes: int
    first_step: int
    last_step: int


@dataclass(frozen=True, slots=True)
class Arena:
    """The layout of an arena: the byte offset of each lifetime, and the size of the arena.

    - `offsets`: the byte offsets, in the order of the lifetimes.
    - `nbytes`: the bytes of the whole arena.
    """

    offsets: tuple[int, ...]
    nbytes: int


def round_up_to_alignment(nbytes: int) -> int:
    """Round a byte count up to the next multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def assign_arena_offsets(lifetimes: Iterable[Lifetime]) -> Arena:
    """Assign each lifetime an arena offset by best fit, so that lifetimes with a common step get disjoint bytes.

    Lifetimes are placed by first step, and the largest of a step first. Each takes the smallest free gap that is large
    enough, else bytes at the end of the arena.
    """
    all_lifetimes = list(lifetimes)
    offsets = [0] * len(all_lifetimes)
    free: list[tuple[int, int]] = []  # (offset, bytes), by offset, no two adjacent
    ending: list[tuple[int, int]] = []  # (last step, index), by step
    top = 0
    for index in sorted(
        range(len(all_lifetimes)), key=lambda i: (all_lifetimes[i].first_step, -all_lifetimes[i].nbytes)
    ):
        need = round_up_to_alignment(all_lifetimes[index].nbytes)
        while ending and ending[0][0] < all_lifetimes[index].first_step:
            done = ending.pop(0)[1]
            free = _add_free_gap(free, offsets[done], round_up_to_alignment(all_lifetimes[done].nbytes))
        offsets[index], top = _take_best_fit_gap(free, need, top)
        insort(ending, (all_lifetimes[index].last_step, index))
    return Arena(tuple(offsets), top)


def assign_arena_offsets_for_any_repetition_order(
    lifetimes: Iterable[Lifetime], repetition_of_step: Sequence[int]
) -> Arena:
    """Assign arena offsets to the values of a program with few repeated layers, so that it can be unrolled to many.

    Unrolling copies the layers in the middle any number of times. The offsets are therefore valid for any order of
    these layers; the first and the last one run once. The arena has three regions, from the bottom:

    1. Values that live in several layers.
    2. Values that live in one layer. All layers use the same bytes for them.
    3. Values of middle layers that live until the end of the program, in the order of their steps.

    Args:
        lifetimes: The lifetimes of the values.
        repetition_of_step: The number of the layer (repetition) to which each step belongs; -1 before all layers.
    """
    all_lifetimes, end, last_repetition = list(lifetimes), len(repetition_of_step), repetition_of_step[-1]
    bounds = [
        (
            repetition_of_step[w.first_step] if w.first_step >= 0 else -1,
            repetition_of_step[w.last_step] if w.last_step < end else last_repetition,
        )
        for w in all_lifetimes
    ]
    groups: dict[int | str, list[int]] = defaultdict(list)
    for number, (lifetime, (first, last)) in enumerate(zip(all_lifetimes, bounds, strict=True)):
        is_retained = lifetime.last_step == end and -1 < first < last_repetition
        groups["retained" if is_retained else first if first == last else "lasting"].append(number)
    offsets, bottom, top = [0] * len(all_lifetimes), 0, 0
    alone: list[int | str] = [group for group in groups if isinstance(group, int)]
    for group in ("lasting", *alone):
        arena = assign_arena_offsets(all_lifetimes[number] for number in groups[group])
        for number, offset in zip(groups[group], arena.offsets, strict=True):
            offsets[number] = bottom + offset
        top = max(top, bottom + arena.nbytes)
        bottom = top if group == "lasting" else bottom
    for number in sorted(groups["retained"], key=lambda number: all_lifetimes[number].first_step):
        offsets[number] = top
        top += round_up_to_alignment(all_lifetimes[number].nbytes)
    return Arena(tuple(offsets), top)


def _take_best_fit_gap(gaps: list[tuple[int, int]], nbytes: int, arena_end: int) -> tuple[int, int]:
    """Take bytes from the smallest free gap that is large enough (best fit), or from the end of the arena.

    Args:
        gaps: The free gaps as (offset, bytes), sorted by offset. The gap that is used is removed or made smaller.
        nbytes: The number of bytes to take.
        arena_end: The present size of the arena in bytes.

    Returns:
        The offset of the taken bytes, and the new size of the arena.
    """
    fitting = [(size, offset) for offset, size in gaps if size >= nbytes]
    if fitting:
        size, offset = min(fitting)
        gaps.remove((offset, size))
        if size > nbytes:
            insort(gaps, (offset + nbytes, size - nbytes))
        return offset, arena_end
    if gaps and sum(gaps[-1]) == arena_end:  # the last gap is at the end and can grow
        offset, _ = gaps.pop()
        return offset, offset + nbytes
    return arena_end, arena_end + nbytes


def _add_free_gap(gaps: list[tuple[int, int]], offset: int, nbytes: int) -> list[tuple[int, int]]:
    """Add a free gap to the sorted list of free gaps, merge adjacent gaps, and return the new list.

    Args:
        gaps: The free gaps as (offset, bytes), sorted by offset.
        offset: The first byte of the new gap.
        nbytes: The bytes of the new gap; 0 leaves the list unchanged.
    """
    if not nbytes:
        return gaps
    insort(gaps, (offset, nbytes))
    merged: list[tuple[int, int]] = []
    for start, length in gaps:
        if merged and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        else:
            merged.append((start, length))
    return merged
