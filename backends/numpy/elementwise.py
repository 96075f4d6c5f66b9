"""NumPy kernels of elementwise ops: one or a few ufuncs each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from ...graph.dtypes import DType
from ...graph.node import Node
from ...ops.elementwise.binary import round_to_dtype
from ...ops.elementwise.comparisons import COMPARISONS
from ..base import Array
from ..host.bindings import Binding, Calls, HostInstruction, bind_copy, count_result_elements, without_scratch


def count_scratch_per_result_element(factor: int, node: Node) -> int:
    """Return the scratch size of a node: `factor` elements for each element of its first result."""
    return factor * node.specs[0].size


def as_tiling_broadcast_views(tile: Array, *arrays: Array) -> list[Array]:
    """Return views of `tile` and of larger arrays that broadcast together, so that `tile` is repeated as a whole.

    Along an axis, `tile` has size n and the arrays have size m. If n is neither 1 nor m, the axis becomes two axes of
    sizes ``m // n`` and ``n``. All `arrays` have the same shape.
    """
    shape: list[int] = []
    small: list[int] = []
    padded = (1,) * (arrays[0].ndim - tile.ndim) + tile.shape
    for n, m in zip(padded, arrays[0].shape, strict=True):
        split = n not in (1, m)  # index modulo n: an axis of m // n tiles, and one within the tile
        shape += [m // n, n] if split else [m]
        small += [1, n] if split else [n]
    return [tile.reshape(small, copy=False), *(w.reshape(shape, copy=False) for w in arrays)]


def bind_binary(ufunc: Callable[..., Any], call: HostInstruction) -> Calls:
    b, a, out = as_tiling_broadcast_views(call.operand(1), call.operand(0), call.out)
    return [partial(ufunc, a, b, out=out)]


SIGN_BIT, MAGNITUDE_BITS = np.int32(-(2**31)), np.int32(2**31 - 1)


def bind_maximum(call: HostInstruction) -> Calls:
    """Bind the elementwise maximum, where -0 is less than +0: the maximum of two zeros is -0 only if both are -0."""
    b, a, out, both = (x.view(np.int32) for x in _take_min_max_views(call))
    return [
        partial(np.bitwise_and, a, b, out=both),
        partial(np.bitwise_or, both, MAGNITUDE_BITS, out=both),
        partial(np.maximum, a.view(np.float32), b.view(np.float32), out=out.view(np.float32)),
        partial(np.bitwise_and, out, both, out=out),
    ]


def bind_minimum(call: HostInstruction) -> Calls:
    """Bind the elementwise minimum, where -0 is less than +0: the minimum of two zeros is -0 if either is -0."""
    b, a, out, either = (x.view(np.int32) for x in _take_min_max_views(call))
    return [
        partial(np.bitwise_or, a, b, out=either),
        partial(np.bitwise_and, either, SIGN_BIT, out=either),
        partial(np.minimum, a.view(np.float32), b.view(np.float32), out=out.view(np.float32)),
        partial(np.bitwise_or, out, either, out=out),
    ]


def _take_min_max_views(call: HostInstruction) -> list[Array]:
    """Return views of `b`, `a`, the result and scratch memory, for the minimum or maximum of two operands.

    The views broadcast together; `b` may be smaller than `a` and is then repeated.
    """
    return as_tiling_broadcast_views(call.operand(1), call.operand(0), call.out, call.take_scratch(*call.out.shape))


def bind_compare(call: HostInstruction) -> Calls:
    kind = call.attrs["kind"]
    assert isinstance(kind, str)
    return bind_binary(COMPARISONS[kind], call)


def bind_where(call: HostInstruction) -> Calls:
    """Bind the elementwise selection: copy `b`, then copy `a` where the condition is not 0."""
    truth, a, b, out = (call.operand(0), call.operand(1), call.operand(2), call.out)
    condition = np.empty(truth.shape, bool)
    first, wide, chosen = as_tiling_broadcast_views(a, out, condition)
    second, plain_out = as_tiling_broadcast_views(b, out)
    return [
        partial(np.not_equal, truth, 0, out=condition),
        partial(np.copyto, plain_out, second),
        partial(np.copyto, wide, first, where=chosen),
    ]


def bind_unary(ufunc: Callable[..., Any], call: HostInstruction) -> Calls:
    return [partial(ufunc, call.operand(0), out=call.out)]


def make_sigmoid_calls(x: Array, out: Array) -> Calls:
    """Make the calls for the sigmoid ``1 / (1 + exp(-x))``.

    For very negative x, ``exp(-x)`` overflows to inf, and the result is 0 as it should be.
    """
    return [
        partial(np.negative, x, out=out),
        partial(np.exp, out, out=out),
        partial(np.add, out, np.float32(1), out=out),
        partial(np.reciprocal, out, out=out),
    ]


def bind_sigmoid(call: HostInstruction) -> Calls:
    return make_sigmoid_calls(call.operand(0), call.out)


def bind_silu(call: HostInstruction) -> Calls:
    gate = call.take_scratch(*call.out.shape)
    return [*make_sigmoid_calls(call.operand(0), gate), partial(np.multiply, call.operand(0), gate, out=call.out)]


def bind_swiglu(call: HostInstruction) -> Calls:
    gate, up = call.operand(0), call.operand(1)
    share = call.take_scratch(*call.out.shape)
    return [
        *make_sigmoid_calls(gate, share),
        partial(np.multiply, gate, share, out=share),
        partial(np.multiply, share, up, out=call.out),
    ]


def bind_softplus(call: HostInstruction) -> Calls:
    return [partial(np.logaddexp, np.float32(0), call.operand(0), out=call.out)]


def bind_relu(call: HostInstruction) -> Calls:
    """Bind relu to its arrays. Zero is added, because `np.maximum` may return -0, and the sum is +0."""
    zero, out = np.float32(0), call.out
    return [partial(np.maximum, call.operand(0), zero, out=out), partial(np.add, out, zero, out=out)]


def make_gelu_calls(x: Array, inner: Array, out: Array) -> Calls:
    """Make the calls for the tanh approximation of GELU, ``x / (1 + exp(-2 u))``, with scratch `inner`.

    ``u`` is ``sqrt(2 / pi) (x + 0.044715 x**3)``. `out` is written last, so it may be `x`.
    """
    return [
        partial(np.multiply, x, x, out=inner),
        partial(np.multiply, inner, np.float32(0.044715), out=inner),
        partial(np.add, inner, np.float32(1), out=inner),
        partial(np.multiply, inner, x, out=inner),
        partial(np.multiply, inner, np.float32(-2 * math.sqrt(2 / math.pi)), out=inner),
        partial(np.exp, inner, out=inner),
        partial(np.add, inner, np.float32(1), out=inner),
        partial(np.divide, x, inner, out=out),
    ]


def bind_gelu(call: HostInstruction) -> Calls:
    return make_gelu_calls(call.operand(0), call.take_scratch(*call.out.shape), call.out)


# P of ``erfc(a / sqrt(2)) / 2 = exp(-a^2 / 2) t P(t)``, t = 1 / (1 + a / 4), for a from 0 to 14; highest power first.
# Fitted to least maximal relative error, 8e-9 (Lawson iteration on a least-squares fit).
ERFC_COEFFICIENTS = (
    *(0.01657963006850917, -0.06279202607554774, 0.05165195425433108, 0.028436508124032596, 0.01271112855494487),
    *(0.08665736755642187, 0.07199921700146168, 0.09551577141465409, 0.09949254919760411, 0.09974790397723036),
)


def make_gelu_erf_calls(call: HostInstruction, out: Array) -> Calls:
    """Make the calls for the exact GELU, which uses the error function instead of the tanh approximation.

    The result is ``x h`` if x < 0, else ``x (1 - h)``, with ``h = erfc(|x| / sqrt(2)) / 2``. `out` is written last. The
    calls take scratch of three times the size of the result.
    """
    x = call.operand(0)
    size, t, tail = (call.take_scratch(*call.out.shape) for _ in range(3))
    calls: Calls = [
        partial(np.absolute, x, out=size),
        partial(np.minimum, size, np.float32(20), out=size),  # where the tail is 0; an infinity would become NaN
        partial(np.multiply, size, np.float32(0.25), out=t),
        partial(np.add, t, np.float32(1), out=t),
        partial(np.reciprocal, t, out=t),
        partial(np.multiply, t, np.float32(ERFC_COEFFICIENTS[0]), out=tail),
    ]
    for coefficient in ERFC_COEFFICIENTS[1:]:
        calls += [partial(np.add, tail, np.float32(coefficient), out=tail), partial(np.multiply, tail, t, out=tail)]
    return [
        *calls,
        partial(np.square, size, out=size),
        partial(np.multiply, size, np.float32(-0.5), out=size),
        partial(np.exp, size, out=size),
        partial(np.multiply, tail, size, out=tail),
        partial(np.greater_equal, x, np.float32(0), out=size),
        partial(np.subtract, size, tail, out=tail),
        partial(np.absolute, tail, out=tail),
        partial(np.multiply, x, tail, out=out),
    ]


def bind_gelu_erf(call: HostInstruction) -> Calls:
    return make_gelu_erf_calls(call, call.out)


def bind_geglu(call: HostInstruction) -> Calls:
    inner = call.take_scratch(*call.out.shape)
    return [*make_gelu_calls(call.operand(0), inner, inner), partial(np.multiply, inner, call.operand(1), out=call.out)]


def bind_geglu_erf(call: HostInstruction) -> Calls:
    inner = call.take_scratch(*call.out.shape)
    return [*make_gelu_erf_calls(call, inner), partial(np.multiply, inner, call.operand(1), out=call.out)]


def bind_clamped_swiglu(shift: float, call: HostInstruction) -> Calls:
    """Bind SwiGLU with clamped operands: ``g / (1 + exp(-alpha g)) * (clip(up) + shift)``.

    `g` is the gate, limited only from above. `up` is limited from both sides.
    """
    gate, up = call.operand(0), call.operand(1)
    limit = np.float32(call.number_attribute("limit"))
    alpha = call.number_attribute("alpha") if "alpha" in call.attrs else 1.0
    g, share = call.take_scratch(*call.out.shape), call.take_scratch(*call.out.shape)
    return [
        partial(np.minimum, gate, limit, out=g),
        partial(np.multiply, g, np.float32(-alpha), out=share),
        partial(np.exp, share, out=share),
        partial(np.add, share, np.float32(1), out=share),
        partial(np.divide, g, share, out=g),
        partial(np.clip, up, -limit, limit, out=share),
        *([partial(np.add, share, np.float32(shift), out=share)] if shift else []),
        partial(np.multiply, g, share, out=call.out),
    ]


def bind_clamp(call: HostInstruction) -> Calls:
    low, high = np.float32(call.number_attribute("min")), np.float32(call.number_attribute("max"))
    calls: Calls = [partial(np.clip, call.operand(0), low, high, out=call.out)]
    if low == 0 and not np.signbit(low):
        calls.append(partial(np.absolute, call.out, out=call.out))
    if high == 0 and np.signbit(high):
        calls.append(partial(np.copysign, call.out, high, out=call.out))
    return calls


def bind_step(call: HostInstruction) -> Calls:
    return [partial(np.greater, call.operand(0), np.float32(0), out=call.out)]  # of NaN it is 0


def bind_scale(call: HostInstruction) -> Calls:
    calls: Calls = [partial(np.multiply, call.operand(0), np.float32(call.number_attribute("scale")), out=call.out)]
    if call.number_attribute("bias"):
        calls.append(partial(np.add, call.out, np.float32(call.number_attribute("bias")), out=call.out))
    return calls


def bind_cast(call: HostInstruction) -> Calls:
    dtype = call.attrs["dtype"]
    assert isinstance(dtype, DType)
    source, out = call.operand(0), call.out
    if dtype is DType.F32 or (source.dtype == out.dtype and dtype.is_integer):
        return [partial(np.copyto, out, source, casting="unsafe")]

    def run() -> None:  # the rounding of the reference; rarely used, so it may allocate
        out[...] = round_to_dtype(source, dtype)

    return [run]


def with_result_sized_scratch(bind: Callable[[HostInstruction], Calls]) -> Binding:
    return Binding(bind, count_result_elements)


UFUNCS: Mapping[str, Callable[..., Any]] = {
    "neg": np.negative,
    "abs": np.absolute,
    "sgn": np.sign,
    "sqr": np.square,
    "sqrt": np.sqrt,
    "log": np.log,
    "exp": np.exp,
    "expm1": np.expm1,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    **{name: getattr(np, name) for name in ("log1p", "tan", "sinh", "cosh")},
    **{name: getattr(np, name) for name in ("arcsin", "arccos", "arctan", "arcsinh", "arccosh", "arctanh")},
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
}
"""Ops of one operand that are one NumPy ufunc."""

KERNELS: Mapping[str, Binding] = {
    "add": without_scratch(partial(bind_binary, np.add)),
    "sub": without_scratch(partial(bind_binary, np.subtract)),
    "mul": without_scratch(partial(bind_binary, np.multiply)),
    "div": without_scratch(partial(bind_binary, np.divide)),
    "maximum": with_result_sized_scratch(bind_maximum),
    "minimum": with_result_sized_scratch(bind_minimum),
    "power": without_scratch(partial(bind_binary, np.power)),
    "compare": without_scratch(bind_compare),
    "where": without_scratch(bind_where),
    **{name: without_scratch(partial(bind_unary, ufunc)) for name, ufunc in UFUNCS.items()},
    "step": without_scratch(bind_step),
    "clamp": without_scratch(bind_clamp),
    "sigmoid": without_scratch(bind_sigmoid),
    "silu": with_result_sized_scratch(bind_silu),
    "swiglu": with_result_sized_scratch(bind_swiglu),
    "softplus": without_scratch(bind_softplus),
    "relu": without_scratch(bind_relu),
    "gelu": with_result_sized_scratch(bind_gelu),
    "geglu": with_result_sized_scratch(bind_geglu),
    "gelu_erf": Binding(bind_gelu_erf, partial(count_scratch_per_result_element, 3)),
    "geglu_erf": Binding(bind_geglu_erf, partial(count_scratch_per_result_element, 4)),
    "swiglu_oai": Binding(partial(bind_clamped_swiglu, 1.0), partial(count_scratch_per_result_element, 2)),
    "swiglu_clamp": Binding(partial(bind_clamped_swiglu, 0.0), partial(count_scratch_per_result_element, 2)),
    "scale": without_scratch(bind_scale),
    "cast": without_scratch(bind_cast),
    "cont": without_scratch(bind_copy),
}
