"""What products with weights are predicted to reach on GPUs, as ``python benchmarks/predict_gpu.py`` wrote it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

FILE = Path(__file__).parents[1] / "predicted.json"


@cache
def predicted() -> Mapping[str, Mapping[str, Mapping[str, float]]]:
    """By kind of GPU, ``bandwidth`` in bytes/s for one vector and ``flops`` in FLOP/s for many, by dtype of weights."""
    kinds: Mapping[str, Mapping[str, Mapping[str, float]]] = json.loads(FILE.read_text("utf-8"))
    return kinds
