"""Collectives of devices with peer access, as launches that may wait for other devices.

Each device has signals in its memory, which other devices write. `all_reduce` has two algorithms:

1. Small sums: each device pushes its summand into an inbox of every other device, with one barrier. Each device then
   adds all summands.
2. Other sums: each device adds one part of all summands and writes it to all devices, between two barriers. Up to 64
   KiB, one launch of one block does all of it.

Other collectives read slices from the operands of other devices, between two barriers. Sums add in the order of the
devices, so all devices get the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from ....graph.dtypes import DType
from ....graph.errors import BackendError
from ....ops.collectives import as_integer
from ...board import EACH, FIRST, RUN
from ...meeting import Index, Pairs, exchanged, gathered, scattered
from ...operands import Bound, Operand, need
from ..binding.axes import MOST, axes_of
from ..binding.launches import Binding, Launches, Word, blocks
from ..device.driver import Source
from .elementwise import MOST_ELEMENTS
from .moves import launch_copy

MOST_DEVICES, THREADS = 8, 256
SIGNAL_WORDS = 16 + 3 * 16 * MOST_DEVICES
"""Words of 8 bytes in the signals of a device, which the others write. They begin as zeros."""
ONE_BLOCK = 64 * 1024
"""The most bytes of a sum that one block computes. Waits for other devices cost more than the additions."""
PUSHED = 128 * 1024
"""The most bytes of all summands together that devices push to each other, with one barrier instead of two.

