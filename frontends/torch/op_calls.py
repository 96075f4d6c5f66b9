"""Converters of ATen calls with other arguments than the functions of `frontends.tensors`.

A converter takes the arguments of an ATen op, with tensors as `Tensor`, and returns the results as `Tensor`. Most
functions here only reorder arguments and have the name of their ATen op. A function ``make_*_converter`` makes a
converter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from ... import ops
from ..errors import ModelError
from ..tensors import arithmetic as arith
from ..tensors import indexing, matmul, reductions, shapes
from ..tensors.tensor import Operand, Tensor, cast, constant_tensor

OpConverter: TypeAlias = Callable[..., Any]
"""A function that converts one call to graph nodes: it takes the arguments and returns the results."""


def as_pads_per_axis(x: Tensor, pads: Sequence[int]) -> list[tuple[int, int]]:
    """Convert the flat pads of PyTorch, which begin with the last axis, to a pair (before, after) for each axis."""
    pairs = list(zip(pads[::2], pads[1::2], strict=True))[::-1]
    return [(0, 0)] * (x.rank - len(pairs)) + pairs


def with_scalar_tensor_support(converter: OpConverter) -> OpConverter:
    """Return a converter that also accepts scalar tensors, from a `converter` that needs at least one axis.

    Each scalar tensor gets one axis of size 1 before the call, and the results lose it afterwards.
    """

    @wraps(converter)
    def call_converter(x: Tensor, *args: Any, **more: Any) -> Any:
        args = tuple(map(_add_axis_to_scalar, args))
        more = {name: _add_axis_to_scalar(value) for name, value in more.items()}
        out = converter(_add_axis_to_scalar(x), *args, **more)
        if x.rank:
            return out
        return tuple(shapes.reshape(t, ()) for t in out) if isinstance(out, tuple) else shapes.reshape(out, ())

    return call_converter


def _add_axis_to_scalar(x: Any) -> Any:
    """Add an axis of size 1 to a scalar tensor; return any other argument unchanged."""
    return shapes.reshape(x, (1,)) if isinstance(x, Tensor) and not x.rank else x


# ---------------------------------------------------------------------------------------------------- entry by entry


def rsub(x: Tensor, other: Operand, alpha: float = 1) -> Tensor:
    return arith.sub(other, x, alpha=alpha)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    return arith.apply_unary_op(ops.gelu_erf if approximate == "none" else ops.gelu, x)


def softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    smooth = arith.scale_and_shift(arith.apply_unary_op(ops.softplus, arith.scale_and_shift(x, beta)), 1 / beta)
    return arith.where(arith.compare("gt", arith.scale_and_shift(x, beta), float(threshold)), x, smooth)


def elu(x: Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Tensor:
    low = arith.scale_and_shift(
        arith.apply_unary_op(ops.expm1, arith.scale_and_shift(arith.clamp(x, max=0.0), input_scale)), alpha * scale
    )
    return arith.where(arith.compare("gt", x, 0.0), arith.scale_and_shift(x, scale), low)


def make_log_converter(base: float) -> OpConverter:
    """Make the converter of a logarithm to a base, such as ``log2``."""
    return lambda x: arith.scale_and_shift(arith.apply_unary_op(ops.log, x), 1 / math.log(base))


def addcmul(x: Tensor, a: Tensor, b: Tensor, value: float = 1) -> Tensor:
    return arith.add(x, arith.mul(arith.mul(a, b), value))


def addcdiv(x: Tensor, a: Tensor, b: Tensor, value: float = 1) -> Tensor:
    return arith.add(x, arith.mul(arith.div(a, b), value))


def make_float32_constant_like_converter(value: float) -> OpConverter:
    """Make the converter of an op that returns float32 constants of its operand's shape, such as ``ones_like``."""
    return lambda x, *_: constant_tensor(np.full(x.shape, value, np.float32))


def full_like(x: Tensor, value: Operand) -> Tensor:
    """Convert ``full_like``: return `value`, a number or a tensor, for each entry of the shape of `x`."""
    if isinstance(value, Tensor):
        return shapes.expand(cast(value, x.dtype, x.is_bool), x.shape)
    return constant_tensor(np.full(x.shape, value, np.int64 if isinstance(value, int) else np.float32))


def make_float32_constant_of_size_converter(value: float) -> OpConverter:
    """Make the converter of an op that returns a float32 constant of a given shape, such as ``new_zeros``."""
    return lambda x, size: constant_tensor(np.full(size, value, np.float32))


