"""What `benchmarks/predict_gpu.py` said of the times that are measured, and where it was wrong."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from .bench import Row

FILE = Path(__file__).parents[1] / "kernels_cuda_times.json"
WRONG = 1.3
"""Times too long or too short from which on a prediction is wrong."""


def kind_of(gpu: str) -> str:
    """The kind that a device's name has in it, as ``h200`` of NVIDIA H200; empty if it is another."""
    name = gpu.lower().replace(" ", "")
    kinds = {kind for times in json.loads(FILE.read_text("utf-8")).values() for kind in times}
    return next((kind for kind in kinds if kind in name), "")


def beside(row: Row, title: str, kind: str) -> Row:
    """The row with the time that was predicted for a case of that title, if there is one and the row is of our choice
    of a kernel."""
    times: Mapping[str, Mapping[str, float]] = json.loads(FILE.read_text("utf-8"))
    if "µs" not in row or row.get("ours") is False or kind not in times.get(title, {}):
        return row
    return {**row, "predicted µs": times[title][kind]}


def wrong(rows: Iterable[Row]) -> Iterator[str]:
    """A line for each prediction that was wrong, the worst first."""
    compared = [(float(str(r["predicted µs"])) / float(str(r["µs"])), r) for r in rows if "predicted µs" in r]
    far = [(ratio, r) for ratio, r in compared if not 1 / WRONG <= ratio <= WRONG]
    for ratio, r in sorted(far, key=lambda pair: -max(pair[0], 1 / pair[0])):
        yield f"{r['case']}: predicted {ratio:.2f} times what was measured"
