"""Which entries of an axis somebody has, exactly: the arithmetic of the verifier of plans.

An index is the tuple of runs (first entry, length) that lists the entries in the order in which they lie; neighbours
are merged, so equal lists are equal tuples.  A digit ``(stride, size)`` of an axis is a part of the entry's number on
which a value does not depend: entries that differ only there are equal, and whoever has one has the other.

An axis of 12 entries is two segments of (3 heads, 2 places).  A device that has head 1 of both segments has entries 2,
3, 8 and 9; as a product of 2, 3 and 2, here of 2, 1 and 2, that is all of the outer and inner factors, and head 1.

>>> heads = joined([((2, 2),), ((8, 2),)])
>>> heads, length(heads), entries(heads).tolist()
(((2, 2), (8, 2)), 4, [2, 3, 8, 9])
>>> factored(heads, (2, 3, 2), (2, 1, 2))
(((0, 2),), ((1, 1),), ((0, 2),))
>>> multiplied((whole(2), ((1, 1),), whole(2)), (2, 3, 2)) == heads
True

Where the value does not depend on the segment, the digit (stride 6, size 2), one segment is as good as the other.

>>> agreed(((2, 2),), ((6, 2),), ((8, 2),), ())
((8, 2),)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Index: TypeAlias = tuple[tuple[int, int], ...]
Digits: TypeAlias = tuple[tuple[int, int], ...]
Entries: TypeAlias = npt.NDArray[np.int64]


def whole(n: int) -> Index:
    """All entries of an axis of size `n`, in order."""
    return ((0, n),) if n else ()


def length(index: Index) -> int:
    return sum(n for _, n in index)


@lru_cache(maxsize=1024)
def entries(index: Index) -> Entries:
    """The entries one by one; not to be written to."""
    if not index:
        return np.zeros(0, np.int64)
    return np.concatenate([np.arange(start, start + n, dtype=np.int64) for start, n in index])


def index_of(listed: Entries) -> Index:
    """The runs of a list of entries."""
    if not listed.size:
        return ()
    starts = np.concatenate([[0], np.flatnonzero(np.diff(listed) != 1) + 1])
    lengths = np.diff(np.append(starts, listed.size))
    return tuple(zip(listed[starts].tolist(), lengths.tolist(), strict=True))


@lru_cache(maxsize=1 << 14)
def taken(index: Index, start: int, stop: int, shift: int = 0) -> Index:
    """Positions `start` to `stop` of what is there, numbered from `shift` on."""
    runs, at = [], 0
    for first, n in index:
        low, high = max(start, at), min(stop, at + n)
        if low < high:
            runs.append((first + low - at - shift, high - low))
        at += n
    return tuple(runs)


@lru_cache(maxsize=1 << 12)
def share_entries(one: Index, two: Index) -> bool:
    """Whether some entry is in both."""
    runs = sorted([*((a, 0, n) for a, n in one), *((a, 1, n) for a, n in two)])
    ends = [0, 0]
    for start, which, n in runs:
        if start < ends[1 - which]:
            return True
        ends[which] = max(ends[which], start + n)
    return False


@lru_cache(maxsize=1 << 12)
def covers(index: Index, n: int) -> bool:
    """Whether the entries from 0 to `n` are there, each once, in any order."""
    at = 0
    for start, k in sorted(index):
        if start != at:
            return False
        at += k
    return at == n


@lru_cache(maxsize=1 << 12)
def has_twice(index: Index) -> bool:
    """Whether an entry is there more than once."""
    ordered = sorted(index)
    return any(sum(a) > b[0] for a, b in pairwise(ordered))


def joined(parts: Sequence[Index]) -> Index:
    """One after the other."""
    runs: list[tuple[int, int]] = []
    for start, n in (run for part in parts for run in part):
        if runs and sum(runs[-1]) == start:
            runs[-1] = (runs[-1][0], runs[-1][1] + n)
        else:
            runs.append((start, n))
    return tuple(runs)


@lru_cache(maxsize=1 << 14)
def factored(index: Index, sizes: tuple[int, ...], local: tuple[int, ...]) -> tuple[Index, ...] | None:
    """An axis that is a product of `sizes`, outer first, and here of `local`: the index of each factor.

    None if what is there is no product of that form.
    """
    if length(index) != math.prod(local):
        return None
    if len(sizes) == 1:
        return (index,)
    if local == sizes and index == whole(math.prod(sizes)):
        return tuple(map(whole, sizes))
    if 0 in local:
        return tuple(((0, m),) if m else () for m in local)
    grid, indices, inner = entries(index).reshape(local), [], math.prod(sizes)
    total = np.zeros((), np.int64)
    for axis, n in enumerate(sizes):
        inner //= n
        line = grid[(0,) * axis + (slice(None),) + (0,) * (len(sizes) - axis - 1)] // inner % n
        indices.append(index_of(line))
        total = total + (line * inner).reshape(-1, *[1] * (len(sizes) - axis - 1))
    return tuple(indices) if np.array_equal(total, grid) else None


@lru_cache(maxsize=1 << 14)
def multiplied(indices: tuple[Index, ...], sizes: tuple[int, ...]) -> Index:
    """The index of a product of axes of these sizes, outer first."""
    if len(indices) == 1:
        return indices[0]
    if all(i == whole(n) for i, n in zip(indices, sizes, strict=True)):
        return whole(math.prod(sizes))
    total = np.zeros((), np.int64)
    for index, n in zip(indices, sizes, strict=True):
        total = total[..., None] * n + entries(index)
    return index_of(total.ravel())


def _place(listed: Entries, digit: tuple[int, int]) -> Entries:
    stride, n = digit
    return listed // stride % n * stride


def _without(listed: Entries, digits: Digits) -> Entries:
    for digit in digits:
        listed = listed - _place(listed, digit)
    return listed


def common(one: Digits, two: Digits) -> Digits:
    return one if one == two else tuple(d for d in one if d in two)


@lru_cache(maxsize=1 << 14)
def agreed(one: Index, ones: Digits, two: Index, twos: Digits) -> Index | None:
    """The entries that two values both hold here, each up to the digits on which it does not depend; else None."""
    if one == two:
        return one
    if length(one) != length(two) or not (ones or twos):
        return None
    a, b = entries(one), entries(two)
    merged = a
    for digit in ones:
        if digit not in twos:
            merged = merged + _place(b, digit) - _place(merged, digit)
    same_a = np.array_equal(_without(merged, ones), _without(a, ones))
    same_b = np.array_equal(_without(merged, twos), _without(b, twos))
    return index_of(merged) if same_a and same_b else None


def is_whole(index: Index, digits: Digits, n: int) -> bool:
    return index == whole(n) or (bool(digits) and agreed(index, digits, whole(n), ()) is not None)


@lru_cache(maxsize=1 << 14)
def repeats(part: Index, digits: Digits, n: int, over: Index, size: int, tiled: bool) -> bool:
    """Whether a kernel that repeats what is there of a smaller axis over a larger one meets the right entries.

    `tiled` is index modulo size, otherwise each entry serves a run of neighbours.
    """
    mine, theirs = length(part), length(over)
    if n == 1 or not theirs or not n:
        return mine == n or not theirs
    if not mine or theirs % mine or size % n:
        return False
    at = np.arange(theirs) % mine if tiled else np.arange(theirs) // (theirs // mine)
    wanted = entries(over) % n if tiled else entries(over) // (size // n)
    return np.array_equal(_without(entries(part)[at], digits), _without(wanted, digits))


def outer(digits: Digits, inner: int) -> Digits:
    """Digits of a factor as digits of the product in which `inner` entries lie within each of its own."""
    return tuple((stride * inner, n) for stride, n in digits)


def within(digits: Digits, inner: int, size: int) -> Digits:
    """Those digits of a product, or parts of them, that lie in the factor of this size with `inner` inside it."""
    inside = []
    for stride, n in digits:
        low, high = max(stride, inner), min(stride * n, inner * size)
        if low < high and low % stride == high % low == low % inner == 0 and (stride * n) % high == 0:
            inside.append((low // inner, high // low))
    return tuple(inside)
