"""Reductions over any axes, cumulative reductions and sorting.

Without `axes` a function reduces all axes. With `keepdim` a reduced axis keeps size 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isinf, prod

from ... import ops
from ...graph import DType, Value
from .arithmetic import (
    add,
    apply_unary_op,
    as_bool,
    as_float,
    compare,
    div,
    is_infinite,
    logical_not,
    negative,
    sub,
    where,
)
from .arithmetic import power as raise_to
from .shapes import flip, move_axis, permute, reshape, slice_range
from .tensor import Tensor, as_tensor, cast


def _list_axes(x: Tensor, axes: int | Sequence[int] | None) -> list[int]:
    if axes is None or (not isinstance(axes, int) and not axes):
        return list(range(x.rank))
    return sorted({x.normalise_axis(a) for a in ([axes] if isinstance(axes, int) else axes)} if x.rank else set())


def merge_axes_into_last(x: Tensor, axes: Sequence[int]) -> Value:
    """Return the graph value of `x` with the given axes merged into one last axis: [other axes ..., merged entries]."""
    other_axes = [a for a in range(x.rank) if a not in axes]
    ordered = permute(x, [*other_axes, *axes])
    ahead = [x.shape[a] for a in other_axes]
    last = prod(x.shape[a] for a in axes)
    return reshape(ordered, (*ahead, last) if len(ahead) < 5 else (prod(ahead), last)).value


def _reshape_reduced_rows(value: Value, x: Tensor, axes: Sequence[int], keepdim: bool, is_bool: bool = False) -> Tensor:
    """Reshape the reduced rows of a tensor to the shape that a reduction of `x` over `axes` returns.

    Args:
        value: The reduced rows: the graph value of `merge_axes_into_last` after a reduction of its last axis.
        x: The tensor that is reduced.
        axes: The reduced axes.
        keepdim: Whether reduced axes stay, with size 1.
        is_bool: Whether the result is boolean.
    """
    shape = [1 if a in axes else n for a, n in enumerate(x.shape) if keepdim or a not in axes]
    return reshape(as_tensor(value, None, is_bool), shape)


def sum_over(x: Tensor, axes: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """Return the sums over axes; integers and booleans are summed in i64."""
    over = _list_axes(x, axes)
    if x.is_integer or x.is_bool:
        x = cast(x, DType.I64)
        return _reshape_reduced_rows(ops.reduce(merge_axes_into_last(x, over), kind="sum"), x, over, keepdim)
    return _reshape_reduced_rows(ops.sum_rows(merge_axes_into_last(x, over)), x, over, keepdim)


def mean(x: Tensor, axes: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """Return the means over axes in floats; the mean of no entries is NaN."""
    over = _list_axes(x, axes)
    rows = merge_axes_into_last(as_float(x), over)
    means = _reshape_reduced_rows(ops.mean(rows), x, over, keepdim)
    return means if rows.shape[-1] else div(means, 0.0)


def variance(
    x: Tensor, axes: int | Sequence[int] | None = None, correction: float = 1, keepdim: bool = False
) -> Tensor:
    """Return the variance over axes: the sum of squared differences from the mean, divided by ``count - correction``.

    If this divisor is 0 or less, the result is inf, or NaN for equal entries. The variance of no entries is NaN.
    """
    over = _list_axes(x, axes)
    count = prod(x.shape[a] for a in over)
    squared = apply_unary_op(ops.sqr, sub(x, mean(x, over, keepdim=True)))
    return div(sum_over(squared, over, keepdim), max(0.0, count - correction) if count else 0.0)


def reduce_max_min_or_prod(
    kind: str, x: Tensor, axes: int | Sequence[int] | None = None, keepdim: bool = False
) -> Tensor:
    """Return the maximum, minimum or product over axes; `kind` is ``max``, ``min`` or ``prod``."""
    over = _list_axes(x, axes)
    if kind == "prod" and x.is_bool:
        x = cast(x, DType.I64)
    return _reshape_reduced_rows(ops.reduce(merge_axes_into_last(x, over), kind=kind), x, over, keepdim, x.is_bool)


def any_of(x: Tensor, axes: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """Return whether any entry over the given axes is non-zero, as booleans."""
    return reduce_max_min_or_prod("max", as_bool(x), axes, keepdim)


def all_of(x: Tensor, axes: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """Return whether all entries over the given axes are non-zero, as booleans."""
    return logical_not(any_of(logical_not(x), axes, keepdim))


def argmax(x: Tensor, axis: int | None = None, keepdim: bool = False) -> Tensor:
    """Return the index of the first largest entry along an axis, or of the flattened tensor, in i64."""
    over = _list_axes(x, axis)
    if x.is_integer:  # exact for large integers, unlike f32
        x = compare("eq", x, reduce_max_min_or_prod("max", x, over, keepdim=True))
    value = ops.argmax(merge_axes_into_last(x, over))
    return cast(_reshape_reduced_rows(value, x, over, keepdim), DType.I64)


def argmin(x: Tensor, axis: int | None = None, keepdim: bool = False) -> Tensor:
    """Return the index of the first smallest entry along an axis, or of the flattened tensor, in i64."""
    return argmax(logical_not(x) if x.is_bool else negative(x), axis, keepdim)


def max_or_min_with_index(kind: str, x: Tensor, axis: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Return the largest entries along an axis and their indices in i64; the smallest ones if `kind` is ``min``."""
    return reduce_max_min_or_prod(kind, x, axis, keepdim), (argmax if kind == "max" else argmin)(x, axis, keepdim)


