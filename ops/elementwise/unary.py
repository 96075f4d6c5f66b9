"""Elementwise ops of one operand: roots, exponentials, trigonometry, rounding."""

from __future__ import annotations

from ..declaration import scalar
from ..declaration.op import op
from ..declaration.samples import LegalRange
from ..declaration.scalar import Scalar
from .binary import UNARY_ERRORS, UNARY_SAMPLES, UNARY_SIGNATURE

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
def neg(x: Scalar) -> Scalar:
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
def abs_(x: Scalar) -> Scalar:
    """Return the absolute value of each element. ggml: ``UNARY_OP_ABS``."""
    return scalar.absolute(x)


@op(
    UNARY_SIGNATURE,
    inplace="x",
    samples=UNARY_SAMPLES,
    errors=UNARY_ERRORS,
    is_required=False,
    compare="exact",
    infinite=("x",),
)
def sgn(x: Scalar) -> Scalar:
    """Return the sign of each element as -1, +0 or 1. ggml: ``UNARY_OP_SGN``."""
    return scalar.where(x > 0.0, 1.0, scalar.where(x < 0.0, -1.0, scalar.absolute(x)))


@op(
    UNARY_SIGNATURE,
    inplace="x",
    samples=UNARY_SAMPLES,
    errors=UNARY_ERRORS,
    is_required=False,
    compare="exact",
    infinite=("x",),
)
def step(x: Scalar) -> Scalar:
    """Return the step function: 1 where ``x > 0``, else 0. ggml: ``UNARY_OP_STEP``."""
    return scalar.where(x > 0.0, 1.0, 0.0)


@op(UNARY_SIGNATURE, inplace="x", zeros=("x",), samples=UNARY_SAMPLES, errors=UNARY_ERRORS, is_required=False)
def sqr(x: Scalar) -> Scalar:
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
def sqrt(x: Scalar) -> Scalar:
    """Compute the square root. ggml: ``SQRT``."""
    return scalar.sqrt(x)


@op(
    UNARY_SIGNATURE,
    inplace="x",
    ranges={"x": LegalRange(0.01, 10.0)},
    samples=UNARY_SAMPLES,
    errors=UNARY_ERRORS,
    is_required=False,
)
def log(x: Scalar) -> Scalar:
    """Compute the natural logarithm. ggml: ``LOG``."""
    return scalar.log(x)


@op(UNARY_SIGNATURE, inplace="x", samples=UNARY_SAMPLES, errors=UNARY_ERRORS, infinite=("x",))
def exp(x: Scalar) -> Scalar:
    """Compute the exponential function ``e ** x``. ggml: ``UNARY_OP_EXP``."""
    return scalar.exp(x)


@op(UNARY_SIGNATURE, inplace="x", samples=UNARY_SAMPLES, errors=UNARY_ERRORS, is_required=False)
def expm1(x: Scalar) -> Scalar:
    """Compute ``e ** x - 1``, exact near 0, too. ggml: ``UNARY_OP_EXPM1``, which subtracts."""
    return scalar.expm1(x)


@op(
    UNARY_SIGNATURE,
    inplace="x",
    ranges={"x": LegalRange(-10.0, 10.0)},
    samples=UNARY_SAMPLES,
    errors=UNARY_ERRORS,
    is_required=False,
)
def sin(x: Scalar) -> Scalar:
    """Compute the sine of `x` in radians. ggml: ``SIN``."""
    return scalar.sin(x)


@op(
    UNARY_SIGNATURE,
    inplace="x",
    ranges={"x": LegalRange(-10.0, 10.0)},
    samples=UNARY_SAMPLES,
    errors=UNARY_ERRORS,
    is_required=False,
)
def cos(x: Scalar) -> Scalar:
    """Compute the cosine of `x` in radians. ggml: ``COS``."""
    return scalar.cos(x)


@op(UNARY_SIGNATURE, inplace="x", zeros=("x",), samples=UNARY_SAMPLES, errors=UNARY_ERRORS, is_required=False)
def erf(x: Scalar) -> Scalar:
    """Compute the error function, ``2 / sqrt(pi)`` times the integral of ``exp(-t^2)`` from 0 to `x`. ISO C, 1999."""
    return scalar.erf(x)


@op(
    UNARY_SIGNATURE,
    inplace="x",
    zeros=("x",),
    ranges={"x": LegalRange(-0.5, 10.0)},
    samples=UNARY_SAMPLES,
    errors=UNARY_ERRORS,
    is_required=False,
)
def log1p(x: Scalar) -> Scalar:
    """Compute the natural logarithm of ``1 + x``, exact near 0. ISO C, 1999."""
    return scalar.log1p(x)


