"""Prologue fusion on the CPU: norms that run in the step of the matmuls that read them.

Several matmuls of the same activations become one step, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ...fusion.dataflow import Dataflow
from ...fusion.expression_groups import ExpressionGroup
from ...fusion.operands import BoundInstruction
from ..kernels.matmul.packed_matmul import has_matmul_kernel
from ..kernels.matmul.tile_loops import MIN_EVENLY_SHARED_ROWS
from ..steps.step_table import MIN_SHARED_BYTES, FusedBinding

MAX_JOINED_MATMULS = 8
JoinedGroups = tuple[tuple[int, ...], ...]
"""Groups that run one after the other, by their instruction numbers."""


def choose_joined_groups(
    flow: Dataflow, patterns: Mapping[Sequence[int], FusedBinding], groups: Sequence[ExpressionGroup] = ()
) -> dict[tuple[int, ...], JoinedGroups]:
    """Choose the matmuls of the same activations that run in one step, after the norm that computes the activations.

    A norm joins matmuls of few rows, or matmuls that are so small that one thread computes them. If the norm is a
    pattern that threads repeat, each thread computes the whole norm for itself, then its columns of the matmuls. A norm
    and its matmuls become one group of `flow`.

    Args:
        flow: The dataflow, with all other groups.
        patterns: The hand-written fusions in `flow`, by their instruction numbers.
        groups: The expression groups in `flow`, such as norms.

    Returns:
        For each choice, by the instruction numbers of all of it: the groups in the order in which they run.
    """
    found: dict[tuple[int, ...], JoinedGroups] = {}
    repeated = {tuple(sorted(n)): n[-1] for n in (p.instruction_numbers for p in patterns.values() if p.is_repeated)}
    generated = {group.instruction_numbers for group in groups}
    for number in range(len(flow.reader_table.program.instructions)):
        own = flow.find_group(number)
        candidates = {group: is_small for group, is_small in _list_matmul_groups(flow, number) if group not in found}
        joined: JoinedGroups = ()
        if any(candidates.values()) and (own in generated or repeated.get(own) == number):
            joined, candidates = (own,), {group: True for group, is_small in candidates.items() if is_small}
        while len(joined) <= MAX_JOINED_MATMULS:
            matmuls = joined[1:] if joined and joined[0] == own else joined
            independent = (group for group in candidates if all(_are_independent(flow, group, m) for m in matmuls))
            following = next((group for group in independent if _can_join(flow, (*joined, group))), None)
            if following is None:
                break
            joined = (*joined, following)
            del candidates[following]
        if len(joined) > 1:
            flow.join_groups_unchecked(_flatten(joined))
            found[tuple(sorted(_flatten(joined)))] = joined
    return found


def _flatten(groups: JoinedGroups) -> list[int]:
    return [number for group in groups for number in group]


def _can_join(flow: Dataflow, groups: JoinedGroups) -> bool:
    return flow.can_join_groups(_flatten(groups))


def _are_independent(flow: Dataflow, group: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Return whether neither of two groups writes an operand or a result of the other one, so that no thread waits."""
    calls, others = ([flow.bound_instruction(number) for number in numbers] for numbers in (group, other))
    return not any(
        result.region.overlaps(operand.region)
        for writers, users in ((calls, others), (others, calls))
        for result in (operand for call in writers for operand in call.dst)
        for operand in (operand for call in users for operand in (*call.src, *call.dst) if operand is not None)
    )


def _list_matmul_groups(flow: Dataflow, number: int) -> list[tuple[tuple[int, ...], bool]]:
    """List the groups with matmuls that read the result of instruction `number` as activations.

    For each group the list says whether its matmul is small: it has few rows, or one thread computes it. Groups are in
    the order of their result sizes. The last step calls the others, so it is the largest: every thread has work in it.
    The list does not depend on the execution order of the program.
    """
    readers = flow.reader_table.find_known_readers_of_first_result(number)
    found = {flow.find_group(reader): reader for reader in readers if _is_matmul_of(flow, reader, number)}

    def rank(group: tuple[int, ...]) -> tuple[int, int, int]:
        out = flow.bound_instruction(found[group]).out
        return out.size, out.tensor.buffer, out.tensor.offset

    return [(group, _is_small(flow.bound_instruction(found[group]))) for group in sorted(found, key=rank)]


def _is_matmul_of(flow: Dataflow, reader: int, number: int) -> bool:
    call = flow.bound_instruction(reader)
    if call.op != "mul_mat" or not has_matmul_kernel(call):
        return False
    return call.operand(1).region == flow.bound_instruction(number).out.region


def _is_small(call: BoundInstruction) -> bool:
    w, x = call.operand(0), call.operand(1)
    moved_bytes = sum(o.tensor.spec.nbytes for o in (w, x, call.out))
    return math.prod(x.shape[:-1]) < MIN_EVENLY_SHARED_ROWS or moved_bytes < MIN_SHARED_BYTES
