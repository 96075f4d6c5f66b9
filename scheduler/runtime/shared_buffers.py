"""Memory that several stores share: copies of a weight, and the arena of plans that run one at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from ...graph.errors import StatesLostError
from .state_view import LostStates


class WeightCopies:
    """The copies of one weight in the memory of devices; all stores that bind the weight share them.

    - `version`: identifies the present contents of the weight. A copy of an old version is filled again in place, so
      compiled programs read the new contents.
    - `is_source_lasting`: whether the source lives as long as the stores. Devices may then read its memory instead of
      a copy.
    - `source`: keeps the source alive, so that its address stays part of a version.
    - `has_host_copies`: whether a device that reads host memory has a copy, because of the form or the place of the
      source. Such a copy is to be filled again before each run, since not all changes of the source are counted.
    """

    def __init__(self, *, is_source_lasting: bool) -> None:
        self.is_source_lasting = is_source_lasting
        self.version: object = None
        self.source: object = None
        self.has_host_copies = False
        self.copies_by_key: dict[object, tuple[object, Any]] = {}

    def load_or_refresh_copy(self, key: object, alloc: Callable[[], Any], fill: Callable[[Any], object]) -> Any:
        """Return a copy of the weight with its present contents; allocate or fill it if needed.

        An outdated copy is filled again in place.

        Args:
            key: Identifies the device and the part of the weight.
            alloc: Allocates a copy.
            fill: Writes the present contents to a copy.
        """
        version, buffer = self.copies_by_key[key] if key in self.copies_by_key else (None, alloc())
        if version != self.version or key not in self.copies_by_key:
            fill(buffer)
            self.copies_by_key[key] = (self.version, buffer)
        return buffer


class SharedIntermediateValueArena:
    """One buffer for the intermediate values of a device, which several plans share because they run one at a time.

    It grows to the size of the largest plan. `users` are the lost states of all stores that share it.
    """

    def __init__(self) -> None:
        self.nbytes, self._buffer = 0, None
        self.users: WeakSet[LostStates] = WeakSet()

    def grow_buffer(self, nbytes: int, alloc: Callable[[], Any]) -> Any:
        """Return a buffer of at least `nbytes` bytes: the present one, or else a new one from `alloc`."""
        if nbytes > self.nbytes or self._buffer is None:
            self.nbytes, self._buffer = nbytes, alloc()
        return self._buffer

    def abandon_buffer(self, error: StatesLostError) -> None:
        """Give up the present buffer, because a device that has not stopped may still write to it.

        Plans that are bound to the buffer are refused by `error`. Plans of later stores get a new buffer.
        """
        for lost_states in list(self.users):
            lost_states.record(error)
        self.nbytes, self._buffer = 0, None
        self.users.clear()
