"""A program on its way to the table that compiled code replays: steps, who does them, and where threads meet."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import field, replace
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from ...graph.dtypes import DType
from ...graph.lazy_dataclass import dataclass
from ..base import Comm, Tensor
from ..flow import Flow
from ..operands import Bound, Operand, Region
from .compiler import ALIGNMENT, Kernel
from .kernels import tickets

RUN = Region(0, -1, 0)
"""Whether the run goes on, as if it lay in memory: a step that may stop it writes this, one that writes a state reads
it.  So no thread writes a state that would not be put back, because another has stopped at an earlier instruction; and
none draws tickets of a step to which another does not come, who would have to lay out new ones."""


SHARED = 32 * 1024
"""Bytes that a step has to move before threads share it."""
REPEATED = 16 * 1024
"""Each thread goes through so few bytes for itself: to wait until another has done it would take longer."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one thread does of a step: the words of the kernel, and all it touches besides memory of its own."""

    words: Sequence[int]
    reads: Sequence[Operand]
    writes: Sequence[Operand]


@dataclass(frozen=True, slots=True)
class Step:
    """One call of a kernel: the words of each thread, None for those that have nothing to do; whether each does all
    that its words say, or the kernel cuts it up; whether threads meet before it; the number of its instruction."""

    kernel: Kernel
    words: Sequence[npt.NDArray[np.int64] | None]
    whole: bool
    meets: bool
    number: int


class Owned:
    """Memory that belongs to tables."""

    def __init__(self) -> None:
        self._arrays: list[npt.NDArray[np.uint8]] = []

    def take(self, nbytes: int) -> int:
        """The address of zeros, aligned to a cache line."""
        raw = np.zeros(nbytes + ALIGNMENT, np.uint8)
        self._arrays.append(raw)
        return int(raw.ctypes.data + -raw.ctypes.data % ALIGNMENT)

    def fill(self, address: int, data: bytes) -> None:
        """Let memory that was taken hold `data`."""
        ctypes.memmove(address, data, len(data))


ALL = -1
"""In place of a thread: each of them touches it."""
Touched = list[tuple[Region, int]]


