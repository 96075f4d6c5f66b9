"""Collectives of devices that reach each other's memory: launches like any other, among them those that wait."""

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
"""Of 8 bytes, for each device, that the others write; they begin as zeros."""
ONE_BLOCK = 64 * 1024
"""Bytes up to which one block does a whole sum: waiting for others costs more than adding."""
PUSHED = 128 * 1024
"""Bytes of all summands up to which every device pushes its own to all others, and one meeting does in place of two: 64
KiB a device where there are two, 16 where there are eight.  More would keep the one block longer than a meeting."""
INBOX = 2 * PUSHED
"""Bytes that a device has for what is pushed to it, for one sum after the other in turn."""
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
BINDINGS: Mapping[str, Binding] = {}  # a collective is bound to its group, below


@dataclass(frozen=True, slots=True)
class Offer:
    """What a device brings to a collective, and where it wants the result."""

    source: Operand
    target: Operand


@dataclass(frozen=True, slots=True)
class Peer:
    """A device as the others know it: where its signals are, room for what it sends in 16 bits and for what is pushed
    to it (0: none), its offers by the number of the collective."""

    signals: int
    wire: int
    inbox: int
    offers: Mapping[int, Offer]


@dataclass(frozen=True, slots=True)
class Group:
    """The devices that meet, by rank, as one of them sees them; `board` is the address of the group's board.

    Sums of so many float32 values as `narrow_from` and more are sent in bfloat16; none are where it is None.  Sums take
    the two halves of the inboxes in turn, the next one half `turn`.
    """

    rank: int
    board: int
    timeout: float
    peers: tuple[Peer, ...]
    narrow_from: int | None = None
    turn: int = 0

    def narrows(self, x: Operand) -> bool:
        """Whether the sum of operands like `x` is sent in bfloat16."""
        return x.is_float and self.narrow_from is not None and math.prod(x.shape) >= self.narrow_from

    def offers(self, sequence: int) -> list[Offer]:
        """What everybody brings.  Raises `BackendError` if somebody brings nothing."""
        return [self.offer(device, sequence) for device in range(len(self.peers))]

    def offer(self, device: int, sequence: int) -> Offer:
        if sequence not in (known := self.peers[device].offers):
            raise BackendError(
                f"device {self.rank} is at collective {sequence}, which device {device} does not have: "
                "the plans of the devices do not match"
            )
        return known[sequence]


def offer_of(call: Bound) -> Offer:
    """A sender offers its result, which nobody overwrites before the run ends."""
    return Offer(call.out if call.op in ("send", "receive") else call.operand(0), call.out)


def launch_begin(launches: Launches, group: Group, *, follows: bool) -> None:
    """To be launched before the first collective of a run.  Where runs follow each other, and sums are pushed, all meet
    first: the last one that was pushed may still be read."""
    own, mine = group.board + 8 * (FIRST + EACH * group.rank + RUN), group.peers[group.rank]
    launches.add(SOURCE["begin_run"], 1, 1, [mine.signals, own])
    if follows and mine.inbox:
        launches.add(SOURCE["meet_all"], 1, 32, [*_group(launches, -1, group), 1])


def launch_mark(launches: Launches, call: Bound, group: Group, *, has_results: int) -> None:
    """Tell the host that the device comes to a collective, or has its results: `mark_of` reads it."""
    word = group.board + 8 * (FIRST + EACH * group.rank)
    words = [group.peers[group.rank].signals, word, _sequence(call), has_results]
    launches.add(SOURCE["mark"], 1, 1, words)


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a device is: the number of its run and of its collective, and whether that has ended."""

    run: int
    sequence: int
    has_results: bool


def mark_of(board: npt.NDArray[np.int64], rank: int) -> Mark | None:
    """What device `rank` marked last; None before its first mark."""
    word = int(board[FIRST + EACH * rank])
    return Mark(word >> 32, ((word & 0xFFFFFFFF) >> 1) - 1, bool(word & 1)) if word else None


def bind(launches: Launches, call: Bound, group: Group) -> None:
    """Append a collective.  Raises `NoKernelError` on all devices of the group, or on none."""
    MEETINGS[call.op](launches, call, group)


def _sequence(call: Bound) -> int:
    return as_integer(call.attrs["sequence"])


def _group(launches: Launches, sequence: int, group: Group) -> list[Word]:
    """The fields of a kernel's `Group`, at the collective of that number; -1 at the beginning of a run."""
    size = len(group.peers)
    at = f"{'a run' if sequence < 0 else f'collective {sequence}'} on device {group.rank} of {size}"
    late = launches.fault(f"{at}: device {{value}} did not arrive within {group.timeout:g} s")
    launches.fault(f"{at}: device {{value}} is at another one: the plans of the devices do not match")
    launches.fault(f"{at}: another device failed")
    signals = _filled(p.signals for p in group.peers)
    return [*signals, group.board, group.rank, size, sequence, int(group.timeout * 1e9), *late]


