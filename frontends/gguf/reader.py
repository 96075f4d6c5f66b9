"""Opening GGUF models: header, metadata and tensors of one file or of all parts of a split one.

Input is hostile: every count, length and offset is checked against the size of the file before anything is read or
allocated, so a damaged file costs one ModelError.  The format is the one of ``docs/gguf.md`` in ggml, versions 2
and 3; tensor shapes are in NumPy order (see ``tensor``).
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

from ...graph.lazy_dataclass import dataclass
from ...graph.validation import did_you_mean
from ..errors import ModelError
from .mapped_file import Cursor, MappedFile, format_name, map_file
from .metadata import MetadataArray, MetadataType, MetadataValue, read_metadata
from .tensor import Tensor, read_entries, resolve_entries

MAGIC = b"GGUF"
LFS_PREFIX = b"version https://git-lfs"
"""How the file begins that a clone without git-lfs has in place of a large one."""
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
SPLIT_FILE_NAME = re.compile(r"(?P<stem>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)

Value = TypeVar("Value", int, float, bool, str, MetadataArray)
Scalar = TypeVar("Scalar", int, float, bool, str)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Gguf:
    """An open model: metadata of the first part, tensors of all parts.

    ``metadata`` holds int, float, bool, str and ``Array``; ``tensors`` keeps the order of the file.
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
        """The value of ``key`` as ``kind`` (int, float, bool, str or Array), or ``default`` if the key is missing.

        An integer also serves as a float.  ModelError if the value is of another kind.
        """
        value = self.metadata.get(key)
        return default if value is None else self._convert(key, value, kind)

    def require(self, key: str, kind: type[Value]) -> Value:
        """The value of ``key`` as ``kind``; ModelError if it is missing or of another kind."""
        value = self.get(key, kind)
        if value is None:
            raise self._make_error(f"metadata {format_name(key)} is missing; need {_describe_type(kind)}")
        return value

    def strings(self, key: str) -> tuple[str, ...]:
        """The strings of a required array; ModelError if it is missing or holds something else."""
        array = self.require(key, MetadataArray)
        if array.item_type is not MetadataType.STRING:
            raise self._make_error(f"metadata {format_name(key)} is {array!r}; need an array of strings")
        return array.strings()

    def numbers(self, key: str) -> np.ndarray:
        """The numbers [n] of a required array, a read-only view; ModelError if it is missing or not numeric."""
        array = self.require(key, MetadataArray)
        if array.item_type.storage_dtype is None:
            raise self._make_error(f"metadata {format_name(key)} is {array!r}; need an array of numbers")
        return array.numpy()

    def per_layer(self, key: str, kind: type[Scalar], layers: int, default: Scalar | None = None) -> tuple[Scalar, ...]:
        """One value a layer, from a scalar that holds for all or an array that may be longer than ``layers``.

        ModelError if the key is missing and there is no default, if values are of another kind, or too few.
        """
        value: MetadataValue | None = self.metadata.get(key, default)
        if value is None:
            raise self._make_error(
                f"metadata {format_name(key)} is missing; need {_describe_type(kind)} or an array of {layers}"
            )
        if not isinstance(value, MetadataArray):
            return (self._convert(key, value, kind),) * layers
        if len(value) < layers:
            raise self._make_error(
                f"metadata {format_name(key)} is {value!r}; need a value for each of {layers} layers"
            )
        return tuple(self._convert(key, item, kind) for item in value[:layers])

    def tensor(self, name: str) -> Tensor:
        """The tensor of that name; ModelError with the nearest name if there is none."""
        stored = self.tensors.get(name)
        if stored is None:
            hint = did_you_mean(name, self.tensors)
            raise self._make_error(f"tensor {format_name(name)} is missing from {len(self.tensors)} tensors{hint}")
        return stored

    def sub_model(self, prefix: str) -> Gguf:
        """The tensors of one stack of several, with the names that they have in models of one, and the embedding."""
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
                if isinstance(value, MetadataArray)
                else f"{type(value).__name__} {reprlib.repr(value)}"
            )
            raise self._make_error(f"metadata {format_name(key)} is {got}; need {_describe_type(kind)}")
        return value

    def _make_error(self, problem: str) -> ModelError:
        return ModelError(f"{format_name(str(self.path))}: {problem}; use a model converted for its architecture")

    def __repr__(self) -> str:
        return f"Gguf({format_name(str(self.path))}: {len(self.metadata)} metadata, {len(self.tensors)} tensors)"


