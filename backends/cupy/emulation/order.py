"""What a run leaves to chance: two accesses of the same bytes, one of them a store, that nothing puts in an order.

The processor that emulates devices keeps nearly all stores in order, so that a signal without a fence gives the right
sums here, and wrong ones on a device.  What is looked for is therefore not a wrong sum but an order that is missing.
One thread's accesses are in order.  So are, before and behind it,

* what the threads of a block did, at a barrier; what the lanes of a warp did, at theirs (no shuffle or vote is one);
* launches of one stream, which follow each other, and those of the other stream of the device that an event puts before
  them, for a thread that has waited for the earlier ones: any launch may begin while the one before it runs;
* what a thread stored to shared memory and then showed to products, for a product that begins behind a barrier: of
  other stores a product knows nothing, and it loads until it is waited for;
* what a thread did or knew that arrives at an mbarrier or at the barrier of a cluster, and the copies in bulk that the
  mbarrier counts, for the thread that has waited for it; a copy loads and stores at any time from its issue to that;
* what a thread that releases a word did or knew, for the thread that acquires what was written;
* what the host writes before a run into the buffers of a device, and reads behind it.

An example, of two devices that each run one block.  Thread 5 of device 0 stores x and comes to a barrier, thread 0
releases the word w behind it; on device 1, thread 3 acquires w, comes to a barrier, and thread 7 loads x.  The first
barrier ends phase 0 of its block: everybody there knows all of it, which is written ``(0, 0): (1, 0)`` (queue 0, block
0: launch 1 up to phase 0).  Thread 0 releases this, thread 3 learns it, the second barrier tells thread 7, and so the
store of x (launch 1, phase 0, thread 5) is before the load.  Without the first barrier thread 0 releases only what it
did itself, ``(0, 0, 0): (1, 0, 0)`` (queue 0, block 0, thread 0: launch 1, phase 0, up to its first release); without
release or acquire thread 3 learns nothing.  Either way, thread 7 does not know of the store, in whatever order the two
came in this run.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from .lines import lines_of
from .ordered import STREAMS, Memory, Ran

LOAD, STORE, RELAXED_LOAD, RELAXED_STORE, ACQUIRE, RELEASE, TOGETHER, EARLIER, BY_PRODUCT, SHOWN = range(10)
ARRIVED, OVER, WAITED, ISSUED, COPIED_FROM, COPIED_TO, COPIED = OF_CLUSTERS = range(10, 17)
STORES, WORDS = (STORE, RELAXED_STORE, RELEASE), (RELAXED_LOAD, RELAXED_STORE, ACQUIRE, RELEASE)
WARP = 32
NEVER = (-1,)
BY_HOST = NOWHERE = -1
Clock = dict[tuple[int, ...], tuple[int, ...]]
"""What somebody knows to be over: of a queue its launches, of a block its phases, of a thread what it released.  A
queue is a stream of a device."""


class Stamp(NamedTuple):
    """When an access was made: launches of a queue count from 1 (0: the host, before the run), phases of a block end
    with barriers, parts of a thread's phase with its releases."""

    queue: int
    launch: int
    block: int = 0
    phase: int = 0
    thread: int = 0
    part: int = 0

    def is_before(self, other: Stamp, known: Clock) -> bool:
        """Whether it is over for who is at `other` and knows so much."""
        if self[:3] == other[:3] and (self.thread == other.thread or self.phase < other.phase):
            return True
        queue, launch, block, phase, thread, part = self
        return (
            known.get((queue,), NEVER) >= (launch,)
            or known.get((queue, block), NEVER) >= (launch, phase)
            or known.get((queue, block, thread), NEVER) >= (launch, phase, part)
        )


class Access(NamedTuple):
    stamp: Stamp
    ran: int  # which launch of the log, or `BY_HOST`
    code: int
    is_store: bool
    is_word: bool  # of those that may be accessed by several at once
    is_product: bool = False


