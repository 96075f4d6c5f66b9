"""The reference run of a whole graph: the reference function of each node, in float64."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from ..graph.array_checks import as_array_for_spec, as_real_number_array
from ..graph.errors import GraphError
from ..graph.graph import Graph
from ..graph.node import Node, Value, view_constant_array
from ..graph.validation import instance_of, validate_arguments
from .declaration.op import Array
from .registry import op_of


def as_reference_array(array: npt.ArrayLike) -> Array:
    """Return `array` in the dtype of reference operands: integers unchanged, other numbers in float64."""
    array = as_real_number_array("array", array, GraphError)
    return array if array.dtype.kind in "iu" else array.astype(np.float64)


@validate_arguments(GraphError, graph=instance_of(Graph), bindings=instance_of(Mapping))
def evaluate(graph: Graph, bindings: Mapping[str, npt.ArrayLike]) -> tuple[dict[str, Array], dict[str, Array]]:
    """Run the reference function of each node of a graph; return the outputs and the new states, each by name.

    Arrays are float64 or integers.

    Args:
        graph: any verified graph.
        bindings: dequantised arrays of inputs, weights and states by name. A missing state is zeros.

    Raises:
        GraphError: a leaf has no binding or one of another shape.
    """
    values: dict[Value, Array] = {}
    left = {v: len(nodes) for v, nodes in graph.users().items()}
    keep = set(graph.roots())
    for node in graph.nodes:
        if node.is_leaf:
            values[node.results[0]] = _find_constant_binding_or_zeros(node, bindings)
            continue
        results = op_of(node).run_reference([None if s is None else values[s] for s in node.src], node.attrs)
        values.update(zip(node.results, results, strict=True))
        for source in dict.fromkeys(node.inputs):
            left[source] -= 1
            if not left[source] and source not in keep:
                del values[source]
    outputs = {name: values[v] for name, v in graph.outputs.items()}
    return outputs, {old.node.name: values[new] for old, new in graph.updates.items()}


def _find_constant_binding_or_zeros(node: Node, bindings: Mapping[str, npt.ArrayLike]) -> Array:
    """Return the array of a leaf: its constant, its binding, or zeros for a missing state."""
    if node.op == "constant":
        return as_reference_array(view_constant_array(node))
    spec = node.specs[0]
    if node.name not in bindings:
        if node.op == "state":
            return as_reference_array(np.zeros(spec.shape, spec.dtype.storage))
        raise GraphError(f"{node.op} %{node.name}: {spec} is not bound; pass an array of that shape")
    return as_reference_array(as_array_for_spec(f"{node.op} %{node.name}", bindings[node.name], spec, GraphError))
