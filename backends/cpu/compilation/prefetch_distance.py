"""Prefetch distances of CPU matrix products: the candidates, and the measured one of each weight dtype.

Processors differ in their hardware prefetch, and dtypes in the time of products. No distance is best everywhere,
and a bad distance costs up to half of the speed. Several rows of activations need a distance of their own: hardware
prefetch is early enough for one row, and too late for four rows. `tuning.prefetch_tuning` measures the distances at
first use.
"""

from __future__ import annotations

from pathlib import Path

from ....graph.dtypes import DType
from ....graph.storage.disk_cache import make_cache_path, read_cached
from .compiler import compute_kernel_code_digest

PREFETCH_DISTANCES = ((8192, 16384), (0, 0), (4096, 4096), (8192, 8192), (2048, 8192))
"""Prefetch distances in bytes for the L1 cache and for the L2 cache.

The first pair is the default. With equal distances the second prefetch costs little. With zero distances, lines are
requested before the block that needs them.
"""
TUNED_ROW_COUNTS = (1, 4)
"""Numbers of activation rows that are measured: one, and several."""


def find_l1_and_l2_prefetch_distances(dtype: DType, *, several: bool = False) -> tuple[int, int]:
    """Return the tuned prefetch distances of a weight dtype in bytes, for the L1 cache and for the L2 cache.

    Args:
        dtype: The dtype of the weight.
        several: Whether several rows of activations are multiplied at once.
    """
    cached = read_cached(make_distance_cache_path(dtype))
    return PREFETCH_DISTANCES[cached[several] if cached else 0]


def make_distance_cache_path(dtype: DType) -> Path:
    """Return the file of the disk cache with the measured prefetch distances of a weight dtype."""
    return make_cache_path("prefetch", compute_kernel_code_digest(), str(dtype), PREFETCH_DISTANCES, TUNED_ROW_COUNTS)
