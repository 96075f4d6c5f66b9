"""Measurement of prefetch distances: products with the weights of a program, at first use.

`compilation.prefetch_distance` has the distances and their meaning.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise

import numpy as np

from ....graph.dtypes import DType
from ....graph.storage.disk_cache import read_cached, write_cached
from ...base import Program
from ...compile_log import log
from ..compilation.compiler import KERNEL_FUNCTION
from ..compilation.prefetch_distance import PREFETCH_DISTANCES, TUNED_ROW_COUNTS, make_distance_cache_path
from ..kernels.matmul import float_matmul, packed_matmul, tile_loops
from ..kernels.packed.format_table import FORMATS
from ..steps.partition import compute_even_bounds

MIN_PREFETCH_GAIN = 1.03
"""Minimum ratio of speeds for replacement of the default pair by another pair."""
MIN_TUNED_BYTES = 64 << 20
"""Minimum bytes of weights of a dtype in a program for a measurement; fewer bytes stay in a cache."""
MAX_TUNING_BYTES = 128 << 20
"""Maximum bytes of weights that a measurement reads."""
TUNING_ROUNDS = 15
MAX_GROUP_ROWS = 64
"""Maximum rows of a group in any packed form."""


def tune_uncached_program_prefetch(program: Program, buffers: Sequence[np.ndarray]) -> None:
    """Tune the prefetch distances of every dtype that has many weights in a program and no cached result.

    The measured products use the weights of the program, because a copy would take additional memory.
    """
    weights = defaultdict[DType, list[np.ndarray]](list)
    for spec, memory in zip(program.buffers, buffers, strict=True):
        if spec.kind == "weight" and spec.stored_spec is not None and len(spec.stored_spec.shape) > 1 and spec.nbytes:
            dtype, columns = spec.stored_spec.dtype, spec.stored_spec.shape[-1]
            rows = memory.view(np.uint8)[: spec.stored_spec.nbytes]
            weights[dtype].append(rows.reshape(-1, columns // dtype.block * dtype.block_bytes))
    for dtype, matrices in weights.items():
        if (
            sum(matrix.nbytes for matrix in matrices) >= MIN_TUNED_BYTES
            and read_cached(make_distance_cache_path(dtype)) is None
        ):
            tune_prefetch_distance(dtype, matrices)


def tune_prefetch_distance(dtype: DType, matrices: Sequence[np.ndarray]) -> None:
    """Measure all prefetch distances of a dtype, and cache the best one for later processes.

    The measurements use one thread.
    """
    before = accumulate((matrix.nbytes for matrix in matrices), initial=0)
    some = [
        matrix[: _count_rows_in_whole_groups(matrix, MAX_TUNING_BYTES - read)]
        for matrix, read in zip(matrices, before, strict=False)
        if read < MAX_TUNING_BYTES
    ]
    write_cached(
        make_distance_cache_path(dtype),
        bytes(_find_index_of_fastest_distances(dtype, some, rows) for rows in TUNED_ROW_COUNTS),
    )


def _find_index_of_fastest_distances(dtype: DType, matrices: Sequence[np.ndarray], rows: int) -> int:
    """Return the index of the fastest pair of `PREFETCH_DISTANCES` for `rows` activation rows.

    The result is 0 if the gain is small. Each pair is timed several times. The fastest time counts, because
    disturbances only make a run slower.
    """
    reading = TimedMatmul(dtype, matrices, 1, rows)
    reading.measure_seconds_by_distance()
    seconds = np.min([reading.measure_seconds_by_distance() for _ in range(TUNING_ROUNDS)], axis=0)
    rates = ", ".join(f"{c}: {reading.nbytes / s / 1e9:.1f}" for c, s in zip(PREFETCH_DISTANCES, seconds, strict=True))
    log.debug("GB/s of %s by bytes fetched ahead, %d rows: %s", dtype, rows, rates)
    best = int(np.argmin(seconds))
    return best if seconds[best] * MIN_PREFETCH_GAIN < seconds[0] else 0


def _count_rows_in_whole_groups(matrix: np.ndarray, max_bytes: int) -> int:
    """Return the number of matrix rows in at most `max_bytes` bytes, in whole row groups.

    The result is at least one group.
    """
    return max(1, max_bytes // matrix.shape[1] // MAX_GROUP_ROWS) * MAX_GROUP_ROWS


class TimedMatmul:
    """A matmul of real weights by rows of zeros, which is timed with every prefetch distance; results are discarded.

    Each weight is an array of rows of bytes. Packed weights are whole groups of rows.
    """

    def __init__(self, dtype: DType, matrices: Sequence[np.ndarray], threads: int, row_count: int = 1) -> None:
        form = FORMATS.get(dtype)
        blocks = (
            packed_matmul.make_packed_matmul_subroutines_and_tiling(form)
            if form
            else float_matmul.make_float_weight_tiling(dtype)
        )
        self.nbytes = sum(matrix.nbytes for matrix in matrices)
        rows, stride = np.max([matrix.shape for matrix in matrices], axis=0)
        x, y = np.zeros(stride // dtype.block_bytes * dtype.block, np.float32), np.zeros(rows, np.float32)
        slots = np.array([0, row_count, row_count, *range(row_count)], np.int32)
        scratch = np.zeros(threads * blocks.scratch_bytes, np.uint8)
        self._blocks = [
            [
                np.array(
                    tile_loops.ARGS(
                        w=matrix.ctypes.data + first * matrix.shape[1],
                        stride=matrix.shape[1],
                        between=0,
                        rows=last - first,
                        columns=matrix.shape[1] // dtype.block_bytes * dtype.block,
                        x=x.ctypes.data,
                        pitch=0,
                        starts=slots.ctypes.data,
                        experts=1,
                        used=1,
                        shared=1,
                        y=y.ctypes.data,
                        step=0,
                        scratch=scratch.ctypes.data + thread * blocks.scratch_bytes,
                        l1_ahead=l1_ahead,
                        l2_ahead=l2_ahead,
                        tickets=0,
                        first_column=0,
                        prologue=0,
                        hooks=[0],
                    ),
                    np.int64,
                )
                for matrix in matrices
                for thread, (first, last) in enumerate(
                    pairwise(compute_even_bounds(len(matrix), MAX_GROUP_ROWS, threads))
                )
            ]
            for l1_ahead, l2_ahead in PREFETCH_DISTANCES
        ]
        self._memory = matrices, x, y, slots, scratch
        self._kernel = KERNEL_FUNCTION(
            (
                packed_matmul.make_packed_matmul_kernel(form) if form else float_matmul.make_float_matmul_kernel(dtype)
            ).address
        )
        self._pool, self._threads = ThreadPoolExecutor(threads), threads

    def measure_seconds_by_distance(self) -> list[float]:
        """Run the matmul once with each pair of `PREFETCH_DISTANCES`; return the seconds of each run in this order."""
        return [self._measure_run(blocks) for blocks in self._blocks]

    def _measure_run(self, blocks: Sequence[np.ndarray]) -> float:
        start = time.perf_counter()
        list(self._pool.map(lambda thread: self._run_thread_blocks(blocks, thread), range(self._threads)))
        return time.perf_counter() - start

    def _run_thread_blocks(self, blocks: Sequence[np.ndarray], thread: int) -> None:
        for block in blocks[thread :: self._threads]:
            self._kernel(block.ctypes.data, 0, 1)
