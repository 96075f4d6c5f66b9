"""Steps of expression groups (ops that one generated kernel computes), and of single ops with operands in boxes."""

from __future__ import annotations

from ....fusion.expression_groups import ExpressionGroup, compose_instructions
from ....fusion.operands import NoKernelError
from ....fusion.traced_instruction import TracedInstruction
from ...steps.step_table import StepTableBuilder
from .elementwise import RowKernel, add_row_step, can_loop_over_rows, make_expression_row_kernel


def has_group_kernel(group: ExpressionGroup) -> bool:
    """Return whether a generated kernel can compute an expression group: loop over its operands and results."""
    has_rows = group.expression.depends_on_row_reduction_or_length
    if has_rows and not (group.operands and group.shape):
        return False
    return can_loop_over_rows(make_group_row_kernel(group), group.operands, group.results)


def add_group_step(steps: StepTableBuilder, group: ExpressionGroup) -> None:
    """Add the step that computes an expression group by a generated kernel; `has_group_kernel` must be true."""
    added = add_row_step(steps, make_group_row_kernel(group), group.operands, group.results)
    assert added, "the group was chosen because its kernel fits"


def add_traced_step(steps: StepTableBuilder, traced: TracedInstruction) -> bool:
    """Add the step of a single instruction, given as an expression. Return False if no kernel can compute it."""
    try:
        group = compose_instructions({0: traced}).group
    except NoKernelError:
        return False
    if not has_group_kernel(group):
        return False
    add_group_step(steps, group)
    return True


def make_group_row_kernel(group: ExpressionGroup) -> RowKernel:
    """Make the generated kernel of an expression group, which loops over rows. All its functions must have code."""
    row_kernel = make_expression_row_kernel(
        group.expression, group.operands, group.attributes, group.shape, group.boxes
    )
    assert row_kernel is not None
    return row_kernel
