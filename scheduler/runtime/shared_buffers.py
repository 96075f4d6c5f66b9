"""Memory that stores share: copies of one weight, and the arena of plans that run one at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class WeightCopies:
    """The copies that devices have of one weight, for all stores that bind it.

    `version` names the contents of the weight. A copy of another version is filled again in its place, so programs
    that are bound to it read the new contents. If the source lives as long as the stores, devices may read its
    memory instead of a copy. `source` keeps the source alive, so that its address stays part of a version.
    """

    def __init__(self, *, is_source_lasting: bool) -> None:
        self.is_source_lasting = is_source_lasting
        self.version: object = None
        self.source: object = None
        self.copies_by_key: dict[object, tuple[object, Any]] = {}

    def load_copy(self, key: object, alloc: Callable[[], Any], fill: Callable[[Any], object]) -> Any:
        """Return the copy under `key` with the present contents.

        Args:
            key: Names the device and the part of the weight.
            alloc: Allocates a copy.
            fill: Writes the present contents to a copy.
        """
        version, buffer = self.copies_by_key[key] if key in self.copies_by_key else (None, alloc())
        if version != self.version or key not in self.copies_by_key:
            fill(buffer)
            self.copies_by_key[key] = (self.version, buffer)
        return buffer


class Arena:
    """The memory of the values of all plans on one device, which run one at a time; it grows to the largest plan."""

    def __init__(self) -> None:
        self.nbytes, self._buffer = 0, None

    def grow_buffer(self, nbytes: int, alloc: Callable[[], Any]) -> Any:
        """Return the arena, replaced by a new one from `alloc` if it has fewer than `nbytes` bytes."""
        if nbytes > self.nbytes or self._buffer is None:
            self.nbytes, self._buffer = nbytes, alloc()
        return self._buffer
