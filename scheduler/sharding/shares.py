"""Shard ranges: the indices of each factor that each device has, and the index ranges of an axis that follow.

`ShardRanges` divides a factor in the proportions of the devices. `compute_index_ranges` turns the indices of a factor
into ranges of an axis.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..layout import Run
from .axes import Factor, product_size


def runs_of(axis: Sequence[Sequence[Factor]], factor: Factor, low: int, high: int) -> tuple[Run, ...]:
    """Return the entries of an axis with an index of `factor` in ``[low, high)``; segments without the factor are
    whole.

    Args:
        axis: The segments of the axis.
        factor: The sharded factor.
        low: The first index of the device.
        high: The end of the indices of the device.
    """
    runs: list[Run] = []
    start = 0
    for segment in axis:
        size = product_size(segment)
        if factor in segment:
            at = segment.index(factor)
            inner = product_size(segment[at + 1 :])
            for outer in range(product_size(segment[:at])):
                runs.append((start + (outer * factor.size + low) * inner, (high - low) * inner))
        else:
            runs.append((start, size))
        start += size
    return joined(runs)


def joined(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Return `runs` without empty ranges, with adjacent ranges merged."""
    merged: list[Run] = []
    for offset, length in runs:
        if length and merged and sum(merged[-1]) == offset:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        elif length:
            merged.append((offset, length))
    return tuple(merged)


def dealt(
    axis: Sequence[Sequence[Factor]], at: int, factor: Factor, lying: Sequence[Sequence[Run]]
) -> tuple[tuple[int, int], ...] | None:
    """Return the indices of `factor` that each device has if the entries of an axis have the layout `lying`.

    The result is None if the layout cannot be expressed by indices of `factor`.

    Args:
        axis: The segments of the axis.
        at: The number of the segment.
        factor: A factor of the segment.
        lying: The index ranges of each device.
    """
    start, size = sum(map(product_size, axis[:at])), product_size(axis[at])
    indices: list[tuple[int, int]] = []
    for runs in lying:
        entries = sum(max(0, min(o + n, start + size) - max(o, start)) for o, n in runs)
        low = indices[-1][1] if indices else 0
        indices.append((low, low + entries * factor.size // max(size, 1)))
    fits = all(
        runs_of(axis[at : at + 1], factor, *has) == _within(runs, start, start + size)
        for has, runs in zip(indices, lying, strict=True)
    )
    return tuple(indices) if fits and indices[-1][1] == factor.size else None


def _within(runs: Sequence[Run], start: int, stop: int) -> tuple[Run, ...]:
    """Return the parts of `runs` in ``[start, stop)``, counted from `start`."""
    return joined([(max(o, start) - start, max(0, min(o + n, stop) - max(o, start))) for o, n in runs])


GRAIN, MANY = 32, 8
"""Large factors are divided in blocks of `ROW_GRANULARITY` indices, as kernels take 16 or 32 rows at a time.

A factor is large if each device gets at least `MIN_GRAINS_PER_DEVICE` blocks."""


class Shares:
    """Divides factors over devices in given proportions, by largest remainder.

    A device that loses by rounding in one factor gains in a later factor of the same size. So over many layers each
    device gets its proportion. The ranges of a factor are computed once.
    """

    def __init__(self, proportions: Sequence[float]) -> None:
        total = sum(proportions)
        self.proportions = [p / total for p in proportions]
        self._owed: dict[int, list[float]] = {}
        self._dealt: dict[Factor, tuple[tuple[int, int], ...]] = {}

    def __len__(self) -> int:
        return len(self.proportions)

    def of(self, factor: Factor) -> tuple[tuple[int, int], ...]:
        """Return the indices ``[low, high)`` of `factor` of each device."""
        if factor not in self._dealt:
            grain = self._grain(factor.size)
            size, owed = factor.size // grain, self._owed.setdefault(factor.size, [0.0] * len(self))
            ideal = [size * p + o for p, o in zip(self.proportions, owed, strict=True)]
            counts = [max(0, int(x + 1e-9)) for x in ideal]
            order = sorted(range(len(self)), key=lambda d: (counts[d] - ideal[d], d))
            missing = size - sum(counts)
            for i in range(abs(missing)):
                device = order[i % len(self)] if missing > 0 else max(range(len(self)), key=lambda d: counts[d])
                counts[device] += 1 if missing > 0 else -1
            self._owed[factor.size] = [x - c for x, c in zip(ideal, counts, strict=True)]
            ends = [grain * sum(counts[: d + 1]) for d in range(len(self))]
            self._dealt[factor] = tuple((end - grain * n, end) for end, n in zip(ends, counts, strict=True))
        return self._dealt[factor]

    def keep(self, factor: Factor, indices: tuple[tuple[int, int], ...] | None) -> None:
        """Assign `indices` to a factor without ranges; divide it by the proportions if `indices` is None."""
        if indices is not None:
            self._dealt.setdefault(factor, indices)
        self.of(factor)

    def _grain(self, size: int) -> int:
        """Return the block size in which a factor of this size is divided."""
        return GRAIN if size % GRAIN == 0 and size >= GRAIN * MANY * len(self) else 1
