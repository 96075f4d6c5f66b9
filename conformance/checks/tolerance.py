"""Error budgets of results, derived from the signature of an op and not listed by op.

The expected error of one element of a result has three parts:

* One rounding of the result to its dtype.
* The rounding of the arithmetic. It grows with the number of terms of one element, which the contracted and coupled
  dimensions of the signature give. For sums, its unit is the sum of the magnitudes of the terms.
* The effect of rounded operands and attributes. The reference runs again with each of them perturbed by one rounding,
  so that an ill-conditioned point, such as a large exponent, has a large budget.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...graph.attrs import Attr
from ...graph.dtypes import DType
from ...graph.spec import Spec
from ...ops.declaration.signature import DimensionRole, LeadingAxesBroadcast
from ..cases.case import Case
from ..cases.operand_layouts import Array

ELEMENT_FACTOR = 8.0
"""Maximum error of an element, as a multiple of the expected error of the arithmetic."""
ROW_FACTOR = 5.0
"""Maximum root mean square error of a row, as a multiple of the expected error of the arithmetic."""
F32_EPS = float(np.finfo(np.float32).eps)
"""The distance from 1 to the next float32."""
MIN_NORMAL = float(np.finfo(np.float32).tiny)
"""The smallest normal float32. Smaller numbers are subnormal, and a sum may lose them."""
SUBNORMAL_STEP: Mapping[DType, float] = {DType.F16: 2.0**-24, DType.BF16: 2.0**-133}
"""The distance between subnormal numbers by dtype; `F32_SUBNORMAL_STEP` for other dtypes."""
F32_SUBNORMAL_STEP = 2.0**-149
"""The distance between subnormal float32 numbers."""
SIGN_SAMPLES = 16
"""Runs with perturbed operands that look for infinities of unstable sign; each finds half of the remaining ones."""


@dataclass(frozen=True, slots=True)
class ErrorBudget:
    """The permitted error of each element of a result: the rounding of the result and the error of the arithmetic."""

    rounding: Array
    arithmetic: Array

    @property
    def max_element_error(self) -> Array:
        """The maximum error of each element."""
        return self.rounding + ELEMENT_FACTOR * self.arithmetic

    @property
    def row_rms_error_per_element(self) -> Array:
        """The budget for the root mean square (RMS) error of a row, by element.

        The RMS of these values over a row is the maximum RMS error of that row.
        """
        return self.rounding + ROW_FACTOR * self.arithmetic


def count_terms_per_element(case: Case) -> int:
    """Return the number of terms that are summed or combined in one element of a result, at least 1."""
    signature = case.op_declaration.signature_for(case.attributes_with_defaults)
    alone = (DimensionRole.PARALLEL, DimensionRole.INDEXED)
    summed = {f for d in signature.operand_dims if d.role not in alone for f in d.factors}
    sizes = case.dimension_sizes
    count = math.prod(int(f) if f.isdecimal() else sizes.get(f, 1) for f in summed)
    for operand in signature.operands:
        if operand.leading is LeadingAxesBroadcast.CONTRACTED and operand.name in case.specs:
            return max(1, count * case.specs[operand.name].size)
    return max(1, count)


class ExpectedResult:
    """The float64 results of the reference for one case, from which the permitted errors are computed.

    - `arrays`: the results.
    - `arithmetic`: the relative error of one operation.
    - `growth`: how the error grows with the number of terms.
    """

    def __init__(self, case: Case, operands: Mapping[str, Array], arithmetic: float = F32_EPS) -> None:
        self.case, self.op, self.attrs, self.operands = (
            case,
            case.op_declaration,
            case.attributes_with_defaults,
            operands,
        )
        self.arithmetic = arithmetic
        self.count = count_terms_per_element(case)
        # Equal addends are rounded the same way each time, so that their errors add up instead of averaging out.
        equal = case.inputs == "constant" or case.layout == "broadcast"
        self.growth = 1.0 + (self.count / 16.0 if equal else math.sqrt(self.count) / 8.0)
        self.arrays = self._run_reference_without_nan_warnings(operands, self.attrs)

    def _run_reference_without_nan_warnings(
        self, operands: Mapping[str, Array], attrs: Mapping[str, Attr]
    ) -> tuple[Array, ...]:
        """Run the reference without warnings about NaN and infinities."""
        count = len(self.op.signature_for(attrs).operands)
        with np.errstate(all="ignore"):
            return self.op.run_reference([operands.get(n) for n in self.op.operand_names[:count]], attrs)

    def compute_error_budgets(self, specs: Sequence[Spec]) -> list[ErrorBudget]:
        """Compute the error budget of each result; 0 if the result has to be exact.

        Args:
            specs: specs of the results.
        """
        nothing = [ErrorBudget(np.zeros(w.shape), np.zeros(w.shape)) for w in self.arrays]
        if self.op.compare != "close" or all(s.dtype.is_integer for s in specs):
            return nothing
        moved = self._compute_perturbation_errors()
        budgets = []
        for i, (want, spec) in enumerate(zip(self.arrays, specs, strict=True)):
            if spec.dtype.is_integer:
                budgets.append(nothing[i])
                continue
            size = np.where(np.isfinite(want), np.abs(want), 0.0)
            unit = self.arithmetic * self.growth * size + self.growth * self._raise_to_row_rms(moved[i], i)
            rounding = 0.51 * find_machine_epsilon(spec.dtype) * size + SUBNORMAL_STEP.get(
                spec.dtype, F32_SUBNORMAL_STEP
            )
            budgets.append(ErrorBudget(rounding, unit + self._compute_amplified_underflow_error()))
        return budgets

    def mask_nan_from_infinities(self, result: int) -> Array:
        """Return a mask of the elements that may be NaN, because a backend may turn an infinity of an operand into NaN.

        Args:
            result: index of the result.
        """
        names = self.case.nan_for_infinity_operands
        damaged = {n: np.where(np.isinf(a), np.nan, a) if n in names else a for n, a in self.operands.items()}
        return np.asarray(np.isnan(self._run_reference_without_nan_warnings(damaged, self.attrs)[result]))

    def mask_infinities_with_unstable_sign(self, result: int) -> Array:
        """Return a mask of the infinite elements that change sign if operands are rounded, as in the sine of 1e39."""
        rng, want = np.random.default_rng(0), self.arrays[result]
        found = np.zeros(want.shape, bool)
        for _ in range(SIGN_SAMPLES):
            moved = {
                n: a * (1.0 + self.arithmetic * _draw_rounding_perturbations(a.shape, rng))
                if a.dtype.kind == "f"
                else a
                for n, a in self.operands.items()
            }
            found |= np.isinf(want) & (self._run_reference_without_nan_warnings(moved, self.attrs)[result] == -want)
        return found

    def _compute_amplified_underflow_error(self) -> float:
        """Compute the error of a result if an intermediate number underflows before it is multiplied by operands.

        If subnormal numbers must be kept, the error is the rounding of a subnormal number.
        """
        lost = self.growth * (F32_SUBNORMAL_STEP if self._has_subnormal_operands_to_keep() else MIN_NORMAL)
        for array in self.operands.values():
            if array.dtype.kind == "f" and array.size:
                size = np.abs(array[np.isfinite(array)])
                lost *= max(1.0, float(size.max(initial=0.0)))
        return min(lost, 1e-20)

    def _has_subnormal_operands_to_keep(self) -> bool:
        """Return whether operands have subnormal numbers that the op must not flush to zero."""
        return self.case.needs_signed_zeros_and_subnormals and self.case.inputs in ("denormal", "special")

    def _compute_perturbation_errors(self) -> list[Array]:
        """Compute how much each result changes if operands and attributes are perturbed by a rounding.

        Each operand is perturbed separately, and the attributes are perturbed together. Their changes are added.
        """
        total = [np.zeros(w.shape) for w in self.arrays]
        rng = np.random.default_rng(0)
        eps = self.arithmetic
        floats = {n: a for n, a in self.operands.items() if a.dtype.kind == "f"}
        if self._has_contracted_axes():
            magnitudes = self._run_reference_without_nan_warnings(
                {n: np.abs(a) if n in floats else a for n, a in self.operands.items()}, self.attrs
            )
            return [eps * np.abs(np.nan_to_num(m)) for m in magnitudes]
        for name, array in floats.items():
            # Twice, and of different sizes, so that no row is moved by one common factor, which a norm ignores.
            moved = [
                {**self.operands, name: array * (1.0 + eps * _draw_rounding_perturbations(array.shape, rng))}
                for _ in range(2)
            ]
            self._add_largest_change(total, moved if self.count > 1 else moved[:1], self.attrs)
        if self.case.inputs == "denormal" and not self._has_subnormal_operands_to_keep():
            flushed = {n: np.where(np.abs(a) < MIN_NORMAL, 0.0, a) for n, a in floats.items()}
            self._add_largest_change(total, [{**self.operands, **flushed}], self.attrs)
        nudged = {k: v * (1.0 + eps) if isinstance(v, float) and math.isfinite(v) else v for k, v in self.attrs.items()}
        if nudged != dict(self.attrs):
            self._add_largest_change(total, [self.operands], nudged)
        return total

    def _add_largest_change(
        self, total: list[Array], moved: Sequence[Mapping[str, Array]], attrs: Mapping[str, Attr]
    ) -> None:
        """Add to `total`, for each result, the largest change among runs with perturbed operands.

        Args:
            total: sums of the changes by result, which are updated in place.
            moved: perturbed operands of each run.
            attrs: attributes of the runs.
        """
        changes = [np.zeros(w.shape) for w in self.arrays]
        for operands in moved:
            for i, (new, old) in enumerate(
                zip(self._run_reference_without_nan_warnings(operands, attrs), self.arrays, strict=True)
            ):
                with np.errstate(all="ignore"):
                    change = np.abs(new.astype(np.float64) - old) if new.shape == old.shape else changes[i]
                changes[i] = np.maximum(changes[i], np.where(np.isfinite(change), change, 0.0))
        for mine, change in zip(total, changes, strict=True):
            mine += change

    def _has_contracted_axes(self) -> bool:
        """Return whether the signature has contracted dimensions or contracted leading axes."""
        signature = self.op.signature_for(self.attrs)
        return any(d.role is DimensionRole.CONTRACTED for d in signature.operand_dims) or any(
            o.leading is LeadingAxesBroadcast.CONTRACTED for o in signature.operands
        )

    def _raise_to_row_rms(self, change: Array, result: int) -> Array:
        """Raise each change that is below the root mean square (RMS) of its row to this RMS.

        A row has all elements that depend on each other: the last axis and the coupled axes of the signature.
        """
        if self._has_contracted_axes() or self.count == 1 or not change.ndim or not change.size:
            return change
        signature = self.op.signature_for(self.attrs)
        coupled = {f for d in signature.operand_dims if d.role is DimensionRole.COUPLED for f in d.factors}
        dims = signature.results[result].dims
        axes = {i - len(dims) for i, d in enumerate(dims) if coupled & set(d.factors)} | {-1}
        return np.maximum(change, np.sqrt(np.mean(change * change, axis=tuple(axes), keepdims=True)))


def _draw_rounding_perturbations(shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Draw random perturbations of 0.5 to 1.5 roundings, up or down."""
    return rng.choice(np.array([-1.0, 1.0]), shape) * rng.uniform(0.5, 1.5, shape)


def find_machine_epsilon(dtype: DType) -> float:
    """Return the machine epsilon of a float dtype: the distance from 1 to the next number."""
    return {DType.F16: 2.0**-10, DType.BF16: 2.0**-7}.get(dtype, F32_EPS)
