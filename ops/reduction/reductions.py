"""Reductions and running reductions of rows (the last axis): sum, mean, count, argmax, cumsum."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from ..declaration import scalar
from ..declaration.op import Array, op
from ..declaration.samples import LegalRange, expand_template
from ..declaration.scalar import Scalar

_ROWS = expand_template("x={x}[{shape}]", x=("f32", "f16"), shape=("7", "3,64", "5,1", "2,3,33", "0,4", "2,0"))
_ERRORS = (("x=f32[]", "needs at least 1"), ("x=i32[3]", "x is i32"))


@op(
    "x[..., +n] -> [..., 1]: f32",
    linear=("x",),
    flops=lambda n, **_: n,
    samples=_ROWS,
    errors=_ERRORS,
    signed_zeros=False,
)
def sum_rows(x: Scalar) -> Scalar:
    """Sum each row; the row becomes an axis of size 1. ggml: ``SUM_ROWS``."""
    return scalar.row_sum(x)


@op(
    "x[..., +n] -> [..., 1]: f32",
    linear=("x",),
    unsharded_dimensions=lambda attrs: ("n",),
    flops=lambda n, **_: n + 1,
    samples=_ROWS,
    errors=_ERRORS,
    is_required=False,
    signed_zeros=False,
)
def mean(x: Scalar) -> Scalar:
    """Compute the mean of each row; the row becomes an axis of size 1. An empty row gives 0. ggml: ``MEAN``."""
    return scalar.row_sum(x) / scalar.row_count()


@op(
    "x[+...] -> []: f32",
    linear=("x",),
    flops=lambda **_: 1,
    samples=("x=f32[7]", "x=f32[3,5,4]", "x=f16[2,3,2,5]", "x=f32[]", "x=f32[3,0]", "x=bf16[1]"),
    errors=(("x=i32[3]", "x is i32"), ("x=f32[3], axis=0", "no operand or attribute axis")),
    is_required=False,
    signed_zeros=False,
)
def sum_(x: Array) -> Array:
    """Sum all entries to a scalar. ggml: ``SUM``."""
    return np.asarray(np.sum(x))


@op(
    "x[..., *n] -> [...]: i32",
    flops=lambda n, **_: n,
    check=lambda n, **_: "rows of x are empty, so that none of their entries is the largest" if n == 0 else None,
    samples=expand_template("x={x}[{shape}]", x=("f32", "f16"), shape=("7", "3,64", "5,1", "2,3,33", "0,4")),
    errors=(*_ERRORS, ("x=f32[3,0]", "rows of x are empty")),
    is_required=False,
    infinite=("x",),
)
def argmax(x: Array) -> Array:
    """Return the index of the largest entry of each row; of equal entries, the first index. ggml: ``ARGMAX``.

    The CPU backend of ggml returns the last index of equal entries; its tests have no equal entries.
    """
    return np.argmax(x, axis=-1)


@op(
    "a[+...]: i32, b[+...]: i32 -> []: i64",
    flops=lambda **_: 1,
    ranges={"a": LegalRange(0, 3), "b": LegalRange(0, 3)},
    samples=("a=i32[7], b=i32[7]", "a=i32[3,5,4], b=i32[3,5,4]", "a=i32[0], b=i32[0]", "a=i32[], b=i32[]"),
    errors=(
        ("a=i32[3], b=i32[4]", "leading axes are [3]"),
        ("a=i32[3], b=f32[3]", "b is f32"),
        ("a=i32[1], b=i32[4]", "leading axes are [1]"),
    ),
    is_required=False,
)
def count_equal(a: Array, b: Array) -> Array:
    """Count the indices at which `a` and `b` have equal entries, as a scalar. ggml: ``COUNT_EQUAL``."""
    return np.asarray(np.sum(a == b, dtype=np.int64))


@op(
    "x[..., *n] -> [..., n]",
    linear=("x",),
    inplace="x",
    samples=_ROWS,
    errors=_ERRORS,
    sequential="n",
    signed_zeros=False,
)
def cumsum(x: Array) -> Array:
    """Compute running sums along the last axis: entry i is the sum of entries 0 to i. ggml: ``CUMSUM``."""
    return np.cumsum(x, axis=-1)


REDUCTIONS: Mapping[str, np.ufunc] = MappingProxyType(
    {"max": np.maximum, "min": np.minimum, "sum": np.add, "prod": np.multiply}
)
"""The NumPy function of each kind of running reduction."""


ROW_REDUCTIONS: Mapping[str, Callable[[Scalar], Scalar]] = MappingProxyType(
    {"max": scalar.row_max, "min": scalar.row_min, "sum": scalar.row_sum, "prod": scalar.row_product}
)
"""The expression of each kind of reduction."""


def _check_reduction(kind: str, n: int, **_: object) -> str | None:
    if kind not in REDUCTIONS:
        return f"kind is {kind!r}; one of {', '.join(REDUCTIONS)}"
    return f"rows of x are empty, so that they have no {kind}" if n == 0 and kind in ("max", "min") else None


_REDUCE_SAMPLES = (
    *expand_template(
        'x={x}[{shape}], kind="{kind}"', x=("f32", "i32"), shape=("7", "2,3,9", "0,4"), kind=tuple(REDUCTIONS)
    ),
    *expand_template('x={x}[5,1], kind="{kind}"', x=("f16", "i64"), kind=("max", "prod")),
)
_REDUCE_ERRORS = (
    ('x=f32[3], kind="mean"', "one of max"),
    ('x=f32[], kind="max"', "needs at least 1"),
    ('x=f32[3,0], kind="max"', "rows of x are empty"),
)
_SMALL = {"x": LegalRange(-2.0, 2.0)}


@op(
    "x[..., *n]: number -> [..., 1]",
    check=_check_reduction,
    flops=lambda n, **_: n,
    samples=_REDUCE_SAMPLES,
    errors=_REDUCE_ERRORS,
    ranges=_SMALL,
    is_required=False,
    signed_zeros=False,
)
def reduce(x: Scalar, *, kind: str) -> Scalar:
    """Reduce each row to its max, min, sum or prod (chosen by `kind`), as an axis of size 1, in the dtype of `x`.

    To sum floats, `sum_rows` permits the planner to shard the rows into partial sums; this op does not. NumPy (Harris
    et al., 2020).
    """
    return ROW_REDUCTIONS[kind](x)


@op(
    "x[..., *n]: number -> [..., n]",
    check=lambda kind, **_: _check_reduction(kind, 1),
    inplace="x",
    samples=_REDUCE_SAMPLES,
    errors=_REDUCE_ERRORS[:2],
    ranges=_SMALL,
    is_required=False,
    signed_zeros=False,
)
def accumulate(x: Array, *, kind: str) -> Array:
    """Compute the running max, min, sum or prod (`kind`) of each row, in the dtype of `x`.

    NumPy (Harris et al., 2020).
    """
    return np.asarray(REDUCTIONS[kind].accumulate(x, axis=-1))
