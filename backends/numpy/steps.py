"""A program on its way to the table that compiled code replays: operands with addresses, steps, and where threads
meet."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ...graph.dtypes import DType
from ...graph.node import Attrs
from ...graph.spec import Spec
from ..base import Comm, Tensor, contiguous_strides
from .compiler import Kernel


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes of one buffer, from `low` to before `high`: all of them, or `width` every `pitch` bytes."""

    buffer: int
    low: int
    high: int
    pitch: int = 0
    width: int = 0

    def overlaps(self, other: Region) -> bool:
        if self.buffer != other.buffer or self.low >= other.high or other.low >= self.high:
            return False
        if not self.pitch or self.pitch != other.pitch:
            return True
        apart = (other.low - self.low) % self.pitch
        return apart < self.width or apart + other.width > self.pitch


RUN = Region(0, -1, 0)
"""Whether the run goes on, as if it lay in memory: a step that may stop it writes this, one that writes a state reads
it.  So no thread writes a state that would not be put back, because another has stopped at an earlier instruction."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor at its address.  Of a weight, state or constant also what its whole buffer is declared as, and holds."""

    address: int
    tensor: Tensor
    declared: Spec | None = None
    stored: Spec | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def strides(self) -> tuple[int, ...]:
        """In elements."""
        return self.tensor.strides

    @property
    def dtype(self) -> DType:
        return self.tensor.dtype

    @property
    def is_float(self) -> bool:
        return self.tensor.dtype is DType.F32

    @property
    def is_whole(self) -> bool:
        """Whether this is all of its buffer, and no view of it."""
        t = self.tensor
        return self.declared is not None and t.shape == self.declared.shape and t.offset == 0 and self.is_dense

    def starts_row(self, multiple: int, nbytes: int) -> bool:
        """Whether this is all of its buffer, or rows of a matrix, `nbytes` each, from a multiple of `multiple` on."""
        t = self.tensor
        rows = self.declared is not None and len(t.shape) == 2 and t.shape[1:] == self.declared.shape[1:]
        return self.is_whole or (rows and self.is_dense and t.offset % (multiple * nbytes) == 0)

    @property
    def is_dense(self) -> bool:
        return self.strides == contiguous_strides(self.shape)

    def part(self, axis: int, start: int, count: int) -> Operand:
        """`count` entries of an axis from `start`."""
        t = self.tensor
        skipped = start * t.strides[axis] * t.dtype.storage.itemsize
        shape = (*t.shape[:axis], count, *t.shape[axis + 1 :])
        return Operand(
            self.address + skipped, replace(t, offset=t.offset + skipped, shape=shape), self.declared, self.stored
        )

    @property
    def has_rows(self) -> bool:
        """Whether all rows are dense and lie evenly."""
        return self._row_step() is not None

    @property
    def row_step(self) -> int:
        """Bytes from row to row of an operand that has rows."""
        step = self._row_step()
        assert step is not None
        return step

    def _row_step(self) -> int | None:
        *leading, n = self.shape
        if n != 1 and self.strides[-1] != 1:
            return None
        axes = [(m, s) for m, s in zip(leading, self.strides, strict=False) if m != 1]
        for (_, outer), (m, inner) in pairwise(axes):
            if outer != m * inner:
                return None
        return 4 * (axes[-1][1] if axes else n)

    @property
    def region(self) -> Region:
        t = self.tensor
        if t.dtype.is_quantised:
            assert self.stored is not None
            return Region(t.buffer, 0, self.stored.nbytes)
        size = t.dtype.storage.itemsize
        reach = sum((n - 1) * s for n, s in zip(t.shape, t.strides, strict=True)) + 1
        high = t.offset + (reach * size if all(t.shape) else 0)
        pitch, width = (self._row_step() if t.shape and size == 4 else None), size * (t.shape[-1] if t.shape else 1)
        if pitch is None or pitch <= width or high - t.offset <= width:
            return Region(t.buffer, t.offset, high)
        return Region(t.buffer, t.offset, high, pitch, width)


@dataclass(frozen=True, slots=True)
class Bound:
    """One instruction with its operands at their addresses."""

    op: str
    src: tuple[Operand | None, ...]
    dst: tuple[Operand, ...]
    attrs: Attrs
    readers: Callable[[], Sequence[Bound] | None] = lambda: None
    """All instructions that read the result; None if others may, too: it is kept, or goes out of the program."""

    @property
    def out(self) -> Operand:
        return self.dst[0]

    def operand(self, index: int) -> Operand:
        """An operand that is always there."""
        found = self.src[index]
        assert found is not None
        return found

    def optional(self, index: int) -> Operand | None:
        return self.src[index] if index < len(self.src) else None

    def float(self, name: str) -> int:
        """An attribute as a word: the bits of a float32."""
        value = self.attrs[name]
        assert isinstance(value, int | float)
        return float_bits(value)


