"""Collectives of devices with peer access, as launches that may wait for other devices.

Each device has signals in its memory, which other devices write. The signal pad is host memory in which devices report
their progress. `all_reduce` has two algorithms:

1. Small sums: each device pushes its partial sum into an inbox of every other device, with one barrier. Then each
   device adds all partial sums.
2. Other sums: each device adds one slice of all partial sums and writes it to all devices, between two barriers. Up to
   64 KiB, one launch of one block does all of it.

Other collectives read slices from the operands of other devices, between two barriers. Sums add in the order of the
devices, so all devices get the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
import numpy.typing as npt

from ....graph.attrs import Attrs
from ....graph.dtypes import DType
from ....graph.errors import BackendError
from ....ops.collectives import narrow_to_integer
from ...fusion.operands import BoundInstruction, Operand, require_supported
from ...host.collectives import (
    Index,
    Pairs,
    compute_all_gather_slice_pairs,
    compute_all_to_all_slice_pairs,
    compute_reduce_scatter_slice_pairs,
)
from ...host.progress_board import FIRST_MEMBER_WORD, RUN_NUMBER_WORD, WORDS_PER_MEMBER
from ..binding.iteration_axes import MAX_ITERATION_AXES, build_merged_tiling_iteration_axes
from ..binding.launch_builder import LaunchBuilder, LaunchWord, OpBinder, count_blocks
from ..device.driver import KernelSource
from .elementwise import MAX_ELEMENTS
from .moves import launch_broadcast_and_convert

MAX_DEVICES, COLLECTIVE_THREADS = 8, 256
SIGNAL_WORD_COUNT = 16 + 3 * 16 * MAX_DEVICES
"""Words of 8 bytes in the signals of a device, which the others write. They begin as zeros."""
MAX_SINGLE_BLOCK_BYTES = 64 * 1024
"""The most bytes of a sum that one block computes. Waits for other devices cost more than the additions."""
MAX_PUSHED_BYTES = 128 * 1024
"""The most bytes of all partial sums together that devices push to each other, with one barrier instead of two.

