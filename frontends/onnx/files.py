"""Read ONNX files from untrusted sources.

The content is checked before use. External data are read only from files in the folder of the model.
"""

from __future__ import annotations

import math
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...graph.errors import format_install_command
from ..errors import ModelError

if TYPE_CHECKING:
    from onnx import ModelProto, TensorProto

MAX_MODEL_BYTES = 1 << 31
"""Limit of the size of a model file: a protobuf message has fewer bytes."""
MAX_NODES = 1 << 18
"""Largest number of nodes of a model after its functions are inlined."""


def read_model(source: str | os.PathLike[str] | bytes) -> tuple[ModelProto, Path | None]:
    """Read an ONNX model from a file or from bytes, and return it with the folder of its external data.

    The folder is None for bytes.

    Raises:
        ModelError: The package onnx is missing, the source is no ONNX model, or its functions are recursive or too
            large.
    """
    if not isinstance(source, str | os.PathLike | bytes):
        raise ModelError(f"from_onnx takes a path or the bytes of a model, not {type(source).__name__}")
    try:
        from onnx import ModelProto
    except ImportError:
        raise ModelError(f"an ONNX model needs the package onnx; {format_install_command('onnx')}") from None
    from google.protobuf.message import DecodeError

    where = "the bytes" if isinstance(source, bytes) else repr(os.fspath(source))[:200]
    if isinstance(source, bytes):
        data, folder = source, None
    else:
        path = Path(source)
        if not os.path.isfile(source):
            raise ModelError(f"{where}: is no regular file; give an .onnx file")
        if path.stat().st_size >= MAX_MODEL_BYTES:
            raise ModelError(f"{where}: has {path.stat().st_size} bytes; a protobuf has fewer than {MAX_MODEL_BYTES}")
        data, folder = path.read_bytes(), path.resolve().parent
    model = ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError:
        raise ModelError(f"{where}: is no ONNX model, or only part of one; its protobuf cannot be read") from None
    if not model.HasField("graph") or not model.opset_import:
        raise ModelError(f"{where}: is no ONNX model; it has no graph, or names no opset")
    _require_bounded_functions(model)
    return model, folder


def _require_bounded_functions(model: ModelProto) -> None:
    """Require that the functions of a model are not recursive, and have at most `MAX_NODES` nodes after inlining.

    Raises:
        ModelError: A function calls itself, or the functions have too many nodes.
    """
    bodies = {(f.domain, f.name): f.node for f in model.functions}
    sizes: dict[tuple[str, str], int | None] = {}

    def size_of(key: tuple[str, str], depth: int) -> int:
        if key not in bodies:
            return 1
        if (key in sizes and sizes[key] is None) or depth > 100:
            raise ModelError(f"function {key[1]!r} calls itself, or too many others within each other")
        known = sizes.get(key)
        if known is not None:
            return known
        sizes[key] = None
        size = sum(size_of((n.domain, n.op_type), depth + 1) for n in bodies[key])
        sizes[key] = size
        return size

    count = sum(size_of((n.domain, n.op_type), 0) for n in model.graph.node)
    if count > MAX_NODES:
        raise ModelError(f"the model has {count} nodes with its functions written out; hocket reads {MAX_NODES}")


def read_tensor_array(tensor: TensorProto, folder: Path | None) -> npt.NDArray[Any]:
    """Return the array of an ONNX tensor (an initialiser or an attribute).

    External data are memory-mapped.

    Raises:
        ModelError: The tensor holds strings, its data do not match its shape, or its external file is not usable.
    """
    from onnx import TensorProto as Kinds
    from onnx import helper, numpy_helper

    name, shape = tensor.name, tuple(tensor.dims)
    if any(n < 0 for n in shape):
        raise ModelError(f"%{name} has dims {list(shape)}; need numbers of entries")
    if tensor.data_type == Kinds.STRING:
        raise ModelError(f"%{name} is of strings; hocket has numbers")
    if tensor.data_location == Kinds.EXTERNAL:
        return _map_external_data(tensor, shape, folder, np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type)))
    try:
        array = np.asarray(numpy_helper.to_array(tensor))
    except (ValueError, TypeError, KeyError, OverflowError, MemoryError):
        raise ModelError(f"%{name} says {list(shape)} of type {tensor.data_type}, which its data do not hold") from None
    if array.shape != shape:
        raise ModelError(f"%{name} says {list(shape)}, but its data are {list(array.shape)}")
    return array


def _map_external_data(
    tensor: TensorProto, shape: tuple[int, ...], folder: Path | None, dtype: np.dtype[Any]
) -> npt.NDArray[Any]:
    """Memory-map the external data of a tensor as an array.

    Raises:
        ModelError: The file is outside the folder of the model, or has other bytes than the tensor declares.
    """
    entries = {e.key: e.value for e in tensor.external_data}
    name, location = tensor.name, entries.get("location", "")
    if folder is None:
        raise ModelError(f"%{name} is in the file {location!r}; give the model's path, so that it can be found")
    path = (folder / location.replace("\0", "")).resolve()
    if not location or not path.is_relative_to(folder) or not os.path.isfile(path):
        raise ModelError(f"%{name} is in {location[:200]!r}, which is no file in the folder of the model")
    size = math.prod(shape) * dtype.itemsize
    try:
        start, length = int(entries.get("offset", 0)), int(entries.get("length", size))
    except ValueError:
        raise ModelError(f"%{name} has an offset or a length that is no number") from None
    if start < 0 or length != size or start + size > path.stat().st_size:
        raise ModelError(
            f"%{name} says {size} bytes at {start} of {location!r}, which has {path.stat().st_size}; length {length}"
        )
    if not size:
        return np.zeros(shape, dtype)
    with open(path, "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(memory, dtype, math.prod(shape), start).reshape(shape)
