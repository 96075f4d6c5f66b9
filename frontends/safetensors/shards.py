"""The tensors of safetensors files: 8 bytes with the length of a JSON header, the header, then the data.

Every size and offset is compared with the size of the file before a read. A violation raises `ModelError`.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from itertools import pairwise
from math import prod
from pathlib import Path

from ...graph.dtypes import DType
from ...graph.errors import format_count
from ..errors import ModelError
from ..gguf import Tensor
from ..gguf.mapped_file import LENGTH_FIELD, MappedFile, format_name_for_message, map_file
from ..gguf.tensor import MAX_AXES, MAX_TENSORS
from .json_files import JsonObject, parse_json, read_json

MAX_HEADER_BYTES = 100_000_000
"""Bytes of the longest accepted header; the limit of the safetensors library."""
NO_NAME = re.compile(r"(?!)")
"""A pattern that matches no name."""
INDEX_NAME = "model.safetensors.index.json"
DTYPES = {"F32": DType.F32, "F16": DType.F16, "BF16": DType.BF16}


def read_shards(
    folder: Path, dtypes: Mapping[str, DType] = DTYPES, skipped: re.Pattern[str] = NO_NAME
) -> dict[str, Tensor]:
    """Return the tensors of all safetensors files that the index of a folder names, or of its only file.

    Args:
        folder: The model folder.
        dtypes: The accepted dtypes by their names in safetensors.
        skipped: A pattern of the names of tensors that are left out, of any dtype and shape.

    Raises:
        ModelError: There is no file, or a file or the index is damaged.
    """
    index_path = folder / INDEX_NAME
    if not index_path.exists():
        path = folder / "model.safetensors"
        if not path.exists():
            raise ModelError(
                f"{format_name_for_message(str(folder))}: has no model.safetensors and no {INDEX_NAME}; "
                "download the weights as safetensors"
            )
        return read_shard(path, dtypes, skipped)
    index = read_json(index_path)
    weight_map = index.get_object_or_empty("weight_map").pairs
    names: dict[str, None] = {}
    for file_name in weight_map.values():
        if type(file_name) is not str or Path(file_name).name != file_name or not file_name.endswith(".safetensors"):
            raise index.make_error(f"weight_map names the file {reprlib.repr(file_name)}; need NAME.safetensors")
        names[file_name] = None
    tensors: dict[str, Tensor] = {}
    for file_name in sorted(names):
        for name, tensor in read_shard(folder / file_name, dtypes, skipped).items():
            if weight_map.get(name) != file_name:
                raise tensor.file.make_error(
                    f"tensor {format_name_for_message(name)} is not in this file by {INDEX_NAME}"
                )
            tensors[name] = tensor
    if missing := [name for name in weight_map if name not in tensors and not skipped.fullmatch(name)]:
        raise index.make_error(
            f"tensor {format_name_for_message(missing[0])} is in no file; missing are "
            f"{format_count(len(missing), 'tensor')}"
        )
    return tensors


def read_shard(
    path: Path, dtypes: Mapping[str, DType] = DTYPES, skipped: re.Pattern[str] = NO_NAME
) -> dict[str, Tensor]:
    """Return the tensors of one safetensors file, in the order of their bytes; the arguments are as in `read_shards`.

    Raises:
        ModelError: The file is damaged; a tensor overlaps another one, or has a dtype that is not in `dtypes`.
    """
    file = map_file(path)
    if file.size < LENGTH_FIELD.size:
        raise file.make_error(f"has {file.size} bytes; need 8 bytes with the length of the header")
    length = int(LENGTH_FIELD.unpack_from(file.data, 0)[0])
    if length > min(MAX_HEADER_BYTES, file.size - LENGTH_FIELD.size):
        raise file.make_error(
            f"announces a header of {format_count(length, 'byte')}, but the file has {file.size} and at most "
            f"{MAX_HEADER_BYTES} are "
            "accepted"
        )
    start = LENGTH_FIELD.size + length
    header = parse_json(file.data[LENGTH_FIELD.size : start], path)
    names = [name for name in header.pairs if name != "__metadata__" and not skipped.fullmatch(name)]
    for name in filter(skipped.fullmatch, header.pairs):
        end = header.get_object_or_empty(name).get_list_or_empty("data_offsets")[-1:]
        if not end or type(end[0]) is not int or start + end[0] > file.size:
            raise file.make_error(f"ends at byte {file.size}, before the end of tensor {format_name_for_message(name)}")
    if len(names) > MAX_TENSORS:
        raise file.make_error(f"announces {len(names)} tensors; at most {MAX_TENSORS} are accepted")
    tensors = sorted(
        (_read_entry(header, name, file, start, dtypes) for name in names), key=lambda tensor: tensor.offset
    )
    for first, second in pairwise(tensors):
        if first.offset + first.nbytes > second.offset:
            raise file.make_error(
                f"tensor {format_name_for_message(second.name)} overlaps tensor {format_name_for_message(first.name)}"
            )
    return {tensor.name: tensor for tensor in tensors}


def _read_entry(header: JsonObject, name: str, file: MappedFile, start: int, dtypes: Mapping[str, DType]) -> Tensor:
    entry = header.get_object_or_empty(name)
    shape, offsets, dtype = (
        entry.get_list_or_empty("shape"),
        entry.get_list_or_empty("data_offsets"),
        entry.get_text("dtype", ""),
    )
    who = f"tensor {format_name_for_message(name)}"
    if dtype not in dtypes:
        raise file.make_error(
            f"{who} has the dtype {format_name_for_message(dtype)!r}; need {', '.join(dtypes)}",
            "save the model in bfloat16",
        )
    if len(shape) > MAX_AXES or any(type(n) is not int or not 0 < n < 1 << 48 for n in shape):
        raise file.make_error(f"{who} has the shape {reprlib.repr(shape)}; need at most {MAX_AXES} positive integers")
    if len(offsets) != 2 or any(type(n) is not int or not 0 <= n < 1 << 63 for n in offsets):
        raise file.make_error(f"{who} has the offsets {reprlib.repr(offsets)}; need the first and the last byte")
    begin, end = (int(n) for n in offsets)  # type: ignore[call-overload]  # integers by the check above
    sizes = tuple(int(n) for n in shape) or (1,)  # type: ignore[call-overload]  # integers by the check above
    need = prod(sizes) * dtypes[dtype].block_bytes
    if end - begin != need or start + end > file.size:
        raise file.make_error(
            f"{who} ({dtype}{list(sizes)}) needs {need} bytes, but has bytes {begin} to {end} of {file.size - start}"
        )
    return Tensor(name, sizes, dtypes[dtype], file, start + begin)
