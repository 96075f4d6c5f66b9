"""GGUF files of folders: the bytes of metadata pairs, and whole files with tensors."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from ...graph.storage.files import replacing
from ..gguf import Tensor
from ..gguf.mapped_file import COUNT_FIELD, HeaderCursor, MappedFile
from ..gguf.metadata import MetadataType, MetadataValue, read_metadata
from ..gguf.reader import DEFAULT_ALIGNMENT
from ..gguf.writer import TensorDescription, encode_length_prefixed_string, encode_padded_header, write_padded_tensor

WRITE_BYTES = 1 << 24
"""Bytes of a tensor that are written at a time."""

Pair: TypeAlias = int | float | bool | str | bytes | Sequence[str] | Sequence[bool] | Sequence[int] | Sequence[float]
"""A metadata value before it is encoded; a list has elements of one type."""


def encode_metadata_pairs(pairs: Mapping[str, Pair]) -> dict[str, bytes]:
    """Encode metadata pairs as GGUF bytes: integers as uint32, numbers as float32, lists of integers as int32.

    Booleans and bytes have one byte each.
    """
    return {key: encode_length_prefixed_string(key) + _encode_value(value) for key, value in pairs.items()}


def decode_metadata_pairs(pairs: Mapping[str, bytes], path: Path) -> dict[str, MetadataValue]:
    """Return the metadata of encoded pairs, with the types that a GGUF file of them has.

    The arrays keep a copy of the bytes in anonymous memory.
    """
    encoded = b"".join(pairs.values())
    data = mmap.mmap(-1, max(1, len(encoded)))
    data[: len(encoded)] = encoded
    return read_metadata(HeaderCursor(MappedFile(path, data, len(encoded), 0)), len(pairs))


def write_gguf_atomically(path: str | Path, pairs: Mapping[str, bytes], tensors: Mapping[str, Tensor]) -> int:
    """Write a GGUF file in place of `path` once it is complete, and return its bytes.

    One tensor at a time is in memory.

    Args:
        path: The file.
        pairs: Encoded metadata pairs by their keys.
        tensors: Tensors by name, in the order of the file.

    Raises:
        OSError: The file cannot be written.
    """
    described = [TensorDescription(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
    with replacing(path) as file:
        file.write(encode_padded_header(pairs, described))
        for description, tensor in zip(described, tensors.values(), strict=True):
            write_padded_tensor(file, description, _split_tensor_bytes(tensor), DEFAULT_ALIGNMENT)
            tensor.release_memory()
        return file.tell()


def _split_tensor_bytes(tensor: Tensor) -> Iterator[np.ndarray]:
    """Yield the stored bytes of a tensor in parts of at most `WRITE_BYTES`."""
    elements = tensor.stored_elements.reshape(-1).view(np.uint8)
    for start in range(0, len(elements), WRITE_BYTES):
        yield elements[start : start + WRITE_BYTES]


def _encode_value(value: Pair) -> bytes:
    if isinstance(value, str):
        return COUNT_FIELD.pack(MetadataType.STRING.number) + encode_length_prefixed_string(value)
    if isinstance(value, bytes):
        kind = MetadataType.UINT8
        return COUNT_FIELD.pack(MetadataType.ARRAY.number) + struct.pack("<IQ", kind.number, len(value)) + value
    if isinstance(value, (bool, int, float)):
        kind = {bool: MetadataType.BOOL, int: MetadataType.UINT32, float: MetadataType.FLOAT32}[type(value)]
        assert kind.scalar_format is not None
        return COUNT_FIELD.pack(kind.number) + kind.scalar_format.pack(value)
    if value and isinstance(value[0], str):
        kind, items = MetadataType.STRING, b"".join(map(encode_length_prefixed_string, value))  # type: ignore[arg-type]  # strings
    else:
        first = value[0] if value else 0
        kind = MetadataType.FLOAT32 if isinstance(first, float) else MetadataType.INT32
        kind = MetadataType.BOOL if isinstance(first, bool) else kind
        items = np.asarray(value, kind.storage_dtype).tobytes()
    return COUNT_FIELD.pack(MetadataType.ARRAY.number) + struct.pack("<IQ", kind.number, len(value)) + items