def open_gguf(path: str | os.PathLike[str], *, header_only: bool = False) -> Gguf:
    """Open a GGUF model; any part of a split model opens all of them.

    With ``header_only`` the tensors may lie past the end of the file, as in a file cut after its header: everything
    but the data can be used.  Raises ModelError, one line, for anything that is not a sound model.
    """
    given = _open_split_file(Path(path), header_only)
    count = given.read_split_number("count", 1)
    if count == 1:
        return Gguf(given.path, given.version, given.metadata, given.tensors, (given.path,))
    match = SPLIT_FILE_NAME.fullmatch(given.path.name)
    if not match or int(match["count"]) != count or not 0 < int(match["no"]) <= count:
        raise given.file.error(
            f"is part of a model in {count} files, but its name does not say which",
            f"name the parts NAME-00001-of-{count:05d}.gguf and so on",
        )
    parts = []
    for no in range(1, count + 1):
        sibling = given.path.with_name(f"{match['stem']}-{no:05d}-of-{count:05d}.gguf")
        parts.append(given if no == int(match["no"]) else _open_sibling(sibling, given, header_only))
    return _join_split_files(parts)


@dataclass(frozen=True, slots=True, eq=False)
class _SplitFile:
    """What the header of one file says; a model may lie in several."""

    file: MappedFile
    version: int
    metadata: Mapping[str, MetadataValue]
    tensors: Mapping[str, Tensor]

    @property
    def path(self) -> Path:
        return self.file.path

    def read_split_number(self, name: str, default: int | None = None) -> int:
        """The integer ``split.<name>``, which says how this file belongs to others."""
        value = self.metadata.get(f"split.{name}", default)
        if type(value) is not int or value < 0:
            raise self.file.error(f"metadata split.{name} is {reprlib.repr(value)}; need a count")
        # gguf-split writes 0 where nothing was split
        return max(value, 1) if name == "count" else value


def _open_split_file(path: Path, header_only: bool) -> _SplitFile:
    cursor = Cursor(map_file(path))
    version = _read_version(cursor)
    tensor_count, pair_count = cursor.read_u64(), cursor.read_u64()
    metadata = read_metadata(cursor, pair_count)
    cursor.section = "header"
    entries = read_entries(cursor, tensor_count)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        raise cursor.file.error(f"metadata general.alignment is {reprlib.repr(alignment)}; need a power of two")
    tensors = resolve_entries(entries, cursor, alignment, header_only)
    return _SplitFile(cursor.file, version, MappingProxyType(metadata), MappingProxyType(tensors))


def _read_version(cursor: Cursor) -> int:
    start = cursor.file.data[: len(MAGIC)]
    if start != MAGIC:
        if cursor.file.data[: len(LFS_PREFIX)] == LFS_PREFIX:
            raise cursor.file.error("is a git-lfs pointer, not the model itself", "run git lfs pull in its folder")
        raise cursor.file.error(f"is no GGUF file: starts with {start!r}, need {MAGIC!r}", "convert the model to GGUF")
    cursor.skip(len(MAGIC))
    version = cursor.read_u32()
    if version and version & 0xFFFF == 0:  # a small number, written with its high byte first
        raise cursor.file.error(
            "is big-endian; only little-endian files can be read", "convert the model on this machine"
        )
    if version not in VERSIONS:
        raise cursor.file.error(f"is GGUF version {version}; need version 2 or 3", "convert the model again")
    return version


def _open_sibling(path: Path, given: _SplitFile, header_only: bool) -> _SplitFile:
    if not path.exists():
        raise given.file.error(
            f"part {format_name(path.name)} of this model is missing", "put all parts into one folder"
        )
    return _open_split_file(path, header_only)


def _join_split_files(parts: list[_SplitFile]) -> Gguf:
    """One model of all parts in order, checked to belong together."""
    first = parts[0]
    tensors: dict[str, Tensor] = {}
    for no, part in enumerate(parts):
        said = part.read_split_number("no"), part.read_split_number("count", 1)
        if said != (no, len(parts)):
            raise part.file.error(
                f"says it is part {said[0] + 1} of {said[1]}, but its name says {no + 1} of {len(parts)}",
                "restore the names the parts were written with",
            )
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise part.file.error(
                    f"tensor {format_name(name)} is already in {format_name(tensors[name].file.path.name)}"
                )
            tensors[name] = tensor
    expected = first.read_split_number("tensors.count")
    if len(tensors) != expected:
        raise first.file.error(f"all {len(parts)} parts hold {len(tensors)} tensors; split.tensors.count is {expected}")
    return Gguf(first.path, first.version, first.metadata, MappingProxyType(tensors), tuple(p.path for p in parts))


def _describe_type(kind: type) -> str:
    return {int: "an integer", float: "a number", bool: "a boolean", str: "a string"}.get(kind, "an array")
