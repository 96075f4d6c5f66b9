"""Reductions over any axes, running sums, orders."""

from __future__ import annotations

from collections.abc import Sequence
from math import isinf, prod

from ... import ops
from ...graph import DType, Value
from .arithmetic import add, compare, div, is_infinite, logical_not, negative, real, sub, truth, unary, where
from .arithmetic import power as raise_to
from .shapes import moved, permute, reshape
from .tensor import Tensor, cast, tensor


def _axes(x: Tensor, axes: int | Sequence[int] | None) -> list[int]:
    if axes is None or (not isinstance(axes, int) and not axes):
        return list(range(x.rank))
    return sorted({x.axis(a) for a in ([axes] if isinstance(axes, int) else axes)} if x.rank else set())


def rows_over(x: Tensor, axes: Sequence[int]) -> Value:
    """`x` with those axes as one, the last: [kept axes ..., entries]."""
    kept = [a for a in range(x.rank) if a not in axes]
    ordered = permute(x, [*kept, *axes])
    ahead = [x.shape[a] for a in kept]
    last = prod(x.shape[a] for a in axes)
    return reshape(ordered, (*ahead, last) if len(ahead) < 5 else (prod(ahead), last)).value


def _restored(value: Value, x: Tensor, axes: Sequence[int], keepdim: bool, truth_value: bool = False) -> Tensor:
    """The reduced rows under the shape that a reduction of `x` has."""
    shape = [1 if a in axes else n for a, n in enumerate(x.shape) if keepdim or a not in axes]
    return reshape(tensor(value, None, truth_value), shape)


def total(x: Tensor, axes: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """Sums; of integers and truth values in i64."""
    over = _axes(x, axes)
    if x.is_integer or x.truth:
        x = cast(x, DType.I64)
        return _restored(ops.reduce(rows_over(x, over), kind="sum"), x, over, keepdim)
    return _restored(ops.sum_rows(rows_over(x, over)), x, over, keepdim)


def mean(x: Tensor, axes: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """Means, in f32; the mean of no entries is NaN."""
    over = _axes(x, axes)
    rows = rows_over(real(x), over)
    means = _restored(ops.mean(rows), x, over, keepdim)
    return means if rows.shape[-1] else div(means, 0.0)


def variance(
    x: Tensor, axes: int | Sequence[int] | None = None, correction: float = 1, keepdim: bool = False
) -> Tensor:
    """The sum of squared differences from the mean, over the degrees of freedom: their number less `correction`.

    Without degrees of freedom it is inf, or NaN if all entries are equal; the variance of no entries is NaN.
    """
    over = _axes(x, axes)
    count = prod(x.shape[a] for a in over)
    squared = unary(ops.sqr, sub(x, mean(x, over, keepdim=True)))
    return div(total(squared, over, keepdim), max(0.0, count - correction) if count else 0.0)


def extreme(kind: str, x: Tensor, axes: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """The ``max``, ``min`` or ``prod`` of entries."""
    over = _axes(x, axes)
    if kind == "prod" and x.truth:
        x = cast(x, DType.I64)
    return _restored(ops.reduce(rows_over(x, over), kind=kind), x, over, keepdim, x.truth)


def any_of(x: Tensor, axes: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """Whether some entry is not 0."""
    return extreme("max", truth(x), axes, keepdim)


def all_of(x: Tensor, axes: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """Whether no entry is 0."""
    return logical_not(any_of(logical_not(x), axes, keepdim))


def argmax(x: Tensor, axis: int | None = None, keepdim: bool = False) -> Tensor:
    """Where the largest entry is, the first of equal ones, in i64."""
    over = _axes(x, axis)
    if x.is_integer:  # exact, where floats would not be
        x = compare("eq", x, extreme("max", x, over, keepdim=True))
    value = ops.argmax(rows_over(x, over))
    return cast(_restored(value, x, over, keepdim), DType.I64)


def argmin(x: Tensor, axis: int | None = None, keepdim: bool = False) -> Tensor:
    """Where the smallest entry is, the first of equal ones, in i64."""
    return argmax(logical_not(x) if x.truth else negative(x), axis, keepdim)


def extreme_and_place(kind: str, x: Tensor, axis: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The ``max`` or ``min`` along an axis, and where it is."""
    return extreme(kind, x, axis, keepdim), (argmax if kind == "max" else argmin)(x, axis, keepdim)


def running(kind: str, x: Tensor, axis: int) -> Tensor:
    """The ``sum``, ``prod``, ``max`` or ``min`` up to each entry of an axis."""
    if x.truth:
        x = cast(x, DType.I64)
    if not x.rank:
        return x
    last = moved(x, axis, -1)
    rows = last if not last.is_wide else reshape(last, (-1, last.shape[-1]))
    value = ops.cumsum(rows.value) if kind == "sum" and not x.is_integer else ops.accumulate(rows.value, kind=kind)
    return moved(reshape(tensor(value), last.shape), -1, axis)


def order(x: Tensor, axis: int = -1, descending: bool = False) -> Tensor:
    """Numbers of the entries of an axis as they are sorted, in i64; equal entries keep their order."""
    last = moved(real(x), axis, -1)
    rows = last if not last.is_wide else reshape(last, (-1, last.shape[-1]))
    ids = tensor(ops.argsort(rows.value, descending=bool(descending)))
    return cast(moved(reshape(ids, last.shape), -1, axis), DType.I64)


def log_sum_exp(x: Tensor, axes: int | Sequence[int], keepdim: bool = False) -> Tensor:
    """``log(sum(exp(x)))`` without overflow; of entries that are all -inf it is -inf."""
    over = _axes(x, axes)
    top = extreme("max", x, over, keepdim=True)
    top = where(is_infinite(top), 0.0, top)
    whole = add(unary(ops.log, total(unary(ops.exp, sub(x, top)), over, keepdim=True)), top)
    return whole if keepdim else reshape(whole, [n for a, n in enumerate(x.shape) if a not in over])


def norm_of(x: Tensor, power: float = 2, axes: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """The vector norm of entries: ``sum(|x| ** power) ** (1 / power)``, or its limit for 0, inf and -inf."""
    if power == 2:
        return unary(ops.sqrt, total(unary(ops.sqr, x), axes, keepdim))
    if power == 0:
        return total(cast(compare("ne", x, 0.0), DType.F32), axes, keepdim)
    size = unary(ops.abs_, x)
    if isinf(power):
        return extreme("max" if power > 0 else "min", size, axes, keepdim)
    if power == 1:
        return total(size, axes, keepdim)
    return raise_to(total(raise_to(size, power), axes, keepdim), 1 / power)