@dataclass(slots=True)
class Steps:
    """Steps of a table, and memory that belongs to it and the tables before and after.

    Threads meet before a step in which one of them touches what another may still be writing, or writes what another
    may still be reading.  Few meetings come of how a step is done:

    * by all threads, as the kernel cuts it up, if it moves many bytes (`add`);
    * by the first alone, if it moves few (`add`);
    * by all threads, piece by piece as they come, if it takes long (`add_pieces`);
    * in parts (`deal`): what goes through the columns of a product goes on with the columns that a thread has of it
      (`columns_of`), and what all threads need next each makes for itself (`copies`).
    """

    threads: int
    comm: Comm | None = None
    number: int = 0
    steps: list[Step] = field(default_factory=list)
    owned: Owned = field(default_factory=Owned)
    _written: Touched = field(default_factory=list)
    _read: Touched = field(default_factory=list)
    _columns: dict[Region, Sequence[int]] = field(default_factory=dict)
    _made: dict[Hashable, tuple[Sequence[Operand], list[Region]]] = field(default_factory=dict)
    _scratch: dict[tuple[str, int], Operand] = field(default_factory=dict)
    _constants: dict[bytes, Operand] = field(default_factory=dict)
    _private: int = -1

    def add(
        self,
        kernel: Kernel,
        words: Sequence[int],
        *,
        reads: Sequence[Operand],
        writes: Sequence[Operand],
        nbytes: int | None = None,
        stops: bool = False,
    ) -> None:
        """Append a step; `reads` and `writes` are everything it touches besides memory of its own, `nbytes` how much of
        that it moves, if not all; `stops` says that it may stop the run."""
        part, moved = Share(words, reads, writes), _moved(reads, writes) if nbytes is None else nbytes
        self._append(kernel, {ALL if self.threads > 1 and moved >= SHARED else 0: part}, stops)

    def is_shared(self, reads: Sequence[Operand], writes: Sequence[Operand]) -> bool:
        """Whether threads share what touches this."""
        return self.threads > 1 and _moved(reads, writes) >= SHARED

    def deal(self, kernel: Kernel, parts: Sequence[Share | None]) -> None:
        """Append a step of which each thread does a part that is its own; None for one that has none."""
        self._append(kernel, {thread: part for thread, part in enumerate(parts) if part is not None}, False)

    def add_pieces(self, kernel: Kernel, share: Callable[[int], Share]) -> None:
        """Append a step whose pieces threads take as they come: `share` is all of it, given where they draw tickets."""
        self._append(kernel, {ALL: share(self.memory(tickets.NBYTES).address)}, False, drawn=True)

    def deal_columns(self, kernel: Kernel, parts: Sequence[Share | None], out: Operand, bounds: Sequence[int]) -> None:
        """Append a step of which thread i does a part that writes the columns of `out` from ``bounds[i]`` to before
        ``bounds[i + 1]``; None for a thread that has none."""
        self.deal(kernel, parts)
        if self.threads > 1:
            self._columns[out.region] = bounds

    def columns_of(self, operands: Sequence[Operand]) -> Sequence[int] | None:
        """The columns that each thread has of one of `operands` since they last met, as bounds; None if of none."""
        bounds = (self._columns.get(o.region) for o in operands)
        return next((b for b in bounds if b is not None), None)

    def is_repeated(self, reads: Sequence[Operand]) -> bool:
        """Whether each thread should do for itself what makes little of this."""
        return sum(o.tensor.spec.nbytes for o in reads) <= REPEATED

    def _waits(self, read: Touched, written: Touched) -> bool:
        return any(
            (thread != other or thread == ALL) and region.overlaps(before)
            for mine, theirs in ((read, self._written), (written, self._written), (written, self._read))
            for before, other in theirs
            for region, thread in mine
        )

    def _append(self, kernel: Kernel, parts: Mapping[int, Share], stops: bool, *, drawn: bool = False) -> None:
        read, written = _touches(parts, stops, drawn)
        meets = self.threads > 1 and self._waits(read, written)
        if meets:
            self._written, self._read, self._columns = [], [], {}
        self._written += written
        self._read += read
        if ALL in parts:
            given: list[Share | None] = [parts[ALL]] * self.threads
        else:
            given = [parts.get(thread) for thread in range(self.threads)]
        words = [None if part is None else np.array(part.words, np.int64) for part in given]
        self.steps.append(Step(kernel, words, ALL not in parts, meets, self.number))
        self.forget([region for region, _ in written])

    def take(self) -> list[Step]:
        """The steps so far; those that follow will be of another table."""
        taken, self.steps = self.steps, []
        self._written, self._read, self._columns = [], [], {}
        return taken

    def memory(self, nbytes: int) -> Operand:
        """Memory that lives as long as the tables, aligned to a cache line."""
        self._private -= 1
        return Operand(self.owned.take(nbytes), Tensor(self._private, 0, (nbytes,), (1,), DType.I8))

    def scratch(self, purpose: str, nbytes: int) -> Operand:
        """Memory for a purpose, shared by all steps that ask for it; a later step overwrites what an earlier one
        left."""
        memory = self._scratch.get((purpose, nbytes))
        if memory is None:
            memory = self._scratch[purpose, nbytes] = self.memory(nbytes)
        return memory

    def constant(self, array: npt.NDArray[Any]) -> Operand:
        """Memory that holds what `array` does; the same for all who ask for the same bytes."""
        data = array.tobytes()
        if data not in self._constants:
            self._constants[data] = memory = self.memory(len(data))
            self.owned.fill(memory.address, data)
        return self._constants[data]

    def copies(self, purpose: str, nbytes: int, *, shared: bool = False) -> Sequence[Operand]:
        """Memory of its own for each thread, or one for all, that holds nothing which is still known."""
        held = {o.tensor.buffer for known, _ in self._made.values() for o in known}
        for number in count():
            whose = ["all"] * self.threads if shared else [f"thread {t}" for t in range(self.threads)]
            memory = [self.scratch(f"{purpose} {number} of {who}", nbytes) for who in whose]
            if not any(o.tensor.buffer in held for o in memory):
                return memory
        raise AssertionError("never")

    def known(self, key: Hashable) -> Sequence[Operand] | None:
        """What an earlier step left under `key`, for each thread, if its sources still hold what they held then."""
        known = self._made.get(key)
        return None if known is None else known[0]

    def remember(self, key: Hashable, made: Sequence[Operand], sources: Sequence[Operand]) -> None:
        """Let later steps use `made` as long as nobody writes over it or over what it was made of."""
        self._made[key] = (made, [o.region for o in (*made, *sources)])

    def stand_in(self, made: Sequence[Operand], value: Operand) -> None:
        """Let `made`, one for each thread, hold what `value` would, in whose place nothing is written."""
        self.forget([value.region])
        self.remember(("own", value.region), made, [value])

    def stand_ins(self, value: Operand) -> Sequence[Operand] | None:
        """What each thread has instead of `value`."""
        own = self.known(("own", value.region))
        return None if own is None else [like(o, value) for o in own]

    def forget(self, written: Sequence[Region]) -> None:
        """What was made of these, or lies there, is no longer known."""
        for region in [r for r in self._columns if any(w.overlaps(r) for w in written)]:
            del self._columns[region]
        gone = [k for k, (_, regions) in self._made.items() if any(w.overlaps(r) for w in written for r in regions)]
        for key in gone:
            del self._made[key]


def like(memory: Operand, value: Operand) -> Operand:
    """`memory` as a tensor that lies as `value` does."""
    t = value.tensor
    return Operand(memory.address, replace(memory.tensor, shape=t.shape, strides=t.strides, dtype=t.dtype))


def _moved(reads: Sequence[Operand], writes: Sequence[Operand]) -> int:
    """Bytes of what is not scratch."""
    return sum(o.region.high - o.region.low for o in (*reads, *writes) if o.tensor.buffer >= 0)


def _touches(parts: Mapping[int, Share], stops: bool, drawn: bool) -> tuple[Touched, Touched]:
    """What each thread reads, and what it writes."""
    read = [(o.region, thread) for thread, part in parts.items() for o in part.reads]
    written = [(o.region, thread) for thread, part in parts.items() for o in part.writes]
    for thread, part in parts.items():
        if stops or drawn or any(o.declared is not None for o in part.writes):
            read.append((RUN, thread))
        if stops:
            written.append((RUN, thread))
    return read, written


Binding = Callable[[Steps, Bound], bool]
"""Appends the steps of one instruction; False if the kernels cannot do it, and NumPy has to do all of it."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Instructions that are bound together, and what appends their steps: nothing can keep it from that."""

    numbers: Sequence[int]
    bind: Callable[[Steps], None]


Fused = Callable[[Flow, int], Chain]
"""The chain that begins with an instruction.  Raises `NoKernelError` if none begins there that the kernels can do.
What only the chain reads of itself is not written."""
