"""Memory that several stores share: copies of a weight, and the arena of plans that run one at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class WeightCopies:
    """The device copies of one weight, shared by all stores that bind the weight.

    `version` names the contents of the weight. A copy of an old version is filled again in place, so bound programs
    read the new contents. If the source lives as long as the stores, devices may read its memory instead of a copy.
    `source` keeps the source alive, so that its address stays part of a version.
    """

    def __init__(self, *, is_source_lasting: bool) -> None:
        self.is_source_lasting = is_source_lasting
        self.version: object = None
        self.source: object = None
        self.copies_by_key: dict[object, tuple[object, Any]] = {}

    def load_copy(self, key: object, alloc: Callable[[], Any], fill: Callable[[Any], object]) -> Any:
        """Return the copy of the weight under `key`, filled with the current contents.

        Args:
            key: Names the device and the part of the weight.
            alloc: Allocates a copy.
            fill: Writes the current contents to a copy.
        """
        version, buffer = self.copies_by_key[key] if key in self.copies_by_key else (None, alloc())
        if version != self.version or key not in self.copies_by_key:
            fill(buffer)
            self.copies_by_key[key] = (self.version, buffer)
        return buffer


class Arena:
    """The arena of one device, shared by plans that run one at a time; it grows to the size of the largest plan."""

    def __init__(self) -> None:
        self.nbytes, self._buffer = 0, None

    def grow_buffer(self, nbytes: int, alloc: Callable[[], Any]) -> Any:
        """Return the arena buffer; a buffer with fewer than `nbytes` bytes is first replaced by one from `alloc`."""
        if nbytes > self.nbytes or self._buffer is None:
            self.nbytes, self._buffer = nbytes, alloc()
        return self._buffer
