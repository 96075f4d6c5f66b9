"""Activation functions of one operand: sigmoid, SiLU, ReLU, GELU and their variants."""

from __future__ import annotations

import math

import numpy as np

from ..declaration.op import Array, op
from ..declaration.samples import LegalRange, expand_template
from .binary import UNARY_ERRORS, UNARY_SAMPLES, UNARY_SIGNATURE
from .unary import erfc


def rectify(x: Array) -> Array:
    """Return the maximum of `x` and 0 elementwise (ReLU); NaN stays NaN, and -0 becomes +0."""
    return np.maximum(x, 0.0) + 0.0  # the sum makes +0 of -0


def logistic(x: Array) -> Array:
    """Compute the logistic function ``1 / (1 + exp(-x))`` without overflow."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, e) / (1.0 + e)


@op(UNARY_SIGNATURE, inplace="x", samples=UNARY_SAMPLES, errors=UNARY_ERRORS, infinite=("x",))
def sigmoid(x: Array) -> Array:
    """Compute the sigmoid function ``1 / (1 + exp(-x))``. ggml: ``UNARY_OP_SIGMOID``."""
    return logistic(x)


@op(UNARY_SIGNATURE, inplace="x", zeros=("x",), samples=UNARY_SAMPLES, errors=UNARY_ERRORS)
def silu(x: Array) -> Array:
    """Compute the sigmoid linear unit (SiLU) ``x * sigmoid(x)``. ggml: ``UNARY_OP_SILU``."""
    return x * logistic(x)


@op(UNARY_SIGNATURE, inplace="x", samples=UNARY_SAMPLES, errors=UNARY_ERRORS, infinite=("x",))
def softplus(x: Array) -> Array:
    """Compute the softplus ``log(1 + exp(x))``, which is `x` itself for large `x`. ggml: ``UNARY_OP_SOFTPLUS``."""
    return np.logaddexp(0.0, x)


@op(UNARY_SIGNATURE, inplace="x", zeros=("x",), samples=UNARY_SAMPLES, errors=UNARY_ERRORS, infinite=("x",))
def tanh(x: Array) -> Array:
    """Compute the hyperbolic tangent. ggml: ``UNARY_OP_TANH``."""
    return np.tanh(x)


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
def relu(x: Array) -> Array:
    """Compute the rectified linear unit (ReLU) ``max(x, 0)``; a zero result is +0. ggml: ``UNARY_OP_RELU``."""
    return rectify(x)


@op(
    UNARY_SIGNATURE,
    inplace="x",
    samples=expand_template(
        "x={x}[{shape}], negative_slope={slope}", x=("f32", "f16"), shape=("7", "2,0,4"), slope=(0.01, 1.5)
    ),
    errors=(("x=i32[3], negative_slope=0.1", "x is i32"), ("x=f32[3]", "negative_slope is missing")),
    is_required=False,
)
def leaky_relu(x: Array, *, negative_slope: float) -> Array:
    """Compute the leaky ReLU: `x` where it is positive, ``negative_slope * x`` elsewhere. ggml: ``LEAKY_RELU``."""
    return np.where(x > 0, x, negative_slope * x)


@op(UNARY_SIGNATURE, inplace="x", samples=UNARY_SAMPLES, errors=UNARY_ERRORS, is_required=False)
def elu(x: Array) -> Array:
    """Compute the exponential linear unit (ELU): `x` where it is positive, ``e ** x - 1`` elsewhere.

    ggml: ``UNARY_OP_ELU``; Clevert et al., 2015.
    """
    return np.where(x > 0, x, np.expm1(np.minimum(x, 1.0)))


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
def xielu(x: Array, *, alpha_n: float, alpha_p: float, beta: float, eps: float) -> Array:
    """Compute the xIELU activation: ``p x^2 + beta x`` where x > 0, else ``n (expm1(min(x, eps)) - x) + beta x``.

    ``p = softplus(alpha_p)`` and ``n = beta + softplus(alpha_n)``. ``ggml_xielu`` has the same parameters and stores
    p and n in the node. ggml: ``UNARY_OP_XIELU``; Huang and Schlag, 2024.
    """
    n, p = beta + float(np.logaddexp(0.0, alpha_n)), float(np.logaddexp(0.0, alpha_p))
    return np.where(x > 0, p * x * x, n * (np.expm1(np.minimum(x, eps)) - x)) + beta * x


@op(UNARY_SIGNATURE, inplace="x", zeros=("x",), flops=lambda **_: 8, samples=UNARY_SAMPLES, errors=UNARY_ERRORS)
def gelu(x: Array) -> Array:
    """Compute the Gaussian error linear unit (GELU) in its tanh approximation.

    ggml: ``UNARY_OP_GELU``; Hendrycks and Gimpel, 2016. The reference computes ``0.5 x (1 + tanh(u))`` as
    ``x sigmoid(2 u)``, which stays exact where tanh(u) is near -1.
    """
    return x * logistic(2.0 * math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))


@op(
    UNARY_SIGNATURE,
    inplace="x",
    zeros=("x",),
    flops=lambda **_: 8,
    samples=UNARY_SAMPLES,
    errors=UNARY_ERRORS,
    is_required=False,
)
def gelu_erf(x: Array) -> Array:
    """Compute the exact Gaussian error linear unit (GELU) ``0.5 x (1 + erf(x / sqrt(2)))``.

    ggml: ``UNARY_OP_GELU_ERF``; Hendrycks and Gimpel, 2016. The reference uses erfc, which stays exact for negative
    `x`.
    """
    return 0.5 * x * erfc(x * -math.sqrt(0.5))


@op(UNARY_SIGNATURE, inplace="x", zeros=("x",), samples=UNARY_SAMPLES, errors=UNARY_ERRORS, is_required=False)
def gelu_quick(x: Array) -> Array:
    """Compute the sigmoid approximation of GELU, ``x * sigmoid(1.702 x)``. ggml: ``UNARY_OP_GELU_QUICK``.

    Hendrycks and Gimpel, 2016.
    """
    return x * logistic(1.702 * x)


@op(
    UNARY_SIGNATURE,
    inplace="x",
    ranges={"x": LegalRange(-5.0, 5.0)},
    samples=UNARY_SAMPLES,
    errors=UNARY_ERRORS,
    is_required=False,
)
def hardsigmoid(x: Array) -> Array:
    """Compute the hard sigmoid: ``(x + 3) / 6``, clamped to the range from 0 to 1. ggml: ``UNARY_OP_HARDSIGMOID``."""
    return np.clip((x + 3.0) / 6.0, 0.0, 1.0)


@op(
    UNARY_SIGNATURE,
    inplace="x",
    ranges={"x": LegalRange(-5.0, 5.0)},
    samples=UNARY_SAMPLES,
    errors=UNARY_ERRORS,
    is_required=False,
)
def hardswish(x: Array) -> Array:
    """Compute the hard swish ``x * hardsigmoid(x)``. ggml: ``UNARY_OP_HARDSWISH``; Howard et al., 2019."""
    return x * np.clip((x + 3.0) / 6.0, 0.0, 1.0)
