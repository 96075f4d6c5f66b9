"""The launch builder, which collects launches while a kernel family binds instructions."""

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
"""A word of a launch: an operand is its address, an `int` an i64, a `float` a double."""
ALIGNMENT = 64
DECLARED = 1024
"""The most shared-memory bytes that kernels declare in addition to a dynamic size above `DEFAULT_SHARED_BYTES`."""


@dataclass(slots=True)
class Launches:
    """The launches of a program while it is bound.

    The launches, scratch bytes and constants of a binding depend only on shapes, attributes and `limits`. A binding
    that raises `NoKernelError` adds no launch.

    Args:
        upload_array: Copies an array to device memory and returns its address.
        scratch_address: Address of the scratch of the current instruction.
        number: The current instruction.
        scratch_bytes: Scratch bytes of the current instruction so far.
        items: Launches and exchanges so far.
        faults: Instruction and message of each fault.
        fault_address: Address of the fault record.
        limits: Resource limits of the device.
        multiprocessor_count: Multiprocessors of the device.
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
        """Return the steps since the last call, and remove them."""
        items, self.items = tuple(self.items), []
        return items

    def fits(self, shared_bytes: int) -> bool:
        """Return whether a block of the device can have this much dynamic shared memory."""
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
        """Append a launch. An empty grid adds nothing.

        Args:
            kernel: The kernel.
            grid: Blocks, along up to three axes.
            block: Threads of a block, along up to three axes.
            words: The fields of the kernel's struct.
            shared_bytes: Dynamic shared memory of a block.
            cluster: Blocks of a cluster.

        Raises:
            NoKernelError: The device has less shared memory per block.
        """
        need(
            self.fits(shared_bytes),
            f"{kernel} takes {shared_bytes} bytes of shared memory; a block has {self.limits.shared} here",
        )
        if 0 in (shape := _three(grid)):
            return
        packed, spans = self._packed(words)
        self.items.append(Launch(kernel, shape, _three(block), shared_bytes, packed, spans, self.number, cluster))

    def _packed(self, words: Sequence[Word]) -> tuple[tuple[int, ...], tuple[Span, ...]]:
        """Return the words as 64-bit integers, and the byte ranges of words that are addresses."""
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
        """Allocate contiguous scratch of the current instruction, with undefined contents."""
        operand = _dense(self.scratch_at + self.taken, shape, dtype, self.taken)
        self.taken += -(-operand.tensor.spec.nbytes // ALIGNMENT) * ALIGNMENT
        return operand

    def constant(self, array: npt.NDArray[Any]) -> Operand:
        """Return a constant array in device memory, contiguous."""
        dtype = _DTYPES[array.dtype.str.lstrip("<|")]
        data = np.ascontiguousarray(array)
        return _dense(self.keep(data), data.shape, dtype, 0)

    def fault(self, text: str) -> list[Word]:
        """Return the words of a `Fault`. `text` describes an illegal number from data as ``{value}``."""
        self.faults.append((self.number, text))
        return [_dense(self.fault_at, (2,), DType.I64, 0), len(self.faults) - 1]


class Wordless(Launches):
    """A launch builder without words, for callers that only list kernels."""

    def _packed(self, words: Sequence[Word]) -> tuple[tuple[int, ...], tuple[Span, ...]]:
        return (), ()


_DTYPES = {"f4": DType.F32, "f2": DType.F16, "u2": DType.BF16, "i1": DType.I8, "i2": DType.I16, "i4": DType.I32}
_DTYPES |= {"i8": DType.I64, "f8": DType.F64, "u1": DType.I8, "u4": DType.I32, "u8": DType.I64}

Binding = Callable[[Launches, Bound], None]
"""A function that appends the launches of one instruction, or raises `NoKernelError`."""


def _three(shape: int | tuple[int, ...]) -> Three:
    sizes = (shape,) if isinstance(shape, int) else shape
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


def _dense(address: int, shape: Sequence[int], dtype: DType, offset: int) -> Operand:
    return Operand(address, Tensor(-1, offset, tuple(shape), contiguous_strides(shape), dtype))


def span_of(operand: Operand, word: int) -> Span:
    """Return the byte range that the strides of an operand reach, or the whole buffer of a quantised operand."""
    region = operand.region
    begin = operand.address - operand.tensor.offset
    return Span(word, begin + region.low, begin + region.high)


def blocks(count: int, size: int) -> int:
    """Return `count / size`, rounded up."""
    return -(-count // size)


def rows_of(x: Operand) -> int:
    """Return the stride between rows of a float operand in elements. Raises `NoKernelError` if it is not uniform."""
    is_empty = 0 in x.shape
    need(x.is_float and (x.has_rows or is_empty), "rows do not lie evenly")
    return x.shape[-1] if is_empty else x.row_step // 4
