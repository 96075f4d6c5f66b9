"""Random graphs of ops that are declared in the scalar language, with views, repeated operands and several readers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...graph.errors import GraphError
from ...graph.graph import Graph
from ...graph.node import Value, input, weight
from ...ops import REGISTRY, reshape
from ...ops.declaration.op import Op
from .operand_layouts import Array

SHAPES = ((1, 2, 16), (3, 4, 8), (7, 1, 37), (2, 3, 40), (33, 2, 64))
"""Tokens, heads and columns of a head."""
MAX_NODES = 16
ARITHMETIC_FUNCTIONS = frozenset(
    ("operand", "attribute", "constant", "row_count", "add", "sub", "mul", "div", "neg", "fma", "sqrt", "absolute")
) | {"maximum", "minimum", "where", "less", "less_equal", "equal", "row_sum", "row_dot"}
"""Functions that IEEE 754 defines to the last bit, and sums."""


def make_random_graph_and_weights(seed: int) -> tuple[Graph, Mapping[str, Array]]:
    """Make a random graph of 4 to 16 ops with declared expressions.

    Returns:
        The graph, and a float32 array for each weight. The inputs have the names ``x``, ``y`` and ``flat``.
    """
    rng = np.random.default_rng(seed)
    tokens, heads, columns = SHAPES[seed % len(SHAPES)]
    shape, flat = (tokens, heads, columns), (tokens, heads * columns)
    values = [input("x", shape), input("y", shape), input("flat", flat)]
    weights = [weight("row", (columns,)), weight("token", (heads * columns,)), weight("number", (1,))]
    ops = list(_list_scalar_language_ops_with_one_result())
    ops += 2 * [op for op in ops if _is_bit_exact_on_all_backends(op)]
    while len(values) < 3 + rng.integers(4, MAX_NODES):
        x = values[rng.integers(len(values))]
        result = _apply_op(ops[rng.integers(len(ops))], x, values, weights, rng)
        if result is None:
            continue
        if result.shape in (shape, flat) and rng.integers(3) == 0:
            result = reshape(result, shape=flat if result.shape == shape else shape)
        values.append(result)
    outputs = {len(values) - 1, *map(int, rng.integers(3, len(values), 2))}
    graph = Graph({f"z{number}": values[number] for number in sorted(outputs)})
    arrays = {v.node.name: rng.standard_normal(v.shape).astype(np.float32) for v in weights if v.node in graph.nodes}
    return graph, arrays


def _list_scalar_language_ops_with_one_result() -> Iterator[Op]:
    """Yield the ops with one result and at most three operands that are declared in the scalar language.

    Ops with placed operands are left out, because most need attributes.
    """
    for op in REGISTRY.values():
        declared = op.expression
        if declared is not None and not (declared.arrange or declared.place) and len(declared.operand_names) <= 3:
            yield op


def _is_bit_exact_on_all_backends(op: Op) -> bool:
    """Return whether kernels of all backends compute the op to the last bit; random graphs prefer such ops."""
    declared = op.expression
    assert declared is not None
    if not declared.has_expression_selecting_attributes(op.defaults):
        return False
    steps = declared.trace([True] * len(declared.operand_names), op.defaults).steps
    return all(step.function in ARITHMETIC_FUNCTIONS for step in steps)


def _apply_op(
    op: Op, x: Value, values: Sequence[Value], weights: Sequence[Value], rng: np.random.Generator
) -> Value | None:
    """Apply an op to a value and to others of fitting shapes; None if the op refuses them."""
    assert op.expression is not None
    fitting = [v for v in values if v.shape == x.shape or v.shape == (*x.shape[:-1], 1)]
    fitting += [v for v in weights if v.shape[0] in (1, x.shape[-1])]
    others = [fitting[rng.integers(len(fitting))] for _ in op.expression.operand_names[1:]]
    numbers: dict[str, Any] = {
        name: float(np.float32(rng.uniform(0.25, 2)))
        for name, kind in op.expression.attribute_types.items()
        if kind == "float"
    }
    try:
        return op(x, *others, **numbers)
    except GraphError:
        return None
