"""Written GGUF files: metadata pairs as bytes, tensor descriptions, and the data of one tensor after another.

A file is written front to back: the sizes of all tensors are known before their data. The pairs of another file are
copied as they are, so that their number types stay.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from ...graph.dtypes import DType
from ...graph.lazy_dataclass import dataclass
from .mapped_file import HeaderCursor, map_file
from .metadata import MAX_PAIRS, MetadataType, skip_metadata_pair
from .reader import DEFAULT_ALIGNMENT, MAGIC, SPLIT_FILE_NAME

WRITTEN_VERSION = 3
"""The version of written files."""


class SupportsWrite(Protocol):
    """A file, or a part of one, that bytes are written to."""

    def write(self, data: bytes | memoryview, /) -> object: ...


@dataclass(frozen=True, slots=True)
class TensorDescription:
    """A tensor of a file to be written: its shape in NumPy order, and its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: DType

    @property
    def nbytes(self) -> int:
        """Bytes of the data, without padding."""
        return int(np.prod(self.shape[:-1], dtype=np.int64)) * self.dtype.count_bytes(self.shape[-1])


def encode_length_prefixed_string(text: str) -> bytes:
    """Return a string of a header: its length in bytes, and UTF-8; a lone surrogate becomes a question mark."""
    raw = text.encode("utf-8", "replace")
    return struct.pack("<Q", len(raw)) + raw


def encode_metadata_pair(key: str, kind: MetadataType, value: int | float | str) -> bytes:
    """Return a metadata pair with one number or string.

    Args:
        key: Name of the pair.
        kind: Type of the value; no array.
        value: A string for `MetadataType.STRING`, else a number that the type holds.
    """
    number = kind.scalar_format
    raw = encode_length_prefixed_string(str(value)) if number is None else number.pack(value)
    return encode_length_prefixed_string(key) + struct.pack("<I", kind.number) + raw


def encode_string_array_pair(key: str, strings: Sequence[str]) -> bytes:
    """Return a metadata pair with an array of strings."""
    kind = struct.pack("<IIQ", MetadataType.ARRAY.number, MetadataType.STRING.number, len(strings))
    return encode_length_prefixed_string(key) + kind + b"".join(map(encode_length_prefixed_string, strings))


def read_encoded_metadata_pairs(path: Path) -> dict[str, bytes]:
    """Return the metadata pairs of one file as bytes, by their keys, in the order of the file.

    Raises:
        ModelError: The header of the file is damaged.
    """
    cursor = HeaderCursor(map_file(path))
    cursor.skip_and_return_start(len(MAGIC) + 4)
    cursor.read_u64()
    count = cursor.read_u64()
    if count > MAX_PAIRS:
        raise cursor.error(f"announces {count} metadata pairs; at most {MAX_PAIRS} are accepted")
    pairs: dict[str, bytes] = {}
    for i in range(count):
        cursor.section, start = f"metadata pair {i + 1} of {count}", cursor.position
        key = skip_metadata_pair(cursor)
        pairs[key] = cursor.file.data[start : cursor.position]
    return pairs


def round_up_to_multiple(size: int, alignment: int) -> int:
    """Return the next multiple of `alignment` from `size` on."""
    return -(-size // alignment) * alignment


def encode_padded_header(
    pairs: Mapping[str, bytes], tensors: Sequence[TensorDescription], alignment: int = DEFAULT_ALIGNMENT
) -> bytes:
    """Return the header of a file, padded to the start of the tensor data.

    Args:
        pairs: Encoded metadata pairs by their keys.
        tensors: The tensors in the order of their data.
        alignment: Bytes to which data are aligned; `pairs` have it if it is not the default.
    """
    parts = [MAGIC, struct.pack("<IQQ", WRITTEN_VERSION, len(tensors), len(pairs)), *pairs.values()]
    offset = 0
    for tensor in tensors:
        axes = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
        parts += [encode_length_prefixed_string(tensor.name), axes, struct.pack("<IQ", tensor.dtype.ggml, offset)]
        offset += round_up_to_multiple(tensor.nbytes, alignment)
    header = b"".join(parts)
    return header.ljust(round_up_to_multiple(len(header), alignment), b"\0")


def write_padded_tensor(
    file: SupportsWrite, tensor: TensorDescription, parts: Iterable[np.ndarray], alignment: int
) -> None:
    """Write the data of a tensor and the padding after it.

    Args:
        file: Position of the data.
        tensor: Description that the header has.
        parts: Contiguous arrays of the stored elements, in their order.
        alignment: As for `encode_padded_header`.

    Raises:
        ValueError: The parts have another size than the description.
    """
    written = 0
    for part in parts:
        file.write(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
        written += part.nbytes
    if written != tensor.nbytes:
        raise ValueError(f"tensor {tensor.name}: got {written} bytes, need {tensor.nbytes}")
    file.write(bytes(round_up_to_multiple(written, alignment) - written))


def name_split_file(path: Path, number: int, count: int) -> Path:
    """Return the path of file `number`, from 1, of a model in `count` files; `path` may have such a name already."""
    match = SPLIT_FILE_NAME.fullmatch(path.name)
    stem = match["stem"] if match else path.name.removesuffix(".gguf")
    return path.with_name(f"{stem}-{number:05d}-of-{count:05d}.gguf")
