"""A program on its way to the table that compiled code replays: operands with addresses, steps, and where threads
meet."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ...graph.dtypes import DType
from ..base import Comm, Tensor
from ..operands import Bound as Bound
from ..operands import Operand as Operand
from ..operands import Region
from ..operands import float_bits as float_bits
from .compiler import Kernel

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
