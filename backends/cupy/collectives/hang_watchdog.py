"""A library of collectives waits for ever: what ends its waits, in time, and says who did not come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from ....graph.errors import BackendError
from ...base import Comm, Device
from ...board import BOARD_FAILED, runs_of
from ..device.driver import Driver, Library, Ring
from ..kernels.collective import Mark, mark_of
from .peer_exchange import Words, all_gather_words

POLL_SECONDS = 50e-6
"""Seconds between two looks at a stream; a step that takes less than a millisecond is looked at all the time."""
BUSY_WAIT_SECONDS = 1e-3
MIN_JOIN_SECONDS = 60.0
"""Seconds that processes have at least to find each other: they look at all links between their machines."""
T = TypeVar("T")


class DeviceLostError(BackendError):
    """A device did not come to the collective of this number."""

    def __init__(self, sequence: int, why: str) -> None:
        super().__init__(why)
        self.sequence = sequence


class Membership:
    """A device's end of the communicator that all programs of a group share; once it is lost, it stays so."""

    def __init__(self, identity: Words, ring: Ring) -> None:
        self.identity, self.ring, self.is_lost = identity, ring, False


class Memberships:
    """The communicators of the devices of a backend, by group and rank."""

    def __init__(self) -> None:
        self._by_group: dict[tuple[str, ...], Membership] = {}

    def join(self, comm: Comm, library: Library, on: Device) -> Membership:
        """The one that all devices of the group have, or a new one; all of them call.  Raises `BackendError`."""
        key = (str(on), *map(str, comm.devices))
        known, fresh = self._by_group.get(key), library.identity()
        mine = np.zeros_like(fresh) if known is None else known.identity
        all_of_them = all_gather_words(comm, mine, -4)
        if known is None or known.is_lost or (all_of_them != mine).any():
            identity = all_gather_words(comm, fresh, -5)[0]
            patience = max(comm.timeout, MIN_JOIN_SECONDS) if comm.is_apart else comm.timeout
            ring = call_with_timeout(
                patience, lambda: library.join(identity, comm.rank, comm.size, on), f"{library.name} join"
            )
            known = self._by_group[key] = Membership(identity, ring)
        return known


class HangWatchdog:
    """Waits for the stream of a device, and for others no longer than the group's patience."""

    def __init__(self, comm: Comm, driver: Driver, on: Device, membership: Membership) -> None:
        self.comm, self.driver, self.device, self.membership = comm, driver, on, membership

    def check(self) -> None:
        """Raises `BackendError` where the communicator was lost in an earlier run."""
        if self.membership.is_lost:
            raise BackendError(f"{self.device}: devices were lost in an earlier run; load the model anew to go on")

    def wait(self) -> None:
        """Until everything that was launched is done.  Raises `LostError` where another device does not come, and
        `BackendError` where this one does not stop though another failed."""
        start, since, seen, failed = time.monotonic(), 0.0, None, None
        while not self.driver.is_done(self.device):
            now, mark = time.monotonic(), self._read_mark(self.comm.rank)
            if mark != seen:
                seen, since = mark, now
            if mark is not None and not mark.has_results and (why := self._explain_hang(mark, now - since)):
                self._abort()
                raise DeviceLostError(
                    mark.sequence, f"{self._describe_mark(mark)}: {why}; load the model anew to go on"
                )
            if self._has_failed and now - (failed := failed or now) > self.comm.timeout:
                raise self._make_hang_error()
            if now - start > BUSY_WAIT_SECONDS:
                time.sleep(POLL_SECONDS)
        self.driver.synchronise(self.device)

    @property
    def _has_failed(self) -> bool:
        assert self.comm.board is not None
        return bool(self.comm.board[BOARD_FAILED])

    def _make_hang_error(self) -> BackendError:
        self.membership.is_lost = True
        return BackendError(f"{self.device} does not stop; end the process")

    def _describe_mark(self, mark: Mark) -> str:
        return f"collective {mark.sequence} on device {self.comm.rank} of {self.comm.size}"

    def _read_mark(self, rank: int) -> Mark | None:
        """Where a device is in this run; None if it has come to nothing yet."""
        board = self.comm.board
        assert board is not None
        mark = mark_of(board, rank)
        return mark if mark is not None and mark.run == runs_of(board)[rank] else None

    def _explain_hang(self, mine: Mark, waited: float) -> str | None:
        """Why a collective in which this device waits will never end, if that is known."""
        if self._has_failed:
            return "another device failed"
        if trouble := self.membership.ring.trouble():
            return trouble
        if waited < self.comm.timeout:
            return None
        here = [d for d, device in enumerate(self.comm.devices) if device.rank == self.device.rank]
        marks = {d: self._read_mark(d) for d in here}
        late = [d for d, m in marks.items() if m is None or (m.run, m.sequence) < (mine.run, mine.sequence)]
        elsewhere = "a device of another process did not arrive" if self.comm.is_apart else "it did not end"
        who = f"device {', '.join(map(str, late))} did not arrive" if late else elsewhere
        return f"{who} within {self.comm.timeout:g} s"

    def _abort(self) -> None:
        """End what waits in the stream, without a result; the thread ends once nothing recorded uses the library."""
        self.membership.is_lost = True
        threading.Thread(target=self.membership.ring.abort, name="hocket abort", daemon=True).start()
        until = time.monotonic() + self.comm.timeout
        while not self.driver.is_done(self.device):
            if time.monotonic() > until:
                raise self._make_hang_error()
            time.sleep(POLL_SECONDS)


def call_with_timeout(seconds: float, call: Callable[[], T], what: str) -> T:
    """What `call` returns or raises, in a thread of its own.  Raises `BackendError` if it takes longer."""
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as why:  # raised below, in the thread that asked
            failures.append(why)

    thread = threading.Thread(target=run, name=f"hocket {what}", daemon=True)
    thread.start()
    thread.join(seconds)
    if failures:
        raise failures[0]
    if not results:
        raise BackendError(f"{what}: it did not end within {seconds:g} s; another device may have failed")
    return results[0]
