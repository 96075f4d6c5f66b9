"""Reads the predicted kernel speeds of GPUs, which ``python benchmarks/gpu/predict_times.py`` writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from ..capabilities import KernelSpeeds, PredictedSpeeds

SPEEDS_FILE = Path(__file__).parent / "predicted.json"


@cache
def load_predicted_speeds() -> Mapping[str, PredictedSpeeds]:
    """Load the predicted speeds of matrix products and other ops, by kind of GPU such as ``h100``."""
    by_kind = json.loads(SPEEDS_FILE.read_text("utf-8")).items()
    return {
        kind: PredictedSpeeds(KernelSpeeds(**speeds["products"]), KernelSpeeds(**speeds["ops"]))
        for kind, speeds in by_kind
    }