@op(
    UNARY_SIGNATURE,
    inplace="x",
    zeros=("x",),
    ranges={"x": LegalRange(-1.0, 1.0)},
    samples=UNARY_SAMPLES,
    errors=UNARY_ERRORS,
    is_required=False,
)
def tan(x: Scalar) -> Scalar:
    """Compute the tangent of `x` in radians. ISO C, 1999."""
    return scalar.tan(x)


@op(
    UNARY_SIGNATURE,
    inplace="x",
    zeros=("x",),
    ranges={"x": LegalRange(-0.9, 0.9)},
    samples=UNARY_SAMPLES,
    errors=UNARY_ERRORS,
    is_required=False,
)
def arcsin(x: Scalar) -> Scalar:
    """Compute the inverse sine in radians. ISO C, 1999."""
    return scalar.arcsin(x)


@op(
    UNARY_SIGNATURE,
    inplace="x",
    ranges={"x": LegalRange(-0.9, 0.9)},
    samples=UNARY_SAMPLES,
    errors=UNARY_ERRORS,
    is_required=False,
)
def arccos(x: Scalar) -> Scalar:
    """Compute the inverse cosine in radians. ISO C, 1999."""
    return scalar.arccos(x)


@op(UNARY_SIGNATURE, inplace="x", zeros=("x",), samples=UNARY_SAMPLES, errors=UNARY_ERRORS, is_required=False)
def arctan(x: Scalar) -> Scalar:
    """Compute the inverse tangent in radians. ISO C, 1999."""
    return scalar.arctan(x)


@op(
    UNARY_SIGNATURE,
    inplace="x",
    zeros=("x",),
    ranges={"x": LegalRange(-4.0, 4.0)},
    samples=UNARY_SAMPLES,
    errors=UNARY_ERRORS,
    is_required=False,
)
def sinh(x: Scalar) -> Scalar:
    """Compute the hyperbolic sine. ISO C, 1999."""
    return scalar.sinh(x)


@op(
    UNARY_SIGNATURE,
    inplace="x",
    ranges={"x": LegalRange(-4.0, 4.0)},
    samples=UNARY_SAMPLES,
    errors=UNARY_ERRORS,
    is_required=False,
)
def cosh(x: Scalar) -> Scalar:
    """Compute the hyperbolic cosine. ISO C, 1999."""
    return scalar.cosh(x)


@op(UNARY_SIGNATURE, inplace="x", zeros=("x",), samples=UNARY_SAMPLES, errors=UNARY_ERRORS, is_required=False)
def arcsinh(x: Scalar) -> Scalar:
    """Compute the inverse hyperbolic sine. ISO C, 1999."""
    return scalar.arcsinh(x)


@op(
    UNARY_SIGNATURE,
    inplace="x",
    ranges={"x": LegalRange(1.125, 10.0)},
    samples=UNARY_SAMPLES,
    errors=UNARY_ERRORS,
    is_required=False,
)
def arccosh(x: Scalar) -> Scalar:
    """Compute the inverse hyperbolic cosine. ISO C, 1999."""
    return scalar.arccosh(x)


@op(
    UNARY_SIGNATURE,
    inplace="x",
    zeros=("x",),
    ranges={"x": LegalRange(-0.875, 0.875)},
    samples=UNARY_SAMPLES,
    errors=UNARY_ERRORS,
    is_required=False,
)
def arctanh(x: Scalar) -> Scalar:
    """Compute the inverse hyperbolic tangent. ISO C, 1999."""
    return scalar.arctanh(x)


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
def floor(x: Scalar) -> Scalar:
    """Round down to an integer. ggml: ``UNARY_OP_FLOOR``."""
    return scalar.floor(x)


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
def ceil(x: Scalar) -> Scalar:
    """Round up to an integer. ggml: ``UNARY_OP_CEIL``."""
    return scalar.ceil(x)


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
def round_(x: Scalar) -> Scalar:
    """Round to the nearest integer, halves away from zero; a zero keeps the sign of `x`. ggml: ``UNARY_OP_ROUND``.

    In contrast, NumPy rounds halves to even.
    """
    return scalar.round_half_away(x)


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
def trunc(x: Scalar) -> Scalar:
    """Round towards zero to an integer. ggml: ``UNARY_OP_TRUNC``."""
    return scalar.trunc(x)
