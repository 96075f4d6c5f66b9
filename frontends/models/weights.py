"""The tensors of a model file as leaves of a graph."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from ... import ops
from ...graph import Value, weight
from ...graph.dtypes import FLOAT_DTYPES
from ..errors import ModelError
from ..gguf import Gguf
from ..gguf.hyperparameter_keys import CONVERT_REMEDY

BLOCK = re.compile(r"blk\.(\d+)\.")
NEVER_READ = ("*.input_scale", "cls.*", "rope_freqs.weight", "rope_factors_*.weight")
"""Optional in every architecture: scales for quantised activations, classifiers, and divisors of speeds of rotation
where nothing rotates with them."""


class Weights:
    """Leaves for the tensors of ``gguf``, one a name, shared by all graphs that are built with this object.

    ``unread`` are patterns of names, as in a shell, of optional tensors that the architecture does not use, ``spare``
    those of tensors that some blocks need and others carry for nothing; ``source`` says of blocks that are run more
    than once whose matrices they have.
    """

    def __init__(
        self, gguf: Gguf, unread: Iterable[str] = (), spare: Iterable[str] = (), source: Mapping[int, int] | None = None
    ) -> None:
        self.gguf = gguf
        self._unread, self._spare = tuple(unread), (*NEVER_READ, *spare)
        self._source = source or {}
        self._leaves: dict[str, Value] = {}

    def __call__(self, name: str, shape: tuple[int, ...]) -> Value:
        """The leaf of the tensor ``name``, in the dtype of the file.

        ModelError if the tensor is missing, has another shape, or a dtype that cannot serve: vectors must be f32, f16
        or bf16, matrices may be quantised too.
        """
        name = self._spelled(name)
        leaf = self._leaves.get(name)
        if leaf is None:
            tensor = self.gguf.tensor(name)
            if not (tensor.dtype in FLOAT_DTYPES or (tensor.dtype.is_quantised and len(tensor.shape) > 1)):
                need = ", ".join(map(str, FLOAT_DTYPES)) + (" or a quantised type" if len(tensor.shape) > 1 else "")
                raise self._error(f"tensor {name} is {tensor.dtype}; need {need}")
            leaf = self._leaves.setdefault(name, weight(name, tensor.shape, tensor.dtype))  # of two threads' one stays
        if leaf.shape != shape:
            raise self._error(f"tensor {name} has shape {list(leaf.shape)}; need {list(shape)}")
        return leaf

    def has(self, name: str) -> bool:
        """Whether the file has the tensor ``name`` and the architecture uses it."""
        return self._spelled(name) in self.gguf.tensors and not _matches(name, self._unread)

    def optional(self, name: str, shape: tuple[int, ...]) -> Value | None:
        """The leaf of the tensor ``name``, or None if the file has no such tensor or the architecture ignores it."""
        return self(name, shape) if self.has(name) else None

    def reshaped(self, name: str, shape: tuple[int, ...]) -> Value:
        """The tensor ``name`` in that shape, whatever axes of length 1 the file gives it."""
        stored = self.shape(name)
        same = stored != shape and [n for n in stored if n > 1] == [n for n in shape if n > 1]
        return ops.reshape(self(name, stored), shape=shape) if same else self(name, shape)

    def shape(self, name: str, axes: int = 1) -> tuple[int, ...]:
        """The shape of the tensor ``name``; ModelError if it is missing or has fewer than ``axes`` axes."""
        shape = self.gguf.tensor(self._spelled(name)).shape
        if len(shape) < axes:
            raise self._error(f"tensor {name} has shape {list(shape)}; need at least {axes} axes")
        return shape

    def _spelled(self, name: str) -> str:
        """The name as the file has it: some architectures leave out ``.weight``."""
        if self._source and not name.endswith(".scale") and (match := BLOCK.match(name)):
            name = BLOCK.sub(f"blk.{self._source[int(match[1])]}.", name, count=1)
        if name in self.gguf.tensors:
            return name
        short = name.removesuffix(".weight")
        return short if short in self.gguf.tensors else name

    def refuse_leftovers(self, layers: int) -> None:
        """ModelError if the file holds tensors that nobody asked for and that are not known to be optional, since
        results without them would be wrong.

        Blocks from ``layers`` on are left alone: they predict further tokens (MTP) and are not run.
        """
        left = [
            name
            for name in self.gguf.tensors
            if name not in self._leaves and _block(name) < layers and not _matches(name, (*self._unread, *self._spare))
        ]
        if left:
            raise self._error(f"tensors {reprlib.repr(left)} are not part of this architecture as hocket knows it")

    def _error(self, problem: str) -> ModelError:
        return ModelError(f"{self.gguf.path}: {problem}; {CONVERT_REMEDY}")


def _matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name, without its block, matches one of ``patterns``."""
    short = BLOCK.sub("", name, count=1)
    return any(fnmatchcase(short, pattern) for pattern in patterns)


def _block(name: str) -> int:
    """The number of the block a tensor belongs to, -1 for none."""
    match = BLOCK.match(name)
    return int(match[1]) if match else -1