It is 64 KiB per device with two devices, 16 KiB with eight. More bytes occupy the one block longer than a barrier.
"""
INBOX = 2 * PUSHED
"""Bytes of the inbox of a device: two halves, which consecutive sums use in turn."""
MOST_BLOCKS = 128
PACK = 16
TYPES = {DType.F32: "float", DType.I8: "i8", DType.I16: "i16", DType.I32: "i32", DType.I64: "i64"}
SOURCE = Source(
    "collective.cu",
    (
        *(
            f"{kernel}<{t}>"
            for kernel in ("all_reduce", "all_reduce_pushed", "sum_parts", "take")
            for t in TYPES.values()
        ),
        *("begin_run", "meet_all", "tell_one", "await_one", "mark"),
        *("sum_parts<bf16_bits>", "narrow", "widen"),
    ),
)
SOURCES = (SOURCE,)
BINDINGS: Mapping[str, Binding] = {}  # collectives also need a group: `COLLECTIVE_BINDERS`


@dataclass(frozen=True, slots=True)
class Offer:
    """The operand and the result of a device in a collective."""

    source: Operand
    target: Operand


@dataclass(frozen=True, slots=True)
class Peer:
    """The addresses of a device that other devices use.

    `signals` are its signals, `transfer_buffer` is memory for 16-bit transfers and `inbox` for pushed summands (0:
    none). `operands` are its operands by sequence number of the collective.
    """

    signals: int
    wire: int
    inbox: int
    offers: Mapping[int, Offer]


@dataclass(frozen=True, slots=True)
class Group:
    """The devices of a collective group by rank, as one of them sees them.

    `signal_pad_address` is the address of the group's signal pad on the host. Float32 sums of at least
    `min_narrow_elements` values are transferred in bfloat16; `None` means no sums. `inbox_half` is the half of the
    inboxes for the next sum.
    """

    rank: int
    board: int
    timeout: float
    peers: tuple[Peer, ...]
    narrow_from: int | None = None
    turn: int = 0

    def narrows(self, x: Operand) -> bool:
        """Return whether the sum of operands like `x` is transferred in bfloat16."""
        return x.is_float and self.narrow_from is not None and math.prod(x.shape) >= self.narrow_from

    def offers(self, sequence: int) -> list[Offer]:
        """Return the operands of all devices. Raises `BackendError` if a device does not have the collective."""
        return [self.offer(device, sequence) for device in range(len(self.peers))]

    def offer(self, device: int, sequence: int) -> Offer:
        """Return the operands of a device. Raises `BackendError` if it does not have the collective."""
        if sequence not in (known := self.peers[device].offers):
            raise BackendError(
                f"device {self.rank} is at collective {sequence}, which device {device} does not have: "
                "the plans of the devices do not match"
            )
        return known[sequence]


def offer_of(call: Bound) -> Offer:
    """Return the operands of a call. A sender exposes its result, which stays unchanged until the run ends."""
    return Offer(call.out if call.op in ("send", "receive") else call.operand(0), call.out)


def launch_begin(launches: Launches, group: Group, *, follows: bool) -> None:
    """Append the launches in front of the first collective of a run.

    With pipelined runs and pushed sums, all devices pass a barrier first: the last pushed sum may still be read.

    Args:
        launches: Receives the launches.
        group: The collective group.
        follows: Whether runs are pipelined.
    """
    own, mine = group.board + 8 * (FIRST + EACH * group.rank + RUN), group.peers[group.rank]
    launches.add(SOURCE["begin_run"], 1, 1, [mine.signals, own])
    if follows and mine.inbox:
        launches.add(SOURCE["meet_all"], 1, 32, [*_group(launches, -1, group), 1])


def launch_mark(launches: Launches, call: Bound, group: Group, *, has_results: int) -> None:
    """Report to the host that the device is at a collective, or has its results. `read_progress_mark` reads it.

    Args:
        launches: Receives the launch.
        call: The collective.
        group: The collective group.
        has_results: 1 if the collective has ended, else 0.
    """
    word = group.board + 8 * (FIRST + EACH * group.rank)
    words = [group.peers[group.rank].signals, word, _sequence(call), has_results]
    launches.add(SOURCE["mark"], 1, 1, words)


@dataclass(frozen=True, slots=True)
class Mark:
    """The progress of a device: the numbers of its run and collective, and whether the collective has ended."""

    run: int
    sequence: int
    has_results: bool


def mark_of(board: npt.NDArray[np.int64], rank: int) -> Mark | None:
    """Return the last progress mark of device `rank`, or `None` before the first."""
    word = int(board[FIRST + EACH * rank])
    return Mark(word >> 32, ((word & 0xFFFFFFFF) >> 1) - 1, bool(word & 1)) if word else None


def bind(launches: Launches, call: Bound, group: Group) -> None:
    """Append a collective.

    Args:
        launches: Receives the launches.
        call: The collective.
        group: The collective group.

    Raises:
        NoKernelError: No kernel supports it. All devices of the group raise it, or none.
    """
    MEETINGS[call.op](launches, call, group)


def _sequence(call: Bound) -> int:
    return as_integer(call.attrs["sequence"])


def _group(launches: Launches, sequence: int, group: Group) -> list[Word]:
    """Return the fields of `Group` in a kernel's struct. Sequence -1 is the beginning of a run."""
    size = len(group.peers)
    at = f"{'a run' if sequence < 0 else f'collective {sequence}'} on device {group.rank} of {size}"
    late = launches.fault(f"{at}: device {{value}} did not arrive within {group.timeout:g} s")
    launches.fault(f"{at}: device {{value}} is at another one: the plans of the devices do not match")
    launches.fault(f"{at}: another device failed")
    signals = _filled(p.signals for p in group.peers)
    return [*signals, group.board, group.rank, size, sequence, int(group.timeout * 1e9), *late]


def _filled(addresses: Iterable[int]) -> list[Word]:
    """Return addresses of all devices, padded with zeros."""
    words: list[Word] = list(addresses)
    return words + [0] * (MOST_DEVICES - len(words))


