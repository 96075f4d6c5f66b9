"""The graph of a case: leaves, views that give operands their layouts, one node of the op, and outputs.

An operand that is also an output stays alive to the end, so that no result may overwrite it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import graph as g
from ...backends.base import Backend, Device
from ...graph.dtypes import STATE_DTYPES, DType
from ...graph.graph import Graph
from ...graph.node import Node, Value
from ...ops import COMPOSITE_OPS, REGISTRY, verify
from ...scheduler import DevicePlan, lower_graph, verify_program
from ..cases.case import Case
from ..cases.grow_shapes import count_axes_with_distinct_ids
from ..cases.inputs import as_stored_weight
from ..cases.operand_layouts import (
    Array,
    OperandLayout,
    build_leaf_array,
    find_in_place_operand_and_duplicate,
    find_layout_or_contiguous,
    list_packed_state_operands,
    list_quantisable_operands,
    make_overlapping_layouts,
)

LIVE_LEAF_PREFIX = "kept."
"""The name prefix of outputs that are leaves. Such leaves live to the end, and no result may take their memory."""
RESULT_PREFIX = "result."
"""The name prefix of outputs that are results of the op."""


@dataclass(frozen=True, slots=True)
class CaseGraph:
    """A case as a graph with one node of the op, or with the nodes that a composite op builds.

    `operand_layouts` has the layout of each operand in its leaf, and `leaf_names` the names of leaves of other operands
    in which an operand lies. `states` are leaves that a run reads and may change.
    """

    case: Case
    graph: Graph
    node: Node
    operand_layouts: Mapping[str, OperandLayout]
    weights: frozenset[str]
    leaf_names: Mapping[str, str]
    states: frozenset[str]

    def build_leaf_arrays(self, operands: Mapping[str, Array], filler: float) -> dict[str, Array]:
        """Build the array of each leaf from its operands; entries outside of the operands are `filler`.

        Integers have -1 as filler, and quantised blocks zeros.
        """
        arrays: dict[str, Array] = {}
        for name, placed in self.operand_layouts.items():
            units = operands[name]
            padding = np.zeros((), units.dtype) if units.dtype.kind == "V" else np.asarray(filler)
            if units.dtype.kind in "iu":
                padding = np.asarray(-1)
            leaf = self.leaf_names.get(name, name)
            arrays[leaf] = build_leaf_array(units, placed, arrays.get(leaf, padding))
        return arrays

    def encode_weights(self, leaves: Mapping[str, Array]) -> dict[str, Array]:
        """Return the leaves that are weights, encoded in the storage format from which a backend loads them."""
        return {n: as_stored_weight(a, self.operand_layouts[n].leaf) for n, a in leaves.items() if n in self.weights}


def build_case_graph(case: Case) -> CaseGraph:
    """Build the graph of `case`.

    A leaf is a weight if its operand is quantised, if it may be quantised and is contiguous, or if it is a 16-bit
    cached key or value. Backends keep cached keys and values of 16 bits as they are. In the layout ``state``, quantised
    operands that are no weights are states; a result that replaces one is its new value. All other leaves are inputs.
    """
    op, attrs = case.op_declaration, case.attributes_with_defaults
    operands_of = op.signature_for(attrs).operands
    quantisable = list_quantisable_operands(op, attrs)
    states = list_packed_state_operands(op, case.specs, attrs) if case.layout == "state" else frozenset()
    changed = {name for _, name in op.inplace_pairs(attrs)}
    cached = {o.name for o in operands_of if {*STATE_DTYPES} == {*o.dtypes} and o.name not in changed}
    layouts: dict[str, OperandLayout] = {}
    leaves: dict[str, Value] = {}
    operands: dict[str, Value] = {}
    for name, spec in case.operands:
        how = find_layout_or_contiguous(spec, case.layout, count_axes_with_distinct_ids(op, attrs, name))
        is_weight = spec.dtype.is_quantised or (name in quantisable and case.layout == "contiguous")
        is_weight |= name in cached and spec.dtype in (DType.F16, DType.BF16)
        make_leaf = g.state if name in states else g.weight if is_weight else g.input
        leaf = make_leaf(name, how.leaf.shape, how.leaf.dtype)
        layouts[name], leaves[name], operands[name] = how, leaf, how.view(leaf)
    leaf_names = {}
    pair = find_in_place_operand_and_duplicate(op, case.specs, attrs) if case.layout in ("twin", "overlap") else None
    if pair is not None:
        one, other = pair
        del leaves[other]
        if case.layout == "twin":
            operands[other] = leaves[one]
            del layouts[other]
        else:
            layouts[one], layouts[other] = make_overlapping_layouts(case.specs[one])
            leaves[one] = g.input(one, layouts[one].leaf.shape, layouts[one].leaf.dtype)
            operands |= {name: layouts[name].view(leaves[one]) for name in pair}
            leaf_names[other] = one
    parts: dict[str, Any] = {**operands, **dict(case.attrs)}
    built = (op if case.op in REGISTRY else COMPOSITE_OPS[case.op])(**parts)
    results = (built,) if isinstance(built, Value) else built
    dying = (
        {n for _, n in op.inplace_pairs(case.attributes_with_defaults)} if case.layout in ("inplace", "twin") else set()
    )
    outputs = {f"{RESULT_PREFIX}{i}": v for i, v in enumerate(results)}
    outputs |= {f"{LIVE_LEAF_PREFIX}{n}": v for n, v in leaves.items() if v.node.op == "input" and n not in dying}
    weights = frozenset(n for n, v in leaves.items() if v.node.op == "weight")
    updates = {leaves[n]: results[r] for r, n in op.inplace_pairs(attrs) if n in states}
    return CaseGraph(case, Graph(outputs, updates), results[0].node, layouts, weights, leaf_names, states)


def find_unsupported_reason(graph: Graph, backend: Backend, device: Device) -> str:
    """Return the reason why the backend cannot run a node of a graph; the empty text if the backend can run all.

    A view is always supported, because the planner turns it into strides.
    """
    for node in graph.nodes:
        if not node.is_leaf and not REGISTRY[node.op].is_view:
            support = backend.supports(node, device)
            if not support.ok:
                return support.reason or f"{node.op} is not supported"
    return ""


def build_verified_device_plan(graph: Graph, backend: Backend, device: Device) -> DevicePlan:
    """Lower a graph to a program for one device, and verify both; no other device is considered."""
    verify(graph)
    lowered, program = lower_graph(graph, backend, device)
    verify_program(lowered, program, backend)
    return DevicePlan(device, backend, lowered, program)
