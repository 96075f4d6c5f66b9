"""Propagation of partial sums through nodes.

The input is the partial sums of the operands, or a lookup table with only some local rows. The rules come from the
op declarations alone; the verifier takes nothing from the planner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...ops import REGISTRY
from ...ops.declaration.op import Op
from .op_instances import OpInstance, RestrictedResult
from .summands import NO_TERMS, OptionalPartialSum, PartialSum, make_linear_sum

OperandValueNumbers = tuple[int | None, ...]
"""For each operand the number of its value."""


def propagate_partial_sum(
    op: str, user: OpInstance, owed: Sequence[OptionalPartialSum], made: RestrictedResult, values: OperandValueNumbers
) -> OptionalPartialSum:
    """Return the partial sum of the result of a device's node.

    Args:
        op: Name of the op.
        user: The node of the user's graph.
        owed: Partial sum of each operand.
        made: Entries of the results, their contraction terms, and local table rows.
        values: Number of the value of each operand.

    Raises:
        ValueError: If the result is not a sum of the user's value any more.
    """
    declared = REGISTRY[op]
    given = {n: o for n, o in zip(declared.operand_names, owed, strict=False) if o is not None}
    if made.table_rows is not None:
        return _infer_lookup_sum(declared, user, given, made, values)
    if not given:
        return made.partial_sum
    if made.partial_sum is not None:
        raise ValueError(f"operands {', '.join(sorted(given))} are sums still owed, and it sums over shards besides")
    attrs = user.attrs_by_name
    empty = {n for n, o in given.items() if o is NO_TERMS}
    if any(empty >= set(joint.split("+")) for joint in declared.zero_preserving_operands(attrs)):
        return NO_TERMS
    if (routed := _propagate_routing(declared, user, given)) is not None:
        return routed
    for joint in declared.linear_operands(attrs):
        if set(given) <= set(joint.split("+")):
            return make_linear_sum(joint, [given.get(n) for n in _list_present_operands(declared, user, joint)])
    raise ValueError(f"{op} is not linear in {' and '.join(sorted(given))}, a sum that is still owed")


def _list_present_operands(declared: Op[Any], user: OpInstance, joint: str) -> list[str]:
    """Return the operands of a joint that the user's node has."""
    here = [n for n, s in zip(declared.operand_names, user.src, strict=False) if s is not None]
    return [n for n in here if n in joint.split("+")]


def _propagate_routing(
    declared: Op[Any], user: OpInstance, given: Mapping[str, OptionalPartialSum]
) -> PartialSum | None:
    """Return the common routed partial sum of the operands if the result has it too; else None.

    The result has it if it is zero everywhere except where the same rows are looked up.
    """
    first = next(iter(given.values()))
    if (
        first is None
        or any(o != first for o in given.values())
        or not all(_has_same_routing(declared, user, n, first) for n in given)
    ):
        return None
    return (
        first
        if any(set(given) >= set(j.split("+")) for j in declared.zero_preserving_operands(user.attrs_by_name))
        else None
    )


def _has_same_routing(declared: Op[Any], user: OpInstance, operand: str, summand: PartialSum) -> bool:
    """Return whether the routed entries of the result are computed from the same entries of `operand`."""
    if summand.routing is None:
        return False
    return declared.keeps_leading_axes(
        user.src, user.results[0], user.attrs_by_name, declared.operand_names.index(operand), summand.routing[1]
    )


def _infer_lookup_sum(
    declared: Op[Any],
    user: OpInstance,
    given: Mapping[str, OptionalPartialSum],
    made: RestrictedResult,
    values: OperandValueNumbers,
) -> OptionalPartialSum:
    """Return the partial sum of a lookup in a table with only some local rows.

    The result has the entries that name a local row. Operands that are added may be partial sums; all other operands
    must be complete for these entries.
    """
    rows = made.table_rows
    assert rows is not None
    if made.partial_sum is not None:
        raise ValueError(f"it sums over shards, and has only some rows of {rows.table_operand} besides")
    at = declared.operand_names.index(rows.index_operand)
    number, numbers = values[at], user.src[at]
    assert number is not None
    assert numbers is not None
    if given.get(rows.table_operand) is not None or given.get(rows.index_operand) is not None:
        raise ValueError(
            f"{rows.table_operand} or {rows.index_operand} is a sum still owed, and there are only some rows"
        )
    rank = len(numbers.shape)
    kept = declared.keeps_leading_axes(user.src, user.results[0], user.attrs_by_name, at, rank)
    own = (
        PartialSum("terms", (rows.local_rows,), (rows.row_count,), routing=(number, rank) if kept else None)
        if rows.local_rows
        else NO_TERMS
    )
    joint = next(j for j in declared.linear_operands(user.attrs_by_name) if rows.table_operand in j.split("+"))
    added = [n for n in _list_present_operands(declared, user, joint) if n != rows.table_operand]
    for name, owed in given.items():
        if (
            name not in added
            and own is not NO_TERMS
            and not (owed == own and _has_same_routing(declared, user, name, own))
        ):
            raise ValueError(f"{name} is a sum still owed, and not by the rows of {rows.table_operand} that are here")
    if all(given.get(n) == own and (own is NO_TERMS or _has_same_routing(declared, user, n, own)) for n in added):
        return own
    return make_linear_sum(
        joint, [own if n == rows.table_operand else given.get(n) for n in _list_present_operands(declared, user, joint)]
    )
