"""Rows of numbers for tests of quantisers, and their errors."""

from __future__ import annotations

import numpy as np


def normal_rows(rows: int = 64, columns: int = 1024) -> np.ndarray:
    return np.random.default_rng(3).standard_normal((rows, columns)).astype(np.float32) * np.float32(0.03)


def weighted_nmse(got: np.ndarray, x: np.ndarray, weights: np.ndarray | float = 1.0) -> float:
    error = (got.astype(np.float64) - x) ** 2 * weights
    return float(error.sum() / (x.astype(np.float64) ** 2 * weights).sum())


def special_rows(block: int) -> np.ndarray:
    """Zeros, equal numbers, single numbers, ties of magnitudes and of codes, and numbers near the ends of float16."""
    x = np.zeros((12, 2 * block), np.float32)
    x[1], x[2], x[3, 5], x[4, 7] = 0.5, -0.25, 3.0, -3.0
    x[5, ::2], x[5, 1::2] = 1, -1
    x[6] = np.arange(2 * block) % 16 - 8
    x[7] = (np.arange(2 * block) % 31 - 15) / 2
    x[8] = np.linspace(-30000, 60000, 2 * block)
    x[9] = np.linspace(1e-5, 2e-5, 2 * block)
    x[10], x[11, 0] = np.linspace(-1, 0, 2 * block), 65504
    return x
