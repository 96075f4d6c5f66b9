"""Shard ranges: the indices of each factor that each device has, and the ranges of axis entries that follow from them.

`ShardRanges` divides a factor in the proportions of the devices. `compute_axis_ranges_of_factor` turns the indices of
a factor into ranges of entries of an axis.

Example: An axis of 12 entries is (2 segments, 3 heads, 2 places). A device with head 1 has the entries 2 to 3 and 8
to 9, as pairs (first entry, length):

>>> segments, heads, places = Factor(2), Factor(3), Factor(2)
>>> compute_axis_ranges_of_factor([[segments, heads, places]], heads, 1, 2)
((2, 2), (8, 2))
>>> ShardRanges([1, 2]).ranges_of(heads)
((0, 1), (1, 3))
"""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.layout import IndexRange
from .axes import Factor, compute_product_size


def compute_axis_ranges_of_factor(
    axis: Sequence[Sequence[Factor]], factor: Factor, first_index: int, end_index: int
) -> tuple[IndexRange, ...]:
    """Compute which entries of an axis a device has if it has some indices of one factor of the axis.

    Example: an axis of 2 heads of 4 entries is the product [2, 4]. The second head is the range ``((4, 4),)``.
    Segments (parts of a concatenated axis) without the factor are whole.

    Args:
        axis: The segments of the axis.
        factor: The sharded factor.
        first_index: The first index of the device.
        end_index: The end of the indices of the device, exclusive.

    Returns:
        Ranges of entries as pairs (first entry, length).
    """
    runs: list[IndexRange] = []
    start = 0
    for segment in axis:
        size = compute_product_size(segment)
        if factor in segment:
            at = segment.index(factor)
            inner = compute_product_size(segment[at + 1 :])
            for outer in range(compute_product_size(segment[:at])):
                runs.append((start + (outer * factor.size + first_index) * inner, (end_index - first_index) * inner))
        else:
            runs.append((start, size))
        start += size
    return merge_adjacent_ranges(runs)


def merge_adjacent_ranges(ranges: Sequence[IndexRange]) -> tuple[IndexRange, ...]:
    """Merge ranges (first entry, length) that follow each other without a gap, and drop empty ranges."""
    merged: list[IndexRange] = []
    for offset, length in ranges:
        if length and merged and sum(merged[-1]) == offset:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        elif length:
            merged.append((offset, length))
    return tuple(merged)


def factor_ranges_from_layout(
    axis: Sequence[Sequence[Factor]],
    segment_number: int,
    factor: Factor,
    ranges_by_device: Sequence[Sequence[IndexRange]],
) -> tuple[tuple[int, int], ...] | None:
    """Find the indices of a factor on each device, given the entries of an axis on each device.

    This is the inverse of `compute_axis_ranges_of_factor`.

    Args:
        axis: The segments of the axis.
        segment_number: The number of the segment that has the factor.
        factor: A factor of the segment.
        ranges_by_device: The entries of the axis that each device has.

    Returns:
        Pairs (first index, end index); None if the layout cannot be expressed by indices of `factor`.
    """
    start, size = sum(map(compute_product_size, axis[:segment_number])), compute_product_size(axis[segment_number])
    indices: list[tuple[int, int]] = []
    for runs in ranges_by_device:
        entries = sum(max(0, min(o + n, start + size) - max(o, start)) for o, n in runs)
        low = indices[-1][1] if indices else 0
        indices.append((low, low + entries * factor.size // max(size, 1)))
    fits = all(
        compute_axis_ranges_of_factor(axis[segment_number : segment_number + 1], factor, *has)
        == _clip_and_shift_ranges(runs, start, start + size)
        for has, runs in zip(indices, ranges_by_device, strict=True)
    )
    return tuple(indices) if fits and indices[-1][1] == factor.size else None


def _clip_and_shift_ranges(ranges: Sequence[IndexRange], start: int, stop: int) -> tuple[IndexRange, ...]:
    """Return the parts of ranges that lie from `start` to `stop`, exclusive, with entries counted from `start`."""
    return merge_adjacent_ranges([(max(o, start) - start, max(0, min(o + n, stop) - max(o, start))) for o, n in ranges])


ROW_GRANULARITY, MIN_GRAINS_PER_DEVICE = 32, 8
"""Large factors are divided in blocks of `ROW_GRANULARITY` indices, as kernels take 16 or 32 rows at a time.

A factor is large if each device gets at least `MIN_GRAINS_PER_DEVICE` blocks."""


class ShardRanges:
    """The indices of each factor (shardable index of the graph) on each device, divided in given proportions.

    Rounding follows the largest remainder method. A device that loses by rounding in one factor gains in a later factor
    of equal size. So over many layers each device gets its proportion. The ranges of a factor are computed once.
    """

    def __init__(self, proportions: Sequence[float]) -> None:
        total = sum(proportions)
        self.proportions = [p / total for p in proportions]
        self._rounding_remainders: dict[int, list[float]] = {}
        self._assigned_ranges: dict[Factor, tuple[tuple[int, int], ...]] = {}

    def __len__(self) -> int:
        return len(self.proportions)

    def ranges_of(self, factor: Factor) -> tuple[tuple[int, int], ...]:
        """Return the range of indices of a factor on each device, as pairs (first index, end index)."""
        if factor not in self._assigned_ranges:
            grain = self._choose_row_granularity(factor.size)
            size, remainders = (
                factor.size // grain,
                self._rounding_remainders.setdefault(factor.size, [0.0] * len(self)),
            )
            ideal = [size * p + o for p, o in zip(self.proportions, remainders, strict=True)]
            counts = [max(0, int(x + 1e-9)) for x in ideal]
            order = sorted(range(len(self)), key=lambda d: (counts[d] - ideal[d], d))
            missing = size - sum(counts)
            for i in range(abs(missing)):
                device = order[i % len(self)] if missing > 0 else max(range(len(self)), key=lambda d: counts[d])
                counts[device] += 1 if missing > 0 else -1
            self._rounding_remainders[factor.size] = [x - c for x, c in zip(ideal, counts, strict=True)]
            ends = [grain * sum(counts[: d + 1]) for d in range(len(self))]
            self._assigned_ranges[factor] = tuple((end - grain * n, end) for end, n in zip(ends, counts, strict=True))
        return self._assigned_ranges[factor]

    def assign_ranges_if_missing(self, factor: Factor, ranges_by_device: tuple[tuple[int, int], ...] | None) -> None:
        """Assign each device its indices of a factor, unless the factor has ranges already.

        Args:
            factor: The factor.
            ranges_by_device: The pair (first index, end index) of each device; None to divide by the proportions.
        """
        if ranges_by_device is not None:
            self._assigned_ranges.setdefault(factor, ranges_by_device)
        self.ranges_of(factor)

    def _choose_row_granularity(self, factor_size: int) -> int:
        """Return how many neighbouring indices stay on one device: `ROW_GRANULARITY`, or 1 for a small factor."""
        return (
            ROW_GRANULARITY
            if factor_size % ROW_GRANULARITY == 0 and factor_size >= ROW_GRANULARITY * MIN_GRAINS_PER_DEVICE * len(self)
            else 1
        )
