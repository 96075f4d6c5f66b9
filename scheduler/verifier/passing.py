"""Propagation of partial sums through nodes.

The input is the partial sums of the operands, or a lookup table with only some local rows. The rules come from the
op declarations alone; the verifier takes nothing from the planner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...ops import REGISTRY
from ...ops.declaration.op import Op
from .restrict import Made, Side
from .summands import NOTHING, Owed, Summand, linear

Names = tuple[int | None, ...]
"""For each operand the number of its value."""


def passed(op: str, user: Side, owed: Sequence[Owed], made: Made, values: Names) -> Owed:
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
    if made.rows is not None:
        return _looked_up(declared, user, given, made, values)
    if not given:
        return made.owed
    if made.owed is not None:
        raise ValueError(f"operands {', '.join(sorted(given))} are sums still owed, and it sums over shards besides")
    attrs = user.settled
    empty = {n for n, o in given.items() if o is NOTHING}
    if any(empty >= set(joint.split("+")) for joint in declared.zero_preserving_operands(attrs)):
        return NOTHING
    if (routed := _routed(declared, user, given)) is not None:
        return routed
    for joint in declared.linear_operands(attrs):
        if set(given) <= set(joint.split("+")):
            return linear(joint, [given.get(n) for n in _there(declared, user, joint)])
    raise ValueError(f"{op} is not linear in {' and '.join(sorted(given))}, a sum that is still owed")


def _there(declared: Op[Any], user: Side, joint: str) -> list[str]:
    """Return the operands of a joint that the user's node has."""
    here = [n for n, s in zip(declared.operand_names, user.src, strict=False) if s is not None]
    return [n for n in here if n in joint.split("+")]


def _routed(declared: Op[Any], user: Side, given: Mapping[str, Owed]) -> Summand | None:
    """Return the common routed partial sum of the operands if the result has it too; else None.

    The result has it if it is zero everywhere except where the same rows are looked up.
    """
    first = next(iter(given.values()))
    if (
        first is None
        or any(o != first for o in given.values())
        or not all(_keeps(declared, user, n, first) for n in given)
    ):
        return None
    return (
        first if any(set(given) >= set(j.split("+")) for j in declared.zero_preserving_operands(user.settled)) else None
    )


def _keeps(declared: Op[Any], user: Side, operand: str, summand: Summand) -> bool:
    """Return whether the routed entries of the result are computed from the same entries of `operand`."""
    if summand.by is None:
        return False
    return declared.keeps_leading_axes(
        user.src, user.results[0], user.settled, declared.operand_names.index(operand), summand.by[1]
    )


def _looked_up(declared: Op[Any], user: Side, given: Mapping[str, Owed], made: Made, values: Names) -> Owed:
    """Return the partial sum of a lookup in a table with only some local rows.

    The result has the entries that name a local row. Operands that are added may be partial sums; all other operands
    must be complete for these entries.
    """
    rows = made.rows
    assert rows is not None
    if made.owed is not None:
        raise ValueError(f"it sums over shards, and has only some rows of {rows.table} besides")
    at = declared.operand_names.index(rows.numbers)
    number, numbers = values[at], user.src[at]
    assert number is not None
    assert numbers is not None
    if given.get(rows.table) is not None or given.get(rows.numbers) is not None:
        raise ValueError(f"{rows.table} or {rows.numbers} is a sum still owed, and there are only some rows")
    rank = len(numbers.shape)
    kept = declared.keeps_leading_axes(user.src, user.results[0], user.settled, at, rank)
    own = Summand("terms", (rows.own,), (rows.size,), by=(number, rank) if kept else None) if rows.own else NOTHING
    joint = next(j for j in declared.linear_operands(user.settled) if rows.table in j.split("+"))
    added = [n for n in _there(declared, user, joint) if n != rows.table]
    for name, owed in given.items():
        if name not in added and own is not NOTHING and not (owed == own and _keeps(declared, user, name, own)):
            raise ValueError(f"{name} is a sum still owed, and not by the rows of {rows.table} that are here")
    if all(given.get(n) == own and (own is NOTHING or _keeps(declared, user, n, own)) for n in added):
        return own
    return linear(joint, [own if n == rows.table else given.get(n) for n in _there(declared, user, joint)])
