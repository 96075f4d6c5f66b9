"""Weights of random numbers of any type, graphs with them on the CPU, and the types that every run tries."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from typing import Any

import numpy as np
import pytest

import hocket
from hocket.backends.cpu.backend import CpuBackend
from hocket.graph.dtypes import DType
from hocket.ops.block_layouts import BLOCK_LAYOUTS
from hocket.ops.quantisation import encode_array


def random_rows(dtype: DType, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """Random blocks with scales of ordinary size, or numbers: uint8 [rows, row bytes]."""
    if not dtype.is_quantised:
        return encode_array(rng.standard_normal((rows, columns)).astype(np.float32), dtype).view(np.uint8)
    raw = rng.integers(0, 256, (rows * columns // dtype.block, dtype.block_bytes), dtype=np.uint8)
    records = raw.view(BLOCK_LAYOUTS[dtype])[:, 0]
    for name in {"d", "dmin"} & set(records.dtype.names):
        records[name] = rng.standard_normal(len(records)) * 0.01
    if dtype is DType.MXFP4:
        records["e"] = rng.integers(110, 130, len(records))
    if dtype is DType.IQ1_M:  # four bits of the scale are in each of four numbers
        bits = (rng.standard_normal((len(records), 1)) * 0.01).astype(np.float16).view(np.uint16)
        records["scales"] = records["scales"] & 0xFFF | bits >> np.array([0, 4, 8, 12], np.uint16) << 12
    if dtype is DType.NVFP4:
        records["scales"] = rng.integers(16, 64, (len(records), 4))
    return records.view(np.uint8).reshape(rows, -1)


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


def nightly_unless(tried: Container[Any], values: Iterable[Any]) -> list[Any]:
    """Return the values of a parameter, or tuples of values of several.

    A value that is not tried has cases in the nightly run only.
    """
    nightly = pytest.mark.nightly(cases=0)
    parts = ((value, value if isinstance(value, tuple) else (value,)) for value in values)
    return [value if value in tried else pytest.param(*part, marks=nightly) for value, part in parts]
