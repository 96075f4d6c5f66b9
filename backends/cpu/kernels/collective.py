"""Collectives of the devices of one machine, without the GIL.

In one process, thread 0 of each device sums its part for all devices. In several processes, each device copies its
operand to shared buffers and sums for itself.
"""

from __future__ import annotations

import math

from ....ops.collectives import as_index_ranges, as_integer
from ...base import Comm
from ...operands import Bound
from ..compiler import kernel, part
from ..simd.threads import fetch_add, load_shared, now, store_shared
from ..simd.vectors import LANES, add, load, load_long, load_some, store, store_long, store_some
from ..steps import Steps
from ..words import words
from .loop import SPINS, bide
from .packing import share

ARRIVED, FAILED, SLOTS, SLOT = 0, 64, 128, 64
"""Offsets into the board: arrivals in all, the failure flag, the slots; bytes of a slot.

A slot per device holds the addresses of its source and its target, and its collective number plus 1. Processes store
two such numbers instead: of the sums in the first and in the second shared buffer.
"""
OTHER_FAILED, LATE, OUT_OF_STEP = 2, 3, 4
"""Statuses of a collective that stops the run."""


@part
def meet_all(board, participants, patience):
    """Wait for all devices, at most `patience` nanoseconds. Return 0 or the status of the failure."""
    arrived = fetch_add(board + ARRIVED, 1) + 1
    target = (arrived + participants - 1) // participants * participants
    looks, since = 0, 0
    while load_shared(board + ARRIVED) < target:
        if load_shared(board + FAILED) != 0:
            return OTHER_FAILED
        looks += 1
        bide(looks)
        if looks > SPINS:
            time = now()
            if since == 0:
                since = time
            elif time - since > patience:
                store_shared(board + FAILED, 1)
                return LATE
    return 0


@part
def meet_at(board, rank, devices, source, target, number, patience):
    """Publish the operand and the result of this device, and wait for all. Return 0 or the status of the failure."""
    mine = board + SLOTS + rank * SLOT
    store_long(mine, source)
    store_long(mine + 8, target)
    store_long(mine + 16, number + 1)
    status = meet_all(board, devices, patience)
    for d in range(devices):
        if status == 0 and load_long(board + SLOTS + d * SLOT + 16) != number + 1:
            status = OUT_OF_STEP
    return status


@part
def part_from(board, rank, devices, patience):
    """Wait until no device accesses the memory of another device. Return 0 or the status of the failure."""
    status = meet_all(board, devices, patience)
    if status == 0:
        store_long(board + SLOTS + rank * SLOT + 16, 0)
    return status


@part
def sum_of_all(board, devices, at, left):
    """Return ``sum over d of source[d]`` for up to 16 float32 at byte `at`."""
    total = lanes_of(load_long(board + SLOTS) + at, left)
    for d in range(1, devices):
        total = add(total, lanes_of(load_long(board + SLOTS + d * SLOT) + at, left))
    return total


ARGS = words("board rank devices source target count number patience")


