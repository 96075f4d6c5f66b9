"""The tensors of a GGUF file: checked descriptions of name, shape, dtype and position; the data stay in the file.

Shapes are in NumPy order, outermost axis first: the reverse of ``ne`` in the file. A matrix that multiplies rows of E
values into rows of F values has shape [F, E]. Quantisation blocks are along its last axis.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod

import numpy as np
import numpy.typing as npt

from ...graph.dtypes import DTYPE_BY_GGML_NUMBER, DType
from ...graph.lazy_dataclass import dataclass
from ...ops.quantisation import dequantise
from ...scheduler.runtime.packed_weight_files import WeightOrigin
from .mapped_file import HeaderCursor, MappedFile, format_name_for_message

MAX_AXES = 4
MAX_TENSORS = 1 << 16
"""Largest number of tensors, above the need of any model; this bounds the Python objects of a hostile file."""
MAX_TENSOR_BYTES = 1 << 56
"""Largest bytes of a tensor if only the header is present; NumPy can still count them."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Tensor:
    """A tensor of a GGUF file: its name, its shape in NumPy order, its dtype, and the position of its data."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    file: MappedFile
    offset: int
    """Position of the first byte, counted from the start of the file."""

    @property
    def row_bytes(self) -> int:
        """Number of bytes of one row along the last axis."""
        return self.shape[-1] // self.dtype.block * self.dtype.block_bytes

    @property
    def nbytes(self) -> int:
        """Number of bytes of the data in the file, without the padding after the tensor."""
        return prod(self.shape[:-1]) * self.row_bytes

    @property
    def cache_identity(self) -> WeightOrigin:
        """The identity of the stored weight for caches of packed weights: path, size, modification time, offset."""
        return WeightOrigin(
            str(self.file.path.resolve()), f"{self.file.size} bytes of {self.file.modified_ns}", self.offset
        )

    @property
    def stored_elements(self) -> np.ndarray:
        """The stored elements as a read-only array over the mapped file, not dequantised.

        The array is ``dtype.storage`` [*shape], or uint8 [..., row bytes] for block types.

        Raises:
            ModelError: The file was opened for its header only and ends before the data.
        """
        if self.offset + self.nbytes > self.file.size:
            raise self.file.make_error(
                f"tensor {format_name_for_message(self.name)} needs bytes {self.offset} to "
                f"{self.offset + self.nbytes}, but the file ends at byte {self.file.size}; it holds only a header",
                "open a complete model",
            )
        last = self.row_bytes if self.dtype.is_quantised else self.shape[-1]
        return np.ndarray((*self.shape[:-1], last), self.dtype.storage, self.file.data, self.offset)

    def release_memory(self) -> None:
        """Release the memory pages of the tensor data; a later read loads them from the file again."""
        self.file.release_memory(self.offset, self.offset + self.nbytes)

    def dequantise(self) -> npt.NDArray[np.float32]:
        """Return the values as float32 [*shape]: a read-only view for F32, a new array otherwise.

        Raises:
            ModelError: The dtype has no dequantiser, or the file has no data (see `raw`).
        """
        return dequantise(self.stored_elements, self.dtype)

    def __repr__(self) -> str:
        return f"%{self.name} : {self.dtype}[{'×'.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The description of a tensor in the header of a file; `offset` counts from the start of the tensor data."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    offset: int


def read_tensor_entries(cursor: HeaderCursor, count: int) -> list[TensorEntry]:
    """Read the next `count` tensor descriptions of a header, in the order of the file.

    Raises:
        ModelError: A description is invalid, or a name appears twice.
    """
    if count > MAX_TENSORS:
        raise cursor.error(f"announces {count} tensors; at most {MAX_TENSORS} are accepted")
    entries: dict[str, TensorEntry] = {}
    for i in range(count):
        cursor.section = f"tensor {i + 1} of {count}"
        name = cursor.read_name()
        cursor.section = f"tensor {format_name_for_message(name)}"
        if name in entries:
            raise cursor.error("appears twice")
        entries[name] = TensorEntry(name, _read_shape(cursor), _read_dtype(cursor), cursor.read_u64())
    return list(entries.values())


def resolve_tensor_entries(
    entries: list[TensorEntry], cursor: HeaderCursor, alignment: int, header_only: bool
) -> dict[str, Tensor]:
    """Resolve the tensor descriptions of a header to tensors with checked positions in the file, by name.

    Args:
        entries: The tensor descriptions.
        cursor: The cursor at the end of the header.
        alignment: Alignment of tensor data in bytes.
        header_only: Whether the data may be missing from the file.

    Raises:
        ModelError: A tensor has incomplete blocks, is not aligned, overlaps another one or passes the end of the
            file.
    """
    start = -(-cursor.position // alignment) * alignment
    tensors = {e.name: Tensor(e.name, e.shape, e.dtype, cursor.file, start + e.offset) for e in entries}
    end = MAX_TENSOR_BYTES if header_only else cursor.file.size
    for entry, tensor in zip(entries, tensors.values(), strict=True):
        cursor.section = f"tensor {format_name_for_message(tensor.name)}"
        if tensor.shape[-1] % tensor.dtype.block:
            raise cursor.error(
                f"has rows of {tensor.shape[-1]} elements, but {tensor.dtype} needs a multiple of {tensor.dtype.block}"
            )
        if entry.offset % alignment:
            raise cursor.error(f"starts at data offset {entry.offset}, no multiple of the alignment {alignment}")
        if tensor.offset + tensor.nbytes > end:
            raise cursor.error(
                f"({tensor.dtype}{list(tensor.shape)}) needs {tensor.nbytes} bytes at byte {tensor.offset}, "
                f"but the file ends at byte {cursor.file.size}"
            )
    for first, second in pairwise(sorted(tensors.values(), key=lambda t: t.offset)):
        if first.offset + first.nbytes > second.offset:
            cursor.section = f"tensor {format_name_for_message(second.name)}"
            raise cursor.error(f"overlaps tensor {format_name_for_message(first.name)} at byte {second.offset}")
    return tensors


def _read_shape(cursor: HeaderCursor) -> tuple[int, ...]:
    axes = cursor.read_u32()
    if axes > MAX_AXES:
        raise cursor.error(f"has {axes} axes; need {MAX_AXES} or fewer")
    shape = tuple(cursor.read_u64() for _ in range(axes))[::-1] or (1,)  # ggml reads no axes as one element
    if 0 in shape:
        raise cursor.error(f"has shape {list(shape)}; every axis needs at least one element")
    return shape


def _read_dtype(cursor: HeaderCursor) -> DType:
    number = cursor.read_u32()
    if number not in DTYPE_BY_GGML_NUMBER:
        raise cursor.error(
            f"has the unknown ggml type {number}; known are {', '.join(map(str, DTYPE_BY_GGML_NUMBER))}",
            "convert the model to one of these types",
        )
    return DTYPE_BY_GGML_NUMBER[number]
