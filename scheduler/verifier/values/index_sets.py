"""Exact arithmetic on the entries of one axis, for the verifier of plans.

Terms:

- An entry is a position on an axis of the user's graph. A device has some of the entries.
- An index (`IndexRanges`) is a tuple of ranges (first entry, length). It lists entries in memory order. Neighbouring
  ranges are merged, so equal lists are equal tuples.
- A digit is a pair (stride, size). It stands for the part ``entry // stride % size`` of the entry number. An ignored
  digit of a value is a digit on which the value does not depend, for example because it was broadcast. Two entries
  that differ only in ignored digits have equal values, so a device that has one of them has both.

Example: An axis of 12 entries is two segments of (3 heads, 2 places). A device that has head 1 of both segments has
the entries 2, 3, 8 and 9. As a product of the factors 2, 3 and 2, the device has sizes 2, 1 and 2: all of the outer
and inner factors, and head 1.

>>> heads = concatenate_indices([((2, 2),), ((8, 2),)])
>>> heads, count_entries(heads), list_entry_numbers(heads).tolist()
(((2, 2), (8, 2)), 4, [2, 3, 8, 9])
>>> split_index_into_factors(heads, (2, 3, 2), (2, 1, 2))
(((0, 2),), ((1, 1),), ((0, 2),))
>>> combine_factor_indices((make_index_of_all_entries(2), ((1, 1),), make_index_of_all_entries(2)), (2, 3, 2)) == heads
True

If the value does not depend on the segment, which is the digit (stride 6, size 2), both segments are equal:

>>> find_index_matching_both_values(((2, 2),), ((6, 2),), ((8, 2),), ())
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

IndexRanges: TypeAlias = tuple[tuple[int, int], ...]
"""Ranges (first entry, length) of an axis, in memory order."""
IgnoredDigits: TypeAlias = tuple[tuple[int, int], ...]
"""Parts (stride, size) of the entry number on which a value does not depend."""
Entries: TypeAlias = npt.NDArray[np.int64]


def make_index_of_all_entries(size: int) -> IndexRanges:
    """Return the index (tuple of ranges) with all entries of an axis in order: ``((0, size),)``, or ``()`` for size 0.

    Args:
        size: The number of entries of the axis.
    """
    return ((0, size),) if size else ()


def count_entries(index: IndexRanges) -> int:
    """Return the number of entries in an index: ``((2, 2), (8, 3))`` has 5."""
    return sum(n for _, n in index)


@lru_cache(maxsize=1024)
def list_entry_numbers(index: IndexRanges) -> Entries:
    """Return the entry numbers of an index as an array: ``((2, 2), (8, 1))`` gives 2, 3, 8.

    The array is cached and must not be written.
    """
    if not index:
        return np.zeros(0, np.int64)
    return np.concatenate([np.arange(start, start + n, dtype=np.int64) for start, n in index])


def merge_entries_into_ranges(entries: Entries) -> IndexRanges:
    """Convert an array of entry numbers to ranges (first entry, length): 2, 3, 8 gives ``((2, 2), (8, 1))``."""
    if not entries.size:
        return ()
    starts = np.concatenate([[0], np.flatnonzero(np.diff(entries) != 1) + 1])
    lengths = np.diff(np.append(starts, entries.size))
    return tuple(zip(entries[starts].tolist(), lengths.tolist(), strict=True))


@lru_cache(maxsize=1 << 14)
def slice_and_shift_index(index: IndexRanges, start: int, stop: int, subtracted: int = 0) -> IndexRanges:
    """Return the entries at positions `start` to `stop` (exclusive) of an index, each reduced by `subtracted`.

    Example: ``((2, 2), (8, 2))`` lists 2, 3, 8, 9. Positions 1 to 3, reduced by 1, give 2 and 7.

    Args:
        index: The index ranges to slice.
        start: The first position in the list of entries; it is not an entry number.
        stop: The end position, exclusive.
        subtracted: The number to subtract from each entry number.
    """
    runs, at = [], 0
    for first, n in index:
        low, high = max(start, at), min(stop, at + n)
        if low < high:
            runs.append((first + low - at - subtracted, high - low))
        at += n
    return tuple(runs)


@lru_cache(maxsize=1 << 12)
def has_common_entries(index: IndexRanges, other_index: IndexRanges) -> bool:
    """Return whether two indices (entries of one axis as ranges) have at least one entry in common."""
    runs = sorted([*((a, 0, n) for a, n in index), *((a, 1, n) for a, n in other_index)])
    ends = [0, 0]
    for start, which, n in runs:
        if start < ends[1 - which]:
            return True
        ends[which] = max(ends[which], start + n)
    return False


@lru_cache(maxsize=1 << 12)
def has_each_entry_once(index: IndexRanges, size: int) -> bool:
    """Return whether an index has each entry of an axis exactly once, in any order.

    Args:
        index: The index to test.
        size: The number of entries of the axis.
    """
    at = 0
    for start, k in sorted(index):
        if start != at:
            return False
        at += k
    return at == size


@lru_cache(maxsize=1 << 12)
def has_duplicates(index: IndexRanges) -> bool:
    """Return whether an index (entries of an axis, as ranges) lists an entry more than once."""
    ordered = sorted(index)
    return any(sum(a) > b[0] for a, b in pairwise(ordered))


def concatenate_indices(indices: Sequence[IndexRanges]) -> IndexRanges:
    """Return the index that lists the entries of several indices one after the other."""
    runs: list[tuple[int, int]] = []
    for start, n in (run for part in indices for run in part):
        if runs and sum(runs[-1]) == start:
            runs[-1] = (runs[-1][0], runs[-1][1] + n)
        else:
            runs.append((start, n))
    return tuple(runs)


@lru_cache(maxsize=1 << 14)
def split_index_into_factors(
    index: IndexRanges, factor_sizes: tuple[int, ...], local_sizes: tuple[int, ...]
) -> tuple[IndexRanges, ...] | None:
    """Split the entries of an axis that is a product of factors into the entries of each factor.

    Example: The axis (2 segments, 3 heads, 2 places) has 12 entries. The entries 2, 3, 8 and 9 are all segments, head
    1 and all places.

    Args:
        index: The entries of the product axis.
        factor_sizes: The factor sizes of the whole axis, outer first.
        local_sizes: The number of entries of each factor that `index` has, outer first.

    Returns:
        The entries of each factor, or None. None means that `index` is no product of `local_sizes` entries.
    """
    if count_entries(index) != math.prod(local_sizes):
        return None
    if len(factor_sizes) == 1:
        return (index,)
    if local_sizes == factor_sizes and index == make_index_of_all_entries(math.prod(factor_sizes)):
        return tuple(map(make_index_of_all_entries, factor_sizes))
    if 0 in local_sizes:
        return tuple(((0, m),) if m else () for m in local_sizes)
    grid, indices, inner = list_entry_numbers(index).reshape(local_sizes), [], math.prod(factor_sizes)
    total = np.zeros((), np.int64)
    for axis, n in enumerate(factor_sizes):
        inner //= n
        line = grid[(0,) * axis + (slice(None),) + (0,) * (len(factor_sizes) - axis - 1)] // inner % n
        indices.append(merge_entries_into_ranges(line))
        total = total + (line * inner).reshape(-1, *[1] * (len(factor_sizes) - axis - 1))
    return tuple(indices) if np.array_equal(total, grid) else None


@lru_cache(maxsize=1 << 14)
def combine_factor_indices(factor_indices: tuple[IndexRanges, ...], factor_sizes: tuple[int, ...]) -> IndexRanges:
    """Return the entries of an axis that is a product, given the entries of its factors.

    This is the inverse of `split_index_into_factors`.

    Args:
        factor_indices: The entries of each factor, outer first.
        factor_sizes: The sizes of the whole factors, outer first.
    """
    if len(factor_indices) == 1:
        return factor_indices[0]
    if all(i == make_index_of_all_entries(n) for i, n in zip(factor_indices, factor_sizes, strict=True)):
        return make_index_of_all_entries(math.prod(factor_sizes))
    total = np.zeros((), np.int64)
    for index, n in zip(factor_indices, factor_sizes, strict=True):
        total = total[..., None] * n + list_entry_numbers(index)
    return merge_entries_into_ranges(total.ravel())


def _extract_digit_times_stride(entries: Entries, digit: tuple[int, int]) -> Entries:
    """Return the part of each entry number that one digit contributes: ``entry // stride % size * stride``.

    Example: the digit (stride 10, size 10) of 345 contributes 40.
    """
    stride, n = digit
    return entries // stride % n * stride


def _clear_entry_number_digits(entries: Entries, digits: IgnoredDigits) -> Entries:
    """Return the entry numbers with the given digits set to zero; a digit (stride, size) is ``entry // stride % size``.

    Entries that differ only in ignored digits become equal. Example: without the digit (10, 10), 345 becomes 305.
    """
    for digit in digits:
        entries = entries - _extract_digit_times_stride(entries, digit)
    return entries


def intersect_ignored_digits(digits: IgnoredDigits, other_digits: IgnoredDigits) -> IgnoredDigits:
    """Return the digits that both of two values ignore, because neither value depends on them.

    A digit (stride, size) is the part ``entry // stride % size`` of an entry number. An example of an ignored digit
    is the axis along which a value was broadcast.
    """
    return digits if digits == other_digits else tuple(d for d in digits if d in other_digits)


@lru_cache(maxsize=1 << 14)
def find_index_matching_both_values(
    index: IndexRanges, digits: IgnoredDigits, other_index: IndexRanges, other_digits: IgnoredDigits
) -> IndexRanges | None:
    """Find entries that equal the entries of two values at once, up to digits that one value ignores, or None.

    Two operands of a node must have the same entries of a common axis. Entries that differ only in ignored digits
    count as the same, because the value is equal there. The module docstring has an example.

    Args:
        index: Entries of the first value.
        digits: Ignored digits (stride, size) of the first value.
        other_index: Entries of the second value.
        other_digits: Ignored digits of the second value.

    Returns:
        Entries that differ from `index` only in `digits`, and from `other_index` only in `other_digits`; else None.
    """
    if index == other_index:
        return index
    if count_entries(index) != count_entries(other_index) or not (digits or other_digits):
        return None
    a, b = list_entry_numbers(index), list_entry_numbers(other_index)
    merged = a
    for digit in digits:
        if digit not in other_digits:
            merged = merged + _extract_digit_times_stride(b, digit) - _extract_digit_times_stride(merged, digit)
    same_a = np.array_equal(_clear_entry_number_digits(merged, digits), _clear_entry_number_digits(a, digits))
    same_b = np.array_equal(
        _clear_entry_number_digits(merged, other_digits), _clear_entry_number_digits(b, other_digits)
    )
    return merge_entries_into_ranges(merged) if same_a and same_b else None


def is_full_index(index: IndexRanges, digits: IgnoredDigits, axis_size: int) -> bool:
    """Return whether a device has all entries of an axis in order, apart from entries that are equal by broadcasting.

    Args:
        index: The entries that the device has.
        digits: The ignored digits of the value; entries that differ only in these count as equal.
        axis_size: The number of entries of the whole axis.
    """
    return index == make_index_of_all_entries(axis_size) or (
        bool(digits)
        and find_index_matching_both_values(index, digits, make_index_of_all_entries(axis_size), ()) is not None
    )


@lru_cache(maxsize=1 << 14)
def is_valid_broadcast(
    small_index: IndexRanges,
    small_digits: IgnoredDigits,
    small_size: int,
    large_index: IndexRanges,
    large_size: int,
    is_tiled: bool,
) -> bool:
    """Return whether a device broadcasts its part of a small axis over a large axis with the right result.

    The result is right if each local entry of the large axis reads the same small entry as in the user's graph.

    Args:
        small_index: Entries of the smaller axis that the device has.
        small_digits: Ignored digits of the smaller axis, on which the value does not depend.
        small_size: Size of the whole smaller axis.
        large_index: Entries of the larger axis that the device has.
        large_size: Size of the whole larger axis.
        is_tiled: If True, entry i of the larger axis reads entry ``i % small_size`` of the smaller one. If False, it
            reads entry ``i // (large_size // small_size)``.
    """
    mine, theirs = count_entries(small_index), count_entries(large_index)
    if small_size == 1 or not theirs or not small_size:
        return mine == small_size or not theirs
    if not mine or theirs % mine or large_size % small_size:
        return False
    at = np.arange(theirs) % mine if is_tiled else np.arange(theirs) // (theirs // mine)
    expected_entries = (
        list_entry_numbers(large_index) % small_size
        if is_tiled
        else list_entry_numbers(large_index) // (large_size // small_size)
    )
    return np.array_equal(
        _clear_entry_number_digits(list_entry_numbers(small_index)[at], small_digits),
        _clear_entry_number_digits(expected_entries, small_digits),
    )


def to_product_digits(factor_digits: IgnoredDigits, inner_size: int) -> IgnoredDigits:
    """Convert digits of one factor to digits of the product axis that contains the factor.

    A digit (stride, size) is the part ``entry // stride % size`` of an entry number. Example: in an axis [3, 4], the
    digit (1, 3) of the outer factor becomes (4, 3).

    Args:
        factor_digits: Digits of the factor.
        inner_size: The product of the sizes of all factors inside of this one; strides are multiplied by it.
    """
    return tuple((stride * inner_size, n) for stride, n in factor_digits)


def to_factor_digits(product_digits: IgnoredDigits, inner_size: int, factor_size: int) -> IgnoredDigits:
    """Convert digits of a product axis to digits of one of its factors; parts in other factors are dropped.

    A digit (stride, size) is the part ``entry // stride % size`` of an entry number. Example: in an axis [3, 4], the
    digit (4, 3) becomes the digit (1, 3) of the outer factor.

    Args:
        product_digits: Digits of the product axis. A digit may cover several factors or a part of one.
        inner_size: The product of the sizes of all factors inside of this one.
        factor_size: The size of the factor.
    """
    inside = []
    for stride, n in product_digits:
        low, high = max(stride, inner_size), min(stride * n, inner_size * factor_size)
        if low < high and low % stride == high % low == low % inner_size == 0 and (stride * n) % high == 0:
            inside.append((low // inner_size, high // low))
    return tuple(inside)


def select_entries_at_positions(index: IndexRanges, positions: IndexRanges) -> IndexRanges:
    """Return the entries at the given positions of an index: of 2, 3, 8, 9 the positions 1 and 2 are 3 and 8.

    Args:
        index: The index (entries of an axis, as ranges).
        positions: Positions in `index`, as ranges (first position, length).
    """
    if len(positions) == 1:
        return slice_and_shift_index(index, positions[0][0], sum(positions[0]))
    return merge_entries_into_ranges(list_entry_numbers(index)[list_entry_numbers(positions)])


@lru_cache(maxsize=1024)
def merge_scattered_entries(
    positions_by_device: tuple[IndexRanges, ...], entries_by_device: tuple[IndexRanges, ...]
) -> IndexRanges | None:
    """Return the entries of a whole axis, after each device has written its entries to its positions.

    The result is None if a position stays empty, or if two devices write different entries to one position.

    Args:
        positions_by_device: The positions in the whole axis to which each device writes.
        entries_by_device: The entries that each device writes, in the order of its positions.
    """
    size = max((sum(run) for index in positions_by_device for run in index), default=0)
    whole_axis = np.full(size, -1, np.int64)
    for index, mine in zip(positions_by_device, entries_by_device, strict=True):
        at, new = list_entry_numbers(index), list_entry_numbers(mine)
        before = whole_axis[at]
        if ((before >= 0) & (before != new)).any():
            return None
        whole_axis[at] = new
    return None if (whole_axis < 0).any() else merge_entries_into_ranges(whole_axis)


def format_index(index: IndexRanges) -> str:
    """Format an index for a message, as in ``[0:2, 6:8]``. An ellipsis replaces all ranges after the fourth."""
    ranges_text = ", ".join(f"{start}:{start + n}" for start, n in index[:4])
    return f"[{ranges_text}{', …' if len(index) > 4 else ''}]"
