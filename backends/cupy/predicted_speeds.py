"""What kernels are predicted to reach on GPUs, as ``python benchmarks/predict_gpu.py`` wrote it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from ..abilities import Predicted, Reached

SPEEDS_FILE = Path(__file__).parents[1] / "predicted.json"


@cache
def load_predicted_speeds() -> Mapping[str, Predicted]:
    """By kind of GPU."""
    known = json.loads(SPEEDS_FILE.read_text("utf-8")).items()
    return {kind: Predicted(Reached(**of["products"]), Reached(**of["ops"])) for kind, of in known}
