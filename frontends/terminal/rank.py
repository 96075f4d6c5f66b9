"""A command in one of several processes: it begins, goes on and ends together with the others."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

import numpy as np

from ...distributed import RanksError, World
from ...distributed.launcher import LaunchInfo, notify_supervisor, run_under_supervisor
from ...distributed.mpi_link import MpiLink
from ...distributed.world import SILENCE_TIMEOUT_SECONDS
from ...graph.errors import HocketError
from .arguments import one_line

DO = "install the same on all machines"


def run_rank(
    launch: LaunchInfo, run: Callable[[World], int], said: Callable[[Exception], str], *, version: str, debug: bool
) -> int:
    """Run a command as the rank that `launch` says, and return its exit code once all ranks have ended well; `said`
    makes a line of an error.  Where one fails, all processes end here.

    Rank 0 alone reads and writes the terminal; of the others one line comes where something fails.
    """
    pipe = run_under_supervisor(launch)
    try:
        link = MpiLink()
    except HocketError as why:
        sys.exit(f"hocket: rank {launch.rank}: {one_line(str(why))}")
    notify_supervisor(pipe)
    world = World(link, ends_process=True)
    signal.signal(signal.SIGTERM, lambda number, frame: _terminated(world, number, frame))
    if world.rank:
        sys.stdin, sys.stdout, sys.stderr = open(os.devnull), open(os.devnull, "w"), open(os.devnull, "w")  # noqa: SIM115
    try:
        if world.size != launch.size:
            raise RanksError(
                f"{launch.launcher} started {launch.size} processes, but MPI sees {world.size}; "
                "use the mpiexec of the MPI that mpi4py was built for, or srun --mpi=pmi2"
            )
        world.require_agreement("version of hocket", version, DO)
        world.require_agreement("version of NumPy", np.__version__, DO)
        code = run(world)
        world.leave()
    except SystemExit as end:  # of wrong usage, which is said
        code = end.code if isinstance(end.code, int) else 1
        try:
            world.leave(SILENCE_TIMEOUT_SECONDS if code else None)
        except RanksError:
            world.end(code or 2)
    except KeyboardInterrupt:
        world.end(130, "it was interrupted (Ctrl-C)")
    except (HocketError, OSError, MemoryError) as why:
        if debug:
            sys.excepthook(type(why), why, why.__traceback__)
        world.end(2, "" if world.failure else one_line(said(why)))
    except BaseException as why:
        sys.__excepthook__(type(why), why, why.__traceback__)
        world.end(1, one_line(f"{type(why).__name__}: {why}"))
    notify_supervisor(pipe)
    return code


def _terminated(world: World, number: int, frame: FrameType | None) -> NoReturn:
    world.end(128 + number, "it was told to end (SIGTERM)")