def _filled(addresses: Iterable[int]) -> list[Word]:
    """Of all devices; there is room for more."""
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
    """Whether all devices push their summands of a sum to all."""
    return call.op == "all_reduce" and devices * _slot(call.out) <= PUSHED


def _slot(x: Operand) -> int:
    """Bytes of a summand in an inbox."""
    return blocks(x.tensor.spec.nbytes, PACK) * PACK


def _push(launches: Launches, call: Bound, group: Group, words: list[Word]) -> None:
    out = call.out
    inboxes = _filled(p.inbox + group.turn * PUSHED for p in group.peers)
    count, slot = math.prod(out.shape), _slot(out) // out.dtype.storage.itemsize
    pushing = [call.operand(0).address, out.address, *inboxes, count, slot, group.turn, *words]
    launches.add(SOURCE[f"all_reduce_pushed<{TYPES[out.dtype]}>"], 1, THREADS, pushing)


def _sum_parts(
    launches: Launches, dtype: str, nbytes: int, summing: list[Word], group: Group, words: list[Word]
) -> None:
    grid = min(MOST_BLOCKS, blocks(blocks(nbytes, PACK * len(group.peers)), THREADS))
    launches.add(SOURCE["meet_all"], 1, 32, [*words, 0])
    launches.add(SOURCE[f"sum_parts<{dtype}>"], grid, THREADS, summing)
    launches.add(SOURCE["meet_all"], 1, 32, [*words, 1])


def _narrow_all_reduce(launches: Launches, call: Bound, group: Group, words: list[Word]) -> None:
    """Summands lie in everybody's room for the wire, and then their sum, in bfloat16."""
    mine, count = group.peers[group.rank], math.prod(call.out.shape)
    wires = _filled(p.wire for p in group.peers)
    launch_narrow(launches, call.operand(0), mine.wire)
    _sum_parts(launches, "bf16_bits", 2 * count, [*wires, *wires, count, *words], group, words)
    launch_widen(launches, mine.wire, call.out, group)


def launch_narrow(launches: Launches, x: Operand, wire: Word) -> None:
    """Round a dense operand of float32 to bfloat16, to the nearest and of two to the even one."""
    count = math.prod(x.shape)
    launches.add(SOURCE["narrow"], blocks(count, THREADS), THREADS, [x, wire, count])


def launch_widen(launches: Launches, wire: Word, out: Operand, group: Group) -> None:
    """The reverse, unless the run has failed."""
    count = math.prod(out.shape)
    mine = group.peers[group.rank].signals
    launches.add(SOURCE["widen"], blocks(count, THREADS), THREADS, [wire, out, count, mine])


def _one_type(offers: Iterable[Offer]) -> bool:
    types = {o.dtype for offer in offers for o in (offer.source, offer.target)}
    return len(types) == 1 and types <= TYPES.keys()


def _met(parts: Callable[[Bound], Iterable[tuple[Index, list[tuple[int, Index]]]]]) -> Meeting:
    """A collective in which everybody takes pieces out of what the others have: `parts` are pairs (where a piece goes,
    whose summands it has, and where these are)."""

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
    """The sum of some operands, of any device; of one: a copy."""
    axes = axes_of(out.shape, [out, *sources])
    walks: list[Word] = []
    for k, source in enumerate(sources, 1):
        walks += [source.address, *axes.walk(k, source)[1:]]  # memory of another device: nothing to be guarded here
    walks += [0] * ((MOST_DEVICES - len(sources)) * (1 + MOST))
    mine = group.peers[group.rank].signals
    words = [axes.count, len(sources), *axes.words, *axes.walk(0, out), *walks, mine]
    launches.add(SOURCE[f"take<{TYPES[out.dtype]}>"], blocks(axes.count, THREADS), THREADS, words)


def piece(x: Operand, index: Index) -> Operand:
    """The part of an operand at an index of slices."""
    for axis, along in enumerate(index):
        if along != slice(None):
            x = x.part(axis, along.start, along.stop - along.start)
    return x


def _one_by_one(parts: list[Pairs]) -> list[tuple[Index, list[tuple[int, Index]]]]:
    return [(into, [(device, index)]) for device, pairs in enumerate(parts) for into, index in pairs]


def _summed(call: Bound) -> list[tuple[Index, list[tuple[int, Index]]]]:
    runs = call.attrs["runs"]
    assert isinstance(runs, tuple)  # those of every device
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
    """Decided by what is sent, which both know."""
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