@dataclass(slots=True)
class Unit:
    """A few bytes: who stored them last, when that was shown to products, and who loaded them since, each thread's last
    time."""

    store: Access | None = None
    shown: Stamp | None = None
    loads: dict[tuple[int, ...], Access] = field(default_factory=dict)


@dataclass(slots=True)
class Arrivals:
    """At an mbarrier, or at the barrier of a cluster: what those know together that have arrived, and that knowledge
    when it was last over."""

    so_far: Clock = field(default_factory=dict)
    over: Clock = field(default_factory=dict)


@dataclass(slots=True)
class Block:
    """`known` to all its threads since their last barrier, and what some know besides."""

    queue: int
    launch: int
    number: int
    known: Clock
    earlier: Clock  # what threads learn that wait for the launches before
    phase: int = 0
    own: dict[int, Clock] = field(default_factory=dict)
    parts: dict[int, int] = field(default_factory=dict)
    unshown: dict[int, list[Unit]] = field(default_factory=dict)

    def of(self, thread: int) -> Clock:
        return self.own.get(thread, self.known)

    def stamp(self, thread: int) -> Stamp:
        return Stamp(self.queue, self.launch, self.number, self.phase, thread, self.parts.get(thread, 0))

    def told(self, thread: int) -> Clock:
        """What a thread knows and did so far; what it does from now on is not among it."""
        part = self.parts.get(thread, 0)
        self.parts[thread] = part + 1
        return joined([self.of(thread), {(self.queue, self.number, thread): (self.launch, self.phase, part)}])

    def learn(self, thread: int, known: Clock) -> None:
        self.own[thread] = joined([self.of(thread), known])

    def show(self, thread: int) -> None:
        """To products, what a thread stored."""
        for unit in self.unshown.pop(thread, ()):
            if unit.store is not None and unit.store.stamp.thread == thread:
                unit.shown = self.stamp(thread)

    def meet(self, first: int, lanes: int) -> None:
        """Threads of a warp."""
        together = [first + lane for lane in range(WARP) if lanes >> lane & 1]
        self.own |= dict.fromkeys(together, joined(self.told(thread) for thread in together))

    def barrier(self) -> None:
        self.known = joined([self.known, *self.own.values(), {(self.queue, self.number): (self.launch, self.phase)}])
        self.phase += 1
        self.own, self.parts = {}, {}


def joined(clocks: Iterable[Clock]) -> Clock:
    whole: Clock = {}
    for clock in clocks:
        for who, until in clock.items():
            if whole.get(who, NEVER) < until:
                whole[who] = until
    return whole


def _queues(device: int) -> range:
    return range(device * STREAMS, (device + 1) * STREAMS)


def disorder(log: Sequence[Ran], memory: Sequence[Memory]) -> list[str]:
    """Pairs of accesses of one run that are in no order, a line for each two places of the code.

    `memory` is that of the devices.  What is in order here is in order in every run that takes the same branches.
    """
    return _Run(log, memory).faults() if any(len(ran.events) for ran in log) else []


