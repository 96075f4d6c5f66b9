"""The graph in a file: of a model, or one that `hocket dump` wrote as text or JSON."""

from __future__ import annotations

import stat
from pathlib import Path

from ..graph import Graph, GraphError, from_json
from ..graph.dtypes import DType
from ..ops.text import parse
from .devices import ONE_DEVICE
from .errors import ModelError
from .gguf.reader import MAGIC
from .models import Step
from .open import context_for, open_model
from .session import FEWEST_CELLS

PROGRAM = b"PK\x03\x04"
"""With what a file of `torch.export.save` begins, as any zip file does."""
LARGEST = 1 << 28
"""Bytes of a graph file; that of the largest model has a few million."""


def read_graph(
    path: str, *, context: int | None = None, tokens: int = 1, caches: tuple[DType, DType] = ONE_DEVICE.caches
) -> Graph:
    """The graph in a file.  For a model, that of a step with ``tokens`` new tokens, whose keys and values are kept as
    `caches` says; only its header is read.

    A .pt2 file is read without unpickling; an .onnx file is known by its name.
    Raises `ModelError` or `GraphError` for a file that is none of these.
    """
    mode = Path(path).stat().st_mode
    if not stat.S_ISREG(mode):
        raise ModelError(f"{path}: is no regular file; give a .gguf, .pt2 or .onnx file, or a graph as text or JSON")
    with open(path, "rb") as file:
        start = file.read(len(MAGIC))
        if start == MAGIC:
            model = open_model(path, header_only=True)
            context = context_for(model, tokens, context)
            cells, (keys, values) = min(context, max(FEWEST_CELLS, tokens)), caches
            return model.graph(Step(1, tokens, cells, context, tokens, keys=keys, values=values))
        if start == PROGRAM:
            return _of_program(path)
        if path.lower().endswith(".onnx"):  # which have nothing of their own to begin with
            from .onnx.model import from_onnx

            return from_onnx(path).graph
        data = start + file.read(LARGEST)
    try:
        text = data.decode("utf-8")
        if not text.strip() or len(data) > LARGEST:
            raise GraphError(f"has {len(data)} bytes; need a dump of at most {LARGEST}")
        return from_json(text) if text.lstrip().startswith("{") else parse(text)
    except (GraphError, UnicodeDecodeError) as error:
        why = "not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise ModelError(f"{path}: is neither a GGUF model nor a graph ({why})") from None


def _of_program(path: str) -> Graph:
    """The graph of an exported PyTorch program."""
    try:
        from .torch.archive import read_program
        from .torch.exported import from_torch

        return from_torch(read_program(path)).graph
    except ImportError:
        raise ModelError(f"{path}: a PyTorch program needs PyTorch; pip install hocket[torch]") from None
