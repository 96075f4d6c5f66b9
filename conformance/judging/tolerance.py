"""How near is near enough is derived, not listed per op.

The error that is fair to expect of one element of a result is

* the rounding of the result to its dtype, once;
* the rounding of the arithmetic, which grows with the number of terms that meet in one element (the signature's
  contracted and coupled dimensions), measured against the sum of their magnitudes where they are added up;
* what rounding operands and attributes would do: the reference is evaluated again with each of them moved by one
  rounding, so that an ill-conditioned point (a large exponent, an angle of many turns) is judged as such.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...graph.attrs import Attr
from ...graph.dtypes import DType
from ...graph.spec import Spec
from ...ops.declaration.signature import DimensionRole, LeadingAxes
from ..trials.case import Case
from ..trials.layouts import Array

ELEMENT = 8.0
"""An element may be wrong by this many times the expected error of the arithmetic ..."""
ROW = 5.0
"""... and a row, in the root mean square over its elements, by this many times."""
F32_EPS = float(np.finfo(np.float32).eps)
TINY = float(np.finfo(np.float32).tiny)
"""Below it numbers are subnormal, and what is added up may lose them."""
SUBNORMAL_STEP: Mapping[DType, float] = {DType.F16: 2.0**-24, DType.BF16: 2.0**-133}
"""The distance between subnormal numbers."""
F32_SUBNORMAL_STEP = 2.0**-149


@dataclass(frozen=True, slots=True)
class Budget:
    """The error each element may have: by rounding the result once, and expected of the arithmetic."""

    rounding: Array
    arithmetic: Array

    @property
    def element(self) -> Array:
        return self.rounding + ELEMENT * self.arithmetic

    @property
    def row(self) -> Array:
        return self.rounding + ROW * self.arithmetic


def terms(case: Case) -> int:
    """How many numbers may meet in one element of a result."""
    signature = case.declared.signature_for(case.settled)
    alone = (DimensionRole.PARALLEL, DimensionRole.INDEXED)
    meeting = {f for d in signature.dims if d.role not in alone for f in d.factors}
    sizes = case.sizes
    count = math.prod(int(f) if f.isdecimal() else sizes.get(f, 1) for f in meeting)
    for operand in signature.operands:
        if operand.leading is LeadingAxes.CONTRACTED and operand.name in case.specs:
            return max(1, count * case.specs[operand.name].size)
    return max(1, count)


class Yardstick:
    """The expected error of every element of the results of one case."""

    def __init__(self, case: Case, operands: Mapping[str, Array], arithmetic: float = F32_EPS) -> None:
        self.case, self.op, self.attrs, self.operands = case, case.declared, case.settled, operands
        self.arithmetic = arithmetic
        self.count = terms(case)
        # Equal addends are rounded the same way each time, so that their errors add up instead of averaging out.
        equal = case.inputs == "constant" or case.layout == "broadcast"
        self.growth = 1.0 + (self.count / 16.0 if equal else math.sqrt(self.count) / 8.0)
        self.wanted = self._run(operands, self.attrs)

    def _run(self, operands: Mapping[str, Array], attrs: Mapping[str, Attr]) -> tuple[Array, ...]:
        count = len(self.op.signature_for(attrs).operands)
        with np.errstate(all="ignore"):
            return self.op.run_reference([operands.get(n) for n in self.op.operand_names[:count]], attrs)

    def budgets(self, specs: Sequence[Spec]) -> list[Budget]:
        """For each result, 0 where it has to be exact."""
        nothing = [Budget(np.zeros(w.shape), np.zeros(w.shape)) for w in self.wanted]
        if self.op.compare != "close" or all(s.dtype.is_integer for s in specs):
            return nothing
        moved = self._moved()
        budgets = []
        for i, (want, spec) in enumerate(zip(self.wanted, specs, strict=True)):
            if spec.dtype.is_integer:
                budgets.append(nothing[i])
                continue
            size = np.where(np.isfinite(want), np.abs(want), 0.0)
            unit = self.arithmetic * self.growth * size + self.growth * self._spread_over_rows(moved[i], i)
            rounding = 0.51 * eps_of(spec.dtype) * size + SUBNORMAL_STEP.get(spec.dtype, F32_SUBNORMAL_STEP)
            budgets.append(Budget(rounding, unit + self._floor()))
        return budgets

    def _floor(self) -> float:
        """The loss where an intermediate number is too small, if others then multiply it: where nothing is
        flushed, no more than its rounding."""
        lost = self.growth * (F32_SUBNORMAL_STEP if self._is_gradual() else TINY)
        for array in self.operands.values():
            if array.dtype.kind == "f" and array.size:
                size = np.abs(array[np.isfinite(array)])
                lost *= max(1.0, float(size.max(initial=0.0)))
        return min(lost, 1e-20)

    def _is_gradual(self) -> bool:
        """Whether subnormal numbers are drawn that the op promises not to flush to zero."""
        return self.case.signed_zeros and self.case.inputs in ("denormal", "special")

    def _moved(self) -> list[Array]:
        """What rounding each operand and all attributes changes, added up over them."""
        total = [np.zeros(w.shape) for w in self.wanted]
        rng = np.random.default_rng(0)
        eps = self.arithmetic
        floats = {n: a for n, a in self.operands.items() if a.dtype.kind == "f"}
        if self._contracts():
            magnitudes = self._run({n: np.abs(a) if n in floats else a for n, a in self.operands.items()}, self.attrs)
            return [eps * np.abs(np.nan_to_num(m)) for m in magnitudes]
        for name, array in floats.items():
            # Twice, and of different sizes, so that no row is moved by one common factor, which a norm ignores.
            moved = [{**self.operands, name: array * (1.0 + eps * _shifts(array.shape, rng))} for _ in range(2)]
            self._add_change(total, moved if self.count > 1 else moved[:1], self.attrs)
        if self.case.inputs == "denormal" and not self._is_gradual():
            flushed = {n: np.where(np.abs(a) < TINY, 0.0, a) for n, a in floats.items()}
            self._add_change(total, [{**self.operands, **flushed}], self.attrs)
        nudged = {k: v * (1.0 + eps) if isinstance(v, float) and math.isfinite(v) else v for k, v in self.attrs.items()}
        if nudged != dict(self.attrs):
            self._add_change(total, [self.operands], nudged)
        return total

    def _add_change(self, total: list[Array], moved: Sequence[Mapping[str, Array]], attrs: Mapping[str, Attr]) -> None:
        """Add to `total` the largest change that any of the moved operands makes."""
        changes = [np.zeros(w.shape) for w in self.wanted]
        for operands in moved:
            for i, (new, old) in enumerate(zip(self._run(operands, attrs), self.wanted, strict=True)):
                with np.errstate(all="ignore"):
                    change = np.abs(new.astype(np.float64) - old) if new.shape == old.shape else changes[i]
                changes[i] = np.maximum(changes[i], np.where(np.isfinite(change), change, 0.0))
        for mine, change in zip(total, changes, strict=True):
            mine += change

    def _contracts(self) -> bool:
        signature = self.op.signature_for(self.attrs)
        return any(d.role is DimensionRole.CONTRACTED for d in signature.dims) or any(
            o.leading is LeadingAxes.CONTRACTED for o in signature.operands
        )

    def _spread_over_rows(self, change: Array, result: int) -> Array:
        """Where elements depend on each other, none is better conditioned than they are in the mean: over the last
        axis, and over every axis that the signature couples."""
        if self._contracts() or self.count == 1 or not change.ndim or not change.size:
            return change
        signature = self.op.signature_for(self.attrs)
        coupled = {f for d in signature.dims if d.role is DimensionRole.COUPLED for f in d.factors}
        dims = signature.results[result].dims
        axes = {i - len(dims) for i, d in enumerate(dims) if coupled & set(d.factors)} | {-1}
        return np.maximum(change, np.sqrt(np.mean(change * change, axis=tuple(axes), keepdims=True)))


def _shifts(shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """About one rounding, up or down."""
    return rng.choice(np.array([-1.0, 1.0]), shape) * rng.uniform(0.5, 1.5, shape)


def eps_of(dtype: DType) -> float:
    """The distance from 1 to the next number of a float dtype."""
    return {DType.F16: 2.0**-10, DType.BF16: 2.0**-7}.get(dtype, F32_EPS)
