"""Functions of 16 elements, as kernels over rows and others apply them; by name."""

from __future__ import annotations

import numpy as np

from ..compiler import Part, part
from ..simd.vectors import (
    Intrinsic,
    absolute,
    add,
    div,
    fma,
    halve,
    maximum,
    minimum,
    mul,
    power_of_two,
    round_to_int,
    splat,
    square_root,
    sub,
    sub_int,
    to_float,
    where_less,
    zeros,
)

ONE, TWO = np.float32(1), np.float32(2)


@part
def exp(x):
    """2**n times a polynomial of degree 6 on [-ln 2 / 2, ln 2 / 2]; relative error below 2e-7, inf and 0 past the
    range.

    The power is applied in two halves, each of which is a normal number; NaN passes both comparisons.
    """
    held = where_less(x, splat(-104.0), splat(-104.0), where_less(splat(90.0), x, splat(90.0), x))
    n = round_to_int(mul(held, splat(1.4426950408889634)))
    r = fma(to_float(n), splat(-0.693359375), held)
    r = fma(to_float(n), splat(2.12194440e-4), r)
    p = fma(r, splat(1.9875691500e-4), splat(1.3981999507e-3))
    p = fma(p, r, splat(8.3334519073e-3))
    p = fma(p, r, splat(4.1665795894e-2))
    p = fma(p, r, splat(1.6666665459e-1))
    p = fma(p, r, splat(5.0000001201e-1))
    p = add(fma(p, mul(r, r), r), splat(1.0))
    half = halve(n)
    return mul(mul(p, power_of_two(half)), power_of_two(sub_int(n, half)))


@part
def sigmoid(x):
    return div(splat(1.0), add(splat(1.0), exp(sub(zeros(), x))))


@part
def silu(x):
    return div(x, add(splat(1.0), exp(sub(zeros(), x))))


@part
def relu(x):
    return maximum(x, zeros())


@part
def log1p(x):
    """The logarithm of ``1 + x`` for x in [0, 1]: 2 artanh(x / (2 + x)), seven terms; error below 3e-8."""
    z = div(x, add(x, splat(TWO)))
    y = mul(z, z)
    p = fma(y, splat(1 / 13), splat(1 / 11))
    p = fma(p, y, splat(1 / 9))
    p = fma(p, y, splat(1 / 7))
    p = fma(p, y, splat(1 / 5))
    p = fma(p, y, splat(1 / 3))
    p = fma(p, y, splat(ONE))
    return mul(add(z, z), p)


@part
def softplus(x):
    return add(maximum(x, zeros()), log1p(exp(sub(zeros(), absolute(x)))))


@part
def tanh(x):
    """``1 - 2 / (1 + exp(2 x))``, and x itself where that would lose its digits."""
    large = sub(splat(ONE), div(splat(TWO), add(splat(ONE), exp(add(x, x)))))
    y = mul(x, x)
    p = fma(y, splat(62 / 2835), splat(-17 / 315))
    p = fma(p, y, splat(2 / 15))
    p = fma(p, y, splat(-1 / 3))
    small = fma(mul(p, y), x, x)
    return where_less(absolute(x), splat(0.25), small, large)


@part
def gelu(x):
    """``x sigmoid(2 u)`` with ``u = sqrt(2 / pi) (x + 0.044715 x^3)``."""
    u = mul(splat(1.5957691216057308), fma(mul(mul(x, x), x), splat(0.044715), x))
    return mul(x, sigmoid(u))


@part
def gelu_quick(x):
    return mul(x, sigmoid(mul(splat(1.702), x)))


@part
def copy(x):
    return x


@part
def neg(x):
    return sub(zeros(), x)


@part
def sqr(x):
    return mul(x, x)


@part
def swiglu(gate, up):
    return mul(silu(gate), up)


@part
def geglu(gate, up):
    return mul(gelu(gate), up)


@part
def geglu_quick(gate, up):
    return mul(gelu_quick(gate), up)


@part
def reglu(gate, up):
    return mul(relu(gate), up)


UNARY: dict[str, Part | Intrinsic] = {
    "copy": copy,
    "exp": exp,
    "sigmoid": sigmoid,
    "silu": silu,
    "relu": relu,
    "neg": neg,
    "sqr": sqr,
    "sqrt": square_root,
    "abs": absolute,
    "softplus": softplus,
    "tanh": tanh,
    "gelu": gelu,
    "gelu_quick": gelu_quick,
}
GATED: dict[str, Part | Intrinsic] = {
    "swiglu": swiglu,
    "reglu": reglu,
    "geglu": geglu,
    "geglu_quick": geglu_quick,
}
BINARY: dict[str, Part | Intrinsic] = {
    "add": add,
    "sub": sub,
    "mul": mul,
    "div": div,
    **GATED,
}


@part
def affine(x, a, b):
    return fma(x, splat(a), splat(b))


@part
def clamp(x, low, high):
    return minimum(maximum(x, splat(low)), splat(high))
