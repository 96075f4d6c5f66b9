"""A program on its way to the table that compiled code replays: operands with addresses, steps, and where threads
meet."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
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
    """Bytes of one buffer, from `low` to before `high`."""

    buffer: int
    low: int
    high: int

    def overlaps(self, other: Region) -> bool:
        return self.buffer == other.buffer and self.low < other.high and other.low < self.high


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
        return Region(t.buffer, t.offset, t.offset + (reach * size if all(t.shape) else 0))


@dataclass(frozen=True, slots=True)
class Bound:
    """One instruction with its operands at their addresses."""

    op: str
    src: tuple[Operand | None, ...]
    dst: tuple[Operand, ...]
    attrs: Attrs

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


@dataclass(frozen=True, slots=True)
class Step:
    """One call of a kernel: its words, whether threads meet before it, whether one of them does it alone, and the
    number of the instruction it belongs to."""

    kernel: Kernel
    words: npt.NDArray[np.int64]
    meets: bool
    alone: bool
    number: int


@dataclass(slots=True)
class Steps:
    """Steps of one table, and memory that belongs to it.

    What moves few bytes one thread does alone: a meeting costs more than it would save.  Threads meet before a step
    that touches what others may still be writing, or writes what they may still be reading.
    """

    threads: int
    comm: Comm | None = None
    number: int = 0
    steps: list[Step] = field(default_factory=list)
    owned: list[Any] = field(default_factory=list)
    _written: list[tuple[Region, bool]] = field(default_factory=list)
    _read: list[tuple[Region, bool]] = field(default_factory=list)
    _made: dict[Hashable, tuple[Operand, list[Region]]] = field(default_factory=dict)
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
    ) -> None:
        """Append a step; `reads` and `writes` are everything it touches besides memory of its own, `nbytes` how much of
        that it moves, if not all."""
        read, written = [o.region for o in reads], [o.region for o in writes]
        moved = sum(r.high - r.low for r in (*read, *written)) if nbytes is None else nbytes
        alone = self.threads == 1 or moved < SHARED

        def touched(regions: Sequence[Region], before: Sequence[tuple[Region, bool]]) -> bool:
            return any(r.overlaps(other) for other, by_one in before if not (alone and by_one) for r in regions)

        meets = touched(read, self._written) or touched(written, self._written) or touched(written, self._read)
        if meets:
            self._written, self._read = [], []
        self._written += [(r, alone) for r in written]
        self._read += [(r, alone) for r in read]
        self.steps.append(Step(kernel, np.array(words, np.int64), meets, alone, self.number))
        self._forget(written)

    def memory(self, nbytes: int) -> Operand:
        """Memory that lives as long as the table, aligned to a cache line."""
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

    def known(self, key: Hashable) -> Operand | None:
        """What an earlier step made under `key`, if its sources still hold what it was made of."""
        found = self._made.get(key)
        return None if found is None else found[0]

    def remember(self, key: Hashable, made: Operand, sources: Sequence[Operand]) -> None:
        """Let later steps use `made` as long as nobody writes over it or over what it was made of."""
        self._made[key] = (made, [made.region, *(o.region for o in sources)])

    def _forget(self, written: Sequence[Region]) -> None:
        gone = [k for k, (_, regions) in self._made.items() if any(w.overlaps(r) for w in written for r in regions)]
        for key in gone:
            del self._made[key]


Binding = Callable[[Steps, Bound], bool]
"""Appends the steps of one instruction; False if the kernels cannot do it, and NumPy has to do all of it."""
