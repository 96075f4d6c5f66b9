"""Routed experts: products with, and biases of, the experts that a router chose for each token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..graph.dtypes import FLOATS, QUANTISED
from ..graph.spec import Spec
from .op import Array, op
from .samples import Range, grid
from .states import legal_rows


def _used(table: Spec, ids: Spec) -> int:
    """Bytes of the entries of `table` that `ids` can name: at most as many as there are ids."""
    return min(table.shape[0], ids.size) * Spec(table.shape[1:], table.dtype).nbytes


def _product_traffic(sources: Sequence[Spec | None], results: Sequence[Spec]) -> int:
    w, x, ids = sources
    assert w is not None
    assert x is not None
    assert ids is not None
    return _used(w, ids) + x.nbytes + ids.nbytes + results[0].nbytes


@op(
    "w[*experts, n, +k]: weight, x[..., v, +k], ids[..., (r v)]: i32 -> [..., (r v), n]: f32",
    linear=("w", "x"),
    flops=lambda r, v, n, k, **_: 2 * r * v * n * k,
    traffic=_product_traffic,
    ranges={"ids": Range(0, "experts")},
    samples=(
        *grid("w={w}[5,6,256], x=f32[{t},1,256], ids=i32[{t},2]", w=tuple(map(str, FLOATS)), t=(1, 7)),
        *grid("w={w}[3,4,256], x=f32[2,2,256], ids=i32[2,2]", w=tuple(map(str, QUANTISED))),
        *grid("w=f32[7,5,13], x=f32[{t},{v},13], ids=i32[{t},6]", t=(0, 1, 11), v=(1, 2, 3, 6)),
        "w=f32[1,3,8], x=f32[4,1,8], ids=i32[4,1]",
        "w=f32[4,3,8], x=f16[2,3,1,8], ids=i32[2,3,2]",
        "w=f32[4,3,8], x=f32[1,8], ids=i32[3]",
    ),
    errors=(
        ("w=f32[4,3,8], x=f32[5,2,8], ids=i32[5,3]", "no product"),
        ("w=f32[4,3,8], x=f32[5,1,9], ids=i32[5,2]", "k is 8"),
        ("w=f32[4,3,8], x=f32[5,1,8], ids=i32[6,2]", "leading axes"),
        ("w=f32[4,3,8], x=f32[5,1,8], ids=f32[5,2]", "ids is f32"),
    ),
)
def mul_mat_id(w: Array, x: Array, ids: Array) -> Array:
    """Rows of `x` times the transposed weights of chosen experts: ``out[t, i] = w[ids[t, i]] @ x[t, i mod v]``.

    Only experts that are chosen are read; an id that is none is an error of the run.  ggml: ``MUL_MAT_ID``; Shazeer et
    al., 2017.
    """
    chosen = legal_rows(ids, len(w), "ids of experts")
    rows = np.tile(x, (ids.shape[-1] // x.shape[-2] if x.shape[-2] else 1, 1))
    out = np.zeros((*ids.shape, w.shape[1]))
    for expert in np.unique(chosen):
        mine = chosen == expert
        out[mine] = rows[mine] @ w[expert].T
    return out


def _bias_traffic(sources: Sequence[Spec | None], results: Sequence[Spec]) -> int:
    a, b, ids = sources
    assert a is not None
    assert b is not None
    assert ids is not None
    return a.nbytes + _used(b, ids) + ids.nbytes + results[0].nbytes


@op(
    "a[..., u, n], b[*experts, n], ids[..., u]: i32 -> [..., u, n]",
    linear=("a+b",),
    inplace="a",
    traffic=_bias_traffic,
    ranges={"ids": Range(0, "experts")},
    samples=(
        *grid("a=f32[{t},{u},12], b=f32[5,12], ids=i32[{t},{u}]", t=(0, 1, 7), u=(1, 3)),
        "a=f32[2,3,2,7], b=f32[1,7], ids=i32[2,3,2]",
        "a=f16[3,2,8], b=bf16[4,8], ids=i32[3,2]",
    ),
    errors=(
        ("a=f32[3,2,8], b=f32[4,9], ids=i32[3,2]", "n is 8"),
        ("a=f32[3,2,8], b=f32[4,8], ids=i32[3,3]", "u is 2"),
        ("a=f32[3,2,8], b=f32[4,8], ids=i64[3,2]", "ids is i64"),
    ),
)
def add_id(a: Array, b: Array, ids: Array) -> Array:
    """`a` plus the rows of `b` that belong to chosen experts: ``a[t, i] + b[ids[t, i]]``.  ggml: ``ADD_ID``."""
    return a + b[legal_rows(ids, len(b), "ids of experts")]
