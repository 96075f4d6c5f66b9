"""Elementwise arithmetic, scaling, clamping, casts and copies.

As in ggml, the operand `b` of a binary op is repeated as tiles to the shape of `a`. Entry i of an axis of `a` is
combined with entry ``i mod size`` of the same axis of `b`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...graph.attrs import Attrs
from ...graph.dtypes import STATE_DTYPES, DType
from ...graph.spec import Spec
from ..declaration import scalar
from ..declaration.interpreter import ScalarLanguageDeclaration
from ..declaration.op import Array, OperandSpecs, op
from ..declaration.samples import LegalRange, expand_template
from ..declaration.scalar import Scalar
from ..declaration.signature import SignatureMismatch
from ..quantisation import decode_array, encode_array

BINARY_SIGNATURE = "a[...], b[~...] -> [...]"
"""The signature of elementwise ops of two operands."""
BINARY_SAMPLES = (
    *expand_template("a={a}[2,3,8], b={b}[2,3,8]", a=("f32", "f16", "bf16"), b=("f32",)),
    *expand_template("a=f32[4,6,8], b=f32[{b}]", b=("8", "6,8", "4,6,8", "1,6,8", "4,1,8", "4,6,1", "2,3,4", "1", "")),
    "a=f32[0,5], b=f32[5]",
)
BINARY_ERRORS = (
    ("a=f32[2,3], b=f32[2,4]", "do not divide"),
    ("a=f32[3], b=f32[2,3]", "more leading axes"),
    ("a=i32[3], b=f32[3]", "a is i32"),
)


@op(BINARY_SIGNATURE, linear=("a+b",), inplace="a", samples=BINARY_SAMPLES, errors=BINARY_ERRORS, infinite=("a", "b"))
def add(a: Scalar, b: Scalar) -> Scalar:
    """Add `b` to `a` elementwise; `b` is repeated as tiles to the shape of `a`. ggml: ``ADD``.

    Entry i of an axis of `a` is combined with entry ``i mod size`` of the same axis of `b`.
    """
    return a + b


@op(BINARY_SIGNATURE, linear=("a+b",), inplace="a", samples=BINARY_SAMPLES, errors=BINARY_ERRORS, infinite=("a", "b"))
def sub(a: Scalar, b: Scalar) -> Scalar:
    """Subtract `b` from `a` elementwise. `b` is repeated as tiles to the shape of `a`. ggml: ``SUB``."""
    return a - b


@op(BINARY_SIGNATURE, linear=("a", "b"), inplace="a", samples=BINARY_SAMPLES, errors=BINARY_ERRORS)
def mul(a: Scalar, b: Scalar) -> Scalar:
    """Multiply `a` by `b` elementwise; `b` is repeated as tiles to the shape of `a`. ggml: ``MUL``."""
    return a * b


@op(
    BINARY_SIGNATURE,
    linear=("a",),
    inplace="a",
    samples=BINARY_SAMPLES,
    errors=BINARY_ERRORS,
    ranges={"b": LegalRange(0.5, 2.0)},
)
def div(a: Scalar, b: Scalar) -> Scalar:
    """Divide `a` by `b` elementwise; `b` is repeated as tiles to the shape of `a`. ggml: ``DIV``."""
    return a / b


UNARY_SIGNATURE = "x[...] -> [...]"
"""The signature of elementwise ops of one operand."""
UNARY_SAMPLES = expand_template("x={x}[{shape}]", x=("f32", "f16", "bf16"), shape=("7", "3,64", "2,0,4", "2,3,4,5"))
UNARY_ERRORS = (("x=i32[3]", "x is i32"), ("x=q8_0[32]", "x is q8_0"))


@op(
    UNARY_SIGNATURE,
    linear=lambda attrs: () if attrs["bias"] else ("x",),
    inplace="x",
    samples=(
        *("x=f32[3,5], scale=2.5", "x=f32[3,5], scale=-0.5, bias=1.0", "x=f16[4], scale=0.125"),
        *expand_template("x=f32[3,7], scale={scale}", scale=(1.0, 0.0, -0.0)),
    ),
    errors=(("x=i32[3], scale=2.0", "x is i32"), ("x=f32[3]", "scale is missing")),
)
def scale(x: Scalar, *, scale: float, bias: float = 0.0) -> Scalar:
    """Multiply all elements by a number and add another: ``x * scale + bias``. ggml: ``SCALE``.

    The sum is rounded once. A `bias` of 0 is added as -0, so that a zero keeps its sign.
    """
    return scalar.fma(x, scale, scalar.where(scalar.equal(bias, 0.0), -0.0, bias))


@op(
    UNARY_SIGNATURE,
    inplace="x",
    check=lambda **attrs: "min {min} exceeds max {max}".format(**attrs) if attrs["min"] > attrs["max"] else None,
    samples=(
        *expand_template(
            "x={x}[{shape}], min=-0.5, max=0.25", x=("f32", "f16", "bf16"), shape=("7", "3,0,2", "2,3,4,5")
        ),
        "x=f32[3,1], min=1.0, max=1.0",
        *expand_template("x=f32[3,7], min={low}, max={high}", low=(-0.5, -0.0, 0.0), high=(0.0, 0.25)),
        *expand_template("x=f32[3,7], min={low}, max=-0.0", low=(-0.5, -0.0)),
    ),
    errors=(
        ("x=f32[3], min=2.0, max=1.0", "min 2.0 exceeds max 1.0"),
        ("x=f32[3], min=2.0", "max is missing"),
        ("x=i32[3], min=0.0, max=1.0", "x is i32"),
    ),
    infinite=("x",),
)
def clamp(x: Scalar, *, min: float, max: float) -> Scalar:
    """Clamp all elements to the range from `min` to `max`; -0 is less than +0. ggml: ``CLAMP``."""
    return scalar.clip(x, min, max)


def _infer_cast(specs: OperandSpecs, attrs: Attrs) -> Spec:
    assert specs[0] is not None
    dtype = attrs["dtype"]
    if not isinstance(dtype, DType):
        raise SignatureMismatch(f"dtype is {dtype!r}; it must be a DType")
    if dtype.is_quantised and dtype not in STATE_DTYPES:
        allowed = ", ".join(str(d) for d in STATE_DTYPES if d.is_quantised)
        raise SignatureMismatch(f"cannot cast to {dtype}, which only hocket quantize writes; need one of {allowed}")
    return Spec(specs[0].shape, dtype)


def round_to_dtype(x: Array, dtype: DType) -> Array:
    """Round numbers to values of `dtype`.

    A float or quantised dtype gives the rounded numbers as float64. An integer dtype truncates them.
    """
    if dtype.is_quantised:
        return decode_array(encode_array(np.asarray(x, np.float32), dtype), dtype).astype(np.float64)
    if dtype is DType.BF16:
        bits = np.asarray(x, np.float32, order="C").view(np.uint32)  # ascontiguousarray would make rank 0 rank 1
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
        return nearest.view(np.float32).astype(np.float64)
    return x.astype(dtype.storage).astype(np.float64 if dtype.is_float else dtype.storage)


def _choose_cast_signature_key(attrs: Attrs) -> str:
    """Return the key of the signature of a cast: ``blocks`` for a quantised dtype, else ``numbers``.

    With ``blocks``, devices may not share a row, because a shard could end inside a quantisation block.
    """
    dtype = attrs.get("dtype")
    return "blocks" if isinstance(dtype, DType) and dtype.is_quantised else "numbers"


@op(
    {"numbers": "x[...]: any -> [...]", "blocks": "x[..., *c]: any -> [..., c]"},
    signature_key=_choose_cast_signature_key,
    infer=_infer_cast,
    samples=(
        *expand_template(
            "x={x}[3,32], dtype={to}", x=("f32", "f16", "bf16", "q8_0", "i32"), to=("f32", "f16", "bf16", "i32")
        ),
        *expand_template("x=f32[3,256], dtype={to}", to=tuple(str(d) for d in STATE_DTYPES if d.is_quantised)),
    ),
    errors=(
        ("x=f32[256], dtype=iq3_s", "cannot cast to iq3_s"),
        ("x=f32[48], dtype=q8_0", "the last axis must be a multiple"),
        ("x=f32[32], dtype=3", "dtype is 3"),
    ),
    compare="exact",
)
def cast(x: Array, *, dtype: DType) -> Array:
    """Convert the numbers to another dtype, rounded to nearest even. ggml: ``CPY`` to a tensor of that type.

    A quantised dtype has the scales that GGML's CPU backend chooses (`ops.block_quantisers` by the range of a block,
    `ops.super_block_quantisers` by a search).
    """
    return round_to_dtype(x, dtype)


def _copy_element(x: Scalar) -> Scalar:
    return x


def _place_at_start(shapes: Sequence[tuple[int, ...]], attrs: Attrs) -> Sequence[tuple[int, ...]]:
    return [(0,) * len(shapes[0])]


@op(
    "x[...]: any -> [...]",
    element=ScalarLanguageDeclaration(_copy_element, {}, place=_place_at_start),
    linear=("x",),
    samples=("x=f32[3,4]", "x=f16[2,3,4]", "x=i32[5]", "x=f32[0,3]"),
    errors=(("", "operand x is missing"), ("x=f32[2], eps=1.0", "no operand or attribute eps")),
    compare="exact",
    infinite=("x",),
)
def cont(x: Array) -> Array:
    """Copy `x` to contiguous memory. The planner inserts this op where a kernel cannot read a view. ggml: ``CONT``."""
    return np.array(x)
