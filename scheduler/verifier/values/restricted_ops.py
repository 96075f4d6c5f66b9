"""The entries of a node's results, inferred from the entries of its operands and the declaration of its op.

The verifier of plans calls `infer_result_entries` for every node of a device, with the matching node of the user's
graph and the entries of the operands. A local version of a graph node computes some entries of its results.

Example: The user multiplies a weight of 6 rows by 3 vectors of 8. A device with the rows 2 and 3 of the weight
computes the columns 2 and 3 of the product. A device with the columns 0 to 3 of both operands computes all of the
product as a partial sum of 4 of 8 terms.

>>> def entries(*runs: tuple[int, int]) -> ValueEntries:
...     return tuple(((run,), ()) for run in runs)
>>> user = NodeSpecs((), (Spec((6, 8)), Spec((3, 8))), (Spec((3, 6)),))
>>> rows = NodeSpecs((), (Spec((2, 8)), Spec((3, 8))), (Spec((3, 2)),))
>>> infer_result_entries("mul_mat", user, rows, (entries((2, 2), (0, 8)), entries((0, 3), (0, 8)))).axes
(((((0, 3),), ()), (((2, 2),), ())),)
>>> columns = NodeSpecs((), (Spec((6, 4)), Spec((3, 4))), (Spec((3, 6)),))
>>> found = infer_result_entries("mul_mat", user, columns, (entries((0, 6), (0, 4)), entries((0, 3), (0, 4))))
>>> found.partial_sum.index_box
(((0, 4),),)
>>> infer_result_entries("mul_mat", user, columns, (entries((0, 6), (0, 4)), entries((0, 3), (4, 4))))
'operands have different entries of k: [0:4] and [4:8]'
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

from ....graph.spec import Spec
from ....ops import REGISTRY
from ....ops.declaration.axis_links import AxisLink
from ....ops.declaration.op import Op
from ....ops.declaration.signature import Dimension, DimensionRole, LeadingAxesBroadcast, Signature, SignatureMismatch
from .index_sets import (
    IgnoredDigits,
    IndexRanges,
    combine_factor_indices,
    concatenate_indices,
    count_entries,
    find_index_matching_both_values,
    format_index,
    intersect_ignored_digits,
    is_full_index,
    is_valid_broadcast,
    make_index_of_all_entries,
    slice_and_shift_index,
    split_index_into_factors,
    to_factor_digits,
    to_product_digits,
)
from .op_instances import AxisEntries, InferredEntries, LocalTableRows, NodeSpecs, ValueEntries
from .partial_sums import make_contraction_partial_sum

SIZE_ATTRS = frozenset({"shape", "start", "stop"})
"""Attributes that state a size. If the op declares `localise`, they may differ between a node and its local version."""

ROW_RANGE_ATTRS = frozenset({"first", "total"})
"""Attributes that state the local rows of a lookup table (`ops.movement.sharded_tables`)."""


class NodeMismatchError(Exception):
    """Raised if a device's node computes no part of the graph node with which it is compared; the message says why."""


@lru_cache(maxsize=1 << 15)
def infer_result_entries(
    op: str, graph_node: NodeSpecs, device_node: NodeSpecs, operand_entries: tuple[ValueEntries | None, ...]
) -> InferredEntries | str:
    """Infer which entries of a graph node's results a device computes from its parts of the operands.

    Example: with rows 0 to 3 of the weight, a matmul computes columns 0 to 3 of the result.

    Args:
        op: Name of the op.
        graph_node: The node of the user's graph.
        device_node: The device's node.
        operand_entries: Entries of each operand that the device has; None for a missing operand.

    Returns:
        The result entries; text with the reason if the device's node computes no part of the graph's node.
    """
    declared = REGISTRY[op]
    try:
        _require_equal_attrs(declared, graph_node, device_node)
        return (_infer_entries_by_axis_links if declared.links else _infer_entries_by_signature)(
            declared, graph_node, device_node, operand_entries
        )
    except (NodeMismatchError, SignatureMismatch) as why:
        pairs = list(zip(graph_node.results, device_node.results, strict=True))
        if all(m.size == 0 and len(u.shape) == len(m.shape) for u, m in pairs):  # an empty result is always right
            return InferredEntries(tuple(_make_first_entries_of_empty_result(u, m) for u, m in pairs), None)
        return str(why)


def _make_first_entries_of_empty_result(graph_spec: Spec, device_spec: Spec) -> ValueEntries:
    """Return entries for an empty result, which has no values to compare: the first ones of each axis."""
    return tuple((_make_prefix_index(n, m), ()) for n, m in zip(graph_spec.shape, device_spec.shape, strict=True))


