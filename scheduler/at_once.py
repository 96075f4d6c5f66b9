"""A graph run in one call, for those who keep neither plan nor weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy.typing as npt

from ..backends.base import Array
from ..graph.errors import PlanError
from ..graph.graph import Graph
from ..graph.validation import validate_arguments
from .planner import plan
from .running.executor import load


@validate_arguments(PlanError)
def run(
    graph: Graph,
    inputs: Mapping[str, npt.ArrayLike],
    weights: Mapping[str, npt.ArrayLike] | None = None,
    *,
    devices: str | Sequence[str] = "cpu:0",
    split_mode: str = "auto",
    threads: int | None = None,
) -> dict[str, Array]:
    """Plan `graph`, load `weights`, run it once on `inputs`; its outputs by name, as float32 or integer arrays.

    Arguments are those of `plan` and `load`, which serve many runs; states begin as zeros and are lost.  Raises
    `GraphError`, `PlanError` or `BackendError`.

    >>> x = hocket.input("x", (3,))
    >>> hocket.run(hocket.Graph({"y": 2 * x + 1}), {"x": [1, 2, 3]})["y"]
    array([3., 5., 7.], dtype=float32)
    """
    made = plan(graph, devices, split_mode=split_mode, threads=threads)
    return load(made, {} if weights is None else weights).run(inputs)
