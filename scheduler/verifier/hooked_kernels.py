"""The verification of hooked kernels: stages that run panel by panel compute the same as one stage after the other.

It shares no code with the search for hooks, and needs no model of the kernel that calls them. The rule *hooks* has two
parts. First, each stage is a group of its own in the order of the run, so all other rules hold for the stages one after
the other. Second, panels are independent of each other:

1. The body has one dense float32 result, a matrix of rows and columns. It is an instruction, or several with a kernel
   that was written by hand.
2. A hook is a generated kernel with one element for each element of this matrix, in the same order. A reduced row lies
   inside each panel that contains one of its elements. No operand has elements in a part of the matrix only.
3. Memory that a stage writes is read or written by other stages at the same element only, and the body does not read
   it. So an element of a panel depends on the same panel only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...backends.base import Instruction, Program, Tensor, contiguous_strides
from ...backends.capabilities import FusedExpression, HookedKernel, ProgramFusion
from ...graph.dtypes import DType
from ...ops.collectives import COLLECTIVES
from .memory.buffer_contents import compute_byte_extent

REDUCTION_PREFIX, NUMBER_PER_ROW = "row_", "row_operand"


def split_hooked_kernels(fusion: ProgramFusion) -> ProgramFusion:
    """Return the fusion as if no kernel called another: a kernel and the kernels that it calls run one after the other.

    A hooked kernel is a kernel (the body) that calls other kernels (hooks) on each block of columns of its result.
    The verifier first proves this simpler order, and then that blocks of columns do not affect each other.
    """
    stages = {tuple(sorted(n for stage in hooked.stages for n in stage)): hooked.stages for hooked in fusion.hooked}
    return replace(fusion, order=tuple(part for group in fusion.order for part in stages.get(group, (group,))))


def find_hook_faults(program: Program, fusion: ProgramFusion) -> Iterator[str]:
    """Yield the reasons why a body that calls its hooks block by block may compute other results than separate kernels.

    A hook is a kernel that the body calls on each panel (block of columns) of its result.
    """
    groups, seen = {*fusion.order}, set[int]()
    for hooked in fusion.hooked:
        numbers = sorted(n for stage in hooked.stages for n in stage)
        label = f"hooks: kernel of instructions {', '.join(map(str, numbers))}: "
        if tuple(numbers) not in groups:
            yield f"{label}they do not run together"
        elif not seen.isdisjoint(numbers):
            yield f"{label}another kernel has one of them"
        else:
            yield from (label + why for why in _find_stage_faults(program, fusion, hooked))
        seen.update(numbers)


def _find_stage_faults(program: Program, fusion: ProgramFusion, hooked: HookedKernel) -> Iterator[str]:
    """Yield the faults of one hooked kernel: wrong instructions, sizes or operands, or panels that affect each other.

    A panel is a block of columns of the body's result, on which the hooks run as soon as it is computed.
    """
    first, *others = hooked.stages
    if not first or not others:
        yield "it has no body, or no hook"
        return
    body = [program.instructions[number] for number in first]
    if (why := _find_body_fault(body, hooked.panel_columns)) is not None:
        yield why
        return
    if any(not {*first}.isdisjoint(kernel.instruction_numbers) for kernel in fusion.expressions):
        yield "the body has a generated kernel"
        return
    (out,) = body[-1].dst
    written, read = [out], list[Tensor]()
    for stage in others:
        kernels = [kernel for kernel in fusion.expressions if kernel.instruction_numbers == stage]
        if len(kernels) != 1:
            yield f"stage {stage} has {len(kernels)} generated kernels"
            return
        (kernel,) = kernels
        if (why := _find_dependence_on_other_panels(kernel, out, hooked.panel_columns)) is not None:
            yield f"stage {stage} {why}"
        read += kernel.operands
        written += [tensor for _, tensor in kernel.results]
    yield from _find_faults_across_panels(body, read, written)


def _find_body_fault(body: Sequence[Instruction], panel_columns: int) -> str | None:
    for instruction in body:
        if instruction.op in COLLECTIVES or len(instruction.dst) != 1:
            return f"the body {instruction.op} is a collective, or has several results"
    (out,) = body[-1].dst
    if out.dtype is not DType.F32 or not out.shape or not _is_dense(out):
        return f"the result of the body {body[-1].op} is not dense float32"
    if panel_columns < 1 or out.shape[-1] % panel_columns:
        return f"panels of {panel_columns} columns do not divide {out.shape[-1]} columns"
    return None


def _find_dependence_on_other_panels(kernel: FusedExpression, out: Tensor, panel_columns: int) -> str | None:
    """Return why a kernel may read other columns of the body's result than its panel has; None if it cannot.

    Args:
        kernel: The kernel that is called on each panel (block of columns).
        out: The body's result.
        panel_columns: The number of columns of a panel is a multiple of this number.
    """
    if math.prod(kernel.shape) != math.prod(out.shape):
        return "has another number of elements than the body"
    if kernel.boxes:
        return "reads an operand in a part of its elements only"
    length = kernel.shape[-1] if kernel.shape else 1
    functions = {function for function, _, _ in kernel.steps} - {NUMBER_PER_ROW}
    has_rows = any(function.startswith(REDUCTION_PREFIX) for function in functions)
    has_numbers_per_row = any(tensor.shape != kernel.shape for _, tensor in kernel.results)
    if (has_rows or has_numbers_per_row) and panel_columns % length:
        return f"has rows of {length} columns, but panels of {panel_columns}"
    return None


def _find_faults_across_panels(
    body: Sequence[Instruction], read: Sequence[Tensor], written: Sequence[Tensor]
) -> Iterator[str]:
    """Yield a fault for memory that is written for one panel (block of columns) and used for another panel.

    Args:
        body: The instructions of the body, which read all of their operands for each panel.
        read: The operands of the hooks, as views with one element for each element of the body's result.
        written: The results of the body and of the hooks.
    """
    needed = [tensor for i in body for tensor in (*i.src, i.scratch) if tensor is not None]
    for place in written:
        for tensor in needed:
            if _has_common_bytes(place, tensor):
                yield f"{place} is written while the body still needs {tensor}"
        for tensor in (*read, *written):
            if _has_common_bytes(place, tensor) and not _has_equal_elements(place, tensor):
                yield f"{place} is written in one panel, and {tensor} belongs to another panel"


def _is_dense(tensor: Tensor) -> bool:
    dense = contiguous_strides(tensor.shape)
    return all(n == 1 or s == d for n, s, d in zip(tensor.shape, tensor.strides, dense, strict=True))


def _has_equal_elements(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are dense and have the same bytes, so that they differ at most in shape."""
    size = math.prod(one.shape) == math.prod(other.shape)
    return size and one.offset == other.offset and one.dtype == other.dtype and _is_dense(one) and _is_dense(other)


def _has_common_bytes(one: Tensor, other: Tensor) -> bool:
    (buffer, start, end), (other_buffer, other_start, other_end) = map(compute_byte_extent, (one, other))
    return buffer == other_buffer and start < other_end and other_start < end
