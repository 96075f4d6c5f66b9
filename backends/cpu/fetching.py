"""How far ahead of its use a weight is fetched that is read once: measured at first use, and kept with the kernels.

Processors differ in what they fetch by themselves, and types in how long products take meanwhile: no distance is best
everywhere, and a bad one costs up to half of the speed.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
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
MEMORY, COLUMNS, ROUNDS = 128 << 20, 1024, 15
log = logging.getLogger("hocket.kernels")


def ahead(dtype: DType) -> tuple[int, int]:
    """Bytes ahead of its use at which a weight of that type is fetched, to the first and to the second cache."""
    kept = recalled(_file(dtype))
    return CHOICES[kept[0] if kept and kept[0] < len(CHOICES) else 0]


def measure_for(program: Program) -> None:
    """Choose for the types of which a program has many weights, where nobody has."""
    sizes = Counter[DType]()
    for buffer in program.buffers:
        if buffer.kind == "weight" and buffer.stored is not None and len(buffer.stored.shape) > 1:
            sizes[buffer.stored.dtype] += buffer.nbytes
    for dtype, nbytes in sizes.items():
        if nbytes >= WORTH and recalled(_file(dtype)) is None:
            choose(dtype)


def choose(dtype: DType) -> None:
    """Measure all choices, on one thread, and keep the best for later processes."""
    try:
        reading = Product(dtype, MEMORY, 1)
    except MemoryError:
        return
    reading.seconds()
    seconds = np.quantile([reading.seconds() for _ in range(ROUNDS)], 0.25, axis=0)
    best = int(np.argmin(seconds))
    keep(_file(dtype), bytes([best if seconds[best] * BETTER < seconds[0] else 0]))
    rates = ", ".join(f"{c}: {reading.nbytes / s / 1e9:.1f}" for c, s in zip(CHOICES, seconds, strict=True))
    log.debug("GB/s of %s by bytes fetched ahead: %s", dtype, rates)


class Product:
    """A weight of so many bytes, times one row of activations; what comes out is nobody's."""

    def __init__(self, dtype: DType, nbytes: int, threads: int) -> None:
        from .kernels import dense, grouped, products  # which ask this file how far ahead to fetch
        from .kernels.formats import FORMATS

        form = FORMATS.get(dtype)
        blocks = products.blocks_of(form) if form else dense.blocks_of(dtype)
        stride = COLUMNS // dtype.block * dtype.block_bytes
        rows = nbytes // stride // grouped.ROWS * grouped.ROWS
        self.nbytes = rows * stride
        memory = np.full(self.nbytes, 0x21, np.uint8), np.zeros(4 * COLUMNS, np.uint8), np.zeros(rows, np.float32)
        slots, scratch = np.array([0, 1, 1, 0], np.int32), np.zeros(threads * blocks.scratch, np.uint8)
        weight, x, y = (array.ctypes.data for array in memory)
        self._blocks = [
            np.array(
                grouped.ARGS(
                    w=weight,
                    stride=stride,
                    between=0,
                    rows=rows,
                    columns=COLUMNS,
                    x=x,
                    pitch=0,
                    starts=slots.ctypes.data,
                    experts=1,
                    used=1,
                    shared=1,
                    y=y,
                    step=0,
                    scratch=scratch.ctypes.data,
                    near=near,
                    far=far,
                ),
                np.int64,
            )
            for near, far in CHOICES
        ]
        self._memory = (*memory, slots, scratch)
        self._call = REPLAY((products.product(form) if form else dense.product(dtype)).address)
        self._pool, self._threads = ThreadPoolExecutor(threads), threads

    def seconds(self) -> list[float]:
        """Of one run with each choice."""
        return [self._seconds(block.ctypes.data) for block in self._blocks]

    def _seconds(self, block: int) -> float:
        start = time.perf_counter()
        list(self._pool.map(lambda thread: self._call(block, thread, self._threads), range(self._threads)))
        return time.perf_counter() - start


def _file(dtype: DType) -> Path:
    name = hashlib.sha256(source_digest() + repr((str(dtype), CHOICES)).encode()).hexdigest()[:40]
    return cache_folder() / "kernels" / f"{name}.ahead"
