"""Rewrites of the step graphs of a model that make results more exact or faster, as its device group asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce

from ... import ops
from ...graph.dtypes import DType
from ...graph.graph import Graph
from ...graph.node import Node, Value
from ...graph.rewrite import rewrite_graph
from ..models import Model, Step
from .device_group import DeviceGroup

HALF_DTYPES = frozenset((DType.F16, DType.BF16))
"""Dtypes of 16 bits, in which attention must not compute for exact results."""
NodeRewrite = Callable[[Node], Sequence[Value] | None]
"""A function that returns the replacement of the results of a node, or `None` to keep the node."""


def make_step_graph_builder(model: Model, on: DeviceGroup) -> Callable[[Step], Graph]:
    """Make the function that builds the graph of a step, with the rewrites for exact or fast arithmetic."""
    rules: list[NodeRewrite] = [drop_exact_attribute] if on.fast else []
    if on.exact and model.uses_half_precision_activation:
        rules.append(forbid_split_matmul_sums)
    if on.exact and HALF_DTYPES.intersection(on.cache_dtypes):
        rules.append(widen_attention_to_f32)
    return partial(build_rewritten_step_graph, model, rules) if rules else model.graph


def build_rewritten_step_graph(model: Model, rules: Sequence[NodeRewrite], step: Step) -> Graph:
    """Build the graph of a step, and apply the rewrite rules to its nodes, one rule after the other."""
    return reduce(rewrite_graph, rules, model.graph(step))


def drop_exact_attribute(node: Node) -> Sequence[Value] | None:
    """Return the results of a node without the attribute `exact`, so that backends may round to 16 bits.

    The result is None, which keeps the node, if it has no such attribute.
    """
    return replace(node, attrs={**node.attrs, "exact": False}).results if node.attrs.get("exact") else None


def forbid_split_matmul_sums(node: Node) -> Sequence[Value] | None:
    """Mark a matmul so that no devices share its sum: the last bit of the result is then the same as on one device.

    The result is None, which keeps the node, for any other op.
    """
    return replace(node, attrs={**node.attrs, "ordered": True}).results if node.op == "mul_mat" else None


def widen_attention_to_f32(node: Node) -> Sequence[Value] | None:
    """Cast the keys and values of an attention node to f32, so that no backend rounds in 16 bits.

    Backends may round queries and attention weights to the dtype of the keys. The result is None, which keeps the node,
    if it is another op or if keys and values are not in 16 bits.
    """
    cells = node.inputs[1:3] if node.op == "attention" else ()
    if not HALF_DTYPES.intersection(value.dtype for value in cells):
        return None
    wide = [ops.cast(value, dtype=DType.F32) if value.dtype in HALF_DTYPES else value for value in cells]
    return node.with_src((node.src[0], *wide, *node.src[3:])).results
