"""Activations with parameters: xIELU and the gated units with a limit."""

from __future__ import annotations

import numpy as np

from .....ops.declaration.attributes import float_attribute
from ....operands import Bound, float_bits
from ...compiler import kernel, part
from ...simd.vectors import LANES, add, at_least, at_most, div, fma, mul, splat, sub, where_less, zeros
from ...steps import Steps
from ..functions import exp, expm1
from ..packing import share
from ..rows import add_rows, lanes, put, row_words

XIELU = row_words("x y", "positive:f32 negative:f32 beta:f32 eps:f32")
LIMITED = row_words("gate up y", "alpha:f32 limit:f32 offset:f32")


@kernel
def xielu(a, thread, threads):
    """``positive x^2 + beta x`` where x > 0, else ``negative (expm1(min(x, eps)) - x) + beta x``."""
    n, positive, negative = XIELU.columns(a), splat(XIELU.positive(a)), splat(XIELU.negative(a))
    beta, eps = splat(XIELU.beta(a)), splat(XIELU.eps(a))
    first, last = share(XIELU.rows(a), thread, threads)
    for i in range(first, last):
        source, target = XIELU.x(a, i), XIELU.y(a, i)
        for c in range(0, n, LANES):
            x = lanes(source, c, n, 4)
            above, below = mul(positive, mul(x, x)), mul(negative, sub(expm1(at_most(x, eps)), x))
            put(target, c, n, fma(beta, x, where_less(zeros(), x, above, below)))
    return 0


@part
def limited_unit(gate, up, alpha, limit, offset):
    """``g sigmoid(alpha g) (clip(up, -limit, limit) + offset)`` for ``g = min(gate, limit)``."""
    g = at_most(gate, limit)
    activation = div(g, add(splat(1.0), exp(sub(zeros(), mul(alpha, g)))))
    return mul(activation, add(at_most(at_least(up, sub(zeros(), limit)), limit), offset))


@kernel
def gate_with_limit(a, thread, threads):
    """`limited_unit` of each element. An offset of -0 keeps the sign of a zero."""
    n, gate_step, up_step = LIMITED.columns(a), LIMITED.gate_step(a), LIMITED.up_step(a)
    alpha, limit, offset = splat(LIMITED.alpha(a)), splat(LIMITED.limit(a)), splat(LIMITED.offset(a))
    first, last = share(LIMITED.rows(a), thread, threads)
    for i in range(first, last):
        gate, up, y = LIMITED.gate(a, i), LIMITED.up(a, i), LIMITED.y(a, i)
        for c in range(0, n, LANES):
            unit = limited_unit(lanes(gate, c, n, gate_step), lanes(up, c, n, up_step), alpha, limit, offset)
            put(y, c, n, unit)
    return 0


def _bind_xielu(steps: Steps, call: Bound) -> bool:
    beta = float_attribute(call.attrs, "beta")
    negative = beta + float(np.logaddexp(0.0, float_attribute(call.attrs, "alpha_n")))
    positive = float(np.logaddexp(0.0, float_attribute(call.attrs, "alpha_p")))
    numbers = {"positive": positive, "negative": negative, "beta": beta, "eps": float_attribute(call.attrs, "eps")}
    bits = {name: float_bits(value) for name, value in numbers.items()}
    return add_rows(steps, (xielu, XIELU, bits), [call.operand(0)], call.out)


def _bind_limited(steps: Steps, call: Bound, alpha: float, offset: float) -> bool:
    numbers = {"alpha": alpha, "limit": float_attribute(call.attrs, "limit"), "offset": offset}
    bits = {name: float_bits(value) for name, value in numbers.items()}
    return add_rows(steps, (gate_with_limit, LIMITED, bits), [call.operand(0), call.operand(1)], call.out)


def _bind_swiglu_oai(steps: Steps, call: Bound) -> bool:
    return _bind_limited(steps, call, float_attribute(call.attrs, "alpha"), 1.0)


def _bind_swiglu_clamp(steps: Steps, call: Bound) -> bool:
    return _bind_limited(steps, call, 1.0, -0.0)


BINDINGS = {"xielu": _bind_xielu, "swiglu_oai": _bind_swiglu_oai, "swiglu_clamp": _bind_swiglu_clamp}
