"""Binds a program to launches: first its fusions, then the remaining instructions, in execution order."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from ...ops.collectives import COLLECTIVES, narrow_to_integer
from ..base import Instruction, Program, Tensor
from ..capabilities import KernelCall, SourceLocation
from ..fusion.dataflow import Dataflow
from ..fusion.liveness import build_reader_table
from ..fusion.operands import BoundInstruction, Operand
from ..kernel_sources import dedent_source_unless_too_long
from .binding.fused_binding import bind_largest_fusion
from .binding.launch_builder import KernelListingBuilder, LaunchBuilder
from .device.device_limits import KernelLimits
from .device.driver import KERNEL_FOLDER, KernelInstance, KernelLaunch, SingleStep, find_kernel_path, read_kernel_text
from .kernel_table import FUSED, find_op_binder

FUSION_RANKS = {"concat": 0, "mul_mat": 1, "mul_mat_id": 1}
"""The order in which fusions are found, by their first op: lower ranks first, ops without a rank last."""


@dataclass(frozen=True, slots=True)
class CollectiveStep:
    """A collective instruction of a program, as a step between launches in execution order."""

    number: int
    instruction: Instruction
    bound_instruction: BoundInstruction

    @property
    def sequence(self) -> int:
        """The sequence number of the collective, which is equal on all devices."""
        return narrow_to_integer(self.instruction.attrs["sequence"])


def bind_program(
    flow: Dataflow, launches: LaunchBuilder, operand: Callable[[Tensor], Operand]
) -> Iterator[SingleStep | CollectiveStep]:
    """Choose the kernels of a program: yield its launches, and the collectives between them, in execution order.

    Args:
        flow: The dataflow of the program.
        launches: The launch builder that collects the launches.
        operand: Returns the operand of a tensor.
    """
    program = flow.reader_table.program
    chains = _bind_fusions(flow, launches)
    for group in flow.list_groups():
        if group in chains:
            yield from chains[group]
            continue
        (number,) = group
        i = program.instructions[number]
        if i.op in COLLECTIVES:
            yield CollectiveStep(number, i, flow.reader_table.bound_instruction(number))
        elif number not in flow.fixed_instructions:
            yield from _bind_unfused_instruction(flow, launches, operand, number)


def _bind_fusions(flow: Dataflow, launches: LaunchBuilder) -> dict[Sequence[int], list[SingleStep]]:
    """Choose the groups of instructions that fused kernels compute; return the launches of each group.

    Convolutions come first, because they may take the matmuls of gates. Then come matmuls, because the ops before
    them may become their prologue.
    """
    chains: dict[Sequence[int], list[SingleStep]] = {}
    instructions = flow.reader_table.program.instructions
    for number in sorted(range(len(instructions)), key=lambda n: FUSION_RANKS.get(instructions[n].op, 2)):
        if flow.can_join_fusion(number) and (numbers := bind_largest_fusion(flow, launches, FUSED, number)):
            chains[tuple(sorted(numbers))], launches.items = launches.items, []
    return chains


def _bind_unfused_instruction(
    flow: Dataflow, launches: LaunchBuilder, operand: Callable[[Tensor], Operand], number: int
) -> list[SingleStep]:
    """Choose the kernels of one instruction that belongs to no fusion, and return its launches."""
    i = flow.reader_table.program.instructions[number]
    launches.number, launches.scratch_bytes = number, 0
    launches.scratch_address = operand(i.scratch).address if i.scratch is not None else 0
    bind = find_op_binder(i.op)
    assert bind is not None, "supports() was asked before"
    bind(launches, flow.reader_table.bound_instruction(number))
    room = i.scratch.shape[0] if i.scratch is not None else 0
    assert launches.scratch_bytes <= room, f"{i.op} takes more than it asked for"
    bound, launches.items = launches.items, []
    return bound


def bind_program_at_placeholders(
    program: Program, limits: KernelLimits, processors: int = 1
) -> tuple[Dataflow, Sequence[SingleStep | CollectiveStep]]:
    """Choose the kernels of a program before memory exists, with placeholder addresses for all operands.

    Args:
        program: The program.
        limits: Resource limits of the device.
        processors: Number of multiprocessors of the device.

    Returns:
        The dataflow, and the launches and collectives in execution order.
    """
    operand = _make_placeholder_operand_factory(program)
    flow, launches = Dataflow(program, build_reader_table(program, operand)), _make_dry_run_builder(limits, processors)
    return flow, list(bind_program(flow, launches, operand))


def list_kernel_calls(program: Program, limits: KernelLimits) -> Iterator[KernelCall]:
    """List the kernel calls of a program without running it.

    Each call has its source location and its instructions. The list has no kernels of collectives, because their
    transport is unknown before the program is loaded.
    """
    flow, parts = bind_program_at_placeholders(program, limits)
    together = flow.groups_by_instruction()
    for part in parts:
        if isinstance(part, KernelLaunch):
            yield KernelCall(part.kernel.name, _find_kernel_definition_and_text(part.kernel), together[part.number])


def list_launch_groups(program: Program, limits: KernelLimits) -> list[tuple[int, ...]]:
    """List the groups of instructions that are launched together, in execution order, as tuples of instruction indices.

    A group is the instructions of a fusion, or a single instruction. The program is bound to placeholder addresses.
    """
    flow = Dataflow(program, build_reader_table(program, _make_placeholder_operand_factory(program)))
    _bind_fusions(flow, _make_dry_run_builder(limits))
    return [*flow.list_groups()]


def _make_placeholder_operand_factory(program: Program) -> Callable[[Tensor], Operand]:
    """Return a function that gives tensors placeholder addresses, so that kernels can be chosen without memory.

    Tensors of different buffers get different addresses.
    """

    @cache
    def operand(t: Tensor) -> Operand:
        spec = program.buffers[t.buffer]
        return Operand(((t.buffer + 1) << 40) + t.offset, t, spec.declared_spec, spec.stored_spec, spec.kind)

    return operand


def _make_dry_run_builder(limits: KernelLimits, processors: int = 1) -> KernelListingBuilder:
    return KernelListingBuilder(upload_array=lambda array: 1 << 20, limits=limits, multiprocessor_count=processors)


@cache
def _find_kernel_definition_and_text(kernel: KernelInstance) -> SourceLocation:
    """Return the file, line and text of a kernel's C++ definition, in its own file or in a shared header."""
    head = re.compile(rf"^.*__global__[^;{{}}]*?\b{re.escape(kernel.name.partition('<')[0])}\s*\(", re.MULTILINE)
    for file in (kernel.source.file, *kernel.source.before):
        text = read_kernel_text(file)
        if at := head.search(text):
            end = text.find("\n}", at.start()) + len("\n}")
            line = text.count("\n", 0, at.start()) + 1
            return SourceLocation(
                f"{_format_kernel_path_relative_to_repository(file)}:{line}",
                dedent_source_unless_too_long(text[at.start() : end]),
            )
    return SourceLocation(_format_kernel_path_relative_to_repository(kernel.source.file))


def _format_kernel_path_relative_to_repository(file: str) -> str:
    """Format the path of a kernel file relative to the repository; a file outside the kernel folder keeps its path."""
    path = find_kernel_path(file)
    return (
        f"hocket/backends/cupy/kernels/{path.relative_to(KERNEL_FOLDER).as_posix()}"
        if path.is_relative_to(KERNEL_FOLDER)
        else file
    )
