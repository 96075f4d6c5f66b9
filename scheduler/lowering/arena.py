"""Lifetimes to offsets: which bytes of a device's arena each value occupies, and from when to when."""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Iterable, Sequence

from ...backends.base import ALIGNMENT
from ...graph.lazy_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Lifetime:
    """`nbytes` needed from step `first` to step `last`, both inclusive."""

    nbytes: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Arena:
    """An offset for each lifetime, in the order given, and the bytes needed in all."""

    offsets: tuple[int, ...]
    nbytes: int


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def place(lifetimes: Iterable[Lifetime]) -> Arena:
    """Offsets such that no two lifetimes share a byte at any step: best fit among the free gaps, step by step."""
    wanted = list(lifetimes)
    offsets = [0] * len(wanted)
    free: list[tuple[int, int]] = []  # (offset, bytes), by offset, no two adjacent
    ending: list[tuple[int, int]] = []  # (last step, index), by step
    top = 0
    for index in sorted(range(len(wanted)), key=lambda i: (wanted[i].first, -wanted[i].nbytes)):
        need = aligned(wanted[index].nbytes)
        while ending and ending[0][0] < wanted[index].first:
            done = ending.pop(0)[1]
            free = _release(free, offsets[done], aligned(wanted[done].nbytes))
        offsets[index], top = _take(free, need, top)
        insort(ending, (wanted[index].last, index))
    return Arena(tuple(offsets), top)


def place_by_runs(lifetimes: Iterable[Lifetime], run_of: Sequence[int]) -> Arena:
    """Offsets such that runs of steps may be repeated in any order, but for the first, -1, and the last: step s is of
    run ``run_of[s]``.

    What is needed in several runs lies at the bottom; above it lies what one run needs alone, in the same bytes as that
    of the others; and above that what the runs between the first and the last keep to the end, in their order.
    """
    wanted, end, most = list(lifetimes), len(run_of), run_of[-1]
    bounds = [(run_of[w.first] if w.first >= 0 else -1, run_of[w.last] if w.last < end else most) for w in wanted]
    groups: dict[int | str, list[int]] = defaultdict(list)
    for number, (lifetime, (first, last)) in enumerate(zip(wanted, bounds, strict=True)):
        is_kept = lifetime.last == end and -1 < first < most
        groups["kept" if is_kept else first if first == last else "lasting"].append(number)
    offsets, bottom, top = [0] * len(wanted), 0, 0
    alone: list[int | str] = [group for group in groups if isinstance(group, int)]
    for group in ("lasting", *alone):
        arena = place(wanted[number] for number in groups[group])
        for number, offset in zip(groups[group], arena.offsets, strict=True):
            offsets[number] = bottom + offset
        top = max(top, bottom + arena.nbytes)
        bottom = top if group == "lasting" else bottom
    for number in sorted(groups["kept"], key=lambda number: wanted[number].first):
        offsets[number] = top
        top += aligned(wanted[number].nbytes)
    return Arena(tuple(offsets), top)


def _take(free: list[tuple[int, int]], need: int, top: int) -> tuple[int, int]:
    """Cut `need` bytes from the tightest gap, or from the end; returns the offset and the new top."""
    fitting = [(size, offset) for offset, size in free if size >= need]
    if fitting:
        size, offset = min(fitting)
        free.remove((offset, size))
        if size > need:
            insort(free, (offset + need, size - need))
        return offset, top
    if free and sum(free[-1]) == top:  # the last gap touches the end: grow it
        offset, _ = free.pop()
        return offset, offset + need
    return top, top + need


def _release(free: list[tuple[int, int]], offset: int, size: int) -> list[tuple[int, int]]:
    """`free` with one more gap, merged with its neighbours."""
    if not size:
        return free
    insort(free, (offset, size))
    merged: list[tuple[int, int]] = []
    for start, length in free:
        if merged and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        else:
            merged.append((start, length))
    return merged
