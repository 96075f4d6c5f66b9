"""The difference between two plans, as lines of text for people."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from ...graph.errors import PlanError
from ...graph.validation import validate_arguments
from ...ops.collectives import COLLECTIVES
from ..ir.execution_plan import PLAN_KIND, Plan
from ..ir.formatting import format_bytes, format_seconds


@validate_arguments(PlanError, before=PLAN_KIND, after=PLAN_KIND)
def diff_plans(before: Plan, after: Plan) -> tuple[str, ...]:
    """Return the differences between two plans as lines about leaves, collectives, memory and time.

    The result is empty if both plans do the same. Names that differ only in numbers, such as layer names, share one
    line if they changed in the same way.
    """
    lines = [*_diff_leaf_layouts(before, after), *_diff_collectives(before, after), *_diff_memory(before, after)]
    if (was := format_seconds(before.cost.total)) != (now := format_seconds(after.cost.total)):
        lines.append(f"time: {was} -> {now}")
    if not lines and before.digest() != after.digest():
        lines.append("the graphs or programs differ, but neither layouts, collectives, memory nor time")
    return tuple(lines)


def group_names_that_differ_in_numbers(names: Iterable[str]) -> list[str]:
    """Merge names that differ only in numbers, such as layer names, into one text with ``*`` and their count.

    Example: ``%blk.*.ffn_up.weight (80)``.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[re.sub(r"\d+", "*", name)].append(name)
    return [f"%{members[0]}" if len(members) == 1 else f"%{g} ({len(members)})" for g, members in groups.items()]


def _diff_leaf_layouts(before: Plan, after: Plan) -> list[str]:
    """Return a line for each group of leaves with different layouts in two plans, or in only one plan."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in dict.fromkeys((*before.leaves, *after.leaves)):
        was, now = (str(p.leaves[name]) if name in p.leaves else "absent" for p in (before, after))
        if was != now or before.leaves.get(name) != after.leaves.get(name):
            groups[was, now].append(name)
    return [
        f"layout: {group_name}: {was} -> {now}"
        for (was, now), found in groups.items()
        for group_name in group_names_that_differ_in_numbers(found)
    ]


def _count_collectives_by_op_and_name(plan: Plan) -> dict[tuple[str, str], int]:
    """Return how often each collective runs, by op and node name. A message counts once, at its sender."""
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for number, device_plan in enumerate(plan.device_plans):
        for i in device_plan.program.instructions:
            if i.op == "send" or (i.op in COLLECTIVES and i.op != "receive" and number == 0):
                counts[i.op, i.node] += 1
    return counts


def _diff_collectives(before: Plan, after: Plan) -> list[str]:
    was, now = _count_collectives_by_op_and_name(before), _count_collectives_by_op_and_name(after)
    return [*_format_surplus_collectives("removed", was, now), *_format_surplus_collectives("added", now, was)]


def _format_surplus_collectives(
    word: str, here: Mapping[tuple[str, str], int], there: Mapping[tuple[str, str], int]
) -> list[str]:
    """Return one line for each op with the collectives that run more often in one plan than in the other.

    Args:
        word: The first word of each line.
        here: The counts of collectives in the plan where they run more often, by op and name.
        there: The counts in the other plan.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for (op, name), count in here.items():
        groups[op] += [name] * max(0, count - there.get((op, name), 0))
    return [
        f"{word}: {len(n)} {op}: {', '.join(group_names_that_differ_in_numbers(n))}" for op, n in groups.items() if n
    ]


def _diff_memory(before: Plan, after: Plan) -> list[str]:
    """Return a line for each device with other memory bytes in the two plans, by kind of memory."""
    was, now = (
        {str(device_plan.device): device_plan.count_memory_bytes_by_kind() for device_plan in p.device_plans}
        for p in (before, after)
    )
    lines = []
    for device in dict.fromkeys((*was, *now)):
        if device not in was or device not in now:
            lines.append(f"memory: {device}: {'no longer used' if device in was else 'used now'}")
            continue
        changed = {kind: (n, now[device][kind]) for kind, n in was[device].items() if n != now[device][kind]}
        changes_text = ", ".join(f"{kind} {format_bytes(a)} -> {format_bytes(b)}" for kind, (a, b) in changed.items())
        lines += [f"memory: {device}: {changes_text}"] if changes_text else []
    return lines
