"""The verification of joined groups: groups that run one after the other are undone, so that all rules hold for each.

The rule *joined* says that joined groups are exactly one entry of the order, and that none of them has a collective.
Whether threads need a barrier between two of the groups is no question here: a step table has one wherever a thread
accesses bytes that another thread writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...backends.base import Program
from ...backends.capabilities import ProgramFusion
from ...ops.collectives import COLLECTIVES


def split_joined_groups(fusion: ProgramFusion) -> ProgramFusion:
    """Return the fusion in which groups that share one launch or step ("joined") run one after the other."""
    parts = {tuple(sorted(n for group in joined for n in group)): joined for joined in fusion.joined}
    order = tuple(group for entry in fusion.order for group in parts.get(entry, (entry,)))
    return replace(fusion, order=order, joined=())


def find_joined_group_faults(program: Program, fusion: ProgramFusion) -> Iterator[str]:
    """Yield the reasons why groups that are joined to one launch or step do not exactly make up this launch."""
    entries, seen = {*fusion.order}, set[int]()
    for joined in fusion.joined:
        numbers = sorted(n for group in joined for n in group)
        label = f"joined: groups of instructions {', '.join(map(str, numbers))}: "
        if len(joined) < 2 or not all(joined):
            yield f"{label}one of them is empty, or there is only one"
        elif tuple(numbers) not in entries:
            yield f"{label}they do not run together"
        elif not seen.isdisjoint(numbers) or len({*numbers}) != len(numbers):
            yield f"{label}an instruction is in two of them"
        elif any(program.instructions[n].op in COLLECTIVES for n in numbers):
            yield f"{label}one of them has a collective"
        seen.update(numbers)
