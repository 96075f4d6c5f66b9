"""Collectives of the devices of one machine, without the GIL.

In one process, thread 0 of each device sums its part for all devices. In several processes, each device copies its
operand to shared buffers and sums for itself. The board is shared memory with the arrivals and the slots of all devices
(signal pad).
"""

from __future__ import annotations

import math

from ....ops.collectives import cast_to_index_ranges, narrow_to_integer
from ...base import Comm
from ...fusion.operands import BoundInstruction
from ..compilation.compiler import kernel, subroutine
from ..compilation.kernel_args import declare_args
from ..simd.atomics import fetch_add, load_shared, read_monotonic_clock, store_shared
from ..simd.vectors import LANES, add, load, load_first_lanes, load_long, store, store_first_lanes, store_long
from ..steps.partition import compute_thread_range
from ..steps.step_loop import SPINS_BEFORE_YIELD, back_off
from ..steps.step_table import StepTableBuilder

ARRIVED_OFFSET, FAILED_OFFSET, SLOTS_OFFSET, SLOT_BYTES = 0, 64, 128, 64
"""Offsets into the board: arrivals in all, the failure flag, the slots; bytes of a slot.

A slot per device holds the addresses of its source and its target, and its collective number plus 1. Processes store
two such numbers instead: of the sums in the first and in the second shared buffer.
"""
OTHER_FAILED, TIMED_OUT, OUT_OF_STEP = 2, 3, 4
"""Statuses of a collective that stops the run."""


@subroutine
def wait_for_all_devices(board, participants, timeout_ns):
    """Wait until all devices have arrived at the barrier; return 0 or the status of the failure.

    Args:
        board: address of the shared memory of all devices.
        participants: count of devices.
        timeout_ns: the time limit in nanoseconds.
    """
    arrived = fetch_add(board + ARRIVED_OFFSET, 1) + 1
    target = (arrived + participants - 1) // participants * participants
    looks, since = 0, 0
    while load_shared(board + ARRIVED_OFFSET) < target:
        if load_shared(board + FAILED_OFFSET) != 0:
            return OTHER_FAILED
        looks += 1
        back_off(looks)
        if looks > SPINS_BEFORE_YIELD:
            time = read_monotonic_clock()
            if since == 0:
                since = time
            elif time - since > timeout_ns:
                store_shared(board + FAILED_OFFSET, 1)
                return TIMED_OUT
    return 0


@subroutine
def publish_addresses_and_wait(board, rank, devices, source, target, number, timeout_ns):
    """Write the operand and result addresses of this device to shared memory, and wait until all devices did so.

    Return 0 or the status of the failure.

    Args:
        board: address of the shared memory of all devices.
        rank: number of this device.
        devices: count of devices.
        source: address of the operand.
        target: address of the result.
        number: sequence number of the collective.
        timeout_ns: the time limit in nanoseconds.
    """
    mine = board + SLOTS_OFFSET + rank * SLOT_BYTES
    store_long(mine, source)
    store_long(mine + 8, target)
    store_long(mine + 16, number + 1)
    status = wait_for_all_devices(board, devices, timeout_ns)
    for d in range(devices):
        if status == 0 and load_long(board + SLOTS_OFFSET + d * SLOT_BYTES + 16) != number + 1:
            status = OUT_OF_STEP
    return status


@subroutine
def wait_until_memory_released(board, rank, devices, timeout_ns):
    """Wait until no device reads or writes the memory of another device; return 0 or the status of the failure.

    Args:
        board: address of the shared memory of all devices.
        rank: number of this device.
        devices: count of devices.
        timeout_ns: the time limit in nanoseconds.
    """
    status = wait_for_all_devices(board, devices, timeout_ns)
    if status == 0:
        store_long(board + SLOTS_OFFSET + rank * SLOT_BYTES + 16, 0)
    return status


@subroutine
def sum_lanes_over_devices(board, devices, at, left):
    """Return the sums over all devices of up to 16 adjacent operand elements.

    Args:
        board: address of the shared memory of all devices.
        devices: count of devices.
        at: byte offset of the elements in each operand.
        left: elements from there to the end of the operand.
    """
    total = load_lanes_or_zero(load_long(board + SLOTS_OFFSET) + at, left)
    for d in range(1, devices):
        total = add(total, load_lanes_or_zero(load_long(board + SLOTS_OFFSET + d * SLOT_BYTES) + at, left))
    return total


ARGS = declare_args("board rank devices source target count number patience")


