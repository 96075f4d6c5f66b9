"""Read a graph from a file: a model, an exported program, or a graph that `hocket dump` wrote as text or JSON."""

from __future__ import annotations

import stat
from pathlib import Path

from ..graph import Graph, GraphError, from_json
from ..graph.dtypes import DType
from ..ops.text import parse
from .errors import ModelError
from .gguf.reader import MAGIC
from .inference.device_group import ONE_DEVICE
from .inference.session import MIN_CONTEXT_BUCKET
from .models import Step
from .open_model import choose_context, open_model

ZIP_MAGIC = b"PK\x03\x04"
"""First bytes of a zip file, which is the format of `torch.export.save`."""
MAX_GRAPH_FILE_BYTES = 1 << 28
"""Maximum bytes of a graph file; the largest model needs a few million."""


def read_graph(
    path: str, *, context: int | None = None, tokens: int = 1, caches: tuple[DType, DType] = ONE_DEVICE.cache_dtypes
) -> Graph:
    """Read the graph of a file: GGUF model, PyTorch program, ONNX model, or graph as text or JSON.

    For a model this is the graph of one step, and only the header is read. A .pt2 file is read without unpickling. An
    .onnx file is recognised by its name.

    Args:
        path: The file.
        context: Context in tokens, for a model.
        tokens: New tokens of the step, for a model.
        caches: Dtypes of cached keys and values, for a model.

    Raises:
        ModelError: The file has none of these formats, or cannot be used.
        GraphError: The graph is not valid.
    """
    mode = Path(path).stat().st_mode
    if not stat.S_ISREG(mode):
        raise ModelError(f"{path}: is no regular file; give a .gguf, .pt2 or .onnx file, or a graph as text or JSON")
    with open(path, "rb") as file:
        start = file.read(len(MAGIC))
        if start == MAGIC:
            model = open_model(path, header_only=True)
            context = choose_context(model, tokens, context)
            cells, (keys, values) = min(context, max(MIN_CONTEXT_BUCKET, tokens)), caches
            return model.graph(Step(1, tokens, cells, context, tokens, keys=keys, values=values))
        if start == ZIP_MAGIC:
            return _read_torch_graph(path)
        if path.lower().endswith(".onnx"):  # ONNX files have no magic number
            from .onnx.importer import from_onnx

            return from_onnx(path).graph
        data = start + file.read(MAX_GRAPH_FILE_BYTES)
    try:
        text = data.decode("utf-8")
        if not text.strip() or len(data) > MAX_GRAPH_FILE_BYTES:
            raise GraphError(f"has {len(data)} bytes; need a dump of at most {MAX_GRAPH_FILE_BYTES}")
        return from_json(text) if text.lstrip().startswith("{") else parse(text)
    except (GraphError, UnicodeDecodeError) as error:
        why = "not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise ModelError(f"{path}: is neither a GGUF model nor a graph ({why})") from None


def _read_torch_graph(path: str) -> Graph:
    """Read the graph of an exported PyTorch program."""
    try:
        from .torch.importer import from_torch
        from .torch.pt2_archive import read_program

        return from_torch(read_program(path)).graph
    except ImportError:
        raise ModelError(f"{path}: a PyTorch program needs PyTorch; pip install hocket[torch]") from None
