"""The hooks of the CPU: groups of declared ops that the kernels of matrix products call for each panel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from ...capabilities import HookedKernel
from ...fusion.dataflow import Dataflow
from ...fusion.expression_groups import ExpressionGroup
from ...fusion.hooks import HookedBody, HookRules, PanelHook, find_hooked_bodies
from ...fusion.operands import BoundInstruction
from ..kernels.kernel_table import BINDINGS
from ..kernels.matmul.amx_matmul import choose_activation_rounding_kind
from ..kernels.matmul.packed_matmul import has_matmul_kernel
from ..kernels.matmul.tile_loops import MIN_EVENLY_SHARED_ROWS
from ..kernels.packed.activation_quantisation import TERMS_BY_KIND
from ..kernels.vector.elementwise import make_expression_row_kernel
from ..kernels.vector.expression_kernels import make_expression_kernel
from ..steps.panel_hooks import StepHook
from ..steps.step_table import FusedBinding, StepTableBuilder
from .expression_fusion import trace_instruction


def choose_hooked_bodies(flow: Dataflow, groups: Sequence[ExpressionGroup]) -> list[HookedBody]:
    """Choose the hooks of matrix products, and make each product with its hooks a group of `flow`.

    Args:
        flow: The dataflow.
        groups: The groups of declared ops in `flow`.
    """
    return find_hooked_bodies(flow, groups, HookRules(partial(trace_instruction, flow), _has_hooks, _has_wide_panels))


def describe_hooked_body(hooked: HookedBody) -> HookedKernel:
    """Return the record of a hooked body for people and for the verifier of plans."""
    return HookedKernel(hooked.stages, hooked.panel_columns)


def make_hooked_binding(flow: Dataflow, hooked: HookedBody) -> FusedBinding:
    """Make the binding of a body and its hooks."""
    return FusedBinding(hooked.instruction_numbers, partial(_bind_hooked_body, flow=flow, hooked=hooked))


def _has_hooks(call: BoundInstruction) -> bool:
    """Return whether the kernel of an instruction calls hooks: a product that groups of weight rows share."""
    return (
        call.op == "mul_mat"
        and has_matmul_kernel(call)
        and call.out.is_dense
        and call.out.is_float
        and choose_activation_rounding_kind(call) not in TERMS_BY_KIND
    )


def _has_wide_panels(call: BoundInstruction) -> bool:
    """Return whether a panel of a product consists of all columns of a thread."""
    return math.prod(call.out.shape[:-1]) < MIN_EVENLY_SHARED_ROWS


def _bind_hooked_body(steps: StepTableBuilder, flow: Dataflow, hooked: HookedBody) -> None:
    call = flow.bound_instruction(hooked.body)
    steps.hooks = [_make_step_hook(hook) for hook in hooked.hooks]
    is_bound = BINDINGS[call.op](steps, call)
    steps.hooks = ()
    assert is_bound, "the body was chosen because it has a kernel"


def _make_step_hook(hook: PanelHook) -> StepHook:
    """Make the hook of a step: the kernel for panels, and its argument words."""
    group, (rows, blocks, columns) = hook.group, hook.shape
    row_kernel = make_expression_row_kernel(group.expression, group.operands, group.attributes)
    assert row_kernel is not None
    words = [columns, 1, rows, blocks]
    for operand in (*hook.operands, *hook.results):
        row, block, column = (4 * stride for stride in operand.strides)
        words += [operand.address, 0, row, block, column]
    is_single = tuple(operand.strides[-1] == 0 for operand in hook.operands)
    panels = "blocks" if hook.has_whole_blocks else "columns"
    kernel = make_expression_kernel(group.expression, is_single, panels)
    return StepHook(kernel, [*words, *row_kernel.words], hook.panel_columns, hook.slice_columns)
