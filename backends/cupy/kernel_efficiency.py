"""Reads the measured efficiencies of kernel families from ``kernel_efficiency.toml``.

``python benchmarks/gpu/fit_efficiency.py`` fits them to measured times and writes the file.
"""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path

from ..capabilities import KernelEfficiencies

EFFICIENCY_FILE = Path(__file__).parent / "kernel_efficiency.toml"


@cache
def read_kernel_efficiencies() -> KernelEfficiencies:
    """Read the efficiencies of kernel families, which all devices share."""
    table = tomllib.loads(EFFICIENCY_FILE.read_text("utf-8"))
    return KernelEfficiencies(tuple(table.pop("measured_on")), **table)
