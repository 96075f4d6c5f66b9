"""The limits of this machine, measured: bytes a second from memory, operations a second in registers.

A limit is the best of several runs, since whatever disturbs a run makes it slower.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from .compiler import REPLAY, Kernel
from .kernels import limits
from .simd.vectors import has_vnni

RUNS = 5
AHEAD = ((0, 0), (4096, 4096), (8192, 16384))
"""Bytes ahead of its use at which memory is fetched to the first and to the second cache; the best of these counts."""
TURNS = 1_000_000


class _Run:
    """A kernel on so many threads, which stay between runs."""

    def __init__(self, kernel: Kernel, words: Sequence[int], threads: int) -> None:
        self._block, self._call = np.array(words, np.int64), REPLAY(kernel.address)
        self._pool, self._threads = ThreadPoolExecutor(threads), threads

    def seconds(self) -> float:
        """Run once."""
        start = time.perf_counter()
        list(self._pool.map(self._part, range(self._threads)))
        return time.perf_counter() - start

    def fastest(self) -> float:
        """Seconds of the fastest run after one to warm up."""
        return min([self.seconds() for _ in range(1 + RUNS)][1:])

    def _part(self, thread: int) -> None:
        self._call(self._block.ctypes.data, thread, self._threads)


class Reading:
    """Memory that so many threads read together; it should exceed every cache."""

    def __init__(self, threads: int, nbytes: int = 1 << 30) -> None:
        self._memory, self._sums = np.ones(nbytes // 4, np.float32), np.zeros(16 * threads, np.float32)
        turns = nbytes // (64 * limits.LINES)
        memory, sums = self._memory.ctypes.data, self._sums.ctypes.data
        words = [limits.READ(memory=memory, turns=turns, near=near, far=far, sums=sums) for near, far in AHEAD]
        self._runs = [_Run(limits.read, w, threads) for w in words]

    def rate(self) -> float:
        """Bytes a second, now."""
        return self._memory.nbytes / min(run.seconds() for run in self._runs)

    def best(self) -> float:
        """Bytes a second while nothing disturbs."""
        return self._memory.nbytes / min(run.fastest() for run in self._runs)


def multiply_peak(threads: int) -> float:
    """float32 operations a second of fused products and sums."""
    values = np.full(32, 0.5, np.float32)
    return 2 * _products(limits.multiply, values, threads)


def dot_peak(threads: int) -> float | None:
    """Operations a second of 8-bit dot products; None where the processor has no instruction for them."""
    return 2 * 4 * _products(limits.dot, np.ones(128, np.uint8), threads) if has_vnni() else None


def _products(kernel: Kernel, values: np.ndarray, threads: int) -> float:
    """Products of 32-bit lanes a second."""
    sums = np.zeros(16 * threads, np.float32)
    run = _Run(kernel, limits.PRODUCTS(turns=TURNS, values=values.ctypes.data, sums=sums.ctypes.data), threads)
    return 16 * limits.CHAINS * TURNS * threads / run.fastest()
