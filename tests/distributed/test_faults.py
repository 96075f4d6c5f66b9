"""A rank that fails: all others end soon, with a line that names the rank and its machine, and no process remains."""

from __future__ import annotations

import socket

import pytest

from hocket.distributed.presence import STOPPED_SECONDS
from hocket.distributed.world import FAILED_RANK_LINGER_SECONDS, SHUTDOWN_GRACE_SECONDS, SILENCE_TIMEOUT_SECONDS
from hocket.scheduler.runtime.bound_plan import MAX_RANK_WAIT_SECONDS

from ..given.models.goldens import TINY
from ..given.ranks.mpi import hocket_in, left_behind, needs_mpi

MESSAGES = {
    "killed": "nothing was heard of it for 2 s",
    "stopped": "nothing was heard of it for 2 s",
    "leaves": "nothing was heard of it for 2 s",
    "hangs": "it did not come within 2 s",
    "terminated": "it was told to end (SIGTERM)",
    "interrupted": "it was interrupted (Ctrl-C)",
    "raises": "the disk is full",
    "breaks": "ZeroDivisionError: a mistake",
    "elsewhere": "cannot be opened",
}
NIGHTLY_FAULTS = ("stopped", "leaves", "interrupted", "breaks")
"""Nightly faults. They differ from others in the text of the message or in the last step of a rank."""


@needs_mpi
@pytest.mark.long
@pytest.mark.parametrize(
    "fault",
    [pytest.param(name, marks=pytest.mark.nightly(cases=0) if name in NIGHTLY_FAULTS else ()) for name in MESSAGES],
)
def test_a_rank_that_goes_wrong_ends_all(fault, tmp_path):
    state = tmp_path / f"{fault}.state"
    done = went_wrong(fault, 3, "--save-state", state)
    assert done.code
    expected = f"hocket: rank 1 on {socket.gethostname()}: "
    others = [line for line in done.lines if line.startswith(expected) and MESSAGES[fault] in line]
    assert len(others) >= 2, done
    assert not list(tmp_path.iterdir())
    assert not left_behind(str(state))


@needs_mpi
@pytest.mark.long
@pytest.mark.parametrize("what", ["hocket", "numpy"])
def test_ranks_of_other_versions_do_not_begin(what):
    done = went_wrong(f"another {what}", 2)
    assert done.code
    assert f"rank 1 on {socket.gethostname()} has another version of {what}" in done.lines[0].replace("NumPy", "numpy")


@needs_mpi
@pytest.mark.long
def test_a_rank_that_comes_late_is_waited_for():
    done = went_wrong("late", 2)
    assert done.code == 0, done


def test_a_failure_is_known_to_all_within_ten_seconds():
    assert (
        max(SILENCE_TIMEOUT_SECONDS, STOPPED_SECONDS, MAX_RANK_WAIT_SECONDS)
        + SHUTDOWN_GRACE_SECONDS
        + FAILED_RANK_LINGER_SECONDS
        < 10
    )


def went_wrong(fault, ranks, *more):
    words = ("run", TINY, "-n", 9, "--temp", 0, "--ignore-eos", "-p", "a", "-t", 1, "--devices", "numpy:0", *more)
    return hocket_in(ranks, *words, fault=fault)
