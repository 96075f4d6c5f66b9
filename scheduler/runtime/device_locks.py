"""Locks of devices: only one thread at a time uses the threads, streams and memory of a backend."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from weakref import WeakKeyDictionary

from ...backends.base import Backend

_lock_by_backend: WeakKeyDictionary[Backend, threading.RLock] = WeakKeyDictionary()
_locks_guard = threading.Lock()


def _find_or_make_backend_lock(backend: Backend) -> threading.RLock:
    """Return the lock of a backend, which is made at the first call."""
    with _locks_guard:
        return _lock_by_backend.setdefault(backend, threading.RLock())


class DeviceLock:
    """A context in which no other thread uses the devices of some backends; the same thread may enter it again."""

    def __init__(self, backends: Iterable[Backend]) -> None:
        locks = {id(lock): lock for lock in map(_find_or_make_backend_lock, backends)}
        self._locks = [locks[key] for key in sorted(locks)]  # all in one order, which excludes deadlocks

    def __enter__(self) -> None:
        if len(self._locks) == 1:  # a fifth of the time of the loop below, which matters for runs of 1 ms
            self._locks[0].acquire()
            return
        acquired_locks: list[threading.RLock] = []
        try:
            for lock in self._locks:
                lock.acquire()
                acquired_locks.append(lock)
        except BaseException:  # Ctrl-C during the wait
            for lock in acquired_locks:
                lock.release()
            raise

    def __exit__(self, *_: object) -> None:
        for lock in self._locks:
            lock.release()
