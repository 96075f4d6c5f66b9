"""Operands of an instruction at their memory addresses, for backends that bind kernels of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from ...graph.attrs import Attrs
from ...graph.dtypes import DType
from ...graph.errors import BackendError
from ...graph.lazy_dataclass import dataclass
from ...graph.old_names import make_module_getattr
from ...graph.spec import Spec
from ..base import Tensor, contiguous_strides


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """A set of bytes in one buffer: [`low`, `high`), or only the first `width` bytes of every `pitch` bytes of it."""

    buffer: int
    low: int
    high: int
    pitch: int = 0
    width: int = 0

    def overlaps(self, other: MemoryRegion) -> bool:
        if self.buffer != other.buffer or self.low >= other.high or other.low >= self.high:
            return False
        if not self.pitch or self.pitch != other.pitch:
            return True
        apart = (other.low - self.low) % self.pitch
        return apart < self.width or apart + other.width > self.pitch


@dataclass(frozen=True)
class Operand:
    """A tensor of a program at its memory address, as kernels read or write it.

    If the tensor is a weight, state or constant, or a view of one, there are also two specs of its whole buffer.
    `declared_spec` is the spec in the graph, `stored_spec` the spec in memory. `kind` is the kind of the buffer.
    """

    address: int
    tensor: Tensor
    declared_spec: Spec | None = None
    stored_spec: Spec | None = None
    kind: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides in elements."""
        return self.tensor.strides

    @property
    def dtype(self) -> DType:
        return self.tensor.dtype

    @property
    def is_float(self) -> bool:
        return self.tensor.dtype is DType.F32

    @property
    def has_packed_layout(self) -> bool:
        """Whether quantised blocks are reordered for kernels ("packed"), as in weights; in states they are not."""
        return self.tensor.dtype.is_quantised and self.stored_spec is not None and self.kind != "state"

    @property
    def is_whole_buffer(self) -> bool:
        """Whether the operand is a whole buffer, and not a view of a part."""
        t = self.tensor
        return (
            self.declared_spec is not None and t.shape == self.declared_spec.shape and t.offset == 0 and self.is_dense
        )

    def is_whole_or_row_aligned(self, row_multiple: int, row_bytes: int) -> bool:
        """Return whether the operand is a whole buffer, or dense rows from a multiple of `row_multiple` rows on.

        `row_bytes` are the bytes of one row.
        """
        t = self.tensor
        rows = self.declared_spec is not None and len(t.shape) == 2 and t.shape[1:] == self.declared_spec.shape[1:]
        return self.is_whole_buffer or (rows and self.is_dense and t.offset % (row_multiple * row_bytes) == 0)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @cached_property
    def is_dense(self) -> bool:
        """Whether the elements are contiguous in row-major order."""
        dense = contiguous_strides(self.shape)
        return 0 in self.shape or all(n == 1 or s == d for n, s, d in zip(self.shape, self.strides, dense, strict=True))

    def is_dense_along(self, axis: int) -> bool:
        """Return whether the elements along `axis` are contiguous."""
        return self.shape[axis] == 1 or self.strides[axis] == 1

    def slice_axis(self, axis: int, start: int, count: int) -> Operand:
        """Return the slice of `count` entries along `axis` from `start`, without a copy."""
        t = self.tensor
        skipped = t.dtype.count_bytes(start * t.strides[axis])
        shape = (*t.shape[:axis], count, *t.shape[axis + 1 :])
        tensor = replace(t, offset=t.offset + skipped, shape=shape)
        return replace(self, address=self.address + skipped, tensor=tensor)

    @property
    def has_uniform_row_stride(self) -> bool:
        """Whether each row is contiguous, and the distance between consecutive rows is the same everywhere."""
        return self._find_row_stride_bytes() is not None

    @property
    def row_stride_bytes(self) -> int:
        """Row stride in bytes, for an operand with a uniform row stride."""
        step = self._find_row_stride_bytes()
        assert step is not None
        return step

    def _find_row_stride_bytes(self) -> int | None:
        *leading, n = self.shape
        if n != 1 and self.strides[-1] != 1:
            return None
        axes = [(m, s) for m, s in zip(leading, self.strides, strict=False) if m != 1]
        for (_, outer), (m, inner) in pairwise(axes):
            if outer != m * inner:
                return None
        return self.tensor.dtype.count_bytes(axes[-1][1] if axes else n)

    @cached_property  # each instruction compares its regions with the regions of earlier instructions
    def region(self) -> MemoryRegion:
        t = self.tensor
        if self.has_packed_layout:
            assert self.stored_spec is not None
            return MemoryRegion(t.buffer, 0, self.stored_spec.nbytes)
        last = sum((n - 1) * s for n, s in zip(t.shape, t.strides, strict=True))
        high = t.offset + (t.dtype.count_bytes(last) + t.dtype.block_bytes if all(t.shape) else 0)
        pitch, width = (
            (self._find_row_stride_bytes() if t.shape else None),
            t.dtype.count_bytes(t.shape[-1] if t.shape else 1),
        )
        if pitch is None or pitch <= width or high - t.offset <= width:
            return MemoryRegion(t.buffer, t.offset, high)
        return MemoryRegion(t.buffer, t.offset, high, pitch, width)


class NoKernelError(BackendError):
    """The error that no kernel fits an instruction. The message is the reason, which `Backend.supports` reports."""


@dataclass(frozen=True, slots=True)
class BoundInstruction:
    """One instruction of a program with the memory addresses of its operands and results."""

    op: str
    src: tuple[Operand | None, ...]
    dst: tuple[Operand, ...]
    attrs: Attrs
    find_readers: Callable[[], Sequence[BoundInstruction] | None] = lambda: None
    """Returns all instructions that read the result; None if the result is retained or is an output of the program."""
    scratch: Operand | None = None
    """The scratch memory of the instruction, as bytes."""

    @property
    def out(self) -> Operand:
        return self.dst[0]

    def operand(self, index: int) -> Operand:
        """Return operand number `index`, which must be present."""
        operand = self.src[index]
        assert operand is not None
        return operand

    def optional_operand(self, index: int) -> Operand | None:
        return self.src[index] if index < len(self.src) else None

    def float_attribute_bits(self, name: str) -> int:
        """Return the float32 bits of a numeric attribute, as an argument word of a kernel."""
        value = self.attrs[name]
        assert isinstance(value, int | float)
        return float32_bits(value)


def compute_broadcast_strides(operand: Operand, shape: Sequence[int]) -> list[int]:
    """Return the strides of `operand` after broadcasting to `shape`, in elements; 0 along each repeated axis."""
    missing = len(shape) - len(operand.shape)
    own = [0 if n == 1 else s for n, s in zip(operand.shape, operand.strides, strict=True)]
    return [0] * missing + own


def float32_bits(value: float) -> int:
    """Return the bits of `value` as float32, as an argument word that kernels read by `load_argument_float`.

    A number beyond the range of float32 becomes an infinity, as IEEE 754 rounds it.
    """
    with np.errstate(over="ignore"):
        return int(np.float32(value).view(np.uint32))


def require_supported(condition: object, why: str) -> None:
    """Raise `NoKernelError` with the reason `why` unless the condition holds."""
    if not condition:
        raise NoKernelError(why)


if not TYPE_CHECKING:
    __getattr__ = make_module_getattr(globals(), Bound="BoundInstruction", need="require_supported")