def _make_prefix_index(axis_size: int, entry_count: int) -> IndexRanges:
    """Return the index of the first `entry_count` entries of an axis, in order."""
    return make_index_of_all_entries(axis_size) if entry_count == axis_size else make_index_of_all_entries(entry_count)


def _require_equal_attrs(declared: Op[Any], graph_node: NodeSpecs, device_node: NodeSpecs) -> None:
    """Raise `NodeMismatchError` if a device's node has other attributes than its graph node; sizes may differ."""
    theirs, local = device_node.attrs_by_name, list_attrs_that_may_differ(declared)
    for name, value in graph_node.attrs:
        if name in local or (found := theirs.get(name)) is value:
            continue
        if repr(found) != repr(value):  # as text NaN equals NaN, and 0.0 differs from -0.0
            raise NodeMismatchError(f"attribute {name} is {found!r} and not {value!r}")


@cache
def list_attrs_that_may_differ(declared: Op[Any]) -> frozenset[str]:
    """List the attributes that may differ in a device's part of a node: sizes, and row ranges of table lookups."""
    sizes = SIZE_ATTRS if declared.localise is not None else frozenset[str]()
    return sizes | ROW_RANGE_ATTRS if any(s.indexed_dimension for s in declared.signatures.values()) else sizes


# ------------------------------------------------------------------------------------------------------ signatures


@dataclass
class _DimensionEntries:
    """Collects a device's entries of each dimension of an op's signature; all operands must agree on them."""

    entries_by_dimension: dict[str, AxisEntries] = field(default_factory=dict)
    leading_entries: list[AxisEntries] = field(default_factory=list)
    contracted_leading_entries: list[AxisEntries] = field(default_factory=list)

    def record_dimension_entries(self, name: str, entries: AxisEntries) -> None:
        """Store an operand's entries of a dimension; raise `NodeMismatchError` if another operand's differ."""
        self.entries_by_dimension[name] = (
            _unify_entries(self.entries_by_dimension[name], entries, name)
            if name in self.entries_by_dimension
            else entries
        )

    def record_leading_entries(self, common_entries: list[AxisEntries], operand_entries: Sequence[AxisEntries]) -> None:
        """Store an operand's entries of the leading axes in `common_entries`; raise if others differ from them."""
        for i, part in enumerate(operand_entries):
            if i < len(common_entries):
                common_entries[i] = _unify_entries(common_entries[i], part, f"leading axis {i}")
            else:
                common_entries.append(part)


def _unify_entries(entries: AxisEntries, other_entries: AxisEntries, axis_name: str) -> AxisEntries:
    """Return the entries of an axis that two operands share, with the digits that both ignore; raise if they differ."""
    index = find_index_matching_both_values(*entries, *other_entries)
    if index is None:
        raise NodeMismatchError(
            f"operands have different entries of {axis_name}: {format_index(entries[0])} and "
            f"{format_index(other_entries[0])}"
        )
    return index, intersect_ignored_digits(entries[1], other_entries[1])


