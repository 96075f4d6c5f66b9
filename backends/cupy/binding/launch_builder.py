"""The launch builder, which collects launches while a kernel family binds instructions."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ....graph.dtypes import DType
from ....graph.old_names import make_module_getattr
from ...base import Tensor, contiguous_strides
from ...fusion.operands import BoundInstruction, Operand, require_supported
from ..device.device_limits import DEFAULT_SHARED_BYTES, LARGEST_LIMITS, Limits
from ..device.driver import SINGLE_BLOCK_CLUSTER, AddressSpan, Dim3, KernelInstance, Launch, SingleStep

LaunchWord = Operand | int | float
"""A word of a launch: an operand is its address, an `int` an i64, a `float` a double."""
SCRATCH_ALIGNMENT = 64
MAX_DECLARED_SHARED_BYTES = 1024
"""The most shared-memory bytes that kernels declare in addition to a dynamic size above `DEFAULT_SHARED_BYTES`."""


@dataclass(slots=True)
class LaunchBuilder:
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

    upload_array: Callable[[npt.NDArray[Any]], int]
    scratch_address: int = 0
    number: int = 0
    scratch_bytes: int = 0
    items: list[SingleStep] = field(default_factory=list)
    faults: list[tuple[int, str]] = field(default_factory=list)
    fault_address: int = 0
    limits: Limits = LARGEST_LIMITS
    multiprocessor_count: int = 1

    def take_launches(self) -> tuple[SingleStep, ...]:
        """Return the steps since the last call, and remove them."""
        items, self.items = tuple(self.items), []
        return items

    def has_shared_bytes(self, shared_bytes: int) -> bool:
        """Return whether a block of the device can have this much dynamic shared memory."""
        return (
            shared_bytes <= DEFAULT_SHARED_BYTES
            or shared_bytes + MAX_DECLARED_SHARED_BYTES <= self.limits.shared_bytes_per_block
        )

    def add_launch(
        self,
        kernel: KernelInstance,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        words: Sequence[LaunchWord],
        shared_bytes: int = 0,
        cluster: Dim3 = SINGLE_BLOCK_CLUSTER,
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
        require_supported(
            self.has_shared_bytes(shared_bytes),
            f"{kernel} takes {shared_bytes} bytes of shared memory; "
            f"a block has {self.limits.shared_bytes_per_block} here",
        )
        if 0 in (shape := _as_dim3(grid)):
            return
        packed, spans = self._pack_words(words)
        self.items.append(Launch(kernel, shape, _as_dim3(block), shared_bytes, packed, spans, self.number, cluster))

    def _pack_words(self, words: Sequence[LaunchWord]) -> tuple[tuple[int, ...], tuple[AddressSpan, ...]]:
        """Return the words as 64-bit integers, and the byte ranges of words that are addresses."""
        packed, spans = [], []
        for i, word in enumerate(words):
            if isinstance(word, Operand):
                spans.append(compute_address_span(word, i))
                packed.append(word.address)
            elif isinstance(word, int | np.integer):
                packed.append(int(word) % 2**64)
            else:
                packed.append(int(struct.unpack("<Q", struct.pack("<d", word))[0]))
        return tuple(packed), tuple(spans)

    def allocate_scratch(self, shape: Sequence[int], dtype: DType = DType.F32) -> Operand:
        """Allocate contiguous scratch of the current instruction, with undefined contents."""
        operand = _make_dense_operand(self.scratch_address + self.scratch_bytes, shape, dtype, self.scratch_bytes)
        self.scratch_bytes += -(-operand.tensor.spec.nbytes // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
        return operand

    def upload_constant(self, array: npt.NDArray[Any]) -> Operand:
        """Return a constant array in device memory, contiguous."""
        dtype = _DTYPES[array.dtype.str.lstrip("<|")]
        data = np.ascontiguousarray(array)
        return _make_dense_operand(self.upload_array(data), data.shape, dtype, 0)

    def add_fault(self, text: str) -> list[LaunchWord]:
        """Return the words of a `Fault`. `text` describes an illegal number from data as ``{value}``."""
        self.faults.append((self.number, text))
        return [_make_dense_operand(self.fault_address, (2,), DType.I64, 0), len(self.faults) - 1]


class DryRunBuilder(LaunchBuilder):
    """A launch builder without words, for callers that only list kernels."""

    def _pack_words(self, words: Sequence[LaunchWord]) -> tuple[tuple[int, ...], tuple[AddressSpan, ...]]:
        return (), ()


_DTYPES = {"f4": DType.F32, "f2": DType.F16, "u2": DType.BF16, "i1": DType.I8, "i2": DType.I16, "i4": DType.I32}
_DTYPES |= {"i8": DType.I64, "f8": DType.F64, "u1": DType.I8, "u4": DType.I32, "u8": DType.I64}

OpBinder = Callable[[LaunchBuilder, BoundInstruction], None]
"""A function that appends the launches of one instruction, or raises `NoKernelError`."""


def _as_dim3(shape: int | tuple[int, ...]) -> Dim3:
    sizes = (shape,) if isinstance(shape, int) else shape
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


def _make_dense_operand(address: int, shape: Sequence[int], dtype: DType, offset: int) -> Operand:
    return Operand(address, Tensor(-1, offset, tuple(shape), contiguous_strides(shape), dtype))


def compute_address_span(operand: Operand, word: int) -> AddressSpan:
    """Return the byte range that the strides of an operand reach, or the whole buffer of a quantised operand."""
    region = operand.region
    begin = operand.address - operand.tensor.offset
    return AddressSpan(word, begin + region.low, begin + region.high)


def count_blocks(count: int, size: int) -> int:
    """Return `count / size`, rounded up."""
    return -(-count // size)


def compute_row_stride(x: Operand) -> int:
    """Return the stride between rows of a float operand in elements. Raises `NoKernelError` if it is not uniform."""
    is_empty = 0 in x.shape
    require_supported(x.is_float and (x.has_even_rows or is_empty), "rows do not lie evenly")
    return x.shape[-1] if is_empty else x.row_stride_bytes // 4


if not TYPE_CHECKING:
    __getattr__ = make_module_getattr(globals(), Launches="LaunchBuilder")
