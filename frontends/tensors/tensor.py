"""`Tensor`: a graph value with a shape of any rank, a boolean flag, and the array if it is a constant."""

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
from ...graph.attrs import make_attribute_key
from ...graph.spec import MAX_RANK
from ..errors import ModelError

Array: TypeAlias = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A graph value with the shape that the tensor has in PyTorch or ONNX.

    A graph value has at most `MAX_RANK` axes. For a shape with more axes, `value` is flat (rank 1). Booleans are stored
    as 0 and 1 in f32, with `is_bool` set. `constant` is the array of a constant tensor, otherwise None. With
    `is_non_negative` no entry is below 0, so that it is no index from the end.
    """

    value: Value
    shape: tuple[int, ...]
    is_bool: bool = False
    constant: Array | None = None
    is_non_negative: bool = False

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
    def exceeds_max_rank(self) -> bool:
        """Whether the shape has more than `MAX_RANK` axes, so that the graph value is flat."""
        return len(self.shape) > MAX_RANK

    def normalise_axis(self, axis: int) -> int:
        """Return the non-negative index of `axis`, which may be negative.

        Raises:
            ModelError: The tensor has no such axis.
        """
        rank = max(1, self.rank)
        if not -rank <= axis < rank:
            raise ModelError(f"axis {axis} of a tensor of rank {self.rank}: there is no such axis")
        return axis % rank


Number: TypeAlias = "int | float | bool"
Operand: TypeAlias = "Tensor | int | float | bool"


def limit_shape_to_max_rank(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the graph value that stores a tensor of `shape`.

    It is `shape` itself, or one axis with all entries if `shape` has more than `MAX_RANK` axes.
    """
    return tuple(shape) if len(shape) <= MAX_RANK else (prod(shape),)


def as_tensor(value: Value, shape: Sequence[int] | None = None, is_bool: bool = False) -> Tensor:
    """Make a tensor of `shape` from a graph value; by default it has the shape of the value.

    `is_bool` marks a tensor of booleans.
    """
    full_shape = value.shape if shape is None else tuple(shape)
    value_shape = limit_shape_to_max_rank(full_shape)
    return Tensor(value if value.shape == value_shape else reshape_value(value, value_shape), full_shape, is_bool)


def skip_reshapes(value: Value) -> Value:
    """Return the value with the same entries before all reshapes."""
    while value.node.op == "reshape":
        (value,) = value.node.inputs
    return value


def reshape_value(value: Value, shape: tuple[int, ...]) -> Value:
    """Return a graph value in another shape; a reshape of a reshape becomes one reshape."""
    value = skip_reshapes(value)
    return value if value.shape == shape else ops.reshape(value, shape=shape)


def constant_tensor(array: npt.ArrayLike) -> Tensor:
    """Return an array as a constant tensor; float64 becomes f32, booleans become 0 and 1.

    Raises:
        GraphError: hocket has no dtype for the array.
    """
    known = np.asarray(array)
    data = known.astype(np.float32) if known.dtype == bool or known.dtype == np.float64 else known
    data = np.ascontiguousarray(data).reshape(limit_shape_to_max_rank(known.shape))
    digest = hashlib.sha256(data.tobytes() + repr((data.dtype.str, data.shape)).encode()).hexdigest()
    return Tensor(constant(f"constant.{digest[:16]}", data), known.shape, known.dtype == bool, known)


def merge_equal_nodes(graph: Graph) -> Graph:
    """Return a graph in which equal nodes are merged into one (common subexpression elimination)."""
    first: dict[object, tuple[Value, ...]] = {}

    def rule(node: Node) -> Sequence[Value]:
        if node.op in ("input", "weight", "state"):
            return node.results
        return first.setdefault((node.op, node.src, make_attribute_key(node.attrs), node.specs), node.results)

    return rewrite_graph(graph, rule)


def number_as_tensor(x: Operand, like: Tensor) -> Tensor:
    """Return a Python number as a constant tensor that can be combined with `like`; return a tensor unchanged.

    The constant has the dtype that PyTorch would use for the number in an operation with `like`.
    """
    if isinstance(x, Tensor):
        return x
    if isinstance(x, bool):
        return constant_tensor(np.asarray(x))
    if isinstance(x, int):
        return constant_tensor(
            np.asarray(x, like.dtype.storage if like.is_integer else np.int64 if like.is_bool else np.float32)
        )
    with np.errstate(over="ignore"):  # a number beyond float32 is an infinity, as in PyTorch
        return constant_tensor(np.asarray(x, np.float32))


def cast(x: Tensor, dtype: DType, is_bool: bool = False) -> Tensor:
    """Convert a tensor to another dtype, or with `is_bool` to booleans (true for non-zero entries)."""
    if is_bool:
        if x.is_bool:
            return x
        zero = constant_tensor(np.zeros((), x.dtype.storage if x.is_integer else np.float32))
        return Tensor(ops.compare(x.value, zero.value, kind="ne"), x.shape, True)
    if x.dtype is dtype:
        known = x.constant if x.constant is None or not x.is_bool else x.constant.astype(np.float32)
        return Tensor(x.value, x.shape, False, known, x.is_non_negative)
    if x.constant is not None and dtype is not DType.BF16:
        return constant_tensor(x.constant.astype(dtype.storage))
    return Tensor(ops.cast(x.value, dtype=dtype), x.shape, is_non_negative=x.is_non_negative and dtype is DType.I64)


_DTYPES_BY_WIDTH = (DType.I8, DType.I16, DType.I32, DType.I64, DType.F16, DType.BF16, DType.F32)


def promote_dtypes(*xs: Tensor) -> list[Tensor]:
    """Convert tensors to one common dtype.

    Floats win over integers, and integers over booleans; among equal kinds the widest dtype wins. f16 and bf16 together
    become f32.
    """
    if all(x.is_bool for x in xs):
        return list(xs)
    kinds = [x.dtype for x in xs if not x.is_bool]
    widest = max(kinds, key=_DTYPES_BY_WIDTH.index)
    if {DType.F16, DType.BF16} <= set(kinds):
        widest = DType.F32
    return [cast(x, widest) for x in xs]
