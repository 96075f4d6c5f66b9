"""How a value lies on a group of devices: a type, in the words of PyTorch's DTensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from ..graph.lazy_dataclass import dataclass

Run: TypeAlias = tuple[int, int]
"""Offset and length along one axis."""


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every device has all of it."""

    is_owed = False

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Partial:
    """Every device has a summand of the same shape; the sum is still owed."""

    is_owed = True

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
    is_owed = False

    def __str__(self) -> str:
        return f"L{','.join(map(str, self.devices))}"


Layout: TypeAlias = Replicate | Partial | Shard | Local
REPLICATE, PARTIAL = Replicate(), Partial()


def local_shape(shape: Sequence[int], layout: Layout, device: int) -> tuple[int, ...]:
    """The shape of what device `device` has."""
    if not isinstance(layout, Shard):
        return tuple(shape)
    return (*shape[: layout.axis], layout.length(device), *shape[layout.axis + 1 :])
