"""The slowdown of ops that NumPy computes because a backend has no compiled kernel for them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

NUMPY_SLOWDOWNS: Mapping[str, float] = MappingProxyType(
    {
        **{"argsort": 110.0, "timestep_embedding": 40.0, "solve_tri": 37.0},
        **{"gather": 6.0, "scatter": 5.0},
        **{"diag": 3.5, "group_norm": 3.0, "tri": 2.0},
    }
)
"""The time in NumPy divided by the predicted time of a compiled kernel, by op; the ratio of other ops is about 1.

Measured by `benchmarks/cpu/stand_ins.py`, see benchmarks/results/2026-11-29-zen5-stand-ins.md.
"""
