"""Exact arithmetic on the entries of an axis, for the verifier of plans.

An index is a tuple of ranges (first entry, length). It lists the entries in memory order. Neighbouring ranges are
merged, so equal lists are equal tuples. A digit ``(stride, size)`` of an axis is a part of the entry number on which a
value does not depend. Two entries that differ only in this digit are equal, so a device that has one of them has both.

Example: An axis of 12 entries is two segments of (3 heads, 2 places). A device that has head 1 of both segments has
the entries 2, 3, 8 and 9. As a product of the factors 2, 3 and 2, the device has sizes 2, 1 and 2: all of the outer
and inner factors, and head 1.

>>> heads = joined([((2, 2),), ((8, 2),)])
>>> heads, length(heads), entries(heads).tolist()
(((2, 2), (8, 2)), 4, [2, 3, 8, 9])
>>> factored(heads, (2, 3, 2), (2, 1, 2))
(((0, 2),), ((1, 1),), ((0, 2),))
>>> multiplied((whole(2), ((1, 1),), whole(2)), (2, 3, 2)) == heads
True

If the value does not depend on the segment, which is the digit (stride 6, size 2), both segments are equal:

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
"""Ranges (first entry, length) of an axis, in memory order."""
Digits: TypeAlias = tuple[tuple[int, int], ...]
"""Parts (stride, size) of the entry number on which a value does not depend."""
Entries: TypeAlias = npt.NDArray[np.int64]


def whole(n: int) -> Index:
    """Return the index of all entries of an axis of size `n`, in order."""
    return ((0, n),) if n else ()


def length(index: Index) -> int:
    """Return the number of entries of an index."""
    return sum(n for _, n in index)


@lru_cache(maxsize=1024)
def entries(index: Index) -> Entries:
    """Return the entry numbers one by one. The array is cached; do not write to it."""
    if not index:
        return np.zeros(0, np.int64)
    return np.concatenate([np.arange(start, start + n, dtype=np.int64) for start, n in index])


def index_of(listed: Entries) -> Index:
    """Return the index of a list of entries."""
    if not listed.size:
        return ()
    starts = np.concatenate([[0], np.flatnonzero(np.diff(listed) != 1) + 1])
    lengths = np.diff(np.append(starts, listed.size))
    return tuple(zip(listed[starts].tolist(), lengths.tolist(), strict=True))


@lru_cache(maxsize=1 << 14)
def taken(index: Index, start: int, stop: int, shift: int = 0) -> Index:
    """Return the entries at the positions `start` to `stop` of an index, each entry less `shift`."""
    runs, at = [], 0
    for first, n in index:
        low, high = max(start, at), min(stop, at + n)
        if low < high:
            runs.append((first + low - at - shift, high - low))
        at += n
    return tuple(runs)


@lru_cache(maxsize=1 << 12)
def share_entries(one: Index, two: Index) -> bool:
    """Return whether two indices have an entry in common."""
    runs = sorted([*((a, 0, n) for a, n in one), *((a, 1, n) for a, n in two)])
    ends = [0, 0]
    for start, which, n in runs:
        if start < ends[1 - which]:
            return True
        ends[which] = max(ends[which], start + n)
    return False


@lru_cache(maxsize=1 << 12)
def covers(index: Index, n: int) -> bool:
    """Return whether an index has each entry from 0 to `n` exactly once, in any order."""
    at = 0
    for start, k in sorted(index):
        if start != at:
            return False
        at += k
    return at == n


@lru_cache(maxsize=1 << 12)
def has_twice(index: Index) -> bool:
    """Return whether an index has an entry more than once."""
    ordered = sorted(index)
    return any(sum(a) > b[0] for a, b in pairwise(ordered))


def joined(parts: Sequence[Index]) -> Index:
    """Return the index of several indices, one after the other."""
    runs: list[tuple[int, int]] = []
    for start, n in (run for part in parts for run in part):
        if runs and sum(runs[-1]) == start:
            runs[-1] = (runs[-1][0], runs[-1][1] + n)
        else:
            runs.append((start, n))
    return tuple(runs)


@lru_cache(maxsize=1 << 14)
def factored(index: Index, sizes: tuple[int, ...], local: tuple[int, ...]) -> tuple[Index, ...] | None:
    """Split an index of a product axis into one index for each factor.

    Args:
        index: The entries of the product axis.
        sizes: The factor sizes of the whole axis, outer first.
        local: The factor sizes of this index, outer first.

    Returns:
        The index of each factor; None if the entries are not a product of this form.
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
    """Return the index of a product axis from the indices of its factors; factors and `sizes` are outer first."""
    if len(indices) == 1:
        return indices[0]
    if all(i == whole(n) for i, n in zip(indices, sizes, strict=True)):
        return whole(math.prod(sizes))
    total = np.zeros((), np.int64)
    for index, n in zip(indices, sizes, strict=True):
        total = total[..., None] * n + entries(index)
    return index_of(total.ravel())


def _place(listed: Entries, digit: tuple[int, int]) -> Entries:
    """Return the part of each entry number that belongs to a digit."""
    stride, n = digit
    return listed // stride % n * stride


def _without(listed: Entries, digits: Digits) -> Entries:
    """Return the entry numbers with these digits set to zero."""
    for digit in digits:
        listed = listed - _place(listed, digit)
    return listed


def common(one: Digits, two: Digits) -> Digits:
    """Return the digits that both values have."""
    return one if one == two else tuple(d for d in one if d in two)


@lru_cache(maxsize=1 << 14)
def agreed(one: Index, ones: Digits, two: Index, twos: Digits) -> Index | None:
    """Return the entries that two values both hold, if each value may exchange the entries of its digits.

    Args:
        one: Entries of the first value.
        ones: Digits on which the first value does not depend.
        two: Entries of the second value.
        twos: Digits on which the second value does not depend.

    Returns:
        Entries that are equal to `one` up to `ones` and equal to `two` up to `twos`; None if such entries do not
        exist.
    """
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
    """Return whether an index is all entries of an axis of size `n`, in order, up to the digits."""
    return index == whole(n) or (bool(digits) and agreed(index, digits, whole(n), ()) is not None)


@lru_cache(maxsize=1 << 14)
def repeats(part: Index, digits: Digits, n: int, over: Index, size: int, tiled: bool) -> bool:
    """Return whether a kernel that repeats local entries of a smaller axis over a larger one reads the right entries.

    Args:
        part: Entries of the smaller axis that the device has.
        digits: Digits of the smaller axis on which its value does not depend.
        n: Size of the whole smaller axis.
        over: Entries of the larger axis that the device has.
        size: Size of the whole larger axis.
        tiled: If True, entry i of the larger axis reads entry i modulo `n`. If False, each entry serves neighbours.
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
    """Return digits of a factor as digits of a product in which each entry of the factor has `inner` entries."""
    return tuple((stride * inner, n) for stride, n in digits)


def within(digits: Digits, inner: int, size: int) -> Digits:
    """Return the digits of a product that lie in one factor.

    Args:
        digits: Digits of the product. A digit may cover a part of the factor.
        inner: Number of entries of the product within each entry of the factor.
        size: Size of the factor.
    """
    inside = []
    for stride, n in digits:
        low, high = max(stride, inner), min(stride * n, inner * size)
        if low < high and low % stride == high % low == low % inner == 0 and (stride * n) % high == 0:
            inside.append((low // inner, high // low))
    return tuple(inside)
