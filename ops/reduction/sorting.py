"""Sorting of rows (the last axis); the results are indices."""

from __future__ import annotations

import numpy as np

from ..declaration.op import Array, op
from ..declaration.samples import expand_template


def _count_comparisons(n: int, **_: object) -> int:
    return n * n.bit_length()


@op(
    "x[..., *n] -> [..., n]: i32",
    flops=_count_comparisons,
    samples=(
        *expand_template(
            "x={x}[{shape}], descending={d}", x=("f32",), shape=("7", "3,60", "5,1", "0,4", "2,0"), d=("false", "true")
        ),
        "x=bf16[2,3,33]",
        "x=f16[2,64], descending=true",
    ),
    errors=(("x=f32[]", "needs at least 1"), ("x=i32[3]", "x is i32"), ("x=f32[3], descending=1", "true or false")),
    infinite=("x",),
)
def argsort(x: Array, *, descending: bool = False) -> Array:
    """Return the indices that sort each row. Equal entries keep their order. ggml: ``ARGSORT``, which is unstable."""
    return np.argsort(-x if descending else x, axis=-1, kind="stable")


@op(
    "x[..., *n] -> [..., k]: i32",
    flops=_count_comparisons,
    check=lambda n, k, **_: f"k is {k}; it must be from 0 to {n}, the length of a row" if not 0 <= k <= n else None,
    samples=(
        *expand_template("x=f32[{shape}], k={k}", shape=("9", "3,60", "2,1,8"), k=(1, 4, 8)),
        *("x=f16[2,33], k=5", "x=f32[3,5], k=5", "x=f32[3,1], k=1", "x=f32[0,4], k=2", "x=f32[3,4], k=0"),
    ),
    compare="set",
    errors=(("x=f32[3,4], k=5", "from 0 to 4"), ("x=f32[4], k=-1", "k is -1"), ("x=f32[4]", "k is missing")),
    infinite=("x",),
    is_required=False,
)
def top_k(x: Array, *, k: int) -> Array:
    """Return the indices of the `k` largest entries of each row. The largest comes first. ggml: ``TOP_K``.

    Equal entries keep their order. In ggml the order is undefined, and its CPU backend swaps the first two indices. A
    backend may return any order; tests compare sets.
    """
    return np.argsort(-x, axis=-1, kind="stable")[..., :k]
