"""Gather and scatter of entries along the last axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from ..declaration.op import Array, op
from ..declaration.samples import LegalRange, expand_template
from .sharded_tables import require_row_numbers


@op(
    "x[..., *n]: number, ids[..., k]: index -> [..., k]",
    linear=("x",),
    ranges={"ids": LegalRange(0, "n")},
    samples=(
        *expand_template("x={x}[{n}], ids={i}[3]", x=("f32", "f16", "i32"), n=("7",), i=("i32", "i64")),
        *expand_template("x={x}[2,3,5], ids=i64[2,3,{k}]", x=("f32", "bf16", "i64"), k=(1, 4, 0)),
    ),
    errors=(
        ("x=f32[3,4], ids=f32[3,2]", "ids is f32"),
        ("x=f32[3,4], ids=i32[2,2]", "leading axes"),
        ("x=f32[], ids=i32[]", "at least 1"),
    ),
    compare="exact",
    infinite=("x",),
    is_required=False,
)
def gather(x: Array, ids: Array) -> Array:
    """Gather entries of each row of `x` by index: ``x[..., ids[..., i]]``. NumPy's ``take_along_axis``, 2018."""
    return np.take_along_axis(x, require_row_numbers(ids, x.shape[-1], "ids"), axis=-1)


SCATTER_REDUCTIONS: Mapping[str, Callable[[Array, tuple[Array, ...], Array], None]] = MappingProxyType(
    {
        "set": lambda out, at, src: out.__setitem__(at, src),
        "add": np.add.at,
        "mul": np.multiply.at,
        "max": np.maximum.at,
        "min": np.minimum.at,
    }
)
"""For each `reduce` of `scatter`, a function that writes entries to an array in place."""


def _check_reduction(reduce: str, **_: object) -> str | None:
    return None if reduce in SCATTER_REDUCTIONS else f"reduce is {reduce!r}; one of {', '.join(SCATTER_REDUCTIONS)}"


@op(
    "into[..., *n]: number, ids[..., *k]: index, src[..., *k]: number -> [..., n]",
    check=_check_reduction,
    linear=lambda attrs: ("into+src",) if attrs["reduce"] in ("set", "add") else (),
    ranges={"ids": LegalRange(0, "n", distinct=True)},
    samples=(
        *expand_template(
            'into={x}[7], ids=i64[3], src={x}[3], reduce="{r}"', x=("f32", "i32"), r=tuple(SCATTER_REDUCTIONS)
        ),
        *expand_template("into={x}[2,3,5], ids=i32[2,3,{k}], src={x}[2,3,{k}]", x=("f32", "f16"), k=(1, 4, 0)),
    ),
    errors=(
        ("into=f32[7], ids=i32[3], src=f32[2]", "k is 3"),
        ("into=f32[7], ids=f32[3], src=f32[3]", "ids is f32"),
        ('into=f32[7], ids=i32[3], src=f32[3], reduce="mean"', "one of set"),
    ),
    is_required=False,
)
def scatter(into: Array, ids: Array, src: Array, *, reduce: str = "set") -> Array:
    """Scatter `src` into each row of `into`: entry i is stored at, or combined with, entry ``ids[..., i]``.

    `reduce` is ``set``, ``add``, ``mul``, ``max`` or ``min``. If an index repeats, ``set`` stores one of its entries,
    and the others combine all of them. NumPy's ``put_along_axis``, 2018.
    """
    out = np.array(into)
    require_row_numbers(ids, into.shape[-1], "ids")
    *leading, _ = np.ogrid[tuple(map(slice, ids.shape))]
    SCATTER_REDUCTIONS[reduce](out, (*leading, ids), src)
    return out