def _infer_entries_by_signature(
    declared: Op[Any], graph_node: NodeSpecs, device_node: NodeSpecs, operand_entries: tuple[ValueEntries | None, ...]
) -> InferredEntries:
    """Infer the result entries of an op that declares a signature, such as ``a[n k], b[m k] -> [m n]``.

    1. Split the operands' entries into the dimensions of the signature; all operands must agree on each dimension.
    2. Require that the device has all entries of coupled dimensions, which cannot be sharded.
    3. Combine the dimensions to the entries of the results, which must have the shapes of the device's results.
    4. Return the entries of contracted dimensions as a partial sum.
    """
    attrs = graph_node.attrs_by_name
    sizes = declared.resolve_sizes(graph_node.src, attrs).by_name
    local = declared.resolve_sizes(device_node.src, device_node.attrs_by_name).by_name
    signature = declared.signature_for(attrs)
    unsharded_dimensions = declared.unsharded_dimensions(attrs) if declared.unsharded_dimensions else ()
    names, roles = _DimensionEntries(), dict[str, DimensionRole]()
    for operand, spec, part in zip(signature.operands, graph_node.src, operand_entries, strict=False):
        if spec is None or part is None:
            continue
        ahead = len(spec.shape) - len(operand.dims)
        if operand.leading is LeadingAxesBroadcast.EQUAL:
            names.record_leading_entries(names.leading_entries, part[:ahead])
        elif operand.leading is LeadingAxesBroadcast.CONTRACTED:
            names.record_leading_entries(names.contracted_leading_entries, part[:ahead])
        for dim, n, own in zip(operand.dims, spec.shape[ahead:], part[ahead:], strict=True):
            if not (dim.may_be_one and n == 1):
                _add_factor_entries(dim, own, sizes, local, names)
                coupled = dim.role is DimensionRole.COUPLED or bool(set(dim.factors) & set(unsharded_dimensions))
                for name in dim.factors:
                    roles[name] = DimensionRole.COUPLED if coupled else roles.get(name, dim.role)
    _require_matching_broadcasts(graph_node, signature.operands, operand_entries, names.leading_entries)
    for name, role in roles.items():
        if role is DimensionRole.COUPLED and not name.isdecimal():
            index, digits = names.entries_by_dimension[name]
            if not is_full_index(index, digits, sizes[name]):
                raise NodeMismatchError(
                    f"{name} must be whole, but the device has {format_index(index)} of {sizes[name]}"
                )
            names.entries_by_dimension[name] = (make_index_of_all_entries(sizes[name]), ())
    results = tuple(
        (
            *(names.leading_entries if r.leading is LeadingAxesBroadcast.EQUAL else ()),
            *(_combine_factor_entries(d, names, sizes, local) for d in r.dims),
        )
        for r in signature.results
    )
    _require_result_shapes(device_node, results)
    rows = _find_local_table_rows(signature, graph_node, device_node, names)
    contracted = [
        (names.entries_by_dimension[n][0], sizes[n]) for n, role in roles.items() if role is DimensionRole.CONTRACTED
    ]
    summed = [s.shape for s, o in zip(graph_node.src, signature.operands, strict=False) if s is not None]
    contracted += [
        (i, n) for (i, _), n in zip(names.contracted_leading_entries, summed[0] if summed else (), strict=False)
    ]
    if any(n == 0 for _, n in contracted):
        return InferredEntries(results, None, rows, is_empty_sum=True)
    return InferredEntries(
        results, make_contraction_partial_sum(tuple(i for i, _ in contracted), tuple(n for _, n in contracted)), rows
    )


def _find_local_table_rows(
    signature: Signature, graph_node: NodeSpecs, device_node: NodeSpecs, dimensions: _DimensionEntries
) -> LocalTableRows | None:
    """Return the rows of a lookup table that the device has; None if it has all rows, or if the op has no table.

    The attributes `first` and `total` of the device's node must state these rows.
    """
    if signature.indexed_dimension is None:
        return None
    table, dim = signature.indexed_dimension
    (name,) = dim.factors
    at = signature.operands.index(table)
    spec = graph_node.src[at]
    assert spec is not None
    size, (index, digits) = spec.shape[len(spec.shape) - len(table.dims)], dimensions.entries_by_dimension[name]
    local_rows, theirs = (tuple(s.attrs_by_name[k] for k in ("first", "total")) for s in (device_node, graph_node))
    if local_rows == theirs and is_full_index(index, digits, size):
        return None
    first, total = local_rows
    assert isinstance(first, int)
    if theirs != (0, 0) or total != size:
        raise NodeMismatchError(
            f"rows of {table.name} are looked up as {first} of {total!r}, and in the graph as {theirs[0]!r} of {size}"
        )
    own = concatenate_indices([((first, count_entries(index)),)]) if index else ()
    if find_index_matching_both_values(index, digits, own, ()) is None:
        raise NodeMismatchError(f"rows {format_index(index)} of {table.name} are looked up as {format_index(own)}")
    return None if own == make_index_of_all_entries(size) else LocalTableRows(table.name, dim.index, own, size)


def _add_factor_entries(
    dim: Dimension,
    entries: AxisEntries,
    graph_sizes: Mapping[str, int],
    device_sizes: Mapping[str, int],
    dimensions: _DimensionEntries,
) -> None:
    """Split the entries of an operand axis such as ``(h d)`` into entries of its factors h and d, and record them."""
    index, digits = entries
    theirs = tuple(int(f) if f.isdecimal() else graph_sizes[f] for f in dim.factors)
    here = tuple(int(f) if f.isdecimal() else device_sizes.get(f, -1) for f in dim.factors)
    parts = split_index_into_factors(index, theirs, here)
    if parts is None:
        raise NodeMismatchError(f"{format_index(index)} is not a product ({' '.join(dim.factors)})")
    inner = math.prod(theirs)
    for name, n, part in zip(dim.factors, theirs, parts, strict=True):
        inner = inner // n if n else 0
        if name.isdecimal():
            if part != make_index_of_all_entries(n):
                raise NodeMismatchError(f"the device has {format_index(part)} of the fixed size {name}")
        else:
            dimensions.record_dimension_entries(name, (part, to_factor_digits(digits, inner, n) if inner else ()))


