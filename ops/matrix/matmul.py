"""The matrix product."""

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
