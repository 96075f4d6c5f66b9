"""Which entries of an axis each device gets: a factor is dealt in given proportions, and gives runs of entries."""

from __future__ import annotations

from collections.abc import Sequence

from ..layout import Run
from .axes import Factor, product_size


def runs_of(axis: Sequence[Sequence[Factor]], factor: Factor, low: int, high: int) -> tuple[Run, ...]:
    """The entries of an axis whose index of `factor` lies in [low, high); segments without it are whole."""
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
    """`runs` without empty ones, neighbours merged."""
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
    """For each device the indices of `factor`, in segment `at` of an axis, whose entries `lying` says that it has; None
    where these are no such indices."""
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
    """What of them lies in [start, stop), counted from there."""
    return joined([(max(o, start) - start, max(0, min(o + n, stop) - max(o, start))) for o, n in runs])


GRAIN, MANY = 32, 8
"""What has this many grains or more for each device is dealt in whole ones: kernels take 16 or 32 rows at a time."""


class Shares:
    """Deals factors over devices in given proportions, by largest remainder.

    What rounding takes from a device in one factor is given back in a later one of the same size, so that over many
    layers each device gets its proportion.  Asked twice for a factor, it gives the same answer.
    """

    def __init__(self, proportions: Sequence[float]) -> None:
        total = sum(proportions)
        self.proportions = [p / total for p in proportions]
        self._owed: dict[int, list[float]] = {}
        self._dealt: dict[Factor, tuple[tuple[int, int], ...]] = {}

    def __len__(self) -> int:
        return len(self.proportions)

    def of(self, factor: Factor) -> tuple[tuple[int, int], ...]:
        """For each device the indices [low, high) of `factor` that it has."""
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
        """Deal a factor so, unless it is dealt already; by the proportions if nothing is given."""
        if indices is not None:
            self._dealt.setdefault(factor, indices)
        self.of(factor)

    def _grain(self, size: int) -> int:
        return GRAIN if size % GRAIN == 0 and size >= GRAIN * MANY * len(self) else 1
