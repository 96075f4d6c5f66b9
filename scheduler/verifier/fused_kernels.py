"""The verification of fused kernels: a program with generated kernels is compared with its instructions.

It shares no code with the pass that groups instructions. The group is undone: the declaration of each op is substituted
into the declarations of its readers, and the result must be the expression of the kernel, term by term. The bytes that
each kernel reads must have the contents that the instructions find in program order.

Rules, named at the beginning of each fault:

- order: each instruction and each kernel runs once, and no instruction passes a collective. Instructions of a kernel
  are ascending.
- operands: a kernel reads the elements that its instructions read, and no others; each has the same content as in
  program order.
- expression: each result is the composition of its instructions, with the same roundings and the same rows.
- results: each value that something else reads is written to its place, and nothing else is written.
- in place: a result lies only on an operand with the same elements, and on no other result.
- states: a generated kernel writes no state.
- hooks: a kernel that runs stages panel by panel computes the same as its stages one by one (`hooked_kernels`).
- joined: groups that run one after the other are one entry of the order (`joined_groups`); all rules hold for each.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from ...backends.base import Program, Tensor
from ...backends.capabilities import FusedExpression, GeneratesFusedKernels, ProgramFusion
from ...graph.errors import PlanError, format_count
from ...ops.collectives import COLLECTIVES
from .fused_terms import SymbolicTerms, merge_tensor_axes
from .hooked_kernels import find_hook_faults, split_hooked_kernels
from .joined_groups import find_joined_group_faults, split_joined_groups
from .memory.buffer_contents import compute_byte_extent
from .run_contents import UnfusedRunContents


def verify_fused_kernels(program: Program, backend: GeneratesFusedKernels) -> None:
    """Verify the fused kernels that a backend generates for a program; raise `PlanError` with the first fault."""
    for why in find_fusion_faults(program, backend.describe_fusion(program)):
        raise PlanError(f"program of {format_count(len(program.instructions), 'step')}: {why}")


def find_fusion_faults(program: Program, fusion: ProgramFusion) -> Iterator[str]:
    """Yield the reasons why fused kernels do not compute the results of a program's instructions."""
    if faults := [*find_joined_group_faults(program, fusion)]:
        yield from faults
        return
    fusion = split_joined_groups(fusion)
    if faults := [*find_hook_faults(program, fusion)]:
        yield from faults
        return
    fusion = split_hooked_kernels(fusion)
    if faults := [*_find_missing_or_reordered_instruction_faults(program, fusion)]:
        yield from faults
        return
    contents = UnfusedRunContents(program)
    for group in fusion.expressions:
        label = f"kernel of instructions {', '.join(map(str, group.instruction_numbers))}"
        if faults := [*_find_written_memory_faults(program, group)]:
            yield from (f"{label}: {why}" for why in faults)
            continue
        yield from (f"{label}: {why}" for why in _find_missing_or_extra_result_faults(program, contents, group))
        yield from (f"{label}: {why}" for why in SymbolicTerms(program, contents, group).find_faults())
    yield from contents.find_fused_run_differences(fusion)


# ------------------------------------------------------------------------------------------------------------ order


def _find_missing_or_reordered_instruction_faults(program: Program, fusion: ProgramFusion) -> Iterator[str]:
    """Yield faults of the order: a missing or repeated instruction, or one that moves across a collective."""
    count, times = len(program.instructions), Counter(n for group in fusion.order for n in group)
    wrong = [n for n in {*range(count), *times} if times[n] != 1 or not 0 <= n < count]
    if wrong:
        yield f"order: instruction {min(wrong)} runs {times[min(wrong)]} times"
        return
    groups = {*fusion.order}
    for numbers, kernels in Counter(kernel.instruction_numbers for kernel in fusion.expressions).items():
        if numbers not in groups:
            yield f"order: the instructions {numbers} have a kernel, but do not run together"
        if kernels > 1:
            yield f"order: the instructions {numbers} have {format_count(kernels, 'kernel')}"
        if [*numbers] != sorted(numbers):
            yield f"order: the instructions {numbers} of a kernel are not ascending"
    run = [n for group in fusion.order for n in group]
    passed = 0
    for position, number in enumerate(run):
        passed = max(passed, number)
        if program.instructions[number].op in COLLECTIVES and (passed != number or position != number):
            yield f"order: an instruction passes the collective {number}"
    for group in fusion.order:
        if len(group) > 1 and any(program.instructions[n].op in COLLECTIVES for n in group):
            yield f"order: the group {group} has a collective"


# ------------------------------------------------------------------------------------------------- memory, results


def _has_common_bytes(one: Tensor, other: Tensor) -> bool:
    (buffer, start, end), (other_buffer, other_start, other_end) = map(compute_byte_extent, (one, other))
    return buffer == other_buffer and start < other_end and other_start < end


def _find_written_memory_faults(program: Program, group: FusedExpression) -> Iterator[str]:
    """Yield faults of the memory that a kernel writes: a state, an operand still in use, or another result."""
    for _, result in group.results:
        if not 0 <= result.buffer < len(program.buffers) or program.buffers[result.buffer].kind != "arena":
            yield f"states: {result} is not in the arena"
    reads = {(function, bool(sources), value) for function, sources, value in group.steps}
    for position, (_, result) in enumerate(group.results):
        for index, operand in enumerate(group.operands):
            same = (operand.offset, merge_tensor_axes(operand)) == (result.offset, merge_tensor_axes(result))
            same = same and ("operand", True, index) not in reads
            if _has_common_bytes(operand, result) and not same:
                yield f"in place: {result} overlaps {operand}"
        for _, other in group.results[:position]:
            if _has_common_bytes(other, result):
                yield f"in place: {result} overlaps {other}"


def _find_missing_or_extra_result_faults(
    program: Program, contents: UnfusedRunContents, group: FusedExpression
) -> Iterator[str]:
    """Yield results that a kernel should write but does not, and memory that it writes although it holds no result."""
    places = Counter((t.buffer, t.offset, math.prod(t.shape)) for _, t in group.results)
    for number in group.instruction_numbers:
        instruction = program.instructions[number]
        if len(instruction.dst) != 1:
            yield f"results: instruction {number} has {format_count(len(instruction.dst), 'result')}"
            continue
        (out,) = instruction.dst
        place = out.buffer, out.offset, math.prod(out.shape)
        if contents.is_result_read_outside_group(number, group.instruction_numbers):
            if not places[place]:
                yield f"results: the result of instruction {number} is not written"
            places[place] -= 1
    if any(count > 0 for count in places.values()):
        yield "results: it writes a place that is no needed result of its instructions"
