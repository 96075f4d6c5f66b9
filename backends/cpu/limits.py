"""The limits of this machine, measured: bytes a second from memory, operations a second in registers.

A limit is the best of several runs, since whatever disturbs a run makes it slower.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np

from ...graph.dtypes import DType
from . import processor
from .compiler import REPLAY, Kernel
from .fetching import GROUP, Product
from .kernels import limits
from .simd import amx
from .simd.bytes import has_fours

RUNS = 5
PATTERNS = (
    {"streams": 1, "together": 0, "near": 0, "far": 0},
    {"streams": 1, "together": 0, "near": 8192, "far": 16384},
    {"streams": 1, "together": 1, "near": 0, "far": 0},
    {"streams": 8, "together": 0, "near": 0, "far": 0},
    {"streams": 8, "together": 0, "near": 2048, "far": 8192},
)
"""Ways to read memory and do nothing else, in words of `limits.READ`.  Which is best differs between processors."""
WIDTH = 1024 // DType.Q8_0.block * DType.Q8_0.block_bytes
"""Bytes of a row of 1,024 weights of Q8_0."""
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
    """Memory that so many threads read together, in every way; it should exceed every cache.

    The ways are those of `PATTERNS`, and a product of one token with a weight of Q8_0, a quarter as large, fetched as
    far ahead as `fetching` has choices: the best counts, so that no kernel is nearer to the limit than it is.
    """

    def __init__(self, threads: int, nbytes: int = 1 << 30) -> None:
        turns = nbytes // (64 * limits.LINES * limits.PIECE * threads) * limits.PIECE * threads
        memory, sums = np.ones(turns * 16 * limits.LINES, np.float32), np.zeros(16 * threads, np.float32)
        known = {"memory": memory.ctypes.data, "turns": turns, "sums": sums.ctypes.data}
        self._memory = memory, sums
        self._runs = [_Run(limits.read, limits.READ(**known, **pattern), threads) for pattern in PATTERNS]
        weight = np.full((nbytes // 4 // WIDTH // GROUP * GROUP, WIDTH), 0x21, np.uint8)
        self._product = Product(DType.Q8_0, [weight], threads)

    def rate(self) -> float:
        """Bytes a second, now."""
        seconds = min(run.seconds() for run in self._runs)
        return max(self._memory[0].nbytes / seconds, self._product.nbytes / min(self._product.seconds()))


def last_cache_bytes() -> int:
    """Bytes of the largest cache of the first processor, 0 where the system does not tell."""
    sizes = [0]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with suppress(OSError, ValueError):
            number, unit = file.read_text("ascii").strip()[:-1], file.read_text("ascii").strip()[-1]
            sizes.append(int(number) * {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(unit, 0))
    return max(sizes)


def multiply_peak(threads: int) -> float:
    """float32 operations a second of fused products and sums."""
    values = np.full(32, 0.5, np.float32)
    return 2 * _products(limits.multiply, values, threads)


def dot_peak(threads: int) -> float | None:
    """Operations a second of 8-bit dot products; None where the processor has no instruction for them."""
    return 2 * 4 * _products(limits.dot, np.ones(128, np.uint8), threads) if has_fours() else None


def tiles_peak(threads: int) -> float | None:
    """bfloat16 operations a second of products of tiles; None where the processor has no tiles."""
    if processor.tiles() != processor.AMX:
        return None
    memory, turns = np.zeros(amx.NBYTES * threads, np.uint8), TURNS // 4
    run = _Run(limits.multiply_tiles(), limits.TILES(turns=turns, memory=memory.ctypes.data), threads)
    products = 2 * amx.HEIGHT * amx.HEIGHT * amx.WIDTH // 2
    return products * limits.CHAINS_OF_TILES * turns * threads / run.fastest()


def _products(kernel: Kernel, values: np.ndarray, threads: int) -> float:
    """Products of 32-bit lanes a second."""
    sums = np.zeros(16 * threads, np.float32)
    run = _Run(kernel, limits.PRODUCTS(turns=TURNS, values=values.ctypes.data, sums=sums.ctypes.data), threads)
    return 16 * limits.CHAINS * TURNS * threads / run.fastest()
