"""Expressions of the scalar language as LLVM code on 16 lanes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from types import CellType, FunctionType, MappingProxyType
from typing import Any

from llvmlite import ir

from .....ops.declaration.expression import OPERAND_FUNCTIONS, Expression, linearise
from .....ops.declaration.scalar import ROW_FUNCTIONS, Scalar
from ...compilation.compiler import Subroutine
from ...simd import vectors
from ...simd.vectors import ADDRESS, FLOAT, FLOATS, LANES, Intrinsic
from . import vector_functions

EmitLanes = Callable[..., Any]
"""A function of an LLVM builder and values of 16 lanes that emits code, and returns the resulting value."""
_ARGUMENT_TYPES = {ADDRESS: ir.IntType(64), FLOAT: ir.FloatType()}


def emit_inlined_subroutine(b: Any, subroutine: Subroutine | Intrinsic, *values: Any) -> Any:
    """Emit the LLVM code of an intrinsic or, inlined, of a subroutine without branches; return the LLVM value.

    The body of the subroutine runs once in Python. Each call of an intrinsic or subroutine in the body emits code.
    """
    if isinstance(subroutine, Intrinsic):
        kinds = zip(values, subroutine.operands, strict=True)
        return subroutine.body(b, *(_as_ir_value(value, kind) for value, kind in kinds))
    body = subroutine.body
    assert isinstance(body, FunctionType)
    called = {n: body.__globals__[n] for n in body.__code__.co_names if n in body.__globals__}
    names = {**body.__globals__, **{n: _as_emitting_function(b, thing) for n, thing in called.items()}}
    cells = tuple(CellType(_as_emitting_function(b, cell.cell_contents)) for cell in body.__closure__ or ())
    return FunctionType(body.__code__, names, body.__name__, body.__defaults__, cells or None)(*values)


def _as_emitting_function(b: Any, thing: Any) -> Any:
    """Replace an intrinsic or subroutine by a function that emits its code; return any other object unchanged."""
    return partial(emit_inlined_subroutine, b, thing) if isinstance(thing, Intrinsic | Subroutine) else thing


def _as_ir_value(value: Any, kind: str) -> Any:
    """Convert a Python number to an LLVM constant of type `kind`; return an LLVM value unchanged."""
    return value if isinstance(value, ir.Value) else ir.Constant(_ARGUMENT_TYPES[kind], value)


def _make_lane_emitter(function: Subroutine | Intrinsic) -> EmitLanes:
    return lambda b, *values: emit_inlined_subroutine(b, function, *values)


LANE_FUNCTIONS: Mapping[str, EmitLanes] = MappingProxyType(
    {
        **{n: _make_lane_emitter(getattr(vectors, n)) for n in ("add", "sub", "mul", "div", "fma", "absolute")},
        "neg": _make_lane_emitter(vectors.negative),
        "sqrt": _make_lane_emitter(vectors.square_root),
        "floor": _make_lane_emitter(vectors.round_down),
        "ceil": _make_lane_emitter(vectors.round_up),
        "trunc": _make_lane_emitter(vectors.round_to_zero),
        "round_half_away": _make_lane_emitter(vectors.round_away),
        "maximum": _make_lane_emitter(vectors.ieee_maximum),
        "minimum": _make_lane_emitter(vectors.ieee_minimum),
        **{
            n: _make_lane_emitter(getattr(vector_functions, n))
            for n in ("exp", "expm1", "log", "log1p", "tanh", "erf", "softplus", "normal_cdf")
        },
        "less": lambda b, x, y: b.fcmp_ordered("<", x, y),
        "less_equal": lambda b, x, y: b.fcmp_ordered("<=", x, y),
        "equal": lambda b, x, y: b.fcmp_ordered("==", x, y),
        "not_equal": lambda b, x, y: b.fcmp_unordered("!=", x, y),
        "where": lambda b, truth, x, y: b.select(truth, x, y),
    }
)
"""The code of each function of the language that compiled kernels have; NumPy computes the others."""


@cache
def has_lane_code_for_all_functions(expression: Expression) -> bool:
    """Return whether compiled kernels have code for every function that an expression computes per element or row."""
    known = {*LANE_FUNCTIONS, *ROW_FUNCTIONS, *OPERAND_FUNCTIONS, "row_count", "inside"}
    return all(
        s.function in known for n, s in enumerate(expression.steps) if n not in expression.steps_without_operands
    )


def emit_splat(b: Any, number: float) -> ir.Constant:
    """Return an LLVM vector constant with `number`, a float32 or a truth value, in all 16 lanes."""
    kind = ir.IntType(1) if isinstance(number, bool) else ir.FloatType()
    return ir.Constant(ir.VectorType(kind, LANES), [number] * LANES)


@cache
def make_lane_function(build: Callable[..., Scalar], operand_count: int) -> Intrinsic:
    """Make an intrinsic that computes a function of the scalar language on 16 lanes, for hand-written kernels.

    Args:
        build: Returns the result of the function for its operands. It must not reduce a row.
        operand_count: The number of operands.
    """
    expression = linearise(build(*(Scalar("operand", (), index) for index in range(operand_count))))
    numbers = expression.compute_number_steps({})

    def emit(b: Any, *operands: Any) -> Any:
        values: list[Any] = []
        for number, step in enumerate(expression.steps):
            if number in numbers:
                values.append(emit_splat(b, numbers[number]))
            elif step.function == "operand":
                values.append(operands[int(step.value)])
            else:
                values.append(LANE_FUNCTIONS[step.function](b, *(values[s] for s in step.sources)))
        return values[-1]

    return Intrinsic(FLOATS, (FLOATS,) * operand_count, emit)
