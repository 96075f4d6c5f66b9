"""The key-value pairs of a GGUF header: scalars as Python values, arrays decoded on first use.

Source: the GGUF specification (``docs/gguf.md`` of ggml).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import field
from enum import Enum
from typing import TypeAlias, Union, overload

import numpy as np

from ...graph.errors import format_count
from ...graph.lazy_dataclass import dataclass
from .mapped_file import HeaderCursor, MappedFile, format_name_for_message

MAX_DEPTH = 4
"""Largest nesting of arrays; the format permits any depth, and this bounds the recursion for hostile files."""
MAX_PAIRS = 1 << 16
"""Largest number of pairs, above the need of any model; this bounds the Python objects of a hostile file."""


class MetadataType(Enum):
    """A type of metadata values: its number in the file, and for numbers the format in ``struct`` and in NumPy."""

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

    def __init__(self, number: int, code: str | None, min_bytes: int = 0) -> None:
        self.number = number
        self.scalar_format = struct.Struct(code) if code else None
        self.storage_dtype = np.dtype(code) if code else None
        self.min_bytes = self.scalar_format.size if self.scalar_format else min_bytes
        """Bytes of the smallest element: the length field of a string, the type and the count of an array."""

    def __str__(self) -> str:
        return self.name.lower()


TYPES_BY_NUMBER = {kind.number: kind for kind in MetadataType}

MetadataValue: TypeAlias = Union[int, float, bool, str, "LazyMetadataArray"]
"""The decoded form of one metadata value or one array element."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LazyMetadataArray(Sequence[MetadataValue]):
    """An array in the metadata of a file, of `length` elements of `item_type`; the elements are decoded on demand.

    `numpy` returns numbers without a copy. The first access to another element decodes all elements at once.
    """

    item_type: MetadataType
    length: int
    _file: MappedFile
    _start: int
    _end: int
    _decoded_items: list[tuple[MetadataValue, ...]] = field(default_factory=list)

    def numpy(self) -> np.ndarray:
        """Return the numbers as a NumPy array [length], as a read-only view of the file that may be unaligned.

        Booleans are copied.

        Raises:
            ModelError: The elements are not numbers.
        """
        if self.item_type.storage_dtype is None:
            raise self._file.make_error(f"a metadata array holds {self.item_type}s where numbers are needed")
        if self.item_type is MetadataType.BOOL:
            # Every non-zero byte counts as true, as in ggml; a NumPy bool must be 0 or 1.
            flags: np.ndarray = np.frombuffer(self._file.data, np.uint8, self.length, self._start) != 0
            return flags
        return np.frombuffer(self._file.data, self.item_type.storage_dtype, self.length, self._start)

    def strings(self) -> tuple[str, ...]:
        """Return the elements as a tuple of strings.

        Raises:
            ModelError: The elements are not strings.
        """
        if self.item_type is not MetadataType.STRING:
            raise self._file.make_error(f"a metadata array holds {self.item_type}s where strings are needed")
        return self._decode_all()  # type: ignore[return-value]  # numeric by the check above

    def compute_digest(self) -> bytes:
        """Compute the SHA-256 digest of the bytes of the elements in the file."""
        from hashlib import sha256  # loads OpenSSL

        with memoryview(self._file.data) as data:
            return sha256(data[self._start : self._end]).digest()

    def _decode_all(self) -> tuple[MetadataValue, ...]:
        if self.item_type.storage_dtype is not None:  # not cached: numbers need fewer bytes in the file
            return tuple(self.numpy().tolist())
        if not self._decoded_items:
            self._decoded_items.append(tuple(self._decode_items()))
        return self._decoded_items[0]

    def _decode_items(self) -> list[MetadataValue]:
        cursor = HeaderCursor(self._file, self._start, "metadata array")
        if self.item_type is MetadataType.STRING:
            return [*cursor.read_strings(self.length)]
        return [read_undecoded_array(cursor) for _ in range(self.length)]

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[MetadataValue]:
        return iter(self._decode_all())

    @overload
    def __getitem__(self, index: int) -> MetadataValue: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[MetadataValue, ...]: ...
    def __getitem__(self, index: int | slice) -> MetadataValue | tuple[MetadataValue, ...]:
        if self.item_type.storage_dtype is None:
            return self._decode_all()[index]
        numbers = self.numpy()[index].tolist()
        return tuple(numbers) if isinstance(index, slice) else numbers

    def __repr__(self) -> str:
        return f"{self.item_type}[{self.length}]"


def read_metadata(cursor: HeaderCursor, count: int) -> dict[str, MetadataValue]:
    """Read the next `count` metadata pairs of a header: values by key, in the order of the file.

    Raises:
        ModelError: A pair is invalid, or a key appears twice.
    """
    if count > MAX_PAIRS:
        raise cursor.error(f"announces {count} metadata pairs; at most {MAX_PAIRS} are accepted")
    pairs: dict[str, MetadataValue] = {}
    for i in range(count):
        cursor.section = f"metadata pair {i + 1} of {count}"
        key = cursor.read_name()
        cursor.section = f"metadata {format_name_for_message(key)}"
        if key in pairs:
            raise cursor.error("appears twice")
        pairs[key] = _read_value(cursor)
    return pairs


def skip_metadata_pair(cursor: HeaderCursor) -> str:
    """Skip the pair at the cursor and return its key."""
    key = cursor.read_name()
    cursor.section = f"metadata {format_name_for_message(key)}"
    _read_value(cursor)
    return key


def read_undecoded_array(cursor: HeaderCursor, depth: int = 1) -> LazyMetadataArray:
    """Read the array at the cursor, but decode its elements only when they are used.

    The file must contain all of them.
    """
    kind = _read_type(cursor)
    count = cursor.read_u64()
    start = cursor.position
    room = cursor.file.size - start
    if count * kind.min_bytes > room:
        raise cursor.error(
            f"announces {count} {kind}s, {format_count(count * kind.min_bytes, 'byte')} or more, but {room} are left"
        )
    if kind is MetadataType.STRING:
        cursor.skip_strings_undecoded(count)
    elif kind is MetadataType.ARRAY:
        if depth == MAX_DEPTH:
            raise cursor.error(f"nests arrays more than {MAX_DEPTH} deep")
        for _ in range(count):
            read_undecoded_array(cursor, depth + 1)
    else:
        cursor.skip_and_return_start(count * kind.min_bytes)
    return LazyMetadataArray(kind, count, cursor.file, start, cursor.position)


def _read_type(cursor: HeaderCursor) -> MetadataType:
    number = cursor.read_u32()
    if number not in TYPES_BY_NUMBER:
        raise cursor.error(f"has the unknown value type {number}; need 0 to {len(TYPES_BY_NUMBER) - 1}")
    return TYPES_BY_NUMBER[number]


def _read_value(cursor: HeaderCursor) -> MetadataValue:
    kind = _read_type(cursor)
    if kind is MetadataType.STRING:
        return cursor.read_string()
    if kind.scalar_format is None:
        return read_undecoded_array(cursor)
    value: int | float | bool = kind.scalar_format.unpack_from(
        cursor.file.data, cursor.skip_and_return_start(kind.min_bytes)
    )[0]
    return value
