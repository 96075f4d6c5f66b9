"""The board of a group of devices: host memory in which they tell each other how far they are (`Comm.board`)."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

BOARD_FAILED = 8
"""The word that says whether a member failed."""
FIRST, EACH, RUN = 16, 8, 4
"""Words of the members: where the first's begin, how many each has, and which of them is the number of its run."""


def new_board(size: int) -> npt.NDArray[np.int64]:
    """The board of so many devices: zeros, in pages of their own, which a driver may pin."""
    return np.frombuffer(mmap.mmap(-1, 8 * (16 + 8 * size)), np.int64)


def runs_of(board: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The number of the run that each member is in, or has ended: all go through the same, though not at once."""
    return board[FIRST + RUN :: EACH]


def end_runs(board: npt.NDArray[np.int64]) -> None:
    """Nobody waits: what a run that failed has left is forgotten, and all begin the next one with the same number."""
    last = runs_of(board).max()
    if board[BOARD_FAILED]:
        board[:] = 0
    runs_of(board)[:] = last
