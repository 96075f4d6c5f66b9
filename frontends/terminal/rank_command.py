"""Run of a command as one rank of several processes, which start and end together."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

import numpy as np

from ...distributed import RanksError, World
from ...distributed.launcher import LaunchInfo, fork_supervisor_and_return_in_child, report_next_launch_phase
from ...distributed.mpi_link import MpiLink
from ...distributed.world import SILENCE_TIMEOUT_SECONDS
from ...graph.errors import HocketError
from .arguments import escape_as_one_line

SAME_INSTALLATION_HINT = "install the same on all machines"


def run_command_as_rank(
    launch: LaunchInfo,
    run: Callable[[World], int],
    format_error: Callable[[Exception], str],
    *,
    version: str,
    debug: bool,
) -> int:
    """Run a command in this process as one of several ranks, and return its exit code after all ranks have ended.

    If a rank fails, all processes end. Only rank 0 reads and writes the terminal; others write one line on an error.

    Args:
        launch: The rank and the number of processes from the environment.
        run: The command.
        format_error: Formats an exception as a message.
        version: Version of hocket, which all ranks must share.
        debug: Whether to show the traceback of an error.
    """
    pipe = fork_supervisor_and_return_in_child(launch)
    try:
        link = MpiLink()
    except HocketError as error:
        sys.exit(f"hocket: rank {launch.rank}: {escape_as_one_line(str(error))}")
    report_next_launch_phase(pipe)
    world = World(link, ends_process=True)
    signal.signal(signal.SIGTERM, lambda number, frame: _on_terminate(world, number, frame))
    if world.rank:
        sys.stdin, sys.stdout, sys.stderr = open(os.devnull), open(os.devnull, "w"), open(os.devnull, "w")  # noqa: SIM115
    try:
        if world.size != launch.size:
            raise RanksError(
                f"{launch.launcher} started {launch.size} processes, but MPI sees {world.size}; "
                "use the mpiexec of the MPI that mpi4py was built for, or srun --mpi=pmi2"
            )
        world.require_agreement("version of hocket", version, SAME_INSTALLATION_HINT)
        world.require_agreement("version of NumPy", np.__version__, SAME_INSTALLATION_HINT)
        code = run(world)
        world.wait_for_all_ranks_and_close()
    except SystemExit as end:  # wrong usage, already reported
        code = end.code if isinstance(end.code, int) else 1
        try:
            world.wait_for_all_ranks_and_close(SILENCE_TIMEOUT_SECONDS if code else None)
        except RanksError:
            world.end_process_after_rank_failure(code or 2)
    except KeyboardInterrupt:
        world.end_process_after_rank_failure(130, "it was interrupted (Ctrl-C)")
    except (HocketError, OSError, MemoryError) as error:
        if debug:
            sys.excepthook(type(error), error, error.__traceback__)
        world.end_process_after_rank_failure(2, "" if world.failure else escape_as_one_line(format_error(error)))
    except BaseException as error:
        sys.__excepthook__(type(error), error, error.__traceback__)
        world.end_process_after_rank_failure(1, escape_as_one_line(f"{type(error).__name__}: {error}"))
    report_next_launch_phase(pipe)
    return code


def _on_terminate(world: World, number: int, frame: FrameType | None) -> NoReturn:
    world.end_process_after_rank_failure(128 + number, "it was told to end (SIGTERM)")