def _all_reduce(launches: Launches, call: Bound, group: Group) -> None:
    offers, dtype, count = group.offers(_sequence(call)), call.out.dtype, math.prod(call.out.shape)
    everything = list(chain.from_iterable((o.source, o.target) for o in offers))
    need(_one_type(offers) and all(o.is_dense and o.address % PACK == 0 for o in everything), "operands are not dense")
    words = _group(launches, _sequence(call), group)
    if group.narrows(call.out):
        _narrow_all_reduce(launches, call, group, words)
        return
    if is_pushed(call, len(offers)):
        _push(launches, call, group, words)
        return
    summing = [*_filled(o.source.address for o in offers), *_filled(o.target.address for o in offers), count, *words]
    nbytes = count * dtype.storage.itemsize
    if nbytes <= ONE_BLOCK:
        launches.add(SOURCE[f"all_reduce<{TYPES[dtype]}>"], 1, THREADS, summing)
        return
    _sum_parts(launches, TYPES[dtype], nbytes, summing, group, words)


def is_pushed(call: Bound, devices: int) -> bool:
    """Return whether devices push their summands of this collective to each other."""
    return call.op == "all_reduce" and devices * _slot(call.out) <= PUSHED


def _slot(x: Operand) -> int:
    """Return the bytes of a summand in an inbox."""
    return blocks(x.tensor.spec.nbytes, PACK) * PACK


def _push(launches: Launches, call: Bound, group: Group, words: list[Word]) -> None:
    """Launch a sum in which each device pushes its summand to all others."""
    out = call.out
    inboxes = _filled(p.inbox + group.turn * PUSHED for p in group.peers)
    count, slot = math.prod(out.shape), _slot(out) // out.dtype.storage.itemsize
    pushing = [call.operand(0).address, out.address, *inboxes, count, slot, group.turn, *words]
    launches.add(SOURCE[f"all_reduce_pushed<{TYPES[out.dtype]}>"], 1, THREADS, pushing)


def _sum_parts(
    launches: Launches, dtype: str, nbytes: int, summing: list[Word], group: Group, words: list[Word]
) -> None:
    """Launch a sum in which each device adds one part, between two barriers."""
    grid = min(MOST_BLOCKS, blocks(blocks(nbytes, PACK * len(group.peers)), THREADS))
    launches.add(SOURCE["meet_all"], 1, 32, [*words, 0])
    launches.add(SOURCE[f"sum_parts<{dtype}>"], grid, THREADS, summing)
    launches.add(SOURCE["meet_all"], 1, 32, [*words, 1])


def _narrow_all_reduce(launches: Launches, call: Bound, group: Group, words: list[Word]) -> None:
    """Launch a sum in bfloat16. The transfer buffers have the summands, and then their sum."""
    mine, count = group.peers[group.rank], math.prod(call.out.shape)
    wires = _filled(p.wire for p in group.peers)
    launch_narrow(launches, call.operand(0), mine.wire)
    _sum_parts(launches, "bf16_bits", 2 * count, [*wires, *wires, count, *words], group, words)
    launch_widen(launches, mine.wire, call.out, group)


def launch_narrow(launches: Launches, x: Operand, wire: Word) -> None:
    """Round a contiguous float32 operand to bfloat16, to nearest even.

    Args:
        launches: Receives the launch.
        x: The operand.
        wire: The bfloat16 memory.
    """
    count = math.prod(x.shape)
    launches.add(SOURCE["narrow"], blocks(count, THREADS), THREADS, [x, wire, count])


def launch_widen(launches: Launches, wire: Word, out: Operand, group: Group) -> None:
    """Convert bfloat16 back to float32, unless the run has failed.

    Args:
        launches: Receives the launch.
        wire: The bfloat16 memory.
        out: The float32 result.
        group: The collective group.
    """
    count = math.prod(out.shape)
    mine = group.peers[group.rank].signals
    launches.add(SOURCE["widen"], blocks(count, THREADS), THREADS, [wire, out, count, mine])


def _one_type(offers: Iterable[Offer]) -> bool:
    types = {o.dtype for offer in offers for o in (offer.source, offer.target)}
    return len(types) == 1 and types <= TYPES.keys()


