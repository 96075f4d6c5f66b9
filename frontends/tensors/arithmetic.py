"""Element-wise arithmetic with mutual broadcasting, for floats, integers, booleans and Python numbers.

The functions follow PyTorch: a binary function promotes both operands to their common dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeGuard

import numpy as np

from ... import ops
from ...graph import DType, Value
from .shapes import expand
from .tensor import Number, Operand, Tensor, as_tensor, cast, constant_tensor, number_as_tensor, promote_dtypes

BinaryOp = Callable[[Value, Value], Value]


def return_unchanged(x: Tensor, *_: object, **__: object) -> Tensor:
    """Return the operand unchanged: the converter of framework ops such as ``clone``, ``Identity`` and ``Cast``.

    The importer casts the result to the dtype that the program states. Further arguments are ignored.
    """
    return x


def _apply_binary_op(
    op: BinaryOp, a: Tensor, b: Tensor, *, is_commutative: bool = False, is_bool: bool = False
) -> Tensor:
    """Apply a binary graph op to two tensors of one dtype, with mutual broadcasting.

    Args:
        op: An op that broadcasts its second operand to the first one.
        a: The first operand.
        b: The second operand.
        is_commutative: Whether the op is commutative, so that the operands may be swapped.
        is_bool: Whether the result is boolean.
    """
    shape = np.broadcast_shapes(a.shape, b.shape)
    if is_commutative and a.shape != shape and b.shape == shape:
        a, b = b, a
    a = expand(a, shape)
    if a.exceeds_max_rank and b.shape != shape and math.prod(b.shape) != 1:
        b = expand(b, shape)
    other = ops.reshape(b.value, shape=()) if a.exceeds_max_rank and math.prod(b.shape) == 1 else b.value
    return as_tensor(op(a.value, other), shape, is_bool)


def _promote_pair(a: Operand, b: Operand) -> tuple[Tensor, Tensor]:
    """Convert two operands to tensors of their common dtype; at least one of the operands is a tensor."""
    like = a if isinstance(a, Tensor) else b
    assert isinstance(like, Tensor)
    first, second = promote_dtypes(number_as_tensor(a, like), number_as_tensor(b, like))
    return first, second


def _is_finite_number(x: Operand) -> TypeGuard[float]:
    """Return whether an operand is a finite Python number, which can become an attribute of an op."""
    return not isinstance(x, Tensor) and math.isfinite(x)


def is_float_tensor(x: Operand) -> TypeGuard[Tensor]:
    """Whether an operand is a tensor of floats (neither integers nor booleans)."""
    return isinstance(x, Tensor) and not x.is_integer and not x.is_bool


def scale_and_shift(x: Tensor, scale: float, bias: float = 0.0) -> Tensor:
    """Return ``x * scale + bias`` for a tensor of floats."""
    if (scale, bias) == (1.0, 0.0):
        return x
    return Tensor(ops.scale(x.value, scale=float(scale), bias=float(bias)), x.shape)


def as_float(x: Tensor) -> Tensor:
    """Convert integers and booleans to f32; floats keep their dtype."""
    return x if is_float_tensor(x) else cast(x, DType.F32)


def _apply_integer_op(kind: str, a: Operand, b: Operand) -> Tensor:
    first, second = _promote_pair(a, b)
    if first.is_bool:
        first, second = cast(first, DType.I64), cast(second, DType.I64)
    return _apply_binary_op(
        lambda x, y: ops.calculate(x, y, kind=kind), first, second, is_commutative=kind in _COMMUTATIVE_KINDS
    )


_COMMUTATIVE_KINDS = frozenset(("add", "mul", "max", "min", "and", "or", "xor"))


def _are_integers_or_booleans(a: Operand, b: Operand) -> bool:
    """Whether neither operand is a float: both are integers or booleans."""
    return not any(is_float_tensor(x) or isinstance(x, float) for x in (a, b))


def add(a: Operand, b: Operand, *, alpha: Number = 1) -> Tensor:
    """Return ``a + alpha * b``, element-wise."""
    if alpha != 1:
        b = mul(b, alpha) if isinstance(b, Tensor) else b * alpha
    if _are_integers_or_booleans(a, b):
        return _apply_integer_op("add", a, b)
    if is_float_tensor(a) and _is_finite_number(b):
        return scale_and_shift(a, 1.0, float(b))
    if is_float_tensor(b) and _is_finite_number(a):
        return scale_and_shift(b, 1.0, float(a))
    return _apply_binary_op(ops.add, *_promote_pair(a, b), is_commutative=True)


def sub(a: Operand, b: Operand, *, alpha: Number = 1) -> Tensor:
    """Return ``a - alpha * b``, element-wise."""
    if alpha != 1:
        b = mul(b, alpha) if isinstance(b, Tensor) else b * alpha
    if _are_integers_or_booleans(a, b):
        return _apply_integer_op("sub", a, b)
    if is_float_tensor(a) and _is_finite_number(b):
        return scale_and_shift(a, 1.0, -float(b))
    if is_float_tensor(b) and _is_finite_number(a):
        return scale_and_shift(b, -1.0, float(a))
    return _apply_binary_op(ops.sub, *_promote_pair(a, b))


def mul(a: Operand, b: Operand) -> Tensor:
    """Return ``a * b``, element-wise."""
    if _are_integers_or_booleans(a, b):
        first, second = _promote_pair(a, b)
        return logical_and(first, second) if first.is_bool else _apply_integer_op("mul", first, second)
    if is_float_tensor(a) and _is_finite_number(b):
        return scale_and_shift(a, float(b))
    if is_float_tensor(b) and _is_finite_number(a):
        return scale_and_shift(b, float(a))
    return _apply_binary_op(ops.mul, *_promote_pair(a, b), is_commutative=True)


def div(a: Operand, b: Operand, *, rounding_mode: str | None = None) -> Tensor:
    """Return ``a / b``, rounded to an integer if `rounding_mode` is ``floor`` or ``trunc``."""
    if rounding_mode and _are_integers_or_booleans(a, b):
        return _apply_integer_op(f"{rounding_mode}_div", a, b)
    if isinstance(a, Tensor):
        a = as_float(a)
    if isinstance(b, Tensor):
        b = as_float(b)
    if is_float_tensor(a) and _is_finite_number(b) and b and math.frexp(float(b))[0] in (0.5, -0.5):
        quotient = scale_and_shift(a, 1 / float(b))
    else:
        first, second = _promote_pair(a, b)
        quotient = _apply_binary_op(ops.div, first, second)
    if not rounding_mode:
        return quotient
    return apply_unary_op(ops.floor if rounding_mode == "floor" else ops.trunc, quotient)


def remainder(a: Operand, b: Operand, *, rounding_mode: str = "floor") -> Tensor:
    """Return the remainder of ``a / b``, which has the sign of `b` for ``floor`` and the sign of `a` for ``trunc``."""
    if _are_integers_or_booleans(a, b):
        return _apply_integer_op(f"{rounding_mode}_mod", a, b)
    rest = sub(a, mul(div(a, b, rounding_mode=rounding_mode), b))
    a, b = number_as_tensor(a, rest), number_as_tensor(b, rest)
    if b.constant is not None and np.isfinite(b.constant).all():
        return rest
    within = logical_and(is_infinite(b), logical_not(is_infinite(a)))
    if rounding_mode == "floor":  # for opposite signs the remainder is the divisor
        a = where(compare("lt", mul(sign(a), sign(b)), 0.0), b, a)
    return where(within, a, rest)


def power(a: Operand, b: Operand) -> Tensor:
    """Return ``a ** b``, element-wise.

    The result is an integer for an integer base and a small positive integer exponent.
    """
    if isinstance(a, Tensor) and isinstance(b, int) and 0 < b <= 4 and not a.is_bool:
        square = mul(a, a) if a.is_integer else apply_unary_op(ops.sqr, a)
        return {1: a, 2: square, 3: mul(square, a), 4: mul(square, square)}[b] if b != 1 else a
    if isinstance(a, Tensor) and isinstance(b, float) and b in (1.0, 2.0, 3.0, 4.0):
        return power(as_float(a), int(b))
    if isinstance(a, Tensor) and b == 0.5:
        return apply_unary_op(ops.sqrt, a)
    if isinstance(a, Tensor) and b == -0.5:
        return rsqrt(a)
    if isinstance(a, Tensor) and b == -1:
        return div(1.0, a)
    first, second = (as_float(x) for x in _promote_pair(a, b))
    return _apply_binary_op(ops.power, first, second)


def rsqrt(x: Tensor) -> Tensor:
    """Return ``1 / sqrt(x)`` for each element."""
    return div(1.0, apply_unary_op(ops.sqrt, x))


def apply_unary_op(op: Callable[..., Value], x: Tensor, **attrs: float) -> Tensor:
    """Apply a graph op with one operand to each element; integers and booleans are converted to f32 first.

    `attrs` are the attributes of the op.
    """
    x = as_float(x)
    return Tensor(op(x.value, **attrs), x.shape)


def absolute(x: Tensor) -> Tensor:
    """Return the absolute value of each element."""
    return maximum(x, negative(x)) if x.is_integer else apply_unary_op(ops.abs_, x)


def negative(x: Tensor) -> Tensor:
    """Return ``-x`` for each element."""
    return sub(0, x) if x.is_integer else apply_unary_op(ops.neg, x)


def sign(x: Tensor) -> Tensor:
    """Return the sign of each element: -1, 0 or 1."""
    if not x.is_integer:
        return apply_unary_op(ops.sgn, x)
    return minimum(maximum(x, -1), 1)


def round_even(x: Tensor) -> Tensor:
    """Round each element to the nearest integer, halves to even, as PyTorch and ONNX do."""
    if x.is_integer:
        return x
    below = apply_unary_op(ops.floor, x)
    rest, half = sub(x, below), apply_unary_op(ops.floor, scale_and_shift(below, 0.5))
    odd = compare("gt", sub(below, scale_and_shift(half, 2.0)), 0.5)
    up = where(compare("eq", rest, 0.5), odd, compare("gt", rest, 0.5))
    return _apply_binary_op(ops.add, below, Tensor(up.value, up.shape))


def maximum(a: Operand, b: Operand) -> Tensor:
    """Return the element-wise maximum of two operands."""
    first, second = _promote_pair(a, b)
    if first.is_bool:
        return logical_or(first, second)
    if first.is_integer:
        return _apply_integer_op("max", first, second)
    return _apply_binary_op(ops.maximum, first, second, is_commutative=True)


def minimum(a: Operand, b: Operand) -> Tensor:
    """Return the element-wise minimum of two operands."""
    first, second = _promote_pair(a, b)
    if first.is_bool:
        return logical_and(first, second)
    if first.is_integer:
        return _apply_integer_op("min", first, second)
    return _apply_binary_op(ops.minimum, first, second, is_commutative=True)


def clamp(x: Tensor, min: Operand | None = None, max: Operand | None = None) -> Tensor:
    """Clamp each element of `x` to the range from `min` to `max`; each bound is optional."""
    if (
        is_float_tensor(x)
        and min is not None
        and max is not None
        and _is_finite_number(min)
        and _is_finite_number(max)
        and min <= max
    ):
        return apply_unary_op(ops.clamp, x, min=float(min), max=float(max))
    if min is not None:
        x = maximum(x, min)
    return x if max is None else minimum(x, max)


# ------------------------------------------------------------------------------------------------------- booleans


def compare(kind: str, a: Operand, b: Operand) -> Tensor:
    """Compare two operands element-wise and return booleans; `kind` is eq, ne, lt, le, gt or ge."""
    first, second = _promote_pair(a, b)
    swapped_kind = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}.get(kind, kind)
    shape = np.broadcast_shapes(first.shape, second.shape)
    if first.shape != shape and second.shape == shape:
        first, second, kind = second, first, swapped_kind
    return _apply_binary_op(lambda x, y: ops.compare(x, y, kind=kind), first, second, is_bool=True)


def as_bool(x: Operand) -> Tensor:
    """Convert an operand to booleans: true for non-zero elements."""
    return cast(x, DType.F32, is_bool=True) if isinstance(x, Tensor) else constant_tensor(np.asarray(bool(x)))


def logical_and(a: Operand, b: Operand) -> Tensor:
    return _apply_binary_op(ops.mul, as_bool(a), as_bool(b), is_commutative=True, is_bool=True)


def logical_or(a: Operand, b: Operand) -> Tensor:
    return _apply_binary_op(ops.maximum, as_bool(a), as_bool(b), is_commutative=True, is_bool=True)


def logical_xor(a: Operand, b: Operand) -> Tensor:
    return compare("ne", as_bool(a), as_bool(b))


def logical_not(x: Operand) -> Tensor:
    value = as_bool(x)
    return Tensor(ops.scale(value.value, scale=-1.0, bias=1.0), value.shape, True)


_LOGICAL_OPS = {"and": logical_and, "or": logical_or, "xor": logical_xor}


def apply_bitwise_op(kind: str, a: Operand, b: Operand) -> Tensor:
    """Apply the op `kind` (``and``, ``or`` or ``xor``) to the bits of integers, or to booleans."""
    first, second = _promote_pair(a, b)
    return _LOGICAL_OPS[kind](first, second) if first.is_bool else _apply_integer_op(kind, first, second)


def bitwise_not(x: Tensor) -> Tensor:
    """Invert the bits of integers; negate booleans."""
    return sub(-1, x) if x.is_integer else logical_not(x)


def where(condition: Tensor, a: Operand, b: Operand) -> Tensor:
    """Return the elements of `a` where `condition` is true, and of `b` elsewhere."""
    like = a if isinstance(a, Tensor) else b if isinstance(b, Tensor) else None
    if like is None:
        like = constant_tensor(np.asarray(0.0 if isinstance(a, float) or isinstance(b, float) else 0))
    first, second = promote_dtypes(number_as_tensor(a, like), number_as_tensor(b, like))
    shape = np.broadcast_shapes(condition.shape, first.shape, second.shape)
    chosen = expand(as_bool(condition), shape)
    if chosen.exceeds_max_rank:
        first, second = expand(first, shape), expand(second, shape)
    return as_tensor(ops.where(chosen.value, first.value, second.value), shape, first.is_bool)


def masked_fill(x: Tensor, condition: Tensor, value: Operand) -> Tensor:
    """Return `x` with `value` wherever `condition` is true. The result has the dtype of `x`."""
    new = value if isinstance(value, Tensor) else number_as_tensor(value, x)
    if not (new.is_bool and x.is_bool):
        new = cast(new, x.dtype)
    return where(condition, new, x)


def is_nan(x: Tensor) -> Tensor:
    return compare("ne", x, x)


def is_infinite(x: Tensor) -> Tensor:
    return compare("eq", absolute(as_float(x)), math.inf)
