"""The tensors of a GGUF file: descriptions checked against the file, bytes left in it.

Shapes are in NumPy order, outermost axis first: the reverse of the ``ne`` in the file.  A matrix that multiplies
rows of E values into rows of F values has shape [F, E], and its last axis is the one that is cut into blocks.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod

import numpy as np
import numpy.typing as npt

from ...graph.dtypes import DTYPE_BY_GGML_NUMBER, DType
from ...graph.lazy_dataclass import dataclass
from ...ops.quantisation import dequantise
from ...scheduler.running.packed import Origin
from .mapped import Cursor, MappedFile, shown

MAX_AXES = 4
MAX_TENSORS = 1 << 16
"""More tensors than any model has; bounds what Python objects cost against the few bytes of a hostile entry."""
MAX_BYTES = 1 << 56
"""Bound for one tensor where only the header is there to check it against, so that NumPy can still count it."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Tensor:
    """One tensor of a file: shape in NumPy order, type, and where its bytes lie."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    file: MappedFile
    offset: int
    """Bytes from the start of the file."""

    @property
    def row_bytes(self) -> int:
        """Bytes along the last axis."""
        return self.shape[-1] // self.dtype.block * self.dtype.block_bytes

    @property
    def nbytes(self) -> int:
        """Bytes in the file, without the padding that follows."""
        return prod(self.shape[:-1]) * self.row_bytes

    @property
    def origin(self) -> Origin:
        """What the stored elements are, without a look at them."""
        return Origin(str(self.file.path.resolve()), f"{self.file.size} bytes of {self.file.changed}", self.offset)

    @property
    def raw(self) -> np.ndarray:
        """The stored elements, a read-only view into the file: ``dtype.storage`` [*shape], or uint8 [..., row bytes]
        for types in blocks.  ModelError if the file was opened for its header only and ends before the data.
        """
        if self.offset + self.nbytes > self.file.size:
            raise self.file.error(
                f"tensor {shown(self.name)} needs bytes {self.offset} to {self.offset + self.nbytes}, but the file "
                f"ends at byte {self.file.size}; it holds only a header",
                "open a complete model",
            )
        last = self.row_bytes if self.dtype.is_quantised else self.shape[-1]
        return np.ndarray((*self.shape[:-1], last), self.dtype.storage, self.file.data, self.offset)

    def release(self) -> None:
        """Let the system take back the memory of the bytes that were read; whoever reads them again gets them again."""
        self.file.release(self.offset, self.offset + self.nbytes)

    def dequantise(self) -> npt.NDArray[np.float32]:
        """The values, float32 [*shape]: read-only straight from the file for F32, a fresh array otherwise.

        ModelError for types without a dequantiser, or without data (see ``raw``).
        """
        return dequantise(self.raw, self.dtype)

    def __repr__(self) -> str:
        return f"%{self.name} : {self.dtype}[{'×'.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor as the header describes it; ``offset`` counts from the start of the data, not yet known."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    offset: int


def read_entries(cursor: Cursor, count: int) -> list[Entry]:
    """The next ``count`` tensor descriptions of a header, in the order of the file."""
    if count > MAX_TENSORS:
        raise cursor.error(f"announces {count} tensors; at most {MAX_TENSORS} are accepted")
    entries: dict[str, Entry] = {}
    for i in range(count):
        cursor.where = f"tensor {i + 1} of {count}"
        name = cursor.name()
        cursor.where = f"tensor {shown(name)}"
        if name in entries:
            raise cursor.error("appears twice")
        entries[name] = Entry(name, _read_shape(cursor), _read_dtype(cursor), cursor.u64())
    return list(entries.values())


def place(entries: list[Entry], cursor: Cursor, alignment: int, header_only: bool) -> dict[str, Tensor]:
    """The tensors of one file, whose header ends at the cursor: blocks, alignment, overlap and end of file checked."""
    start = -(-cursor.at // alignment) * alignment
    tensors = {e.name: Tensor(e.name, e.shape, e.dtype, cursor.file, start + e.offset) for e in entries}
    end = MAX_BYTES if header_only else cursor.file.size
    for entry, tensor in zip(entries, tensors.values(), strict=True):
        cursor.where = f"tensor {shown(tensor.name)}"
        if tensor.shape[-1] % tensor.dtype.block:
            raise cursor.error(
                f"has rows of {tensor.shape[-1]} elements, but {tensor.dtype} needs a multiple of {tensor.dtype.block}"
            )
        if entry.offset % alignment:
            raise cursor.error(f"starts at data offset {entry.offset}, no multiple of the alignment {alignment}")
        if tensor.offset + tensor.nbytes > end:
            raise cursor.error(
                f"({tensor.dtype}{list(tensor.shape)}) needs {tensor.nbytes} bytes at byte {tensor.offset}, but the "
                f"file ends at byte {cursor.file.size}"
            )
    for one, two in pairwise(sorted(tensors.values(), key=lambda t: t.offset)):
        if one.offset + one.nbytes > two.offset:
            cursor.where = f"tensor {shown(two.name)}"
            raise cursor.error(f"overlaps tensor {shown(one.name)} at byte {two.offset}")
    return tensors


def _read_shape(cursor: Cursor) -> tuple[int, ...]:
    axes = cursor.u32()
    if axes > MAX_AXES:
        raise cursor.error(f"has {axes} axes; need {MAX_AXES} or fewer")
    shape = tuple(cursor.u64() for _ in range(axes))[::-1] or (1,)  # ggml reads no axes as one element
    if 0 in shape:
        raise cursor.error(f"has shape {list(shape)}; every axis needs at least one element")
    return shape


def _read_dtype(cursor: Cursor) -> DType:
    number = cursor.u32()
    if number not in DTYPE_BY_GGML_NUMBER:
        raise cursor.error(
            f"has the unknown ggml type {number}; known are {', '.join(map(str, DTYPE_BY_GGML_NUMBER))}",
            "convert the model to one of these types",
        )
    return DTYPE_BY_GGML_NUMBER[number]
