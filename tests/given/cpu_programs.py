"""Graphs with random weights that are loaded for the CPU backend."""

from __future__ import annotations

import math

import numpy as np

import hocket
from hocket.backends.cpu.backend import CpuBackend

from .random_rows import random_rows


def random_values(graph: hocket.Graph, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return random weights of a graph by name."""

    def random_weight(w: hocket.Value) -> np.ndarray:
        if w.dtype.is_quantised:
            return random_rows(w.dtype, math.prod(w.shape[:-1]), w.shape[-1], rng).reshape(*w.shape[:-1], -1)
        return rng.standard_normal(w.shape).astype(w.dtype.storage)

    return {w.node.name: random_weight(w) for w in graph.weights}


def load(graph: hocket.Graph, values: dict[str, np.ndarray], threads: int) -> hocket.Executor:
    """Load a graph for one CPU device with `threads` threads."""
    backend = CpuBackend(threads)
    return hocket.load(hocket.scheduler.plan_for_group(graph, [(backend, backend.device(0))]), values)
