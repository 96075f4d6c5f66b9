"""Measured peaks of this machine: memory bandwidth in bytes/s, and arithmetic in operations/s.

A peak is the best of several runs, because disturbances only make a run slower.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np

from ....graph.dtypes import DType
from .. import target_cpu
from ..compilation.compiler import KERNEL_FUNCTION, Kernel
from ..kernels import peak_probes
from ..simd import amx
from ..simd.byte_vectors import has_dot4_instruction
from .prefetch_tuning import MAX_GROUP_ROWS, TimedMatmul

MEASUREMENT_RUNS = 5
READ_PATTERNS = (
    {"streams": 1, "together": 0, "l1_ahead": 0, "l2_ahead": 0},
    {"streams": 1, "together": 0, "l1_ahead": 8192, "l2_ahead": 16384},
    {"streams": 1, "together": 1, "l1_ahead": 0, "l2_ahead": 0},
    {"streams": 8, "together": 0, "l1_ahead": 0, "l2_ahead": 0},
    {"streams": 8, "together": 0, "l1_ahead": 2048, "l2_ahead": 8192},
)
"""Patterns of kernels that only read memory, as words of `peak_probes.READ_ARGS`; no pattern is best everywhere."""
ROW_BYTES = 1024 // DType.Q8_0.block * DType.Q8_0.block_bytes
"""Bytes of a row of 1,024 weights of Q8_0."""
MULTIPLY_TURNS = 1_000_000


class _TimedKernel:
    """A timed kernel on several threads, which stay alive between runs."""

    def __init__(self, kernel: Kernel, words: Sequence[int], threads: int) -> None:
        self._block, self._kernel = np.array(words, np.int64), KERNEL_FUNCTION(kernel.address)
        self._pool, self._threads = ThreadPoolExecutor(threads), threads

    def measure_seconds_of_one_run(self) -> float:
        """Run the kernel once on all threads, and return the seconds of this run."""
        start = time.perf_counter()
        list(self._pool.map(self._run_thread, range(self._threads)))
        return time.perf_counter() - start

    def measure_fastest_seconds(self) -> float:
        """Return the seconds of the fastest run of several, after one warm-up run."""
        return min([self.measure_seconds_of_one_run() for _ in range(1 + MEASUREMENT_RUNS)][1:])

    def _run_thread(self, thread: int) -> None:
        self._kernel(self._block.ctypes.data, thread, self._threads)


class MemoryBandwidthTest:
    """A test of memory read bandwidth by several threads, in memory that should exceed every cache.

    The result is the best of several access patterns, so that no kernel exceeds it. The patterns are `READ_PATTERNS`,
    and matmuls of one token with every prefetch distance. The Q8_0 weight of these matmuls has a quarter of the test's
    size.
    """

    def __init__(self, threads: int, nbytes: int = 1 << 30) -> None:
        turns = (
            nbytes
            // (64 * peak_probes.LINES_PER_ITERATION * peak_probes.TURNS_PER_CHUNK * threads)
            * peak_probes.TURNS_PER_CHUNK
            * threads
        )
        memory, sums = (
            np.ones(turns * 16 * peak_probes.LINES_PER_ITERATION, np.float32),
            np.zeros(16 * threads, np.float32),
        )
        known = {"memory": memory.ctypes.data, "turns": turns, "sums": sums.ctypes.data}
        self._memory = memory, sums
        self._runs = [
            _TimedKernel(peak_probes.read_and_sum_memory, peak_probes.READ_ARGS(**known, **pattern), threads)
            for pattern in READ_PATTERNS
        ]
        weight = np.full((nbytes // 4 // ROW_BYTES // MAX_GROUP_ROWS * MAX_GROUP_ROWS, ROW_BYTES), 0x21, np.uint8)
        self._matmul = TimedMatmul(DType.Q8_0, [weight], threads)

    def measure_best_bytes_per_second(self) -> float:
        """Measure the memory bandwidth of all access patterns, and return the best one in bytes/s."""
        seconds = min(run.measure_seconds_of_one_run() for run in self._runs)
        return max(
            self._memory[0].nbytes / seconds, self._matmul.nbytes / min(self._matmul.measure_seconds_by_distance())
        )


def read_largest_cache_bytes() -> int:
    """Return the bytes of the largest cache of the first processor.

    The result is 0 if the system does not report caches.
    """
    sizes = [0]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with suppress(OSError, ValueError):
            number, unit = file.read_text("ascii").strip()[:-1], file.read_text("ascii").strip()[-1]
            sizes.append(int(number) * {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(unit, 0))
    return max(sizes)


def measure_float32_peak(threads: int) -> float:
    """Measure the peak float32 operations/s of fused multiply-adds, two operations each."""
    values = np.full(32, 0.5, np.float32)
    return 2 * _measure_lane_multiplications_per_second(peak_probes.repeat_float_multiply_adds, values, threads)


def measure_int8_peak(threads: int) -> float | None:
    """Measure the peak operations/s of int8 dot products; None if the processor has no such instruction."""
    return (
        2
        * 4
        * _measure_lane_multiplications_per_second(
            peak_probes.repeat_int8_dot_products, np.ones(128, np.uint8), threads
        )
        if has_dot4_instruction()
        else None
    )


def measure_bf16_tile_peak(threads: int) -> float | None:
    """Measure the peak bfloat16 operations/s of AMX tile products; None if the processor has no AMX."""
    if target_cpu.find_native_or_emulated_amx() != target_cpu.AMX:
        return None
    memory, turns = np.zeros(amx.TILE_MEMORY_BYTES * threads, np.uint8), MULTIPLY_TURNS // 4
    run = _TimedKernel(
        peak_probes.make_repeat_amx_tile_products_kernel(),
        peak_probes.TILE_ARGS(turns=turns, memory=memory.ctypes.data),
        threads,
    )
    products = 2 * amx.TILE_ROWS * amx.TILE_ROWS * amx.TILE_ROW_BYTES // 2
    return products * peak_probes.INDEPENDENT_TILES * turns * threads / run.measure_fastest_seconds()


def _measure_lane_multiplications_per_second(kernel: Kernel, values: np.ndarray, threads: int) -> float:
    """Measure how many 32-bit lanes per second a kernel multiplies on all threads."""
    sums = np.zeros(16 * threads, np.float32)
    run = _TimedKernel(
        kernel,
        peak_probes.MULTIPLY_ARGS(turns=MULTIPLY_TURNS, values=values.ctypes.data, sums=sums.ctypes.data),
        threads,
    )
    return 16 * peak_probes.INDEPENDENT_SUMS * MULTIPLY_TURNS * threads / run.measure_fastest_seconds()