def float_bits(value: float) -> int:
    """The word that `float_word` reads as `value`."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


SHARED = 32 * 1024
"""Bytes that a step has to move before threads share it."""
REPEATED = 16 * 1024
"""Bytes that every thread rather goes through for itself than waits for another to do it."""


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
    * in parts (`deal`): what goes through the columns of a product goes on with the columns that a thread has of it
      (`columns_of`), and what all threads need next each makes for itself (`copies`).
    """

    threads: int
    comm: Comm | None = None
    number: int = 0
    steps: list[Step] = field(default_factory=list)
    owned: list[Any] = field(default_factory=list)
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

    def deal_columns(self, kernel: Kernel, parts: Sequence[Share | None], out: Operand, bounds: Sequence[int]) -> None:
        """The same, and thread i writes the columns of `out` from ``bounds[i]`` to before ``bounds[i + 1]``."""
        self.deal(kernel, parts)
        if self.threads > 1:
            self._columns[out.region] = bounds

    def columns_of(self, operands: Sequence[Operand]) -> Sequence[int] | None:
        """The columns that each thread has of one of `operands` since they last met, as bounds; None if of none."""
        found = (self._columns.get(o.region) for o in operands)
        return next((b for b in found if b is not None), None)

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

    def _append(self, kernel: Kernel, parts: Mapping[int, Share], stops: bool) -> None:
        read, written = _touches(parts, stops)
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
        raw = np.zeros(nbytes + 64, np.uint8)
        start = -raw.ctypes.data % 64
        self.owned.append(raw)
        self._private -= 1
        tensor = Tensor(self._private, 0, (nbytes,), (1,), DType.I8)
        return Operand(raw.ctypes.data + start, tensor)

    def scratch(self, purpose: str, nbytes: int) -> Operand:
        """Memory for a purpose, shared by all steps that ask for it; a later step overwrites what an earlier one
        left."""
        found = self._scratch.get((purpose, nbytes))
        if found is None:
            found = self._scratch[purpose, nbytes] = self.memory(nbytes)
        return found

    def constant(self, array: npt.NDArray[Any]) -> Operand:
        """Memory that holds what `array` does; the same for all who ask for the same bytes."""
        data = array.tobytes()
        if data not in self._constants:
            self._constants[data] = made = self.memory(len(data))
            ctypes.memmove(made.address, data, len(data))
        return self._constants[data]

    def copies(self, purpose: str, nbytes: int) -> Sequence[Operand]:
        """Memory of its own for each thread, that holds nothing which is still known."""
        held = {o.tensor.buffer for made, _ in self._made.values() for o in made}
        for number in count():
            found = [self.scratch(f"{purpose} {number} of thread {t}", nbytes) for t in range(self.threads)]
            if not any(o.tensor.buffer in held for o in found):
                return found
        raise AssertionError("never")

    def known(self, key: Hashable) -> Sequence[Operand] | None:
        """What an earlier step made under `key`, for each thread, if its sources still hold what it was made of."""
        found = self._made.get(key)
        return None if found is None else found[0]

    def remember(self, key: Hashable, made: Sequence[Operand], sources: Sequence[Operand]) -> None:
        """Let later steps use `made` as long as nobody writes over it or over what it was made of."""
        self._made[key] = (made, [o.region for o in (*made, *sources)])

    def stand_in(self, made: Sequence[Operand], value: Operand) -> None:
        """Let `made`, one for each thread, hold what `value` would, in whose place nothing is written."""
        self.forget([value.region])
        self.remember(("own", value.region), made, [value])

    def stand_ins(self, value: Operand) -> Sequence[Operand] | None:
        """What each thread has instead of `value`."""
        found = self.known(("own", value.region))
        return None if found is None else [like(o, value) for o in found]

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


def _touches(parts: Mapping[int, Share], stops: bool) -> tuple[Touched, Touched]:
    """What each thread reads, and what it writes."""
    read = [(o.region, thread) for thread, part in parts.items() for o in part.reads]
    written = [(o.region, thread) for thread, part in parts.items() for o in part.writes]
    for thread, part in parts.items():
        if stops or any(o.declared is not None for o in part.writes):
            read.append((RUN, thread))
        if stops:
            written.append((RUN, thread))
    return read, written


Binding = Callable[[Steps, Bound], bool]
"""Appends the steps of one instruction; False if the kernels cannot do it, and NumPy has to do all of it."""
Fused = Callable[[Steps, Sequence[Bound]], bool]
"""The same for several in a row."""
