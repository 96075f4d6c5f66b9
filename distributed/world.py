"""The processes of one run (ranks): messages between ranks, agreement, and a common end when a rank fails.

A thread of each rank sends a heartbeat twice a second. A rank that fails sends the reason to all ranks. A rank without
heartbeats counts as failed. Every wait for another rank then raises `RanksError`; a process that does not wait is
ended.
"""

from __future__ import annotations

import math
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
from .packet_link import Packet, PacketLink
from .presence import (
    STOPPED_SECONDS,
    is_process_suspended,
    record_lost_rank,
    register_exit_participant,
    resume_stopped_supervisor,
)

HEARTBEAT_SECONDS = 0.5
"""Seconds between two heartbeats."""
SILENCE_TIMEOUT_SECONDS = 4.0
"""Seconds without a heartbeat after which a rank counts as failed."""
SHUTDOWN_GRACE_SECONDS = 1.5
"""Seconds that a rank has to end by itself after another rank has failed."""
FAILED_RANK_LINGER_SECONDS = 2.0
"""Maximum seconds for which a failed rank waits for the others to end; a launcher ends all ranks at the first exit."""
POLL_SECONDS = 0.05
"""Seconds between two polls of the heartbeat thread."""
SPINS = 400
"""Number of polls without a pause, about half a millisecond, before a wait yields the processor."""
MIN_PAUSE_SECONDS, PAUSE_FRACTION, MAX_PAUSE_SECONDS = 5e-5, 0.02, 1e-3
"""Bounds of a pause between two polls, and the length of a pause as a fraction of the seconds waited so far.

Another thread of this rank may need the processor for the awaited result.
"""
WATCH, TALK, DATA = 0, 1, 2
"""Channels: `WATCH` for heartbeats, `TALK` for `all_gather_bytes`, and numbers from `DATA` on for devices."""
ALIVE, FAILED, DONE, GONE, CLOSES, LAST = b"a", b"f", b"d", b"g", b"c", b"l"
"""The first byte of a packet on the channel `WATCH`.

`FAILED` and `LAST` carry the reason: a rank failed, or its script ends. A rank that sends `GONE` or `CLOSES` has sent
the reason before; with `CLOSES` it finalizes MPI.
"""


Seen = TypeVar("Seen")


class RanksError(BackendError):
    """The error that a rank failed, ended, or disagrees with the other ranks."""


@dataclass(frozen=True, slots=True)
class FirstRankFailure:
    """The first failure of a run: the rank that failed, its host, and the reason."""

    rank: int
    host: str
    why: str

    def __str__(self) -> str:
        return self.why if self.why.startswith("rank ") else f"rank {self.rank} on {self.host}: {self.why}"


