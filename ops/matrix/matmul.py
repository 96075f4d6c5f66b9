"""The matrix product, and the product that sums over rows."""

from __future__ import annotations

import numpy as np

from ...graph.dtypes import FLOAT_DTYPES, QUANTISED_DTYPES
from ..declaration.broadcasting import repeat_leading_axis_entries
from ..declaration.op import Array, op
from ..declaration.samples import expand_template


@op(
    "w[/..., n, +k]: weight, x[..., m, +k] -> [..., m, n]: f32",
    linear=lambda attrs: () if attrs.get("ordered") else ("w", "x"),
    unsharded_dimensions=lambda attrs: ("k",) if attrs.get("ordered") else (),
    flops=lambda m, n, k, **_: 2 * m * n * k,
    samples=(
        *expand_template("w={w}[64,256], x=f32[{m},256]", w=tuple(map(str, FLOAT_DTYPES)), m=(1, 7)),
        *expand_template("w={w}[6,256], x=f32[3,256]", w=tuple(map(str, QUANTISED_DTYPES))),
        "w=f32[5,7], x=f32[0,7]",
        "w=f32[2,5,8], x=f32[4,3,8]",
        "w=f32[1,2,5,8], x=f32[3,2,3,8]",
        "w=f16[5,8], x=f16[3,8]",
        "w=f32[8,8], x=f32[3,8], ordered=true",
    ),
    errors=(
        ("w=f32[8,15], x=f32[3,16]", "k is 15 in w"),
        ("w=f32[3,8,16], x=f32[4,3,16]", "do not divide"),
        ("w=f32[16], x=f32[3,16]", "rank 1"),
        ("w=f32[8,16], x=q8_0[3,32]", "x is q8_0"),
    ),
    signed_zeros=False,
    nan_for_infinity=("w",),
)
def mul_mat(w: Array, x: Array, *, ordered: bool = False, exact: bool = True) -> Array:
    """Multiply the rows of `x` by the transposed weight: ``x @ w.T``. ggml: ``MUL_MAT``.

    Leading axes of `w` divide the leading axes of `x`: one weight serves neighbouring entries. With `ordered`, the
    planner does not shard the summed axis, so the last bit of a sum does not depend on the number of devices. Without
    `exact`, a backend may round `x` to the dtype of 16-bit weights.
    """
    return x @ np.swapaxes(repeat_leading_axis_entries(w, x.shape[:-2], 2), -1, -2)


@op(
    "a[/..., +k, m]: weight, b[..., +k, n] -> [..., n, m]: f32",
    linear=("a", "b"),
    is_required=False,
    flops=lambda m, n, k, **_: 2 * m * n * k,
    samples=(
        *expand_template("a={a}[5,7], b=f32[5,{n}]", a=("f32", "f16", "bf16"), n=(1, 3, 70)),
        *expand_template("a={a}[3,256], b=f32[3,4]", a=tuple(map(str, QUANTISED_DTYPES))),
        "a=f32[0,7], b=f32[0,3]",
        "a=f32[2,5,8], b=f16[4,5,3]",
        "a=f32[1,2,5,8], b=f32[3,2,5,3]",
    ),
    errors=(
        ("a=f32[15,8], b=f32[16,3]", "k is 15 in a"),
        ("a=f32[3,8,16], b=f32[4,8,3]", "do not divide"),
        ("a=f32[8,16], b=q8_0[8,32]", "b is q8_0"),
    ),
    signed_zeros=False,
    nan_for_infinity=("a",),
)
def out_prod(a: Array, b: Array) -> Array:
    """Sum the outer products of the rows of `b` and of `a`: ``b.T @ a``. ggml: ``OUT_PROD``.

    Leading axes of `a` divide the leading axes of `b`, as the weights of `mul_mat` do.
    """
    return np.swapaxes(b, -1, -2) @ repeat_leading_axis_entries(a, b.shape[:-2], 2)
