"""How a value lies on a group of devices: a type, in the words of PyTorch's DTensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from .factors import Factor, product_size

Run: TypeAlias = tuple[int, int]
"""Offset and length along one axis."""


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every device has all of it."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Partial:
    """Every device has a summand of the same shape; the sum is still owed."""

    def __str__(self) -> str:
        return "P"


@dataclass(frozen=True, slots=True)
class Shard:
    """Device d has the entries ``runs[d]`` of `axis`, ascending.

    Runs are exact: uneven and empty shares, segments of a concatenation, head groups.  An entry may lie on several
    devices (a segment that was not cut), never on none.
    """

    axis: int
    runs: tuple[tuple[Run, ...], ...]

    def length(self, device: int) -> int:
        return sum(n for _, n in self.runs[device])

    def count(self, device: int, n: int) -> int:
        """How many of the first `n` entries of the axis device `device` has."""
        return sum(max(0, min(n, offset + length) - offset) for offset, length in self.runs[device])

    def __str__(self) -> str:
        return f"S{self.axis}({'|'.join(str(self.length(d)) for d in range(len(self.runs)))})"


@dataclass(frozen=True, slots=True)
class Local:
    """These devices (one, unless a weight is needed in several places) have all of it, the others nothing."""

    devices: tuple[int, ...]

    def __str__(self) -> str:
        return f"L{','.join(map(str, self.devices))}"


Layout: TypeAlias = Replicate | Partial | Shard | Local
REPLICATE, PARTIAL = Replicate(), Partial()


def local_shape(shape: Sequence[int], layout: Layout, device: int) -> tuple[int, ...]:
    """The shape of what device `device` has."""
    if not isinstance(layout, Shard):
        return tuple(shape)
    return (*shape[: layout.axis], layout.length(device), *shape[layout.axis + 1 :])


def runs_of(axis: Sequence[Sequence[Factor]], factor: Factor, low: int, high: int) -> tuple[Run, ...]:
    """The entries of an axis whose index of `factor` lies in [low, high); segments without it are whole."""
    found: list[Run] = []
    start = 0
    for segment in axis:
        size = product_size(segment)
        if factor in segment:
            at = segment.index(factor)
            inner = product_size(segment[at + 1 :])
            for outer in range(product_size(segment[:at])):
                found.append((start + (outer * factor.size + low) * inner, (high - low) * inner))
        else:
            found.append((start, size))
        start += size
    return joined(found)


def joined(runs: Sequence[Run]) -> tuple[Run, ...]:
    """`runs` without empty ones, neighbours merged."""
    found: list[Run] = []
    for offset, length in runs:
        if length and found and sum(found[-1]) == offset:
            found[-1] = (found[-1][0], found[-1][1] + length)
        elif length:
            found.append((offset, length))
    return tuple(found)


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

    def _grain(self, size: int) -> int:
        return GRAIN if size % GRAIN == 0 and size >= GRAIN * MANY * len(self) else 1
