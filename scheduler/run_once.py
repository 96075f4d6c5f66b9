"""The function `hocket.run`, which plans a graph, loads its weights and runs it once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy.typing as npt

from ..backends.base import Array
from ..graph.errors import PlanError
from ..graph.graph import Graph
from ..graph.validation import validate_arguments
from .planning.planner import plan
from .runtime.executor import load


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
    """Plan `graph`, load `weights` and run the graph once; return the outputs by name.

    Outputs are float32 or integer arrays. States begin as zeros, and their new values are lost. Call `plan` and `load`
    to run a graph several times.

    Args:
        graph: The graph to run.
        inputs: An array for each input, by name.
        weights: An array for each weight, by name.
        devices: The devices, as for `plan`, such as ``cpu:0``.
        split_mode: How several devices share the graph, as for `plan`.
        threads: The threads of a device, as for `plan`.

    Raises:
        GraphError: The graph is illegal.
        PlanError: There is no such plan, or an argument is wrong.
        BackendError: A device is missing or fails.

    >>> x = hocket.input("x", (3,))
    >>> hocket.run(hocket.Graph({"y": 2 * x + 1}), {"x": [1, 2, 3]})["y"]
    array([3., 5., 7.], dtype=float32)
    """
    graph_plan = plan(graph, devices, split_mode=split_mode, threads=threads)
    return load(graph_plan, {} if weights is None else weights).run(inputs)
