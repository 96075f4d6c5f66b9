"""The price of ops for which a backend has no compiled kernel, so that NumPy computes them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

NUMPY_SLOWDOWNS: Mapping[str, float] = MappingProxyType(
    {
        **{"argsort": 110.0, "timestep_embedding": 40.0, "solve_tri": 37.0},
        **{"lightning_indexer": 7.0, "gather": 6.0, "scatter": 5.0},
        **{"diag": 3.5, "group_norm": 3.0, "tri": 2.0},
    }
)
"""How many times longer NumPy takes than a compiled kernel is predicted to take, by op; other ops take about as long.

`benchmarks/stand_ins.py` measured them (benchmarks/results/2026-11-29-zen5-stand-ins.md).
"""
