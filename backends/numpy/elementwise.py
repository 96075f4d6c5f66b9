"""Elementwise kernels: one or a few ufuncs each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from ...graph.dtypes import DType
from ...graph.node import Node
from ...ops.elementwise import rounded
from ..base import Array
from .kernel import Call, Calls, Kernel


def no_scratch(node: Node) -> int:
    return 0


def one_result(node: Node) -> int:
    """Scratch as large as the first result."""
    return node.specs[0].size


def tiles(b: Array, *whole: Array) -> list[Array]:
    """Views of `b` and of the `whole` arrays, which it tiles into, that broadcast against each other."""
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


def unary(ufunc: Callable[..., Any], call: Call) -> Calls:
    return [partial(ufunc, call.operand(0), out=call.out)]


def sigmoid_calls(x: Array, out: Array) -> Calls:
    """``1 / (1 + exp(-x))``; exp overflows to inf for very negative x, which gives the right 0."""
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
    return [partial(np.maximum, call.operand(0), np.float32(0), out=call.out)]


def gelu(call: Call) -> Calls:
    x = call.operand(0)
    inner = call.take(*call.out.shape)
    return [
        partial(np.multiply, x, x, out=inner),
        partial(np.multiply, inner, np.float32(0.044715), out=inner),
        partial(np.add, inner, np.float32(1), out=inner),
        partial(np.multiply, inner, x, out=inner),
        partial(np.multiply, inner, np.float32(math.sqrt(2 / math.pi)), out=inner),
        partial(np.tanh, inner, out=inner),
        partial(np.add, inner, np.float32(1), out=inner),
        partial(np.multiply, inner, x, out=inner),
        partial(np.multiply, inner, np.float32(0.5), out=call.out),
    ]


def scale(call: Call) -> Calls:
    calls: Calls = [partial(np.multiply, call.operand(0), np.float32(call.number("scale")), out=call.out)]
    if call.number("bias"):
        calls.append(partial(np.add, call.out, np.float32(call.number("bias")), out=call.out))
    return calls


def copy(call: Call) -> Calls:
    return [partial(np.copyto, call.out, call.operand(0))]


def cast(call: Call) -> Calls:
    dtype = call.attrs["dtype"]
    assert isinstance(dtype, DType)
    source, out = call.operand(0), call.out
    if dtype is DType.F32 or (source.dtype == out.dtype and dtype.is_integer):
        return [partial(np.copyto, out, source, casting="unsafe")]

    def run() -> None:  # rare, so it may allocate: the reference's own rounding
        out[...] = rounded(source, dtype)

    return [run]


def plain(bind: Callable[[Call], Calls]) -> Kernel:
    return Kernel(bind, no_scratch)


def with_scratch(bind: Callable[[Call], Calls]) -> Kernel:
    return Kernel(bind, one_result)


KERNELS: Mapping[str, Kernel] = {
    "add": plain(partial(binary, np.add)),
    "sub": plain(partial(binary, np.subtract)),
    "mul": plain(partial(binary, np.multiply)),
    "div": plain(partial(binary, np.divide)),
    "tanh": plain(partial(unary, np.tanh)),
    "exp": plain(partial(unary, np.exp)),
    "neg": plain(partial(unary, np.negative)),
    "sigmoid": plain(sigmoid),
    "silu": with_scratch(silu),
    "swiglu": with_scratch(swiglu),
    "softplus": plain(softplus),
    "relu": plain(relu),
    "gelu": with_scratch(gelu),
    "scale": plain(scale),
    "cast": plain(cast),
    "cont": plain(copy),
}
