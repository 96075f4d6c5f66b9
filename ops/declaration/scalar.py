"""The scalar language: one element of a result, or one row of it, as a tree of operations on numbers.

The function that declares an op in this language receives a `Scalar` for each operand and for each float attribute, and
returns the `Scalar` of the result. Operands are the elements at the same index, repeated where an operand is smaller.

Rules, the same for each backend:

1. Each node rounds once, to the nearest number. No backend contracts, reorders or widens nodes; `fma` is one rounding.
2. A term without operands is a number of the call: it is computed in float64 and rounded once.
3. `row_sum`, `row_dot` and `row_max` reduce the last axis to a number of the row. The order of sums belongs to the
   backend, and does not depend on threads or on the launch.
4. An op may place its operands at an index of the result. `is_inside` is true for the elements that an operand has.
   Elsewhere the operand is no number that a result may depend on.

The language has neither loops nor reads of other elements. An op that needs them keeps a reference function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

from ...graph.validation import format_value

Number: TypeAlias = "Scalar | float"


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Scalar:
    """A number, or a truth value, that is computed from others.

    Attributes:
        function: ``operand``, ``attribute``, ``constant``, ``row_count`` or a name of `NUMPY_FUNCTIONS`.
        sources: the arguments of the function.
        value: the operand index, the name of the attribute, or the constant in the form of `float.hex`.
    """

    function: str
    sources: tuple[Scalar, ...] = ()
    value: int | str = ""

    def __repr__(self) -> str:
        return f"Scalar({self.function!r})"  # without the sources, which may be many

    @property
    def is_truth(self) -> bool:
        """Whether the node is a truth value, which only `where` reads."""
        return self.function in TRUTH_FUNCTIONS

    def __add__(self, other: Number) -> Scalar:
        return _apply("add", self, other)

    def __radd__(self, other: float) -> Scalar:
        return _apply("add", other, self)

    def __sub__(self, other: Number) -> Scalar:
        return _apply("sub", self, other)

    def __rsub__(self, other: float) -> Scalar:
        return _apply("sub", other, self)

    def __mul__(self, other: Number) -> Scalar:
        return _apply("mul", self, other)

    def __rmul__(self, other: float) -> Scalar:
        return _apply("mul", other, self)

    def __truediv__(self, other: Number) -> Scalar:
        return _apply("div", self, other)

    def __rtruediv__(self, other: float) -> Scalar:
        return _apply("div", other, self)

    def __neg__(self) -> Scalar:
        return _apply("neg", self)

    def __lt__(self, other: Number) -> Scalar:
        return _apply("less", self, other)

    def __le__(self, other: Number) -> Scalar:
        return _apply("less_equal", self, other)

    def __gt__(self, other: Number) -> Scalar:
        return _apply("less", other, self)

    def __ge__(self, other: Number) -> Scalar:
        return _apply("less_equal", other, self)

    def __eq__(self, other: Number) -> Scalar:  # type: ignore[override]  # a comparison of numbers, as in NumPy
        return _apply("equal", self, other)

    def __ne__(self, other: Number) -> Scalar:  # type: ignore[override]  # as `__eq__`
        return _apply("not_equal", self, other)

    __hash__ = object.__hash__

    def __bool__(self) -> NoReturn:
        raise TypeError("a Scalar has no truth value while an op is declared; select numbers with where()")


COMPARISON_FUNCTIONS = frozenset({"less", "less_equal", "equal", "not_equal"})
"""Functions that compare two numbers."""
TRUTH_FUNCTIONS = COMPARISON_FUNCTIONS | {"inside"}
"""Functions that return truth values."""
ROW_FUNCTIONS = frozenset({"row_sum", "row_dot", "row_max", "row_min", "row_product"})
"""Functions that reduce a row to one number."""


def as_scalar(number: Number) -> Scalar:
    """Return a number of the language: a `Scalar` itself, or the constant of a Python number.

    Raises:
        TypeError: `number` is neither.
    """
    if isinstance(number, Scalar):
        return number
    if not isinstance(number, int | float):  # NumPy's float64 is a float
        raise TypeError(f"{format_value(number)} is no number; need a Scalar or a number")
    return Scalar("constant", (), float(number).hex())


def _apply(function: str, *sources: Number) -> Scalar:
    """Apply a named function to numbers. Raise `TypeError` for a truth value."""
    scalars = tuple(map(as_scalar, sources))
    if any(s.is_truth for s in scalars):
        raise TypeError(f"{function}() needs numbers, but got a truth value; select numbers with where()")
    return Scalar(function, scalars)


def _make_unary(function: str) -> Callable[[Number], Scalar]:
    def apply(x: Number) -> Scalar:
        return _apply(function, x)

    return apply


def _make_binary(function: str) -> Callable[[Number, Number], Scalar]:
    def apply(x: Number, y: Number) -> Scalar:
        return _apply(function, x, y)

    return apply


exp, expm1, log, log1p, sqrt = map(_make_unary, ("exp", "expm1", "log", "log1p", "sqrt"))
sin, cos, tan, arcsin, arccos, arctan = map(_make_unary, ("sin", "cos", "tan", "arcsin", "arccos", "arctan"))
sinh, cosh, tanh = map(_make_unary, ("sinh", "cosh", "tanh"))
arcsinh, arccosh, arctanh = map(_make_unary, ("arcsinh", "arccosh", "arctanh"))
absolute, floor, ceil, trunc = map(_make_unary, ("absolute", "floor", "ceil", "trunc"))
round_half_away = _make_unary("round_half_away")
"""The nearest integer, halves away from zero; a zero keeps its sign."""
erf = _make_unary("erf")
"""The error function."""
softplus = _make_unary("softplus")
"""``log(1 + exp(x))``, without overflow."""
normal_cdf = _make_unary("normal_cdf")
"""The distribution function of the normal distribution, ``erfc(-x / sqrt(2)) / 2``."""
raise_to = _make_binary("power")
"""The first number to the power of the second."""
larger_of = _make_binary("maximum")
"""The maximum of IEEE 754, 2019: NaN if one number is NaN, and +0 is larger than -0."""
smaller_of = _make_binary("minimum")
"""The minimum of IEEE 754, 2019: NaN if one number is NaN, and -0 is smaller than +0."""
equal, not_equal = _make_binary("equal"), _make_binary("not_equal")
row_dot = _make_binary("row_dot")
"""The sum of products over the row, a chain of `fma`."""
row_sum, row_product = _make_unary("row_sum"), _make_unary("row_product")
row_max = _make_unary("row_max")
"""The largest number of the row, NaN if one is NaN; -inf for an empty row."""
row_min = _make_unary("row_min")


def fma(x: Number, y: Number, z: Number) -> Scalar:
    """Return ``x * y + z``, rounded once."""
    return _apply("fma", x, y, z)


def where(truth: Scalar, then: Number, otherwise: Number) -> Scalar:
    """Return `then` where a comparison is true, else `otherwise`.

    Neither number is rounded.

    Raises:
        TypeError: `truth` is no comparison.
    """
    chosen = (as_scalar(then), as_scalar(otherwise))
    if not truth.is_truth or any(s.is_truth for s in chosen):
        raise TypeError("where() needs a comparison, such as x > 0, and two numbers")
    return Scalar("where", (truth, *chosen))


def is_inside(operand: Scalar) -> Scalar:
    """Return the truth value whether a placed operand of the op has an element at the index of the result."""
    assert operand.function == "operand"
    return Scalar("inside", (), operand.value)


def row_count() -> Scalar:
    """Return the number of elements of a row. It is at least 1."""
    return Scalar("row_count")


def clip(x: Number, low: Number, high: Number) -> Scalar:
    """Return `x`, limited to the range from `low` to `high`. Here -0 is less than +0."""
    return smaller_of(larger_of(x, low), high)


def logistic(x: Scalar) -> Scalar:
    """Return ``1 / (1 + exp(-x))``."""
    return 1.0 / (1.0 + exp(-x))


def silu(x: Scalar) -> Scalar:
    """Return ``x * logistic(x)``. It takes one division."""
    return x / (1.0 + exp(-x))


def gelu(x: Scalar) -> Scalar:
    """Return ``x * logistic(2 u)`` with ``u = sqrt(2 / pi) (x + 0.044715 x^3)``, the tanh approximation of GELU.

    ``0.5 x (1 + tanh(u))`` is the same number, but is inexact where tanh(u) is near -1.
    """
    return x * logistic(2.0 * math.sqrt(2.0 / math.pi) * fma(x * x * x, 0.044715, x))
