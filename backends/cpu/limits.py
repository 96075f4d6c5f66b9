"""Measured limits of this machine: bytes/s of memory, and operations/s of registers.

A limit is the best of several runs, because disturbances only make a run slower.
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
"""Patterns that only read memory, as words of `limits.READ`; the best one differs between processors."""
WIDTH = 1024 // DType.Q8_0.block * DType.Q8_0.block_bytes
"""Bytes of a row of 1,024 weights of Q8_0."""
TURNS = 1_000_000


class _Run:
    """A kernel on several threads, which stay alive between runs."""

    def __init__(self, kernel: Kernel, words: Sequence[int], threads: int) -> None:
        self._block, self._call = np.array(words, np.int64), REPLAY(kernel.address)
        self._pool, self._threads = ThreadPoolExecutor(threads), threads

    def seconds(self) -> float:
        """Run once."""
        start = time.perf_counter()
        list(self._pool.map(self._part, range(self._threads)))
        return time.perf_counter() - start

    def fastest(self) -> float:
        """Return the seconds of the fastest run after one warm-up run."""
        return min([self.seconds() for _ in range(1 + RUNS)][1:])

    def _part(self, thread: int) -> None:
        self._call(self._block.ctypes.data, thread, self._threads)


class Reading:
    """Memory that several threads read together, in every pattern; it should exceed every cache.

    The patterns are `READ_PATTERNS` and a product of one token with a Q8_0 weight of a quarter of the size,
    with every prefetch distance. The best pattern counts, so that no kernel exceeds the limit.
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
        """Measure the bytes/s now."""
        seconds = min(run.seconds() for run in self._runs)
        return max(self._memory[0].nbytes / seconds, self._product.nbytes / min(self._product.seconds()))


def last_cache_bytes() -> int:
    """Return the bytes of the largest cache of the first processor; 0 if the system does not report it."""
    sizes = [0]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with suppress(OSError, ValueError):
            number, unit = file.read_text("ascii").strip()[:-1], file.read_text("ascii").strip()[-1]
            sizes.append(int(number) * {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(unit, 0))
    return max(sizes)


def multiply_peak(threads: int) -> float:
    """Measure the float32 operations/s of fused multiply-adds."""
    values = np.full(32, 0.5, np.float32)
    return 2 * _products(limits.multiply, values, threads)


def dot_peak(threads: int) -> float | None:
    """Measure the operations/s of 8-bit dot products; None if the processor has no such instruction."""
    return 2 * 4 * _products(limits.dot, np.ones(128, np.uint8), threads) if has_fours() else None


def tiles_peak(threads: int) -> float | None:
    """Measure the bfloat16 operations/s of tile products; None if the processor has no tiles."""
    if processor.tiles() != processor.AMX:
        return None
    memory, turns = np.zeros(amx.NBYTES * threads, np.uint8), TURNS // 4
    run = _Run(limits.multiply_tiles(), limits.TILES(turns=turns, memory=memory.ctypes.data), threads)
    products = 2 * amx.HEIGHT * amx.HEIGHT * amx.WIDTH // 2
    return products * limits.CHAINS_OF_TILES * turns * threads / run.fastest()


def _products(kernel: Kernel, values: np.ndarray, threads: int) -> float:
    """Measure the multiplications/s of 32-bit lanes."""
    sums = np.zeros(16 * threads, np.float32)
    run = _Run(kernel, limits.PRODUCTS(turns=TURNS, values=values.ctypes.data, sums=sums.ctypes.data), threads)
    return 16 * limits.CHAINS * TURNS * threads / run.fastest()
