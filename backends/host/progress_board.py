"""The signal pad of a device group: host memory in which devices report their progress (`Comm.signal_pad`)."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

FAILURE_WORD = 8
"""Index of the word that is set when a member fails."""
FIRST_MEMBER_WORD, WORDS_PER_MEMBER, RUN_NUMBER_WORD = 16, 8, 4
"""Word indices: the first word of the first member, words per member, and the word of the run number of a member."""


def make_signal_pad(size: int) -> npt.NDArray[np.int64]:
    """Return a zeroed signal pad for `size` devices, in pages of its own, which a driver may pin."""
    return np.frombuffer(mmap.mmap(-1, 8 * (16 + 8 * size)), np.int64)


def view_run_numbers(board: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return a view of the run number of each member; members go through the same runs at different times."""
    return board[FIRST_MEMBER_WORD + RUN_NUMBER_WORD :: WORDS_PER_MEMBER]


def reset_run_numbers(board: npt.NDArray[np.int64]) -> None:
    """Give all members the same run number and clear the pad after a failed run. No member may be waiting."""
    last = view_run_numbers(board).max()
    if board[FAILURE_WORD]:
        board[:] = 0
    view_run_numbers(board)[:] = last
