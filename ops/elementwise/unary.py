"""Elementwise ops of one operand: roots, exponentials, trigonometry, rounding."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ..declaration.op import Array, op
from ..declaration.samples import LegalRange
from .binary import UNARY_ERRORS, UNARY_SAMPLES, UNARY_SIGNATURE


def vectorise_scalar(function: Callable[[float], float]) -> Callable[[Array], Array]:
    """Return a function that applies a function of floats, such as `math.erf`, to each element of an array.

    It has the precision of libm, and NumPy lacks some of these functions.
    """
    apply = np.frompyfunc(function, 1, 1)

    def apply_to_array(x: Array) -> Array:
        return np.asarray(apply(x), np.float64)

    return apply_to_array


error_function = vectorise_scalar(math.erf)
erfc = vectorise_scalar(math.erfc)


# ----------------------------------------------------------------------------------------------------- arithmetic


@op(
    UNARY_SIGNATURE,
    linear=("x",),
    inplace="x",
    samples=UNARY_SAMPLES,
    errors=UNARY_ERRORS,
    compare="exact",
    infinite=("x",),
)
def neg(x: Array) -> Array:
    """Return ``-x``. ggml: ``UNARY_OP_NEG``."""
    return -x


@op(
    UNARY_SIGNATURE,
    inplace="x",
    samples=UNARY_SAMPLES,
    errors=UNARY_ERRORS,
    is_required=False,
    compare="exact",
    infinite=("x",),
)
def abs_(x: Array) -> Array:
    """Return the absolute value of each element. ggml: ``UNARY_OP_ABS``."""
    return np.abs(x)


@op(
    UNARY_SIGNATURE,
    inplace="x",
    samples=UNARY_SAMPLES,
    errors=UNARY_ERRORS,
    is_required=False,
    compare="exact",
    infinite=("x",),
)
def sgn(x: Array) -> Array:
    """Return the sign of each element as -1, +0 or 1. ggml: ``UNARY_OP_SGN``."""
    return np.sign(x)


@op(
    UNARY_SIGNATURE,
    inplace="x",
    samples=UNARY_SAMPLES,
    errors=UNARY_ERRORS,
    is_required=False,
    compare="exact",
    infinite=("x",),
)
def step(x: Array) -> Array:
    """Return the step function: 1 where ``x > 0``, else 0. ggml: ``UNARY_OP_STEP``."""
    return np.where(x > 0, 1.0, 0.0)


@op(UNARY_SIGNATURE, inplace="x", zeros=("x",), samples=UNARY_SAMPLES, errors=UNARY_ERRORS, is_required=False)
def sqr(x: Array) -> Array:
    """Square each element. ggml: ``SQR``."""
    return x * x


@op(
    UNARY_SIGNATURE,
    inplace="x",
    ranges={"x": LegalRange(0.0, 4.0)},
    samples=UNARY_SAMPLES,
    errors=UNARY_ERRORS,
    is_required=False,
)
def sqrt(x: Array) -> Array:
    """Compute the square root. ggml: ``SQRT``."""
    return np.sqrt(x)


@op(
    UNARY_SIGNATURE,
    inplace="x",
    ranges={"x": LegalRange(0.01, 10.0)},
    samples=UNARY_SAMPLES,
    errors=UNARY_ERRORS,
    is_required=False,
)
def log(x: Array) -> Array:
    """Compute the natural logarithm. ggml: ``LOG``."""
    return np.log(x)


@op(UNARY_SIGNATURE, inplace="x", samples=UNARY_SAMPLES, errors=UNARY_ERRORS, infinite=("x",))
def exp(x: Array) -> Array:
    """Compute the exponential function ``e ** x``. ggml: ``UNARY_OP_EXP``."""
    return np.exp(x)


@op(UNARY_SIGNATURE, inplace="x", samples=UNARY_SAMPLES, errors=UNARY_ERRORS, is_required=False)
def expm1(x: Array) -> Array:
    """Compute ``e ** x - 1``, exact near 0, too. ggml: ``UNARY_OP_EXPM1``, which subtracts."""
    return np.expm1(x)


@op(
    UNARY_SIGNATURE,
    inplace="x",
    ranges={"x": LegalRange(-10.0, 10.0)},
    samples=UNARY_SAMPLES,
    errors=UNARY_ERRORS,
    is_required=False,
)
def sin(x: Array) -> Array:
    """Compute the sine of `x` in radians. ggml: ``SIN``."""
    return np.sin(x)


@op(
    UNARY_SIGNATURE,
    inplace="x",
    ranges={"x": LegalRange(-10.0, 10.0)},
    samples=UNARY_SAMPLES,
    errors=UNARY_ERRORS,
    is_required=False,
)
def cos(x: Array) -> Array:
    """Compute the cosine of `x` in radians. ggml: ``COS``."""
    return np.cos(x)


@op(UNARY_SIGNATURE, inplace="x", zeros=("x",), samples=UNARY_SAMPLES, errors=UNARY_ERRORS, is_required=False)
def erf(x: Array) -> Array:
    """Compute the error function, ``2 / sqrt(pi)`` times the integral of ``exp(-t^2)`` from 0 to `x`. ISO C, 1999."""
    return error_function(x)


@op(
    UNARY_SIGNATURE,
    inplace="x",
    zeros=("x",),
    ranges={"x": LegalRange(-0.5, 10.0)},
    samples=UNARY_SAMPLES,
    errors=UNARY_ERRORS,
    is_required=False,
)
def log1p(x: Array) -> Array:
    """Compute the natural logarithm of ``1 + x``, exact near 0. ISO C, 1999."""
    return np.log1p(x)


@op(
    UNARY_SIGNATURE,
    inplace="x",
    zeros=("x",),
    ranges={"x": LegalRange(-1.0, 1.0)},
    samples=UNARY_SAMPLES,
    errors=UNARY_ERRORS,
    is_required=False,
)
def tan(x: Array) -> Array:
    """Compute the tangent of `x` in radians. ISO C, 1999."""
    return np.tan(x)


@op(
    UNARY_SIGNATURE,
    inplace="x",
    zeros=("x",),
    ranges={"x": LegalRange(-0.9, 0.9)},
    samples=UNARY_SAMPLES,
    errors=UNARY_ERRORS,
    is_required=False,
)
def arcsin(x: Array) -> Array:
    """Compute the inverse sine in radians. ISO C, 1999."""
    return np.arcsin(x)


@op(
    UNARY_SIGNATURE,
    inplace="x",
    ranges={"x": LegalRange(-0.9, 0.9)},
    samples=UNARY_SAMPLES,
    errors=UNARY_ERRORS,
    is_required=False,
)
def arccos(x: Array) -> Array:
    """Compute the inverse cosine in radians. ISO C, 1999."""
    return np.arccos(x)


@op(UNARY_SIGNATURE, inplace="x", zeros=("x",), samples=UNARY_SAMPLES, errors=UNARY_ERRORS, is_required=False)
def arctan(x: Array) -> Array:
    """Compute the inverse tangent in radians. ISO C, 1999."""
    return np.arctan(x)


@op(
    UNARY_SIGNATURE,
    inplace="x",
    zeros=("x",),
    ranges={"x": LegalRange(-4.0, 4.0)},
    samples=UNARY_SAMPLES,
    errors=UNARY_ERRORS,
    is_required=False,
)
def sinh(x: Array) -> Array:
    """Compute the hyperbolic sine. ISO C, 1999."""
    return np.sinh(x)


@op(
    UNARY_SIGNATURE,
    inplace="x",
    ranges={"x": LegalRange(-4.0, 4.0)},
    samples=UNARY_SAMPLES,
    errors=UNARY_ERRORS,
    is_required=False,
)
def cosh(x: Array) -> Array:
    """Compute the hyperbolic cosine. ISO C, 1999."""
    return np.cosh(x)


@op(UNARY_SIGNATURE, inplace="x", zeros=("x",), samples=UNARY_SAMPLES, errors=UNARY_ERRORS, is_required=False)
def arcsinh(x: Array) -> Array:
    """Compute the inverse hyperbolic sine. ISO C, 1999."""
    return np.arcsinh(x)


@op(
    UNARY_SIGNATURE,
    inplace="x",
    ranges={"x": LegalRange(1.125, 10.0)},
    samples=UNARY_SAMPLES,
    errors=UNARY_ERRORS,
    is_required=False,
)
def arccosh(x: Array) -> Array:
    """Compute the inverse hyperbolic cosine. ISO C, 1999."""
    return np.arccosh(x)


@op(
    UNARY_SIGNATURE,
    inplace="x",
    zeros=("x",),
    ranges={"x": LegalRange(-0.875, 0.875)},
    samples=UNARY_SAMPLES,
    errors=UNARY_ERRORS,
    is_required=False,
)
def arctanh(x: Array) -> Array:
    """Compute the inverse hyperbolic tangent. ISO C, 1999."""
    return np.arctanh(x)


# ------------------------------------------------------------------------------------------------------- rounding

# Entries of any sign, some of them halves: f16 and bf16 have few digits in this range.
_WIDE = {"x": LegalRange(-500.0, 500.0)}


@op(
    UNARY_SIGNATURE,
    inplace="x",
    ranges=_WIDE,
    samples=UNARY_SAMPLES,
    errors=UNARY_ERRORS,
    is_required=False,
    compare="exact",
    infinite=("x",),
)
def floor(x: Array) -> Array:
    """Round down to an integer. ggml: ``UNARY_OP_FLOOR``."""
    return np.floor(x)


@op(
    UNARY_SIGNATURE,
    inplace="x",
    ranges=_WIDE,
    samples=UNARY_SAMPLES,
    errors=UNARY_ERRORS,
    is_required=False,
    compare="exact",
    infinite=("x",),
)
def ceil(x: Array) -> Array:
    """Round up to an integer. ggml: ``UNARY_OP_CEIL``."""
    return np.ceil(x)


@op(
    UNARY_SIGNATURE,
    inplace="x",
    ranges=_WIDE,
    samples=UNARY_SAMPLES,
    errors=UNARY_ERRORS,
    is_required=False,
    compare="exact",
    infinite=("x",),
)
def round_(x: Array) -> Array:
    """Round to the nearest integer, halves away from zero; a zero keeps the sign of `x`. ggml: ``UNARY_OP_ROUND``.

    In contrast, NumPy rounds halves to even.
    """
    size = np.abs(x)
    whole = np.trunc(size)
    return np.copysign(whole + (size - whole >= 0.5), x)


@op(
    UNARY_SIGNATURE,
    inplace="x",
    ranges=_WIDE,
    samples=UNARY_SAMPLES,
    errors=UNARY_ERRORS,
    is_required=False,
    compare="exact",
    infinite=("x",),
)
def trunc(x: Array) -> Array:
    """Round towards zero to an integer. ggml: ``UNARY_OP_TRUNC``."""
    return np.trunc(x)
