"""Decomposition checks: a fused op equals its decomposition into other ops on the same backend and inputs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...backends.base import Backend, Device
from ...graph.graph import Graph
from ...graph.node import input
from ...ops.decompositions import DECOMPOSITIONS, list_applicable_decompositions
from ...scheduler import load, plan_for_group
from ..cases.case import Case
from ..cases.operand_layouts import Array

CHECK_NAME = "composed"
"""The start of the names of these checks."""


def list_decomposition_checks(case: Case) -> tuple[str, ...]:
    """Return the names of the decomposition checks that apply to a case, such as ``composed-unfused``."""
    if any(0 in spec.shape or spec.dtype.is_quantised for _, spec in case.operands):
        return ()
    return tuple(
        f"{CHECK_NAME}-{name}"
        for name in list_applicable_decompositions(case.op, case.specs, case.attributes_with_defaults)
    )


def build_decomposed_graph(case: Case) -> Graph:
    """Build the graph of the decomposition that the check of `case` names, with the operands as inputs."""
    operands = {name: input(name, spec.shape, spec.dtype) for name, spec in case.operands}
    compose = DECOMPOSITIONS[case.op][case.check.removeprefix(f"{CHECK_NAME}-")]
    return Graph({f"result{i}": value for i, value in enumerate(compose(operands, case.attributes_with_defaults))})


def run_decomposed(case: Case, operands: Mapping[str, Array], backend: Backend, device: Device) -> list[Array]:
    """Run the decomposition of a case on a device, and return its results. The results are float64."""
    executor = load(plan_for_group(build_decomposed_graph(case), [(backend, device)], split_mode="none"), {})
    with np.errstate(all="ignore"):
        results = executor.run(dict(operands))
        return [results[f"result{i}"].astype(np.float64) for i in range(len(results))]
