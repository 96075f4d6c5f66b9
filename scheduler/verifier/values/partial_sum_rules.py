"""The rules that derive the partial sum of a node's result from the partial sums of the operands.

A partial sum of a value is the part of the value's terms that a device has. The rules use op declarations only:
linear operands, operands in which zeros give zeros, and lookups in tables with some local rows. The verifier takes
nothing from the planner. A joint such as ``a+b`` names operands in which an op is linear together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ....ops import REGISTRY
from ....ops.declaration.op import Op
from .op_instances import InferredEntries, NodeSpecs
from .partial_sums import NO_TERMS, OptionalPartialSum, PartialSum, make_linear_partial_sum

OperandValueNumbers = tuple[int | None, ...]
"""For each operand the number of its value."""


def propagate_partial_sum(
    op: str,
    graph_node: NodeSpecs,
    operand_sums: Sequence[OptionalPartialSum],
    inferred_entries: InferredEntries,
    operand_numbers: OperandValueNumbers,
) -> OptionalPartialSum:
    """Derive which terms of a sum the results of a node have on a device, from the partial sums of its operands.

    1. A lookup in a table with some local rows has the terms of these rows.
    2. If all operands are complete, the node's own contraction gives the partial sum.
    3. If the operands are zeros and the op keeps zeros, the result has no terms.
    4. A routed partial sum (rows that a table lookup selects) stays routed if the result is zero at the same indices.
    5. A partial sum in operands in which the op is linear stays a partial sum.

    Args:
        op: Name of the op.
        graph_node: The matching node of the user's graph.
        operand_sums: Partial sum of each operand; None for a complete operand.
        inferred_entries: Entries of the results, their contraction terms, and local table rows.
        operand_numbers: Value number of each operand; None for a missing operand.

    Returns:
        The partial sum; None if the results are complete.

    Raises:
        ValueError: The op is not linear in an operand that is a partial sum.
    """
    declared = REGISTRY[op]
    sums_by_operand = {n: o for n, o in zip(declared.operand_names, operand_sums, strict=False) if o is not None}
    if inferred_entries.table_rows is not None:
        return _infer_table_lookup_partial_sum(declared, graph_node, sums_by_operand, inferred_entries, operand_numbers)
    if not sums_by_operand:
        return inferred_entries.partial_sum
    if inferred_entries.partial_sum is not None:
        raise ValueError(
            f"operands {', '.join(sorted(sums_by_operand))} are partial sums that no all-reduce "
            "completes, and the node sums over shards itself"
        )
    attrs = graph_node.attrs_by_name
    empty = {n for n, o in sums_by_operand.items() if o is NO_TERMS}
    if any(empty >= set(joint.split("+")) for joint in declared.zero_preserving_operands(attrs)):
        return NO_TERMS
    if (routed := _keep_partial_sum_of_looked_up_rows(declared, graph_node, sums_by_operand)) is not None:
        return routed
    for joint in declared.linear_operands(attrs):
        if set(sums_by_operand) <= set(joint.split("+")):
            return make_linear_partial_sum(
                joint, [sums_by_operand.get(n) for n in _list_present_linear_operands(declared, graph_node, joint)]
            )
    raise ValueError(
        f"{op} is not linear in {' and '.join(sorted(sums_by_operand))}, a partial sum that no all-reduce completes"
    )


def _list_present_linear_operands(declared: Op[Any], graph_node: NodeSpecs, linear_operands: str) -> list[str]:
    """List the names in `linear_operands` for which the node has an operand, in operand order.

    Args:
        declared: The op of the node.
        graph_node: The node.
        linear_operands: Names of operands in which the op is linear together, joined by ``+``, such as ``a+b``.
    """
    here = [n for n, s in zip(declared.operand_names, graph_node.src, strict=False) if s is not None]
    return [n for n in here if n in linear_operands.split("+")]


def _keep_partial_sum_of_looked_up_rows(
    declared: Op[Any], graph_node: NodeSpecs, sums_by_operand: Mapping[str, OptionalPartialSum]
) -> PartialSum | None:
    """Return the partial sum of looked-up rows that a node keeps from its operands, or None.

    Such a partial sum begins with a lookup in a sharded table. A device has the result rows that look up one of its
    table rows, and zeros elsewhere. An op after the lookup keeps it under three conditions:

    - All operands that are partial sums have the same one.
    - Zeros in these operands give zeros in the result.
    - The leading axes of the result and of each operand are the same, so each entry comes from the same looked-up row.
    """
    first = next(iter(sums_by_operand.values()))
    if (
        first is None
        or any(o != first for o in sums_by_operand.values())
        or not all(_has_same_leading_index_as_operand(declared, graph_node, n, first) for n in sums_by_operand)
    ):
        return None
    return (
        first
        if any(
            set(sums_by_operand) >= set(j.split("+"))
            for j in declared.zero_preserving_operands(graph_node.attrs_by_name)
        )
        else None
    )


def _has_same_leading_index_as_operand(
    declared: Op[Any], graph_node: NodeSpecs, operand: str, partial_sum: PartialSum
) -> bool:
    """Return whether each entry of the result reads only the operand's entries with the same leading index.

    The leading axes are the axes of the row numbers of the lookup. Without a routed partial sum the result is False.

    Args:
        declared: The op of the node.
        graph_node: The node.
        operand: The name of the operand that is a partial sum.
        partial_sum: This partial sum.
    """
    if partial_sum.routing is None:
        return False
    return declared.keeps_leading_axes(
        graph_node.src,
        graph_node.results[0],
        graph_node.attrs_by_name,
        declared.operand_names.index(operand),
        partial_sum.routing[1],
    )


def _infer_table_lookup_partial_sum(
    declared: Op[Any],
    graph_node: NodeSpecs,
    sums_by_operand: Mapping[str, OptionalPartialSum],
    inferred_entries: InferredEntries,
    operand_numbers: OperandValueNumbers,
) -> OptionalPartialSum:
    """Return the partial sum of a table lookup on a device that has only some rows of the table.

    The device has the result entries that look up a local row. Operands that the op adds to the looked-up rows may be
    partial sums too. All other operands must be complete, or be routed by the same rows.

    Raises:
        ValueError: The node also sums over shards, or an operand is a partial sum that must be complete.
    """
    rows = inferred_entries.table_rows
    assert rows is not None
    if inferred_entries.partial_sum is not None:
        raise ValueError(f"the node sums over shards, and the device has only some rows of {rows.table_operand}")
    at = declared.operand_names.index(rows.index_operand)
    number, numbers = operand_numbers[at], graph_node.src[at]
    assert number is not None
    assert numbers is not None
    if sums_by_operand.get(rows.table_operand) is not None or sums_by_operand.get(rows.index_operand) is not None:
        raise ValueError(
            f"{rows.table_operand} or {rows.index_operand} is a partial sum that no all-reduce "
            "completes, and the device has only some rows"
        )
    rank = len(numbers.shape)
    keeps_leading_axes = declared.keeps_leading_axes(
        graph_node.src, graph_node.results[0], graph_node.attrs_by_name, at, rank
    )
    own = (
        PartialSum(
            "terms", (rows.local_rows,), (rows.row_count,), routing=(number, rank) if keeps_leading_axes else None
        )
        if rows.local_rows
        else NO_TERMS
    )
    joint = next(j for j in declared.linear_operands(graph_node.attrs_by_name) if rows.table_operand in j.split("+"))
    added = [n for n in _list_present_linear_operands(declared, graph_node, joint) if n != rows.table_operand]
    for name, operand_sum in sums_by_operand.items():
        if (
            name not in added
            and own is not NO_TERMS
            and not (operand_sum == own and _has_same_leading_index_as_operand(declared, graph_node, name, own))
        ):
            raise ValueError(
                f"{name} is a partial sum over other terms than the rows of {rows.table_operand} on this device"
            )
    if all(
        sums_by_operand.get(n) == own
        and (own is NO_TERMS or _has_same_leading_index_as_operand(declared, graph_node, n, own))
        for n in added
    ):
        return own
    return make_linear_partial_sum(
        joint,
        [
            own if n == rows.table_operand else sums_by_operand.get(n)
            for n in _list_present_linear_operands(declared, graph_node, joint)
        ],
    )
