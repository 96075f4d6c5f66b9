"""Ops that move rows: get rows, set rows, concatenate."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...graph.attrs import Attrs
from ...graph.dtypes import QUANTISED_DTYPES, STATE_DTYPES
from ...graph.spec import Spec
from ..declaration import scalar
from ..declaration.axis_links import AxisLink
from ..declaration.broadcasting import repeat_leading_axis_entries
from ..declaration.interpreter import ScalarLanguageDeclaration
from ..declaration.op import Array, OperandSpecs, op
from ..declaration.samples import LegalRange, expand_template
from ..declaration.scalar import Scalar
from ..declaration.shape_rules import axis_attribute, integer_attribute
from ..declaration.signature import SignatureMismatch
from .sharded_tables import require_row_numbers

QUANTISED_STATE_NAMES = tuple(str(dtype) for dtype in STATE_DTYPES if dtype.is_quantised)


def _count_gather_bytes(sources: Sequence[Spec | None], results: Sequence[Spec], attrs: Attrs) -> int:
    table, ids = sources
    assert table is not None
    assert ids is not None
    rows = ids.size * Spec(table.shape[-1:], table.dtype).nbytes
    return rows + ids.nbytes + results[0].nbytes


@op(
    "table[..., *r, d]: any, ids[..., k]: index -> [..., k, d]: f32",
    linear=("table",),
    traffic=_count_gather_bytes,
    ranges={"ids": LegalRange(0, "r")},
    samples=(
        *expand_template("table={x}[17,64], ids=i32[{k}]", x=("f32", "f16", "bf16"), k=(0, 1, 5)),
        *expand_template("table={x}[5,256], ids=i32[3]", x=tuple(map(str, QUANTISED_DTYPES))),
        "table=f32[2,7,8], ids=i64[2,3]",
    ),
    errors=(("table=f32[17,64], ids=f32[3]", "ids is f32"), ("table=f32[2,17,64], ids=i32[3]", "leading axes")),
    infinite=("table",),
)
def get_rows(table: Array, ids: Array) -> Array:
    """Gather rows of `table` by index: ``table[ids]``. The result is f32. ggml: ``GET_ROWS``."""
    return np.take_along_axis(table, require_row_numbers(ids, table.shape[-2], "ids")[..., None], axis=-2)


@op(
    "into[..., *r, d]: written, rows[..., *k, d]: float, ids[/..., *k]: index -> [..., r, d]",
    inplace="into",
    overwrites=("ids", -2),
    flops=lambda k, d, **_: k * d,
    traffic=lambda sources, results, attrs: 2 * (sources[1].nbytes if sources[1] else 0),
    ranges={"ids": LegalRange(0, "r", distinct=True)},
    samples=(
        *expand_template(
            "into={x}[17,8], rows=f32[{k},8], ids={i}[{k}]", x=("f32", "f16"), k=(0, 1, 5), i=("i32", "i64")
        ),
        *expand_template("into={x}[5,256], rows=f32[2,256], ids=i32[2]", x=QUANTISED_STATE_NAMES),
        "into=f32[2,7,8], rows=f32[2,3,8], ids=i32[2,3]",
        "into=f32[2,7,8], rows=f32[2,3,8], ids=i32[3]",
    ),
    errors=(
        ("into=f32[17,8], rows=f32[3,9], ids=i32[3]", "d is 8"),
        ("into=f32[17,8], rows=f32[3,8], ids=i32[4]", "k is 3"),
    ),
    infinite=("into", "rows"),
)
def set_rows(into: Array, rows: Array, ids: Array) -> Array:
    """Replace row ``ids[i]`` of `into` by row i of `rows`, converted to the dtype of `into`. ggml: ``SET_ROWS``.

    If a row number repeats, one of its rows is stored; of blocks on CUDA, parts of several rows may be.
    """
    out = into.copy()
    chosen = repeat_leading_axis_entries(require_row_numbers(ids, into.shape[-2], "ids"), rows.shape[:-2], 1)
    np.put_along_axis(out, chosen[..., None], rows, axis=-2)
    return out


def _infer_concat(specs: OperandSpecs, attrs: Attrs) -> Spec:
    a, b = specs
    assert a is not None
    assert b is not None
    axis = axis_attribute(attrs, a)
    if a.dtype is not b.dtype:
        raise SignatureMismatch(f"a is {a.dtype} but b is {b.dtype}; cast one of them")
    if a.shape[:axis] + a.shape[axis + 1 :] != b.shape[:axis] + b.shape[axis + 1 :] or len(a.shape) != len(b.shape):
        raise SignatureMismatch(f"a is {a} and b is {b}; all axes but {axis} must agree")
    return Spec((*a.shape[:axis], a.shape[axis] + b.shape[axis], *a.shape[axis + 1 :]), a.dtype)


def _concat_links(specs: OperandSpecs, attrs: Attrs) -> tuple[AxisLink, ...]:
    a = specs[0]
    assert a is not None
    axis = axis_attribute(attrs, a)
    first = tuple(AxisLink(0, (i,), (i,)) for i in range(len(a.shape)))
    return first + tuple(AxisLink(1, (i,), (i,), a.shape[axis] if i == axis else 0) for i in range(len(a.shape)))


def _select_part(a: Scalar, b: Scalar) -> Scalar:
    return scalar.where(scalar.is_inside(a), a, b)


def _place_one_after_the_other(shapes: Sequence[tuple[int, ...]], attrs: Attrs) -> Sequence[tuple[int, ...]]:
    first = shapes[0]
    axis = integer_attribute(attrs, "axis") % len(first)
    return (0,) * len(first), tuple(n if i == axis else 0 for i, n in enumerate(first))


@op(
    "a[~...]: number|written, b[~...]: number|written -> [...]",
    element=ScalarLanguageDeclaration(_select_part, {}, place=_place_one_after_the_other),
    linear=("a+b",),
    infer=_infer_concat,
    links=_concat_links,
    samples=(
        *expand_template("a=f32[2,3,4], b=f32[{b}], axis={axis}", b=("2,3,4",), axis=(0, 1, 2, -1)),
        "a=f32[3,4], b=f32[2,4], axis=0",
        "a=f16[3,4], b=f16[3,0], axis=1",
        "a=i32[3], b=i32[4], axis=0",
        *expand_template("a={x}[3,256], b={x}[2,256], axis=0", x=QUANTISED_STATE_NAMES),
    ),
    errors=(
        ("a=f32[3,4], b=f32[3,5], axis=0", "all axes but 0"),
        ("a=f32[3], b=f16[3], axis=0", "cast one"),
        ("a=f32[3], b=f32[3], axis=1", "rank 1"),
    ),
    compare="exact",
    infinite=("a", "b"),
)
def concat(a: Array, b: Array, *, axis: int) -> Array:
    """Concatenate `a` and `b` along one axis. ggml: ``CONCAT``."""
    return np.concatenate([a, b], axis=axis)
