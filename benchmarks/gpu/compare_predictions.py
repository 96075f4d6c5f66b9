"""Compare measured times of model steps with the predictions for a simulated GPU, and list the wrong predictions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hocket.graph import Graph
from hocket.scheduler import plan_for_group
from hocket.scheduler.costs.device_catalogue import DATA_SHEETS
from hocket.scheduler.costs.simulated_devices import parse_simulated_group

from .harness import ResultRow

WRONG_PREDICTION_FACTOR = 1.2
"""The ratio of predicted to measured time, in either direction, from which on a prediction is wrong."""


def find_gpu_kind(gpu: str) -> str:
    """Return the GPU kind that occurs in a device name, for example ``h200`` in NVIDIA H200; empty if there is none."""
    name = gpu.lower().replace(" ", "")
    return next((kind for kind, sheet in DATA_SHEETS.items() if sheet.capability and kind in name), "")


def predict_step_row(graph: Graph, gpu: str) -> ResultRow:
    """Return the predicted microseconds of a step on the device with the name `gpu`; empty for an unknown kind."""
    if not (kind := find_gpu_kind(gpu)):
        return {}
    simulation = parse_simulated_group(f"{kind}:1")
    plan = plan_for_group(graph, simulation.group, hardware=simulation.hardware_for(graph))
    return {"predicted µs": 1e6 * plan.cost.total}


def list_wrong_predictions(rows: Iterable[ResultRow]) -> Iterator[str]:
    """Yield a line for each wrong prediction, the worst first."""
    compared = [(float(str(r["predicted µs"])) / float(str(r["µs"])), r) for r in rows if "predicted µs" in r]
    far = [(ratio, r) for ratio, r in compared if not 1 / WRONG_PREDICTION_FACTOR <= ratio <= WRONG_PREDICTION_FACTOR]
    for ratio, r in sorted(far, key=lambda pair: -max(pair[0], 1 / pair[0])):
        yield f"{r['case']}, {r['step']}: predicted {ratio:.2f} times the measured time"
