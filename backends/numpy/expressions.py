"""NumPy kernels of ops that are declared in the scalar language: one call for each step of the expression.

A step writes to scratch, and the last one to the result. Scratch of a step is reused after its last reader.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ...graph.attrs import Attr, Attrs
from ...graph.node import Node
from ...graph.spec import Spec
from ...ops.declaration.expression import Expression
from ...ops.declaration.interpreter import ScalarLanguageDeclaration
from ...ops.declaration.numpy_functions import NUMPY_FUNCTIONS
from ...ops.declaration.scalar import COMPARISON_FUNCTIONS, ROW_FUNCTIONS
from ..base import Array
from ..host.bindings import Binding, Calls, HostInstruction

Shape: TypeAlias = tuple[int, ...]


def as_tiling_broadcast_views(shape: Sequence[int], arrays: Sequence[Array | None]) -> list[Array | None]:
    """Return views of arrays that NumPy can broadcast together, so that smaller arrays repeat as tiles to `shape`.

    Along an axis of size m, an array may have a size n that divides m. If n is neither 1 nor m, the axis becomes two
    axes of sizes ``m // n`` and ``n`` in all arrays.
    """
    padded = [None if a is None else (1,) * (len(shape) - a.ndim) + a.shape for a in arrays]
    shapes: list[list[int]] = [[] for _ in arrays]
    for axis, m in enumerate(shape):
        sizes = [None if p is None else p[axis] for p in padded]
        tile = next((n for n in sizes if n not in (None, 1, m)), None)
        for own, n in zip(shapes, sizes, strict=True):
            if n is not None:
                own += [n] if tile is None else [m // tile, tile] if n == m else [1, n]
    return [None if a is None else a.reshape(s, copy=False) for a, s in zip(arrays, shapes, strict=True)]


class ScratchPlan(NamedTuple):
    """The scratch memory of an expression: the shapes of its buffers, and the buffer of each step that has one."""

    shapes: tuple[Shape, ...]
    buffers: Mapping[int, int]


def plan_scratch(expression: Expression, operand_shapes: Sequence[Shape | None]) -> ScratchPlan:
    """Plan the scratch of an expression for the shapes of its operands, which broadcast together.

    A buffer is reused after the last reader of its step. An elementwise step may overwrite its source.
    """
    shapes: list[Shape] = []
    planned: list[Shape] = []
    buffers: dict[int, int] = {}
    free: dict[Shape, list[int]] = {}
    whole = np.broadcast_shapes(*(s for s in operand_shapes if s is not None))
    for number, (function, sources, value) in enumerate(expression.steps):
        if function == "operand":
            shapes.append(operand_shapes[int(value)] or ())
            continue
        shape = np.broadcast_shapes(*(shapes[s] for s in sources))
        is_reduction = function in ROW_FUNCTIONS
        shapes.append((*whole[:-1], 1) if is_reduction else shape)
        dead = [s for s in {*sources} & buffers.keys() if expression.last_readers[s] == number]
        if not is_reduction:
            _release_scratch_buffers(dead, buffers, planned, free)
        if number not in expression.steps_without_operands and sources and number < len(expression.steps) - 1:
            reusable = free.setdefault(shapes[-1], [])
            if not reusable:
                reusable.append(len(planned))
                planned.append(shapes[-1])
            buffers[number] = reusable.pop()
        if is_reduction:
            _release_scratch_buffers(dead, buffers, planned, free)
    return ScratchPlan((*planned,), buffers)


def _release_scratch_buffers(
    steps: Sequence[int], buffers: Mapping[int, int], shapes: Sequence[Shape], free: dict[Shape, list[int]]
) -> None:
    """Add the scratch buffers of finished steps to `free`, the buffers by shape that later steps can reuse."""
    for step in steps:
        free.setdefault(shapes[buffers[step]], []).append(buffers[step])


def make_float32_expression_calls(
    expression: Expression,
    operands: Sequence[Array | None],
    numbers: Mapping[int, float],
    out: Array,
    plan: ScratchPlan,
    memory: Sequence[Array],
) -> Calls:
    """Make the calls that evaluate an expression in float32.

    Args:
        expression: the expression of one element or one row of the result.
        operands: arrays that broadcast together, with the row as the last axis; None for absent ones.
        numbers: the values of the steps without operands (`Expression.compute_number_steps`).
        out: the result. It may be an operand: all other steps precede the last one, which writes it.
        plan: the scratch of the expression for these operands.
        memory: a dense float32 array for each buffer of the plan.
    """
    values: list[Any] = []
    calls: Calls = []
    for number, (function, sources, value) in enumerate(expression.steps):
        if number in numbers:
            values.append(numbers[number] if isinstance(numbers[number], bool) else np.float32(numbers[number]))
        elif function == "operand":
            values.append(operands[int(value)])
        elif function == "row_count":
            values.append(np.float32(max(1, next(a.shape[-1] for a in operands if a is not None))))
        else:
            result = memory[plan.buffers[number]] if number in plan.buffers else out
            if function in COMPARISON_FUNCTIONS:
                result = result.reshape(-1).view(np.bool_)[: result.size].reshape(result.shape)
            calls.append(partial(NUMPY_FUNCTIONS[function], *(values[s] for s in sources), out=result))
            values.append(result)
    return calls or [partial(np.copyto, out, values[-1])]


def count_scratch_elements(plan: ScratchPlan) -> int:
    """Return the number of float32 elements of all buffers of a scratch plan."""
    return sum(map(math.prod, plan.shapes))


def make_expression_binding(declared: ScalarLanguageDeclaration) -> Binding:
    """Make the NumPy kernel of an op from its declaration as an expression of one element or one row."""

    def arrange(
        operands: Sequence[Array | None], attrs: Attrs, out: Array
    ) -> tuple[Expression, list[Array | None], Array]:
        """Return the expression, and its operands and its result as views that broadcast together."""
        arranged = declared.arrange_operands_for_expression(operands, attrs)
        expression = declared.trace([a is not None for a in arranged], attrs)
        shape = next(a.shape for a in arranged if a is not None)
        *views, result = as_tiling_broadcast_views(shape, [*arranged, None if expression.reduces_row else out])
        return expression, views, out if result is None else result

    def bind(call: HostInstruction) -> Calls:
        expression, operands, out = arrange(call.src, call.attrs, call.out)
        plan = plan_scratch(expression, [None if a is None else a.shape for a in operands])
        memory = [call.take_scratch(*shape) for shape in plan.shapes]
        return make_float32_expression_calls(
            expression, operands, expression.compute_number_steps(call.attrs), out, plan, memory
        )

    @lru_cache(maxsize=4096)
    def count_elements(sources: tuple[Spec | None, ...], result: Spec, attrs: tuple[tuple[str, Attr], ...]) -> int:
        def view(spec: Spec) -> Array:  # it has a shape, but no memory
            return np.broadcast_to(np.float32(0), spec.shape)

        operands = [None if spec is None else view(spec) for spec in sources]
        expression, operands, _ = arrange(operands, dict(attrs), view(result))
        return count_scratch_elements(plan_scratch(expression, [None if a is None else a.shape for a in operands]))

    def scratch(node: Node) -> int:
        sources = tuple(None if v is None else v.spec for v in node.src)
        return count_elements(sources, node.specs[0], tuple(node.attrs.items()))

    return Binding(bind, scratch)
