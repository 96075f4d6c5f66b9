"""Bindings of instructions to launches: what a family of kernels has to say, and what it may ask for."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ....graph.dtypes import DType
from ...base import Tensor, contiguous_strides
from ...operands import Bound, Operand, need
from ..device.driver import ALONE, Kernel, Launch, Single, Span, Three
from ..device.limits import EVERYWHERE, MOST, Limits

Word = Operand | int | float
"""A word of a launch by its Python type: an address, an i64, a double."""
ALIGNMENT = 64
DECLARED = 1024
"""Bytes of shared memory that kernels whose launches size more than `EVERYWHERE` declare on top, at most."""


@dataclass(slots=True)
class Launches:
    """The launches of a program while they are bound.

    `keep` puts an array into the memory of the device and gives its address; `scratch_at` is where the memory of the
    current instruction begins; `limits` is what the device has, `processors` how many multiprocessors.  What a binding
    asks for may depend on shapes, attributes and `limits` only, and launches nothing if it raises `NoKernelError`.
    """

    keep: Callable[[npt.NDArray[Any]], int]
    scratch_at: int = 0
    number: int = 0
    taken: int = 0
    items: list[Single] = field(default_factory=list)
    faults: list[tuple[int, str]] = field(default_factory=list)
    fault_at: int = 0
    limits: Limits = MOST
    processors: int = 1

    def taken_out(self) -> tuple[Single, ...]:
        """What was appended since the last time."""
        items, self.items = tuple(self.items), []
        return items

    def fits(self, shared_bytes: int) -> bool:
        """Whether a block may have so much shared memory on the device."""
        return shared_bytes <= EVERYWHERE or shared_bytes + DECLARED <= self.limits.shared

    def add(
        self,
        kernel: Kernel,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        words: Sequence[Word],
        shared_bytes: int = 0,
        cluster: Three = ALONE,
    ) -> None:
        """Append a launch; nothing is launched where the grid is empty.  Raises `NoKernelError` where a block would
        have more shared memory than the device has for one."""
        need(
            self.fits(shared_bytes),
            f"{kernel} takes {shared_bytes} bytes of shared memory; a block has {self.limits.shared} here",
        )
        if 0 in (shape := _three(grid)):
            return
        packed, spans = self._packed(words)
        self.items.append(Launch(kernel, shape, _three(block), shared_bytes, packed, spans, self.number, cluster))

    def _packed(self, words: Sequence[Word]) -> tuple[tuple[int, ...], tuple[Span, ...]]:
        """Words as 64 bits each, and the bytes that those of them which are addresses stand for."""
        packed, spans = [], []
        for i, word in enumerate(words):
            if isinstance(word, Operand):
                spans.append(span_of(word, i))
                packed.append(word.address)
            elif isinstance(word, int | np.integer):
                packed.append(int(word) % 2**64)
            else:
                packed.append(int(struct.unpack("<Q", struct.pack("<d", word))[0]))
        return tuple(packed), tuple(spans)

    def scratch(self, shape: Sequence[int], dtype: DType = DType.F32) -> Operand:
        """Memory of this instruction alone, dense; it holds anything when the first launch begins."""
        operand = _dense(self.scratch_at + self.taken, shape, dtype, self.taken)
        self.taken += -(-operand.tensor.spec.nbytes // ALIGNMENT) * ALIGNMENT
        return operand

    def constant(self, array: npt.NDArray[Any]) -> Operand:
        """An array that is put into the memory of the device once, dense."""
        dtype = _DTYPES[array.dtype.str.lstrip("<|")]
        data = np.ascontiguousarray(array)
        return _dense(self.keep(data), data.shape, dtype, 0)

    def fault(self, text: str) -> list[Word]:
        """The words of a `Fault`: `text` says what is wrong with a number from data, which stands for ``{value}``."""
        self.faults.append((self.number, text))
        return [_dense(self.fault_at, (2,), DType.I64, 0), len(self.faults) - 1]


class Wordless(Launches):
    """Launches without their words, for who asks which kernels there are and runs none."""

    def _packed(self, words: Sequence[Word]) -> tuple[tuple[int, ...], tuple[Span, ...]]:
        return (), ()


_DTYPES = {"f4": DType.F32, "f2": DType.F16, "u2": DType.BF16, "i1": DType.I8, "i2": DType.I16, "i4": DType.I32}
_DTYPES |= {"i8": DType.I64, "f8": DType.F64, "u1": DType.I8, "u4": DType.I32, "u8": DType.I64}

Binding = Callable[[Launches, Bound], None]
"""Appends the launches of one instruction.  Raises `NoKernelError` if the kernels cannot do it."""


def _three(shape: int | tuple[int, ...]) -> Three:
    sizes = (shape,) if isinstance(shape, int) else shape
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


def _dense(address: int, shape: Sequence[int], dtype: DType, offset: int) -> Operand:
    return Operand(address, Tensor(-1, offset, tuple(shape), contiguous_strides(shape), dtype))


def span_of(operand: Operand, word: int) -> Span:
    """The bytes that a kernel may touch through an operand: all that its strides reach; of a quantised one its whole
    buffer."""
    region = operand.region
    begin = operand.address - operand.tensor.offset
    return Span(word, begin + region.low, begin + region.high)


def blocks(count: int, size: int) -> int:
    """Blocks of `size` that `count` fills."""
    return -(-count // size)


def rows_of(x: Operand) -> int:
    """The step between rows of a float operand, in elements.  Raises `NoKernelError` if they do not lie evenly."""
    is_empty = 0 in x.shape
    need(x.is_float and (x.has_rows or is_empty), "rows do not lie evenly")
    return x.shape[-1] if is_empty else x.row_step // 4