def _combine_factor_entries(
    dim: Dimension, dimensions: _DimensionEntries, graph_sizes: Mapping[str, int], device_sizes: Mapping[str, int]
) -> AxisEntries:
    """Return the entries of a result axis such as ``(h d)``, combined from its factors; other factors must be whole."""
    indices, digits, theirs = [], list[tuple[int, int]](), []
    for name in dim.factors:
        n = int(name) if name.isdecimal() else graph_sizes[name]
        theirs.append(n)
        if not name.isdecimal() and name not in dimensions.entries_by_dimension and device_sizes.get(name) != n:
            raise NodeMismatchError(f"{name} is {device_sizes.get(name)} and not {n}")
        indices.append(dimensions.entries_by_dimension.get(name, (make_index_of_all_entries(n), ()))[0])
    for at, name in enumerate(dim.factors):
        digits += to_product_digits(dimensions.entries_by_dimension.get(name, ((), ()))[1], math.prod(theirs[at + 1 :]))
    return combine_factor_indices(tuple(indices), tuple(theirs)), tuple(digits)


def _require_matching_broadcasts(
    graph_node: NodeSpecs,
    operands: Sequence[Any],
    operand_entries: Sequence[ValueEntries | None],
    leading_entries: list[AxisEntries],
) -> None:
    """Require that each operand that is repeated over an axis has the same entries of it as in the user's graph."""
    shape: tuple[int, ...] = ()
    for operand, spec in zip(operands, graph_node.src, strict=False):
        if spec is not None and operand.leading is LeadingAxesBroadcast.EQUAL:
            shape = spec.shape[: len(spec.shape) - len(operand.dims)]
    for operand, spec, part in zip(operands, graph_node.src, operand_entries, strict=False):
        is_tiled = operand.leading is LeadingAxesBroadcast.TILED
        if spec is None or part is None or not (is_tiled or operand.leading is LeadingAxesBroadcast.GROUPED):
            continue
        ahead = len(spec.shape) - len(operand.dims)
        shift = len(shape) - ahead
        for i in range(ahead):
            n, size = spec.shape[i], shape[shift + i]
            if n == size:
                leading_entries[shift + i] = _unify_entries(
                    leading_entries[shift + i], part[i], f"leading axis {shift + i}"
                )
            elif not is_valid_broadcast(*part[i], n, leading_entries[shift + i][0], size, is_tiled):
                raise NodeMismatchError(
                    f"{operand.name} has {format_index(part[i][0])} of {n}, but is repeated over "
                    "entries that need others"
                )
            elif n != 1:
                leading_entries[shift + i] = (leading_entries[shift + i][0], ())


def _require_result_shapes(device_node: NodeSpecs, result_entries: Sequence[ValueEntries]) -> None:
    """Raise `NodeMismatchError` unless the results of a device's node have as many entries as inferred on each axis."""
    for spec, axes in zip(device_node.results, result_entries, strict=True):
        if spec.shape != tuple(count_entries(i) for i, _ in axes):
            raise NodeMismatchError(
                f"the result is {list(spec.shape)}, its entries are {[format_index(i) for i, _ in axes]}"
            )


# ----------------------------------------------------------------------------------------------------------- links


def _infer_entries_by_axis_links(
    declared: Op[Any], graph_node: NodeSpecs, device_node: NodeSpecs, operand_entries: tuple[ValueEntries | None, ...]
) -> InferredEntries:
    """Infer the result entries of an op, such as a slice, that declares links of operand and result axes."""
    assert declared.links is not None
    links = declared.links(graph_node.src, graph_node.attrs_by_name)
    starts = {
        (m.operand, m.source, m.result): m.start for m in declared.links(device_node.src, device_node.attrs_by_name)
    }
    result, shape = graph_node.results[0], device_node.results[0].shape
    if len(shape) != len(result.shape):
        raise NodeMismatchError(f"the result is {list(shape)}, need as many axes as {result}")
    parts: dict[int, list[tuple[int, bool, AxisEntries]]] = {}
    for link in links:
        part, spec = operand_entries[link.operand], graph_node.src[link.operand]
        assert part is not None
        assert spec is not None
        if len(link.source) == len(link.result) == 1:
            start = starts.get((link.operand, link.source, link.result), 0)
            axis = link.result[0]
            n, own = spec.shape[link.source[0]], part[link.source[0]]
            parts.setdefault(axis, []).append(
                (start, *_map_operand_entries_and_detect_part(link, own, n, result.shape[axis], start, shape[axis]))
            )
        else:
            _map_reshaped_axis_entries(link, part, spec, graph_node, shape, parts)
    _require_whole_unlinked_axes(links, graph_node, operand_entries)
    axes_here = tuple(
        _combine_linked_entries(parts.get(a), n, shape[a], declared.is_view) for a, n in enumerate(result.shape)
    )
    _require_result_shapes(device_node, [axes_here])
    return InferredEntries((axes_here,), None)


