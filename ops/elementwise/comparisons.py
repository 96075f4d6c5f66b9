"""Comparisons, selections, maximum, minimum and power; truth values are 0 and 1 in f32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from ...graph.attrs import Attrs
from ...graph.spec import Spec
from ..declaration import scalar
from ..declaration.axis_links import AxisLink
from ..declaration.op import OperandSpecs, op
from ..declaration.samples import LegalRange, expand_template
from ..declaration.scalar import Scalar
from ..declaration.shape_rules import first_spec
from ..declaration.signature import SignatureMismatch
from .binary import BINARY_ERRORS, BINARY_SIGNATURE

COMPARISONS: Mapping[str, Callable[[Scalar, Scalar], Scalar]] = MappingProxyType(
    {
        "eq": scalar.equal,
        "ne": scalar.not_equal,
        "lt": lambda a, b: a < b,
        "le": lambda a, b: a <= b,
        "gt": lambda a, b: a > b,
        "ge": lambda a, b: a >= b,
    }
)
"""The expression of each kind of comparison."""


def _check_comparison(kind: str, **_: object) -> str | None:
    return None if kind in COMPARISONS else f"kind is {kind!r}; one of {', '.join(COMPARISONS)}"


@op(
    "a[...]: number, b[~...]: number -> [...]: f32",
    check=_check_comparison,
    samples=(
        *expand_template(
            'a={x}[3,8], b={x}[{b}], kind="{kind}"', x=("f32", "i32"), b=("3,8", "1"), kind=("eq", "ne", "lt")
        ),
        *expand_template('a={x}[2,3,4], b={x}[3,1], kind="{kind}"', x=("f16", "i64"), kind=("le", "gt", "ge")),
        'a=i8[0,5], b=i8[5], kind="eq"',
    ),
    errors=(
        ('a=f32[3], b=f32[3], kind="less"', "one of eq, ne"),
        ('a=f32[3], b=f32[2], kind="lt"', "do not divide"),
        ("a=f32[3], b=f32[3]", "kind is missing"),
    ),
    ranges={"a": LegalRange(-2.0, 2.0), "b": LegalRange(-2.0, 2.0)},
    compare="exact",
    infinite=("a", "b"),
    is_required=False,
)
def compare(a: Scalar, b: Scalar, *, kind: str) -> Scalar:
    """Compare `a` with `b` elementwise: 1 where the comparison `kind` is true, else 0.

    `kind` is ``eq``, ``ne``, ``lt``, ``le``, ``gt`` or ``ge``. `b` is repeated as tiles to the shape of `a`. For a NaN,
    only ``ne`` is true. IEEE 754, 2019.
    """
    return scalar.where(COMPARISONS[kind](a, b), 1.0, 0.0)


def _is_broadcastable(spec: Spec, whole: Spec) -> bool:
    extra = len(whole.shape) - len(spec.shape)
    return extra >= 0 and all(n in (1, m) for n, m in zip(spec.shape, whole.shape[extra:], strict=True))


def _infer_where(specs: OperandSpecs, attrs: Attrs) -> Spec:
    truth, a, b = specs
    assert truth is not None
    assert a is not None
    assert b is not None
    if a.dtype.is_integer != b.dtype.is_integer:
        raise SignatureMismatch(f"a is {a.dtype} but b is {b.dtype}; cast one of them")
    for name, spec in (("a", a), ("b", b)):
        if not _is_broadcastable(spec, truth):
            raise SignatureMismatch(f"{name}, {spec}, cannot be broadcast to truth, {truth}; only axes of size 1 grow")
    return Spec(truth.shape, a.dtype)


def _link_full_size_axes(specs: OperandSpecs, attrs: Attrs) -> tuple[AxisLink, ...]:
    """Link the axes of each operand to the result axes of equal size; broadcast axes (size 1) have no link."""
    shape = first_spec(specs).shape
    links = []
    for operand, spec in enumerate(specs):
        assert spec is not None
        extra = len(shape) - len(spec.shape)
        links += [AxisLink(operand, (i,), (i + extra,)) for i, n in enumerate(spec.shape) if n == shape[i + extra]]
    return tuple(links)


@op(
    "truth[...], a[~...]: number, b[~...]: number -> [...]: a",
    linear=("a+b",),
    infer=_infer_where,
    links=_link_full_size_axes,
    samples=(
        *expand_template("truth=f32[3,8], a={x}[{a}], b={x}[3,8]", x=("f32", "f16", "i32", "i64"), a=("3,8", "8")),
        "truth=f32[2,3,4], a=f32[], b=f32[3,1]",
        "truth=f32[0,4], a=f32[1], b=f32[4]",
    ),
    errors=(
        ("truth=i32[3], a=f32[3], b=f32[3]", "truth is i32"),
        ("truth=f32[4], a=f32[2], b=f32[4]", "only axes of size 1 grow"),
        ("truth=f32[3], a=f32[3], b=i32[3]", "cast one"),
    ),
    ranges={"truth": LegalRange(0.0, 1.0)},
    compare="exact",
    infinite=("a", "b"),
    is_required=False,
)
def where(truth: Scalar, a: Scalar, b: Scalar) -> Scalar:
    """Select elements: `a` where `truth` is not 0, else `b`. The result has the dtype of `a`.

    `a` and `b` are broadcast to the shape of `truth`. NumPy's ``where`` (Harris et al., 2020).
    """
    return scalar.where(scalar.not_equal(truth, 0.0), a, b)


_SAMPLES = (
    *expand_template("a={a}[2,3,8], b={b}[2,3,8]", a=("f32", "f16", "bf16"), b=("f32",)),
    *expand_template("a=f32[4,6,8], b=f32[{b}]", b=("8", "4,1,8", "1", "")),
    "a=f32[0,5], b=f32[5]",
)


@op(BINARY_SIGNATURE, inplace="a", samples=_SAMPLES, errors=BINARY_ERRORS, infinite=("a", "b"), is_required=False)
def maximum(a: Scalar, b: Scalar) -> Scalar:
    """Compute the elementwise maximum; `b` is repeated as tiles to the shape of `a`.

    The result is NaN if one of the two numbers is NaN, and +0 is larger than -0. IEEE 754, 2019.
    """
    return scalar.larger_of(a, b)


@op(BINARY_SIGNATURE, inplace="a", samples=_SAMPLES, errors=BINARY_ERRORS, infinite=("a", "b"), is_required=False)
def minimum(a: Scalar, b: Scalar) -> Scalar:
    """Compute the elementwise minimum; `b` is repeated as tiles to the shape of `a`.

    The result is NaN if one of the two numbers is NaN, and -0 is smaller than +0. IEEE 754, 2019.
    """
    return scalar.smaller_of(a, b)


@op(
    BINARY_SIGNATURE,
    inplace="a",
    flops=lambda **_: 8,
    samples=_SAMPLES,
    errors=BINARY_ERRORS,
    ranges={"a": LegalRange(0.25, 4.0), "b": LegalRange(-2.0, 2.0)},
    is_required=False,
)
def power(a: Scalar, b: Scalar) -> Scalar:
    """Raise `a` to the power `b` elementwise; `b` is repeated as tiles to the shape of `a`. IEEE 754, 2019."""
    return scalar.raise_to(a, b)
