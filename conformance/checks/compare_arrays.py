"""Compare a result with its reference: NaN, infinities and zero signs, then the errors of elements and rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...graph.dtypes import DType
from ...graph.spec import Spec
from ...ops import Op
from ..cases.operand_layouts import Array
from .tolerance import MIN_NORMAL, ErrorBudget, find_machine_epsilon


@dataclass(frozen=True, slots=True)
class ArrayDifference:
    """The difference between a result and its reference; `why` describes the failure and is empty if the result passed.

    `nmse` is the normalised mean square error of the worst row, and `ulp` the error of the worst element in units in
    the last place. Each has its limit.
    """

    why: str = ""
    nmse: float = 0.0
    nmse_limit: float = 0.0
    ulp: float = 0.0
    ulp_limit: float = 0.0

    def __str__(self) -> str:
        return (
            f"worst row NMSE {self.nmse:.2g} (limit {self.nmse_limit:.2g}), "
            f"worst element {self.ulp:.3g} ulp (limit {self.ulp_limit:.3g})"
        )


def _find_largest_finite(dtype: DType) -> float:
    """Return the largest finite number of a float dtype. Except for f16 it is the largest float32."""
    return 65504.0 if dtype is DType.F16 else float(np.finfo(np.float32).max)


def compute_ulp(values: Array, dtype: DType) -> Array:
    """Return one unit in the last place (ULP) of each value in `dtype`."""
    with np.errstate(all="ignore"):
        if dtype is DType.F16:
            return np.spacing(np.minimum(np.abs(values), 6e4).astype(np.float16)).astype(np.float64)
        fine = np.spacing(np.minimum(np.abs(values), 3e38).astype(np.float32)).astype(np.float64)
    return fine * 65536.0 if dtype is DType.BF16 else fine


def compare_with_reference(
    got: Array,
    want: Array,
    budget: ErrorBudget,
    spec: Spec,
    op: Op,
    *,
    signed_zeros: bool = True,
    any_infinity: bool = False,
) -> ArrayDifference:
    """Compare one result with its reference, and return the difference with a reason if the result fails.

    Args:
        got: the result, float64 or integers.
        want: the reference, in the shape of `got`.
        budget: the error that each element may have.
        spec: shape and dtype of the result.
        op: the op; its `compare` says whether rows are sets, which are sorted before the comparison.
        signed_zeros: whether zeros need the sign of the reference.
        any_infinity: whether infinities and NaN may stand in place of each other.
    """
    if got.shape != want.shape:
        return ArrayDifference(f"the shape is {list(got.shape)}, not {list(want.shape)}")
    if op.compare == "set":
        got, want = np.sort(got, axis=-1), np.sort(want, axis=-1)
    if spec.dtype.is_integer or op.compare == "set":
        wrong = np.flatnonzero(np.asarray(got != want))
        return ArrayDifference(_describe_wrong_elements("wrong", wrong, got, want)) if wrong.size else ArrayDifference()
    if any_infinity:
        got = np.where(np.isfinite(got) | np.isfinite(want), got, want)
    if why := _check_nonfinite_positions(got, want, spec.dtype):
        return ArrayDifference(why)
    is_finite = np.isfinite(want) & np.isfinite(got)
    error = np.where(is_finite, np.abs(np.subtract(got, want, where=is_finite, out=np.zeros(want.shape))), 0.0)
    element, row = (np.where(is_finite, b, 0.0) for b in (budget.max_element_error, budget.row_rms_error_per_element))
    difference = _check_error_budgets(error, np.where(is_finite, want, 0.0), element, row, got, spec.dtype)
    why = "" if difference.why or not signed_zeros else _check_zero_signs(got, want)
    return _with_failure_reason(difference, why) if why else difference


def _check_nonfinite_positions(got: Array, want: Array, dtype: DType) -> str:
    """Check that NaN and infinities are at the same places as in the reference; return the problem, or "".

    A number too large for the dtype may be infinite.
    """
    for name, test in (("NaN", np.isnan), ("no NaN", lambda x: ~np.isnan(x))):
        wrong = np.flatnonzero(test(got) & ~test(want))
        if wrong.size:
            return _describe_wrong_elements(name, wrong, got, want)
    over = np.abs(want) >= _find_largest_finite(dtype) * (1.0 - find_machine_epsilon(dtype))
    same = (got == want) | (np.isfinite(got) & np.isfinite(want)) | (over & (got == np.copysign(np.inf, want)))
    wrong = np.flatnonzero(~(same | np.isnan(want)))
    return (
        _describe_wrong_elements("infinite where it should not be, or not where it should", wrong, got, want)
        if wrong.size
        else ""
    )


def _check_zero_signs(got: Array, want: Array) -> str:
    """Check that zeros have the sign of the reference; return the problem, or "".

    A reference too small for the dtype has a sign, too.
    """
    wrong = np.flatnonzero((got == 0) & ~np.isnan(want) & (np.signbit(got) != np.signbit(want)))
    return _describe_wrong_elements("zero with the wrong sign", wrong, got, want) if wrong.size else ""


def _check_error_budgets(
    error: Array, want: Array, element: Array, row: Array, got: Array, dtype: DType
) -> ArrayDifference:
    """Check the error of each element against its budget, and the mean square error of each row against its budget.

    Args:
        error: absolute errors.
        want: the reference.
        element: error budget of each element.
        row: root mean square error budget of each element's row.
        got: the result, for the message.
        dtype: dtype of the result.
    """
    if not error.size:
        return ArrayDifference()
    rows = (-1, error.shape[-1]) if error.ndim else (1, 1)
    e, w, limit, mean = (x.reshape(rows) for x in (error, want, np.maximum(element, 1e-60), np.maximum(row, 1e-60)))
    scale = np.maximum(np.abs(w), mean).max(-1, keepdims=True, initial=MIN_NORMAL)  # squares must not overflow
    norm = np.maximum(((w / scale) ** 2).sum(-1), 1e-60)
    row_error, row_limit = ((e / scale) ** 2).sum(-1) / norm, ((mean / scale) ** 2).sum(-1) / norm
    ulps = compute_ulp(w, dtype)
    excess = int(np.argmax(e / limit))
    worst_row = int(np.argmax(row_error / np.maximum(row_limit, 1e-200)))
    difference = ArrayDifference(
        "",
        float(row_error[worst_row]),
        float(row_limit[worst_row]),
        float((e / ulps).reshape(-1)[excess]),
        float((limit / ulps).reshape(-1)[excess]),
    )
    wrong = np.flatnonzero(e > limit)
    if wrong.size:
        return _with_failure_reason(difference, _describe_wrong_elements("too far off", wrong, got, want, first=excess))
    if row_error[worst_row] > row_limit[worst_row]:
        return _with_failure_reason(difference, f"row {worst_row} of {len(e)} is too far off as a whole")
    return difference


def _with_failure_reason(found: ArrayDifference, why: str) -> ArrayDifference:
    """Return the difference with a reason for the failure."""
    return ArrayDifference(f"{why}; {found}", found.nmse, found.nmse_limit, found.ulp, found.ulp_limit)


def _describe_wrong_elements(what: str, wrong: Array, got: Array, want: Array, first: int | None = None) -> str:
    """Describe the number of wrong elements, and one of them with its index, its value and the expected value."""
    at = int(wrong[0]) if first is None else first
    index = [int(i) for i in np.unravel_index(at, want.shape)] if want.ndim else []
    g, w = got.reshape(-1)[at], want.reshape(-1)[at]
    values_text = f"{g:.9g}, expected {w:.9g}" if got.dtype.kind == "f" else f"{g}, expected {w}"
    return f"{wrong.size} of {want.size} elements {what}, as at {index}: got {values_text}"
