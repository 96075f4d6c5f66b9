"""Activation functions of one operand: sigmoid, SiLU, ReLU, GELU and their variants."""

from __future__ import annotations

from ..declaration import scalar
from ..declaration.op import op
from ..declaration.samples import LegalRange, expand_template
from ..declaration.scalar import Scalar
from .binary import UNARY_ERRORS, UNARY_SAMPLES, UNARY_SIGNATURE


@op(UNARY_SIGNATURE, inplace="x", samples=UNARY_SAMPLES, errors=UNARY_ERRORS, infinite=("x",))
def sigmoid(x: Scalar) -> Scalar:
    """Compute the sigmoid function ``1 / (1 + exp(-x))``. ggml: ``UNARY_OP_SIGMOID``."""
    return scalar.logistic(x)


@op(UNARY_SIGNATURE, inplace="x", zeros=("x",), samples=UNARY_SAMPLES, errors=UNARY_ERRORS)
def silu(x: Scalar) -> Scalar:
    """Compute the sigmoid linear unit (SiLU) ``x * sigmoid(x)``. ggml: ``UNARY_OP_SILU``."""
    return scalar.silu(x)


@op(UNARY_SIGNATURE, inplace="x", samples=UNARY_SAMPLES, errors=UNARY_ERRORS, infinite=("x",))
def softplus(x: Scalar) -> Scalar:
    """Compute the softplus ``log(1 + exp(x))``, which is `x` itself for large `x`. ggml: ``UNARY_OP_SOFTPLUS``."""
    return scalar.softplus(x)


@op(UNARY_SIGNATURE, inplace="x", zeros=("x",), samples=UNARY_SAMPLES, errors=UNARY_ERRORS, infinite=("x",))
def tanh(x: Scalar) -> Scalar:
    """Compute the hyperbolic tangent. ggml: ``UNARY_OP_TANH``."""
    return scalar.tanh(x)


@op(
    UNARY_SIGNATURE,
    inplace="x",
    zeros=("x",),
    samples=UNARY_SAMPLES,
    errors=UNARY_ERRORS,
    is_required=False,
    compare="exact",
    infinite=("x",),
)
def relu(x: Scalar) -> Scalar:
    """Compute the rectified linear unit (ReLU) ``max(x, 0)``; a zero result is +0. ggml: ``UNARY_OP_RELU``."""
    return scalar.larger_of(x, 0.0)


@op(
    UNARY_SIGNATURE,
    inplace="x",
    samples=expand_template(
        "x={x}[{shape}], negative_slope={slope}", x=("f32", "f16"), shape=("7", "2,0,4"), slope=(0.01, 1.5)
    ),
    errors=(("x=i32[3], negative_slope=0.1", "x is i32"), ("x=f32[3]", "negative_slope is missing")),
    is_required=False,
)
def leaky_relu(x: Scalar, *, negative_slope: float) -> Scalar:
    """Compute the leaky ReLU: `x` where it is positive, ``negative_slope * x`` elsewhere. ggml: ``LEAKY_RELU``."""
    return scalar.where(x > 0.0, x, negative_slope * x)


@op(UNARY_SIGNATURE, inplace="x", samples=UNARY_SAMPLES, errors=UNARY_ERRORS, is_required=False)
def elu(x: Scalar) -> Scalar:
    """Compute the exponential linear unit (ELU): `x` where it is positive, ``e ** x - 1`` elsewhere.

    ggml: ``UNARY_OP_ELU``; Clevert et al., 2015.
    """
    return scalar.where(x > 0.0, x, scalar.expm1(x))


