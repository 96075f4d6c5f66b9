"""One suite for all communicators: threads of one process, packets between ranks, MPI."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hocket.graph.errors import BackendError
from hocket.ranks import RanksError
from hocket.ranks.arrays import packed, unpacked
from hocket.scheduler.running.comm import Meeting

from ..given.ranks import meetings
from ..given.ranks.meetings import CASES, member
from ..given.ranks.mpi import mpiexec, needs_mpi
from ..given.ranks.thread_link import in_threads
from ..given.waits import HOUR


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_devices_of_one_process_meet(case):
    meeting = Meeting(3, HOUR)
    with ThreadPoolExecutor(3) as threads:
        for one in [threads.submit(case, meeting.member(rank)) for rank in range(3)]:
            one.result()


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("size", [2, 3])
def test_devices_of_several_ranks_meet(size, hosts):
    in_threads(size, lambda world: [case(member(world)) for case in CASES], hosts=hosts)


@needs_mpi
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.long())])
def test_devices_meet_over_mpi(size):
    done = mpiexec(size, meetings.__file__)
    assert (done.code, done.out) == (0, f"{len(CASES)} cases\n"), done


def test_ranks_that_do_not_agree_are_named_on_all_of_them():
    def run(world):
        with pytest.raises(RanksError, match="rank 1 on machine1 has another plan: b1, rank 0 on machine0 has b0; do"):
            world.agree("plan", f"b{min(world.rank, 1)}", "do")

    in_threads(3, run, hosts=3)


def test_a_rank_that_is_done_waits_for_one_that_is_not():
    assert in_threads(2, lambda world: time.sleep(0.3 * world.rank)) == [None, None]


def test_whoever_waits_hears_that_another_rank_failed():
    def run(world):
        if world.rank == 1:
            world.fail("the disk is full")
        with pytest.raises(BackendError, match="rank 1 on machine1: the disk is full"):
            world.from_first(lambda: world.everyones(b""))
        raise ArithmeticError("ended")

    with pytest.raises(ArithmeticError):
        in_threads(2, run, hosts=2)


def test_a_packet_of_another_meeting_or_another_size_is_refused():
    packet = packed(np.ones((2, 3), np.float32), 4)
    assert np.array_equal(unpacked(packet, "rank 1", 4), np.ones((2, 3)))
    with pytest.raises(RanksError, match="rank 1 is at meeting 4, and is expected at 5"):
        unpacked(packet, "rank 1", 5)
    with pytest.raises(RanksError, match="rank 1 sent 56 bytes"):
        unpacked(packet[:-8], "rank 1", 4)
