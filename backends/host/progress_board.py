"""The signal pad of a device group: host memory in which devices report their progress (`Comm.signal_pad`)."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

FAILURE_WORD = 8
"""Index of the word that is set when a member fails."""
FIRST_MEMBER_WORD, WORDS_PER_MEMBER, RUN_NUMBER_WORD = 16, 8, 4
"""Index of the first word of the first member; number of words per member; index of the run number in these words."""


def make_signal_pad(size: int) -> npt.NDArray[np.int64]:
    """Make zeroed memory in which `size` devices report their progress, in pages that a GPU driver can pin."""
    return np.frombuffer(mmap.mmap(-1, 8 * (16 + 8 * size)), np.int64)


def view_run_numbers(signal_pad: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return a writable view of the run numbers of all devices of the group: their progress in runs.

    The numbers differ while devices are in different runs.
    """
    return signal_pad[FIRST_MEMBER_WORD + RUN_NUMBER_WORD :: WORDS_PER_MEMBER]


def set_run_numbers_to_highest_and_clear_failure(signal_pad: npt.NDArray[np.int64]) -> None:
    """Bring all devices of a group to the same run number, the highest one, and clear a reported failure.

    The caller ensures that no device waits.
    """
    last = view_run_numbers(signal_pad).max()
    if signal_pad[FAILURE_WORD]:
        signal_pad[:] = 0
    view_run_numbers(signal_pad)[:] = last
