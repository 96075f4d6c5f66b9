"""The functions of the scalar language in NumPy: their meaning in float64, and the arithmetic of float32 kernels.

A function takes arrays or numbers and ``out``, an array for the result or None. Each rounds once in the dtype of its
arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
NumpyFunction: TypeAlias = Callable[..., Any]


def vectorise_scalar(function: Callable[[float], float]) -> Callable[[Array], Array]:
    """Return a function that applies a function of floats, such as `math.erf`, to each element of an array.

    It has the precision of libm, and NumPy lacks some of these functions.
    """
    apply = np.frompyfunc(function, 1, 1)

    def apply_to_array(x: Array) -> Array:
        return np.asarray(apply(x), np.float64)

    return apply_to_array


error_function = vectorise_scalar(math.erf)
erfc = vectorise_scalar(math.erfc)

# P of ``erfc(a / sqrt(2)) / 2 = exp(-a^2 / 2) t P(t)``, t = 1 / (1 + a / 4), for a from 0 to 14; highest power first.
# Fitted to least maximal relative error, 8e-9 (Lawson iteration on a least-squares fit).
_TAIL_COEFFICIENTS = (
    *(0.01657963006850917, -0.06279202607554774, 0.05165195425433108, 0.028436508124032596, 0.01271112855494487),
    *(0.08665736755642187, 0.07199921700146168, 0.09551577141465409, 0.09949254919760411, 0.09974790397723036),
)


def _copy_to_optional_out(result: Any, out: Array | None) -> Any:
    """Copy `result` to `out` and return `out`; return `result` itself if `out` is None."""
    if out is None:
        return result
    np.copyto(out, result, casting="same_kind")
    return out


def _compute_normal_cdf(x: Array, out: Array | None) -> Any:
    """Compute ``erfc(-x / sqrt(2)) / 2``. It takes libm in float64, and a polynomial in float32."""
    if np.asarray(x).dtype != np.float32:
        return _copy_to_optional_out(0.5 * erfc(np.asarray(x) * -math.sqrt(0.5)), out)
    size = np.minimum(np.abs(x), np.float32(20))  # where the tail is 0; an infinity would become NaN
    t = 1 / (1 + size * np.float32(0.25))
    tail = np.full_like(t, _TAIL_COEFFICIENTS[0])
    for coefficient in _TAIL_COEFFICIENTS[1:]:
        tail = tail * t + np.float32(coefficient)
    tail *= t * np.exp(size * size * np.float32(-0.5))
    return _copy_to_optional_out(np.where(x < 0, tail, 1 - tail), out)


def _compute_fma_rounded_once(x: Any, y: Any, z: Any, out: Array | None) -> Any:
    """Compute ``x * y + z`` with one rounding for float32; float64 rounds the product, too.

    The product of two float32 is exact in float64. The sum is rounded to odd, so that float32 rounds it as the
    exact sum. Boldo and Melquiond, 2008.
    """
    if all(np.asarray(a).dtype != np.float32 for a in (x, y, z)):
        return _copy_to_optional_out(x * y + z, out)
    if np.ndim(z) == 0 and z == 0 and np.signbit(z):  # adding -0 changes no number
        return np.multiply(x, y, out=out)
    product, wide = np.multiply(x, y, dtype=np.float64), np.asarray(z, np.float64)
    total = product + wide
    part = total - product
    error = (product - (total - part)) + (wide - part)
    is_even = (total.view(np.int64) & 1) == 0
    is_inexact = np.isfinite(error) & (error != 0)
    odd = np.where(is_even & is_inexact, np.nextafter(total, np.where(error > 0, np.inf, -np.inf)), total)
    return _copy_to_optional_out(odd.astype(np.float32), out)


def _compute_ieee_maximum(x: Any, y: Any, out: Array | None) -> Any:
    """Compute the maximum of IEEE 754, 2019. It is NaN if one number is NaN, and +0 is larger than -0."""
    larger = np.maximum(x, y)
    is_zero = (larger == 0) & np.equal(x, y)
    return _copy_to_optional_out(np.where(is_zero, np.add(x, y), larger), out)


def _compute_ieee_minimum(x: Any, y: Any, out: Array | None) -> Any:
    """Compute the minimum of IEEE 754, 2019: NaN if one number is NaN, and -0 is smaller than +0."""
    smaller = np.minimum(x, y)
    is_zero = (smaller == 0) & np.equal(x, y)
    return _copy_to_optional_out(np.where(is_zero, np.negative(np.add(np.negative(x), np.negative(y))), smaller), out)


def _compute_round_half_away(x: Any, out: Array | None) -> Any:
    size = np.abs(x)
    whole = np.trunc(size)
    return _copy_to_optional_out(np.copysign(whole + (size - whole >= 0.5), x), out)


def _compute_dot(x: Array, y: Array, out: Array | None) -> Any:
    if out is None:
        return np.einsum("...c,...c->...", x, y)[..., None]
    np.einsum("...c,...c->...", x, y, out=out[..., 0])
    return out


def _reduce_rows_by_ufunc(ufunc: np.ufunc, empty: float, x: Array, out: Array | None) -> Any:
    """Reduce the last axis by a ufunc, such as `numpy.add`; an empty row gives `empty`."""
    if not x.shape[-1]:
        return ufunc.reduce(x, axis=-1, keepdims=True, out=out, initial=empty)
    return ufunc.reduce(x, axis=-1, keepdims=True, out=out)


_UFUNC_NAMES = {
    **{"add": "add", "sub": "subtract", "mul": "multiply", "div": "divide", "neg": "negative"},
    **{"less": "less", "less_equal": "less_equal", "equal": "equal", "not_equal": "not_equal", "power": "power"},
    **{n: n for n in ("absolute", "sqrt", "exp", "expm1", "log", "log1p", "floor", "ceil", "trunc")},
    **{n: n for n in ("sin", "cos", "tan", "arcsin", "arccos", "arctan")},
    **{n: n for n in ("sinh", "cosh", "tanh", "arcsinh", "arccosh", "arctanh")},
}
NUMPY_FUNCTIONS: Mapping[str, NumpyFunction] = MappingProxyType(
    {
        **{name: getattr(np, ufunc) for name, ufunc in _UFUNC_NAMES.items()},
        "fma": _compute_fma_rounded_once,
        "maximum": _compute_ieee_maximum,
        "minimum": _compute_ieee_minimum,
        "round_half_away": _compute_round_half_away,
        "erf": lambda x, out: _copy_to_optional_out(error_function(x), out),
        "softplus": lambda x, out: np.logaddexp(0.0, x, out=out),
        "normal_cdf": _compute_normal_cdf,
        "where": lambda truth, x, y, out: _copy_to_optional_out(np.where(truth, x, y), out),
        "row_dot": _compute_dot,
        "row_sum": partial(_reduce_rows_by_ufunc, np.add, 0),
        "row_product": partial(_reduce_rows_by_ufunc, np.multiply, 1),
        "row_max": partial(_reduce_rows_by_ufunc, np.maximum, -np.inf),
        "row_min": partial(_reduce_rows_by_ufunc, np.minimum, np.inf),
    }
)
"""The NumPy function of each function of the language that has arguments."""
