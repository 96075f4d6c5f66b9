"""The board of a group of devices: host memory in which they tell each other how far they are (`Comm.board`)."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

BOARD_FAILED, BOARD_RUN = 8, 9
"""Words: whether a member failed, and how many runs have ended."""


def new_board(size: int) -> npt.NDArray[np.int64]:
    """The board of so many devices: zeros, in pages of their own, which a driver may pin."""
    return np.frombuffer(mmap.mmap(-1, 8 * (16 + 8 * size)), np.int64)


def end_run(board: npt.NDArray[np.int64]) -> None:
    """A run is over, and nobody waits: what a failed one left is forgotten."""
    run = board[BOARD_RUN] + 1
    if board[BOARD_FAILED]:
        board[:] = 0
    board[BOARD_RUN] = run
