"""The launch builder, which collects launches while a kernel family binds instructions.

A kernel has one argument: a C struct with 64-bit fields, the launch words. To bind an instruction means to compute the
launch words from its operands and attributes, and to add its launches to the builder.
"""

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
from ..device.device_limits import DEFAULT_SHARED_BYTES, LARGEST_LIMITS, KernelLimits
from ..device.driver import SINGLE_BLOCK_CLUSTER, AddressSpan, Dim3, KernelInstance, KernelLaunch, SingleStep

LaunchWord = Operand | int | float
"""One 64-bit field of a kernel's argument struct: an `Operand` is its address, an `int` an i64, a `float` a double."""
SCRATCH_ALIGNMENT = 64
MAX_DECLARED_SHARED_BYTES = 1024
"""The most shared-memory bytes that kernels declare in addition to a dynamic size above `DEFAULT_SHARED_BYTES`."""


@dataclass(slots=True)
class LaunchBuilder:
    """Collects the launches, scratch bytes, constants and fault messages of a program during binding.

    All four depend only on shapes, attributes and `limits`. A binding that raises `NoKernelError` adds no launch.

    Args:
        upload_array: Copies an array to device memory and returns its address.
        scratch_address: Address of the scratch memory of the current instruction.
        number: Index of the current instruction in the program.
        scratch_bytes: Scratch bytes that the current instruction has allocated so far.
        scratch_limit: Scratch bytes that a fusion may allocate; see `use_scratch_of_fused_instruction`.
        items: Launches and exchanges so far.
        faults: Instruction index and message of each fault.
        fault_address: Address of the fault record, into which a kernel writes an illegal number and its fault.
        limits: Resource limits of the device.
        multiprocessor_count: Number of multiprocessors of the device.
    """

    upload_array: Callable[[npt.NDArray[Any]], int]
    scratch_address: int = 0
    number: int = 0
    scratch_bytes: int = 0
    scratch_limit: int = 0
    items: list[SingleStep] = field(default_factory=list)
    faults: list[tuple[int, str]] = field(default_factory=list)
    fault_address: int = 0
    limits: KernelLimits = LARGEST_LIMITS
    multiprocessor_count: int = 1

    def take_launches(self) -> tuple[SingleStep, ...]:
        """Return the launches and exchanges that were added since the last call, and remove them from the builder."""
        items, self.items = tuple(self.items), []
        return items

    def can_allocate_shared_bytes(self, shared_bytes: int) -> bool:
        """Return whether a thread block of the device can allocate `shared_bytes` bytes of dynamic shared memory."""
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
        """Add a launch of a kernel for the current instruction.

        Add nothing if the grid is empty.

        Args:
            kernel: The kernel.
            grid: Number of thread blocks, along up to three axes.
            block: Number of threads of a block, along up to three axes.
            words: The fields of the kernel's argument struct.
            shared_bytes: Bytes of dynamic shared memory of a block.
            cluster: Number of blocks of a cluster, along three axes.

        Raises:
            NoKernelError: A block of the device has less shared memory.
        """
        require_supported(
            self.can_allocate_shared_bytes(shared_bytes),
            f"{kernel} takes {shared_bytes} bytes of shared memory; "
            f"a block has {self.limits.shared_bytes_per_block} here",
        )
        if 0 in (shape := _as_dim3(grid)):
            return
        packed, spans = self._pack_words(words)
        self.items.append(
            KernelLaunch(kernel, shape, _as_dim3(block), shared_bytes, packed, spans, self.number, cluster)
        )

    def _pack_words(self, words: Sequence[LaunchWord]) -> tuple[tuple[int, ...], tuple[AddressSpan, ...]]:
        """Pack the fields of a kernel's argument struct into 64-bit integers.

        Also return the range of bytes behind each field that is an address.
        """
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
        """Allocate a contiguous array in the scratch memory of the current instruction, with undefined contents."""
        operand = _make_dense_operand(self.scratch_address + self.scratch_bytes, shape, dtype, self.scratch_bytes)
        self.scratch_bytes += -(-operand.tensor.spec.nbytes // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
        return operand

    def use_scratch_of_fused_instruction(self, scratch: Operand | None) -> None:
        """Let a fused launch use the scratch memory that was planned for one of its instructions.

        Lowering keeps this memory apart from all values of the fusion that lie in memory.

        Args:
            scratch: The scratch memory, or `None` if the fusion has none.
        """
        self.scratch_bytes = 0
        self.scratch_address, self.scratch_limit = (0, 0) if scratch is None else (scratch.address, scratch.size)

    def upload_constant(self, array: npt.NDArray[Any]) -> Operand:
        """Upload a constant array to device memory and return it as a contiguous operand.

        Equal arrays of one dtype share an address. Counters that kernels reset to zeros are arrays of `numpy.uint32`,
        as no other constant is.
        """
        dtype = _DTYPES[array.dtype.str.lstrip("<|")]
        data = np.ascontiguousarray(array)
        return _make_dense_operand(self.upload_array(data), data.shape, dtype, 0)

    def add_fault_message(self, text: str) -> list[LaunchWord]:
        """Add a message for a fault of the current instruction, and return the fields of the kernel's `Fault` struct.

        A kernel reports a fault if its data contain an illegal number, such as a row index out of range.

        Args:
            text: The message. It contains ``{value}`` for the illegal number.
        """
        self.faults.append((self.number, text))
        return [_make_dense_operand(self.fault_address, (2,), DType.I64, 0), len(self.faults) - 1]


class KernelListingBuilder(LaunchBuilder):
    """A launch builder for callers that need only the list of kernels: its launches have no arguments."""

    def _pack_words(self, words: Sequence[LaunchWord]) -> tuple[tuple[int, ...], tuple[AddressSpan, ...]]:
        return (), ()


_DTYPES = {"f4": DType.F32, "f2": DType.F16, "u2": DType.BF16, "i1": DType.I8, "i2": DType.I16, "i4": DType.I32}
_DTYPES |= {"i8": DType.I64, "f8": DType.F64, "u1": DType.I8, "u4": DType.I32, "u8": DType.I64}

OpBinder = Callable[[LaunchBuilder, BoundInstruction], None]
"""A function that adds the launches of one instruction to a launch builder, or raises `NoKernelError`."""


def _as_dim3(shape: int | tuple[int, ...]) -> Dim3:
    sizes = (shape,) if isinstance(shape, int) else shape
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


def _make_dense_operand(address: int, shape: Sequence[int], dtype: DType, offset: int) -> Operand:
    return Operand(address, Tensor(-1, offset, tuple(shape), contiguous_strides(shape), dtype))


def compute_address_span(operand: Operand, word_index: int) -> AddressSpan:
    """Return the range of device addresses that a kernel may access through an operand.

    The range covers all elements that the strides reach. For a quantised operand it is the whole buffer.

    Args:
        operand: The operand.
        word_index: Index of the kernel argument (launch word) that has the operand's address.
    """
    region = operand.region
    begin = operand.address - operand.tensor.offset
    return AddressSpan(word_index, begin + region.low, begin + region.high)


def count_blocks(count: int, size: int) -> int:
    """Count the blocks of `size` elements that cover `count` elements: `count / size`, rounded up."""
    return -(-count // size)


def compute_row_stride(x: Operand) -> int:
    """Return the distance between consecutive rows of a float32 operand, in elements, which must be constant.

    Raises:
        NoKernelError: The operand has another dtype, or the stride between rows is not constant.
    """
    is_empty = 0 in x.shape
    require_supported(x.is_float and (x.has_uniform_row_stride or is_empty), "rows do not lie evenly")
    return x.shape[-1] if is_empty else x.row_stride_bytes // 4


if not TYPE_CHECKING:
    __getattr__ = make_module_getattr(globals(), Launches="LaunchBuilder")