def accumulate_along_axis(kind: str, x: Tensor, axis: int) -> Tensor:
    """Return the running ``sum``, ``prod``, ``max`` or ``min`` along an axis; `kind` is one of these words."""
    if x.is_bool:
        x = cast(x, DType.I64)
    if not x.rank:
        return x
    last = move_axis(x, axis, -1)
    rows = last if not last.exceeds_max_rank else reshape(last, (-1, last.shape[-1]))
    value = ops.cumsum(rows.value) if kind == "sum" and not x.is_integer else ops.accumulate(rows.value, kind=kind)
    return move_axis(reshape(as_tensor(value), last.shape), -1, axis)


def argsort(x: Tensor, axis: int = -1, descending: bool = False, count: int | None = None) -> Tensor:
    """Return the indices that sort `x` along an axis, in i64; equal entries keep their order.

    NaN is larger than all numbers, as in PyTorch and NumPy, but the op has it last in both orders. So a descending
    order is the reverse of an ascending order. Entries are reversed first, which keeps the order of equal ones.
    `count` is the number of indices that are needed, from the first one on; None stands for all.
    """
    last = move_axis(as_float(x), axis, -1)
    rows = last if not last.exceeds_max_rank else reshape(last, (-1, last.shape[-1]))
    n = last.shape[-1]
    needed = n if count is None else count
    may_have_nan = not (x.is_integer or x.is_bool)
    if descending and may_have_nan:
        from_end = slice_range(as_tensor(ops.argsort(flip(rows, [-1]).value)), -1, n - needed, n)
        ids = sub(n - 1, flip(cast(from_end, DType.I64), [-1]))
    else:
        ids = slice_range(as_tensor(ops.argsort(rows.value, descending=bool(descending))), -1, 0, needed)
    whole = reshape(ids, (*last.shape[:-1], needed))
    return replace(cast(move_axis(whole, -1, axis), DType.I64), is_non_negative=True)


def log_sum_exp(x: Tensor, axes: int | Sequence[int], keepdim: bool = False) -> Tensor:
    """Return ``log(sum(exp(x)))`` over axes without overflow. It is -inf if all entries are -inf."""
    over = _list_axes(x, axes)
    top = reduce_max_min_or_prod("max", x, over, keepdim=True)
    top = where(is_infinite(top), 0.0, top)
    whole = add(apply_unary_op(ops.log, sum_over(apply_unary_op(ops.exp, sub(x, top)), over, keepdim=True)), top)
    return whole if keepdim else reshape(whole, [n for a, n in enumerate(x.shape) if a not in over])


def vector_norm(x: Tensor, power: float = 2, axes: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """Return the vector norm ``sum(|x| ** power) ** (1 / power)`` over axes, or its limit for power 0, inf and -inf."""
    if power == 2:
        return apply_unary_op(ops.sqrt, sum_over(apply_unary_op(ops.sqr, x), axes, keepdim))
    if power == 0:
        return sum_over(cast(compare("ne", x, 0.0), DType.F32), axes, keepdim)
    size = apply_unary_op(ops.abs_, x)
    if isinf(power):
        return reduce_max_min_or_prod("max" if power > 0 else "min", size, axes, keepdim)
    if power == 1:
        return sum_over(size, axes, keepdim)
    return raise_to(sum_over(raise_to(size, power), axes, keepdim), 1 / power)
