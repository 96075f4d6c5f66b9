"""One suite for all communicators: threads of one process, packets between ranks, MPI, CUDA devices with NCCL (its
stand-in) or over each other's memory."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hocket.backends.cupy import cuda_driver
from hocket.backends.cupy.emulation.emulated_driver import EmulatedBackend
from hocket.distributed import RanksError
from hocket.distributed import world as ranks_world
from hocket.distributed.array_packets import PACKET_HEADER, pack_array, unpack_array
from hocket.distributed.thread_group import ThreadGroup
from hocket.distributed.world import DATA
from hocket.graph.errors import BackendError
from hocket.scheduler.runtime.communicators import CollectiveGroups

from ..given.devices.emulation import needs_compiler
from ..given.devices.joined import JoinedDevices
from ..given.fakes.fake_nccl import backend_of
from ..given.ranks import meetings
from ..given.ranks.meetings import CASES, run_cases, sends_along_a_chain, sums_in_the_narrowest_dtype
from ..given.ranks.mpi import left_behind, mpiexec, needs_mpi
from ..given.ranks.thread_link import ThreadLink, in_threads
from ..given.waits import WAIT_SECONDS


def cases(*left_out):
    """All but these."""
    return pytest.mark.parametrize(
        "case", [case for case in CASES if case not in left_out], ids=lambda case: case.__name__
    )


def run_on(members, case):
    """The case on all of them, a thread each."""
    with ThreadPoolExecutor(len(members)) as threads:
        for one in [threads.submit(case, member) for member in members]:
            one.result()


@cases()
def test_devices_of_one_process_run_collectives(case):
    threads = ThreadGroup(3, WAIT_SECONDS)
    run_on([threads.member(rank) for rank in range(3)], case)


@cases(sends_along_a_chain)
def test_devices_of_one_process_run_collectives_in_groups(case):
    """Letters go by the numbers of all devices, so that a chain of a team is none."""
    groups = CollectiveGroups([(0, 2), (1, 3), (0, 2), (1, 3)], WAIT_SECONDS)
    run_on([groups.member(number) for number in range(4)], case)


@pytest.fixture(params=["NCCL", "peers"])
def cuda_like(request, monkeypatch):
    """Devices that only NCCL joins, and such as reach each other's memory."""
    yield backend_of(monkeypatch, are_peers=False)[0] if request.param == "NCCL" else EmulatedBackend()
    cuda_driver._compile_and_load_module.cache_clear()


@needs_compiler
@cases(sums_in_the_narrowest_dtype)
def test_cuda_devices_run_collectives(case, cuda_like):
    """Devices of one backend all keep the same digits."""
    place = JoinedDevices(cuda_like, range(3))
    run_on([place.member(rank) for rank in range(3)], case)


@needs_compiler
@cases(sums_in_the_narrowest_dtype, sends_along_a_chain)
def test_cuda_devices_run_collectives_in_groups(case, cuda_like):
    groups = [JoinedDevices(cuda_like, numbers, group_size=4) for numbers in ((0, 2), (1, 3))]
    run_on([group.member(rank) for group in groups for rank in range(2)], case)


EACH = [(1, 1), (1, 1, 1), (2, 2), (2, 2, 2), (3, 1), (2, 1, 3)]
"""Devices of each rank."""


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("each", EACH, ids=str)
def test_devices_of_several_ranks_run_collectives(each, hosts):
    in_threads(len(each), lambda world: run_cases(world, each), hosts=hosts)


@needs_mpi
@pytest.mark.parametrize(
    "each",
    [
        EACH[0],
        *(pytest.param(each, marks=[pytest.mark.long(), pytest.mark.nightly(cases=0)]) for each in EACH[1:-1]),
        pytest.param(EACH[-1], marks=pytest.mark.long()),
    ],
    ids=str,
)
def test_devices_run_collectives_over_mpi(each, tmp_path):
    done = mpiexec(len(each), meetings.__file__, tmp_path, *each)
    assert (done.code, done.out) == (0, f"{len(CASES)} cases\n"), done
    assert not left_behind(str(tmp_path)), "it is on their command lines, and on no others"


