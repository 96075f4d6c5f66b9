"""Overlap of instructions with collectives: later instructions that do not access the same bytes may run meanwhile.

A collective begins at its place in the program, after all earlier instructions. A device that can overlap continues
with the instructions after the collective. The device waits before the first instruction that reads or writes the
results of the collective, or writes its operands. The device also waits before the next collective and at the end of
the run: at most one collective is in progress.

The waits follow from the bytes that instructions access, and no plan states them. So no plan can be wrong here, and a
device that waits at once runs the same program.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import islice

from ...ops.collectives import COLLECTIVES, POINT_TO_POINT_OPS
from ..base import Instruction, Program, Tensor
from .liveness import AccessedRegions
from .operands import MemoryRegion, Operand


def find_instructions_beside_collectives(
    program: Program, groups: Iterable[Sequence[int]] | None = None
) -> Mapping[int, tuple[int, ...]]:
    """Return for each collective which instructions may run while it is in progress, by positions in the program.

    Args:
        program: The program of one device.
        groups: The instructions in the order of the run; instructions of one launch are one entry. If one instruction
            of a group has to wait, the group waits. By default the instructions run one by one in program order.
    """
    steps = program.instructions
    touched = cache(lambda number: _find_accessed_regions(program, steps[number]))
    order = [(number,) for number in range(len(steps))] if groups is None else [*groups]
    found: dict[int, tuple[int, ...]] = {}
    for place, (at, *_) in enumerate(order):
        if not can_be_overlapped(steps[at].op):
            continue
        for group in islice(order, place + 1, None):
            if any(steps[n].op in COLLECTIVES or has_conflict_with_collective(touched(at), touched(n)) for n in group):
                break
            found[at] = (*found.get(at, ()), *group)
    return found


def can_be_overlapped(op: str) -> bool:
    """Return whether other instructions may run during `op`; true if `op` is a collective of a whole device group."""
    return op in COLLECTIVES and op not in POINT_TO_POINT_OPS


def has_conflict_with_collective(collective: AccessedRegions, other: AccessedRegions) -> bool:
    """Return whether an instruction must wait for a collective, because both use the same memory.

    It must wait if it reads or writes results of the collective, or writes operands of the collective.

    Args:
        collective: The accesses of the collective.
        other: The accesses of the instruction.
    """
    (read, written), (reads, writes) = collective, other
    return _has_overlap(written, [*reads, *writes]) or _has_overlap(read, writes)


def _find_accessed_regions(program: Program, i: Instruction) -> AccessedRegions:
    written = [*i.dst, *([] if i.scratch is None else [i.scratch])]
    return [_find_region(program, t) for t in i.src if t is not None], [_find_region(program, t) for t in written]


def _find_region(program: Program, t: Tensor) -> MemoryRegion:
    spec = program.buffers[t.buffer]
    return Operand(t.offset, t, spec.declared_spec, spec.stored_spec, spec.kind).region


def _has_overlap(some: Iterable[MemoryRegion], others: Sequence[MemoryRegion]) -> bool:
    return any(a.overlaps(b) for a in some for b in others)
