"""Read a graph from a file: a model, an exported program, or a graph that `hocket dump` wrote as text or JSON."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

from ..graph import Graph, GraphError, from_json
from ..graph.dtypes import DType
from ..graph.errors import format_count, format_install_command
from ..ops.text import parse
from .errors import ModelError
from .gguf.reader import MAGIC
from .inference.device_group import ONE_DEVICE
from .inference.session import MIN_CONTEXT_BUCKET
from .models import Step
from .open_model import choose_context, open_model
from .safetensors import is_model_folder

ZIP_MAGIC = b"PK\x03\x04"
"""First bytes of a zip file, which is the format of `torch.export.save`."""
MAX_GRAPH_FILE_BYTES = 1 << 28
"""Maximum bytes of a graph file; the largest model needs a few million."""
TRACE_MARKERS, TRACE_MARKER_BYTES = (b'"traceEvents"', b'"displayTimeUnit"'), 200
"""Texts at the start of a trace; a trace has one of them in the given number of first bytes."""
STDIN = "-"
"""The name that stands for a graph on stdin."""


def is_gguf_or_hf_folder(path: str) -> bool:
    """Return whether a path is a GGUF file or a Hugging Face folder, and not a graph."""
    if path == STDIN or not Path(path).is_file():
        return path != STDIN and is_model_folder(path)
    with open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def is_torch_or_onnx_program(path: str) -> bool:
    """Return whether a path is an exported PyTorch program or an ONNX model."""
    if is_model_folder(path):
        return False
    with open(path, "rb") as file:
        return file.read(len(ZIP_MAGIC)) == ZIP_MAGIC or path.lower().endswith(".onnx")


def read_graph(
    path: str, *, context: int | None = None, tokens: int = 1, caches: tuple[DType, DType] = ONE_DEVICE.cache_dtypes
) -> Graph:
    """Read the graph of a file: GGUF model, PyTorch program, ONNX model, or graph as text or JSON.

    For a model this is the graph of one step, and only the header is read. A .pt2 file is read without unpickling. An
    .onnx file is recognised by its name.

    Args:
        path: The file, a Hugging Face folder, or ``-`` for a graph as text or JSON on stdin.
        context: Context in tokens, for a model.
        tokens: New tokens of the step, for a model.
        caches: Dtypes of cached keys and values, for a model.

    Raises:
        ModelError: The file has none of these formats, or cannot be used.
        GraphError: The graph is not valid.
    """
    if path == STDIN:
        return _parse_graph("stdin", sys.stdin.buffer.read(MAX_GRAPH_FILE_BYTES + 1))
    mode = Path(path).stat().st_mode
    if not stat.S_ISREG(mode) and not is_model_folder(path):
        raise ModelError(
            f"{path}: is no regular file and no folder with config.json; give a .gguf, .pt2 or .onnx file, a Hugging "
            "Face folder, or a graph as text or JSON"
        )
    if is_gguf_or_hf_folder(path):
        model = open_model(path, header_only=True)
        context = choose_context(model, tokens, context)
        cells, (keys, values) = min(context, max(MIN_CONTEXT_BUCKET, tokens)), caches
        return model.graph(Step(1, tokens, cells, context, tokens, keys=keys, values=values))
    with open(path, "rb") as file:
        start = file.read(len(ZIP_MAGIC))
        if start == ZIP_MAGIC:
            return _read_torch_graph(path)
        if path.lower().endswith(".onnx"):  # ONNX files have no magic number
            from .onnx.importer import from_onnx

            return from_onnx(path).graph
        return _parse_graph(path, start + file.read(MAX_GRAPH_FILE_BYTES))


def _parse_graph(path: str, data: bytes) -> Graph:
    """Parse a graph as text or JSON; raise `ModelError` with `path` if it is neither."""
    try:
        text = data.decode("utf-8")
        if not text.strip() or len(data) > MAX_GRAPH_FILE_BYTES:
            raise GraphError(f"has {format_count(len(data), 'byte')}; need a dump of at most {MAX_GRAPH_FILE_BYTES}")
        return from_json(text) if text.lstrip().startswith("{") else parse(text)
    except (GraphError, UnicodeDecodeError) as error:
        if any(marker in data[:TRACE_MARKER_BYTES] for marker in TRACE_MARKERS):
            raise ModelError(f"{path}: is a trace; give the model, and the trace as --trace FILE") from None
        why = "not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise ModelError(f"{path}: is neither a GGUF model nor a graph ({why})") from None


def _read_torch_graph(path: str) -> Graph:
    """Read the graph of an exported PyTorch program."""
    try:
        from .torch.importer import from_torch
        from .torch.pt2_archive import read_program

        return from_torch(read_program(path)).graph
    except ImportError:
        raise ModelError(f"{path}: a PyTorch program needs PyTorch; {format_install_command('torch')}") from None
