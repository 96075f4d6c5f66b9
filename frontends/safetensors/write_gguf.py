"""GGUF files, version 3: the bytes of metadata pairs, and whole files with tensors."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from ...graph.storage.files import replacing
from ..gguf import Tensor
from ..gguf.mapped_file import COUNT_FIELD, LENGTH_FIELD, Cursor, MappedFile
from ..gguf.metadata import MetadataType, MetadataValue, read_metadata

VERSION = 3
ALIGNMENT = 32
WRITE_BYTES = 1 << 24
"""Bytes of a tensor that are written at a time."""

Pair: TypeAlias = int | float | bool | str | Sequence[str] | Sequence[int] | Sequence[float]
"""A metadata value before it is encoded; a list has elements of one type."""


def encode_pairs(pairs: Mapping[str, Pair]) -> bytes:
    """Return metadata pairs as GGUF bytes: integers as uint32, numbers as float32, lists of integers as int32."""
    return b"".join(_encode_text(key) + _encode_value(value) for key, value in pairs.items())


def decode_pairs(encoded: bytes, path: Path) -> dict[str, MetadataValue]:
    """Return the metadata of encoded pairs, with the types that a GGUF file of them has.

    The arrays keep a copy of the bytes in anonymous memory.
    """
    data = mmap.mmap(-1, max(1, len(encoded)))
    data[: len(encoded)] = encoded
    cursor = Cursor(MappedFile(path, data, len(encoded), 0))
    metadata: dict[str, MetadataValue] = {}
    while cursor.position < len(encoded):
        metadata |= read_metadata(cursor, 1)
    return metadata


def write_gguf(path: str | Path, encoded: bytes, pair_count: int, tensors: Mapping[str, Tensor]) -> int:
    """Write a GGUF file in place of `path` once it is complete, and return its bytes.

    One tensor at a time is in memory.

    Args:
        path: The file.
        encoded: Metadata pairs in the form of `encode_pairs`.
        pair_count: Number of the pairs.
        tensors: Tensors by name, in the order of the file.

    Raises:
        OSError: The file cannot be written.
    """
    infos, offset = [], 0
    for name, tensor in tensors.items():
        shape = tensor.shape[::-1]
        infos.append(
            _encode_text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, tensor.dtype.ggml, offset)
        )
        offset += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    header = b"GGUF" + struct.pack("<IQQ", VERSION, len(tensors), pair_count) + encoded + b"".join(infos)
    with replacing(path) as file:
        file.write(header + bytes(-len(header) % ALIGNMENT))
        for tensor in tensors.values():
            elements = tensor.raw.reshape(-1).view(np.uint8)
            for start in range(0, len(elements), WRITE_BYTES):
                file.write(elements[start : start + WRITE_BYTES].data)
            file.write(bytes(-tensor.nbytes % ALIGNMENT))
            del elements
            tensor.release()
        return file.tell()


def _encode_text(text: str) -> bytes:
    data = text.encode("utf-8", "replace")
    return LENGTH_FIELD.pack(len(data)) + data


def _encode_value(value: Pair) -> bytes:
    if isinstance(value, str):
        return COUNT_FIELD.pack(MetadataType.STRING.number) + _encode_text(value)
    if isinstance(value, (bool, int, float)):
        kind = {bool: MetadataType.BOOL, int: MetadataType.UINT32, float: MetadataType.FLOAT32}[type(value)]
        assert kind.scalar_format is not None
        return COUNT_FIELD.pack(kind.number) + kind.scalar_format.pack(value)
    if value and isinstance(value[0], str):
        kind, items = MetadataType.STRING, b"".join(map(_encode_text, value))  # type: ignore[arg-type]  # strings
    else:
        kind = MetadataType.FLOAT32 if value and isinstance(value[0], float) else MetadataType.INT32
        items = np.asarray(value, kind.storage_dtype).tobytes()
    return COUNT_FIELD.pack(MetadataType.ARRAY.number) + struct.pack("<IQ", kind.number, len(value)) + items