@pytest.mark.parametrize(("op", "times"), [("all_reduce", 1), ("reduce_scatter", 1), ("all_gather", 2)])
def test_no_byte_goes_to_another_rank_twice(op, times, monkeypatch):
    """Check that the sum of two summands of a rank goes to the other rank once, in two slices.

    Of separate values both parts go to the other rank.
    """
    count, sent = 1 << 12, {}
    post = ThreadLink.send

    def record_packet(link, to, channel, packet):
        if channel >= DATA:
            sent.setdefault((link.rank, to), []).append(len(packet))
        post(link, to, channel, packet)

    monkeypatch.setattr(ThreadLink, "send", record_packet)

    def run(world):
        place = meetings.make_rank_group(world, (2, 2))
        into, parts = np.empty(4 * count, np.float32), [[(slice(0, count), slice(0, count))]] * 4

        def call_collectives(member):
            source = np.ones(count, np.float32)
            if op == "all_reduce":
                member.all_reduce(source, source, source, 0)
            elif op == "reduce_scatter":
                member.reduce_scatter(source, np.empty(count, np.float32), parts[0], 0)
            else:
                member.all_gather(source, into, parts, 0)

        with ThreadPoolExecutor(2) as threads:
            for one in [
                threads.submit(call_collectives, place.member(number)) for number in place.between.local_devices
            ]:
                one.result()

    in_threads(2, run)
    assert sent.keys() == {(0, 1), (1, 0)}
    assert {len(packets) for packets in sent.values()} == {2}
    assert {sum(packets) - 2 * (PACKET_HEADER.size + 8) for packets in sent.values()} == {4 * count * times}


def test_ranks_that_do_not_agree_are_named_on_all_of_them():
    def run(world):
        with pytest.raises(RanksError, match="rank 1 on machine1 has another plan: b1, rank 0 on machine0 has b0; do"):
            world.require_agreement("plan", f"b{min(world.rank, 1)}", "do")

    in_threads(3, run, hosts=3)


def test_a_rank_that_is_done_waits_for_one_that_is_not():
    assert in_threads(2, lambda world: time.sleep(0.3 * world.rank)) == [None, None]


@pytest.mark.long
def test_a_wait_for_a_rank_that_has_ended_is_an_error():
    """The ranks have other flags: rank 0 prints a plan, and the others follow a server."""

    def run(world):
        if world.rank == 0:
            return world.wait_for_all_ranks_and_close()
        return world.broadcast_from_rank_0(lambda: b"")

    with pytest.raises(RanksError, match="it still waits for rank 0 on machine0, which has ended; give all ranks"):
        in_threads(2, run, hosts=2)


def test_bytes_from_before_the_end_of_a_rank_arrive(monkeypatch):
    monkeypatch.setattr(ranks_world, "SHUTDOWN_GRACE_SECONDS", 0.0)

    def run(world):
        time.sleep(0.3 * world.rank)
        return world.broadcast_from_rank_0(lambda: b"a plan")

    assert in_threads(2, run) == [b"a plan"] * 2


def test_whoever_waits_hears_that_another_rank_failed():
    def run(world):
        if world.rank == 1:
            world.announce_failure("the disk is full")
        with pytest.raises(BackendError, match="rank 1 on machine1: the disk is full"):
            world.broadcast_from_rank_0(lambda: world.all_gather_bytes(b""))
        raise ArithmeticError("ended")

    with pytest.raises(ArithmeticError):
        in_threads(2, run, hosts=2)


def test_a_packet_of_another_collective_or_another_size_is_refused():
    packet = pack_array(np.ones((2, 3), np.float32), 4)
    assert np.array_equal(unpack_array(packet, "rank 1", 4), np.ones((2, 3)))
    with pytest.raises(RanksError, match="rank 1 is at collective 4, and is expected at 5"):
        unpack_array(packet, "rank 1", 5)
    with pytest.raises(RanksError, match="rank 1 sent 56 bytes"):
        unpack_array(packet[:-8], "rank 1", 4)
