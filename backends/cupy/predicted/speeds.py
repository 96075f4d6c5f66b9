"""What products with weights are predicted to reach on GPUs, as ``python benchmarks/predict_gpu.py`` wrote it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from ...abilities import Reached

FILE = Path(__file__).parents[1] / "predicted.json"


@cache
def predicted() -> Mapping[str, Reached]:
    """By kind of GPU."""
    return {kind: Reached(**reached) for kind, reached in json.loads(FILE.read_text("utf-8")).items()}
