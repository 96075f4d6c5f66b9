"""Gated linear units: the GLU ops of ggml on two operands, or on one operand that has gate and up halves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from ..declaration.op import Array, op
from ..declaration.samples import LegalRange, expand_template
from .activations import gelu, gelu_erf, gelu_quick, logistic, rectify

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
def reglu(gate: Array, up: Array) -> Array:
    """Compute the gated unit ``relu(gate) * up``. ggml: ``GLU_OP_REGLU``; Shazeer, GLU variants, 2020."""
    return rectify(gate) * up


@op(
    GATED_SIGNATURE,
    linear=("up",),
    zeros=("gate",),
    inplace="gate",
    flops=lambda **_: 9,
    samples=GATED_SAMPLES,
    errors=GATED_ERRORS,
)
def geglu(gate: Array, up: Array) -> Array:
    """Compute the gated unit ``gelu(gate) * up``, GELU in its tanh approximation. ggml: ``GLU_OP_GEGLU``.

    Shazeer, GLU variants, 2020.
    """
    return np.asarray(gelu.reference(gate) * up)


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
def geglu_erf(gate: Array, up: Array) -> Array:
    """Compute the gated unit ``gelu_erf(gate) * up``, with the exact GELU. ggml: ``GLU_OP_GEGLU_ERF``."""
    return np.asarray(gelu_erf.reference(gate) * up)


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
def geglu_quick(gate: Array, up: Array) -> Array:
    """Compute the gated unit ``gelu_quick(gate) * up``, with the sigmoid GELU. ggml: ``GLU_OP_GEGLU_QUICK``."""
    return np.asarray(gelu_quick.reference(gate) * up)


@op(
    GATED_SIGNATURE,
    linear=("up",),
    zeros=("gate",),
    inplace="gate",
    flops=lambda **_: 5,
    samples=GATED_SAMPLES,
    errors=GATED_ERRORS,
)
def swiglu(gate: Array, up: Array) -> Array:
    """Compute the gated unit ``silu(gate) * up``. ggml: ``GLU_OP_SWIGLU``; Shazeer, GLU variants, 2020."""
    return gate * logistic(gate) * up


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
def swiglu_oai(gate: Array, up: Array, *, alpha: float = 1.702, limit: float = 7.0) -> Array:
    """Compute the clamped SwiGLU of gpt-oss: ``g * sigmoid(alpha g) * (clip(up, -limit, limit) + 1)``.

    ``g = min(gate, limit)``: the gate is clamped from above only. ggml: ``GLU_OP_SWIGLU_OAI``; gpt-oss.
    """
    g = np.minimum(gate, limit)
    return g * logistic(alpha * g) * (np.clip(up, -limit, limit) + 1.0)


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
def swiglu_clamp(gate: Array, up: Array, *, limit: float) -> Array:
    """Compute the clamped SwiGLU ``silu(min(gate, limit)) * clip(up, -limit, limit)``. ggml: ``GLU_OP_SWIGLU_CLAMP``.

    DeepSeek V4 has this gated unit.
    """
    g = np.minimum(gate, limit)
    return g * logistic(g) * np.clip(up, -limit, limit)


GLU_FUNCTIONS: Mapping[str, Callable[..., Array]] = MappingProxyType(
    {f.name: f.reference for f in (reglu, geglu, geglu_erf, geglu_quick, swiglu, swiglu_oai, swiglu_clamp)}
)
"""The reference function on two operands by kind of `glu`."""

_GLU_PARAMETERS: Mapping[str, tuple[str, ...]] = {"swiglu_oai": ("alpha", "limit"), "swiglu_clamp": ("limit",)}
"""Attributes that a kind reads."""


@op(
    dict.fromkeys(GLU_FUNCTIONS, "x[..., (2 n)] -> [..., n]"),
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
def glu(x: Array, *, kind: str, swapped: bool = False, alpha: float = 1.702, limit: float = 7.0) -> Array:
    """Compute the gated unit `kind` of the two halves of the last axis: first the gate, then the up projection.

    With `swapped`, the gate is the second half. ggml: ``GLU`` with one source. Each kind is the op of that name. Only
    swiglu_oai and swiglu_clamp read `alpha` or `limit`.
    """
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    pair = (second, first) if swapped else (first, second)
    values = {"alpha": alpha, "limit": limit}
    return GLU_FUNCTIONS[kind](*pair, **{name: values[name] for name in _GLU_PARAMETERS.get(kind, ())})
