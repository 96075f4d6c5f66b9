"""Transcendental functions of 16 lanes."""

from __future__ import annotations

import numpy as np

from ...compilation.compiler import subroutine
from ...simd.vectors import (
    absolute,
    add,
    add_int,
    and_int,
    bits_to_float,
    clamp_min,
    div,
    float_to_bits,
    fma,
    halve_ints,
    mul,
    negative,
    power_of_two,
    round_to_int,
    shift_right_signed,
    splat,
    splat_int,
    square_root,
    sub,
    sub_int,
    to_float,
    where_less,
    where_nonzero,
    with_sign,
    zeros,
)

FLOAT_ONE, FLOAT_TWO, FLOAT_HALF = np.float32(1), np.float32(2), np.float32(0.5)
INFINITY = np.float32(np.inf)
MIN_NORMAL = np.finfo(np.float32).tiny


@subroutine
def exp(x):
    """Return ``exp(x)``: 2**n times a polynomial of degree 6 on [-ln 2 / 2, ln 2 / 2]; relative error below 2e-7.

    Results are inf and 0 past the range, and NaN for NaN. The power is applied in two halves. Both halves are normal
    numbers.
    """
    clamped = where_less(x, splat(-104.0), splat(-104.0), where_less(splat(90.0), x, splat(90.0), x))
    n = round_to_int(mul(clamped, splat(1.4426950408889634)))
    r = fma(to_float(n), splat(-0.693359375), clamped)
    r = fma(to_float(n), splat(2.12194440e-4), r)
    p = fma(r, splat(1.9875691500e-4), splat(1.3981999507e-3))
    p = fma(p, r, splat(8.3334519073e-3))
    p = fma(p, r, splat(4.1665795894e-2))
    p = fma(p, r, splat(1.6666665459e-1))
    p = fma(p, r, splat(5.0000001201e-1))
    p = add(fma(p, mul(r, r), r), splat(1.0))
    half = halve_ints(n)
    return mul(mul(p, power_of_two(half)), power_of_two(sub_int(n, half)))


@subroutine
def expm1(x):
    """Return ``exp(x) - 1``; near 0 it is ``x`` times a polynomial. Relative error below 2e-7."""
    p = fma(x, splat(2.48242376e-5), splat(1.99618859e-4))
    p = fma(p, x, splat(1.38891055e-3))
    p = fma(p, x, splat(8.33318298e-3))
    p = fma(p, x, splat(4.16666637e-2))
    p = fma(p, x, splat(1.66666671e-1))
    p = fma(p, x, splat(FLOAT_HALF))
    polynomial = mul(x, fma(p, x, splat(FLOAT_ONE)))
    return where_less(absolute(x), splat(FLOAT_HALF), polynomial, sub(exp(x), splat(FLOAT_ONE)))


@subroutine
def log(x):
    """Return ``log(x)`` as ``n ln 2 + 2 artanh((m - 1) / (m + 1))`` with ``x = 2^n m`` and m around 1.

    The relative error is below 2e-7.
    """
    small = where_less(x, splat(MIN_NORMAL), mul(x, splat(8388608.0)), x)
    bits = sub_int(float_to_bits(small), splat_int(0x3F3504F3))  # the bits of sqrt(1 / 2)
    n = to_float(shift_right_signed(bits, splat_int(23)))
    m = bits_to_float(add_int(and_int(bits, splat_int(0x7FFFFF)), splat_int(0x3F3504F3)))
    s = div(sub(m, splat(FLOAT_ONE)), add(m, splat(FLOAT_ONE)))
    y = mul(s, s)
    p = fma(y, splat(0.29925195), splat(0.39974819))
    p = fma(p, y, splat(0.66666816))
    p = fma(p, mul(y, s), add(s, s))
    n = sub(n, where_less(x, splat(MIN_NORMAL), splat(23.0), zeros()))
    finite = add(fma(n, splat(2.12194440e-4 * -1), p), mul(n, splat(0.693359375)))
    known = where_less(x, splat(INFINITY), finite, x)
    return where_less(zeros(), x, known, log_of_nonpositive(x))


@subroutine
def log_of_nonpositive(x):
    """Return the logarithm of numbers that are not positive: -inf for 0, NaN for negative numbers and NaN."""
    return where_nonzero(x, square_root(sub(splat(-FLOAT_ONE), absolute(x))), splat(-INFINITY))


