"""Ends waits of a collective library after a timeout, and reports the devices that did not arrive.

The library itself waits forever. The watchdog polls the stream of a device, the error state of the library, and the
progress marks of the other devices on the signal pad.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from ....graph.errors import BackendError
from ...base import Comm, Device
from ...host.progress_board import FAILURE_WORD, view_run_numbers
from ..device.driver import CollectiveLibrary, Communicator, Driver
from ..kernels.collective import CollectiveProgressMark, read_progress_mark
from .peer_exchange import Words, all_gather_words

POLL_SECONDS = 50e-6
"""Seconds between two polls of a stream, after the first `BUSY_WAIT_SECONDS`."""
BUSY_WAIT_SECONDS = 1e-3
"""Seconds at the start of a wait in which the stream is polled without a pause."""
MIN_JOIN_SECONDS = 60.0
"""The shortest timeout of a join across processes, in seconds: the library examines all links between machines."""
T = TypeVar("T")


class DeviceMissedCollectiveError(BackendError):
    """The error that another device did not arrive at a collective; `sequence` is the number of the collective."""

    def __init__(self, sequence: int, why: str) -> None:
        super().__init__(why)
        self.sequence = sequence


class CollectiveLibraryMembership:
    """A device's membership in a group of a collective library such as NCCL: the group's identifier and a communicator.

    All programs of the device share the membership. If its communicator is lost, it stays lost.
    """

    def __init__(self, identity: Words, ring: Communicator) -> None:
        self.identity, self.ring, self.is_lost = identity, ring, False


class CollectiveLibraryMemberships:
    """The library memberships of all devices of a backend, by device and group."""

    def __init__(self) -> None:
        self._by_group: dict[tuple[str, ...], CollectiveLibraryMembership] = {}

    def find_or_join(self, comm: Comm, library: CollectiveLibrary, device: Device) -> CollectiveLibraryMembership:
        """Return the membership of a device in a collective library's group; join a new group if necessary.

        A new group is joined if any device has no membership or has lost it. All devices of the group call this method.

        Raises:
            BackendError: The join failed, or did not end within the timeout.
        """
        key = (str(device), *map(str, comm.devices))
        known, new_identity = self._by_group.get(key), library.make_unique_id()
        mine = np.zeros_like(new_identity) if known is None else known.identity
        identities = all_gather_words(comm, mine, -4)
        if known is None or known.is_lost or (identities != mine).any():
            identity = all_gather_words(comm, new_identity, -5)[0]
            timeout = max(comm.timeout, MIN_JOIN_SECONDS) if comm.spans_processes else comm.timeout
            ring = call_with_timeout(
                timeout, lambda: library.join_group(identity, comm.rank, comm.size, device), f"{library.name} join"
            )
            known = self._by_group[key] = CollectiveLibraryMembership(identity, ring)
        return known


class HangWatchdog:
    """A watchdog that waits for a device's stream; it raises an error if another device does not arrive in time."""

    def __init__(self, comm: Comm, driver: Driver, device: Device, membership: CollectiveLibraryMembership) -> None:
        self.comm, self.driver, self.device, self.membership = comm, driver, device, membership

    def require_live_communicator(self) -> None:
        """Raise `BackendError` if the communicator of the device group was lost in an earlier run."""
        if self.membership.is_lost:
            raise BackendError(f"{self.device}: devices were lost in an earlier run; load the model anew to go on")

    def wait_for_stream(self) -> None:
        """Wait until the device's stream has ended all launches; raise an error if a collective hangs.

        Raises:
            DeviceMissedCollectiveError: Another device did not arrive at a collective.
            BackendError: This device does not stop although another device has failed.
        """
        start, mark_time, last_mark, failure_time = time.monotonic(), 0.0, None, None
        while not self.driver.is_idle(self.device):
            now, mark = time.monotonic(), self._read_progress_mark(self.comm.rank)
            if mark != last_mark:
                last_mark, mark_time = mark, now
            if (
                mark is not None
                and not mark.has_results
                and (why := self._explain_permanent_hang(mark, now - mark_time))
            ):
                self._abort_collectives_and_await_idle()
                raise DeviceMissedCollectiveError(
                    mark.sequence, f"{self._describe_mark(mark)}: {why}; load the model anew to go on"
                )
            if self._has_failed and now - (failure_time := failure_time or now) > self.comm.timeout:
                raise self._make_hang_error()
            if now - start > BUSY_WAIT_SECONDS:
                time.sleep(POLL_SECONDS)
        self.driver.synchronise(self.device)

    @property
    def _has_failed(self) -> bool:
        assert self.comm.signal_pad is not None
        return bool(self.comm.signal_pad[FAILURE_WORD])

    def _make_hang_error(self) -> BackendError:
        self.membership.is_lost = True
        return BackendError(f"{self.device} does not stop; end the process")

    def _describe_mark(self, mark: CollectiveProgressMark) -> str:
        return f"collective {mark.sequence} on device {self.comm.rank} of {self.comm.size}"

    def _read_progress_mark(self, rank: int) -> CollectiveProgressMark | None:
        """Return the last progress mark of a device in this run: the collective that it has reached or ended.

        Returns `None` before the first collective of the run.
        """
        board = self.comm.signal_pad
        assert board is not None
        mark = read_progress_mark(board, rank)
        return mark if mark is not None and mark.run == view_run_numbers(board)[rank] else None

    def _explain_permanent_hang(self, mine: CollectiveProgressMark, wait_seconds: float) -> str | None:
        """Return the reason why a collective can never end, such as a lost device, or `None` while it may still end.

        Args:
            mine: The last progress mark of this device, which is at the collective.
            wait_seconds: Seconds since that mark.
        """
        if self._has_failed:
            return "another device failed"
        if trouble := self.membership.ring.find_error():
            return trouble
        if wait_seconds < self.comm.timeout:
            return None
        own_process = [d for d, device in enumerate(self.comm.devices) if device.rank == self.device.rank]
        marks = {d: self._read_progress_mark(d) for d in own_process}
        late = [d for d, m in marks.items() if m is None or (m.run, m.sequence) < (mine.run, mine.sequence)]
        elsewhere = "a device of another process did not arrive" if self.comm.spans_processes else "it did not end"
        who = f"device {', '.join(map(str, late))} did not arrive" if late else elsewhere
        return f"{who} within {self.comm.timeout:g} s"

    def _abort_collectives_and_await_idle(self) -> None:
        """Abort the collectives that wait in the device's stream, without results, and wait until the stream is idle.

        A daemon thread does the abort. It ends only after all recordings that use the library are deleted.
        """
        self.membership.is_lost = True
        threading.Thread(target=self.membership.ring.abort, name="hocket abort", daemon=True).start()
        deadline = time.monotonic() + self.comm.timeout
        while not self.driver.is_idle(self.device):
            if time.monotonic() > deadline:
                raise self._make_hang_error()
            time.sleep(POLL_SECONDS)


def call_with_timeout(seconds: float, call: Callable[[], T], label: str) -> T:
    """Call a function in another thread and return its result; raise an error if it takes too long.

    An exception of the function is raised here.

    Args:
        seconds: Timeout.
        call: Function without arguments.
        label: Name of the call in messages and of its thread.

    Raises:
        BackendError: The call did not end within the timeout.
    """
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as why:  # raised below, in the calling thread
            failures.append(why)

    thread = threading.Thread(target=run, name=f"hocket {label}", daemon=True)
    thread.start()
    thread.join(seconds)
    if failures:
        raise failures[0]
    if not results:
        raise BackendError(f"{label}: it did not end within {seconds:g} s; another device may have failed")
    return results[0]