class _Run:
    def __init__(self, log: Sequence[Ran], memory: Sequence[Memory]) -> None:
        self.log = log
        self.memory = sorted(memory, key=lambda m: m.low)
        self.lows = [m.low for m in self.memory]
        self.devices = {ran.device for ran in log}
        self.over: dict[int, list[tuple[int, Clock]]] = {}  # by queue, places of launches that ended, what they knew
        for device in self.devices:
            by_host: Clock = {(queue,): (0,) for queue in _queues(device)}
            self.over |= {queue: [(NOWHERE, by_host)] for queue in _queues(device)}
        self.running: dict[int, int] = {}  # by queue, the launch of the log
        self.waited: set[int] = set()  # launches of the log, some thread of which waited for the earlier ones
        self.begun: dict[int, int] = dict.fromkeys(self.over, 0)
        self.blocks: dict[tuple[int, int], Block] = {}  # by launch of the log and number
        self.units: dict[tuple[int, ...], Unit] = {}
        self.released: dict[tuple[int, int], Clock] = {}
        self.arrivals: dict[tuple[int, int, int], Arrivals] = {}  # by launch of the log, block and address
        self.issued: dict[tuple[int, int], Clock] = {}  # by launch of the log and copy, what was known when
        self.pairs: dict[tuple[int, ...], tuple[Access, Access]] = {}
        every = [ran.events[ran.events["bytes"] > 0] for ran in log]
        reach = np.bitwise_or.reduce([x for e in every for x in (*e["at"], *e["bytes"].astype(np.uint64))], initial=16)
        self.unit = int(reach) & -int(reach)
        """Bytes; all accesses begin and end with one."""

    def faults(self) -> list[str]:
        turns = np.concatenate([ran.events["turn"] for ran in self.log])
        numbers = np.concatenate([np.full(len(ran.events), n) for n, ran in enumerate(self.log)])
        events = np.concatenate([ran.events for ran in self.log]).tolist()
        for i in np.argsort(turns, kind="stable").tolist():
            _, at, code, value, block, thread, nbytes, kind, is_shared, _ = events[i]
            number = int(numbers[i])
            here = self._block(number, block)
            if kind == TOGETHER:
                here.meet(thread // WARP * WARP, value) if value else here.barrier()
                continue
            if kind == EARLIER:
                here.learn(thread, here.earlier)
                self.waited.add(number)
                continue
            if kind == SHOWN:
                here.show(thread)
                continue
            if kind == ACQUIRE and (at, value) in self.released:
                here.learn(thread, self.released[at, value])
            if kind in OF_CLUSTERS:
                self._in_cluster(kind, at, code, value, thread, nbytes, number, here)
                continue
            access = Access(here.stamp(thread), number, code, kind in STORES, kind in WORDS, kind == BY_PRODUCT)
            room = (number, block) if is_shared else ()
            for unit in range(at // self.unit, (at + nbytes) // self.unit):
                touched = self._touch((unit, *room), access, here.of(thread))
                if is_shared and access.is_store:
                    here.unshown.setdefault(thread, []).append(touched)
            if kind == RELEASE:
                self.released[at, value] = here.told(thread)
        for queue in self.over:
            self._end(queue)
        self._read_by_host()
        return self._said()

    def _in_cluster(
        self, kind: int, at: int, code: int, value: int, thread: int, nbytes: int, number: int, here: Block
    ) -> None:
        """What a thread arrives at or waits for, which is of block `value`; and copies in bulk, of which each is a
        block of its own, number -1 - `value`: whoever knows it to be over has waited for its mbarrier."""
        if kind in (ARRIVED, WAITED, OVER):
            arrivals = self.arrivals.setdefault((number, value, at), Arrivals())
            if kind == ARRIVED:
                arrivals.so_far = joined([arrivals.so_far, here.told(thread)])
            elif kind == OVER:
                arrivals.over, arrivals.so_far = joined([arrivals.over, arrivals.so_far]), {}
            else:
                here.learn(thread, arrivals.over)
            return
        stamp = Stamp(here.queue, here.launch, -1 - value)
        if kind == ISSUED:
            self.issued[number, value] = here.told(thread)
        elif kind == COPIED:
            arrivals = self.arrivals.setdefault((number, here.number, at), Arrivals())
            arrivals.so_far = joined([arrivals.so_far, {(stamp.queue, stamp.block): (stamp.launch, 0)}])
        else:
            access = Access(stamp, number, code, kind == COPIED_TO, is_word=False)
            room = (number, here.number) if kind == COPIED_TO else ()
            for unit in range(at // self.unit, (at + nbytes) // self.unit):
                touched = self._touch((unit, *room), access, self.issued[number, value])
                if kind == COPIED_TO:
                    touched.shown = stamp  # products see what copies in bulk bring as they do

    def _block(self, number: int, block: int) -> Block:
        ran = self.log[number]
        queue = ran.queue
        if self.running.get(queue) != number:
            self._end(queue)
            self.running[queue] = number
            self.begun[queue] += 1
        if (number, block) not in self.blocks:
            by_host = self.over[queue][0][1]
            self.blocks[number, block] = Block(queue, self.begun[queue], block, by_host, self._earlier(ran))
        return self.blocks[number, block]

    def _earlier(self, ran: Ran) -> Clock:
        """What threads of a launch learn when they wait for those before it."""
        clocks = [self.over[ran.queue][-1][1]]
        for other in _queues(ran.device):
            if other != ran.queue:
                if other in self.running and self.log[self.running[other]].place < ran.behind:
                    self._end(other)
                clocks.append(self.over[other][bisect_left(self.over[other], ran.behind, key=itemgetter(0)) - 1][1])
        return joined(clocks)

    def _end(self, queue: int) -> None:
        """Of the launch that runs there: all later ones know what its threads knew."""
        number = self.running.pop(queue, None)
        if number is None:
            return
        over = [key for key in self.blocks if key[0] == number]
        clocks = [clock for key in over for b in (self.blocks.pop(key),) for clock in (b.known, *b.own.values())]
        known = joined([*clocks, {(queue,): (self.begun[queue],)}])
        pruned = {w: t for w, t in known.items() if w[0] != queue or len(w) == 1}
        self.over[queue].append((self.log[number].place, pruned))

    def _owner(self, key: tuple[int, ...]) -> int | None:
        """Of which device's buffers that is, if of any; shared memory is of none."""
        at = key[0] * self.unit
        m = self.memory[bisect_right(self.lows, at) - 1] if self.memory and len(key) == 1 else None
        return m.device if m is not None and m.is_buffer and m.low <= at < m.high else None

    def _touch(self, key: tuple[int, ...], mine: Access, known: Clock) -> Unit:
        unit = self.units.get(key)
        if unit is None:
            unit = self.units[key] = Unit(self._filled(key))
        for other in (unit.store, *(unit.loads.values() if mine.is_store else ())):
            if other is None or (mine.is_word and other.is_word):
                continue
            over = unit.shown if mine.is_product else other.stamp
            if over is None or not over.is_before(mine.stamp, known):
                self._note(mine, other)
        if mine.is_store:
            unit.store, unit.shown, unit.loads = mine, None, {}
        else:
            unit.loads[mine.stamp[:5]] = mine
        return unit

    def _filled(self, key: tuple[int, ...]) -> Access | None:
        """By the host before the run, if it is of a buffer."""
        owner = self._owner(key)
        return None if owner is None else Access(Stamp(owner * STREAMS, 0), BY_HOST, 0, is_store=True, is_word=False)

    def _note(self, mine: Access, other: Access) -> None:
        self.pairs.setdefault((mine.code, mine.is_store, other.code, other.is_store), (mine, other))

    def _read_by_host(self) -> None:
        """Everything in the memory of a device, when its streams are over."""
        for key, unit in self.units.items():
            owner, last = self._owner(key), unit.store
            if owner not in self.devices or last is None or last.is_word:
                continue
            queue = owner * STREAMS
            mine = Access(Stamp(queue, self.begun[queue] + 1), BY_HOST, 0, is_store=False, is_word=False)
            if not last.stamp.is_before(mine.stamp, joined(self.over[q][-1][1] for q in _queues(owner))):
                self._note(mine, last)

    def _said(self) -> list[str]:
        pairs = {f"{self._words(a)}, in no order with {self._words(b)}" for a, b in self.pairs.values()}
        numbers = set(range(len(self.log))) - self.waited
        return sorted(pairs | {f"{self.log[n].kernel} never waits for the launches before" for n in numbers})

    def _words(self, access: Access) -> str:
        what = f"a {'store' if access.is_store else 'load'} of"
        if access.ran == BY_HOST:
            return f"{what} the host in the memory of device {access.stamp.queue // STREAMS}"
        ran = self.log[access.ran]
        return f"{what} device {ran.device} at {lines_of(ran.code, [access.code])[0]}"