def _map_operand_entries_and_detect_part(
    link: AxisLink, entries: AxisEntries, operand_size: int, result_size: int, local_start: int, local_size: int
) -> tuple[bool, AxisEntries]:
    """Return the result entries that linked operand entries become, and whether they are only a part of the axis."""
    index, digits = entries
    if operand_size < result_size:
        return True, (concatenate_indices([tuple((first + link.start, k) for first, k in index)]), ())
    local_index = slice_and_shift_index(index, local_start, local_start + local_size, link.start)
    if any(first < 0 or first + k > result_size for first, k in local_index):
        raise NodeMismatchError(
            f"entries {format_index(slice_and_shift_index(index, local_start, local_start + local_size))} lie outside "
            f"{link.start}:{link.start + result_size}"
        )
    return False, (
        local_index,
        digits if operand_size == result_size else ((1, result_size),) if digits == ((1, operand_size),) else (),
    )


def _map_reshaped_axis_entries(
    link: AxisLink,
    entries: ValueEntries,
    operand_spec: Spec,
    graph_node: NodeSpecs,
    local_shape: tuple[int, ...],
    collected: dict[int, list[Any]],
) -> None:
    """Map the entries of operand axes to the axes of a reshape, and add them to `collected`, by result axis."""
    sizes = tuple(operand_spec.shape[a] for a in link.source)
    after = tuple(graph_node.results[0].shape[a] for a in link.result)
    flat = combine_factor_indices(tuple(entries[a][0] for a in link.source), sizes)
    parts = split_index_into_factors(flat, after, tuple(local_shape[a] for a in link.result))
    if parts is None:
        raise NodeMismatchError(f"{format_index(flat)} cannot be split along the axes of {list(after)}")
    digits: IgnoredDigits = ()
    for i, a in enumerate(link.source):
        digits += to_product_digits(entries[a][1], math.prod(sizes[i + 1 :]))
    for i, a in enumerate(link.result):
        collected[a] = [(0, False, (parts[i], to_factor_digits(digits, math.prod(after[i + 1 :]), after[i])))]


def _require_whole_unlinked_axes(
    links: Sequence[AxisLink], graph_node: NodeSpecs, operand_entries: Sequence[ValueEntries | None]
) -> None:
    """Require that the device has all entries of operand axes that are linked to no result axis."""
    linked = {(m.operand, a) for m in links for a in m.source}
    for operand, (spec, part) in enumerate(zip(graph_node.src, operand_entries, strict=True)):
        for a, n in enumerate(spec.shape if spec is not None else ()):
            if (operand, a) not in linked and part is not None and not is_full_index(*part[a], n):
                raise NodeMismatchError(f"axis {a} must be whole, but the device has {format_index(part[a][0])} of {n}")


def _combine_linked_entries(
    linked_parts: Sequence[tuple[int, bool, AxisEntries]] | None, axis_size: int, local_size: int, is_view: bool
) -> AxisEntries:
    """Combine the entries of linked operand axes to the entries of a result axis.

    The linked axes are consecutive parts of the result axis, or all equal to it. `linked_parts` has for each of them
    (local start, whether it is a part, entries). Without a link, a view may show any prefix of a broadcast axis. Raises
    `NodeMismatchError` if the parts do not fit.
    """
    if not linked_parts:
        if not is_view and local_size != axis_size:
            raise NodeMismatchError(f"an axis of the result has {local_size} of {axis_size} entries, but must be whole")
        return _make_prefix_index(axis_size, local_size), ((1, axis_size),) if is_view and axis_size > 1 else ()
    if not any(inside for _, inside, _ in linked_parts):
        common_entries = linked_parts[0][2]
        for _, _, part in linked_parts[1:]:
            common_entries = _unify_entries(common_entries, part, "an axis")
        return common_entries
    at, indices = 0, []
    for start, _, (index, _) in sorted(linked_parts, key=lambda p: p[0]):
        if start != at:
            raise NodeMismatchError(f"a part begins at {start} and not at {at}")
        at += count_entries(index)
        indices.append(index)
    return concatenate_indices(indices), ()
