"""Zeros give zeros, exactly: what an op declares in `zeros`, for entries drawn by chance."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..trials.case import Case
from ..trials.layouts import Array
from .metamorphic import result_specs

CHECK = "zeros"


def names_for(case: Case) -> tuple[str, ...]:
    """The checks of this kind that apply to a case: ``zeros-gate`` and so on."""
    specs = case.specs
    if case.layout == "twin" or any(s.dtype.is_quantised for s in specs.values()):
        return ()
    joints = [j for j in case.declared.zeros if all(n in specs and specs[n].size for n in j.split("+"))]
    return tuple(f"{CHECK}-{joint}" for joint in joints)


def zeroed(case: Case, units: Mapping[str, Array]) -> tuple[dict[str, Array], Array]:
    """The operands of a case, those of its check zero at some indices of the axes that they share with the result; and
    where the result must be zero therefore."""
    names = case.check.removeprefix(f"{CHECK}-").split("+")
    (result,) = result_specs(case)
    count = min(_shared(case, name) for name in names)
    mask = np.random.default_rng(case.random_seed).random(result.shape[:count]) < 0.5
    operands = dict(units)
    for name in names:
        operands[name] = np.where(_over(mask, operands[name].ndim), np.zeros((), operands[name].dtype), operands[name])
    return operands, np.broadcast_to(_over(mask, len(result.shape)), result.shape)


def _over(mask: Array, rank: int) -> Array:
    return mask.reshape(mask.shape + (1,) * (rank - mask.ndim))


def _shared(case: Case, name: str) -> int:
    """How many first axes of an operand are those of the result."""
    op, (result,) = case.declared, result_specs(case)
    specs = [case.specs.get(n) for n in op.operand_names]
    at, rank = op.operand_names.index(name), len(case.specs[name].shape)
    return max(n for n in range(rank + 1) if op.keeps_leading_axes(specs, result, case.settled, at, n))
