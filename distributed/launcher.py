"""Detection of the launcher of this process (mpiexec or srun), and the supervisor process of a rank.

A launcher ends all ranks as soon as one rank ends, before a rank can print the reason. A rank therefore runs in a child
of the launched process. The launched process is the supervisor of the rank and stays until the other ranks have printed
their reasons.
"""

from __future__ import annotations

import ctypes
import os
import platform
import select
import signal
import sys
import time
from typing import NoReturn

from ..graph.lazy_dataclass import dataclass
from .presence import await_end_of_local_ranks, detect_rank
from .world import FAILED_RANK_LINGER_SECONDS, SHUTDOWN_GRACE_SECONDS, SILENCE_TIMEOUT_SECONDS

START_TIMEOUT_SECONDS = 60.0
"""Maximum seconds for the start of all ranks."""
FINALIZE_SECONDS = 4.0
"""Maximum seconds for which a supervisor waits until the other ranks of its machine have finalized MPI."""
DIES_WITH_PARENT = 1
"""``PR_SET_PDEATHSIG`` of Linux: a signal to this process at the end of its parent."""


@dataclass(frozen=True, slots=True)
class LaunchInfo:
    """The launcher of this process, the rank of this process, and the number of ranks."""

    launcher: str
    rank: int
    size: int


def detect_launcher_and_rank() -> LaunchInfo | None:
    """Return the launcher, the rank of this process and the number of ranks; None for a single process."""
    found = detect_rank()
    return LaunchInfo(*found) if found else None


def fork_supervisor_and_return_in_child(launch: LaunchInfo) -> int:
    """Fork this process into a supervisor (the parent) and a child that runs the program; return only in the child.

    The parent waits for the child and ends with its exit code.

    Returns:
        The file descriptor of the pipe to the supervisor, for `report_next_launch_phase`.
    """
    reading, writing = os.pipe()
    parent, child = os.getpid(), os.fork()
    if child:
        os.close(writing)
        _supervise_child_and_exit(child, reading, launch)
    os.close(reading)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(2)
    return writing


def report_next_launch_phase(pipe: int) -> None:
    """Tell the supervisor about the progress of the run.

    The first call means that all ranks have started, the second call that all ranks have ended.
    """
    os.write(pipe, b"1")


def _supervise_child_and_exit(child: int, progress_pipe: int, launch: LaunchInfo) -> NoReturn:
    """Wait for the end of the process `child`, and end this process with the same exit code.

    The child is killed if not all ranks start in time.

    Args:
        child: The process id.
        progress_pipe: The pipe of `report_next_launch_phase`.
        launch: The launcher, rank and number of ranks, for messages.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal and mpiexec send it to both
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda n, _: os.kill(child, n))
    came = select.select([progress_pipe], [], [], START_TIMEOUT_SECONDS)[0]  # also readable after the end of the child
    if not came:
        why = f"only some of {launch.size} ranks have started within {START_TIMEOUT_SECONDS:.0f} s"
        os.write(2, f"hocket: rank {launch.rank} on {platform.node()}: {why}\n".encode())
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    code = os.waitstatus_to_exitcode(status)
    if code < 0 or (code == 0 and len(os.read(progress_pipe, 2)) < 2):
        # The child ended without a notice. The other ranks find out and print it before the launcher ends them.
        time.sleep(SILENCE_TIMEOUT_SECONDS + SHUTDOWN_GRACE_SECONDS + FAILED_RANK_LINGER_SECONDS)
        code = 128 - code
    if code:  # mpiexec kills a rank that has not finalized MPI when another ends with an error
        await_end_of_local_ranks(FINALIZE_SECONDS)
    os._exit(code)
