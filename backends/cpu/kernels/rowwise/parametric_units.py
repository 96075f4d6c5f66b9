"""Activations with parameters: xIELU and the gated units with a limit."""

from __future__ import annotations

import numpy as np

from .....ops.declaration.attributes import float_attribute
from ....fusion.operands import BoundInstruction, float32_bits
from ...compilation.compiler import kernel, subroutine
from ...simd.vectors import LANES, add, clamp_max, clamp_min, div, fma, mul, splat, sub, where_less, zeros
from ...steps.partition import compute_thread_range
from ...steps.step_table import StepTableBuilder
from ..vector.elementwise import add_row_step_after_dense_copies, load_lanes, make_row_args, store_lanes
from ..vector.vector_functions import exp, expm1

XIELU = make_row_args("x y", "positive:f32 negative:f32 beta:f32 eps:f32")
LIMITED = make_row_args("gate up y", "alpha:f32 limit:f32 offset:f32")


@kernel
def xielu(a, thread, threads):
    """Compute xIELU: ``positive x^2 + beta x`` where x > 0, else ``negative (expm1(min(x, eps)) - x) + beta x``."""
    n, positive, negative = XIELU.columns(a), splat(XIELU.positive(a)), splat(XIELU.negative(a))
    beta, eps = splat(XIELU.beta(a)), splat(XIELU.eps(a))
    first, last = compute_thread_range(XIELU.rows(a), thread, threads)
    for i in range(first, last):
        source, target = XIELU.x(a, i), XIELU.y(a, i)
        for c in range(0, n, LANES):
            x = load_lanes(source, c, n, 4)
            above, below = mul(positive, mul(x, x)), mul(negative, sub(expm1(clamp_max(x, eps)), x))
            store_lanes(target, c, n, fma(beta, x, where_less(zeros(), x, above, below)))
    return 0


@subroutine
def limited_swiglu(gate, up, alpha, limit, offset):
    """Return SwiGLU with limited operands: ``g sigmoid(alpha g) (clip(up, -limit, limit) + offset)``.

    The limited gate is ``g = min(gate, limit)``.
    """
    g = clamp_max(gate, limit)
    activation = div(g, add(splat(1.0), exp(sub(zeros(), mul(alpha, g)))))
    return mul(activation, add(clamp_max(clamp_min(up, sub(zeros(), limit)), limit), offset))


@kernel
def apply_limited_swiglu(a, thread, threads):
    """Compute `limited_swiglu` of each element of the gate and up rows.

    The argument `offset` is added to `up`. It is -0 for units without offset: adding +0 would change -0 to +0.
    """
    n, gate_step, up_step = LIMITED.columns(a), LIMITED.gate_step(a), LIMITED.up_step(a)
    alpha, limit, offset = splat(LIMITED.alpha(a)), splat(LIMITED.limit(a)), splat(LIMITED.offset(a))
    first, last = compute_thread_range(LIMITED.rows(a), thread, threads)
    for i in range(first, last):
        gate, up, y = LIMITED.gate(a, i), LIMITED.up(a, i), LIMITED.y(a, i)
        for c in range(0, n, LANES):
            unit = limited_swiglu(
                load_lanes(gate, c, n, gate_step), load_lanes(up, c, n, up_step), alpha, limit, offset
            )
            store_lanes(y, c, n, unit)
    return 0


def _bind_xielu(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    beta = float_attribute(call.attrs, "beta")
    negative = beta + float(np.logaddexp(0.0, float_attribute(call.attrs, "alpha_n")))
    positive = float(np.logaddexp(0.0, float_attribute(call.attrs, "alpha_p")))
    numbers = {"positive": positive, "negative": negative, "beta": beta, "eps": float_attribute(call.attrs, "eps")}
    bits = {name: float32_bits(value) for name, value in numbers.items()}
    return add_row_step_after_dense_copies(steps, (xielu, XIELU, bits), [call.operand(0)], call.out)


def _bind_limited(steps: StepTableBuilder, call: BoundInstruction, alpha: float, offset: float) -> bool:
    numbers = {"alpha": alpha, "limit": float_attribute(call.attrs, "limit"), "offset": offset}
    bits = {name: float32_bits(value) for name, value in numbers.items()}
    return add_row_step_after_dense_copies(
        steps, (apply_limited_swiglu, LIMITED, bits), [call.operand(0), call.operand(1)], call.out
    )


def _bind_swiglu_oai(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    return _bind_limited(steps, call, float_attribute(call.attrs, "alpha"), 1.0)


def _bind_swiglu_clamp(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    return _bind_limited(steps, call, 1.0, -0.0)


BINDINGS = {"xielu": _bind_xielu, "swiglu_oai": _bind_swiglu_oai, "swiglu_clamp": _bind_swiglu_clamp}
