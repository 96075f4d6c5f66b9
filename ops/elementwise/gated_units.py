"""Gated linear units: the GLU ops of ggml on two operands, or on one operand that has gate and up halves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ...graph.attrs import Attrs
from ..declaration import scalar
from ..declaration.op import op
from ..declaration.samples import LegalRange, expand_template
from ..declaration.scalar import Scalar

GATED_SIGNATURE = "gate[...], up[...] -> [...]"
"""The signature of gated units of two operands."""
GATED_SAMPLES = (
    *expand_template("gate={x}[{shape}], up={x}[{shape}]", x=("f32", "f16"), shape=("9", "3,64", "2,3,8")),
    "gate=bf16[5,1], up=bf16[5,1]",
    "gate=f32[2,0,4], up=f32[2,0,4]",
)
GATED_ERRORS = (
    ("gate=f32[3,4], up=f32[3,5]", "leading axes"),
    ("gate=f32[3,4]", "operand up is missing"),
    ("gate=i32[4], up=f32[4]", "gate is i32"),
)


@op(
    GATED_SIGNATURE,
    linear=("up",),
    zeros=("gate",),
    inplace="gate",
    flops=lambda **_: 2,
    samples=GATED_SAMPLES,
    errors=GATED_ERRORS,
    is_required=False,
)
def reglu(gate: Scalar, up: Scalar) -> Scalar:
    """Compute the gated unit ``relu(gate) * up``. ggml: ``GLU_OP_REGLU``; Shazeer, GLU variants, 2020."""
    return scalar.larger_of(gate, 0.0) * up


@op(
    GATED_SIGNATURE,
    linear=("up",),
    zeros=("gate",),
    inplace="gate",
    flops=lambda **_: 9,
    samples=GATED_SAMPLES,
    errors=GATED_ERRORS,
)
def geglu(gate: Scalar, up: Scalar) -> Scalar:
    """Compute the gated unit ``gelu(gate) * up``, GELU in its tanh approximation. ggml: ``GLU_OP_GEGLU``.

    Shazeer, GLU variants, 2020.
    """
    return scalar.gelu(gate) * up


@op(
    GATED_SIGNATURE,
    linear=("up",),
    zeros=("gate",),
    inplace="gate",
    flops=lambda **_: 9,
    samples=GATED_SAMPLES,
    errors=GATED_ERRORS,
    is_required=False,
)
def geglu_erf(gate: Scalar, up: Scalar) -> Scalar:
    """Compute the gated unit ``gelu_erf(gate) * up``, with the exact GELU. ggml: ``GLU_OP_GEGLU_ERF``."""
    return gate * scalar.normal_cdf(gate) * up


@op(
    GATED_SIGNATURE,
    linear=("up",),
    zeros=("gate",),
    inplace="gate",
    flops=lambda **_: 5,
    samples=GATED_SAMPLES,
    errors=GATED_ERRORS,
    is_required=False,
)
def geglu_quick(gate: Scalar, up: Scalar) -> Scalar:
    """Compute the gated unit ``gelu_quick(gate) * up``, with the sigmoid GELU. ggml: ``GLU_OP_GEGLU_QUICK``."""
    return gate * scalar.logistic(1.702 * gate) * up


@op(
    GATED_SIGNATURE,
    linear=("up",),
    zeros=("gate",),
    inplace="gate",
    flops=lambda **_: 5,
    samples=GATED_SAMPLES,
    errors=GATED_ERRORS,
)
def swiglu(gate: Scalar, up: Scalar) -> Scalar:
    """Compute the gated unit ``silu(gate) * up``. ggml: ``GLU_OP_SWIGLU``; Shazeer, GLU variants, 2020."""
    return scalar.silu(gate) * up


# Wide enough for clamping to have an effect.
_CLAMPED_RANGES = {"gate": LegalRange(-12.0, 12.0), "up": LegalRange(-12.0, 12.0)}


def _check_limit(limit: float, **_: object) -> str | None:
    return f"limit is {limit}; it must not be negative" if limit < 0 else None


@op(
    GATED_SIGNATURE,
    zeros=("gate",),
    inplace="gate",
    flops=lambda **_: 9,
    ranges=_CLAMPED_RANGES,
    check=_check_limit,
    samples=(*GATED_SAMPLES, "gate=f32[3,5], up=f32[3,5], alpha=0.5, limit=2.0"),
    errors=(*GATED_ERRORS, ("gate=f32[4], up=f32[4], limit=-1.0", "must not be negative")),
)
def swiglu_oai(gate: Scalar, up: Scalar, *, alpha: float = 1.702, limit: float = 7.0) -> Scalar:
    """Compute the clamped SwiGLU of gpt-oss: ``g * sigmoid(alpha g) * (clip(up, -limit, limit) + 1)``.

    ``g = min(gate, limit)``: the gate is clamped from above only. ggml: ``GLU_OP_SWIGLU_OAI``; gpt-oss.
    """
    g = scalar.smaller_of(gate, limit)
    return g / (1.0 + scalar.exp(-(alpha * g))) * (scalar.clip(up, -limit, limit) + 1.0)


@op(
    GATED_SIGNATURE,
    zeros=("gate", "up"),
    inplace="gate",
    flops=lambda **_: 7,
    ranges=_CLAMPED_RANGES,
    check=_check_limit,
    samples=tuple(f"{case}, limit={limit}" for case, limit in zip(GATED_SAMPLES, (10.0, 7.0, 2.5) * 3, strict=False)),
    errors=(
        ("gate=f32[4], up=f32[4]", "limit is missing"),
        ("gate=f32[4], up=f32[5], limit=7.0", "leading axes"),
        ("gate=f32[4], up=f32[4], limit=-1.0", "must not be negative"),
    ),
    is_required=False,
)
def swiglu_clamp(gate: Scalar, up: Scalar, *, limit: float) -> Scalar:
    """Compute the clamped SwiGLU ``silu(min(gate, limit)) * clip(up, -limit, limit)``. ggml: ``GLU_OP_SWIGLU_CLAMP``.

    DeepSeek V4 has this gated unit.
    """
    return scalar.silu(scalar.smaller_of(gate, limit)) * scalar.clip(up, -limit, limit)


GLU_FUNCTIONS: Mapping[str, Callable[..., Scalar]] = MappingProxyType(
    {
        f.name: f.expression.build
        for f in (reglu, geglu, geglu_erf, geglu_quick, swiglu, swiglu_oai, swiglu_clamp)
        if f.expression
    }
)
"""The expression of two operands by kind of `glu`."""

_GLU_PARAMETERS: Mapping[str, tuple[str, ...]] = {"swiglu_oai": ("alpha", "limit"), "swiglu_clamp": ("limit",)}
"""Attributes that a kind reads."""


def _split_halves(operands: Sequence[Any], attrs: Attrs) -> Sequence[Any]:
    """Return the gate and up halves of the last axis."""
    x = operands[0]
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return (second, first) if attrs["swapped"] else (first, second)


@op(
    dict.fromkeys(GLU_FUNCTIONS, "x[..., (2 n)] -> [..., n]"),
    arrange=_split_halves,
    signature_key="kind",
    zeros=("x",),
    flops=lambda n, **_: 9 * n,
    ranges={"x": LegalRange(-12.0, 12.0)},
    check=_check_limit,
    samples=(
        *expand_template(
            'x={x}[3,14], kind="{kind}", swapped={swapped}',
            x=("f32",),
            kind=tuple(GLU_FUNCTIONS),
            swapped=("false", "true"),
        ),
        *expand_template('x={x}[{shape}], kind="geglu"', x=("f16", "bf16"), shape=("2", "2,3,64", "0,4")),
    ),
    errors=(
        ('x=f32[3,7], kind="swiglu"', "no product"),
        ('x=f32[3,8], kind="siglu"', "one of reglu, geglu"),
        ("x=f32[3,8]", "kind is missing"),
    ),
)
def glu(
    gate: Scalar, up: Scalar, *, kind: str, swapped: bool = False, alpha: float = 1.702, limit: float = 7.0
) -> Scalar:
    """Compute the gated unit `kind` of the two halves of the last axis: first the gate, then the up projection.

    With `swapped`, the gate is the second half. ggml: ``GLU`` with one source. Each kind is the op of that name. Only
    swiglu_oai and swiglu_clamp read `alpha` or `limit`.
    """
    values = {"alpha": alpha, "limit": limit}
    return GLU_FUNCTIONS[kind](gate, up, **{name: values[name] for name in _GLU_PARAMETERS.get(kind, ())})
