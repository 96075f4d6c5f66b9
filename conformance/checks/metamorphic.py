"""Metamorphic checks, which need no reference: partial runs of an op, joined, equal the whole run.

The signature of an op implies them:

* ``cut``: a parallel dimension is split, and the results are joined.
* ``sum``: a contracted dimension is split, and the results are added.
* ``deal``: the rows of a lookup table are split, and the results are added.
* ``steps``: the op runs twice along its `sequential` dimension, and the second run gets the state of the first.

The name of a check has the dimension, too: ``cut-m``. Every case also checks that a replay equals the first run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...graph.spec import Spec, check_spec
from ...ops import Op
from ...ops.declaration.signature import Dimension, DimensionRole, Operand
from ..cases.case import Case
from ..cases.operand_layouts import Array
from . import decomposed

AxisEntries = tuple[int, Array]
"""An axis, and the indices of some entries along it."""


@dataclass(frozen=True, slots=True)
class PartialCase:
    """One of the smaller cases into which a metamorphic check splits a case; together they give the whole result.

    - `case`: the smaller case.
    - `reads`: for each split operand, the axis and the indices of the entries that this run reads.
    - `writes`: for each result, the axis and the indices of the entries that this run computes. With None, the results
      of all runs are equal, or the result of the last run is the whole one.
    - `carried_results`: for each operand that continues the previous run, the index of the result that replaces it.
    - `zeroed_operands`: operands that are zero in this run.
    """

    case: Case
    reads: Mapping[str, AxisEntries]
    writes: tuple[AxisEntries | None, ...]
    carried_results: Mapping[str, int]
    zeroed_operands: tuple[str, ...] = ()


_CHECKS = {DimensionRole.PARALLEL: "cut", DimensionRole.CONTRACTED: "sum", DimensionRole.INDEXED: "deal"}


def list_metamorphic_checks(case: Case) -> tuple[str, ...]:
    """Return the names of the metamorphic checks that apply to a case, including decomposition checks.

    A metamorphic check compares a case with other runs that must give the same result, such as runs of its two halves.
    """
    op, attrs = case.op_declaration, case.attributes_with_defaults
    if op.infer_spec is not None or op.localise is not None or op.is_view or not case.operands:
        return ()
    checks = list(decomposed.list_decomposition_checks(case))
    signature, sizes = op.signature_for(attrs), case.dimension_sizes
    roles: dict[str, set[DimensionRole]] = {}
    for operand in signature.operands:
        for dim in operand.dims if operand.name in case.specs else ():
            for factor in dim.factors:
                roles.setdefault(factor, set()).add(dim.role)
    whole = op.unsharded_dimensions(attrs) if op.unsharded_dimensions else ()
    for name, kinds in roles.items():
        if name.isdecimal() or sizes.get(name, 0) < 2 or name in whole:
            continue
        check = _CHECKS.get(next(iter(kinds))) if len(kinds) == 1 else None
        check = "steps" if name == op.sequential else check
        if check and split_case(case.with_settings(check=f"{check}-{name}")):
            checks.append(f"{check}-{name}")
    return tuple(checks)


def split_case(case: Case) -> tuple[PartialCase, ...]:
    """Split a case into the smaller cases of its metamorphic check.

    The result is empty if the dimension cannot be split.
    """
    check, _, name = case.check.partition("-")
    size = case.dimension_sizes[name]
    blocks = [s.dtype.block for n, s in case.operands if _has_dimension_in_last_axis(case, n, name)]
    unit = math.lcm(1, *blocks)
    middle = (size // unit + 1) // 2 * unit
    if not 0 < middle < size:
        return ()
    if check == "steps":
        return _split_sequential_dimension(case, name, middle)
    if check == "deal":
        return _split_table_rows_into_partial_sums(case, name, middle)
    signature = case.op_declaration.signature_for(case.attributes_with_defaults)
    if check == "cut" and not any(name in d.factors for r in signature.results for d in r.dims):
        return ()
    halves = (np.arange(middle), np.arange(middle, size))
    runs = tuple(_make_partial_case(case, {name: p}, {name: p}) for p in halves)
    return runs if all(p is not None for p in runs) else ()  # type: ignore[return-value]  # mypy does not see through all()


def _has_dimension_in_last_axis(case: Case, operand: str, name: str) -> bool:
    """Return whether dimension `name` is on the last axis of an operand."""
    declared = next(
        o for o in case.op_declaration.signature_for(case.attributes_with_defaults).operands if o.name == operand
    )
    return bool(declared.dims) and name in declared.dims[-1].factors


def _make_partial_case(
    case: Case, reads: Mapping[str, Array], writes: Mapping[str, Array], carried: Mapping[str, int] | None = None
) -> PartialCase | None:
    """Make the smaller case that computes only some entries of some dimensions; None if its shapes are illegal.

    Args:
        case: the whole case.
        reads: by dimension name, the indices that the smaller case reads from operands.
        writes: by dimension name, the indices of the result entries that it computes.
        carried: by operand, the index of the result of the previous smaller case that replaces the operand.
    """
    op, sizes = case.op_declaration, case.dimension_sizes
    signature = op.signature_for(case.attributes_with_defaults)
    operands, places = [], {}
    for name, spec in case.operands:
        declared = next(o for o in signature.operands if o.name == name)
        place = _find_split_axis_and_indices(declared, spec.shape, reads, sizes)
        if place is not None:
            axis, entries = place
            spec = Spec((*spec.shape[:axis], len(entries), *spec.shape[axis + 1 :]), spec.dtype)
            places[name] = place
        operands.append((name, spec))
    smaller = case.with_settings(operands=tuple(operands), check="reference")
    if any(check_spec(s) for _, s in operands):
        return None
    shapes = [s.shape for s in infer_result_specs(case)]
    filled = tuple(
        _find_split_axis_and_indices(r, shape, writes, sizes)
        for r, shape in zip(signature.results, shapes, strict=True)
    )
    return PartialCase(smaller, places, filled, carried or {})


def _find_split_axis_and_indices(
    operand: Operand, shape: tuple[int, ...], split_entries: Mapping[str, Array], sizes: Mapping[str, int]
) -> AxisEntries | None:
    """Find the axis of an operand or result that a split divides, and the indices along it that belong to one part.

    The result is None if the operand has no split dimension.

    Args:
        operand: the operand or result in the signature.
        shape: shape of the whole operand.
        split_entries: by name of a split dimension, the indices that belong to the part.
        sizes: sizes of all dimensions.
    """
    first = len(shape) - len(operand.dims)
    for axis, dim in enumerate(operand.dims, first):
        for name, entries in split_entries.items():
            if name in dim.factors and not (dim.may_be_one and shape[axis] == 1 and sizes[name] != 1):
                return axis, _expand_factor_entries(dim, name, entries, sizes)
    return None


def _expand_factor_entries(dim: Dimension, name: str, entries: Array, sizes: Mapping[str, int]) -> Array:
    """Return the indices along a product axis at which the factor `name` has one of the indices `entries`."""
    shape = [int(f) if f.isdecimal() else sizes[f] for f in dim.factors]
    return np.arange(math.prod(shape)).reshape(shape).take(entries, axis=dim.factors.index(name)).reshape(-1)


def infer_result_specs(case: Case) -> tuple[Spec, ...]:
    """Infer the specs of the results of a case."""
    attrs, specs = case.attributes_with_defaults, case.specs
    count = len(case.op_declaration.signature_for(attrs).operands)
    return case.op_declaration.infer_results([specs.get(n) for n in case.op_declaration.operand_names[:count]], attrs)


def _split_sequential_dimension(case: Case, name: str, middle: int) -> tuple[PartialCase, ...]:
    """Split a case along a sequential dimension, such as tokens, at index `middle`.

    The second part continues with the state of the first part, or its windows overlap the first part. If neither is
    possible, the only part is the prefix before `middle`.
    """
    op, sizes, size = case.op_declaration, case.dimension_sizes, case.dimension_sizes[name]
    results = infer_result_specs(case)
    derived = next(
        (d for d in op.derived_sizes if any(d in dim.factors for dim in _list_dimensions_of_all_results(op, case))), ""
    )
    if derived and derived != name:
        overlap, rows = size - sizes[derived], sizes[derived]
        at = (rows + 1) // 2
        spans = ((0, at), (at, rows)) if 0 < at < rows else ()
        runs = [
            _make_partial_case(case, {name: np.arange(a, b + overlap)}, {derived: np.arange(a, b)}) for a, b in spans
        ]
    elif carried := {
        n: r for r, n in op.inplace_pairs(case.attributes_with_defaults) if r > 0 and case.specs.get(n) == results[r]
    }:
        if any(s.dtype.is_integer for _, s in case.operands):
            return ()
        first, second = ({name: p} for p in (np.arange(middle), np.arange(middle, size)))
        runs = [_make_partial_case(case, first, first), _make_partial_case(case, second, second, carried)]
    elif len(results) == 1:
        prefix = {name: np.arange(middle)}
        runs = [_make_partial_case(case, prefix, prefix)]
    else:
        return ()
    return tuple(r for r in runs if r is not None) if None not in runs else ()


def _split_table_rows_into_partial_sums(case: Case, name: str, middle: int) -> tuple[PartialCase, ...]:
    """Split the rows of a lookup table into two shards; the results of both shards must add up to the whole result.

    An operand that the op adds is zero in the second part, so that it counts once.
    """
    lookup, size = (
        case.op_declaration.signature_for(case.attributes_with_defaults).indexed_dimension,
        case.dimension_sizes[name],
    )
    assert lookup is not None
    if case.attributes_with_defaults["total"]:
        return ()
    table = lookup[0].name
    joint = next(
        j.split("+")
        for j in case.op_declaration.linear_operands(case.attributes_with_defaults)
        if table in j.split("+")
    )
    runs = []
    for start, stop in ((0, middle), (middle, size)):
        part = _make_partial_case(case, {name: np.arange(start, stop)}, {})
        if part is None:
            return ()
        attrs = (*case.attrs, *((k, v) for k, v in (("first", start), ("total", size)) if v))
        nothing = tuple(n for n in joint if n != table and start)
        runs.append(replace(part, case=part.case.with_settings(attrs=attrs), zeroed_operands=nothing))
    return tuple(runs)


def _list_dimensions_of_all_results(op: Op, case: Case) -> Sequence[Dimension]:
    """Return the dimensions on the axes of all results of an op, in the order of the signature."""
    return [d for r in op.signature_for(case.attributes_with_defaults).results for d in r.dims]


def join_results_with_masks(
    case: Case, parts: Sequence[PartialCase], outputs: Sequence[Sequence[Array]]
) -> list[tuple[Array, Array]]:
    """Join the results of partial runs to the whole results; return each with a mask of the entries that were computed.

    The results of ``sum`` and ``deal`` checks are added. Results of other checks are written to their entries.
    """
    pairs = []
    for i, spec in enumerate(infer_result_specs(case)):
        whole = np.zeros(spec.shape, outputs[0][i].dtype)
        filled = np.zeros(spec.shape, bool)
        for part, results in zip(parts, outputs, strict=True):
            place = part.writes[i]
            if case.check.startswith(("sum", "deal")):
                whole += results[i]
                filled[...] = True
            elif place is None:
                whole[...] = results[i]
                filled[...] = True
            else:
                at = (slice(None),) * place[0] + (place[1],)
                whole[at] = results[i]
                filled[at] = True
        pairs.append((whole, filled))
    return pairs