def new_full(x: Tensor, size: Sequence[int], value: float) -> Tensor:
    return constant_tensor(np.full(size, value, np.int64 if isinstance(value, int) else np.float32))


def make_triangle_converter(keep: Callable[..., np.ndarray]) -> OpConverter:
    """Make the converter of ``tril`` or ``triu``; `keep` is the NumPy function of the same name."""

    def row(x: Tensor, diagonal: int = 0) -> Tensor:
        return arith.masked_fill(x, constant_tensor(~keep(np.ones(x.shape[-2:], bool), diagonal)), 0)

    return row


# ------------------------------------------------------------------------------------------------------------ shapes


def expand(x: Tensor, size: Sequence[int], implicit: bool = False) -> Tensor:
    return shapes.expand(x, size)


def squeeze(x: Tensor, axes: int | Sequence[int] | None = None) -> Tensor:
    return shapes.squeeze(x, [axes] if isinstance(axes, int) else axes)


def chunk(x: Tensor, chunks: int, axis: int = 0) -> tuple[Tensor, ...]:
    """Convert ``chunk``: split an axis into at most `chunks` parts of equal size; the last part may be smaller."""
    return shapes.split(x, max(1, -(-x.shape[x.normalise_axis(axis)] // chunks)), axis)


def flatten(x: Tensor, start: int = 0, end: int = -1) -> Tensor:
    a, b = x.normalise_axis(start), x.normalise_axis(end)
    return shapes.reshape(x, (*x.shape[:a], math.prod(x.shape[a : b + 1]), *x.shape[b + 1 :]))


def unflatten(x: Tensor, axis: int, sizes: Sequence[int]) -> Tensor:
    a = x.normalise_axis(axis)
    known = math.prod(n for n in sizes if n != -1)
    return shapes.reshape(x, (*x.shape[:a], *(x.shape[a] // known if n == -1 else n for n in sizes), *x.shape[a + 1 :]))


def roll(x: Tensor, shifts: int | Sequence[int], axes: int | Sequence[int] = ()) -> Tensor:
    over = [axes] if isinstance(axes, int) else list(axes)
    return shapes.roll(x, [shifts] if isinstance(shifts, int) else shifts, over)


def constant_pad(x: Tensor, pads: Sequence[int], value: float = 0) -> Tensor:
    return shapes.pad(x, as_pads_per_axis(x, pads), value)


def make_reflect_or_edge_pad_converter(mode: str) -> OpConverter:
    """Make the converter of a pad that repeats entries of the operand; `mode` is ``reflect`` or ``edge``."""
    return lambda x, pads: shapes.pad_with_own_entries(x, as_pads_per_axis(x, pads), mode)


def unfold(x: Tensor, axis: int, size: int, step: int) -> Tensor:
    """Convert ``unfold``: return windows of `size` entries along one axis, which begin `step` entries apart.

    The entries of a window become a new last axis.
    """
    at = x.normalise_axis(axis)
    starts = range(0, x.shape[at] - size + 1, step)
    return shapes.move_axis(shapes.stack([shapes.slice_range(x, at, s, s + size) for s in starts], at), at + 1, -1)


def diagonal(x: Tensor, offset: int = 0, first: int = 0, second: int = 1) -> Tensor:
    """Convert ``diagonal``: return a diagonal of the axes `first` and `second` as a new last axis.

    `offset` selects the diagonal; 0 is the main diagonal.
    """
    a, b = x.normalise_axis(first), x.normalise_axis(second)
    rows = np.arange(x.shape[a])
    rows = rows[(rows + offset >= 0) & (rows + offset < x.shape[b])]
    axes = [i for i in range(x.rank) if i not in (a, b)]
    front = shapes.permute(x, [*axes, a, b])
    flat = shapes.reshape(front, (*front.shape[:-2], x.shape[a] * x.shape[b]))
    return shapes.take_at_constant_indices(flat, -1, rows * x.shape[b] + rows + offset)


def select_scatter(x: Tensor, src: Tensor, axis: int, index: int) -> Tensor:
    i = index % x.shape[x.normalise_axis(axis)]
    return indexing.set_slice(x, shapes.unsqueeze(src, x.normalise_axis(axis)), axis, i, i + 1)


def slice_scatter(
    x: Tensor, src: Tensor, axis: int = 0, start: int | None = None, stop: int | None = None, step: int = 1
) -> Tensor:
    return indexing.set_slice(x, src, axis, start, stop, step)


# -------------------------------------------------------------------------------------------------------- reductions


def sum_(x: Tensor, axes: Any = None, keepdim: bool = False) -> Tensor:
    return reductions.sum_over(x, axes, keepdim)


def mean(x: Tensor, axes: Any = None, keepdim: bool = False) -> Tensor:
    return reductions.mean(x, axes, keepdim)


def variance_and_mean(
    x: Tensor,
    axes: Any = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Convert ``var_mean``: return the variance and the mean over axes.

    Its overloads are (unbiased), (axes, unbiased, keepdim), and (axes) with keywords.
    """
    if isinstance(axes, bool):
        axes, unbiased = None, axes
    by = float(unbiased) if correction is None else correction
    return reductions.variance(x, axes, by, keepdim), reductions.mean(x, axes, keepdim)


def variance_over(x: Tensor, *args: Any, **more: Any) -> Tensor:
    return variance_and_mean(x, *args, **more)[0]


def standard_deviation(x: Tensor, *args: Any, **more: Any) -> Tensor:
    return arith.apply_unary_op(ops.sqrt, variance_over(x, *args, **more))


def make_max_min_converter(kind: str) -> OpConverter:
    """Make the converter of ``max`` or ``min`` (`kind`).

    Its overloads reduce all entries, compare two tensors, or reduce an axis and also return the indices.
    """
    pair = arith.maximum if kind == "max" else arith.minimum

    def row(x: Tensor, other: Tensor | int | None = None, keepdim: bool = False) -> Any:
        if other is None:
            return reductions.reduce_max_min_or_prod(kind, x)
        if isinstance(other, Tensor):
            return pair(x, other)
        return reductions.max_or_min_with_index(kind, x, other, keepdim)

    return row


def make_reduction_converter_without_indices(kind: str) -> OpConverter:
    """Make the converter of a reduction over axes that returns no indices; `kind` is ``max``, ``min`` or ``prod``."""
    return lambda x, axes=None, keepdim=False: reductions.reduce_max_min_or_prod(kind, x, axes, keepdim)


def make_cumulative_converter(kind: str) -> OpConverter:
    """Make the converter of a cumulative reduction along an axis; `kind` is ``sum`` or ``prod``."""
    return lambda x, axis: reductions.accumulate_along_axis(kind, x, axis)


@with_scalar_tensor_support
def sort(x: Tensor, *args: Any, dim: int = -1, descending: bool = False, stable: bool = False) -> Any:
    """Convert ``sort``: return the sorted entries along an axis, and their indices.

    The overloads are (axis, descending) and (stable, axis, descending).
    """
    if args and isinstance(args[0], bool):
        args = args[1:]
    axis = args[0] if args else dim
    down = args[1] if len(args) > 1 else descending
    ids = reductions.argsort(x, axis, down)
    return indexing.gather(x, axis, ids), ids


def argsort(x: Tensor, *args: Any, **more: Any) -> Tensor:
    return sort(x, *args, **more)[1]


@with_scalar_tensor_support
def top_k(x: Tensor, k: int, axis: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    ids = reductions.argsort(x, axis, largest, k)
    return indexing.gather(x, axis, ids), ids


def norm(x: Tensor, power: float | None = 2, axes: Any = None, keepdim: bool = False) -> Tensor:
    """Convert ``norm``: return the vector norm over axes. A `power` of None means 2."""
    return reductions.vector_norm(x, 2 if power is None else power, axes, keepdim)


# ---------------------------------------------------------------------------------------------------------- products


def addmm(bias: Tensor, a: Tensor, b: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    return matmul.addmm(bias, a, b, beta=beta, alpha=alpha)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if dropout_p:
        raise ModelError("attention drops entries by chance, as in training; export the model after model.eval()")
    return matmul.attention(q, k, v, attn_mask, causal=is_causal, scale=scale)


def attention_with_logsumexp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, None]:
    """Convert attention that also returns a log-sum-exp; this result is None here, as only training needs it."""
    return attention(q, k, v, attn_mask, dropout_p, is_causal, scale), None


def softmax(x: Tensor, axis: int, *_: object) -> Tensor:
    return matmul.softmax(x, axis)


def masked_softmax(x: Tensor, axis: int, *_: object) -> Tensor:
    return matmul.masked_softmax(x, axis)


def log_softmax(x: Tensor, axis: int, *_: object) -> Tensor:
    return matmul.log_softmax(x, axis)


def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: object
) -> Any:
    return matmul.layer_norm(x, len(shape), weight, bias, eps)


def native_layer_norm(x: Tensor, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Any:
    return matmul.layer_norm(x, len(shape), weight, bias, eps), None, None


def rms_norm(x: Tensor, shape: Sequence[int], weight: Any = None, eps: float | None = None) -> Tensor:
    return matmul.rms_norm(x, len(shape), weight, float(np.finfo(np.float32).eps) if eps is None else eps)


def group_norm(x: Tensor, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: object) -> Tensor:
    return matmul.group_norm(x, groups, weight, bias, eps)


def native_group_norm(x: Tensor, weight: Any, bias: Any, n: int, c: int, rest: int, groups: int, eps: float) -> Any:
    return matmul.group_norm(x, groups, weight, bias, eps), None, None


def native_batch_norm(
    x: Tensor, weight: Any, bias: Any, mean: Tensor, variance: Tensor, momentum: float, eps: float
) -> Any:
    return matmul.batch_norm(x, weight, bias, mean, variance, eps), None, None


def batch_norm(
    x: Tensor, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float, eps: float, *_: object
) -> Tensor:
    if training or mean is None:
        raise ModelError("batch norm over the batch itself, as in training; export the model after model.eval()")
    return matmul.batch_norm(x, weight, bias, mean, variance, eps)


# ----------------------------------------------------------------------------------------------------------- indices


def embedding(weight: Tensor, ids: Tensor, *_: object) -> Tensor:
    return indexing.embedding(weight, ids)


@with_scalar_tensor_support
def index_select(x: Tensor, axis: int, ids: Tensor) -> Tensor:
    return indexing.index_select(x, axis, ids)


def gather(x: Tensor, axis: int, ids: Tensor, sparse_grad: bool = False) -> Tensor:
    return indexing.gather(x, axis, ids)


_SCATTER_KINDS = MappingProxyType(
    {"add": "add", "multiply": "mul", "sum": "add", "prod": "mul", "amax": "max", "amin": "min"}
)
"""Values of `reduce` in `frontends.tensors.indexing.scatter`, by ATen reduction name."""


@with_scalar_tensor_support
def scatter(x: Tensor, axis: int, ids: Tensor, src: Operand, reduce: str | None = None) -> Tensor:
    return indexing.scatter(x, axis, ids, src, _SCATTER_KINDS[reduce] if reduce else "set")


@with_scalar_tensor_support
def scatter_add(x: Tensor, axis: int, ids: Tensor, src: Tensor) -> Tensor:
    return indexing.scatter(x, axis, ids, src, "add")


@with_scalar_tensor_support
def scatter_reduce(x: Tensor, axis: int, ids: Tensor, src: Tensor, reduce: str, include_self: bool = True) -> Tensor:
    if not include_self or reduce not in _SCATTER_KINDS:
        raise ModelError(
            f"scatter_reduce by {reduce!r} with include_self={include_self}; hocket has sum, prod, amax, amin of all"
        )
    return indexing.scatter(x, axis, ids, src, _SCATTER_KINDS[reduce])


@with_scalar_tensor_support
def index_add(x: Tensor, axis: int, ids: Tensor, src: Tensor, alpha: float = 1) -> Tensor:
    """Convert ``index_add``: add the slices of `src`, times `alpha`, to the slices of `x` at `ids`."""
    front = shapes.move_axis(x, axis, 0)
    put = indexing.index_put(
        front, [ids], shapes.move_axis(arith.mul(src, alpha) if alpha != 1 else src, axis, 0), True
    )
    return shapes.move_axis(put, 0, axis)


@with_scalar_tensor_support
def index_copy(x: Tensor, axis: int, ids: Tensor, src: Tensor) -> Tensor:
    """Convert ``index_copy``: replace the slices of `x` at `ids` by the slices of `src`."""
    front = shapes.move_axis(x, axis, 0)
    return shapes.move_axis(indexing.index_put(front, [ids], shapes.move_axis(src, axis, 0)), 0, axis)


def index_put(x: Tensor, indices: Sequence[Any], values: Tensor, accumulate: bool = False, *_: object) -> Tensor:
    return indexing.index_put(x, indices, values, accumulate)


def broadcast_copy_source(x: Tensor, src: Tensor, *_: object) -> Tensor:
    """Convert ``copy``: return the source `src`, broadcast to the shape of the destination `x`."""
    return shapes.expand(src, x.shape)


def dropout(x: Tensor, p: float, train: bool = False) -> Tensor:
    if train and p:
        raise ModelError("dropout by chance, as in training; export the model after model.eval()")
    return x


def native_dropout(x: Tensor, p: float, train: bool = False) -> tuple[Tensor, None]:
    return dropout(x, p, train), None