def _met(parts: Callable[[Bound], Iterable[tuple[Index, list[tuple[int, Index]]]]]) -> Meeting:
    """Return a binder of a collective in which each device reads slices of other devices.

    Args:
        parts: Returns pairs of a slice of the result, and its summands: pairs of a device and a slice of its operand.
    """

    def bound(launches: Launches, call: Bound, group: Group) -> None:
        offers = group.offers(_sequence(call))
        whole = max(math.prod(x.shape) for o in offers for x in (o.source, o.target))
        need(_one_type(offers) and whole < MOST_ELEMENTS, "operands are of several types, or too large")
        words = _group(launches, _sequence(call), group)
        launches.add(SOURCE["meet_all"], 1, 32, [*words, 0])
        for into, summands in parts(call):
            sources = [piece(offers[device].source, index) for device, index in summands]
            launch_take(launches, sources, piece(call.out, into), group)
        launches.add(SOURCE["meet_all"], 1, 32, [*words, 1])

    return bound


def launch_take(launches: Launches, sources: list[Operand], out: Operand, group: Group) -> None:
    """Launch the sum of operands of any devices; a single operand is copied.

    Args:
        launches: Receives the launch.
        sources: Operands of the shape of `out`, at addresses of any device.
        out: The result on this device.
        group: The collective group.
    """
    axes = axes_of(out.shape, [out, *sources])
    walks: list[Word] = []
    for k, source in enumerate(sources, 1):
        walks += [source.address, *axes.walk(k, source)[1:]]  # memory of another device needs no guard pages here
    walks += [0] * ((MOST_DEVICES - len(sources)) * (1 + MOST))
    mine = group.peers[group.rank].signals
    words = [axes.count, len(sources), *axes.words, *axes.walk(0, out), *walks, mine]
    launches.add(SOURCE[f"take<{TYPES[out.dtype]}>"], blocks(axes.count, THREADS), THREADS, words)


def piece(x: Operand, index: Index) -> Operand:
    """Return the part of an operand at an index of slices."""
    for axis, along in enumerate(index):
        if along != slice(None):
            x = x.part(axis, along.start, along.stop - along.start)
    return x


def _one_by_one(parts: list[Pairs]) -> list[tuple[Index, list[tuple[int, Index]]]]:
    """List the slices that a device copies from the others, with their places in the result."""
    return [(into, [(device, index)]) for device, pairs in enumerate(parts) for into, index in pairs]


def _summed(call: Bound) -> list[tuple[Index, list[tuple[int, Index]]]]:
    """List the slices of a reduce-scatter, each with its summands on all devices."""
    runs = call.attrs["runs"]
    assert isinstance(runs, tuple)  # one entry per device
    devices = range(len(runs))
    return [(into, [(device, index) for device in devices]) for into, index in scattered(call.attrs)]


def _send(launches: Launches, call: Bound, group: Group) -> None:
    to = as_integer(call.attrs["to"])
    need(_is_movable(call.out), "kernels that copy this type are missing")
    if call.operand(0).address != call.out.address:
        launch_copy(launches, call.operand(0), call.out)
    launches.add(SOURCE["tell_one"], 1, 1, [*_group(launches, _sequence(call), group), to])


def _receive(launches: Launches, call: Bound, group: Group) -> None:
    source = as_integer(call.attrs["source"])
    theirs = group.offer(source, _sequence(call)).source
    need(_is_movable(theirs), "kernels that copy this type are missing")
    launches.add(SOURCE["await_one"], 1, 1, [*_group(launches, _sequence(call), group), source])
    launch_take(launches, [theirs], call.out, group)


def _is_movable(sent: Operand) -> bool:
    """Return whether kernels can copy the operand. Sender and receiver both know the sent operand."""
    return sent.dtype in TYPES and math.prod(sent.shape) < MOST_ELEMENTS


Meeting = Callable[[Launches, Bound, Group], None]
MEETINGS: Mapping[str, Meeting] = {
    "all_reduce": _all_reduce,
    "all_gather": _met(lambda call: _one_by_one(gathered(call.attrs))),
    "all_to_all": _met(lambda call: _one_by_one(exchanged(call.attrs))),
    "reduce_scatter": _met(_summed),
    "send": _send,
    "receive": _receive,
}
