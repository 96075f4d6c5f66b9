"""Observed values: values of a graph that become further outputs while its plan runs, and their statistics.

Any value can be an output. The planner gathers it from its shards or reduces its partial sums.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ...backends.base import Array
from ...graph.array_checks import as_real_number_array
from ...graph.errors import PlanError
from ...graph.graph import Graph, assign_names
from ...graph.node import Value
from ...graph.validation import ANY, TEXT, instance_of, mapping_of, validate_arguments

T = TypeVar("T")
OBSERVED_PREFIX = "observed "
"""The prefix of the output names of observed values."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of the elements of one value, without the NaN elements.

    - `least`, `most`, `mean`: the minimum, the maximum and the mean; NaN if no element is left.
    - `norm`: the square root of the sum of squares.
    - `nans`: the number of NaN elements.
    """

    shape: tuple[int, ...]
    least: float
    most: float
    mean: float
    norm: float
    nans: int

    @classmethod
    @validate_arguments(PlanError)
    def of(cls, array: Array) -> Statistics:
        """Return the statistics of an array of any shape, computed in float64."""
        numbers = as_real_number_array("Statistics.of: array", array, PlanError).astype(np.float64, copy=False)
        is_nan = np.isnan(numbers)
        nan_count = int(is_nan.sum())
        rest = numbers[~is_nan] if nan_count else numbers.reshape(-1)
        if not rest.size:
            return cls(numbers.shape, np.nan, np.nan, np.nan, 0.0 if not nan_count else np.nan, nan_count)
        with np.errstate(all="ignore"):
            minimum, maximum, mean = float(rest.min()), float(rest.max()), float(rest.mean())
            return cls(numbers.shape, minimum, maximum, mean, float(np.linalg.norm(rest)), nan_count)

    def __str__(self) -> str:
        shape = ",".join(map(str, self.shape))
        numbers = {"min": self.least, "max": self.most, "mean": self.mean, "norm": self.norm}
        return f"[{shape}] {' '.join(f'{k} {v:.6g}' for k, v in numbers.items())} NaN {self.nans}"


def collect_computed_values(graph: Graph) -> dict[str, Value]:
    """Return all values that a graph computes (the results of all nodes except leaves), by their names in graph text.

    A node with several results has names such as ``name#1``.
    """
    called = assign_names(graph)
    return {
        called[node] + (f"#{value.index}" if len(node.specs) > 1 else ""): value
        for node in graph.nodes
        if not node.is_leaf
        for value in node.results
    }


@validate_arguments(PlanError, graph=instance_of(Graph), pattern=TEXT)
def select_matching_values(graph: Graph, pattern: str) -> dict[str, Value]:
    """Return the computed values with names in which a regular expression matches some part, in graph order.

    Raises:
        PlanError: `pattern` is not a regular expression, or no name contains a match.
    """
    try:
        expression = re.compile(pattern)
    except re.error as why:
        raise PlanError(f"{pattern!r:.80} is no regular expression: {why}") from None
    computed = collect_computed_values(graph)
    matches = {name: value for name, value in computed.items() if expression.search(name)}
    if not matches:
        some = ", ".join([name for name in computed if not name.isdecimal()][:3]) or "none has a name"
        raise PlanError(f"no value has {pattern!r:.80} in its name; names are as {some}; `hocket dump` lists them")
    return matches


@validate_arguments(
    PlanError, graph=instance_of(Graph), values=mapping_of(TEXT, instance_of(Value), "a mapping from names to values")
)
def with_observed_values(graph: Graph, values: Mapping[str, Value]) -> Graph:
    """Return a copy of `graph` that also outputs the given values, which are called observed values.

    `select_observed_outputs` finds their arrays among the outputs of a run.
    """
    return Graph({**graph.outputs, **{OBSERVED_PREFIX + name: value for name, value in values.items()}}, graph.updates)


@validate_arguments(PlanError, outputs=mapping_of(TEXT, ANY, "a mapping from names to outputs"))
def select_observed_outputs(outputs: Mapping[str, T]) -> dict[str, T]:
    """Return the observed values among the outputs of a run, under the names that `with_observed_values` received.

    Args:
        outputs: The outputs of a run of a graph that `with_observed_values` returned.
    """
    return {
        name.removeprefix(OBSERVED_PREFIX): value for name, value in outputs.items() if name.startswith(OBSERVED_PREFIX)
    }
