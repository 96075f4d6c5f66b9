"""The ranks of one run: what they tell each other besides data, and how all of them end when one fails.

A thread of each rank says twice a second that it lives.  Who fails says so to all; who says nothing for too long is
gone.  Whoever waits for another rank notices, and raises `RanksError`; whoever does not notice is ended.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar
from weakref import WeakMethod

import numpy as np
import numpy.typing as npt

from ..graph.errors import BackendError
from ..graph.lazy_dataclass import dataclass
from .link import Link, Packet
from .presence import STOPPED_SECONDS, at_end, continue_keeper, is_stopped, lose

BEAT = 0.5
"""Seconds between two signs of life."""
SILENCE = 4.0
"""Seconds without one after which a rank is gone."""
GRACE = 1.5
"""Seconds that a rank has to end by itself once another has failed."""
LINGER = 2.0
"""Seconds that a rank that failed stays at most until the others have ended: a launcher ends all at the first exit."""
LOOK = 0.05
"""Seconds between two looks of the thread."""
SPINS = 400
"""Looks without a pause, about half a millisecond, before whoever waits lets others have the processor."""
SHORTEST, LATER, LONGEST = 5e-5, 0.02, 1e-3
"""Seconds of a pause, which grows with what has been waited already: another thread of this rank may need the
processor for what is waited for."""
WATCH, TALK, DATA = 0, 1, 2
"""Channels: of signs of life, of `everyones`; from `DATA` on of devices."""
ALIVE, FAILED, DONE, GONE, CLOSES, LAST = b"a", b"f", b"d", b"g", b"c", b"l"
"""The first byte of a packet of `WATCH`. `FAILED` and `LAST` carry the reason: a rank failed, or its script ends.

A rank that sends `GONE` or `CLOSES` has said why it ends; with `CLOSES` it ends MPI in order.
"""


Seen = TypeVar("Seen")


class RanksError(BackendError):
    """A rank failed, is gone, or does not match the others."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a run ends, and the rank that it began with."""

    rank: int
    host: str
    why: str

    def __str__(self) -> str:
        return self.why if self.why.startswith("rank ") else f"rank {self.rank} on {self.host}: {self.why}"


