"""Device threads: each device of a process runs on its own thread, and the failure of one device stops all others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NoReturn, Protocol

from ...backends.base import Device
from ...graph.errors import StatesLostError, StepError


class Rendezvous(Protocol):
    """The object through which device threads wait for each other, and which can wake all of them."""

    def abort(self, why: str) -> None:
        """Wake all waiting device threads with an error, because a device failed."""

    def clear_messages_and_failures(self) -> None:
        """Forget the pending messages and failures. Called after a run, when no thread waits."""


class DeviceThreads:
    """Runs work on all devices of this process at the same time, each device on its own thread.

    `failures` has (device number, error) of the last work. The number is None for an interrupt.

    Args:
        devices: All devices of the plan.
        own: Numbers of the devices of this process.
        place: The communicators of the devices, to wake devices that wait.
        timeout: Seconds after a failure until a device that does not stop counts as lost.
    """

    def __init__(self, devices: Sequence[Device], own: Sequence[int], place: Rendezvous, timeout: float) -> None:
        self.devices, self.local_devices, self.rendezvous, self.timeout = devices, own, place, timeout
        self.failures: list[tuple[int | None, BaseException]] = []
        self._results: dict[int, Any] = {}
        self._threads = ThreadPoolExecutor(len(own) - 1, "hocket") if len(own) > 1 else None

    def run_devices(self, works: Mapping[int, Callable[[], Any]]) -> Mapping[int, Any]:
        """Run the work of all devices at the same time, and return the results by device number.

        The first device runs on the calling thread. The method returns when all devices have ended; afterwards
        `failures` has their errors.

        Args:
            works: The work of each device, by device number.

        Raises:
            StatesLostError: A device does not stop after a failure. It may still write to its memory.
        """
        self.failures.clear()
        results = self._results = {}
        own, run = list(works), self._run_device
        others = {n: self._threads.submit(run, n, works[n]) for n in own[1:]} if self._threads else {}
        for number in own[:1]:  # this process may have no device of the plan
            run(number, works[number])
        for number, other in others.items():
            self._wait_for_end_of_device_thread(number, other)
        if len(self.devices) > 1:
            self.rendezvous.clear_messages_and_failures()
        self._results = {}  # only the caller holds the results
        return results

    def roll_back_and_raise(self, roll_back_device: Callable[[int, BaseException | None], None]) -> NoReturn:
        """Restore the states of all local devices after a failed run, and raise the first failure.

        Args:
            roll_back_device: Rolls back one device, given its number and its own error or None.
        """
        why = self.failures[0][1]
        self.roll_back(roll_back_device, why)
        if isinstance(why, StepError) and not isinstance(why.__cause__, Exception | None):
            raise why.__cause__  # an interrupt
        raise why

    def roll_back(self, roll_back_device: Callable[[int, BaseException | None], None], why: BaseException) -> None:
        """Restore the states of all local devices after a failed run.

        Args:
            roll_back_device: Rolls back one device, given its number and its own error or None.
            why: The first failure, for messages.

        Raises:
            StatesLostError: A device cannot restore its states.
        """
        failed = dict(self.failures)
        for number in self.local_devices:
            try:
                roll_back_device(number, failed.get(number))
            except Exception as fault:  # after any error here, the states are lost
                raise StatesLostError(f"{why}; and states of {self.devices[number]} are lost: {fault}") from why

    def _run_device(self, number: int, work: Callable[[], Any]) -> None:
        """Run the work of one device and store its result; after an error, wake the other devices."""
        try:
            self._results[number] = work()
        except BaseException as why:  # the caller receives each error of a thread
            self.record_failure_and_abort(number, why)

    def record_failure_and_abort(self, number: int | None, why: BaseException) -> None:
        """Record the failure of a device, and wake the threads of the other devices, which then fail too.

        Args:
            number: The device that failed; None for an interrupt.
            why: The error.
        """
        self.failures.append((number, why))
        self.rendezvous.abort(str(why) or type(why).__name__)

    def _wait_for_end_of_device_thread(self, number: int, other: Future[None]) -> None:
        """Wait until a device's thread ends; raise `StatesLostError` if it does not end in time after a failure.

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
                    raise StatesLostError(
                        f"{why}; and {self.devices[number]} does not stop: states are lost, load anew",
                        can_begin_anew=False,
                    ) from why
            except KeyboardInterrupt as why:
                self.record_failure_and_abort(None, why)
