"""The tensors of a model file as weight leaves of a graph.

A leaf is a node without operands.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from .... import ops
from ....graph import Value, weight
from ....graph.dtypes import FLOAT_DTYPES
from ....graph.errors import format_count
from ...errors import ModelError
from ...gguf import Gguf
from ...gguf.hyperparameter_keys import CONVERT_REMEDY

BLOCK_PREFIX = re.compile(r"blk\.(\d+)\.")
ALWAYS_OPTIONAL_TENSORS = ("*.input_scale", "cls.*", "rope_freqs.weight", "rope_factors_*.weight")
"""Patterns of tensors that are optional in every architecture.

These are scales for quantised activations, classifiers, and frequency divisors where no layer has RoPE.
"""


class ModelWeights:
    """The tensors of a model file as graph leaves; there is one leaf per tensor, which all graphs share.

    Args:
        gguf: The file.
        unread: Names of optional tensors that the architecture does not use, as shell patterns.
        spare: Names of tensors that some blocks need, while other blocks may have them unused, as shell patterns.
        source: If blocks are run more than once, maps the number of such a block to the block that has its matrices.
    """

    def __init__(
        self, gguf: Gguf, unread: Iterable[str] = (), spare: Iterable[str] = (), source: Mapping[int, int] | None = None
    ) -> None:
        self.gguf = gguf
        self._unread, self._spare = tuple(unread), (*ALWAYS_OPTIONAL_TENSORS, *spare)
        self._source = source or {}
        self._leaves: dict[str, Value] = {}

    def __call__(self, name: str, shape: tuple[int, ...]) -> Value:
        """Return the leaf of a tensor, in the dtype of the file.

        Raises:
            ModelError: The tensor is missing, or has another shape or an unusable dtype. Vectors must be f32, f16 or
                bf16; matrices may also be quantised.
        """
        name = self._find_name_in_file(name)
        leaf = self._leaves.get(name)
        if leaf is None:
            tensor = self.gguf.tensor(name)
            if not (tensor.dtype in FLOAT_DTYPES or (tensor.dtype.is_quantised and len(tensor.shape) > 1)):
                need = ", ".join(map(str, FLOAT_DTYPES)) + (" or a quantised type" if len(tensor.shape) > 1 else "")
                raise self._make_error(f"tensor {name} is {tensor.dtype}; need {need}")
            leaf = self._leaves.setdefault(
                name, weight(name, tensor.shape, tensor.dtype)
            )  # with two threads, the first one stays
        if leaf.shape != shape:
            raise self._make_error(f"tensor {name} has shape {list(leaf.shape)}; need {list(shape)}")
        return leaf

    def has_used_tensor(self, name: str) -> bool:
        """Return whether the file has the tensor and the architecture uses it."""
        return self._find_name_in_file(name) in self.gguf.tensors and not _matches_any_without_block_prefix(
            name, self._unread
        )

    def optional_leaf(self, name: str, shape: tuple[int, ...]) -> Value | None:
        """Return the leaf of a tensor, or `None` if the file has no such tensor or the architecture ignores it."""
        return self(name, shape) if self.has_used_tensor(name) else None

    def get_leaf_ignoring_unit_axes(self, name: str, shape: tuple[int, ...]) -> Value:
        """Return the leaf of a tensor, reshaped if its shape in the file differs only by axes of length 1."""
        stored = self.tensor_shape(name)
        same = stored != shape and [n for n in stored if n > 1] == [n for n in shape if n > 1]
        return ops.reshape(self(name, stored), shape=shape) if same else self(name, shape)

    def tensor_shape(self, name: str, min_axes: int = 1) -> tuple[int, ...]:
        """Return the shape of a tensor in the file, outermost axis first.

        Raises:
            ModelError: The tensor is missing or has fewer than ``min_axes`` axes.
        """
        shape = self.gguf.tensor(self._find_name_in_file(name)).shape
        if len(shape) < min_axes:
            raise self._make_error(
                f"tensor {name} has shape {list(shape)}; need at least {format_count(min_axes, 'axis', 'axes')}"
            )
        return shape

    def _find_name_in_file(self, name: str) -> str:
        """Return the name that a tensor has in the file, or the given name if the file lacks it.

        Repeated blocks have the tensors of their source block, and some names lack ``.weight``.
        """
        if self._source and not name.endswith(".scale") and (match := BLOCK_PREFIX.match(name)):
            name = BLOCK_PREFIX.sub(f"blk.{self._source[int(match[1])]}.", name, count=1)
        if name in self.gguf.tensors:
            return name
        short = name.removesuffix(".weight")
        return short if short in self.gguf.tensors else name

    def require_no_unknown_unread_tensors(self, layers: int) -> None:
        """Raise `ModelError` if the file has a tensor that no graph reads, unless it is known to be optional.

        Results without such a tensor would be wrong. MTP blocks, which have numbers from ``layers`` on, may stay
        unused.
        """
        left = [
            name
            for name in self.gguf.tensors
            if name not in self._leaves
            and _parse_block_number(name) < layers
            and not _matches_any_without_block_prefix(name, (*self._unread, *self._spare))
        ]
        if left:
            raise self._make_error(f"tensors {reprlib.repr(left)} are not part of this architecture as hocket knows it")

    def _make_error(self, problem: str) -> ModelError:
        return ModelError(f"{self.gguf.path}: {problem}; {CONVERT_REMEDY}")


def _matches_any_without_block_prefix(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a tensor name, without its block prefix, matches any of the shell patterns."""
    short = BLOCK_PREFIX.sub("", name, count=1)
    return any(fnmatchcase(short, pattern) for pattern in patterns)


def _parse_block_number(name: str) -> int:
    """Parse the block number in a tensor name such as ``blk.3.attn_q.weight``; return -1 if there is none."""
    match = BLOCK_PREFIX.match(name)
    return int(match[1]) if match else -1
