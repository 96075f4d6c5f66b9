"""Device threads: each device of a process runs on its own thread, and the failure of one device stops all others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NoReturn, Protocol

from ...backends.base import Device
from ...graph.errors import BackendError, StepError


class Rendezvous(Protocol):
    """A rendezvous of device threads: an object through which they communicate, and which can wake all of them."""

    def abort(self, why: str) -> None:
        """Abort the run: wake all waiting threads with an error, because a device failed."""

    def clear(self) -> None:
        """Clear the pending messages and failures after a run, when no thread waits."""


class DeviceThreads:
    """The threads of the devices of this process.

    `failures` has the failures of the last work by device number; the number is None for an interrupt.

    Args:
        devices: All devices of the plan.
        own: Numbers of the devices of this process.
        place: The communicator group of the devices.
        timeout: Seconds after which a device that does not stop is lost.
    """

    def __init__(self, devices: Sequence[Device], own: Sequence[int], place: Rendezvous, timeout: float) -> None:
        self.devices, self.local_devices, self.rendezvous, self.timeout = devices, own, place, timeout
        self.failures: list[tuple[int | None, BaseException]] = []
        self._results: dict[int, Any] = {}
        self._lost_states_error: BackendError | None = None
        self._threads = ThreadPoolExecutor(len(own) - 1, "hocket") if len(own) > 1 else None

    def run_devices(self, works: Mapping[int, Callable[[], Any]]) -> Mapping[int, Any]:
        """Run the work of all devices at the same time, and return the results by device number.

        The first device runs on the calling thread. The method returns when all devices have ended, with or without a
        failure. Raises `BackendError` if a device does not stop; from then on, each call raises it.
        """
        if self._lost_states_error is not None:
            raise self._lost_states_error
        self.failures.clear()
        results = self._results = {}
        own, run = list(works), self._run_device
        others = {n: self._threads.submit(run, n, works[n]) for n in own[1:]} if self._threads else {}
        for number in own[:1]:  # this process may have no device of the plan
            run(number, works[number])
        for number, other in others.items():
            self._wait_for_device(number, other)
        if len(self.devices) > 1:
            self.rendezvous.clear()
        self._results = {}  # only the caller holds the results
        return results

    def roll_back_and_raise(self, back: Callable[[int, BaseException | None], None]) -> NoReturn:
        """Roll back all devices as in `roll_back`, and raise the first failure."""
        why = self.failures[0][1]
        self.roll_back(back, why)
        if isinstance(why, StepError) and not isinstance(why.__cause__, Exception | None):
            raise why.__cause__  # an interrupt
        raise why

    def roll_back(self, back: Callable[[int, BaseException | None], None], why: BaseException) -> None:
        """Roll back the states of all devices; raise `BackendError` if a device cannot do so.

        Args:
            back: Rolls back the device of this number, given the failure of the device or None.
            why: The reason, for messages.
        """
        failed = dict(self.failures)
        for number in self.local_devices:
            try:
                back(number, failed.get(number))
            except Exception as fault:  # after any error here, the states are lost
                raise BackendError(f"{why}; and states of {self.devices[number]} are lost: {fault}") from why

    def _run_device(self, number: int, work: Callable[[], Any]) -> None:
        """Run the work of one device; after a failure, wake the other devices, which may wait for it."""
        try:
            self._results[number] = work()
        except BaseException as why:  # the caller receives each error of a thread
            self.record_failure_and_abort(number, why)

    def record_failure_and_abort(self, number: int | None, why: BaseException) -> None:
        """Record a failure and abort the run: wake the other devices, which then fail too.

        Args:
            number: The device that failed; None for an interrupt.
            why: The error.
        """
        self.failures.append((number, why))
        self.rendezvous.abort(str(why) or type(why).__name__)

    def _wait_for_device(self, number: int, other: Future[None]) -> None:
        """Wait until a device's thread ends; after a recorded failure, raise an error if it does not end in time.

        Without a failure, the wait has no limit. After a failure, the limit is `timeout` seconds.

        Args:
            number: Index of the device in `devices`.
            other: Future of the device's thread.
        """
        while not other.done():
            failed = bool(self.failures)
            try:
                other.result(self.timeout)
            except TimeoutError:
                if failed:
                    why = self.failures[0][1]
                    self._lost_states_error = BackendError(
                        f"{why}; and {self.devices[number]} does not stop: states are lost, load anew"
                    )
                    raise self._lost_states_error from why
            except KeyboardInterrupt as why:
                self.record_failure_and_abort(None, why)
