"""Python operators on values: the ops that they build, with the broadcasting and indexing of NumPy."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from ..graph.errors import GraphError, format_count
from ..graph.node import Value
from ..graph.validation import did_you_mean, format_value, number_between
from .declaration.op import Op
from .elementwise.binary import add, div, mul, scale, sub
from .elementwise.generators import fill
from .elementwise.unary import sqr, sqrt
from .matrix.matmul import mul_mat
from .movement.rows import get_rows
from .movement.views import broadcast, reshape, slice_, transpose
from .registry import REGISTRY

NUMBER_CHECK = number_between(-(2.0**127), 2.0**127)
"""The numbers that operators accept in place of values."""
VALUE_WITH_NUMBER: Mapping[str, Callable[[Value, float], Value]] = MappingProxyType(
    {
        "+": lambda x, n: scale(x, scale=1.0, bias=n),
        "-": lambda x, n: scale(x, scale=1.0, bias=-n),
        "*": lambda x, n: scale(x, scale=n),
        "/": lambda x, n: scale(x, scale=1.0 / n),
    }
)
"""Builders of ``value sign number`` by sign."""
NUMBER_WITH_VALUE: Mapping[str, Callable[[float, Value], Value]] = MappingProxyType(
    {
        "+": lambda n, x: scale(x, scale=1.0, bias=n),
        "-": lambda n, x: scale(x, scale=-1.0, bias=n),
        "*": lambda n, x: scale(x, scale=n),
        "/": lambda n, x: div(fill(x, value=n), x),
    }
)
"""Builders of ``number sign value`` by sign."""
VALUE_WITH_VALUE: Mapping[str, Op[Value]] = MappingProxyType({"+": add, "-": sub, "*": mul, "/": div})
"""Ops of ``value sign value`` by sign."""
POWERS: Mapping[float, Callable[[Value], Value]] = MappingProxyType({2.0: sqr, 0.5: sqrt})
"""Ops of ``value ** exponent`` by exponent."""


def build_elementwise_operator(sign: str, left: Any, right: Any) -> Value:
    """Build the elementwise op of ``left sign right``, with the broadcasting of NumPy.

    Args:
        sign: ``+``, ``-``, ``*`` or ``/``.
        left: a value or a number.
        right: a value or a number; at least one side is a value.

    Raises:
        GraphError: an operand is neither, the shapes do not broadcast, or a value is divided by 0.
    """
    for other in (left, right):
        if not isinstance(other, Value) and not NUMBER_CHECK.accepts(other):
            raise GraphError(
                f"{sign}: {format_value(other)} is no graph value and no number; make a leaf with constant()"
            )
    if sign == "/" and not isinstance(right, Value) and right == 0:
        raise GraphError(f"{left!r} / 0: the number is 0; need another")
    if not isinstance(right, Value):
        return VALUE_WITH_NUMBER[sign](left, float(right))
    if not isinstance(left, Value):
        return NUMBER_WITH_VALUE[sign](float(left), right)
    shape = _compute_broadcast_shape(f"{left!r} {sign} {right!r}", left.shape, right.shape)
    if left.shape != shape and right.shape == shape and sign in "+*":
        left, right = right, left
    return VALUE_WITH_VALUE[sign](_broadcast_to(left, shape), right)


def describe_missing_attribute(x: Value, name: str) -> str:
    """Return the error message for an attribute that a value does not have, with a hint at an op or a similar name."""
    hint = f"; write ops.{name}(x, ...)" if name in REGISTRY else did_you_mean(name, (*dir(x), *REGISTRY))
    return f"a Value has no attribute {name!r:.60}{hint}"


def build_square_or_square_root(x: Value, exponent: Any) -> Value:
    """Build ``x ** exponent``; the exponent must be 2 or 0.5."""
    if not NUMBER_CHECK.accepts(exponent) or float(exponent) not in POWERS:
        raise GraphError(f"{x!r} ** {format_value(exponent)}: the exponent must be 2 or 0.5")
    return POWERS[float(exponent)](x)


def build_matmul(x: Any, w: Any) -> Value:
    """Build ``x @ w`` as NumPy's `matmul`; ``x @ w.T`` becomes ``mul_mat(w, x)``.

    Raises:
        GraphError: an operand is no value of rank 1 or more, or the shapes do not fit.
    """
    for other in (x, w):
        if not isinstance(other, Value) or not other.shape:
            raise GraphError(
                f"@: {format_value(other)} is no graph value of rank 1 or more; make a leaf with constant()"
            )
    rows = x if len(x.shape) > 1 else reshape(x, shape=(1, *x.shape))
    columns = build_transpose(w) if len(w.shape) > 1 else reshape(w, shape=(1, *w.shape))
    leading = _compute_broadcast_shape(f"{x!r} @ {w!r}", rows.shape[:-2], columns.shape[:-2])
    if columns.shape[-1] != rows.shape[-1]:
        raise GraphError(f"{x!r} @ {w!r}: rows hold {rows.shape[-1]} values, columns {columns.shape[-1]}")
    y = mul_mat(columns, _broadcast_to(rows, (*leading, *rows.shape[-2:])))
    shape = (*leading, *x.shape[-2:-1], *(w.shape[-1:] if len(w.shape) > 1 else ()))
    return y if y.shape == shape else reshape(y, shape=shape)


def build_transpose(x: Value) -> Value:
    """Exchange the last two axes of a value. A transpose of a transpose gives the original value."""
    first = x.node.src[0] if x.node.op == "transpose" else None
    return transpose(x) if first is None else first


def build_index(x: Value, index: Any) -> Value:
    """Build the ops of ``x[index]``.

    An index has integers, slices of step 1, ``...`` and None as in NumPy, or is a value with row numbers.

    Raises:
        GraphError: an entry has another form, or is outside of its axis.
    """
    if isinstance(index, Value):
        return get_rows(x, index)
    entries = _expand_index_to_all_axes(x, index if isinstance(index, tuple) else (index,))
    shape: list[int] = []
    axis, y = 0, x
    for entry in entries:
        if entry is None:
            shape.append(1)
            continue
        start, stop, has_axis = _resolve_axis_entry(x, axis, entry)
        if (start, stop) != (0, x.shape[axis]):
            y = slice_(y, axis=axis, start=start, stop=stop)
        shape += [stop - start] if has_axis else []
        axis += 1
    return y if y.shape == tuple(shape) else reshape(y, shape=tuple(shape))


def _expand_index_to_all_axes(x: Value, entries: Sequence[Any]) -> list[Any]:
    """Expand an index to one entry for each axis of `x`: ``...`` and missing entries become full slices."""
    named = sum(e is not None and e is not ... for e in entries)
    if named > len(x.shape):
        raise GraphError(
            f"{x!r}[{format_value(tuple(entries))}]: {format_count(named, 'entry', 'entries')} for "
            f"{format_count(len(x.shape), 'axis', 'axes')}"
        )
    ellipses = [i for i, e in enumerate(entries) if e is ...]
    if len(ellipses) > 1:
        raise GraphError(f"{x!r}[{format_value(tuple(entries))}]: there is more than one '...'")
    at = ellipses[0] if ellipses else len(entries)
    return [*entries[:at], *[slice(None)] * (len(x.shape) - named), *entries[at + 1 :]]


def _resolve_axis_entry(x: Value, axis: int, entry: Any) -> tuple[int, int, bool]:
    """Return the start and stop of an index entry on an axis, and whether the result keeps the axis."""
    size = x.shape[axis]
    try:
        if isinstance(entry, slice):
            start, stop, step = entry.indices(size)
            if step == 1:
                return start, max(start, stop), True
        elif not isinstance(entry, bool):
            at = operator.index(entry)
            if -size <= at < size:
                return at % size, at % size + 1, False
    except (TypeError, ValueError):
        pass
    need = f"an integer from {-size} to {size - 1} or a slice of step 1"
    raise GraphError(f"{x!r}: index {format_value(entry)} of axis {axis}; need {need}")


def _compute_broadcast_shape(what: str, one: tuple[int, ...], two: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape to which two shapes broadcast."""
    try:
        return tuple(np.broadcast_shapes(one, two))
    except ValueError:
        raise GraphError(f"{what}: shapes {list(one)} and {list(two)} do not broadcast") from None


def _broadcast_to(x: Value, shape: tuple[int, ...]) -> Value:
    return x if x.shape == shape else broadcast(x, shape=shape)