@subroutine
def log1p(x):
    """Return ``log(1 + x)``, corrected by the rounding error of ``1 + x``."""
    whole = add(splat(FLOAT_ONE), x)
    lost = div(sub(x, sub(whole, splat(FLOAT_ONE))), whole)
    known = add(log(whole), where_less(absolute(lost), splat(INFINITY), lost, zeros()))
    return with_sign(where_less(x, splat(INFINITY), known, log(x)), x)


@subroutine
def add_log1p_unit_interval(total, x):
    """Return ``total + log(1 + x)`` for x in [0, 1]: 2 artanh(x / (2 + x)), seven terms; error below 3e-8."""
    z = div(x, add(x, splat(FLOAT_TWO)))
    y = mul(z, z)
    p = fma(y, splat(1 / 13), splat(1 / 11))
    p = fma(p, y, splat(1 / 9))
    p = fma(p, y, splat(1 / 7))
    p = fma(p, y, splat(1 / 5))
    p = fma(p, y, splat(1 / 3))
    p = fma(p, y, splat(FLOAT_ONE))
    return fma(add(z, z), p, total)


@subroutine
def softplus(x):
    """Return ``log(1 + exp(x))`` as ``max(x, 0) + log(1 + exp(-|x|))``."""
    return add_log1p_unit_interval(clamp_min(x, zeros()), exp(sub(zeros(), absolute(x))))


@subroutine
def tanh(x):
    """Return ``tanh(x)`` as ``1 - 2 / (1 + exp(2 x))``; a polynomial for small x, where that formula is inexact."""
    large = sub(splat(FLOAT_ONE), div(splat(FLOAT_TWO), add(splat(FLOAT_ONE), exp(add(x, x)))))
    y = mul(x, x)
    p = fma(y, splat(62 / 2835), splat(-17 / 315))
    p = fma(p, y, splat(2 / 15))
    p = fma(p, y, splat(-1 / 3))
    small = mul(x, fma(p, y, splat(FLOAT_ONE)))
    return where_less(absolute(x), splat(0.25), small, large)


@subroutine
def compute_erfc_factors(x):
    """Return two factors of ``erfc(x)`` for x >= 0: a polynomial in ``1 / (1 + x / 2)``, and ``exp(-x^2)``.

    The relative error of their product is 3e-7.
    """
    t = div(splat(FLOAT_ONE), fma(x, splat(FLOAT_HALF), splat(FLOAT_ONE)))
    p = fma(t, splat(-0.06020521), splat(0.28990432))
    p = fma(p, t, splat(-0.49774992))
    p = fma(p, t, splat(0.28953269))
    p = fma(p, t, splat(-0.03407368))
    p = fma(p, t, splat(0.20563396))
    p = fma(p, t, splat(0.24241343))
    p = fma(p, t, splat(0.28246245))
    p = fma(p, t, splat(0.28208189))
    return mul(p, t), exp(sub(zeros(), mul(x, x)))


@subroutine
def erf(x):
    """Return ``erf(x)``: an odd polynomial near 0, else ``1 - erfc(|x|)`` with the sign of x."""
    y = mul(x, x)
    p = fma(y, splat(7.84725915e-5), splat(-8.00818933e-4))
    p = fma(p, y, splat(5.18809889e-3))
    p = fma(p, y, splat(-2.68536911e-2))
    p = fma(p, y, splat(1.12835822e-1))
    p = fma(p, y, splat(-3.76126256e-1))
    p = fma(p, y, splat(1.12837917))
    polynomial, decay = compute_erfc_factors(absolute(x))
    far = with_sign(fma(negative(polynomial), decay, splat(FLOAT_ONE)), x)
    return where_less(absolute(x), splat(FLOAT_ONE), mul(p, x), far)


@subroutine
def normal_cdf(x):
    """Return ``erfc(-x / sqrt(2)) / 2``, which stays exact for negative x."""
    polynomial, decay = compute_erfc_factors(mul(absolute(x), splat(0.7071067811865476)))
    half = mul(splat(FLOAT_HALF), mul(polynomial, decay))
    return where_less(x, zeros(), half, sub(splat(FLOAT_ONE), half))
