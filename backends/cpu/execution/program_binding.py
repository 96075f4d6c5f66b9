"""Binding of a program: fused instructions, compiled segments, and Python calls for instructions without a kernel."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from operator import attrgetter, is_
from typing import NamedTuple

import numpy as np

from ....ops.collectives import COLLECTIVES
from ....ops.registry import BUILTIN_OPS, REGISTRY
from ...base import Comm, Device, Instruction, Program, Tensor
from ...capabilities import STAND_IN, KernelCall, ProgramFusion, SourceLocation
from ...compile_log import log
from ...fusion.dataflow import Dataflow
from ...fusion.expression_groups import ExpressionGroup
from ...fusion.hooks import KernelBodyWithHooks
from ...fusion.liveness import build_reader_table
from ...fusion.operands import BoundInstruction, NoKernelError, Operand
from ...kernel_sources import read_source_location_and_text
from ...kernel_tables import find_op_package_binding
from ..compilation.compiler import IrBody, Kernel
from ..kernels.kernel_table import BINDINGS, FUSED
from ..steps.prologues import join_steps
from ..steps.step_table import FusedBinding, InstructionBinder, StepTableBuilder, TableStep
from .expression_fusion import bind_ungrouped_op, choose_expression_groups, to_fused_expression
from .hook_fusion import choose_hooked_bodies, make_group_binding, make_hooked_binding, to_hooked_kernel
from .joined_groups import JoinedGroups, choose_joined_groups
from .relocatable_tables import PlaceholderMemory, RelocatableTable, build_relocatable_table, make_placeholder_addresses
from .replay import CompiledSegment, Replay, ReplayItems
from .thread_pool import ThreadPool


def bind_program(
    program: Program,
    buffers: Sequence[np.ndarray],
    on: Device,
    thread_pool: ThreadPool,
    comm: Comm,
    in_python: Callable[[Instruction], list[Callable[[], object]]],
) -> Replay:
    """Bind a program to its buffers, and return it as a `Replay` that is ready to run.

    Args:
        program: The program.
        buffers: Its buffers in host memory.
        on: The device.
        thread_pool: The worker threads of the device.
        comm: The communicator of the device.
        in_python: Makes the Python calls of an instruction that has no kernel.
    """
    addresses = [b.ctypes.data for b in buffers]
    flow, steps = _build_dataflow_at_addresses(program, addresses), StepTableBuilder(thread_pool.threads, comm)
    work: ReplayItems = []
    for part in _split_into_compiled_segments(flow, _choose_fusions(flow), steps):
        if isinstance(part, int):
            quietly = np.errstate(all="ignore")
            work += [(part, quietly(call)) for call in in_python(program.instructions[part])]
        else:
            work.append(
                (part[0].instruction_number, CompiledSegment.from_steps(part, thread_pool.threads, steps.table_memory))
            )
    return Replay(program, on, work, lambda: flow, thread_pool, comm, buffers)


def bind_relocatable_program(program: Program, threads: int) -> tuple[RelocatableTable | None, Sequence[Kernel]]:
    """Bind a program without its buffers; return a step table that can be moved to any buffers, and its kernels.

    The table is None if the binding depends on addresses, other devices, other packages or Python calls.
    """
    ours = all(i.op in BUILTIN_OPS and i.op not in COLLECTIVES for i in program.instructions)
    memory = PlaceholderMemory(make_placeholder_addresses(len(program.buffers) + 1)[-1])
    steps = StepTableBuilder(threads, table_memory=memory)
    parts = [*_split_into_compiled_segments(*find_or_choose_fusions(program), steps)] if ours else []
    if len(parts) != 1 or isinstance(parts[0], int):
        return None, ()
    tables = build_relocatable_table(parts[0], threads, memory, [b.nbytes for b in program.buffers])
    return tables, [kernel for step in parts[0] for kernel in step.kernels]


def build_fused_dataflow(program: Program) -> Dataflow:
    """Build the dataflow of a program with the same fusions as `bind_program` chooses."""
    return find_or_choose_fusions(program)[0]


def describe_program_fusion(program: Program) -> ProgramFusion:
    """Return the order and the generated kernels with which `bind_program` runs a program."""
    flow, fusions = find_or_choose_fusions(program)
    hooks = [hook.group for hooked in fusions.hooked_bodies for hook in hooked.hooks]
    groups = {group.instruction_numbers: group for group in (*fusions.expression_groups, *hooks)}
    return ProgramFusion(
        tuple(flow.list_groups()),
        tuple(map(to_fused_expression, groups.values())),
        tuple(map(to_hooked_kernel, fusions.hooked_bodies)),
        tuple(fusions.joined_groups.values()),
    )


class _Fusions(NamedTuple):
    """All fusions of a program.

    - `patterns`: hand-written fused kernels, by their instruction numbers.
    - `expression_groups`: op groups that one generated kernel each computes.
    - `hooked_bodies`: matmul and attention kernels with epilogues.
    - `joined_groups`: norms and matmuls that run as one step, by the instruction numbers of all of them.
    """

    patterns: dict[Sequence[int], FusedBinding]
    expression_groups: Sequence[ExpressionGroup]
    hooked_bodies: Sequence[KernelBodyWithHooks]
    joined_groups: dict[tuple[int, ...], JoinedGroups]


_recent_fusions: deque[tuple[Dataflow, _Fusions]] = deque(maxlen=4)
"""Dataflows at placeholder addresses with their fusions. A cold start plans a few programs before it binds them."""


def find_or_choose_fusions(program: Program) -> tuple[Dataflow, _Fusions]:
    """Return the fusions of a program, and its dataflow grouped by them; both are independent of buffer addresses.

    Recent results are kept, so that verification, binding and reports share one choice, also for copies of a program.
    """
    parts = attrgetter("buffers", "instructions", "outputs", "undo")
    for flow, fusions in [*_recent_fusions]:
        if all(map(is_, parts(flow.reader_table.program), parts(program))):
            return flow, fusions
    flow = _build_dataflow_at_addresses(program, make_placeholder_addresses(len(program.buffers)))
    fusions = _choose_fusions(flow)
    _recent_fusions.append((flow, fusions))
    return flow, fusions


def _choose_fusions(flow: Dataflow) -> _Fusions:
    """Choose all fusions of a program. The instructions of each become a group of `flow`."""
    patterns, groups = _choose_longest_fusions(flow), choose_expression_groups(flow)
    hooked = choose_hooked_bodies(flow, groups, patterns)
    return _Fusions(patterns, groups, hooked, choose_joined_groups(flow, patterns))


def list_kernel_calls(
    program: Program, threads: int, in_python: Callable[[Instruction], SourceLocation]
) -> Iterator[KernelCall]:
    """List the kernel calls that `bind_program` would make for a program, without its buffers.

    Collectives are left out, because their kernels depend on the other devices.

    Args:
        program: The program; it is bound to placeholder addresses.
        threads: Thread count.
        in_python: Returns the source location of an instruction without a kernel.
    """
    flow, fusions = find_or_choose_fusions(program)
    parts = list(_split_into_compiled_segments(flow, fusions, StepTableBuilder(threads)))
    together = flow.groups_by_instruction()
    for part in parts:
        if not isinstance(part, int):
            for s in part:
                numbers = together[s.instruction_number]
                is_generated = isinstance(s.kernel.body, IrBody) or len(s.kernels) > 1
                launches = len(numbers) if is_generated else 1
                yield KernelCall(s.kernel.name, _locate_kernel_source(s.kernel), numbers, launches)
        elif (i := program.instructions[part]).op not in COLLECTIVES:
            yield KernelCall(STAND_IN, in_python(i), (part,))


def _locate_kernel_source(kernel: Kernel) -> SourceLocation:
    """Return the source location of the Python function that a kernel is compiled from."""
    return read_source_location_and_text(kernel.body.source if isinstance(kernel.body, IrBody) else kernel.body)


def find_program_kernels(program: Program, threads: int) -> Iterator[Kernel]:
    """Yield the kernels that `bind_program` would call for a program, without its buffers.

    The program is bound to placeholder addresses.
    """
    return (
        kernel
        for part in _split_into_compiled_segments(*find_or_choose_fusions(program), StepTableBuilder(threads))
        if not isinstance(part, int)
        for step in part
        for kernel in step.kernels
    )


def _build_dataflow_at_addresses(program: Program, addresses: Sequence[int]) -> Dataflow:
    """Build the dataflow of a program with buffers at the given addresses."""

    @cache  # instructions share the operand of a tensor, which knows its memory region
    def operand(tensor: Tensor) -> Operand:
        spec = program.buffers[tensor.buffer]
        return Operand(
            addresses[tensor.buffer] + tensor.offset, tensor, spec.declared_spec, spec.stored_spec, spec.kind
        )

    return Dataflow(program, build_reader_table(program, operand))


def _split_into_compiled_segments(
    flow: Dataflow, fusions: _Fusions, steps: StepTableBuilder
) -> Iterator[list[TableStep] | int]:
    """Yield the program in order: a list of compiled steps, or the number of an instruction without a kernel."""
    chains = fusions.patterns | {g.instruction_numbers: make_group_binding(flow, g) for g in fusions.expression_groups}
    chains |= {h.instruction_numbers: make_hooked_binding(flow, h, fusions.patterns) for h in fusions.hooked_bodies}
    for together in flow.list_groups():
        first = len(steps.steps)
        for group in fusions.joined_groups.get(together, (together,)):
            steps.instruction_number = group[0]
            if group in chains:
                chains[group].bind(steps)
            elif not _bind_instruction(steps, flow.bound_instruction(group[0])):
                if taken := steps.take_steps():
                    yield taken
                yield group[0]
                steps.invalidate_values_in_regions([out.region for out in flow.bound_instruction(group[0]).dst])
        if together in fusions.joined_groups:
            steps.steps[first:] = join_steps(steps.steps[first:])
    if taken := steps.take_steps():
        yield taken


def _bind_instruction(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    """Append the steps of one instruction, and return whether a kernel exists for the instruction."""
    if not any(t.tensor.spec.size for t in call.dst) and call.op not in COLLECTIVES:
        return True
    bind: InstructionBinder | None = BINDINGS.get(call.op) or find_op_package_binding(call.op, "cpu")
    return (bind is not None and bind(steps, call)) or (call.op in REGISTRY and bind_ungrouped_op(steps, call))


def _choose_longest_fusions(flow: Dataflow) -> dict[Sequence[int], FusedBinding]:
    """Choose the longest hand-written fusion that begins at each instruction; return them by instruction numbers.

    The instructions of each chosen fusion become a group of `flow`.
    """
    chains: dict[Sequence[int], FusedBinding] = {}
    for number in range(len(flow.reader_table.program.instructions)):
        longest = max(
            _find_fusions_starting_at(flow, number), key=lambda chain: len(chain.instruction_numbers), default=None
        )
        if longest is not None:
            flow.group_instructions_unchecked(longest.instruction_numbers)
            chains[tuple(sorted(longest.instruction_numbers))] = longest
    return chains


def _find_fusions_starting_at(flow: Dataflow, number: int) -> Iterator[FusedBinding]:
    """Yield the hand-written fusions that begin at instruction `number` and that the order of the program allows."""
    for find in FUSED.get(flow.bound_instruction(number).op, ()) if flow.can_join_fusion(number) else ():
        try:
            chain = find(flow, number)
        except NoKernelError as why:
            log.debug("%s %d: %s", find.__name__, number, why)
            continue
        if flow.can_group(chain.instruction_numbers):
            yield chain
