"""Prologue fusion on the CPU: norms that run in the step of the matmuls that read them.

Several matmuls of the same activations become one step, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ...fusion.dataflow import Dataflow
from ..kernels.matmul.packed_matmul import has_matmul_kernel
from ..kernels.matmul.tile_loops import MIN_EVENLY_SHARED_ROWS
from ..steps.step_table import FusedBinding

MAX_JOINED_MATMULS = 8
JoinedGroups = tuple[tuple[int, ...], ...]
"""Groups that run one after the other, by their instruction numbers."""


def choose_joined_groups(
    flow: Dataflow, patterns: Mapping[Sequence[int], FusedBinding]
) -> dict[tuple[int, ...], JoinedGroups]:
    """Choose the norms that run in one step with the matmuls that read them, for matmuls of few rows.

    Each thread computes the whole norm for itself, then its columns of the matmuls. A norm and its matmuls become one
    group of `flow`.

    Args:
        flow: The dataflow, with all other groups.
        patterns: The hand-written fusions in `flow`, by their instruction numbers.

    Returns:
        For each choice, by the instruction numbers of all of it: the groups in the order in which they run.
    """
    found: dict[tuple[int, ...], JoinedGroups] = {}
    for numbers, pattern in patterns.items():
        if not pattern.is_repeated:
            continue
        joined: JoinedGroups = (flow.find_group(numbers[0]),)
        candidates = _list_matmul_groups(flow, pattern.instruction_numbers[-1])
        while len(joined) <= MAX_JOINED_MATMULS:
            following = next((group for group in candidates if _can_join(flow, (*joined, group))), None)
            if following is None:
                break
            joined = (*joined, following)
            candidates.remove(following)
        if len(joined) > 1:
            flow.join_groups_unchecked(_flatten(joined))
            found[tuple(sorted(_flatten(joined)))] = joined
    return found


def _flatten(groups: JoinedGroups) -> list[int]:
    return [number for group in groups for number in group]


def _can_join(flow: Dataflow, groups: JoinedGroups) -> bool:
    return flow.can_join_groups(_flatten(groups))


def _list_matmul_groups(flow: Dataflow, number: int) -> list[tuple[int, ...]]:
    """List the groups with matmuls of few rows that read the result of instruction `number` as activations.

    They are in the order of their result sizes. The last step calls the others, so it is the largest: every thread has
    work in it. The list does not depend on the execution order of the program.
    """
    readers = flow.reader_table.find_known_readers_of_first_result(number)
    found = {flow.find_group(reader): reader for reader in readers if _is_matmul_of_few_rows_of(flow, reader, number)}

    def rank(group: tuple[int, ...]) -> tuple[int, int, int]:
        out = flow.bound_instruction(found[group]).out
        return out.size, out.tensor.buffer, out.tensor.offset

    return sorted(found, key=rank)


def _is_matmul_of_few_rows_of(flow: Dataflow, reader: int, number: int) -> bool:
    call = flow.bound_instruction(reader)
    if call.op != "mul_mat" or not has_matmul_kernel(call):
        return False
    x = call.operand(1)
    return x.region == flow.bound_instruction(number).out.region and math.prod(x.shape[:-1]) < MIN_EVENLY_SHARED_ROWS
