"""The groups of ops for which the CPU backend generates one kernel each.

The ops are declared in the scalar language: as an expression of one element or one row (`ops.declaration`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, partial

from ....ops.declaration.expression import Expression
from ....ops.declaration.interpreter import ScalarLanguageDeclaration
from ....ops.registry import REGISTRY
from ...capabilities import FusedExpression
from ...fusion.dataflow import Dataflow
from ...fusion.expression_groups import ExpressionGroup
from ...fusion.grouping import FusionGroupingCallbacks, find_expression_groups
from ...fusion.operands import BoundInstruction
from ...fusion.traced_instruction import TracedInstruction
from ...kernel_tables import find_op_package_binding
from ..kernels.kernel_table import BINDINGS
from ..kernels.matmul.gated_units import GATED
from ..kernels.matmul.packed_matmul import find_result_read_forms
from ..kernels.vector.elementwise import bind_declared_op
from ..kernels.vector.group_kernels import add_traced_step, has_group_kernel
from ..kernels.vector.lower_expressions import has_lane_code_for_all_functions
from ..kernels.vector.row_kernel_passes import TRANSCENDENTAL_FUNCTIONS, ExpressionKernel
from ..steps.step_table import StepTableBuilder

ARITHMETIC_PRICE, TRANSCENDENTAL_PRICE = 1, 20
"""The prices of a step per element, in bytes that a core moves in this time."""


def choose_expression_groups(flow: Dataflow) -> list[ExpressionGroup]:
    """Choose the groups of adjacent elementwise and row-reduction ops that one generated kernel each computes.

    The instructions of each chosen group become a group of `flow`, which keeps them together in the execution order.
    The choice depends on the program only, not on addresses or threads.
    """
    rules = FusionGroupingCallbacks(
        partial(trace_instruction, flow), has_group_kernel, estimate_prices_per_element_and_row
    )
    return find_expression_groups(flow, rules)


def to_fused_expression(group: ExpressionGroup) -> FusedExpression:
    """Convert a group to a `FusedExpression`, which reports show and the plan verifier checks."""
    return FusedExpression(
        group.instruction_numbers,
        group.expression.steps,
        group.attributes,
        group.shape,
        tuple(o.tensor for o in group.operands),
        tuple(zip(group.expression.results, (o.tensor for o in group.results), strict=True)),
        group.saved_bytes,
        group.boxes,
    )


@cache
def estimate_prices_per_element_and_row(
    expression: Expression, operands_with_one_number_per_row: frozenset[int]
) -> tuple[int, int]:
    """Estimate the compute time of an expression, in bytes that a core moves in this time; over all passes over a row.

    Each step of the expression has the price `ARITHMETIC_PRICE` or `TRANSCENDENTAL_PRICE`.

    Args:
        expression: The expression.
        operands_with_one_number_per_row: The operands with one number per row.

    Returns:
        The price per element, and the price per row of the steps that depend only on those operands.
    """
    once = expression.find_steps_of_operands(operands_with_one_number_per_row)
    steps = [n for some in ExpressionKernel(expression, ()).list_passes() for n in some - once]
    return _sum_step_prices(expression, steps), _sum_step_prices(
        expression, once - expression.steps_with_one_number_per_row
    )


def _sum_step_prices(expression: Expression, numbers: Iterable[int]) -> int:
    functions = (expression.steps[n].function for n in numbers)
    prices = (
        TRANSCENDENTAL_PRICE if f in TRANSCENDENTAL_FUNCTIONS else ARITHMETIC_PRICE for f in functions if f != "operand"
    )
    return sum(prices)


def trace_instruction(flow: Dataflow, number: int) -> TracedInstruction | None:
    """Convert an instruction to an expression that can be fused with others; return None if that is impossible.

    The result is None if the op is not declared in the scalar language, or has a hand-written kernel that does more.
    For example, the kernel of SwiGLU does more if it also quantises its result for matmuls.
    """
    call = flow.bound_instruction(number)
    declared = REGISTRY[call.op].expression if call.op in REGISTRY else None
    if declared is None or len(call.dst) != 1 or find_op_package_binding(call.op, "cpu") is not None:
        return None
    if declared.arrange and (call.op in BINDINGS or any(o is not None for o in call.src[1:])):
        return None
    if (
        call.op in BINDINGS
        and declared.place is None
        and (call.op not in GATED or find_result_read_forms(StepTableBuilder(1), call).quantised_tensors)
    ):
        return None
    producers = [None if o is None else flow.find_last_writer(o.region, number) for o in call.src]
    readers = flow.find_readers(number)
    return _trace_op_call(declared, call, producers, None if readers is None else frozenset(readers))


def _trace_op_call(
    declared: ScalarLanguageDeclaration,
    call: BoundInstruction,
    producers: Sequence[int | None],
    readers: frozenset[int] | None,
) -> TracedInstruction | None:
    """Convert a call of a declared op to an expression; return None if a function in it has no compiled code."""
    operands = [call.optional_operand(index) for index in range(len(declared.operand_names))]
    starts = declared.place and declared.place([o.shape for o in operands if o is not None], call.attrs)
    if declared.place is not None and starts is None:
        return None
    expression = declared.trace([o is not None for o in operands], call.attrs)
    if not has_lane_code_for_all_functions(expression) or (
        expression.depends_on_row_reduction_or_length and not (operands[0] and operands[0].shape)
    ):
        return None
    producers = [*producers, *[None] * (len(operands) - len(producers))]
    return TracedInstruction(expression, operands, producers, call.attrs, call.out, readers, starts)


def bind_ungrouped_op(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    """Add the step of a declared op that is fused with no other op. Return False if no kernel can compute it."""
    declared = REGISTRY[call.op].expression
    if declared is None or declared.place is None:
        return bind_declared_op(steps, call)
    traced = _trace_op_call(declared, call, [None] * len(call.src), None)
    return traced is not None and add_traced_step(steps, traced)
