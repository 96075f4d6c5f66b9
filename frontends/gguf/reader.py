"""Opens GGUF models: header, metadata and tensors of one file, or of all files of a split model.

Files may be damaged or hostile. Every count, length and offset is compared with the size of the file before a read or
an allocation, and a violation raises `ModelError`. The format is ``docs/gguf.md`` of ggml, versions 2 and 3. Tensor
shapes are in NumPy order (see `tensor`).
"""

from __future__ import annotations

import os
import re
import reprlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar, overload

import numpy as np

from ...graph.errors import format_count
from ...graph.lazy_dataclass import dataclass
from ...graph.validation import did_you_mean
from ..errors import ModelError
from .mapped_file import HeaderCursor, MappedFile, format_name_for_message, map_file
from .metadata import LazyMetadataArray, MetadataType, MetadataValue, read_metadata
from .tensor import Tensor, read_tensor_entries, resolve_tensor_entries

MAGIC = b"GGUF"
LFS_PREFIX = b"version https://git-lfs"
"""First bytes of a git-lfs pointer, which replaces a large file in a clone without git-lfs."""
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
SPLIT_FILE_NAME = re.compile(r"(?P<stem>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)

Value = TypeVar("Value", int, float, bool, str, LazyMetadataArray)
Scalar = TypeVar("Scalar", int, float, bool, str)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Gguf:
    """An open GGUF model: the metadata of its first file, and the tensors of all its files.

    `metadata` has values of int, float, bool, str and `LazyMetadataArray`. `tensors` has the order of the files.
    """

    path: Path
    version: int
    metadata: Mapping[str, MetadataValue]
    tensors: Mapping[str, Tensor]
    part_paths: tuple[Path, ...]

    @overload
    def get(self, key: str, kind: type[Value]) -> Value | None: ...
    @overload
    def get(self, key: str, kind: type[Value], default: Value) -> Value: ...
    def get(self, key: str, kind: type[Value], default: Value | None = None) -> Value | None:
        """Return the metadata value of `key` after a check of its type, or `default` if the key is missing.

        Args:
            key: Name of the metadata pair.
            kind: Required type: int, float, bool, str or `LazyMetadataArray`. An integer is also accepted as a float.
            default: Result for a missing key.

        Raises:
            ModelError: The value has another type.
        """
        value = self.metadata.get(key)
        return default if value is None else self._convert(key, value, kind)

    def require(self, key: str, kind: type[Value]) -> Value:
        """Return the metadata value of `key`; raise `ModelError` if it is missing or not of type `kind`."""
        value = self.get(key, kind)
        if value is None:
            raise self._make_error(f"metadata {format_name_for_message(key)} is missing; need {_describe_type(kind)}")
        return value

    def strings(self, key: str) -> tuple[str, ...]:
        """Return the strings of a required metadata array.

        Raises:
            ModelError: The array is missing or has other elements.
        """
        array = self.require(key, LazyMetadataArray)
        if array.item_type is not MetadataType.STRING:
            raise self._make_error(f"metadata {format_name_for_message(key)} is {array!r}; need an array of strings")
        return array.strings()

    def numbers(self, key: str) -> np.ndarray:
        """Return the numbers [n] of a required metadata array as a read-only view.

        Raises:
            ModelError: The array is missing or not numeric.
        """
        array = self.require(key, LazyMetadataArray)
        if array.item_type.storage_dtype is None:
            raise self._make_error(f"metadata {format_name_for_message(key)} is {array!r}; need an array of numbers")
        return array.numpy()

    def read_per_layer(
        self, key: str, kind: type[Scalar], layers: int, default: Scalar | None = None
    ) -> tuple[Scalar, ...]:
        """Read one metadata value per layer; the file has an array of them, or one value for all layers.

        Raises:
            ModelError: The key is missing without a default, or the values have another type or are too few.
        """
        value: MetadataValue | None = self.metadata.get(key, default)
        if value is None:
            need = f"need {_describe_type(kind)} or an array of {layers}"
            raise self._make_error(f"metadata {format_name_for_message(key)} is missing; {need}")
        if not isinstance(value, LazyMetadataArray):
            return (self._convert(key, value, kind),) * layers
        if len(value) < layers:
            raise self._make_error(
                f"metadata {format_name_for_message(key)} is {value!r}; need a value for each of {layers} layers"
            )
        return tuple(self._convert(key, item, kind) for item in value[:layers])

    def tensor(self, name: str) -> Tensor:
        """Return the tensor `name`; raise `ModelError` with the nearest known name if there is none."""
        stored = self.tensors.get(name)
        if stored is None:
            hint = did_you_mean(name, self.tensors)
            raise self._make_error(
                f"tensor {format_name_for_message(name)} is missing from "
                f"{format_count(len(self.tensors), 'tensor')}{hint}"
            )
        return stored

    def select_prefix_tensors_and_embedding(self, prefix: str) -> Gguf:
        """Return one part of a model as a model of its own: the tensors with names under `prefix`, and the embedding.

        Example: ``enc.`` selects the encoder of T5. The prefix is removed, so that the tensors have the names of a
        usual model. The token embedding keeps its name.
        """
        tensors = {
            name.removeprefix(prefix).replace(".attn_o.", ".attn_output."): tensor
            for name, tensor in self.tensors.items()
            if name.startswith(prefix) or name == "token_embd.weight"
        }
        return replace(self, tensors=MappingProxyType(tensors))

    def _convert(self, key: str, value: MetadataValue, kind: type[Value]) -> Value:
        if kind is float and type(value) is int:
            return float(value)  # type: ignore[return-value]  # T is float here
        if type(value) is not kind:  # exact, because bool is an int to isinstance
            got = (
                f"array {value!r}"
                if isinstance(value, LazyMetadataArray)
                else f"{type(value).__name__} {reprlib.repr(value)}"
            )
            raise self._make_error(f"metadata {format_name_for_message(key)} is {got}; need {_describe_type(kind)}")
        return value

    def _make_error(self, problem: str) -> ModelError:
        return ModelError(
            f"{format_name_for_message(str(self.path))}: {problem}; use a model converted for its architecture"
        )

    def __repr__(self) -> str:
        name = format_name_for_message(str(self.path))
        return f"Gguf({name}: {len(self.metadata)} metadata, {format_count(len(self.tensors), 'tensor')})"


def open_gguf(path: str | os.PathLike[str], *, header_only: bool = False) -> Gguf:
    """Open a GGUF model file; any file of a split model opens all its files.

    Args:
        path: Path of the model file.
        header_only: Whether tensors may extend past the end of the file, as in a file cut after its header. Then
            everything except the data of the tensors is available.

    Raises:
        ModelError: The file is missing, damaged or no GGUF model.
    """
    part_file = _open_split_file(Path(path), header_only)
    count = part_file.read_split_number("count", 1)
    if count == 1:
        return Gguf(part_file.path, part_file.version, part_file.metadata, part_file.tensors, (part_file.path,))
    match = SPLIT_FILE_NAME.fullmatch(part_file.path.name)
    if not match or int(match["count"]) != count or not 0 < int(match["no"]) <= count:
        raise part_file.file.make_error(
            f"is part of a model in {format_count(count, 'file')}, but its name does not say which",
            f"name the parts NAME-00001-of-{count:05d}.gguf and so on",
        )
    parts = []
    for number in range(1, count + 1):
        sibling = part_file.path.with_name(f"{match['stem']}-{number:05d}-of-{count:05d}.gguf")
        parts.append(part_file if number == int(match["no"]) else _open_sibling(sibling, part_file, header_only))
    return _join_split_files(parts)


@dataclass(frozen=True, slots=True, eq=False)
class _SplitFile:
    """The header of one file of a model that may be split into several files."""

    file: MappedFile
    version: int
    metadata: Mapping[str, MetadataValue]
    tensors: Mapping[str, Tensor]

    @property
    def path(self) -> Path:
        return self.file.path

    def read_split_number(self, name: str, default: int | None = None) -> int:
        """Read the integer ``split.<name>`` of a split model, such as the number or the count of its files."""
        value = self.metadata.get(f"split.{name}", default)
        if type(value) is not int or value < 0:
            raise self.file.make_error(f"metadata split.{name} is {reprlib.repr(value)}; need a count")
        # gguf-split writes the count 0 for an undivided model
        return max(value, 1) if name == "count" else value


def _open_split_file(path: Path, header_only: bool) -> _SplitFile:
    cursor = HeaderCursor(map_file(path))
    version = _read_version(cursor)
    tensor_count, pair_count = cursor.read_u64(), cursor.read_u64()
    metadata = read_metadata(cursor, pair_count)
    cursor.section = "header"
    entries = read_tensor_entries(cursor, tensor_count)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        raise cursor.file.make_error(f"metadata general.alignment is {reprlib.repr(alignment)}; need a power of two")
    tensors = resolve_tensor_entries(entries, cursor, alignment, header_only)
    return _SplitFile(cursor.file, version, MappingProxyType(metadata), MappingProxyType(tensors))


def _read_version(cursor: HeaderCursor) -> int:
    start = cursor.file.data[: len(MAGIC)]
    if start != MAGIC:
        if cursor.file.data[: len(LFS_PREFIX)] == LFS_PREFIX:
            raise cursor.file.make_error("is a git-lfs pointer, not the model itself", "run git lfs pull in its folder")
        if cursor.file.path.suffix == ".safetensors":
            raise cursor.file.make_error("is a safetensors file", "give its folder, which has config.json")
        raise cursor.file.make_error(
            f"is no GGUF file: starts with {start!r}, need {MAGIC!r}",
            "give a GGUF file, or a Hugging Face folder with config.json",
        )
    cursor.skip_and_return_start(len(MAGIC))
    version = cursor.read_u32()
    if version and version & 0xFFFF == 0:  # a small number in big-endian order
        raise cursor.file.make_error(
            "is big-endian; only little-endian files can be read", "convert the model on this machine"
        )
    if version not in VERSIONS:
        raise cursor.file.make_error(f"is GGUF version {version}; need version 2 or 3", "convert the model again")
    return version


def _open_sibling(path: Path, part_file: _SplitFile, header_only: bool) -> _SplitFile:
    if not path.exists():
        raise part_file.file.make_error(
            f"part {format_name_for_message(path.name)} of this model is missing", "put all parts into one folder"
        )
    return _open_split_file(path, header_only)


def _join_split_files(parts: list[_SplitFile]) -> Gguf:
    """Join the headers of all files of a split model, in order. The files are first checked to belong together."""
    first = parts[0]
    tensors: dict[str, Tensor] = {}
    for number, part in enumerate(parts):
        stored = part.read_split_number("no"), part.read_split_number("count", 1)
        if stored != (number, len(parts)):
            raise part.file.make_error(
                f"says it is part {stored[0] + 1} of {stored[1]}, but its name says {number + 1} of {len(parts)}",
                "restore the names the parts were written with",
            )
        for name, tensor in part.tensors.items():
            if name in tensors:
                first_file = format_name_for_message(tensors[name].file.path.name)
                raise part.file.make_error(f"tensor {format_name_for_message(name)} is already in {first_file}")
            tensors[name] = tensor
    expected = first.read_split_number("tensors.count")
    if len(tensors) != expected:
        raise first.file.make_error(
            f"all {format_count(len(parts), 'part')} hold {format_count(len(tensors), 'tensor')}; "
            f"split.tensors.count is {expected}"
        )
    return Gguf(first.path, first.version, first.metadata, MappingProxyType(tensors), tuple(p.path for p in parts))


def _describe_type(kind: type) -> str:
    return {int: "an integer", float: "a number", bool: "a boolean", str: "a string"}.get(kind, "an array")
