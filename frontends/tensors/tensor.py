"""A value of the graph as a tensor: its shape whatever the rank, and what its numbers are."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ... import ops
from ...graph import DType, Graph, Node, Value, constant, rewrite_graph
from ...graph.attrs import attribute_key
from ...graph.spec import MAX_RANK
from ..errors import ModelError

Array: TypeAlias = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class Tensor:
    """`value` under `shape`; where the shape has more axes than a value may have, the value has one.

    Truth values are 0 and 1 in f32 and marked as `truth`.  `known` is the array of a constant.
    """

    value: Value
    shape: tuple[int, ...]
    truth: bool = False
    known: Array | None = None

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> DType:
        return self.value.dtype

    @property
    def is_integer(self) -> bool:
        return self.value.dtype.is_integer

    @property
    def is_wide(self) -> bool:
        """Whether it has more axes than a value may have, so that its value is flat."""
        return len(self.shape) > MAX_RANK

    def axis(self, axis: int) -> int:
        """An axis counted from either end, from the front."""
        rank = max(1, self.rank)
        if not -rank <= axis < rank:
            raise ModelError(f"axis {axis} of a tensor of rank {self.rank}: there is no such axis")
        return axis % rank


Number: TypeAlias = "int | float | bool"
Operand: TypeAlias = "Tensor | int | float | bool"


def held(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the value of a tensor of `shape`."""
    return tuple(shape) if len(shape) <= MAX_RANK else (prod(shape),)


def tensor(value: Value, shape: Sequence[int] | None = None, truth: bool = False) -> Tensor:
    """`value` as a tensor of `shape`, or of its own."""
    whole = value.shape if shape is None else tuple(shape)
    wanted = held(whole)
    return Tensor(value if value.shape == wanted else reshaped(value, wanted), whole, truth)


def reshaped(value: Value, shape: tuple[int, ...]) -> Value:
    """`value` under another shape; of reshapes in a row the last remains."""
    while value.node.op == "reshape":
        (source,) = value.node.inputs
        value = source
    return value if value.shape == shape else ops.reshape(value, shape=shape)


def literal(array: npt.ArrayLike) -> Tensor:
    """A constant; float64 becomes f32, truth values are 0 and 1.  Raises `GraphError` for a type that no value has."""
    known = np.asarray(array)
    data = known.astype(np.float32) if known.dtype == bool or known.dtype == np.float64 else known
    data = np.ascontiguousarray(data).reshape(held(known.shape))
    digest = hashlib.sha256(data.tobytes() + repr((data.dtype.str, data.shape)).encode()).hexdigest()
    return Tensor(constant(f"constant.{digest[:16]}", data), known.shape, known.dtype == bool, known)


def merged(graph: Graph) -> Graph:
    """`graph` with what is computed twice computed once; constants that hold the same have the same name."""
    first: dict[object, tuple[Value, ...]] = {}

    def rule(node: Node) -> Sequence[Value]:
        if node.op in ("input", "weight", "state"):
            return node.results
        return first.setdefault((node.op, node.src, attribute_key(node.attrs), node.specs), node.results)

    return rewrite_graph(graph, rule)


def lifted(x: Operand, like: Tensor) -> Tensor:
    """A number as a constant of the type that it takes beside `like`."""
    if isinstance(x, Tensor):
        return x
    if isinstance(x, bool):
        return literal(np.asarray(x))
    if isinstance(x, int):
        return literal(np.asarray(x, like.dtype.storage if like.is_integer else np.int64 if like.truth else np.float32))
    return literal(np.asarray(x, np.float32))


def cast(x: Tensor, dtype: DType, truth: bool = False) -> Tensor:
    """The same numbers in another type; as truth values whether they are not 0."""
    if truth:
        if x.truth:
            return x
        zero = literal(np.zeros((), x.dtype.storage if x.is_integer else np.float32))
        return Tensor(ops.compare(x.value, zero.value, kind="ne"), x.shape, True)
    if x.dtype is dtype:
        return Tensor(
            x.value, x.shape, False, x.known if x.known is None or not x.truth else x.known.astype(np.float32)
        )
    if x.known is not None and dtype is not DType.BF16:
        return literal(x.known.astype(dtype.storage))
    return Tensor(ops.cast(x.value, dtype=dtype), x.shape)


_WIDTH = (DType.I8, DType.I16, DType.I32, DType.I64, DType.F16, DType.BF16, DType.F32)


def promoted(*xs: Tensor) -> list[Tensor]:
    """Tensors in the one type that holds them all: truth values, then integers, then floats; of each the widest."""
    if all(x.truth for x in xs):
        return list(xs)
    kinds = [x.dtype for x in xs if not x.truth]
    widest = max(kinds, key=_WIDTH.index)
    if {DType.F16, DType.BF16} <= set(kinds):
        widest = DType.F32
    return [cast(x, widest) for x in xs]