class World:
    """One rank of a run of several processes: the connection of this process to all the others.

    All ranks run the same program in the same order.

    Args:
        link: The packet link to the other ranks; None for a run of one process.
        ends_process: Whether this process is ended soon after the failure of another rank, even if it does not wait for
            that rank. If not, only waits raise an error.
    """

    rank: int
    size: int
    hosts: tuple[str, ...]

    def __init__(self, link: PacketLink | None, *, ends_process: bool = False) -> None:
        self._ends_process = ends_process
        self.rank, self.size = (link.rank, link.size) if link else (0, 1)
        self.hosts = (link.host if link else platform.node(),) * self.size
        self.failure: FirstRankFailure | None = None
        self._lock = threading.Lock()
        self._wakes: list[WeakMethod[Callable[[str], None]]] = []
        self._others = [r for r in range(self.size) if r != self.rank]
        self._last = dict.fromkeys(self._others, time.monotonic())
        self._failure_reasons: dict[int, str] = {}
        self._has_sent_failure = self._is_ending = self._is_over = False
        self._last_words: dict[int, tuple[str, float]] = {}
        self._ended: dict[int, bytes] = {}
        self._done_at: dict[int, float] = {}
        """The times at which ranks told that they have done their work; earlier packets may still be under way."""
        self._done, self._leaving = threading.Event(), threading.Event()
        if link:
            self._link = link
            self._thread = threading.Thread(
                target=self._exchange_heartbeats_until_leaving, name="hocket.distributed", daemon=True
            )
            self._thread.start()
            if not ends_process:
                register_exit_participant(self)
            self.hosts = tuple(text.decode() for text in self.all_gather_bytes(link.host.encode()))

    def describe_rank(self, rank: int) -> str:
        """Describe a rank for messages, as in ``rank 1 on node-b``."""
        return f"rank {rank} on {self.hosts[rank]}"

    # ------------------------------------------------------------------------------------------------- talking

    def start_sending_packet(self, to: int, channel: int, packet: Packet) -> object:
        """Send a packet to a rank on a channel, and return an object for `wait_until_sent`."""
        self.raise_if_failed()
        return self._link.send(to, channel, packet)

    def wait_until_sent(self, posted: Sequence[object], timeout: float | None = None) -> None:
        """Wait until all given packets are sent, so that the link no longer reads their memory.

        Args:
            posted: The results of `start_sending_packet`.
            timeout: Maximum seconds of the wait.

        Raises:
            RanksError: A rank failed, or a packet is not sent within `timeout` seconds.
        """
        for one in posted:
            if self._poll_until(lambda one=one: self._link.is_sent(one) or None, timeout) is None:  # type: ignore[misc]
                raise RanksError(f"{self.describe_rank(self.rank)}: no rank receives its message for {timeout:g} s")

    def receive_packet(self, source: int, channel: int, timeout: float | None = None) -> Packet | None:
        """Return the next packet from a rank on a channel, or None after `timeout` seconds.

        Raises:
            RanksError: A rank failed, or the source has done its work and sends no more packets.
        """

        def poll() -> Packet | None:
            packet = self._link.try_receive(source, channel)
            if packet is None and time.monotonic() - self._done_at.get(source, math.inf) > SHUTDOWN_GRACE_SECONDS:
                raise RanksError(
                    f"it still waits for {self.describe_rank(source)}, which has ended; "
                    "give all ranks the same command and flags"
                )
            return packet

        return self._poll_until(poll, timeout)

    def _poll_until(self, poll: Callable[[], Seen | None], timeout: float | None) -> Seen | None:
        """Call `poll` repeatedly until it returns a value, and return the value; return None after `timeout` seconds.

        Raises:
            RanksError: A rank failed.
        """
        for _ in range(SPINS):
            if (found := poll()) is not None:
                return found
        start = time.monotonic()
        while (found := poll()) is None:
            self.raise_if_failed()
            waited = time.monotonic() - start
            if timeout is not None and waited > timeout:
                return None
            time.sleep(min(max(MIN_PAUSE_SECONDS, waited * PAUSE_FRACTION), MAX_PAUSE_SECONDS))
        return found

    def all_gather_bytes(self, own: bytes, timeout: float | None = None) -> list[bytes]:
        """Send the bytes `own` to all ranks, and return the bytes of all ranks in rank order.

        The wait for another rank takes at most `timeout` seconds, except for rank 0, which may wait for a person.

        Raises:
            RanksError: A rank failed or did not come in time.
        """
        if self.size == 1:
            return [own]
        packet = np.frombuffer(own, np.uint8)
        posted = [self.start_sending_packet(to, TALK, packet) for to in self._others]
        texts = [own if r == self.rank else self._receive_from(r, timeout if r else None) for r in range(self.size)]
        self.wait_until_sent(posted)
        return texts

    def _receive_from(self, rank: int, timeout: float | None = None) -> bytes:
        packet = self.receive_packet(rank, TALK, timeout)
        if packet is None:
            raise self.record_timeout(rank, timeout or 0.0)
        return packet.tobytes()

    def record_timeout(self, rank: int, timeout: float) -> RanksError:
        """Record that a living rank did not come within `timeout` seconds, and return the error to raise."""
        self._exclude_failed_rank_from_mpi_end(
            rank, f"it did not come within {timeout:.0f} s: it hangs, or is overloaded"
        )
        return RanksError(str(self.failure))

    def _exclude_failed_rank_from_mpi_end(self, rank: int, why: str) -> None:
        """Record that a rank has failed, so that this process does not wait for it when MPI is finalised."""
        failure = FirstRankFailure(rank, self.hosts[rank], why)
        if self._record_failure(failure) and not self._ends_process:
            record_lost_rank(str(failure))

    def broadcast_from_rank_0(self, make_text: Callable[[], bytes]) -> bytes:
        """Call `make_text` on rank 0 and return its result on all ranks; other ranks do not call it."""
        if self.size == 1:
            return make_text()
        if self.rank:
            return self._receive_from(0)
        text = make_text()
        self.wait_until_sent(
            [self.start_sending_packet(to, TALK, np.frombuffer(text, np.uint8)) for to in self._others]
        )
        return text

    def require_agreement(self, name: str, own: str, remedy: str, timeout: float | None = None) -> None:
        """Require that a text is equal on all ranks.

        Args:
            name: The name of the text in the message.
            own: The text of this rank.
            remedy: The remedy, for the message.
            timeout: Seconds to wait for a rank.

        Raises:
            RanksError: The texts differ; every rank raises it.
        """
        texts = [text.decode() for text in self.all_gather_bytes(own.encode(), timeout)]
        for rank, text in enumerate(texts):
            if text != texts[0]:
                first = f"{self.describe_rank(0)} has {texts[0]:.80}"
                raise RanksError(f"{self.describe_rank(rank)} has another {name}: {text:.80}, {first}; {remedy}")

    def allocate_zeroed_shared_words(self, words: int) -> npt.NDArray[np.int64] | None:
        """Allocate zeroed memory of `words` 8-byte integers that all ranks share, or return None on several machines.

        All ranks call the method.
        """
        return self._link.allocate_shared_words(words) if len(set(self.hosts)) == 1 else None

    # ------------------------------------------------------------------------------------------------- failing

    def raise_if_failed(self) -> None:
        """Raise `RanksError` if a rank has failed."""
        if self.failure is not None:
            raise RanksError(str(self.failure))

    def register_failure_callback(self, callback: Callable[[str], None]) -> None:
        """Register a bound method that is called with the reason when a rank fails.

        It wakes threads that wait elsewhere and do not poll for failures. The registration ends when the method's
        object is deleted.
        """
        self._wakes = [*(known for known in self._wakes if known() is not None), WeakMethod(callback)]

    def call_failure_callbacks_again(self) -> None:
        """Call all registered failure callbacks again if a rank has failed.

        This is for a group that was cleared in the meantime and has lost the reason of the failure.
        """
        if self.failure is not None:
            for known in self._wakes:
                if (wake := known()) is not None:
                    wake(str(self.failure))

    def announce_failure(self, why: str) -> None:
        """Tell the other ranks that this rank has failed, and why.

        A second call does nothing. The failure becomes the recorded failure only if no rank has failed before.
        """
        if self._others and not self._has_sent_failure:
            self._has_sent_failure = True
            self._record_failure(FirstRankFailure(self.rank, self.hosts[self.rank], why))
            self._send_control(FAILED + why.encode())

    def announce_end(self, why: str) -> None:
        """Tell all ranks that the script of this rank ends, and why; ranks that still need it raise the reason."""
        self._is_over = True
        if not self._done.is_set():
            self._send_control(LAST + why.encode())

    def await_exit_announcements(self) -> None:
        """Wait until the scripts of all ranks end, as MPI does at its end, or until a rank fails."""
        while not self._done.is_set() and self.failure is None:
            if all(rank in self._last_words for rank in self._others):
                break
            time.sleep(POLL_SECONDS / 10)
        if not self._done.is_set():
            self._leaving.set()
            self._thread.join(SILENCE_TIMEOUT_SECONDS)

    def _record_failure(self, failure: FirstRankFailure) -> bool:
        """Record a failure unless another one was recorded before; return whether it was recorded."""
        with self._lock:
            if self.failure is not None:
                return False
            self.failure = failure
        self.call_failure_callbacks_again()
        return True

    def wait_for_all_ranks_and_close(self, timeout: float | None = None) -> None:
        """Leave the run after the work of this rank: wait until all other ranks leave too, then close the link.

        The wait takes at most `timeout` seconds.

        Raises:
            RanksError: A rank failed or did not come in time.
        """
        if not self._others:
            return
        self._done.set()
        start = time.monotonic()
        while late := [r for r in self._others if self._ended.get(r) != DONE]:
            self.raise_if_failed()
            if timeout is not None and time.monotonic() - start > timeout:
                raise self.record_timeout(late[0], timeout)
            time.sleep(POLL_SECONDS / 10)
        self._close()

    def _close(self) -> None:
        self._leaving.set()
        self._thread.join()
        self._link.close()
        if self._ends_process:
            resume_stopped_supervisor()

    def end_process_after_rank_failure(self, code: int, why: str = "") -> NoReturn:
        """End this process with exit code `code` because a rank has failed.

        `why` is the reason if this rank has failed; else it is empty. The process stays until all ranks have sent their
        reasons. A rank does not print a line that rank 0 prints, too.
        """
        self._is_ending = True
        if why:
            self.announce_failure(why)
            until = time.monotonic() + FAILED_RANK_LINGER_SECONDS / 2
            while self.rank and 0 not in self._failure_reasons and 0 not in self._ended and time.monotonic() < until:
                time.sleep(POLL_SECONDS / 5)
        line = f"rank {self.rank} on {self.hosts[self.rank]}: {why}" if why and self.rank else why
        reason = why or (self.failure.why if self.failure else "")
        if reason and (self.rank == 0 or reason != self._failure_reasons.get(0)):
            os.write(2, f"hocket: {line or self.failure}\n".encode())
        closes = threading.current_thread() is not self._thread  # that thread has to end before MPI does
        self._send_control(CLOSES if closes else GONE)
        until, gone = time.monotonic() + FAILED_RANK_LINGER_SECONDS, self.failure.rank if self.failure else self.rank
        needed = [r for r in self._others if r != gone or r in self._failure_reasons]
        while time.monotonic() < until and any(r not in self._ended for r in needed):
            time.sleep(POLL_SECONDS / 5)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        if closes and all(self._ended.get(r) == CLOSES for r in self._others):
            self._start_exit_timer(code)
            self._close()  # all ranks finalize MPI, so that mpiexec prints no banner
        os._exit(code)  # MPI would wait for the rank that failed

    def _start_exit_timer(self, code: int) -> None:
        """Start a timer that ends this process with exit code `code`, in case the end of MPI hangs.

        That happens if another rank was killed after it sent `CLOSES`. The timer runs for `FAILED_RANK_LINGER_SECONDS`.
        """
        timer = threading.Timer(FAILED_RANK_LINGER_SECONDS, os._exit, (code,))
        timer.daemon = True
        timer.start()

    def _send_control(self, what: bytes) -> None:
        for to in self._others:
            self._link.send(to, WATCH, np.frombuffer(what, np.uint8))

    # ------------------------------------------------------------------------------------------------- watching

    def _exchange_heartbeats_until_leaving(self) -> None:
        """Send heartbeats and read the heartbeats of other ranks until this rank leaves."""
        beat, grace, has_sent_done, before, stopped = 0.0, None, False, time.monotonic(), 0.0
        while not self._leaving.wait(POLL_SECONDS):
            now = time.monotonic()
            if now - before > HEARTBEAT_SECONDS:  # this process was stopped, or had no processor, and read nothing
                self._last = {rank: last + now - before for rank, last in self._last.items()}
            before = now
            if now - beat > HEARTBEAT_SECONDS and not has_sent_done:
                beat = now
                self._send_control(ALIVE)
            if self._ends_process:
                stopped = (stopped or now) if is_process_suspended(os.getppid()) else 0.0
                if stopped and now - stopped > STOPPED_SECONDS:
                    resume_stopped_supervisor()
                    self.announce_failure("the process that the launcher has started for it was stopped (SIGSTOP)")
            if self._done.is_set() and not has_sent_done:
                has_sent_done = True
                self._send_control(DONE)  # the last packet: no message is pending when MPI ends
            for rank in self._others:
                self._read_heartbeat(rank, now)
            if self.failure is not None and self._ends_process:
                grace = grace or now + SHUTDOWN_GRACE_SECONDS
                if now > grace and not self._is_ending:  # the main thread is busy or hangs
                    self.end_process_after_rank_failure(2)
        if self._done.is_set() and not has_sent_done:  # the others have ended before
            self._send_control(DONE)

    def _read_heartbeat(self, rank: int, now: float) -> None:
        while (packet := self._link.try_receive(rank, WATCH)) is not None:
            kind, text = packet[:1].tobytes(), packet[1:].tobytes().decode()
            self._last[rank] = now
            if kind in (DONE, GONE, CLOSES):
                self._ended[rank] = kind
                self._done_at |= {rank: now} if kind == DONE else {}
            elif kind == FAILED:
                self._failure_reasons[rank] = text
                self._record_failure(FirstRankFailure(rank, self.hosts[rank], text))
            elif kind == LAST:
                self._last_words[rank] = (text, now)
        if rank in self._last_words:  # earlier packets of this rank are still under way
            last_words, since = self._last_words[rank]
            if now - since > SHUTDOWN_GRACE_SECONDS and not self._is_over:
                self._record_failure(FirstRankFailure(rank, self.hosts[rank], last_words))
        elif rank not in self._ended and now - self._last[rank] > SILENCE_TIMEOUT_SECONDS:
            silence = f"nothing was heard of it for {SILENCE_TIMEOUT_SECONDS:.0f} s"
            self._exclude_failed_rank_from_mpi_end(
                rank, f"{silence}: it was killed or stopped, or its machine is cut off"
            )


SINGLE_PROCESS = World(None)
"""The world of a process without other ranks."""
