"""Products with packed weights on emulated CUDA devices, and the numbers that they must be exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np

from hocket import ops
from hocket.backends.base import Tensor, contiguous_strides
from hocket.backends.cupy.backend import DriverBackend
from hocket.backends.cupy.binding.launch_builder import LaunchBuilder
from hocket.backends.cupy.emulation.emulated_driver import EmulatedBackend, EmulatedDriver
from hocket.backends.cupy.kernels.products import packed, tiled
from hocket.backends.cupy.trial_binding import compute_scratch_bytes_at_placeholders
from hocket.backends.fusion.operands import Operand
from hocket.graph import Graph, input, weight
from hocket.graph.dtypes import DType
from hocket.ops.quantisation import dequantise
from hocket.scheduler import load, plan_for_group

from ..random_rows import random_rows

Choice = tuple[tiled.TileShape, int]
"""Tiles, and how many blocks share the columns of one."""


@contextmanager
def tiles_of(choose: Callable[[Operand, bool], Choice]) -> Iterator[None]:
    """Choose the tiles of products with many tokens by `choose`, for any number of tiles.

    `choose` gets a weight, and whether all its matrices have equally many tokens.
    """
    compute_scratch_bytes_at_placeholders.cache_clear()  # it knows how much scratch other tiles take
    chosen = patch.object(tiled, "choose_tile_shape", lambda _launches, w, _entries, _n, is_even: choose(w, is_even))
    try:
        with chosen:
            yield
    finally:
        compute_scratch_bytes_at_placeholders.cache_clear()


def operand(array: np.ndarray) -> Operand:
    dtype = {"f4": DType.F32, "i4": DType.I32, "i1": DType.I8}[array.dtype.str[1:]]
    return Operand(array.ctypes.data, Tensor(0, 0, array.shape, contiguous_strides(array.shape), dtype))


def quantise_rows(x: np.ndarray, driver: EmulatedDriver) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows as the kernel rounds them: codes, scales, and the numbers that they stand for."""
    rows, columns = x.shape
    codes, scales = np.zeros((rows, columns), np.int8), np.zeros((rows, columns // 32, 4), np.float32)
    launches = LaunchBuilder(upload_array=lambda _: 0)
    words = [operand(x), columns, rows, columns // 32, operand(codes), operand(scales)]
    launches.add_launch(packed.SHARED_SOURCE["round_rows"], -(-rows * -(-columns // 128) // 8), 256, words)
    driver.record(launches.items, driver.device(0))()
    with np.errstate(invalid="ignore"):
        meant = codes.reshape(rows, -1, 32).astype(np.float64) * scales[..., :1]
    return codes, scales, meant


def product(dtype: DType, rows: int, columns: int, tokens: int, backend: EmulatedBackend):
    """Return a product and its expected result, exact for the rounded activations."""
    rng = np.random.default_rng((rows, columns, tokens))
    raw, x = random_rows(dtype, rows, columns, rng), rng.standard_normal((tokens, columns)).astype(np.float32)
    graph = Graph({"y": ops.mul_mat(weight("w", (rows, columns), dtype), input("x", (tokens, columns)))})
    run = load(plan_for_group(graph, [(backend, backend.device(0))]), {"w": raw})
    meant = quantise_rows(x, EmulatedDriver())[2].reshape(tokens, columns)
    w = dequantise(raw, dtype).astype(np.float64)
    return [run.run({"x": x})["y"] for _ in range(4)], meant @ w.T, np.abs(meant) @ np.abs(w).T


def to_half_bits(array: np.ndarray, dtype: DType) -> np.ndarray:
    """Float32 as the bits of a type of 16 bits, to the nearest, ties to even."""
    if dtype is DType.F16:
        return array.astype(np.float16)
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def half_bits_to_float64(array: np.ndarray) -> np.ndarray:
    """Return the numbers of `to_half_bits` as float64."""
    if array.dtype == np.float16:
        return array.astype(np.float64)
    return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def dense(dtype: DType, rows: int, columns: int, tokens: int, backend: DriverBackend, is_exact: bool = True):
    """Return a 16-bit product in four orders of threads, its expected result, and the size of its terms.

    Rows of x are of different sizes.
    """
    rng = np.random.default_rng((rows, columns, tokens))
    w = to_half_bits(rng.standard_normal((rows, columns)).astype(np.float32), dtype)
    x = (rng.standard_normal((tokens, columns)) * 10.0 ** rng.integers(-6, 6, (tokens, 1))).astype(np.float32)
    graph = Graph({"y": ops.mul_mat(weight("w", w.shape, dtype), input("x", x.shape), exact=is_exact)})
    run = load(plan_for_group(graph, [(backend, backend.device(0))]), {"w": w})
    wide = half_bits_to_float64(w)
    return [run.run({"x": x})["y"] for _ in range(4)], x @ wide.T, np.abs(x) @ np.abs(wide).T


def run_unpacked_product(dtype: DType, rows: int, columns: int, tokens: int, backend: DriverBackend):
    """Return a product with packed weights that become bfloat16, as x does, in four orders of threads.

    Also return the expected result and the size of its terms.
    """
    rng = np.random.default_rng((rows, columns, tokens))
    raw, x = random_rows(dtype, rows, columns, rng), rng.standard_normal((tokens, columns)).astype(np.float32)
    graph = Graph({"y": ops.mul_mat(weight("w", (rows, columns), dtype), input("x", x.shape))})
    with patch.object(tiled, "MIN_BF16_TILES", 0):
        run = load(plan_for_group(graph, [(backend, backend.device(0))]), {"w": raw})
    w, x16 = (half_bits_to_float64(to_half_bits(array, DType.BF16)) for array in (dequantise(raw, dtype), x))
    return [run.run({"x": x})["y"] for _ in range(4)], x16 @ w.T, np.abs(x16) @ np.abs(w).T
