"""How this process was started: alone, or as one of several by mpiexec, srun or their like; and who keeps it.

A launcher ends all ranks the moment one of them is gone, before any can say why.  So a rank runs in a child of the
process that was launched, its keeper, which stays until the others have had time to speak.
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
from .presence import place
from .world import GRACE, LINGER, SILENCE

START = 60.0
"""Seconds within which all ranks must have started."""
DIES_WITH_PARENT = 1
"""``PR_SET_PDEATHSIG`` of Linux."""


@dataclass(frozen=True, slots=True)
class Launch:
    """This process is number `rank` of `size` that `by` started."""

    by: str
    rank: int
    size: int


def launched() -> Launch | None:
    """How this process was started; None if it is the only one."""
    found = place()
    return Launch(*found) if found else None


def keep(launch: Launch) -> int:
    """Go on in a child, which this process keeps.  Returns, in the child, what to give to `tell`."""
    reading, writing = os.pipe()
    parent, child = os.getpid(), os.fork()
    if child:
        os.close(writing)
        _keep(child, reading, launch)
    os.close(reading)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(2)
    return writing


def tell(keeper: int) -> None:
    """Tell the keeper, the first time that all ranks are there, the second that all have done their work."""
    os.write(keeper, b"1")


def _keep(child: int, reading: int, launch: Launch) -> NoReturn:
    """Wait for `child` and end as it did."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal and mpiexec send it to both
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda n, _: os.kill(child, n))
    came = select.select([reading], [], [], START)[0]  # it is readable, too, when the child has ended
    if not came:
        why = f"only some of {launch.size} ranks have started within {START:.0f} s"
        os.write(2, f"hocket: rank {launch.rank} on {platform.node()}: {why}\n".encode())
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    code = os.waitstatus_to_exitcode(status)
    if code < 0 or (code == 0 and len(os.read(reading, 2)) < 2):
        # It ended and said nothing: the others notice, and say so, before the launcher ends them.
        time.sleep(SILENCE + GRACE + LINGER)
        code = 128 - code
    os._exit(code)
