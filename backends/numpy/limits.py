"""The limits of this machine, measured: bytes a second from memory, operations a second in registers.

Each is the best of several runs, since whatever disturbs a run makes it slower.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from .compiler import REPLAY, Kernel
from .kernels import limits
from .kernels.simd import has_vnni

RUNS = 5
AHEAD = (0, 1024, 4096)
"""Bytes ahead of their use at which memory is fetched; the best of these counts."""
TURNS = 1_000_000


def read_bandwidth(threads: int, nbytes: int = 1 << 30) -> float:
    """Bytes a second that so many threads read together from memory of `nbytes`, which should exceed every cache."""
    memory, sums = np.ones(nbytes // 4, np.float32), np.zeros(16 * threads, np.float32)
    turns = nbytes // (64 * limits.LINES)
    words = [[memory.ctypes.data, turns, ahead, sums.ctypes.data] for ahead in AHEAD]
    return nbytes / min(_fastest(limits.read, w, threads) for w in words)


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
    words = [TURNS, values.ctypes.data, sums.ctypes.data]
    return 16 * limits.CHAINS * TURNS * threads / _fastest(kernel, words, threads)


def _fastest(kernel: Kernel, words: Sequence[int], threads: int) -> float:
    """Seconds of the fastest run after one to warm up."""
    block, run = np.array(words, np.int64), REPLAY(kernel.address)
    seconds = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(1 + RUNS):
            start = time.perf_counter()
            list(pool.map(lambda thread: run(block.ctypes.data, thread, threads), range(threads)))
            seconds.append(time.perf_counter() - start)
    return min(seconds[1:])
