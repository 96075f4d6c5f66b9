"""Arithmetic entry by entry: broadcasting both ways, numbers among the operands, integers and truth values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeGuard

import numpy as np

from ... import ops
from ...graph import DType, Value
from .shapes import expand
from .tensor import Number, Operand, Tensor, cast, lifted, literal, promoted, tensor

Pair = Callable[[Value, Value], Value]


def _paired(op: Pair, a: Tensor, b: Tensor, *, either: bool = False, truth: bool = False) -> Tensor:
    """An op of which the second operand tiles into the first; operands of `either` order may change places."""
    shape = np.broadcast_shapes(a.shape, b.shape)
    if either and a.shape != shape and b.shape == shape:
        a, b = b, a
    a = expand(a, shape)
    if a.is_wide and b.shape != shape and math.prod(b.shape) != 1:
        b = expand(b, shape)
    other = ops.reshape(b.value, shape=()) if a.is_wide and math.prod(b.shape) == 1 else b.value
    return tensor(op(a.value, other), shape, truth)


def _both(a: Operand, b: Operand) -> tuple[Tensor, Tensor]:
    """Two operands, of which one at least is a tensor, in one type."""
    like = a if isinstance(a, Tensor) else b
    assert isinstance(like, Tensor)
    first, second = promoted(lifted(a, like), lifted(b, like))
    return first, second


def _plain(x: Operand) -> TypeGuard[float]:
    """Whether a number can be an attribute."""
    return not isinstance(x, Tensor) and math.isfinite(x)


def is_real(x: Operand) -> TypeGuard[Tensor]:
    """Whether it is, or takes part as, a tensor of floats."""
    return isinstance(x, Tensor) and not x.is_integer and not x.truth


def scaled(x: Tensor, scale: float, bias: float = 0.0) -> Tensor:
    """``x * scale + bias`` for floats."""
    if (scale, bias) == (1.0, 0.0):
        return x
    return Tensor(ops.scale(x.value, scale=float(scale), bias=float(bias)), x.shape)


def real(x: Tensor) -> Tensor:
    """As floats."""
    return x if is_real(x) else cast(x, DType.F32)


def _integers(kind: str, a: Operand, b: Operand) -> Tensor:
    first, second = _both(a, b)
    if first.truth:
        first, second = cast(first, DType.I64), cast(second, DType.I64)
    return _paired(lambda x, y: ops.calculate(x, y, kind=kind), first, second, either=kind in _EITHER)


_EITHER = frozenset(("add", "mul", "max", "min", "and", "or", "xor"))


def _whole(a: Operand, b: Operand) -> bool:
    """Whether neither operand is of floats."""
    return not any(is_real(x) or isinstance(x, float) for x in (a, b))


def add(a: Operand, b: Operand, *, alpha: Number = 1) -> Tensor:
    """``a + alpha b``."""
    if alpha != 1:
        b = mul(b, alpha) if isinstance(b, Tensor) else b * alpha
    if _whole(a, b):
        return _integers("add", a, b)
    if is_real(a) and _plain(b):
        return scaled(a, 1.0, float(b))
    if is_real(b) and _plain(a):
        return scaled(b, 1.0, float(a))
    return _paired(ops.add, *_both(a, b), either=True)


def sub(a: Operand, b: Operand, *, alpha: Number = 1) -> Tensor:
    """``a - alpha b``."""
    if alpha != 1:
        b = mul(b, alpha) if isinstance(b, Tensor) else b * alpha
    if _whole(a, b):
        return _integers("sub", a, b)
    if is_real(a) and _plain(b):
        return scaled(a, 1.0, -float(b))
    if is_real(b) and _plain(a):
        return scaled(b, -1.0, float(a))
    return _paired(ops.sub, *_both(a, b))


def mul(a: Operand, b: Operand) -> Tensor:
    """``a * b``."""
    if _whole(a, b):
        first, second = _both(a, b)
        return logical_and(first, second) if first.truth else _integers("mul", first, second)
    if is_real(a) and _plain(b):
        return scaled(a, float(b))
    if is_real(b) and _plain(a):
        return scaled(b, float(a))
    return _paired(ops.mul, *_both(a, b), either=True)


def div(a: Operand, b: Operand, *, rounding_mode: str | None = None) -> Tensor:
    """``a / b``; `rounding_mode` ``floor`` or ``trunc`` gives whole numbers."""
    if rounding_mode and _whole(a, b):
        return _integers(f"{rounding_mode}_div", a, b)
    if isinstance(a, Tensor):
        a = real(a)
    if isinstance(b, Tensor):
        b = real(b)
    if is_real(a) and _plain(b) and b and math.frexp(float(b))[0] in (0.5, -0.5):
        quotient = scaled(a, 1 / float(b))
    else:
        first, second = _both(a, b)
        quotient = _paired(ops.div, first, second)
    if not rounding_mode:
        return quotient
    return unary(ops.floor if rounding_mode == "floor" else ops.trunc, quotient)


def remainder(a: Operand, b: Operand, *, rounding_mode: str = "floor") -> Tensor:
    """What division leaves: with the sign of `b` for ``floor``, of `a` for ``trunc``."""
    if _whole(a, b):
        return _integers(f"{rounding_mode}_mod", a, b)
    rest = sub(a, mul(div(a, b, rounding_mode=rounding_mode), b))
    a, b = lifted(a, rest), lifted(b, rest)
    if b.known is not None and np.isfinite(b.known).all():
        return rest
    within = logical_and(is_infinite(b), logical_not(is_infinite(a)))
    if rounding_mode == "floor":  # of another sign the divisor itself is left
        a = where(compare("lt", mul(sign(a), sign(b)), 0.0), b, a)
    return where(within, a, rest)


def power(a: Operand, b: Operand) -> Tensor:
    """``a ** b``; of integers by a whole exponent an integer."""
    if isinstance(a, Tensor) and isinstance(b, int) and 0 < b <= 4 and not a.truth:
        square = mul(a, a) if a.is_integer else unary(ops.sqr, a)
        return {1: a, 2: square, 3: mul(square, a), 4: mul(square, square)}[b] if b != 1 else a
    if isinstance(a, Tensor) and isinstance(b, float) and b in (1.0, 2.0, 3.0, 4.0):
        return power(real(a), int(b))
    if isinstance(a, Tensor) and b == 0.5:
        return unary(ops.sqrt, a)
    if isinstance(a, Tensor) and b == -0.5:
        return rsqrt(a)
    if isinstance(a, Tensor) and b == -1:
        return div(1.0, a)
    first, second = (real(x) for x in _both(a, b))
    return _paired(ops.power, first, second)


def rsqrt(x: Tensor) -> Tensor:
    """``1 / sqrt(x)``."""
    return div(1.0, unary(ops.sqrt, x))


def unary(op: Callable[..., Value], x: Tensor, **attrs: float) -> Tensor:
    """An op of floats entry by entry."""
    x = real(x)
    return Tensor(op(x.value, **attrs), x.shape)


def absolute(x: Tensor) -> Tensor:
    """``|x|``."""
    return maximum(x, negative(x)) if x.is_integer else unary(ops.abs_, x)


def negative(x: Tensor) -> Tensor:
    """``-x``."""
    return sub(0, x) if x.is_integer else unary(ops.neg, x)


def sign(x: Tensor) -> Tensor:
    """-1, 0 or 1."""
    if not x.is_integer:
        return unary(ops.sgn, x)
    return minimum(maximum(x, -1), 1)


def round_even(x: Tensor) -> Tensor:
    """The nearest integer, halves to even, as PyTorch and ONNX round."""
    if x.is_integer:
        return x
    below = unary(ops.floor, x)
    rest, half = sub(x, below), unary(ops.floor, scaled(below, 0.5))
    odd = compare("gt", sub(below, scaled(half, 2.0)), 0.5)
    up = where(compare("eq", rest, 0.5), odd, compare("gt", rest, 0.5))
    return _paired(ops.add, below, Tensor(up.value, up.shape))


def maximum(a: Operand, b: Operand) -> Tensor:
    """The larger of two numbers."""
    first, second = _both(a, b)
    if first.truth:
        return logical_or(first, second)
    if first.is_integer:
        return _integers("max", first, second)
    return _paired(ops.maximum, first, second, either=True)


def minimum(a: Operand, b: Operand) -> Tensor:
    """The smaller of two numbers."""
    first, second = _both(a, b)
    if first.truth:
        return logical_and(first, second)
    if first.is_integer:
        return _integers("min", first, second)
    return _paired(ops.minimum, first, second, either=True)


def clamp(x: Tensor, min: Operand | None = None, max: Operand | None = None) -> Tensor:
    """`x` kept within bounds, of which one may be missing."""
    if is_real(x) and min is not None and max is not None and _plain(min) and _plain(max) and min <= max:
        return unary(ops.clamp, x, min=float(min), max=float(max))
    if min is not None:
        x = maximum(x, min)
    return x if max is None else minimum(x, max)


# --------------------------------------------------------------------------------------------------- truth values


def compare(kind: str, a: Operand, b: Operand) -> Tensor:
    """Where a comparison holds; `kind` as `ops.compare` has it."""
    first, second = _both(a, b)
    turned = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}.get(kind, kind)
    shape = np.broadcast_shapes(first.shape, second.shape)
    if first.shape != shape and second.shape == shape:
        first, second, kind = second, first, turned
    return _paired(lambda x, y: ops.compare(x, y, kind=kind), first, second, truth=True)


def truth(x: Operand) -> Tensor:
    """Whether entries are not 0."""
    return cast(x, DType.F32, truth=True) if isinstance(x, Tensor) else literal(np.asarray(bool(x)))


def logical_and(a: Operand, b: Operand) -> Tensor:
    return _paired(ops.mul, truth(a), truth(b), either=True, truth=True)


def logical_or(a: Operand, b: Operand) -> Tensor:
    return _paired(ops.maximum, truth(a), truth(b), either=True, truth=True)


def logical_xor(a: Operand, b: Operand) -> Tensor:
    return compare("ne", truth(a), truth(b))


def logical_not(x: Operand) -> Tensor:
    value = truth(x)
    return Tensor(ops.scale(value.value, scale=-1.0, bias=1.0), value.shape, True)


_LOGICAL = {"and": logical_and, "or": logical_or, "xor": logical_xor}


def bitwise(kind: str, a: Operand, b: Operand) -> Tensor:
    """Bits of integers, or truth values, by ``and``, ``or`` or ``xor``."""
    first, second = _both(a, b)
    return _LOGICAL[kind](first, second) if first.truth else _integers(kind, first, second)


def bitwise_not(x: Tensor) -> Tensor:
    """All bits of integers turned, or truth values."""
    return sub(-1, x) if x.is_integer else logical_not(x)


def where(condition: Tensor, a: Operand, b: Operand) -> Tensor:
    """`a` where `condition` holds, else `b`."""
    like = a if isinstance(a, Tensor) else b if isinstance(b, Tensor) else None
    if like is None:
        like = literal(np.asarray(0.0 if isinstance(a, float) or isinstance(b, float) else 0))
    first, second = promoted(lifted(a, like), lifted(b, like))
    shape = np.broadcast_shapes(condition.shape, first.shape, second.shape)
    chosen = expand(truth(condition), shape)
    if chosen.is_wide:
        first, second = expand(first, shape), expand(second, shape)
    return tensor(ops.where(chosen.value, first.value, second.value), shape, first.truth)


def filled(x: Tensor, condition: Tensor, value: Operand) -> Tensor:
    """`value` where `condition` holds, else `x`, in the type of `x`."""
    new = value if isinstance(value, Tensor) else lifted(value, x)
    if not (new.truth and x.truth):
        new = cast(new, x.dtype)
    return where(condition, new, x)


def is_nan(x: Tensor) -> Tensor:
    return compare("ne", x, x)


def is_infinite(x: Tensor) -> Tensor:
    return compare("eq", absolute(real(x)), math.inf)
