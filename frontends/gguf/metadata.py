"""The key-value pairs of a GGUF header: scalars as Python values, arrays decoded only when used.

Source: the GGUF specification (``docs/gguf.md`` of ggml).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import field
from enum import Enum
from typing import TypeAlias, Union, overload

import numpy as np

from ...graph.lazy_dataclass import dataclass
from .mapped import Cursor, MappedFile, shown

MAX_DEPTH = 4
"""Arrays of arrays are legal, but no model needs them deeper; a file must not choose our recursion depth."""
MAX_PAIRS = 1 << 16
"""More pairs than any model has; bounds what Python objects cost against the few bytes of a hostile pair."""


class Kind(Enum):
    """The type of a metadata value: its number in the file and the code of numbers in ``struct`` and NumPy."""

    UINT8 = (0, "<B")
    INT8 = (1, "<b")
    UINT16 = (2, "<H")
    INT16 = (3, "<h")
    UINT32 = (4, "<I")
    INT32 = (5, "<i")
    FLOAT32 = (6, "<f")
    BOOL = (7, "<?")
    STRING = (8, None, 8)
    ARRAY = (9, None, 12)
    UINT64 = (10, "<Q")
    INT64 = (11, "<q")
    FLOAT64 = (12, "<d")

    def __init__(self, number: int, code: str | None, least: int = 0) -> None:
        self.number = number
        self.scalar = struct.Struct(code) if code else None
        self.storage = np.dtype(code) if code else None
        self.least = self.scalar.size if self.scalar else least
        """The fewest bytes one element takes: of a string its length, of an array its type and count."""

    def __str__(self) -> str:
        return self.name.lower()


VALUE_KINDS = {kind.number: kind for kind in Kind}

Item: TypeAlias = Union[int, float, bool, str, "Array"]
"""What one element of an array, or one metadata value, decodes to."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Array(Sequence[Item]):
    """A metadata array of ``length`` elements of ``kind``, left in the file until used.

    ``numpy()`` shows numbers without copying; other elements are decoded once, all on first use.
    """

    kind: Kind
    length: int
    _file: MappedFile
    _start: int
    _end: int
    _decoded: list[tuple[Item, ...]] = field(default_factory=list)

    def numpy(self) -> np.ndarray:
        """The numbers [length], read-only and perhaps unaligned; bool arrays are a copy.  ModelError if not numeric."""
        if self.kind.storage is None:
            raise self._file.error(f"a metadata array holds {self.kind}s where numbers are needed")
        if self.kind is Kind.BOOL:
            # Any byte but 0 counts as true, as in ggml; NumPy would misread one that is neither 0 nor 1.
            flags: np.ndarray = np.frombuffer(self._file.data, np.uint8, self.length, self._start) != 0
            return flags
        return np.frombuffer(self._file.data, self.kind.storage, self.length, self._start)

    def strings(self) -> tuple[str, ...]:
        """The strings, decoded as ``Cursor.string`` does.  ModelError if the elements are something else."""
        if self.kind is not Kind.STRING:
            raise self._file.error(f"a metadata array holds {self.kind}s where strings are needed")
        return self._all()  # type: ignore[return-value]  # numeric by the check above

    def digest(self) -> bytes:
        """The SHA-256 of the elements as they lie in the file."""
        from hashlib import sha256  # loads OpenSSL

        with memoryview(self._file.data) as data:
            return sha256(data[self._start : self._end]).digest()

    def _all(self) -> tuple[Item, ...]:
        if self.kind.storage is not None:  # not kept: the file has them in fewer bytes
            return tuple(self.numpy().tolist())
        if not self._decoded:
            self._decoded.append(tuple(self._decode()))
        return self._decoded[0]

    def _decode(self) -> list[Item]:
        cursor = Cursor(self._file, self._start, "metadata array")
        if self.kind is Kind.STRING:
            return [*cursor.strings(self.length)]
        return [read_array(cursor) for _ in range(self.length)]

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Item]:
        return iter(self._all())

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Item, ...]: ...
    def __getitem__(self, index: int | slice) -> Item | tuple[Item, ...]:
        if self.kind.storage is None:
            return self._all()[index]
        numbers = self.numpy()[index].tolist()
        return tuple(numbers) if isinstance(index, slice) else numbers

    def __repr__(self) -> str:
        return f"{self.kind}[{self.length}]"


def read_metadata(cursor: Cursor, count: int) -> dict[str, Item]:
    """The next ``count`` pairs of a header, in the order of the file."""
    if count > MAX_PAIRS:
        raise cursor.error(f"announces {count} metadata pairs; at most {MAX_PAIRS} are accepted")
    pairs: dict[str, Item] = {}
    for i in range(count):
        cursor.where = f"metadata pair {i + 1} of {count}"
        key = cursor.name()
        cursor.where = f"metadata {shown(key)}"
        if key in pairs:
            raise cursor.error("appears twice")
        pairs[key] = _read_value(cursor)
    return pairs


def read_array(cursor: Cursor, depth: int = 1) -> Array:
    """The array at the cursor, checked to lie inside the file but not decoded."""
    kind = _read_kind(cursor)
    count = cursor.u64()
    start = cursor.at
    room = cursor.file.size - start
    if count * kind.least > room:
        raise cursor.error(f"announces {count} {kind}s, {count * kind.least} bytes or more, but {room} are left")
    if kind is Kind.STRING:
        cursor.pass_strings(count)
    elif kind is Kind.ARRAY:
        if depth == MAX_DEPTH:
            raise cursor.error(f"nests arrays more than {MAX_DEPTH} deep")
        for _ in range(count):
            read_array(cursor, depth + 1)
    else:
        cursor.step(count * kind.least)
    return Array(kind, count, cursor.file, start, cursor.at)


def _read_kind(cursor: Cursor) -> Kind:
    number = cursor.u32()
    if number not in VALUE_KINDS:
        raise cursor.error(f"has the unknown value type {number}; need 0 to {len(VALUE_KINDS) - 1}")
    return VALUE_KINDS[number]


def _read_value(cursor: Cursor) -> Item:
    kind = _read_kind(cursor)
    if kind is Kind.STRING:
        return cursor.string()
    if kind.scalar is None:
        return read_array(cursor)
    value: int | float | bool = kind.scalar.unpack_from(cursor.file.data, cursor.step(kind.least))[0]
    return value
