"""Elementwise kernels: one or a few ufuncs each."""

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
from ..calls import Binding, Call, Calls, copy, one_result, plain


def results(count: int, node: Node) -> int:
    """Return the elements of `count` times the first result, as scratch."""
    return count * node.specs[0].size


def tiles(b: Array, *whole: Array) -> list[Array]:
    """Return views of `b` and of the `whole` arrays that broadcast against each other; `b` repeats within `whole`."""
    shape: list[int] = []
    small: list[int] = []
    padded = (1,) * (whole[0].ndim - b.ndim) + b.shape
    for n, m in zip(padded, whole[0].shape, strict=True):
        split = n not in (1, m)  # index modulo n: an axis of m // n tiles, and one within the tile
        shape += [m // n, n] if split else [m]
        small += [1, n] if split else [n]
    return [b.reshape(small, copy=False), *(w.reshape(shape, copy=False) for w in whole)]


def binary(ufunc: Callable[..., Any], call: Call) -> Calls:
    b, a, out = tiles(call.operand(1), call.operand(0), call.out)
    return [partial(ufunc, a, b, out=out)]


SIGN, OTHER_BITS = np.int32(-(2**31)), np.int32(2**31 - 1)


def bind_maximum(call: Call) -> Calls:
    """Bind the maximum; a result is negative or -0 only if both operands have a sign."""
    b, a, out, both = (x.view(np.int32) for x in _choice_operands(call))
    return [
        partial(np.bitwise_and, a, b, out=both),
        partial(np.bitwise_or, both, OTHER_BITS, out=both),
        partial(np.maximum, a.view(np.float32), b.view(np.float32), out=out.view(np.float32)),
        partial(np.bitwise_and, out, both, out=out),
    ]


def bind_minimum(call: Call) -> Calls:
    """Bind the minimum; a result is negative or -0 if one of the operands has a sign."""
    b, a, out, either = (x.view(np.int32) for x in _choice_operands(call))
    return [
        partial(np.bitwise_or, a, b, out=either),
        partial(np.bitwise_and, either, SIGN, out=either),
        partial(np.minimum, a.view(np.float32), b.view(np.float32), out=out.view(np.float32)),
        partial(np.bitwise_or, out, either, out=out),
    ]


def _choice_operands(call: Call) -> list[Array]:
    """Return `b`, `a`, the result and scratch, as `as_broadcast_views` splits them."""
    return tiles(call.operand(1), call.operand(0), call.out, call.take(*call.out.shape))


def compare(call: Call) -> Calls:
    kind = call.attrs["kind"]
    assert isinstance(kind, str)
    return binary(COMPARISONS[kind], call)


def where(call: Call) -> Calls:
    """Bind the choice: copy `b`, then `a` where the condition holds."""
    truth, a, b, out = (call.operand(0), call.operand(1), call.operand(2), call.out)
    wanted = np.empty(truth.shape, bool)
    first, wide, chosen = tiles(a, out, wanted)
    second, plain_out = tiles(b, out)
    return [
        partial(np.not_equal, truth, 0, out=wanted),
        partial(np.copyto, plain_out, second),
        partial(np.copyto, wide, first, where=chosen),
    ]


def unary(ufunc: Callable[..., Any], call: Call) -> Calls:
    return [partial(ufunc, call.operand(0), out=call.out)]


def sigmoid_calls(x: Array, out: Array) -> Calls:
    """Return calls for ``1 / (1 + exp(-x))``; for very negative x, exp overflows to inf, which gives the right 0."""
    return [
        partial(np.negative, x, out=out),
        partial(np.exp, out, out=out),
        partial(np.add, out, np.float32(1), out=out),
        partial(np.reciprocal, out, out=out),
    ]


def sigmoid(call: Call) -> Calls:
    return sigmoid_calls(call.operand(0), call.out)


def silu(call: Call) -> Calls:
    gate = call.take(*call.out.shape)
    return [*sigmoid_calls(call.operand(0), gate), partial(np.multiply, call.operand(0), gate, out=call.out)]


def swiglu(call: Call) -> Calls:
    gate, up = call.operand(0), call.operand(1)
    share = call.take(*call.out.shape)
    return [
        *sigmoid_calls(gate, share),
        partial(np.multiply, gate, share, out=share),
        partial(np.multiply, share, up, out=call.out),
    ]


def softplus(call: Call) -> Calls:
    return [partial(np.logaddexp, np.float32(0), call.operand(0), out=call.out)]


def relu(call: Call) -> Calls:
    """Bind relu; the addition of zero turns -0, which `np.maximum` may return, into +0."""
    zero, out = np.float32(0), call.out
    return [partial(np.maximum, call.operand(0), zero, out=out), partial(np.add, out, zero, out=out)]


def gelu_calls(x: Array, inner: Array, out: Array) -> Calls:
    """Return calls for ``x / (1 + exp(-2 u))`` with scratch `inner`; `out` is written last, so it may be `x`."""
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


def gelu(call: Call) -> Calls:
    return gelu_calls(call.operand(0), call.take(*call.out.shape), call.out)


# P of ``erfc(a / sqrt(2)) / 2 = exp(-a^2 / 2) t P(t)``, t = 1 / (1 + a / 4), for a from 0 to 14; highest power first.
# Fitted to least maximal relative error, 8e-9 (Lawson iteration on a least-squares fit).
TAIL = (
    *(0.01657963006850917, -0.06279202607554774, 0.05165195425433108, 0.028436508124032596, 0.01271112855494487),
    *(0.08665736755642187, 0.07199921700146168, 0.09551577141465409, 0.09949254919760411, 0.09974790397723036),
)


def gelu_erf_calls(call: Call, out: Array) -> Calls:
    """Return calls for ``x h`` if x < 0, else ``x (1 - h)``, with ``h = erfc(|x| / sqrt(2)) / 2``.

    `out` is written last. The calls take three results of scratch.
    """
    x = call.operand(0)
    size, t, tail = (call.take(*call.out.shape) for _ in range(3))
    calls: Calls = [
        partial(np.absolute, x, out=size),
        partial(np.minimum, size, np.float32(20), out=size),  # where the tail is 0; an infinity would become NaN
        partial(np.multiply, size, np.float32(0.25), out=t),
        partial(np.add, t, np.float32(1), out=t),
        partial(np.reciprocal, t, out=t),
        partial(np.multiply, t, np.float32(TAIL[0]), out=tail),
    ]
    for coefficient in TAIL[1:]:
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


def gelu_erf(call: Call) -> Calls:
    return gelu_erf_calls(call, call.out)


def geglu(call: Call) -> Calls:
    inner = call.take(*call.out.shape)
    return [*gelu_calls(call.operand(0), inner, inner), partial(np.multiply, inner, call.operand(1), out=call.out)]


def geglu_erf(call: Call) -> Calls:
    inner = call.take(*call.out.shape)
    return [*gelu_erf_calls(call, inner), partial(np.multiply, inner, call.operand(1), out=call.out)]


def clamped_swiglu(shift: float, call: Call) -> Calls:
    """Bind ``g / (1 + exp(-alpha g)) * (clip(up) + shift)``; g is the gate, clamped from above."""
    gate, up = call.operand(0), call.operand(1)
    limit = np.float32(call.number("limit"))
    alpha = call.number("alpha") if "alpha" in call.attrs else 1.0
    g, share = call.take(*call.out.shape), call.take(*call.out.shape)
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


def clamp(call: Call) -> Calls:
    low, high = np.float32(call.number("min")), np.float32(call.number("max"))
    calls: Calls = [partial(np.clip, call.operand(0), low, high, out=call.out)]
    if low == 0 and not np.signbit(low):
        calls.append(partial(np.absolute, call.out, out=call.out))
    if high == 0 and np.signbit(high):
        calls.append(partial(np.copysign, call.out, high, out=call.out))
    return calls


def step(call: Call) -> Calls:
    return [partial(np.greater, call.operand(0), np.float32(0), out=call.out)]  # of NaN it is 0


def scale(call: Call) -> Calls:
    calls: Calls = [partial(np.multiply, call.operand(0), np.float32(call.number("scale")), out=call.out)]
    if call.number("bias"):
        calls.append(partial(np.add, call.out, np.float32(call.number("bias")), out=call.out))
    return calls


def cast(call: Call) -> Calls:
    dtype = call.attrs["dtype"]
    assert isinstance(dtype, DType)
    source, out = call.operand(0), call.out
    if dtype is DType.F32 or (source.dtype == out.dtype and dtype.is_integer):
        return [partial(np.copyto, out, source, casting="unsafe")]

    def run() -> None:  # the rounding of the reference; rarely used, so it may allocate
        out[...] = round_to_dtype(source, dtype)

    return [run]


def with_scratch(bind: Callable[[Call], Calls]) -> Binding:
    return Binding(bind, one_result)


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
    "add": plain(partial(binary, np.add)),
    "sub": plain(partial(binary, np.subtract)),
    "mul": plain(partial(binary, np.multiply)),
    "div": plain(partial(binary, np.divide)),
    "maximum": with_scratch(bind_maximum),
    "minimum": with_scratch(bind_minimum),
    "power": plain(partial(binary, np.power)),
    "compare": plain(compare),
    "where": plain(where),
    **{name: plain(partial(unary, ufunc)) for name, ufunc in UFUNCS.items()},
    "step": plain(step),
    "clamp": plain(clamp),
    "sigmoid": plain(sigmoid),
    "silu": with_scratch(silu),
    "swiglu": with_scratch(swiglu),
    "softplus": plain(softplus),
    "relu": plain(relu),
    "gelu": with_scratch(gelu),
    "geglu": with_scratch(geglu),
    "gelu_erf": Binding(gelu_erf, partial(results, 3)),
    "geglu_erf": Binding(geglu_erf, partial(results, 4)),
    "swiglu_oai": Binding(partial(clamped_swiglu, 1.0), partial(results, 2)),
    "swiglu_clamp": Binding(partial(clamped_swiglu, 0.0), partial(results, 2)),
    "scale": plain(scale),
    "cast": plain(cast),
    "cont": plain(copy),
}
