"""The graph of a case: leaves, the views that lay them out, one node, and outputs that keep operands alive or not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import graph as g
from ...backends.base import Backend, Device
from ...graph.dtypes import FLOAT_DTYPES, QUANTISED_DTYPES, STATE_DTYPES, DType
from ...graph.graph import Graph
from ...graph.node import Node, Value
from ...ops import verify
from ...scheduler import Lane, check, lower
from ..trials.case import Case
from ..trials.grow import distinct_axes
from ..trials.inputs import as_stored
from ..trials.layouts import Array, Placed, embed, place, twins

KEPT = "kept."
"""Outputs of this prefix are leaves: so they live to the end and no result may take their memory."""
RESULT = "result."


@dataclass(frozen=True, slots=True)
class Built:
    """A case as a graph; `placed` says how each operand lies in its leaf."""

    case: Case
    graph: Graph
    node: Node
    placed: Mapping[str, Placed]
    weights: frozenset[str]

    def leaves(self, operands: Mapping[str, Array], filler: float) -> dict[str, Array]:
        """What each leaf holds; `filler` where no operand lies."""
        arrays = {}
        for name, placed in self.placed.items():
            units = operands[name]
            padding = np.zeros((), units.dtype) if units.dtype.kind == "V" else np.asarray(filler)
            if units.dtype.kind in "iu":
                padding = np.asarray(-1)
            arrays[name] = embed(units, placed, padding)
        return arrays

    def stored_weights(self, leaves: Mapping[str, Array]) -> dict[str, Array]:
        """The leaves that are weights, as a backend loads them."""
        return {n: as_stored(a, self.placed[n].leaf) for n, a in leaves.items() if n in self.weights}


def build(case: Case) -> Built:
    """The graph of `case`.  Operands that may be quantised are weights where they are contiguous (or blocks), and
    cached keys and values where they have 16 bits, which backends then keep as they are."""
    op, attrs = case.declared, case.settled
    operands_of = op.signature_for(attrs).operands
    quantisable = {o.name for o in operands_of if {*o.dtypes} == {*FLOAT_DTYPES, *QUANTISED_DTYPES}}
    changed = {name for _, name in op.inplace_pairs(attrs)}
    cached = {o.name for o in operands_of if {*STATE_DTYPES} == {*o.dtypes} and o.name not in changed}
    layouts: dict[str, Placed] = {}
    leaves: dict[str, Value] = {}
    operands: dict[str, Value] = {}
    for name, spec in case.operands:
        how = place(spec, case.layout, distinct_axes(op, attrs, name))
        is_weight = spec.dtype.is_quantised or (name in quantisable and case.layout == "contiguous")
        is_weight |= name in cached and spec.dtype in (DType.F16, DType.BF16)
        leaf = (g.weight if is_weight else g.input)(name, how.leaf.shape, how.leaf.dtype)
        layouts[name], leaves[name], operands[name] = how, leaf, how.view(leaf)
    if case.layout == "twin" and (pair := twins(op, case.specs, attrs)) is not None:
        one, other = pair
        operands[other] = leaves[one]
        del layouts[other], leaves[other]
    parts: dict[str, Any] = {**operands, **dict(case.attrs)}
    built = op(**parts)
    results = (built,) if isinstance(built, Value) else built
    dying = {n for _, n in op.inplace_pairs(case.settled)} if case.layout in ("inplace", "twin") else set()
    outputs = {f"{RESULT}{i}": v for i, v in enumerate(results)}
    outputs |= {f"{KEPT}{n}": v for n, v in leaves.items() if v.node.op == "input" and n not in dying}
    weights = frozenset(n for n, v in leaves.items() if v.node.op == "weight")
    return Built(case, Graph(outputs), results[0].node, layouts, weights)


def lane_for(graph: Graph, backend: Backend, device: Device) -> Lane:
    """The checked program of a graph on one device, without the search over several."""
    verify(graph)
    lowered, program = lower(graph, backend, device)
    check(lowered, program, backend)
    return Lane(device, backend, lowered, program)
