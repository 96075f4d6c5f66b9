"""Things of which a process may have one only: code that is loaded, a library that is opened."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from functools import update_wrapper
from typing import Generic, TypeVar

T = TypeVar("T")


class once(Generic[T]):  # noqa: N801  # a decorator
    """Keeps what a function returned for each key, as `functools.cache` does, and calls it once even where threads ask
    for the same key at the same time: one makes the value, the others wait for it.

    `functools.cache` lets each of them make one and keeps the last; the others are freed, though somebody may already
    use the address of what they hold.
    """

    def __init__(self, make: Callable[..., T]) -> None:
        self._make = make
        self._made: dict[Hashable, T] = {}
        self._locks: dict[Hashable, threading.RLock] = {}
        update_wrapper(self, make)

    def __call__(self, *key: Hashable) -> T:
        if key in self._made:
            return self._made[key]
        with self._locks.setdefault(key, threading.RLock()):
            if key not in self._made:
                self._made[key] = self._make(*key)
            return self._made[key]

    def __contains__(self, key: tuple[Hashable, ...]) -> bool:
        """Whether there is a value for the arguments `key`."""
        return key in self._made

    def cache_clear(self) -> None:
        """Forget all values and their keys.  Only for what nobody uses any more."""
        self._made.clear()
        self._locks.clear()
