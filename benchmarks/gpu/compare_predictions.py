"""Compare measured times with the predictions of `benchmarks/gpu/predict_times.py`, and list the wrong predictions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from .harness import ResultRow

PREDICTIONS_FILE = Path(__file__).parents[1] / "kernels_cuda_times.json"
"""Predicted microseconds by case title and GPU kind."""
WRONG_PREDICTION_FACTOR = 1.3
"""The ratio of predicted to measured time, in either direction, from which on a prediction is wrong."""


def find_gpu_kind(gpu: str) -> str:
    """Return the GPU kind that occurs in a device name, for example ``h200`` in NVIDIA H200; empty if there is none."""
    name = gpu.lower().replace(" ", "")
    kinds = {kind for times in json.loads(PREDICTIONS_FILE.read_text("utf-8")).values() for kind in times}
    return next((kind for kind in kinds if kind in name), "")


def with_prediction(row: ResultRow, title: str, kind: str) -> ResultRow:
    """Return the row with the predicted time of the case, if there is a prediction.

    A row with ``ours`` False is not from the kernel that hocket chooses, and stays as it is.
    """
    times: Mapping[str, Mapping[str, float]] = json.loads(PREDICTIONS_FILE.read_text("utf-8"))
    if "µs" not in row or row.get("ours") is False or kind not in times.get(title, {}):
        return row
    return {**row, "predicted µs": times[title][kind]}


def list_wrong_predictions(rows: Iterable[ResultRow]) -> Iterator[str]:
    """Yield a line for each wrong prediction, the worst first."""
    compared = [(float(str(r["predicted µs"])) / float(str(r["µs"])), r) for r in rows if "predicted µs" in r]
    far = [(ratio, r) for ratio, r in compared if not 1 / WRONG_PREDICTION_FACTOR <= ratio <= WRONG_PREDICTION_FACTOR]
    for ratio, r in sorted(far, key=lambda pair: -max(pair[0], 1 / pair[0])):
        yield f"{r['case']}: predicted {ratio:.2f} times the measured time"
