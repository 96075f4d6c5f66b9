"""The tensors of a model file as leaves of a graph."""

from __future__ import annotations

import re
import reprlib

from ...graph import Value, weight
from ...graph.dtypes import FLOATS
from ..errors import ModelError
from ..gguf import Gguf
from .keys import REMEDY

BLOCK = re.compile(r"blk\.(\d+)\.")


class Weights:
    """Leaves for the tensors of ``gguf``, one a name, shared by all graphs that are built with this object."""

    def __init__(self, gguf: Gguf) -> None:
        self.gguf = gguf
        self._leaves: dict[str, Value] = {}

    def __call__(self, name: str, shape: tuple[int, ...]) -> Value:
        """The leaf of the tensor ``name``, in the dtype of the file.

        ModelError if the tensor is missing, has another shape, or a dtype that cannot serve: vectors must be f32, f16
        or bf16, matrices may be quantised too.
        """
        leaf = self._leaves.get(name)
        if leaf is None:
            tensor = self.gguf.tensor(name)
            if not (tensor.dtype in FLOATS or (tensor.dtype.is_quantised and len(tensor.shape) > 1)):
                need = ", ".join(map(str, FLOATS)) + (" or a quantised type" if len(tensor.shape) > 1 else "")
                raise self._error(f"tensor {name} is {tensor.dtype}; need {need}")
            leaf = self._leaves.setdefault(name, weight(name, tensor.shape, tensor.dtype))  # of two threads' one stays
        if leaf.shape != shape:
            raise self._error(f"tensor {name} has shape {list(leaf.shape)}; need {list(shape)}")
        return leaf

    def optional(self, name: str, shape: tuple[int, ...]) -> Value | None:
        """The leaf of the tensor ``name``, or None if the file has no such tensor."""
        return self(name, shape) if name in self.gguf.tensors else None

    def refuse_leftovers(self, layers: int) -> None:
        """ModelError if the file holds tensors that nobody asked for, since results without them would be wrong.

        Blocks from ``layers`` on are left alone: they predict further tokens (MTP) and are not run.
        """
        left = [name for name in self.gguf.tensors if name not in self._leaves and _block(name) < layers]
        if left:
            raise self._error(f"tensors {reprlib.repr(left)} are not part of this architecture as hocket knows it")

    def _error(self, problem: str) -> ModelError:
        return ModelError(f"{self.gguf.path}: {problem}; {REMEDY}")


def _block(name: str) -> int:
    """The number of the block a tensor belongs to, -1 for none."""
    match = BLOCK.match(name)
    return int(match[1]) if match else -1
