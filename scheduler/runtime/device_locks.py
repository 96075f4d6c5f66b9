"""Locks of devices: only one thread at a time uses the threads, streams and memory of a backend."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol
from weakref import WeakKeyDictionary

from ...backends.base import Backend


class UndoableRun(Protocol):
    """A run that a device has begun ahead of time; it is undone unless its owner asks for its results."""

    def undo(self) -> None:
        """Wait for the end of the run, and restore the states to their values before it.

        A failure is recorded for the owner of the states, and not raised: the caller may have other states.
        """


class _BackendLock:
    """The lock of a backend, with the run that was started ahead of time and is not yet accepted or undone."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.launched_run: UndoableRun | None = None


_lock_by_backend: WeakKeyDictionary[Backend, _BackendLock] = WeakKeyDictionary()
_locks_guard = threading.Lock()


def _find_or_make_backend_lock(backend: Backend) -> _BackendLock:
    """Return the lock of a backend, which is made at the first call."""
    with _locks_guard:
        return _lock_by_backend.setdefault(backend, _BackendLock())


class DeviceLock:
    """A context in which no other thread uses the devices of some backends; the same thread may enter it again.

    A run that was launched ahead (`leave_launched_run`) is undone when any thread takes the lock next. So nothing else
    sees the states of such a run. Only its owner takes the lock by `accept_launched_or_undo_other` and keeps the run.
    """

    def __init__(self, backends: Iterable[Backend]) -> None:
        locks = {id(lock): lock for lock in map(_find_or_make_backend_lock, backends)}
        self._locks = [locks[key] for key in sorted(locks)]  # all in one order, which excludes deadlocks

    def __enter__(self) -> None:
        if len(self._locks) == 1:  # a fifth of the time of the loop below, which matters for runs of 1 ms
            self._locks[0].lock.acquire()
        else:
            acquired_locks: list[threading.RLock] = []
            try:
                for lock in self._locks:
                    lock.lock.acquire()
                    acquired_locks.append(lock.lock)
            except BaseException:  # Ctrl-C during the wait
                for acquired in acquired_locks:
                    acquired.release()
                raise
        for lock in self._locks:
            if lock.launched_run is not None:
                self._undo_launched(lock)

    def _undo_launched(self, lock: _BackendLock) -> None:
        run, lock.launched_run = lock.launched_run, None
        try:
            if run is not None:
                run.undo()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        for lock in self._locks:
            lock.lock.release()

    @contextmanager
    def accept_launched_or_undo_other(self, run: UndoableRun | None) -> Iterator[bool]:
        """Take the lock; yield whether `run` is still the run that was started ahead. Any other such run is undone.

        The caller finishes or undoes an accepted run within the context.
        """
        (lock,) = self._locks
        lock.lock.acquire()
        try:
            is_launched = run is not None and lock.launched_run is run
            if is_launched:
                lock.launched_run = None
            with self:
                yield is_launched
        finally:
            lock.lock.release()

    def leave_launched_run(self, run: UndoableRun) -> None:
        """Keep a launched run open when the lock is released; the next holder of the lock accepts or undoes it."""
        (lock,) = self._locks
        assert lock.launched_run is None, "one run at a time is launched ahead"
        lock.launched_run = run
