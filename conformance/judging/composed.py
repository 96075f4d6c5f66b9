"""Fused = unfused: the graph that a composition makes of a case, on the same backend with the same inputs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...backends.base import Backend, Device
from ...graph.graph import Graph
from ...graph.node import input
from ...ops import REGISTRY
from ...ops.decompositions import DECOMPOSITIONS, select_decompositions
from ...scheduler import load, plan_for
from ..trials.case import Case
from ..trials.layouts import Array

CHECK = "composed"


def names_for(case: Case) -> tuple[str, ...]:
    """The checks of this kind that apply to a case: ``composed-unfused`` and so on."""
    if any(0 in spec.shape or spec.dtype.is_quantised for _, spec in case.operands):
        return ()
    return tuple(f"{CHECK}-{name}" for name in select_decompositions(case.op, case.specs, case.settled))


def graph_of(case: Case) -> Graph:
    """The composition of a case, its operands as inputs."""
    operands = {name: input(name, spec.shape, spec.dtype) for name, spec in case.operands}
    compose = DECOMPOSITIONS[case.op][case.check.removeprefix(f"{CHECK}-")]
    return Graph({f"result{i}": value for i, value in enumerate(compose(operands, case.settled))})


def unsupported(case: Case, backend: Backend, device: Device) -> str:
    """Why the backend cannot run the composition; empty if it can."""
    for node in graph_of(case).nodes:
        if not node.is_leaf and not REGISTRY[node.op].is_view:
            support = backend.supports(node, device)
            if not support.ok:
                return support.why or f"{node.op} is not supported"
    return ""


def run(case: Case, operands: Mapping[str, Array], backend: Backend, device: Device) -> list[Array]:
    """The results of the composition."""
    executor = load(plan_for(graph_of(case), [(backend, device)], split_mode="none"), {})
    with np.errstate(all="ignore"):
        results = executor.run(dict(operands))
        return [results[f"result{i}"].astype(np.float64) for i in range(len(results))]
