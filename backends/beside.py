"""What may run beside a collective: the instructions behind it that leave alone what it reads and writes.

A collective begins where it stands in a program, when all before it has run.  A device that can do both at once goes on
with what follows, up to the first instruction that reads or writes what the collective writes, or writes what it reads:
there it waits.  At most one collective is on its way, so the next one waits as well, and so does the end of the run.

Where a device waits follows from the bytes that instructions touch and is written down nowhere: no plan can state a
wrong place, and to wait at once is the same program.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import islice

from ..ops.collectives import COLLECTIVES, POINT_TO_POINT_OPS
from .base import Instruction, Program, Tensor
from .liveness import Touched
from .operands import Operand, Region


def beside(program: Program, groups: Iterable[Sequence[int]] | None = None) -> Mapping[int, tuple[int, ...]]:
    """For each collective beside which something runs, by position, what that is, in the order in which it runs.

    `groups` are the instructions in the order of a run, those that are launched together in one entry: of them all wait
    where one has to.  They run one by one as they stand where no groups are given.
    """
    steps = program.instructions
    touched = cache(lambda number: _touched(program, steps[number]))
    order = [(number,) for number in range(len(steps))] if groups is None else [*groups]
    found: dict[int, tuple[int, ...]] = {}
    for place, (at, *_) in enumerate(order):
        if not can_run_beside(steps[at].op):
            continue
        for group in islice(order, place + 1, None):
            if any(steps[n].op in COLLECTIVES or disturbs(touched(at), touched(n)) for n in group):
                break
            found[at] = (*found.get(at, ()), *group)
    return found


def can_run_beside(op: str) -> bool:
    """Whether something may run beside that op: a collective in which a whole team meets."""
    return op in COLLECTIVES and op not in POINT_TO_POINT_OPS


def disturbs(meeting: Touched, other: Touched) -> bool:
    """Whether what touches `other` has to wait for a collective."""
    (read, written), (reads, writes) = meeting, other
    return _meet(written, [*reads, *writes]) or _meet(read, writes)


def _touched(program: Program, i: Instruction) -> Touched:
    written = [*i.dst, *([] if i.scratch is None else [i.scratch])]
    return [_region(program, t) for t in i.src if t is not None], [_region(program, t) for t in written]


def _region(program: Program, t: Tensor) -> Region:
    spec = program.buffers[t.buffer]
    return Operand(t.offset, t, spec.declared, spec.stored, spec.kind).region


def _meet(some: Iterable[Region], others: Sequence[Region]) -> bool:
    return any(a.overlaps(b) for a in some for b in others)
