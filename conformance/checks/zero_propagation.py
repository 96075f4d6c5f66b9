"""Zero checks: zeros in operands give exact zeros in the result, as an op declares in `zeros`, at random indices."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..cases.case import Case
from ..cases.operand_layouts import Array
from .metamorphic import infer_result_specs

CHECK_NAME = "zeros"
"""The start of the names of these checks."""


def list_zero_checks(case: Case) -> tuple[str, ...]:
    """Return the names of the zero checks that apply to a case, such as ``zeros-gate``."""
    specs = case.specs
    if case.layout in ("twin", "overlap") or any(s.dtype.is_quantised for s in specs.values()):
        return ()
    joints = [j for j in case.op_declaration.zeros if all(n in specs and specs[n].size for n in j.split("+"))]
    return tuple(f"{CHECK_NAME}-{joint}" for joint in joints)


def zero_entries_and_find_zero_results(case: Case, units: Mapping[str, Array]) -> tuple[dict[str, Array], Array]:
    """Set random entries of operands to zero, and find the result entries that must become zero.

    The zeros are at random indices of the leading axes that the operands share with the result.

    Returns:
        The operands with zeros, and a mask of these result entries.
    """
    names = case.check.removeprefix(f"{CHECK_NAME}-").split("+")
    (result,) = infer_result_specs(case)
    count = min(_count_shared_leading_axes(case, name) for name in names)
    mask = np.random.default_rng(case.random_seed).random(result.shape[:count]) < 0.5
    operands = dict(units)
    for name in names:
        operands[name] = np.where(
            _append_unit_axes(mask, operands[name].ndim), np.zeros((), operands[name].dtype), operands[name]
        )
    return operands, np.broadcast_to(_append_unit_axes(mask, len(result.shape)), result.shape)


def _append_unit_axes(mask: Array, rank: int) -> Array:
    """Append axes of size 1 to a mask of leading axes, so that the mask broadcasts over an array of rank `rank`."""
    return mask.reshape(mask.shape + (1,) * (rank - mask.ndim))


def _count_shared_leading_axes(case: Case, name: str) -> int:
    """Return the number of leading axes that operand `name` shares with the result, index by index."""
    op, (result,) = case.op_declaration, infer_result_specs(case)
    specs = [case.specs.get(n) for n in op.operand_names]
    at, rank = op.operand_names.index(name), len(case.specs[name].shape)
    return max(n for n in range(rank + 1) if op.keeps_leading_axes(specs, result, case.attributes_with_defaults, at, n))
