"""Layouts: how a value is distributed over the devices of a group, in the terms of PyTorch's DTensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from ...graph.errors import format_count
from ...graph.lazy_dataclass import dataclass

IndexRange: TypeAlias = tuple[int, int]
"""Offset and length of a range of indices along one axis."""


@dataclass(frozen=True, slots=True)
class Replicate:
    """The layout of a replicated value: each device has a copy of all entries."""

    is_partial = False

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Partial:
    """The layout of a partial sum: each device has one summand of the full shape, and their sum is the value."""

    is_partial = True

    def __str__(self) -> str:
        return "P"


@dataclass(frozen=True, slots=True)
class Shard:
    """The layout of a sharded value: device `d` has the entries ``index_ranges[d]`` of `axis`, in ascending order.

    Each range is (offset, length). Example: ``((0, 4),), ((4, 4),)`` divides 8 rows between two devices. The shards
    may be uneven or empty. They may have several ranges, for example one in each part of a concatenation. Each entry
    is on at least one device, and may be on several.
    """

    axis: int
    index_ranges: tuple[tuple[IndexRange, ...], ...]

    def count_entries(self, device: int) -> int:
        """Return the number of entries that `device` has along the sharded axis."""
        return sum(n for _, n in self.index_ranges[device])

    def count_entries_below_index(self, device: int, n: int) -> int:
        """Return how many of the entries of `device` have an index below `n` on the sharded axis."""
        return sum(max(0, min(n, offset + length) - offset) for offset, length in self.index_ranges[device])

    def __str__(self) -> str:
        return f"S{self.axis}({'|'.join(str(self.count_entries(d)) for d in range(len(self.index_ranges)))})"


@dataclass(frozen=True, slots=True)
class Local:
    """The layout of a value that only the listed devices have; each of them has all of it.

    The list has one device, except for a weight that several devices read.
    """

    devices: tuple[int, ...]
    is_partial = False

    def __str__(self) -> str:
        return f"L{','.join(map(str, self.devices))}"


Layout: TypeAlias = Replicate | Partial | Shard | Local
"""The distribution of one value over the devices of a plan."""
REPLICATE, PARTIAL = Replicate(), Partial()
"""The only instances of the layouts without fields."""


def find_layout_error(shape: Sequence[int], layout: Layout, count: int) -> str:
    """Return why a value of this shape cannot have a layout on `count` devices; empty if it can."""
    if isinstance(layout, Local) and not all(0 <= number < count for number in layout.devices):
        return f"its layout names a device that is none of {count}"
    if isinstance(layout, Shard):
        if len(layout.index_ranges) != count:
            return f"its layout is for {format_count(len(layout.index_ranges), 'device')}, and {count} are there"
        size = shape[layout.axis] if 0 <= layout.axis < len(shape) else -1
        if any(start < 0 or n < 0 or start + n > size for runs in layout.index_ranges for start, n in runs):
            return "its layout is a layout of another shape"
    return ""


def compute_local_shape(shape: Sequence[int], layout: Layout, device: int) -> tuple[int, ...]:
    """Return the shape of the part of a value that one device has.

    Args:
        shape: The shape of the whole value.
        layout: The layout of the value.
        device: The number of the device.
    """
    if not isinstance(layout, Shard):
        return tuple(shape)
    return (*shape[: layout.axis], layout.count_entries(device), *shape[layout.axis + 1 :])
