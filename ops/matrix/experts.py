"""Mixture of experts: products with the weights of the experts that a router chose for each token, and their biases."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...graph.attrs import Attrs
from ...graph.dtypes import FLOAT_DTYPES, QUANTISED_DTYPES
from ...graph.spec import Spec
from ..declaration.op import Array, op
from ..declaration.samples import LegalRange, expand_template
from ..movement.sharded_tables import check_shard_row_range, estimate_busiest_device_entries, to_local_rows


def _estimate_selected_entry_bytes(table: Spec, ids: Spec, attrs: Attrs) -> int:
    """Return the expected bytes of the entries of `table` that `ids` select; each id selects at most one entry.

    If the experts are sharded over devices, these are the bytes on the busiest device.
    """
    own, total = table.shape[0], attrs["total"]
    assert isinstance(total, int)
    return (
        min(own, estimate_busiest_device_entries(ids.size, own, total or own))
        * Spec(table.shape[1:], table.dtype).nbytes
    )


def _count_product_bytes(sources: Sequence[Spec | None], results: Sequence[Spec], attrs: Attrs) -> int:
    w, x, ids = sources
    assert w is not None
    assert x is not None
    assert ids is not None
    return _estimate_selected_entry_bytes(w, ids, attrs) + x.nbytes + ids.nbytes + results[0].nbytes


def _count_busiest_device_product_flops(
    batch: int, r: int, v: int, n: int, k: int, experts: int, total: int, **_: int
) -> float:
    """Return the floating-point operations of `mul_mat_id` on the busiest device.

    They are the operations for one index of the leading axes. If the experts are sharded, the operations of the busiest
    device count.
    """
    entries = batch * r * v
    return 2 * n * k * estimate_busiest_device_entries(entries, experts, total or experts) / max(1, batch)


def _check_expert_range(experts: int, first: int, total: int, **_: object) -> str | None:
    return check_shard_row_range(first, total, experts)


@op(
    "w[experts@ids, n, +k]: weight, x[..., v, +k], ids[..., (r v)]: i32 -> [..., (r v), n]: f32",
    linear=("w", "x"),
    derived_sizes={"routed": lambda experts, total, **_: total or experts},
    check=_check_expert_range,
    flops=_count_busiest_device_product_flops,
    traffic=_count_product_bytes,
    ranges={"ids": LegalRange(0, "routed")},
    samples=(
        *expand_template("w={w}[5,6,256], x=f32[{t},1,256], ids=i32[{t},2]", w=tuple(map(str, FLOAT_DTYPES)), t=(1, 7)),
        *expand_template("w={w}[3,4,256], x=f32[2,2,256], ids=i32[2,2]", w=tuple(map(str, QUANTISED_DTYPES))),
        *expand_template("w=f32[7,5,13], x=f32[{t},{v},13], ids=i32[{t},6]", t=(0, 1, 11), v=(1, 2, 3, 6)),
        "w=f32[1,3,8], x=f32[4,1,8], ids=i32[4,1]",
        "w=f32[4,3,8], x=f16[2,3,1,8], ids=i32[2,3,2]",
        "w=f32[4,3,8], x=f32[1,8], ids=i32[3]",
        *expand_template(
            "w=f32[3,4,8], x=f32[9,{v},8], ids=i32[9,2], first={first}, total=8", v=(1, 2), first=(0, 2, 5)
        ),
        "w=q8_0[2,4,32], x=f32[5,1,32], ids=i32[5,3], first=1, total=4",
        "w=f32[0,4,8], x=f32[3,1,8], ids=i32[3,2], first=8, total=8",
    ),
    errors=(
        ("w=f32[4,3,8], x=f32[5,2,8], ids=i32[5,3]", "no product"),
        ("w=f32[4,3,8], x=f32[5,1,9], ids=i32[5,2]", "k is 8"),
        ("w=f32[4,3,8], x=f32[5,1,8], ids=i32[6,2]", "leading axes"),
        ("w=f32[4,3,8], x=f32[5,1,8], ids=f32[5,2]", "ids is f32"),
        ("w=f32[4,3,8], x=f32[5,1,8], ids=i32[5,2], first=5, total=8", "rows 5 to 9 are no part of 8"),
        ("w=f32[4,3,8], x=f32[5,1,8], ids=i32[5,2], first=1", "rows 1 to 5 are no part of 0"),
    ),
    signed_zeros=False,
    nan_for_infinity=("w",),
)
def mul_mat_id(w: Array, x: Array, ids: Array, *, first: int = 0, total: int = 0, exact: bool = True) -> Array:
    """Multiply rows of `x` by the transposed weights of chosen experts: ``out[t, i] = w[ids[t, i]] @ x[t, i mod v]``.

    Only chosen experts are read. An id outside the experts is an error of the run. With `total` > 0, `w` is a shard of
    `total` experts that begins with expert `first`; the result for experts outside of the shard is zero. `exact` is as
    in `mul_mat`. ggml: ``MUL_MAT_ID``; Shazeer et al., 2017.
    """
    chosen = to_local_rows(ids, first, len(w), total, "ids of experts")
    rows = np.tile(x, (ids.shape[-1] // x.shape[-2] if x.shape[-2] else 1, 1))
    out = np.zeros((*ids.shape, w.shape[1]))
    for expert in np.unique(chosen[chosen >= 0]):
        mine = chosen == expert
        out[mine] = rows[mine] @ w[expert].T
    return out


def _count_bias_bytes(sources: Sequence[Spec | None], results: Sequence[Spec], attrs: Attrs) -> int:
    a, b, ids = sources
    assert a is not None
    assert b is not None
    assert ids is not None
    return a.nbytes + _estimate_selected_entry_bytes(b, ids, attrs) + ids.nbytes + results[0].nbytes


@op(
    "a[..., u, n], b[experts@ids, n], ids[..., u]: i32 -> [..., u, n]",
    linear=("a+b",),
    inplace="a",
    derived_sizes={"routed": lambda experts, total, **_: total or experts},
    check=_check_expert_range,
    traffic=_count_bias_bytes,
    ranges={"ids": LegalRange(0, "routed")},
    samples=(
        *expand_template("a=f32[{t},{u},12], b=f32[5,12], ids=i32[{t},{u}]", t=(0, 1, 7), u=(1, 3)),
        "a=f32[2,3,2,7], b=f32[1,7], ids=i32[2,3,2]",
        "a=f16[3,2,8], b=bf16[4,8], ids=i32[3,2]",
        *expand_template("a=f32[7,2,12], b=f32[3,12], ids=i32[7,2], first={first}, total=8", first=(0, 2, 5)),
        "a=f32[3,2,8], b=f32[0,8], ids=i32[3,2], first=4, total=4",
    ),
    errors=(
        ("a=f32[3,2,8], b=f32[4,9], ids=i32[3,2]", "n is 8"),
        ("a=f32[3,2,8], b=f32[4,8], ids=i32[3,3]", "u is 2"),
        ("a=f32[3,2,8], b=f32[4,8], ids=i64[3,2]", "ids is i64"),
        ("a=f32[3,2,8], b=f32[4,8], ids=i32[3,2], first=-1, total=8", "rows -1 to 3 are no part of 8"),
    ),
)
def add_id(a: Array, b: Array, ids: Array, *, first: int = 0, total: int = 0) -> Array:
    """Add to `a` the bias rows of chosen experts: ``a[t, i] + b[ids[t, i]]``. ggml: ``ADD_ID``.

    With `total` > 0, `b` is a shard of `total` experts that begins with expert `first`. For experts outside of the
    shard nothing is added.
    """
    rows = to_local_rows(ids, first, len(b), total, "ids of experts")
    out = np.array(a)
    out[rows >= 0] += b[rows[rows >= 0]]
    return out
