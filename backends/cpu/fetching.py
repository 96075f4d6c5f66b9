"""How far ahead of its use a weight is fetched that is read once: measured at first use, and kept with the kernels.

Processors differ in what they fetch by themselves, and types in how long products take meanwhile: no distance is best
everywhere, and a bad one costs up to half of the speed.  Several rows of activations at once need one of their own:
what a processor fetches by itself is soon enough for one row, and too late for four.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from ...graph.dtypes import DType
from ..base import Program
from ..cache import cache_folder, keep, recalled
from .compiler import REPLAY, source_digest

CHOICES = ((8192, 16384), (0, 0), (4096, 4096), (8192, 8192), (2048, 8192))
"""Bytes ahead to the first and to the second cache.  The first is taken unless another is seen to be better; where both
are alike the second fetch costs little, and where they are none lines are asked for before the block that needs them.
"""
BETTER = 1.03
"""By how much."""
WORTH = 64 << 20
"""Bytes of weights of a type in a program for which it is measured: fewer stay in a cache."""
MOST = 128 << 20
"""Bytes of them that are read for it."""
ROUNDS = 15
AT_ONCE = (1, 4)
"""Rows of activations that meet a weight in what is measured: a single one, and several."""
GROUP = 64
"""Rows that lie together at most, however a type is packed."""
log = logging.getLogger("hocket.kernels")


def ahead(dtype: DType, *, several: bool = False) -> tuple[int, int]:
    """Bytes ahead of its use at which a weight of that type is fetched, to the first and to the second cache, where it
    meets one row of activations or several at once."""
    kept = recalled(_file(dtype))
    return CHOICES[kept[several] if kept else 0]


def measure_for(program: Program, buffers: Sequence[np.ndarray]) -> None:
    """Choose for the types of which a program has many weights, where nobody has, by products with these weights: a
    copy of them would be memory that the model has no use for."""
    weights = defaultdict[DType, list[np.ndarray]](list)
    for spec, memory in zip(program.buffers, buffers, strict=True):
        if spec.kind == "weight" and spec.stored is not None and len(spec.stored.shape) > 1 and spec.nbytes:
            dtype, columns = spec.stored.dtype, spec.stored.shape[-1]
            rows = memory.view(np.uint8)[: spec.stored.nbytes]
            weights[dtype].append(rows.reshape(-1, columns // dtype.block * dtype.block_bytes))
    for dtype, matrices in weights.items():
        if sum(matrix.nbytes for matrix in matrices) >= WORTH and recalled(_file(dtype)) is None:
            choose(dtype, matrices)


def choose(dtype: DType, matrices: Sequence[np.ndarray]) -> None:
    """Measure all choices, on one thread, and keep the best for later processes."""
    before = accumulate((matrix.nbytes for matrix in matrices), initial=0)
    some = [matrix[: _rows(matrix, MOST - read)] for matrix, read in zip(matrices, before, strict=False) if read < MOST]
    keep(_file(dtype), bytes(_best(dtype, some, rows) for rows in AT_ONCE))


def _best(dtype: DType, matrices: Sequence[np.ndarray], rows: int) -> int:
    """The number of the choice whose fastest run is the fastest: whatever disturbs a run makes it slower."""
    reading = Product(dtype, matrices, 1, rows)
    reading.seconds()
    seconds = np.min([reading.seconds() for _ in range(ROUNDS)], axis=0)
    rates = ", ".join(f"{c}: {reading.nbytes / s / 1e9:.1f}" for c, s in zip(CHOICES, seconds, strict=True))
    log.debug("GB/s of %s by bytes fetched ahead, %d rows: %s", dtype, rows, rates)
    best = int(np.argmin(seconds))
    return best if seconds[best] * BETTER < seconds[0] else 0


def _rows(matrix: np.ndarray, nbytes: int) -> int:
    """So many rows have so many bytes, in whole groups as packed weights lie."""
    return max(1, nbytes // matrix.shape[1] // GROUP) * GROUP


class Product:
    """Weights of one type times some rows of activations, all the same; the results are nobody's.

    Each is an array of rows of bytes; those that lie in groups, as packed weights do, are whole groups.
    """

    def __init__(self, dtype: DType, matrices: Sequence[np.ndarray], threads: int, at_once: int = 1) -> None:
        from .kernels.products import dense, grouped, products  # which ask this file how far ahead to fetch
        from .kernels.products.formats import FORMATS

        form = FORMATS.get(dtype)
        blocks = products.blocks_of(form) if form else dense.blocks_of(dtype)
        self.nbytes = sum(matrix.nbytes for matrix in matrices)
        rows, stride = np.max([matrix.shape for matrix in matrices], axis=0)
        x, y = np.zeros(stride // dtype.block_bytes * dtype.block, np.float32), np.zeros(rows, np.float32)
        slots = np.array([0, at_once, at_once, *range(at_once)], np.int32)
        scratch = np.zeros(threads * blocks.scratch, np.uint8)
        self._blocks = [
            [
                np.array(
                    grouped.ARGS(
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
                        scratch=scratch.ctypes.data + thread * blocks.scratch,
                        near=near,
                        far=far,
                        tickets=0,
                    ),
                    np.int64,
                )
                for matrix in matrices
                for thread, (first, last) in enumerate(pairwise(grouped.even_bounds(len(matrix), GROUP, threads)))
            ]
            for near, far in CHOICES
        ]
        self._memory = matrices, x, y, slots, scratch
        self._call = REPLAY((products.product(form) if form else dense.product(dtype)).address)
        self._pool, self._threads = ThreadPoolExecutor(threads), threads

    def seconds(self) -> list[float]:
        """Of one run with each choice."""
        return [self._seconds(blocks) for blocks in self._blocks]

    def _seconds(self, blocks: Sequence[np.ndarray]) -> float:
        start = time.perf_counter()
        list(self._pool.map(lambda thread: self._part(blocks, thread), range(self._threads)))
        return time.perf_counter() - start

    def _part(self, blocks: Sequence[np.ndarray], thread: int) -> None:
        for block in blocks[thread :: self._threads]:
            self._call(block.ctypes.data, 0, 1)


def _file(dtype: DType) -> Path:
    name = hashlib.sha256(source_digest() + repr((str(dtype), CHOICES, AT_ONCE)).encode()).hexdigest()[:40]
    return cache_folder() / "kernels" / f"{name}.ahead"