@kernel
def all_reduce(a, thread, threads):
    """Sum `count` float32 over all devices. `number` is the number of the collective, `patience` is in nanoseconds."""
    board, rank, devices, count = ARGS.board(a), ARGS.rank(a), ARGS.devices(a), ARGS.count(a)
    status = meet_at(board, rank, devices, ARGS.source(a), ARGS.target(a), ARGS.number(a), ARGS.patience(a))
    if status != 0:
        return status
    lo, hi = share((count + LANES - 1) // LANES, rank, devices)
    for block in range(lo, hi):
        at, left = 4 * LANES * block, count - LANES * block
        total = sum_of_all(board, devices, at, left)
        for d in range(devices):
            store_lanes(load_long(board + SLOTS + d * SLOT + 8) + at, total, left)
    return part_from(board, rank, devices, ARGS.patience(a))


SHARE_ARGS = words("board rank devices source target outer own whole first number patience")


@kernel
def reduce_scatter(a, thread, threads):
    """Sum `own` float32, from number `first` on, over all devices, for each of `outer` rows of `whole` numbers."""
    board, rank, devices = SHARE_ARGS.board(a), SHARE_ARGS.rank(a), SHARE_ARGS.devices(a)
    source, target, own = SHARE_ARGS.source(a), SHARE_ARGS.target(a), SHARE_ARGS.own(a)
    status = meet_at(board, rank, devices, source, target, SHARE_ARGS.number(a), SHARE_ARGS.patience(a))
    if status != 0:
        return status
    for row in range(SHARE_ARGS.outer(a)):
        at = 4 * (row * SHARE_ARGS.whole(a) + SHARE_ARGS.first(a))
        for i in range(0, own, LANES):
            store_lanes(target + 4 * (row * own + i), sum_of_all(board, devices, at + 4 * i, own - i), own - i)
    return part_from(board, rank, devices, SHARE_ARGS.patience(a))


@kernel
def all_gather(a, thread, threads):
    """Copy `own` float32 of each of `outer` rows to number `first` of that row, of `whole` numbers, on all devices."""
    board, rank, devices = SHARE_ARGS.board(a), SHARE_ARGS.rank(a), SHARE_ARGS.devices(a)
    source, own = SHARE_ARGS.source(a), SHARE_ARGS.own(a)
    status = meet_at(board, rank, devices, source, SHARE_ARGS.target(a), SHARE_ARGS.number(a), SHARE_ARGS.patience(a))
    if status != 0:
        return status
    for row in range(SHARE_ARGS.outer(a)):
        at = 4 * (row * SHARE_ARGS.whole(a) + SHARE_ARGS.first(a))
        for i in range(0, own, LANES):
            some = lanes_of(source + 4 * (row * own + i), own - i)
            for d in range(devices):
                store_lanes(load_long(board + SLOTS + d * SLOT + 8) + at + 4 * i, some, own - i)
    return part_from(board, rank, devices, SHARE_ARGS.patience(a))


@part
def lanes_of(p, left):
    """Load up to 16 of `left` float32 at `p`, and zeros."""
    if left >= LANES:
        return load(p)
    return load_some(p, left)


@part
def store_lanes(p, value, left):
    """Store up to 16 of `left` float32 at `p`."""
    if left >= LANES:
        store(p, value)
    else:
        store_some(p, value, left)


SLAB_ARGS = words("board floats slab rank devices source target count number patience")


@kernel
def all_reduce_slabs(a, thread, threads):
    """Sum `count` float32 over all devices, `slab` of them at a time.

    `floats` holds the first shared buffers of all devices, then the second ones. After a barrier a device may write to
    the other buffer, because every device has finished reading it.
    """
    board, rank, devices, slab = SLAB_ARGS.board(a), SLAB_ARGS.rank(a), SLAB_ARGS.devices(a), SLAB_ARGS.slab(a)
    source, target, count = SLAB_ARGS.source(a), SLAB_ARGS.target(a), SLAB_ARGS.count(a)
    number = SLAB_ARGS.number(a)
    first = 0
    while first < count:  # a range with a variable step may raise, which needs Python in Numba
        turn = load_shared(board + ARRIVED) // devices & 1
        slabs, some = SLAB_ARGS.floats(a) + 4 * slab * devices * turn, min(slab, count - first)
        for at in range(0, some, LANES):
            mine = load_some(source + 4 * (first + at), some - at)
            store_some(slabs + 4 * (slab * rank + at), mine, some - at)
        store_long(board + SLOTS + rank * SLOT + 16 + 8 * turn, number + 1)
        status = meet_all(board, devices, SLAB_ARGS.patience(a))
        for d in range(devices):
            if status == 0 and load_long(board + SLOTS + d * SLOT + 16 + 8 * turn) != number + 1:
                status = OUT_OF_STEP
        if status != 0:
            return status
        for at in range(0, some, LANES):
            total = load_some(slabs + 4 * at, some - at)
            for d in range(1, devices):
                total = add(total, load_some(slabs + 4 * (slab * d + at), some - at))
            store_some(target + 4 * (first + at), total, some - at)
        first += some
    return 0


def _all_reduce(steps: Steps, call: Bound) -> bool:
    """Add an all-reduce: through shared buffers if there are any, else through the memory of the other devices."""
    comm: Comm | None = steps.comm
    x, y = call.operand(0), call.out
    if comm is None or (comm.slabs is None and (comm.board is None or comm.is_apart)):
        return False
    if not (x.is_float and x.is_dense and y.is_dense):
        return False
    count, number = math.prod(x.shape), call.attrs["sequence"]
    assert isinstance(number, int)
    given = {
        "rank": comm.rank,
        "devices": comm.size,
        "source": x.address,
        "target": y.address,
        "count": count,
        "number": number,
        "patience": int(comm.timeout * 1e9),
    }
    if comm.slabs is not None:
        board, floats = comm.slabs.board.ctypes.data, comm.slabs.floats
        words = SLAB_ARGS(board=board, floats=floats.ctypes.data, slab=floats.shape[2], **given)
        steps.add(all_reduce_slabs, words, reads=[x], writes=[y], nbytes=0, stops=True)
    else:
        assert comm.board is not None
        words = ARGS(board=comm.board.ctypes.data, **given)
        steps.add(all_reduce, words, reads=[x], writes=[y], nbytes=0, stops=True)
    return True


def _shares(steps: Steps, call: Bound) -> bool:
    """Add a reduce-scatter or an all-gather in which each device has at most one run of the axis."""
    comm: Comm | None = steps.comm
    x, y = call.operand(0), call.out
    axis, runs = as_integer(call.attrs["axis"]), as_index_ranges(call.attrs["runs"])
    if comm is None or comm.board is None or comm.is_apart or comm.slabs is not None:
        return False
    if not (x.is_float and x.is_dense and y.is_dense) or any(len(own) > 1 for own in runs):
        return False
    gathers = call.op == "all_gather"
    whole, inner = (y if gathers else x).shape, math.prod(x.shape[axis + 1 :])
    first, own = runs[comm.rank][0] if runs[comm.rank] else (0, 0)
    words = SHARE_ARGS(
        board=comm.board.ctypes.data,
        rank=comm.rank,
        devices=comm.size,
        source=x.address,
        target=y.address,
        outer=math.prod(whole[:axis]),
        own=own * inner,
        whole=whole[axis] * inner,
        first=first * inner,
        number=as_integer(call.attrs["sequence"]),
        patience=int(comm.timeout * 1e9),
    )
    steps.add(all_gather if gathers else reduce_scatter, words, reads=[x], writes=[y], nbytes=0, stops=True)
    return True


BINDINGS = {"all_reduce": _all_reduce, "all_gather": _shares, "reduce_scatter": _shares}