class World:
    """One rank's end of a group of processes, which do the same in the same order; without a link, a group of one.

    `ends_process`: another rank's failure ends this process, if it does not end by itself; else it is only noticed.
    """

    rank: int
    size: int
    hosts: tuple[str, ...]

    def __init__(self, link: Link | None, *, ends_process: bool = False) -> None:
        self._ends_process = ends_process
        self.rank, self.size = (link.rank, link.size) if link else (0, 1)
        self.hosts = (link.host if link else platform.node(),) * self.size
        self.failure: Failure | None = None
        self._lock = threading.Lock()
        self._wakes: list[WeakMethod[Callable[[str], None]]] = []
        self._others = [r for r in range(self.size) if r != self.rank]
        self._last = dict.fromkeys(self._others, time.monotonic())
        self._said: dict[int, str] = {}
        self._has_said = self._is_ending = self._is_over = False
        self._last_words: dict[int, tuple[str, float]] = {}
        self._ended: dict[int, bytes] = {}
        self._done, self._leaving = threading.Event(), threading.Event()
        if link:
            self._link = link
            self._thread = threading.Thread(target=self._watch, name="hocket.ranks", daemon=True)
            self._thread.start()
            if not ends_process:
                at_end(self)
            self.hosts = tuple(text.decode() for text in self.everyones(link.host.encode()))

    def name(self, rank: int) -> str:
        """How messages call a rank."""
        return f"rank {rank} on {self.hosts[rank]}"

    # ------------------------------------------------------------------------------------------------- talking

    def post(self, to: int, channel: int, packet: Packet) -> object:
        """Send a packet; what `settle` waits for."""
        self.check()
        return self._link.post(to, channel, packet)

    def settle(self, posted: Sequence[object], timeout: float | None = None) -> None:
        """Wait until packets are out of this rank's hands."""
        for one in posted:
            if self._waited(lambda one=one: self._link.is_sent(one) or None, timeout) is None:  # type: ignore[misc]
                raise RanksError(f"{self.name(self.rank)}: nobody takes what it sends for {timeout:g} s")

    def take(self, source: int, channel: int, timeout: float | None = None) -> Packet | None:
        """The next packet of a rank on a channel; None if it does not come within `timeout` seconds."""
        return self._waited(lambda: self._link.poll(source, channel), timeout)

    def _waited(self, look: Callable[[], Seen | None], timeout: float | None) -> Seen | None:
        """What `look` gives once it is not None; None after `timeout` seconds.  Raises `RanksError` if a rank fails."""
        for _ in range(SPINS):
            if (seen := look()) is not None:
                return seen
        start = time.monotonic()
        while (seen := look()) is None:
            self.check()
            waited = time.monotonic() - start
            if timeout is not None and waited > timeout:
                return None
            time.sleep(min(max(SHORTEST, waited * LATER), LONGEST))
        return seen

    def everyones(self, said: bytes, timeout: float | None = None) -> list[bytes]:
        """What each rank says, in their order.  Rank 0, which may wait for a person, is waited for without end, others
        for `timeout` seconds."""
        if self.size == 1:
            return [said]
        packet = np.frombuffer(said, np.uint8)
        posted = [self.post(to, TALK, packet) for to in self._others]
        heard = [said if r == self.rank else self._heard(r, timeout if r else None) for r in range(self.size)]
        self.settle(posted)
        return heard

    def _heard(self, rank: int, timeout: float | None = None) -> bytes:
        packet = self.take(rank, TALK, timeout)
        if packet is None:
            raise self.late(rank, timeout or 0.0)
        return packet.tobytes()

    def late(self, rank: int, timeout: float) -> RanksError:
        """What to raise where a rank lives, but has not come in time."""
        self._give_up(rank, f"it did not come within {timeout:.0f} s: it hangs, or is overloaded")
        return RanksError(str(self.failure))

    def _give_up(self, rank: int, why: str) -> None:
        """Note that MPI cannot end in order: it would wait for `rank`."""
        failure = Failure(rank, self.hosts[rank], why)
        if self._note(failure) and not self._ends_process:
            lose(str(failure))

    def from_first(self, say: Callable[[], bytes]) -> bytes:
        """What `say` gives on rank 0, the only one that calls it."""
        if self.size == 1:
            return say()
        if self.rank:
            return self._heard(0)
        said = say()
        self.settle([self.post(to, TALK, np.frombuffer(said, np.uint8)) for to in self._others])
        return said

    def agree(self, what: str, own: str, do: str, timeout: float | None = None) -> None:
        """Raises `RanksError`, on every rank, unless all bring the same text; `do` is what to do about it."""
        texts = [text.decode() for text in self.everyones(own.encode(), timeout)]
        for rank, text in enumerate(texts):
            if text != texts[0]:
                first = f"{self.name(0)} has {texts[0]:.80}"
                raise RanksError(f"{self.name(rank)} has another {what}: {text:.80}, {first}; {do}")

    def shared(self, words: int) -> npt.NDArray[np.int64] | None:
        """Memory of all ranks, zeros to begin with; None unless they are on one machine.  All ranks call it."""
        return self._link.shared(words) if len(set(self.hosts)) == 1 else None

    # ------------------------------------------------------------------------------------------------- failing

    def check(self) -> None:
        """Raises `RanksError` once a rank has failed."""
        if self.failure is not None:
            raise RanksError(str(self.failure))

    def wakes(self, wake: Callable[[str], None]) -> None:
        """The method `wake` is called with the reason when a rank fails, as long as its object lives, for those who
        wait where they see no `check`."""
        self._wakes = [*(known for known in self._wakes if known() is not None), WeakMethod(wake)]

    def remind(self) -> None:
        """Wake those again who may have forgotten that a rank has failed."""
        if self.failure is not None:
            for known in self._wakes:
                if (wake := known()) is not None:
                    wake(str(self.failure))

    def fail(self, why: str) -> None:
        """This rank has failed: tell the others, unless another one failed first."""
        if self._others and not self._has_said:
            self._has_said = True
            self._note(Failure(self.rank, self.hosts[self.rank], why))
            self._tell(FAILED + why.encode())

    def tell_end(self, why: str) -> None:
        """The last word of a rank whose script ends; others that still need it hear the reason."""
        self._is_over = True
        if not self._done.is_set():
            self._tell(LAST + why.encode())

    def await_ends(self) -> None:
        """Wait until the scripts of all ranks end, as MPI would, or until a rank is gone."""
        while not self._done.is_set() and self.failure is None:
            if all(rank in self._last_words for rank in self._others):
                break
            time.sleep(LOOK / 10)
        if not self._done.is_set():
            self._leaving.set()
            self._thread.join(SILENCE)

    def _note(self, failure: Failure) -> bool:
        """Remember the first failure; whether this is it."""
        with self._lock:
            if self.failure is not None:
                return False
            self.failure = failure
        self.remind()
        return True

    def leave(self, timeout: float | None = None) -> None:
        """The end of a rank that has done its work: wait for the others, at most `timeout` seconds.  Raises
        `RanksError` if one fails or does not come."""
        if not self._others:
            return
        self._done.set()
        start = time.monotonic()
        while late := [r for r in self._others if self._ended.get(r) != DONE]:
            self.check()
            if timeout is not None and time.monotonic() - start > timeout:
                raise self.late(late[0], timeout)
            time.sleep(LOOK / 10)
        self._close()

    def _close(self) -> None:
        self._leaving.set()
        self._thread.join()
        self._link.close()
        if self._ends_process:
            continue_keeper()

    def end(self, code: int, why: str = "") -> NoReturn:
        """The end of the process where a rank has failed: this one, which says `why`, or another.  It lasts until all
        have spoken.  What rank 0 says, too, the others do not repeat."""
        self._is_ending = True
        if why:
            self.fail(why)
            until = time.monotonic() + LINGER / 2
            while self.rank and 0 not in self._said and 0 not in self._ended and time.monotonic() < until:
                time.sleep(LOOK / 5)
        line = f"rank {self.rank} on {self.hosts[self.rank]}: {why}" if why and self.rank else why
        said = why or (self.failure.why if self.failure else "")
        if said and (self.rank == 0 or said != self._said.get(0)):
            os.write(2, f"hocket: {line or self.failure}\n".encode())
        closes = threading.current_thread() is not self._thread  # which has to end before MPI does
        self._tell(CLOSES if closes else GONE)
        until, gone = time.monotonic() + LINGER, self.failure.rank if self.failure else self.rank
        needed = [r for r in self._others if r != gone or r in self._said]
        while time.monotonic() < until and any(r not in self._ended for r in needed):
            time.sleep(LOOK / 5)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        if closes and all(self._ended.get(r) == CLOSES for r in self._others):
            self._bound_close(code)
            self._close()  # all are there: MPI ends in order, and has no banner to print
        os._exit(code)  # MPI would wait for the rank that failed

    def _bound_close(self, code: int) -> None:
        """End this process after `LINGER` seconds: another rank may have been ended since it said that it closes."""
        timer = threading.Timer(LINGER, os._exit, (code,))
        timer.daemon = True
        timer.start()

    def _tell(self, what: bytes) -> None:
        for to in self._others:
            self._link.post(to, WATCH, np.frombuffer(what, np.uint8))

    # ------------------------------------------------------------------------------------------------- watching

    def _watch(self) -> None:
        """What the thread does until the rank leaves."""
        beat, grace, told, before, stopped = 0.0, None, False, time.monotonic(), 0.0
        while not self._leaving.wait(LOOK):
            now = time.monotonic()
            if (
                now - before > BEAT
            ):  # this process was stopped, or had no processor: others may have been silent in vain
                self._last = {rank: last + now - before for rank, last in self._last.items()}
            before = now
            if now - beat > BEAT and not told:
                beat = now
                self._tell(ALIVE)
            if self._ends_process:
                stopped = (stopped or now) if is_stopped(os.getppid()) else 0.0
                if stopped and now - stopped > STOPPED_SECONDS:
                    continue_keeper()
                    self.fail("the process that the launcher has started for it was stopped (SIGSTOP)")
            if self._done.is_set() and not told:
                told = True
                self._tell(DONE)  # the last that others hear: nothing is under way when MPI ends
            for rank in self._others:
                self._listen(rank, now)
            if self.failure is not None and self._ends_process:
                grace = grace or now + GRACE
                if now > grace and not self._is_ending:  # the main thread is busy or hangs
                    self.end(2)
        if self._done.is_set() and not told:  # the others were done before
            self._tell(DONE)

    def _listen(self, rank: int, now: float) -> None:
        while (packet := self._link.poll(rank, WATCH)) is not None:
            kind, text = packet[:1].tobytes(), packet[1:].tobytes().decode()
            self._last[rank] = now
            if kind in (DONE, GONE, CLOSES):
                self._ended[rank] = kind
            elif kind == FAILED:
                self._said[rank] = text
                self._note(Failure(rank, self.hosts[rank], text))
            elif kind == LAST:
                self._last_words[rank] = (text, now)
        if rank in self._last_words:  # what it has sent before is on the way
            last_words, since = self._last_words[rank]
            if now - since > GRACE and not self._is_over:
                self._note(Failure(rank, self.hosts[rank], last_words))
        elif rank not in self._ended and now - self._last[rank] > SILENCE:
            why = f"nothing was heard of it for {SILENCE:.0f} s: it was killed or stopped, or its machine is cut off"
            self._give_up(rank, why)


ALONE = World(None)
"""The one process that there is if nobody started several."""
