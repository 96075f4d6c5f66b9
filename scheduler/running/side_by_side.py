"""The devices of a process at work, each on a thread; when one fails, the others are woken and stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NoReturn, Protocol

from ...backends.base import Device
from ...graph.errors import BackendError, StepError


class Place(Protocol):
    """Where devices meet."""

    def abort(self, why: str) -> None:
        """Wake everybody who waits: a member failed."""

    def clear(self) -> None:
        """Forget what was sent, and that somebody failed: a run is over, and nobody waits."""


class SideBySide:
    """`devices` are those of a plan, of which this process has those with the numbers `own`; they meet at a `place`.

    `failures` are those of the last work, by the number of the device, None for an interrupt.
    """

    def __init__(self, devices: Sequence[Device], own: Sequence[int], place: Place, timeout: float) -> None:
        self.devices, self.own, self.place, self.timeout = devices, own, place, timeout
        self.failures: list[tuple[int | None, BaseException]] = []
        self._given: dict[int, Any] = {}
        self._lost: BackendError | None = None
        self._threads = ThreadPoolExecutor(len(own) - 1, "hocket") if len(own) > 1 else None

    def work(self, works: Mapping[int, Callable[[], Any]]) -> Mapping[int, Any]:
        """Let each device do its work, the first of them on this thread; what it has given, by its number.  Returns
        when all have ended, whether or not one has failed.  Raises `BackendError` if one does not stop, and from then
        on."""
        if self._lost is not None:
            raise self._lost
        self.failures.clear()
        given = self._given = {}
        own, run = list(works), self._guarded
        others = {n: self._threads.submit(run, n, works[n]) for n in own[1:]} if self._threads else {}
        for number in own[:1]:  # no device of this process may take part
            run(number, works[number])
        for number, other in others.items():
            self._await(number, other)
        if len(self.devices) > 1:
            self.place.clear()
        self._given = {}  # results belong to the caller alone
        return given

    def undo(self, back: Callable[[int, BaseException | None], None]) -> NoReturn:
        """Take back what all devices did, as `take_back`, and raise what went wrong first."""
        why = self.failures[0][1]
        self.take_back(back, why)
        if isinstance(why, StepError) and not isinstance(why.__cause__, Exception | None):
            raise why.__cause__  # an interrupt
        raise why

    def take_back(self, back: Callable[[int, BaseException | None], None], why: BaseException) -> None:
        """Take back what all devices did because of `why`; `back` does so for a device of that number, and is told what
        it failed of."""
        failed = dict(self.failures)
        for number in self.own:
            try:
                back(number, failed.get(number))
            except Exception as fault:  # whatever a backend raises here, the states are lost
                raise BackendError(f"{why}; and states of {self.devices[number]} are lost: {fault}") from why

    def _guarded(self, number: int, work: Callable[[], Any]) -> None:
        """Run one device; on failure wake the others, who may be waiting for it."""
        try:
            self._given[number] = work()
        except BaseException as why:  # a thread's error is handed to the caller, whatever it is
            self.stop(number, why)

    def stop(self, number: int | None, why: BaseException) -> None:
        """Note a failure of a device (or an interrupt), before others hear of it and fail for that reason."""
        self.failures.append((number, why))
        self.place.abort(str(why) or type(why).__name__)

    def _await(self, number: int, other: Future[None]) -> None:
        """Wait for a device; once another has failed, not for ever."""
        while not other.done():
            failed = bool(self.failures)
            try:
                other.result(self.timeout)
            except TimeoutError:
                if failed:
                    why = self.failures[0][1]
                    self._lost = BackendError(
                        f"{why}; and {self.devices[number]} does not stop: states are lost, load anew"
                    )
                    raise self._lost from why
            except KeyboardInterrupt as why:
                self.stop(None, why)
