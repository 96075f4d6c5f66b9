"""Detection of ended or stopped ranks of one machine before the ranks communicate over MPI, by notes in memory files.

A note is a file in memory, open from ``import hocket`` to the end of the process. Linux shows the file in ``/proc``, so
the other ranks can read it. The note is empty while the process runs; at the end it holds the reason. No file stays
behind.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol
from weakref import ref

PROC = Path("/proc")
NOTE = "hocket-rank"
POLL_SECONDS = 0.25
"""Seconds between two polls of the processes of the other ranks."""
STOPPED_SECONDS = 4.0
"""Seconds after which a stopped rank counts as failed."""
IMPORT_SECONDS = 60.0
"""Maximum seconds until a rank of this machine has imported hocket, even on a busy machine."""
ENDED = "its program ended before that of the others"

MAX_REASON = 300
"""Maximum characters of a reason."""


class ExitParticipant(Protocol):
    """A member of a run of several ranks, which tells the other ranks when this process ends."""

    def announce_end(self, why: str) -> None:
        """Tell the other ranks that this process ends, and why."""

    def await_exit_announcements(self) -> None:
        """Wait until all other ranks have announced that they are ending. The wait also ends when a rank fails."""


LAUNCHERS = (
    ("mpiexec", "PMI_RANK", "PMI_SIZE"),
    ("mpiexec", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
"""Launchers, each with the environment variables of the rank of a process and of the number of ranks."""


def detect_rank() -> tuple[str, int, int] | None:
    """Return the launcher, the rank of this process and the number of ranks, or None for a single process."""
    for by, rank, size in LAUNCHERS:
        numbers = os.environ.get(rank, ""), os.environ.get(size, "")
        if all(n.isdecimal() for n in numbers) and int(numbers[1]) > 1:
            return by, int(numbers[0]), int(numbers[1])
    return None


_notes: list[int] = []
_partners: list[ref[ExitParticipant]] = []
_losses: list[str] = []


def create_exit_reason_file() -> None:
    """Create a memory file in which this process records, at its end, the reason for other ranks to read.

    Nothing is created for a single process, or on a system without memory files.
    """
    if detect_rank() and not _notes and hasattr(os, "memfd_create"):
        _notes.append(os.memfd_create(NOTE))
        atexit.register(_end_rank, os.getpid())


def register_exit_participant(partner: ExitParticipant) -> None:
    """Register a participant, which is told at the end of this process.

    If it is alive then, its methods `announce_end` and `await_exit_announcements` are called.
    """
    _partners.append(ref(partner))


def format_failure_reason(error: BaseException) -> str:
    """Format an error as one line that tells the other ranks why this rank fails.

    An error that already reports the failure of another rank keeps its line unchanged.
    """
    text = str(error) if type(error).__name__ == "RanksError" else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:MAX_REASON]


def record_lost_rank(why: str) -> None:
    """Record that a rank is lost, and why. At its end, this process then skips the end of MPI.

    MPI would wait for the lost rank forever.
    """
    _losses.append(why)


def _end_rank(pid: int) -> None:
    if os.getpid() != pid:  # a child that was forked
        return
    error = getattr(sys, "last_value", None)
    why = ENDED if error is None else format_failure_reason(error)
    os.write(_notes[0], why.encode(errors="replace"))
    partners = [partner for known in _partners if (partner := known()) is not None]
    for partner in partners:
        partner.announce_end(why)
    for partner in partners:
        partner.await_exit_announcements()
    if _losses:
        if error is None:
            os.write(2, f"hocket: {_losses[0]}\n".encode())
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(1)


def is_process_suspended(pid: int) -> bool:
    """Return whether SIGSTOP suspends a process of this machine; False if the system gives no information."""
    return _read_process_state_and_parent(pid)[:1] in ("T", "t")


def resume_stopped_supervisor() -> None:
    """Resume the parent process, the supervisor, by SIGCONT if it is stopped, because both have to end together."""
    if is_process_suspended(os.getppid()):
        os.kill(os.getppid(), signal.SIGCONT)


def _read_process_state_and_parent(pid: int) -> str:
    """Return the part of ``/proc/PID/stat`` from the state letter on, or "" if there is no such process.

    The second field of this part is the process id of the parent.
    """
    with suppress(OSError):
        return (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(") ")[2]
    return ""


def _find_sibling_ranks() -> Iterator[tuple[int, int]]:
    """Yield (rank, process id) of each other process that the same launcher has started on this machine."""
    parent = str(os.getppid())
    for entry in PROC.glob("[0-9]*"):
        pid = int(entry.name)
        if _read_process_state_and_parent(pid).split(" ", 2)[1:2] == [parent] and pid != os.getpid():
            with suppress(OSError, ValueError):
                words = (entry / "environ").read_bytes().split(b"\0")
                variables = dict(word.decode(errors="replace").partition("=")[::2] for word in words)
                rank = next((variables[name] for _, name, _ in LAUNCHERS if name in variables), None)
                if rank is not None:
                    yield int(rank), pid


def await_end_of_local_ranks(seconds: float) -> None:
    """Wait until the ranks of this machine have ended, but at most `seconds`.

    The processes that the launcher started are supervisors. The ranks are their child processes.
    """
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        supervisors = {str(pid) for _, pid in _find_sibling_ranks()}
        if not supervisors & set(_list_parents_of_running_processes()):
            return
        time.sleep(POLL_SECONDS / 10)


def _list_parents_of_running_processes() -> Iterator[str]:
    """Yield the parent's process id of each running process of this machine.

    Stopped and ended processes are left out.
    """
    for entry in PROC.glob("[0-9]*"):
        state, _, rest = _read_process_state_and_parent(int(entry.name)).partition(" ")
        if state not in ("", "Z", "X", "T", "t"):
            yield rest.partition(" ")[0]


def _read_exit_reason(pid: int) -> str | None:
    """Read the exit reason that the rank with process id `pid` has recorded; "" while it runs.

    Returns None if the process has no file, for example before it imports hocket.
    """
    with suppress(OSError):
        for link in (PROC / str(pid) / "fd").iterdir():
            with suppress(OSError):
                if os.readlink(link).startswith(f"/memfd:{NOTE}"):
                    return link.read_text(errors="replace")
    return None


class AbsentRankDetector:
    """Finds ranks of this machine that will never arrive, while this rank waits for them."""

    def __init__(self, ranks: Collection[int]) -> None:
        """Begin the wait for `ranks`, which are numbers in ``MPI.COMM_WORLD``."""
        self._ranks, self._start = ranks, time.monotonic()
        self._last_poll = self._start
        self._processes: dict[int, int] = {}
        self._stopped: dict[int, float] = {}

    def find_absent_rank(self) -> tuple[int, str] | None:
        """Find a rank that will never arrive, and return its number and the reason, or None."""
        now = time.monotonic()
        if now - self._last_poll < POLL_SECONDS:
            return None
        self._last_poll = now
        self._processes.update((rank, pid) for rank, pid in _find_sibling_ranks() if rank in self._ranks)
        for rank, pid in self._processes.items():
            if why := self._find_reason(rank, pid, now):
                return rank, why
        return None

    def _find_reason(self, rank: int, pid: int, now: float) -> str:
        if _read_process_state_and_parent(pid)[:1] in ("", "Z", "X"):
            record_lost_rank("it was killed")
            return "its process is gone: it was killed, or ended without a word"
        if is_process_suspended(pid):
            if now - self._stopped.setdefault(rank, now) <= STOPPED_SECONDS:
                return ""
            record_lost_rank("it was stopped")
            return "it was stopped (SIGSTOP)"
        self._stopped.pop(rank, None)
        note = _read_exit_reason(pid)
        if note is None and now - self._start > IMPORT_SECONDS:
            return f"it has not imported hocket for {IMPORT_SECONDS:.0f} s: it ended, or imports hocket late"
        return note or ""