@op(
    UNARY_SIGNATURE,
    inplace="x",
    flops=lambda **_: 8,
    samples=(
        *expand_template(
            "x={x}[{shape}], alpha_n=4.0, alpha_p=20.0, beta=0.5, eps=1e-07", x=("f32", "f16"), shape=("10", "5,1,3")
        ),
        "x=f32[2,0], alpha_n=0.8, alpha_p=0.8, beta=0.5, eps=-1e-06",
    ),
    errors=(
        ("x=f32[3]", "alpha_n is missing"),
        ("x=i32[3], alpha_n=0.8, alpha_p=0.8, beta=0.5, eps=-1e-06", "x is i32"),
    ),
    is_required=False,
)
def xielu(x: Scalar, *, alpha_n: float, alpha_p: float, beta: float, eps: float) -> Scalar:
    """Compute the xIELU activation: ``p x^2 + beta x`` where x > 0, else ``n (expm1(min(x, eps)) - x) + beta x``.

    ``p = softplus(alpha_p)`` and ``n = beta + softplus(alpha_n)``. ``ggml_xielu`` has the same parameters and stores
    p and n in the node. ggml: ``UNARY_OP_XIELU``; Huang and Schlag, 2024.
    """
    negative, positive = beta + scalar.softplus(alpha_n), scalar.softplus(alpha_p)
    curve = scalar.where(x > 0.0, positive * (x * x), negative * (scalar.expm1(scalar.smaller_of(x, eps)) - x))
    return scalar.fma(beta, x, curve)


@op(UNARY_SIGNATURE, inplace="x", zeros=("x",), flops=lambda **_: 8, samples=UNARY_SAMPLES, errors=UNARY_ERRORS)
def gelu(x: Scalar) -> Scalar:
    """Compute the Gaussian error linear unit (GELU) in its tanh approximation.

    ggml: ``UNARY_OP_GELU``; Hendrycks and Gimpel, 2016. The expression computes ``0.5 x (1 + tanh(u))`` as
    ``x sigmoid(2 u)``, which stays exact where tanh(u) is near -1.
    """
    return scalar.gelu(x)


@op(
    UNARY_SIGNATURE,
    inplace="x",
    zeros=("x",),
    flops=lambda **_: 8,
    samples=UNARY_SAMPLES,
    errors=UNARY_ERRORS,
    is_required=False,
)
def gelu_erf(x: Scalar) -> Scalar:
    """Compute the exact Gaussian error linear unit (GELU) ``0.5 x (1 + erf(x / sqrt(2)))``.

    ggml: ``UNARY_OP_GELU_ERF``; Hendrycks and Gimpel, 2016. `normal_cdf` stays exact for negative `x`.
    """
    return x * scalar.normal_cdf(x)


@op(UNARY_SIGNATURE, inplace="x", zeros=("x",), samples=UNARY_SAMPLES, errors=UNARY_ERRORS, is_required=False)
def gelu_quick(x: Scalar) -> Scalar:
    """Compute the sigmoid approximation of GELU, ``x * sigmoid(1.702 x)``. ggml: ``UNARY_OP_GELU_QUICK``.

    Hendrycks and Gimpel, 2016.
    """
    return x * scalar.logistic(1.702 * x)


@op(
    UNARY_SIGNATURE,
    inplace="x",
    ranges={"x": LegalRange(-5.0, 5.0)},
    samples=UNARY_SAMPLES,
    errors=UNARY_ERRORS,
    is_required=False,
)
def hardsigmoid(x: Scalar) -> Scalar:
    """Compute the hard sigmoid: ``(x + 3) / 6``, clamped to the range from 0 to 1. ggml: ``UNARY_OP_HARDSIGMOID``."""
    return scalar.clip((x + 3.0) / 6.0, 0.0, 1.0)


@op(
    UNARY_SIGNATURE,
    inplace="x",
    ranges={"x": LegalRange(-5.0, 5.0)},
    samples=UNARY_SAMPLES,
    errors=UNARY_ERRORS,
    is_required=False,
)
def hardswish(x: Scalar) -> Scalar:
    """Compute the hard swish ``x * hardsigmoid(x)``. ggml: ``UNARY_OP_HARDSWISH``; Howard et al., 2019."""
    return x * scalar.clip((x + 3.0) / 6.0, 0.0, 1.0)