@kernel
def all_reduce(a, thread, threads):
    """Sum `count` float32 over all devices; each device gets the sum.

    `number` is the sequence number of the collective, `patience` its time limit in nanoseconds.
    """
    board, rank, devices, count = ARGS.board(a), ARGS.rank(a), ARGS.devices(a), ARGS.count(a)
    status = publish_addresses_and_wait(
        board, rank, devices, ARGS.source(a), ARGS.target(a), ARGS.number(a), ARGS.patience(a)
    )
    if status != 0:
        return status
    lo, hi = compute_thread_range((count + LANES - 1) // LANES, rank, devices)
    for block in range(lo, hi):
        at, left = 4 * LANES * block, count - LANES * block
        total = sum_lanes_over_devices(board, devices, at, left)
        for d in range(devices):
            store_up_to_16_lanes(load_long(board + SLOTS_OFFSET + d * SLOT_BYTES + 8) + at, total, left)
    return wait_until_memory_released(board, rank, devices, ARGS.patience(a))


SCATTER_GATHER_ARGS = declare_args("board rank devices source target outer own whole first number patience")


@kernel
def reduce_scatter(a, thread, threads):
    """Sum rows over all devices; this device gets only its columns of each row.

    The columns are `own` float32 from column `first` on. There are `outer` rows of `whole` float32.
    """
    board, rank, devices = SCATTER_GATHER_ARGS.board(a), SCATTER_GATHER_ARGS.rank(a), SCATTER_GATHER_ARGS.devices(a)
    source, target, own = SCATTER_GATHER_ARGS.source(a), SCATTER_GATHER_ARGS.target(a), SCATTER_GATHER_ARGS.own(a)
    status = publish_addresses_and_wait(
        board, rank, devices, source, target, SCATTER_GATHER_ARGS.number(a), SCATTER_GATHER_ARGS.patience(a)
    )
    if status != 0:
        return status
    for row in range(SCATTER_GATHER_ARGS.outer(a)):
        at = 4 * (row * SCATTER_GATHER_ARGS.whole(a) + SCATTER_GATHER_ARGS.first(a))
        for i in range(0, own, LANES):
            store_up_to_16_lanes(
                target + 4 * (row * own + i), sum_lanes_over_devices(board, devices, at + 4 * i, own - i), own - i
            )
    return wait_until_memory_released(board, rank, devices, SCATTER_GATHER_ARGS.patience(a))


@kernel
def all_gather(a, thread, threads):
    """Gather rows from all devices: copy this device's columns of each row to the results of all devices.

    The columns are `own` float32 from column `first` on. There are `outer` rows of `whole` float32.
    """
    board, rank, devices = SCATTER_GATHER_ARGS.board(a), SCATTER_GATHER_ARGS.rank(a), SCATTER_GATHER_ARGS.devices(a)
    source, own = SCATTER_GATHER_ARGS.source(a), SCATTER_GATHER_ARGS.own(a)
    status = publish_addresses_and_wait(
        board,
        rank,
        devices,
        source,
        SCATTER_GATHER_ARGS.target(a),
        SCATTER_GATHER_ARGS.number(a),
        SCATTER_GATHER_ARGS.patience(a),
    )
    if status != 0:
        return status
    for row in range(SCATTER_GATHER_ARGS.outer(a)):
        at = 4 * (row * SCATTER_GATHER_ARGS.whole(a) + SCATTER_GATHER_ARGS.first(a))
        for i in range(0, own, LANES):
            some = load_lanes_or_zero(source + 4 * (row * own + i), own - i)
            for d in range(devices):
                store_up_to_16_lanes(load_long(board + SLOTS_OFFSET + d * SLOT_BYTES + 8) + at + 4 * i, some, own - i)
    return wait_until_memory_released(board, rank, devices, SCATTER_GATHER_ARGS.patience(a))


@subroutine
def load_lanes_or_zero(p, left):
    """Load the `left` float32 at `p`, at most 16; the other lanes are zero."""
    if left >= LANES:
        return load(p)
    return load_first_lanes(p, left)


@subroutine
def store_up_to_16_lanes(p, value, left):
    """Store the first lanes of `value` at `p`: `left` lanes, at most 16."""
    if left >= LANES:
        store(p, value)
    else:
        store_first_lanes(p, value, left)


SHARED_BUFFER_ARGS = declare_args("board floats buffer_elements rank devices source target count number patience")


@kernel
def all_reduce_through_buffers(a, thread, threads):
    """Sum `count` float32 over all devices through shared buffers, `buffer_elements` of them at a time.

    Each device has two buffers, which it uses in turn. `floats` holds the first buffers of all devices, then the second
    ones. After a barrier a device may write to its other buffer, because every device has finished reading it.
    """
    board, rank, devices = SHARED_BUFFER_ARGS.board(a), SHARED_BUFFER_ARGS.rank(a), SHARED_BUFFER_ARGS.devices(a)
    buffer_elements = SHARED_BUFFER_ARGS.buffer_elements(a)
    source, target, count = SHARED_BUFFER_ARGS.source(a), SHARED_BUFFER_ARGS.target(a), SHARED_BUFFER_ARGS.count(a)
    number = SHARED_BUFFER_ARGS.number(a)
    first = 0
    while first < count:  # a range with a variable step may raise, which needs Python in Numba
        turn = load_shared(board + ARRIVED_OFFSET) // devices & 1
        buffers = SHARED_BUFFER_ARGS.floats(a) + 4 * buffer_elements * devices * turn
        some = min(buffer_elements, count - first)
        for at in range(0, some, LANES):
            mine = load_first_lanes(source + 4 * (first + at), some - at)
            store_up_to_16_lanes(buffers + 4 * (buffer_elements * rank + at), mine, some - at)
        store_long(board + SLOTS_OFFSET + rank * SLOT_BYTES + 16 + 8 * turn, number + 1)
        status = wait_for_all_devices(board, devices, SHARED_BUFFER_ARGS.patience(a))
        for d in range(devices):
            if status == 0 and load_long(board + SLOTS_OFFSET + d * SLOT_BYTES + 16 + 8 * turn) != number + 1:
                status = OUT_OF_STEP
        if status != 0:
            return status
        for at in range(0, some, LANES):
            total = load_first_lanes(buffers + 4 * at, some - at)
            for d in range(1, devices):
                total = add(total, load_first_lanes(buffers + 4 * (buffer_elements * d + at), some - at))
            store_up_to_16_lanes(target + 4 * (first + at), total, some - at)
        first += some
    return 0


def _bind_all_reduce(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    """Add the step of an all-reduce; return False if the devices share no memory or the operands do not fit.

    The sums go through shared buffers if there are any, else through the memory of the other devices.
    """
    comm: Comm | None = steps.comm
    x, y = call.operand(0), call.out
    if comm is None or (comm.shared_buffers is None and (comm.signal_pad is None or comm.spans_processes)):
        return False
    if not (x.is_float and x.is_dense and y.is_dense):
        return False
    count, number = math.prod(x.shape), call.attrs["sequence"]
    assert isinstance(number, int)
    common_args = {
        "rank": comm.rank,
        "devices": comm.size,
        "source": x.address,
        "target": y.address,
        "count": count,
        "number": number,
        "patience": int(comm.timeout * 1e9),
    }
    if comm.shared_buffers is not None:
        board, floats = comm.shared_buffers.signal_pad.ctypes.data, comm.shared_buffers.float_buffers
        words = SHARED_BUFFER_ARGS(
            board=board, floats=floats.ctypes.data, buffer_elements=floats.shape[2], **common_args
        )
        steps.add(all_reduce_through_buffers, words, reads=[x], writes=[y], nbytes=0, stops=True)
    else:
        assert comm.signal_pad is not None
        words = ARGS(board=comm.signal_pad.ctypes.data, **common_args)
        steps.add(all_reduce, words, reads=[x], writes=[y], nbytes=0, stops=True)
    return True


def _bind_reduce_scatter_or_all_gather(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    """Add the step of a reduce-scatter or an all-gather.

    Return False if the kernels cannot compute it. The kernels need a single index range of the axis on each device.
    """
    comm: Comm | None = steps.comm
    x, y = call.operand(0), call.out
    axis, runs = narrow_to_integer(call.attrs["axis"]), cast_to_index_ranges(call.attrs["runs"])
    if comm is None or comm.signal_pad is None or comm.spans_processes or comm.shared_buffers is not None:
        return False
    if not (x.is_float and x.is_dense and y.is_dense) or any(len(own) > 1 for own in runs):
        return False
    gathers = call.op == "all_gather"
    whole, inner = (y if gathers else x).shape, math.prod(x.shape[axis + 1 :])
    first, own = runs[comm.rank][0] if runs[comm.rank] else (0, 0)
    words = SCATTER_GATHER_ARGS(
        board=comm.signal_pad.ctypes.data,
        rank=comm.rank,
        devices=comm.size,
        source=x.address,
        target=y.address,
        outer=math.prod(whole[:axis]),
        own=own * inner,
        whole=whole[axis] * inner,
        first=first * inner,
        number=narrow_to_integer(call.attrs["sequence"]),
        patience=int(comm.timeout * 1e9),
    )
    steps.add(all_gather if gathers else reduce_scatter, words, reads=[x], writes=[y], nbytes=0, stops=True)
    return True


BINDINGS = {
    "all_reduce": _bind_all_reduce,
    "all_gather": _bind_reduce_scatter_or_all_gather,
    "reduce_scatter": _bind_reduce_scatter_or_all_gather,
}
