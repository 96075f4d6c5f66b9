"""What values hold while a plan runs: a graph gives them out besides its outputs, and they are told in a few numbers.

An output may be any value: the planner makes it whole wherever it lies, in shards or as a sum that is still owed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ...backends.base import Array
from ...graph.errors import PlanError
from ...graph.graph import Graph, assign_names
from ...graph.node import Value
from ...graph.validation import ANY, TEXT, instance_of, validate_arguments

T = TypeVar("T")
OBSERVED = "observed "
"""What the names of outputs begin with that a graph did not have before."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """The numbers of one value: `least`, `most` and `mean` are of those that are numbers, NaN if there are none;
    `norm` is the root of the sum of their squares; `nans` counts the others."""

    shape: tuple[int, ...]
    least: float
    most: float
    mean: float
    norm: float
    nans: int

    @classmethod
    @validate_arguments(PlanError, array=ANY)
    def of(cls, array: Array) -> Statistics:
        """Of an array of any shape, in float64."""
        numbers = np.asarray(array).astype(np.float64, copy=False)
        missing = np.isnan(numbers)
        nans = int(missing.sum())
        there = numbers[~missing] if nans else numbers.reshape(-1)
        if not there.size:
            return cls(numbers.shape, np.nan, np.nan, np.nan, 0.0 if not nans else np.nan, nans)
        with np.errstate(all="ignore"):
            least, most, mean = float(there.min()), float(there.max()), float(there.mean())
            return cls(numbers.shape, least, most, mean, float(np.linalg.norm(there)), nans)

    def __str__(self) -> str:
        shape = ",".join(map(str, self.shape))
        numbers = {"min": self.least, "max": self.most, "mean": self.mean, "norm": self.norm}
        return f"[{shape}] {' '.join(f'{k} {v:.6g}' for k, v in numbers.items())} NaN {self.nans}"


def values_of(graph: Graph) -> dict[str, Value]:
    """Everything that is computed, in order, by the names that a dump has; of several results by ``name#1``."""
    called = assign_names(graph)
    return {
        called[node] + (f"#{value.index}" if len(node.specs) > 1 else ""): value
        for node in graph.nodes
        if not node.is_leaf
        for value in node.results
    }


@validate_arguments(PlanError, graph=instance_of(Graph), pattern=TEXT)
def matching(graph: Graph, pattern: str) -> dict[str, Value]:
    """The computed values in whose names the regular expression is found, in order.

    Raises `PlanError` if it is no regular expression, or found nowhere.
    """
    try:
        expression = re.compile(pattern)
    except re.error as why:
        raise PlanError(f"{pattern!r:.80} is no regular expression: {why}") from None
    everything = values_of(graph)
    wanted = {name: value for name, value in everything.items() if expression.search(name)}
    if not wanted:
        some = ", ".join([name for name in everything if not name.isdecimal()][:3]) or "none has a name"
        raise PlanError(f"no value has {pattern!r:.80} in its name; names are as {some}; `hocket dump` lists them")
    return wanted


def observed(graph: Graph, values: Mapping[str, Value]) -> Graph:
    """The graph with further outputs, which `taken` finds among those of a run."""
    return Graph({**graph.outputs, **{OBSERVED + name: value for name, value in values.items()}}, graph.updates)


def taken(outputs: Mapping[str, T]) -> dict[str, T]:
    """The observed values by name, out of what a run of an observed graph gave."""
    return {name.removeprefix(OBSERVED): given for name, given in outputs.items() if name.startswith(OBSERVED)}
