"""Sums over the devices of one process, met without the GIL: the first thread of each device sums its part for all."""

from __future__ import annotations

import math

from ...base import Comm
from ...operands import Bound
from ..compiler import kernel, part
from ..simd.threads import fetch_add, give_way, load_shared, now, store_shared
from ..simd.vectors import LANES, add, load, load_long, load_some, store, store_long, store_some
from ..steps import Steps
from ..words import words
from .loop import SPINS
from .packing import share

ARRIVED, FAILED, SLOTS, SLOT = 0, 64, 128, 64
"""Bytes of the board: how many have arrived in all, whether somebody failed, then for each device a line with the
addresses of its source and its target, and one more than the number of the collective it is at."""
OTHER_FAILED, LATE, OUT_OF_STEP = 2, 3, 4
"""Why a collective stops the run."""


@part
def meet_all(board, participants, patience):
    """Wait for all devices, `patience` nanoseconds at most; 0 or why not."""
    arrived = fetch_add(board + ARRIVED, 1) + 1
    target = (arrived + participants - 1) // participants * participants
    spins, since = 0, 0
    while load_shared(board + ARRIVED) < target:
        if load_shared(board + FAILED) != 0:
            return OTHER_FAILED
        spins += 1
        if spins > SPINS:
            give_way()
            time = now()
            if since == 0:
                since = time
            elif time - since > patience:
                store_shared(board + FAILED, 1)
                return LATE
    return 0


ARGS = words("board rank devices source target count number patience")


@kernel
def all_reduce(a, thread, threads):
    """The sum of `count` float32 over all devices; `number` is that of the collective, `patience` in nanoseconds."""
    board, rank, devices, count, number = ARGS.board(a), ARGS.rank(a), ARGS.devices(a), ARGS.count(a), ARGS.number(a)
    mine = board + SLOTS + rank * SLOT
    store_long(mine, ARGS.source(a))
    store_long(mine + 8, ARGS.target(a))
    store_long(mine + 16, number + 1)
    status = meet_all(board, devices, ARGS.patience(a))
    if status != 0:
        return status
    for d in range(devices):
        if load_long(board + SLOTS + d * SLOT + 16) != number + 1:
            return OUT_OF_STEP
    lo, hi = share((count + LANES - 1) // LANES, rank, devices)
    for block in range(lo, hi):
        at, left = 4 * LANES * block, count - LANES * block
        total = lanes_of(load_long(board + SLOTS) + at, left)
        for d in range(1, devices):
            total = add(total, lanes_of(load_long(board + SLOTS + d * SLOT) + at, left))
        for d in range(devices):
            to = load_long(board + SLOTS + d * SLOT + 8) + at
            if left >= LANES:
                store(to, total)
            else:
                store_some(to, total, left)
    status = meet_all(board, devices, ARGS.patience(a))
    if status == 0:
        store_long(mine + 16, 0)
    return status


@part
def lanes_of(p, left):
    if left >= LANES:
        return load(p)
    return load_some(p, left)


def _all_reduce(steps: Steps, call: Bound) -> bool:
    comm: Comm | None = steps.comm
    x, y = call.operand(0), call.out
    if comm is None or comm.board is None or not (x.is_float and x.is_dense and y.is_dense):
        return False
    count, number = math.prod(x.shape), call.attrs["sequence"]
    assert isinstance(number, int)
    words = ARGS(
        board=comm.board.ctypes.data,
        rank=comm.rank,
        devices=comm.size,
        source=x.address,
        target=y.address,
        count=count,
        number=number,
        patience=int(comm.timeout * 1e9),
    )
    steps.add(all_reduce, words, reads=[x], writes=[y], nbytes=0, stops=True)
    return True


BINDINGS = {"all_reduce": _all_reduce}
