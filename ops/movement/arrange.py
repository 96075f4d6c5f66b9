"""Ops that rearrange entries: repeat, pad, roll, and write or add to a region."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...graph.attrs import Attrs
from ...graph.errors import format_count
from ...graph.spec import Spec
from ..declaration import scalar
from ..declaration.axis_links import AxisLink, link_first_operand_axes_to_result
from ..declaration.broadcasting import tile_to_shape
from ..declaration.interpreter import ScalarLanguageDeclaration
from ..declaration.op import Array, OperandSpecs, op
from ..declaration.samples import expand_template
from ..declaration.scalar import Scalar
from ..declaration.shape_rules import first_spec, integers_attribute
from ..declaration.signature import SignatureMismatch


def _require_integer_per_axis(attrs: Attrs, name: str, spec: Spec) -> tuple[int, ...]:
    """Return an attribute that needs one integer for each axis of `spec`.

    Raises:
        SignatureMismatch: the attribute has another number of entries.
    """
    values = integers_attribute(attrs, name)
    if len(values) != len(spec.shape):
        raise SignatureMismatch(
            f"{name} has {format_count(len(values), 'entry', 'entries')}; it needs one for each of the "
            f"{format_count(len(spec.shape), 'axis', 'axes')} of {spec}"
        )
    return values


def _make_region_slices(shape: tuple[int, ...], offsets: tuple[int, ...]) -> tuple[slice, ...]:
    """Return the slices of the region with this shape at `offsets`."""
    return tuple(slice(o, o + n) for o, n in zip(offsets, shape, strict=True))


# --------------------------------------------------------------------------------------------------------- repeat


def _infer_repeat(specs: OperandSpecs, attrs: Attrs) -> Spec:
    spec, shape = first_spec(specs), integers_attribute(attrs, "shape")
    old = (1,) * (len(shape) - len(spec.shape)) + spec.shape
    if len(old) != len(shape) or any(m % n if n else m for n, m in zip(old, shape, strict=True)):
        raise SignatureMismatch(
            f"{spec} cannot be repeated to {list(shape)}; each size must be a multiple of the size of x"
        )
    return Spec(shape, spec.dtype)


def _repeat_links(specs: OperandSpecs, attrs: Attrs) -> tuple[AxisLink, ...]:
    shape, target = first_spec(specs).shape, integers_attribute(attrs, "shape")
    extra = len(target) - len(shape)
    return link_first_operand_axes_to_result({i: i + extra for i, n in enumerate(shape) if n == target[i + extra]})


@op(
    "x[...]: number -> [...]",
    linear=("x",),
    infer=_infer_repeat,
    links=_repeat_links,
    localise=lambda attrs, shape, count: {"shape": shape},
    samples=(
        *expand_template("x={x}[2,3,4], shape=({to})", x=("f32", "f16", "bf16", "i32", "i16"), to=("2,6,4", "4,3,12")),
        *("x=f32[5], shape=(2,3,10)", "x=f32[], shape=(3,)", "x=f32[3,1], shape=(3,7)", "x=f32[0,2], shape=(0,4)"),
        *("x=f32[2,3], shape=(2,3)", "x=f32[2,3], shape=(0,3)"),
    ),
    errors=(
        ("x=f32[2,3], shape=(2,7)", "must be a multiple"),
        ("x=f32[2,3], shape=(6,)", "cannot be repeated"),
        ("x=q8_0[2,32], shape=(4,32)", "x is q8_0"),
        ("x=f32[2], shape=3.5", "a tuple"),
    ),
    compare="exact",
    infinite=("x",),
)
def repeat(x: Array, *, shape: tuple[int, ...]) -> Array:
    """Repeat `x` as tiles to `shape`: entry i of an axis is ``x[i % size]``. ggml: ``REPEAT``."""
    return np.array(tile_to_shape(x, shape))


# ------------------------------------------------------------------------------------------------------------ pad


def _infer_pad(specs: OperandSpecs, attrs: Attrs) -> Spec:
    spec = first_spec(specs)
    left, right = _require_integer_per_axis(attrs, "left", spec), _require_integer_per_axis(attrs, "right", spec)
    if min((*left, *right), default=0) < 0:
        raise SignatureMismatch(
            f"left {list(left)} and right {list(right)} must not be negative; use slice_ to remove entries"
        )
    if attrs["circular"] and any(n == 0 < a + b for n, a, b in zip(spec.shape, left, right, strict=True)):
        raise SignatureMismatch(f"{spec} has an empty axis, which cannot be padded with its own entries")
    return Spec(tuple(a + n + b for n, a, b in zip(spec.shape, left, right, strict=True)), spec.dtype)


def _link_unpadded_axes(specs: OperandSpecs, attrs: Attrs) -> tuple[AxisLink, ...]:
    """Declare that the planner may shard the axes without padding in operand and result alike; others stay complete."""
    left, right = integers_attribute(attrs, "left"), integers_attribute(attrs, "right")
    return link_first_operand_axes_to_result({i: i for i in range(len(left)) if left[i] == right[i] == 0})


def _pad_by_zero(x: Scalar) -> Scalar:
    return scalar.where(scalar.is_inside(x), x, 0.0)


def _place_after_padding(shapes: Sequence[tuple[int, ...]], attrs: Attrs) -> Sequence[tuple[int, ...]] | None:
    return None if attrs["circular"] else [integers_attribute(attrs, "left")]


@op(
    "x[...]: number -> [...]",
    element=ScalarLanguageDeclaration(_pad_by_zero, {}, place=_place_after_padding),
    linear=("x",),
    infer=_infer_pad,
    links=_link_unpadded_axes,
    samples=(
        *expand_template(
            "x=f32[3,5], left=({left}), right=({right})", left=("0,0", "1,3"), right=("0,0", "2,1", "0,7")
        ),
        *expand_template(
            "x=f32[3,5], left=({left}), right=({right}), circular=true", left=("0,2", "1,9"), right=("2,1", "0,7")
        ),
        *("x=f16[2,1,3], left=(0,1,0), right=(0,0,2)", "x=i32[4], left=(2,), right=(1,)", "x=f32[], left=(), right=()"),
        *("x=f32[0,3], left=(2,0), right=(0,1)", "x=f32[0,3], left=(0,1), right=(0,1), circular=true"),
    ),
    errors=(
        ("x=f32[3,5], left=(1,), right=(0,0)", "left has 1 entry"),
        ("x=f32[3], left=(0,), right=(-1,)", "must not be negative"),
        ("x=f32[0], left=(1,), right=(0,), circular=true", "empty axis"),
        ("x=f32[3], left=(1,)", "right is missing"),
    ),
    compare="exact",
    infinite=("x",),
)
def pad(x: Array, *, left: tuple[int, ...], right: tuple[int, ...], circular: bool = False) -> Array:
    """Pad each axis i with ``left[i]`` zeros before and ``right[i]`` zeros after its entries. ggml: ``PAD``.

    With `circular`, the padding has the entries of the axis, cyclically. ``ggml_pad_ext`` and ``ggml_pad_ext_circular``
    count axes from the last.
    """
    if not circular:
        out = np.zeros([a + n + b for n, a, b in zip(x.shape, left, right, strict=True)], x.dtype)
        out[_make_region_slices(x.shape, left)] = x
        return out
    for axis, n in enumerate(x.shape):
        if left[axis] or right[axis]:
            x = np.take(x, np.arange(-left[axis], n + right[axis]) % n, axis=axis)
    return np.array(x)


@op(
    "x[..., *n] -> [..., m]",
    linear=("x",),
    derived_sizes={"m": lambda n, left, right, **_: left + n + right},
    check=lambda n, left, right, **_: (
        None
        if min(left, right) >= 0 and max(left, right) < n
        else (
            f"left {left} and right {right} must be from 0 to {n - 1}, as rows hold "
            f"{format_count(n, 'entry', 'entries')}"
        )
    ),
    samples=(
        *expand_template(
            "x=f32[{shape}], left={left}, right={right}", shape=("7", "3,10", "2,1,5"), left=(0, 4), right=(1, 3)
        ),
        *("x=f16[2,3], left=2, right=2", "x=f32[0,3], left=1, right=0", "x=f32[2,1], left=0, right=0"),
    ),
    errors=(
        ("x=f32[3,5], left=5, right=0", "from 0 to 4"),
        ("x=f32[5], left=0, right=-1", "right -1"),
        ("x=f32[5], left=1", "right is missing"),
    ),
    is_required=False,
    compare="exact",
    infinite=("x",),
)
def pad_reflect_1d(x: Array, *, left: int, right: int) -> Array:
    """Pad the last axis with its mirror image; the outermost entry itself is not repeated. ggml: ``PAD_REFLECT_1D``."""
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(left, right)], mode="reflect") if left or right else np.array(x)


# ----------------------------------------------------------------------------------------------------------- roll


def _infer_roll(specs: OperandSpecs, attrs: Attrs) -> Spec:
    _require_integer_per_axis(attrs, "shifts", first_spec(specs))
    return first_spec(specs)


def _roll_links(specs: OperandSpecs, attrs: Attrs) -> tuple[AxisLink, ...]:
    return link_first_operand_axes_to_result(
        {i: i for i, shift in enumerate(integers_attribute(attrs, "shifts")) if shift == 0}
    )


@op(
    "x[...]: number -> [...]",
    linear=("x",),
    infer=_infer_roll,
    links=_roll_links,
    samples=(
        *expand_template(
            "x={x}[3,5,4], shifts=({by})", x=("f32", "f16", "i32"), by=("0,0,0", "1,-2,3", "-1,0,-1", "4,5,-9")
        ),
        *("x=f32[7], shifts=(3,)", "x=f32[1,0], shifts=(1,2)", "x=f32[], shifts=()"),
    ),
    errors=(("x=f32[3,5], shifts=(1,)", "shifts has 1 entry"), ("x=f32[3]", "shifts is missing")),
    is_required=False,
    compare="exact",
    infinite=("x",),
)
def roll(x: Array, *, shifts: tuple[int, ...]) -> Array:
    """Shift each axis i cyclically by ``shifts[i]`` entries. ggml: ``ROLL``."""
    for axis, by in enumerate(shifts):
        x = np.roll(x, by, axis)
    return np.array(x)


# ------------------------------------------------------------------------------------------------------- set, acc


def _infer_region(specs: OperandSpecs, attrs: Attrs) -> Spec:
    a, b = specs
    assert a is not None
    assert b is not None
    offsets = _require_integer_per_axis(attrs, "offsets", a)
    if a.dtype is not b.dtype:
        raise SignatureMismatch(f"a is {a.dtype} but b is {b.dtype}; cast one of them")
    if len(a.shape) != len(b.shape):
        raise SignatureMismatch(f"a is {a} and b is {b}; they must have as many axes")
    if any(o < 0 or o + n > m for o, n, m in zip(offsets, b.shape, a.shape, strict=True)):
        raise SignatureMismatch(f"b, {b} at {list(offsets)}, does not lie within a, {a}")
    return a


def _link_axes_of_equal_length(specs: OperandSpecs, attrs: Attrs) -> tuple[AxisLink, ...]:
    """Declare that the planner may shard the axes along which `b` is as long as `a`; other axes stay complete."""
    a, b = specs
    assert a is not None
    assert b is not None
    full = [i for i, (n, m) in enumerate(zip(a.shape, b.shape, strict=True)) if n == m]
    return tuple(AxisLink(operand, (i,), (i,)) for operand in (0, 1) for i in full)


def _count_region_read_and_write_bytes(sources: Sequence[Spec | None], results: Sequence[Spec], attrs: Attrs) -> int:
    """Return the bytes that a write of `b` into a region of `a` moves in memory: the bytes of `b`, read and written."""
    return 2 * (sources[1].nbytes if sources[1] else 0)


_REGIONS = (
    "a={x}[5], b={x}[3], offsets=(1,)",
    "a={x}[4,5], b={x}[4,2], offsets=(0,3)",
    "a={x}[3,4,5], b={x}[1,4,3], offsets=(2,0,1)",
    "a={x}[3,4], b={x}[3,4], offsets=(0,0)",
    "a={x}[3,4], b={x}[0,4], offsets=(3,0)",
    "a={x}[], b={x}[], offsets=()",
)
_REGION_ERRORS = (
    ("a=f32[5], b=f32[3], offsets=(3,)", "does not lie within"),
    ("a=f32[5], b=f32[3], offsets=(-1,)", "does not lie within"),
    ("a=f32[5,2], b=f32[2], offsets=(0,0)", "as many axes"),
    ("a=f32[5,2], b=f32[2,2], offsets=(0,)", "offsets has 1 entry"),
    ("a=f32[5], b=f16[3], offsets=(0,)", "cast one"),
)


def _replace_part(a: Scalar, b: Scalar) -> Scalar:
    return scalar.where(scalar.is_inside(b), b, a)


def _place_at_offsets(shapes: Sequence[tuple[int, ...]], attrs: Attrs) -> Sequence[tuple[int, ...]]:
    return (0,) * len(shapes[0]), integers_attribute(attrs, "offsets")


@op(
    "a[~...]: number, b[~...]: number -> [...]",
    element=ScalarLanguageDeclaration(_replace_part, {}, place=_place_at_offsets),
    linear=("a+b",),
    inplace="a",
    infer=_infer_region,
    links=_link_axes_of_equal_length,
    flops=lambda **_: 0,
    traffic=_count_region_read_and_write_bytes,
    samples=tuple(case.format(x=x) for case in _REGIONS for x in ("f32", "f16", "i32")),
    errors=_REGION_ERRORS,
    compare="exact",
    infinite=("a", "b"),
)
def set_(a: Array, b: Array, *, offsets: tuple[int, ...]) -> Array:
    """Replace the region of `a` at `offsets`, which has the shape of `b`, by `b`. ggml: ``SET``.

    ggml names the region by byte strides and a byte offset.
    """
    out = np.array(a)
    out[_make_region_slices(b.shape, offsets)] = b
    return out


@op(
    "a[~...], b[~...] -> [...]",
    linear=("a+b",),
    inplace="a",
    infer=_infer_region,
    links=_link_axes_of_equal_length,
    traffic=lambda sources, results, attrs: 3 * (sources[1].nbytes if sources[1] else 0),
    samples=tuple(case.format(x=x) for case in _REGIONS for x in ("f32", "bf16")),
    errors=(*_REGION_ERRORS, ("a=i32[5], b=i32[3], offsets=(0,)", "a is i32")),
    is_required=False,
)
def acc(a: Array, b: Array, *, offsets: tuple[int, ...]) -> Array:
    """Add `b` to the region of `a` at `offsets`, which has the shape of `b`. ggml: ``ACC``.

    ggml names the region by byte strides and a byte offset.
    """
    out = np.array(a)
    out[_make_region_slices(b.shape, offsets)] += b
    return out
