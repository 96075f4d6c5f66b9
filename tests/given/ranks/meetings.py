"""The contract of every communicator over any transport: each case is one member's part, and checks its result.

As a script it runs all cases over MPI, with one device of each rank or the given numbers: ``mpiexec -n 3 python
meetings.py WORD 2 1 2`` (a word that marks its processes).
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from hocket.backends.base import Device
from hocket.distributed.rank_group import DevicePlacement, RankGroup
from hocket.graph.dtypes import DType

HOUR = 3600.0


def source(rank, shape, dtype=np.float32):
    return np.random.default_rng(rank).normal(size=shape).astype(dtype)


def sources_of_all(comm, shape, dtype=np.float32):
    return [source(rank, shape, dtype) for rank in range(comm.size)]


def sums_a_little(comm):
    sums(comm, (3, 5), 0)


def sums_much(comm):
    sums(comm, (301, 257), 1)


def sums(comm, shape, sequence):
    """Check that all have the same bits: summed in the order of members, within a rank first, unless a library
    has its own.
    """
    into = np.empty(shape, np.float32)
    comm.all_reduce(source(comm.rank, shape), into, np.empty(shape, np.float32), sequence)
    within: dict[object, np.ndarray] = {}
    for member, one in enumerate(sources_of_all(comm, shape)):
        rank = getattr(comm.devices[member], "rank", None) if comm.devices else 0
        within[rank] = within[rank] + one if rank in within else one
    first, *others = within.values()
    for other in others:
        first = first + other
    gathered_sources = np.empty((comm.size * shape[0], shape[1]), np.float32)
    rows = [(slice(rank * shape[0], (rank + 1) * shape[0]),) for rank in range(comm.size)]
    comm.all_gather(into, gathered_sources, [[(place, (slice(0, shape[0]),))] for place in rows], sequence + 30)
    assert all(np.array_equal(gathered_sources[place], into) for place in rows)
    assert np.array_equal(into, first) if getattr(comm, "keeps_order", True) else np.allclose(into, first, atol=1e-6)


def sums_in_place(comm):
    own = source(comm.rank, (7,))
    comm.all_reduce(own, own, np.empty(7, np.float32), 2)
    assert np.allclose(own, sum(sources_of_all(comm, (7,))), atol=1e-6)


def sums_what_is_not_dense(comm):
    own, into = source(comm.rank, (6, 4)).T, np.empty((4, 6), np.float32)
    comm.all_reduce(own, into, np.empty((4, 6), np.float32), 3)
    assert np.allclose(into, sum(sources_of_all(comm, (6, 4))).T, atol=1e-6)


def sums_in_the_narrowest_dtype(comm):
    """A member that keeps more digits than another ends with the other's."""
    own = source(comm.rank, (9,), np.float64 if comm.rank else np.float32)
    into = np.empty(9, own.dtype)
    comm.all_reduce(own, into, np.empty(9, own.dtype), 4)
    assert np.array_equal(into, into.astype(np.float32))


def gathers_uneven_parts(comm):
    parts = [[((slice(None), slice(r * 8, r * 8 + r)), (slice(None), slice(0, r)))] for r in range(comm.size)]
    into = np.zeros((2, 8 * comm.size), np.float32)
    comm.all_gather(source(comm.rank, (2, comm.rank)), into, parts, 5)
    for rank in range(comm.size):
        assert np.array_equal(into[:, 8 * rank : 8 * rank + rank], source(rank, (2, rank)))


def scatters_a_sum(comm):
    into = np.empty((2, 3), np.float32)
    mine = slice(3 * comm.rank, 3 * comm.rank + 3)
    parts = [((slice(None), slice(0, 3)), (slice(None), mine))]
    comm.reduce_scatter(source(comm.rank, (2, 3 * comm.size)), into, parts, 6)
    assert np.allclose(into, sum(sources_of_all(comm, (2, 3 * comm.size)))[:, mine], atol=1e-6)


def sends_along_a_chain(comm):
    """Send more than a link buffers at once."""
    into = source(0, (700_000,))
    if comm.rank:
        into = np.empty(700_000, np.float32)
        comm.receive(into, comm.rank - 1, 7 + comm.rank)
    if comm.rank + 1 < comm.size:
        comm.send(into, comm.rank + 1, 8 + comm.rank)
    assert np.array_equal(into, source(0, (700_000,)))


def sums_nothing(comm):
    comm.all_reduce(np.empty((0, 3), np.float32), np.empty((0, 3), np.float32), np.empty((0, 3), np.float32), 20)


CASES = (
    sums_a_little,
    sums_much,
    sums_in_place,
    sums_what_is_not_dense,
    sums_in_the_narrowest_dtype,
    gathers_uneven_parts,
    scatters_a_sum,
    sends_along_a_chain,
    sums_nothing,
)


def make_rank_group(world, each=(1, 1, 1, 1)):
    """Build the communicator of these numbers of devices per rank."""
    ranks = [rank for rank in range(world.size) for _ in range(each[rank])]
    devices = [Device("numpy", i, rank=rank) for i, rank in enumerate(ranks)]
    return RankGroup(DevicePlacement(world, ranks), devices, HOUR, DType.F32)


def run_cases(world, each=(1, 1, 1, 1)):
    """All cases on all devices of this rank, a thread each."""
    for case in CASES:
        place = make_rank_group(world, each)
        members = [place.member(number) for number in place.between.local_devices]
        with ThreadPoolExecutor(len(members)) as threads:
            for one in [threads.submit(case, member) for member in members]:
                one.result()


def main():
    from hocket.distributed import World
    from hocket.distributed import world as module
    from hocket.distributed.mpi_link import MpiLink

    module.SILENCE_TIMEOUT_SECONDS = HOUR
    world = World(MpiLink())
    run_cases(world, list(map(int, sys.argv[2:])) or [1] * world.size)
    words = world.all_gather_bytes(f"rank {world.rank}".encode())
    assert words == [f"rank {rank}".encode() for rank in range(world.size)]
    assert world.broadcast_from_rank_0(lambda: b"first") == b"first"
    memory = world.allocate_zeroed_shared_words(8)
    memory[world.rank] = world.rank + 1
    world.all_gather_bytes(b"")
    assert memory[: world.size].tolist() == [*range(1, world.size + 1)]
    world.wait_for_all_ranks_and_close()
    if world.rank == 0:
        print(f"{len(CASES)} cases")


if __name__ == "__main__":
    main()
