"""A cache for objects that a process may create only once, such as loaded code and opened libraries."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from functools import update_wrapper
from typing import Generic, TypeVar

T = TypeVar("T")


class thread_safe_cache(Generic[T]):  # noqa: N801  # a decorator, as functools.cached_property
    """Decorator that caches results by arguments; it calls the function once for equal arguments, even from threads.

    One thread makes the value and the other threads wait. With `functools.cache` each thread would make a value, and
    only the last value would stay. The other values would be freed while a thread may still use their addresses.
    """

    def __init__(self, make: Callable[..., T]) -> None:
        self._make = make
        self._values: dict[Hashable, T] = {}
        self._locks: dict[Hashable, threading.RLock] = {}
        update_wrapper(self, make)

    def __call__(self, *key: Hashable) -> T:
        if key in self._values:
            return self._values[key]
        with self._locks.setdefault(key, threading.RLock()):
            if key not in self._values:
                self._values[key] = self._make(*key)
            return self._values[key]

    def __contains__(self, key: tuple[Hashable, ...]) -> bool:
        """Return whether there is a value for the arguments `key`."""
        return key in self._values

    def cache_clear(self) -> None:
        """Clear the cache; the cached values must no longer be in use."""
        self._values.clear()
        self._locks.clear()