It is 64 KiB per device with two devices, 16 KiB with eight. More bytes occupy the one block longer than a barrier.
"""
INBOX_BYTES = 2 * MAX_PUSHED_BYTES
"""Bytes of the inbox of a device: two halves, which consecutive sums use in turn."""
MAX_BLOCKS = 128
VECTOR_BYTES = 16
COLLECTIVE_TYPE_NAMES = {DType.F32: "float", DType.I8: "i8", DType.I16: "i16", DType.I32: "i32", DType.I64: "i64"}
SOURCE = KernelSource(
    "collective.cu",
    (
        *(
            f"{kernel}<{t}>"
            for kernel in ("all_reduce", "all_reduce_pushed", "sum_parts", "take")
            for t in COLLECTIVE_TYPE_NAMES.values()
        ),
        *("begin_run", "meet_all", "tell_one", "await_one", "mark"),
        *("sum_parts<bf16_bits>", "narrow", "widen"),
    ),
)
SOURCES = (SOURCE,)
BINDINGS: Mapping[str, OpBinder] = {}  # collectives also need a group: `COLLECTIVE_BINDERS`


@dataclass(frozen=True, slots=True)
class OneDeviceCollectiveOperands:
    """The operand that one device contributes to a collective, and the result that it receives."""

    source: Operand
    target: Operand


@dataclass(frozen=True, slots=True)
class PeerAddresses:
    """The device addresses that one device tells the other devices of its group.

    - `signals`: its signals.
    - `transfer_buffer`: memory for 16-bit transfers; 0 if there is none.
    - `inbox`: memory into which other devices push partial sums; 0 if there is none.
    - `operands`: its collective operands, by sequence number of the collective.
    """

    signals: int
    transfer_buffer: int
    inbox: int
    operands: Mapping[int, OneDeviceCollectiveOperands]


@dataclass(frozen=True, slots=True)
class PeerGroup:
    """The devices of a collective group and all addresses that device `rank` needs to reach the others.

    `signal_pad_address` is the address of the group's signal pad on the host. Float32 sums of at least
    `min_narrow_elements` values are transferred in bfloat16; `None` means no sums. `inbox_half` is the half of the
    inboxes for the next sum. `timeout` is in seconds.
    """

    rank: int
    signal_pad_address: int
    timeout: float
    peers: tuple[PeerAddresses, ...]
    min_narrow_elements: int | None = None
    inbox_half: int = 0

    def uses_bfloat16_transfer(self, x: Operand) -> bool:
        """Return whether a sum of operands with the shape of `x` is transferred in bfloat16."""
        return x.is_float and self.min_narrow_elements is not None and math.prod(x.shape) >= self.min_narrow_elements

    def list_device_operands(self, sequence: int) -> list[OneDeviceCollectiveOperands]:
        """List the operands of all devices in a collective. Raises `BackendError` if a device does not have it."""
        return [self.require_device_operands(device, sequence) for device in range(len(self.peers))]

    def require_device_operands(self, device: int, sequence: int) -> OneDeviceCollectiveOperands:
        """Return the operands of one device in a collective; raise `BackendError` if the device does not have it."""
        if sequence not in (known := self.peers[device].operands):
            raise BackendError(
                f"device {self.rank} is at collective {sequence}, which device {device} does not have: "
                "the plans of the devices do not match"
            )
        return known[sequence]


def select_peer_accessible_operands(call: BoundInstruction) -> OneDeviceCollectiveOperands:
    """Return the operands of an instruction that other devices may access: its first operand and its result.

    A sender exposes its result in place of its operand, because the result is unchanged until the run ends.
    """
    return OneDeviceCollectiveOperands(call.out if call.op in ("send", "receive") else call.operand(0), call.out)


def launch_run_number_signal(launches: LaunchBuilder, group: PeerGroup, *, is_pipelined: bool) -> None:
    """Launch the kernel that begins a run, before its first collective: copy the run number to the device's signals.

    In pipelined runs (`is_pipelined`) with pushed sums, a barrier of all devices follows. Without it, the run could
    overwrite a sum of the previous run that another device still reads.
    """
    own = group.signal_pad_address + 8 * (FIRST_MEMBER_WORD + WORDS_PER_MEMBER * group.rank + RUN_NUMBER_WORD)
    mine = group.peers[group.rank]
    launches.add_launch(SOURCE["begin_run"], 1, 1, [mine.signals, own])
    if is_pipelined and mine.inbox:
        launches.add_launch(SOURCE["meet_all"], 1, 32, [*_make_group_struct_fields(launches, -1, group), 1])


def launch_progress_mark(
    launches: LaunchBuilder, call: BoundInstruction, group: PeerGroup, *, has_results: int
) -> None:
    """Launch a kernel that records on the host that the device has reached a collective, or has finished it.

    The watchdog for hangs reads the mark from the signal pad (`read_progress_mark`).

    Args:
        launches: Receives the launch.
        call: The collective.
        group: The collective group.
        has_results: 1 if the collective has ended, else 0.
    """
    word = group.signal_pad_address + 8 * (FIRST_MEMBER_WORD + WORDS_PER_MEMBER * group.rank)
    words = [group.peers[group.rank].signals, word, _read_sequence(call), has_results]
    launches.add_launch(SOURCE["mark"], 1, 1, words)


@dataclass(frozen=True, slots=True)
class CollectiveProgressMark:
    """How far a device has come: its run number, its last collective, and whether this collective has ended."""

    run: int
    sequence: int
    has_results: bool


def read_progress_mark(board: npt.NDArray[np.int64], rank: int) -> CollectiveProgressMark | None:
    """Read the last progress mark of device `rank` from the signal pad `board`; return `None` before the first."""
    word = int(board[FIRST_MEMBER_WORD + WORDS_PER_MEMBER * rank])
    return CollectiveProgressMark(word >> 32, ((word & 0xFFFFFFFF) >> 1) - 1, bool(word & 1)) if word else None


def bind_peer_collective(launches: LaunchBuilder, call: BoundInstruction, group: PeerGroup) -> None:
    """Bind a collective to kernels that access peer memory.

    Args:
        launches: Receives the launches.
        call: The collective.
        group: The collective group.

    Raises:
        NoKernelError: No kernel supports it. Either all devices of the group raise it, or none.
    """
    COLLECTIVE_BINDERS[call.op](launches, call, group)


def _read_sequence(call: BoundInstruction) -> int:
    return narrow_to_integer(call.attrs["sequence"])


def _make_group_struct_fields(launches: LaunchBuilder, sequence: int, group: PeerGroup) -> list[LaunchWord]:
    """Return the fields of the C struct `Group`, with fault messages for late devices.

    Args:
        launches: Receives the fault messages.
        sequence: Sequence number of the collective; -1 is the beginning of a run.
        group: The collective group.
    """
    size = len(group.peers)
    at = f"{'a run' if sequence < 0 else f'collective {sequence}'} on device {group.rank} of {size}"
    late = launches.add_fault_message(f"{at}: device {{value}} did not arrive within {group.timeout:g} s")
    launches.add_fault_message(f"{at}: device {{value}} is at another one: the plans of the devices do not match")
    launches.add_fault_message(f"{at}: another device failed")
    signals = _pad_device_addresses(p.signals for p in group.peers)
    return [*signals, group.signal_pad_address, group.rank, size, sequence, int(group.timeout * 1e9), *late]


def _pad_device_addresses(addresses: Iterable[int]) -> list[LaunchWord]:
    """Pad a list of addresses, one per device, with zeros to `MAX_DEVICES` addresses."""
    words: list[LaunchWord] = list(addresses)
    return words + [0] * (MAX_DEVICES - len(words))


def _bind_all_reduce(launches: LaunchBuilder, call: BoundInstruction, group: PeerGroup) -> None:
    offers, dtype, count = group.list_device_operands(_read_sequence(call)), call.out.dtype, math.prod(call.out.shape)
    everything = list(chain.from_iterable((o.source, o.target) for o in offers))
    require_supported(
        _has_one_dtype(offers) and all(o.is_dense and o.address % VECTOR_BYTES == 0 for o in everything),
        "operands are not dense",
    )
    words = _make_group_struct_fields(launches, _read_sequence(call), group)
    if group.uses_bfloat16_transfer(call.out):
        _launch_bfloat16_all_reduce(launches, call, group, words)
        return
    if uses_pushed_all_reduce(call, len(offers)):
        _launch_pushed_all_reduce(launches, call, group, words)
        return
    summing = [
        *_pad_device_addresses(o.source.address for o in offers),
        *_pad_device_addresses(o.target.address for o in offers),
        count,
        *words,
    ]
    nbytes = count * dtype.storage.itemsize
    if nbytes <= MAX_SINGLE_BLOCK_BYTES:
        launches.add_launch(SOURCE[f"all_reduce<{COLLECTIVE_TYPE_NAMES[dtype]}>"], 1, COLLECTIVE_THREADS, summing)
        return
    _launch_sliced_all_reduce(launches, COLLECTIVE_TYPE_NAMES[dtype], nbytes, summing, group, words)


def uses_pushed_all_reduce(call: BoundInstruction, devices: int) -> bool:
    """Return whether a collective is an `all_reduce` so small that devices push their partial sums to the others."""
    return call.op == "all_reduce" and devices * _compute_inbox_slot_bytes(call.out) <= MAX_PUSHED_BYTES


def _compute_inbox_slot_bytes(x: Operand) -> int:
    """Return the bytes that the partial sum of one device needs in an inbox."""
    return count_blocks(x.tensor.spec.nbytes, VECTOR_BYTES) * VECTOR_BYTES


def _launch_pushed_all_reduce(
    launches: LaunchBuilder, call: BoundInstruction, group: PeerGroup, words: list[LaunchWord]
) -> None:
    """Launch an `all_reduce` in which each device writes its partial sum into the inboxes of all other devices."""
    out = call.out
    inboxes = _pad_device_addresses(p.inbox + group.inbox_half * MAX_PUSHED_BYTES for p in group.peers)
    count, slot = math.prod(out.shape), _compute_inbox_slot_bytes(out) // out.dtype.storage.itemsize
    pushing = [call.operand(0).address, out.address, *inboxes, count, slot, group.inbox_half, *words]
    launches.add_launch(
        SOURCE[f"all_reduce_pushed<{COLLECTIVE_TYPE_NAMES[out.dtype]}>"], 1, COLLECTIVE_THREADS, pushing
    )


def _launch_sliced_all_reduce(
    launches: LaunchBuilder,
    dtype: str,
    nbytes: int,
    summing: list[LaunchWord],
    group: PeerGroup,
    words: list[LaunchWord],
) -> None:
    """Launch an `all_reduce` between two barriers: each device sums one slice and writes the sum to all devices."""
    grid = min(MAX_BLOCKS, count_blocks(count_blocks(nbytes, VECTOR_BYTES * len(group.peers)), COLLECTIVE_THREADS))
    launches.add_launch(SOURCE["meet_all"], 1, 32, [*words, 0])
    launches.add_launch(SOURCE[f"sum_parts<{dtype}>"], grid, COLLECTIVE_THREADS, summing)
    launches.add_launch(SOURCE["meet_all"], 1, 32, [*words, 1])


def _launch_bfloat16_all_reduce(
    launches: LaunchBuilder, call: BoundInstruction, group: PeerGroup, words: list[LaunchWord]
) -> None:
    """Launch an `all_reduce` in bfloat16. The transfer buffers hold the partial sums first, and then their sum."""
    mine, count = group.peers[group.rank], math.prod(call.out.shape)
    wires = _pad_device_addresses(p.transfer_buffer for p in group.peers)
    launch_bfloat16_rounding(launches, call.operand(0), mine.transfer_buffer)
    _launch_sliced_all_reduce(launches, "bf16_bits", 2 * count, [*wires, *wires, count, *words], group, words)
    launch_bfloat16_widening(launches, mine.transfer_buffer, call.out, group)


def launch_bfloat16_rounding(launches: LaunchBuilder, x: Operand, rounded: LaunchWord) -> None:
    """Launch the rounding of a contiguous float32 operand to bfloat16, to nearest even.

    Args:
        launches: Receives the launch.
        x: The operand.
        rounded: The bfloat16 memory to write.
    """
    count = math.prod(x.shape)
    launches.add_launch(
        SOURCE["narrow"], count_blocks(count, COLLECTIVE_THREADS), COLLECTIVE_THREADS, [x, rounded, count]
    )


def launch_bfloat16_widening(launches: LaunchBuilder, rounded: LaunchWord, out: Operand, group: PeerGroup) -> None:
    """Launch the conversion of bfloat16 values to float32. The kernel does nothing if the run has failed.

    Args:
        launches: Receives the launch.
        rounded: The bfloat16 memory to read.
        out: The float32 result.
        group: The collective group.
    """
    count = math.prod(out.shape)
    mine = group.peers[group.rank].signals
    launches.add_launch(
        SOURCE["widen"], count_blocks(count, COLLECTIVE_THREADS), COLLECTIVE_THREADS, [rounded, out, count, mine]
    )


def _has_one_dtype(collectives: Iterable[OneDeviceCollectiveOperands]) -> bool:
    types = {o.dtype for operands in collectives for o in (operands.source, operands.target)}
    return len(types) == 1 and types <= COLLECTIVE_TYPE_NAMES.keys()


def _make_slice_sum_binder(
    list_slices: Callable[[BoundInstruction], Iterable[tuple[Index, list[tuple[int, Index]]]]],
) -> CollectiveBinder:
    """Make the binder of a collective in which each device reads and sums slices of the operands of other devices.

    Args:
        list_slices: Returns pairs: a slice of the result, and its addends as (device, operand slice) pairs.
    """

    def bind(launches: LaunchBuilder, call: BoundInstruction, group: PeerGroup) -> None:
        operands = group.list_device_operands(_read_sequence(call))
        whole = max(math.prod(x.shape) for o in operands for x in (o.source, o.target))
        require_supported(
            _has_one_dtype(operands) and whole < MAX_ELEMENTS, "operands are of several types, or too large"
        )
        words = _make_group_struct_fields(launches, _read_sequence(call), group)
        launches.add_launch(SOURCE["meet_all"], 1, 32, [*words, 0])
        for into, partial_sums in list_slices(call):
            sources = [slice_operand(operands[device].source, index) for device, index in partial_sums]
            launch_peer_sum(launches, sources, slice_operand(call.out, into), group)
        launches.add_launch(SOURCE["meet_all"], 1, 32, [*words, 1])

    return bind


def launch_peer_sum(launches: LaunchBuilder, sources: list[Operand], out: Operand, group: PeerGroup) -> None:
    """Launch a sum of operands that may be in the memory of other devices; a single operand is only copied.

    Args:
        launches: Receives the launch.
        sources: Operands of the shape of `out`, at addresses of any device.
        out: The result on this device.
        group: The collective group.
    """
    axes = build_merged_tiling_iteration_axes(out.shape, [out, *sources])
    walks: list[LaunchWord] = []
    for k, source in enumerate(sources, 1):
        walks += [
            source.address,
            *axes.make_address_and_stride_fields(k, source)[1:],
        ]  # memory of another device needs no guard pages here
    walks += [0] * ((MAX_DEVICES - len(sources)) * (1 + MAX_ITERATION_AXES))
    mine = group.peers[group.rank].signals
    out_strides = axes.make_address_and_stride_fields(0, out)
    words = [axes.element_count, len(sources), *axes.axes_struct_fields, *out_strides, *walks, mine]
    launches.add_launch(
        SOURCE[f"take<{COLLECTIVE_TYPE_NAMES[out.dtype]}>"],
        count_blocks(axes.element_count, COLLECTIVE_THREADS),
        COLLECTIVE_THREADS,
        words,
    )


def slice_operand(x: Operand, index: Index) -> Operand:
    """Return the view of an operand that an index selects; the index has one slice for each axis."""
    for axis, along in enumerate(index):
        if along != slice(None):
            x = x.slice_axis(axis, along.start, along.stop - along.start)
    return x


def _list_gathered_slices(
    compute_pairs: Callable[[Attrs], list[Pairs]], call: BoundInstruction
) -> list[tuple[Index, list[tuple[int, Index]]]]:
    """List the slices that a device gathers, as (result slice, [(other device, slice of that device's operand)])."""
    return [(into, [(other, index)]) for other, pairs in enumerate(compute_pairs(call.attrs)) for into, index in pairs]


def _list_reduce_scatter_slices(call: BoundInstruction) -> list[tuple[Index, list[tuple[int, Index]]]]:
    """List the slices of the result of a `reduce_scatter`, each with its addends: (device, operand slice) pairs."""
    runs = call.attrs["runs"]
    assert isinstance(runs, tuple)  # one entry per device
    pairs = compute_reduce_scatter_slice_pairs(call.attrs)
    return [(into, [(device, index) for device in range(len(runs))]) for into, index in pairs]


def _bind_send(launches: LaunchBuilder, call: BoundInstruction, group: PeerGroup) -> None:
    to = narrow_to_integer(call.attrs["to"])
    require_supported(_has_copy_kernel(call.out), "kernels that copy this type are missing")
    if call.operand(0).address != call.out.address:
        launch_broadcast_and_convert(launches, call.operand(0), call.out)
    fields = _make_group_struct_fields(launches, _read_sequence(call), group)
    launches.add_launch(SOURCE["tell_one"], 1, 1, [*fields, to])


def _bind_receive(launches: LaunchBuilder, call: BoundInstruction, group: PeerGroup) -> None:
    source = narrow_to_integer(call.attrs["source"])
    theirs = group.require_device_operands(source, _read_sequence(call)).source
    require_supported(_has_copy_kernel(theirs), "kernels that copy this type are missing")
    fields = _make_group_struct_fields(launches, _read_sequence(call), group)
    launches.add_launch(SOURCE["await_one"], 1, 1, [*fields, source])
    launch_peer_sum(launches, [theirs], call.out, group)


def _has_copy_kernel(sent: Operand) -> bool:
    """Return whether a kernel can copy the operand `sent`, which depends on its dtype and size.

    Sender and receiver test the same operand, so they get the same answer.
    """
    return sent.dtype in COLLECTIVE_TYPE_NAMES and math.prod(sent.shape) < MAX_ELEMENTS


CollectiveBinder = Callable[[LaunchBuilder, BoundInstruction, PeerGroup], None]
COLLECTIVE_BINDERS: Mapping[str, CollectiveBinder] = {
    "all_reduce": _bind_all_reduce,
    "all_gather": _make_slice_sum_binder(partial(_list_gathered_slices, compute_all_gather_slice_pairs)),
    "all_to_all": _make_slice_sum_binder(partial(_list_gathered_slices, compute_all_to_all_slice_pairs)),
    "reduce_scatter": _make_slice_sum_binder(_list_reduce_scatter_slices),
    "send": _bind_send,
    "receive": _bind_receive,
}
