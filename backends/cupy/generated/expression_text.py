"""Expressions of the scalar language as CUDA statements: each step is rounded once and has a variable of its own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import numpy as np

from ....ops.declaration.expression import Expression, Step

FUNCTION_TEXTS: Mapping[str, str] = MappingProxyType(
    {
        "add": "__fadd_rn({}, {})",
        "sub": "__fadd_rn({}, -{})",
        "mul": "__fmul_rn({}, {})",
        "div": "({} / {})",
        "neg": "(-{})",
        "fma": "fmaf({}, {}, {})",
        "sqrt": "sqrtf({})",
        "absolute": "fabsf({})",
        **{
            name: f"{name}f({{}})" for name in ("exp", "expm1", "log", "log1p", "tanh", "erf", "floor", "ceil", "trunc")
        },
        "round_half_away": "roundf({})",
        "softplus": "(fmaxf({0}, 0.0f) + log1pf(expf(-fabsf({0}))))",
        "less": "({} < {})",
        "less_equal": "({} <= {})",
        "equal": "({} == {})",
        "not_equal": "({} != {})",
        "where": "({} ? {} : {})",
    }
)
"""The CUDA text of a function. Sums and products name their rounding, so that no compiler contracts them."""
REDUCTION_TEXTS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"row_dot": ("fmaf({}, {}, sum)", "sum"), "row_sum": ("__fadd_rn(sum, {})", "sum")}
)
"""The CUDA text that adds an element to a reduction of a row, and the function that joins the parts of threads."""


def has_cuda_text_for_all_functions(expression: Expression) -> bool:
    """Return whether each function of an expression can be written as CUDA code."""
    known = {*FUNCTION_TEXTS, *REDUCTION_TEXTS, "operand", "row_count"}
    computed = (s for n, s in enumerate(expression.steps) if n not in expression.steps_without_operands)
    return all(step.function in known for step in computed)


def list_argument_steps(expression: Expression) -> list[int]:
    """List the steps of an expression that read attributes of the call; kernels get their values as arguments."""
    from_attributes: set[int] = set()
    for number, step in enumerate(expression.steps):
        if step.function == "attribute" or from_attributes.intersection(step.sources):
            from_attributes.add(number)
    return sorted(_find_number_steps_read_by_element_steps(expression) & from_attributes)


def write_number_statements(expression: Expression, arguments: Iterable[int]) -> list[str]:
    """Write the CUDA statements for the numbers that are equal for all elements: constants and kernel arguments.

    The steps `arguments` read the fields ``a.n<step>``.
    """
    arguments = frozenset(arguments)
    constants = [n for n in sorted(_find_number_steps_read_by_element_steps(expression)) if n not in arguments]
    numbers = expression.compute_number_steps(dict.fromkeys(_list_attributes(expression), 1.0)) if constants else {}
    return [
        *(f"const float s{n} = (float)a.n{n};" for n in sorted(arguments)),
        *(f"const float s{n} = {_format_float(numbers[n])};" for n in constants),
    ]


def write_step_statement(number: int, step: Step) -> str:
    """Write the CUDA statement that computes one step of an expression from earlier steps."""
    text = FUNCTION_TEXTS[step.function].format(*(f"s{source}" for source in step.sources))
    return f"const auto s{number} = {text};"


def _find_number_steps_read_by_element_steps(expression: Expression) -> set[int]:
    """Find the steps with one number for the whole call that are used in the computation of elements or rows."""
    alone = expression.steps_without_operands
    return {s for n, step in enumerate(expression.steps) if n not in alone for s in step.sources if s in alone}


def _list_attributes(expression: Expression) -> list[str]:
    return [str(step.value) for step in expression.steps if step.function == "attribute"]


def _format_float(number: float) -> str:
    """Format a float32 number as a CUDA literal with exactly its value."""
    if isinstance(number, bool):
        return "true" if number else "false"
    with np.errstate(over="ignore"):
        value = float(np.float32(number))
    if math.isnan(value):
        return "(INFINITY - INFINITY)"
    return f"{'-' if value < 0 else ''}INFINITY" if math.isinf(value) else f"{value!r}f"
