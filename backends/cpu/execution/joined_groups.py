"""Norms that become the prologue of matmuls, and matmuls of the same activations that become one step."""

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
    """Choose the matmuls of few rows that run right after the norm that they read; make them one group of `flow`.

    Each thread computes the norm for itself and continues with its columns of the matmuls. So the kernels of all of
    them can be one step.

    Args:
        flow: The dataflow, with all other groups.
        patterns: The fused patterns in `flow`, by their instructions.

    Returns:
        The joined groups, by the instruction numbers of all of them.
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

    They are in the order of their result sizes. So the step of the largest one calls the others, and every thread has
    work in it. Each valid order of a program has the same list.
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
