"""Epilogue fusion on the CPU: matmul and attention kernels call hooks for each panel of their result.

A hook is a generated kernel of a group of elementwise or row-reduction ops. A panel is some rows by some columns, which
is still in the cache of the thread. The kernel that calls hooks is the body. Generated row kernels call a hook, too: it
quantises their result for matmuls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

from ...base import Tensor
from ...capabilities import HookedKernel
from ...fusion.dataflow import Dataflow
from ...fusion.expression_groups import ExpressionGroup
from ...fusion.hooks import KernelBodyWithHooks, PanelHook, ResultPanels, find_hooked_bodies
from ...fusion.operands import BoundInstruction, Operand
from ..compilation.compiler import Kernel
from ..kernels.attention.bind_attention import can_bind_attention
from ..kernels.kernel_table import BINDINGS
from ..kernels.matmul.amx_matmul import choose_activation_rounding_kind
from ..kernels.matmul.batched_matmul import find_batched_panels, has_batched_matmul_kernel
from ..kernels.matmul.float_matmul import has_batched_column_major_matmul_kernel, make_float_weight_tiling
from ..kernels.matmul.packed_matmul import has_matmul_kernel, make_packed_matmul_subroutines_and_tiling
from ..kernels.matmul.tile_loops import GROUP_ROWS, MIN_EVENLY_SHARED_ROWS, PAIR_ROWS, is_matmul_shared_by_threads
from ..kernels.packed.activation_quantisation import TERMS_BY_KIND, ResultReadForms
from ..kernels.packed.format_table import BLOCK_COLUMNS, FORMATS
from ..kernels.vector.elementwise import make_row_thread_work_and_strides
from ..kernels.vector.expression_kernels import make_expression_kernel
from ..kernels.vector.group_kernels import add_group_step, make_group_row_kernel
from ..steps.column_split import find_continued_column_split
from ..steps.panel_hooks import StepHook, make_hook_words
from ..steps.step_table import FusedBinding, StepTableBuilder, ThreadWork
from .expression_fusion import trace_instruction


def choose_hooked_bodies(
    flow: Dataflow, groups: Sequence[ExpressionGroup], patterns: Mapping[Sequence[int], FusedBinding]
) -> list[KernelBodyWithHooks]:
    """Choose the op groups that run as epilogues (hooks) of matmuls, convolutions and attention ops.

    Each body (the kernel that calls hooks) becomes one group of `flow` together with its hooks.

    Args:
        flow: The dataflow.
        groups: The expression groups in `flow`, each computed by one generated kernel.
        patterns: The hand-written fusions in `flow`, by their instruction numbers.
    """
    bodies: list[tuple[tuple[int, ...], ResultPanels | None]]
    bodies = [(tuple(numbers), pattern.panels) for numbers, pattern in patterns.items()]
    singles = (n for n in range(len(flow.reader_table.program.instructions)) if flow.can_join_fusion(n))
    bodies += [((number,), find_result_panels(flow.bound_instruction(number))) for number in singles]
    found = [
        KernelBodyWithHooks(numbers, panels, ())
        for numbers, panels in sorted(bodies, key=lambda body: body[0])
        if panels is not None
    ]
    return find_hooked_bodies(flow, groups, found, partial(trace_instruction, flow))


def to_hooked_kernel(hooked: KernelBodyWithHooks) -> HookedKernel:
    """Convert a body with hooks to a `HookedKernel`, which reports show and the plan verifier checks."""
    return HookedKernel(hooked.stages, hooked.panel_columns)


def make_hooked_binding(
    flow: Dataflow, hooked: KernelBodyWithHooks, patterns: Mapping[Sequence[int], FusedBinding]
) -> FusedBinding:
    """Make the binding of a matmul or attention kernel (body) that calls epilogues (hooks) for each panel.

    The body is a single instruction, or a hand-written fusion: one of `patterns`, by instruction numbers.
    """
    call = flow.bound_instruction(hooked.body[-1])
    pattern = patterns.get(hooked.body)
    bind_body = partial(_bind_single_instruction_body, call=call) if pattern is None else pattern.bind
    bind = partial(_bind_hooked_body, flow=flow, hooked=hooked, bind_body=bind_body)
    return FusedBinding(hooked.instruction_numbers, bind)


def _bind_single_instruction_body(steps: StepTableBuilder, call: BoundInstruction) -> None:
    is_bound = BINDINGS[call.op](steps, call)
    assert is_bound, "the body was chosen because it has a kernel"


def make_group_binding(flow: Dataflow, group: ExpressionGroup) -> FusedBinding:
    """Make the binding of an expression group: one step, which also quantises the result for matmuls."""
    return FusedBinding(group.instruction_numbers, partial(_bind_group, flow=flow, group=group))


def _bind_group(steps: StepTableBuilder, flow: Dataflow, group: ExpressionGroup) -> None:
    columns = group.shape[-1] if group.shape else 0
    for number in group.instruction_numbers:
        call = flow.bound_instruction(number)
        readers = [] if columns == 0 or columns % BLOCK_COLUMNS else call.find_readers() or []
        widths = {x.shape[-1] for r in readers if (x := r.optional_operand(1)) is not None and x.shape}
        for width in sorted(widths):
            reads = (
                find_quantised_read_forms(steps, call, (group.size // width, width)) if width % columns == 0 else None
            )
            if reads is not None:
                records = reads.make_quantised_row_memory_per_thread(steps, shared=True)
                if _add_hooked_group_step(steps, group, reads.make_quantising_hook(records[0]), width // columns):
                    reads.register_quantised_rows(steps, records)
                    return
    add_group_step(steps, group)


def _add_hooked_group_step(steps: StepTableBuilder, group: ExpressionGroup, hook: StepHook, blocks: int) -> bool:
    """Add the step of an expression group with a kernel that calls a hook, which quantises its result.

    Return False if the kernel cannot loop over whole rows.

    Args:
        steps: The steps.
        group: The group; each of its rows is a block of a row of a matrix.
        hook: The hook, which reads a result of the group as a matrix.
        blocks: The number of blocks in a row of the matrix.
    """
    if group.boxes or any(operand.shape != group.shape for operand in group.operands):
        return False
    row_kernel = make_group_row_kernel(group)

    def make_work(
        first: int, last: int, operands: Sequence[Operand], results: Sequence[Operand]
    ) -> tuple[Kernel, ThreadWork] | None:
        """Make the kernel and the work of a thread for columns `first` to `last` of the matrix."""
        shape = operands[0].shape
        whole = make_row_thread_work_and_strides(replace(row_kernel, whole_row_shape=shape), operands, results)
        if whole is None:
            return None
        work, strides = whole
        is_strided = tuple(stride not in (0, 4) for stride in strides)
        kernel = make_expression_kernel(group.expression, tuple(s == 0 for s in strides), is_strided, "hooked")
        words = [*work.words, first // shape[-1], blocks, *make_hook_words([hook])]
        read, written = hook.slice_columns(first, last)
        return kernel, ThreadWork(words, [*operands, *read], [*results, *written])

    width, split = blocks * group.shape[-1], None
    if math.prod(group.shape) == width:
        split = find_continued_column_split(steps, group.operands, group.results[0], whole_rows=True)
    if split is None:
        if (call := make_work(0, width, group.operands, group.results)) is not None:
            kernel, work = call
            steps.add(kernel, work.words, reads=work.reads, writes=work.writes)
        return call is not None
    operands, results = (
        zip(*map(split.slice_by_thread, some), strict=True) for some in (group.operands, group.results)
    )
    shares: list[ThreadWork | None] = []
    kernels: set[Kernel] = set()
    for (first, last), read, written in zip(pairwise(split.column_bounds), operands, results, strict=True):
        call = None if None in read or None in written else make_work(first, last, read, written)
        if call is None and first < last:
            return False
        shares.append(None if call is None else call[1])
        kernels |= set() if call is None else {call[0]}
    if len(kernels) != 1:
        return False
    steps.add_by_columns(kernels.pop(), shares, group.results, split.column_bounds)
    return True


def find_result_panels(call: BoundInstruction) -> ResultPanels | None:
    """Return the panels in which the kernel of an instruction computes its result; None if it cannot call hooks."""
    out = call.out if len(call.dst) == 1 else None
    if out is None or not (out.is_dense and out.is_float and out.size):
        return None
    if call.op == "attention" and math.prod(out.shape[:-3]) == 1 and can_bind_attention(call):
        return ResultPanels(out.shape[-3], out.shape[-2] * out.shape[-1], out.shape[-1])
    if call.op != "mul_mat":
        return None
    if not has_matmul_kernel(call):
        is_batched = not has_batched_column_major_matmul_kernel(call) and has_batched_matmul_kernel(call)
        return find_batched_panels(call) if is_batched else None
    if choose_activation_rounding_kind(call) in TERMS_BY_KIND:
        return None
    rows = math.prod(out.shape[:-1])
    return ResultPanels(
        rows, out.shape[-1], _count_tile_columns(call.operand(0)) if rows >= MIN_EVENLY_SHARED_ROWS else None
    )


def _count_tile_columns(weight: Operand) -> int:
    """Return the number of result columns that one tile of a weight computes."""
    form = FORMATS.get(weight.dtype)
    tiling = make_float_weight_tiling(weight.dtype) if form is None else make_packed_matmul_subroutines_and_tiling(form)
    return math.gcd(tiling.tile_groups * GROUP_ROWS, PAIR_ROWS)


def _bind_hooked_body(
    steps: StepTableBuilder, flow: Dataflow, hooked: KernelBodyWithHooks, bind_body: Callable[[StepTableBuilder], None]
) -> None:
    hooks, registrations = [*map(_make_step_hook, hooked.hooks)], []
    if hooked.panels.has_columns_in_multiples_of(BLOCK_COLUMNS):
        size = hooked.panels.rows, hooked.panels.columns
        for number in hooked.instruction_numbers:
            reads = find_quantised_read_forms(steps, flow.bound_instruction(number), size)
            if reads is not None:
                place = f"in hook {len(hooks)}"
                records = reads.make_quantised_row_memory_per_thread(steps, shared=True, place=place)
                hooks.append(reads.make_quantising_hook(records[0]))
                registrations.append(partial(reads.register_quantised_rows, steps, records))
    steps.hooks = hooks
    bind_body(steps)
    steps.hooks = ()
    for register in registrations:
        register()


def find_quantised_read_forms(
    steps: StepTableBuilder, call: BoundInstruction, size: tuple[int, int]
) -> ResultReadForms | None:
    """Find the quantised forms in which later matmuls read the result of `call`; None if all of them read float32.

    `size` is the rows and columns of the result as a matrix.
    """
    rows, columns = size
    found: dict[tuple[Tensor, int], Operand] = {}
    is_shared = False
    for reader in call.find_readers() or ():
        x = reader.optional_operand(1)
        if (
            reader.op == "mul_mat"
            and x is not None
            and (x.region, x.shape[-1]) == (call.out.region, columns)
            and x.is_dense
            and x.size == rows * columns
            and has_matmul_kernel(reader)
            and (kind := choose_activation_rounding_kind(reader)) is not None
        ):
            found[x.tensor, kind] = x
            is_shared |= is_matmul_shared_by_threads(steps, reader)
    if not found:
        return None
    return ResultReadForms(next(iter(found.values())), tuple(found), True, is_shared)


def _make_step_hook(hook: PanelHook) -> StepHook:
    """Convert a hook of the dataflow to a hook of a step, which has a compiled kernel and its argument words."""
    group, (*outer, columns) = hook.group, hook.shape
    words = [columns, *outer]
    for operand in (*hook.operands, *hook.results):
        words += [operand.address, *(4 * stride for stride in operand.strides)]
    is_single = tuple(operand.strides[-1] == 0 for operand in hook.operands)
    panels = "blocks" if hook.has_whole_blocks else "columns"
    kernel = make_expression_kernel(group.expression, is_single, panels=panels)
    return StepHook(kernel, [*words, *make_group_row_kernel(group).words], hook.panel_columns, hook.slice_columns)
