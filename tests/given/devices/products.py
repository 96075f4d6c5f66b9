"""Products with packed weights on emulated CUDA devices, and the numbers that they must be exactly."""

from __future__ import annotations

import numpy as np

from hocket import ops
from hocket.backends.base import Tensor, contiguous_strides
from hocket.backends.cupy.binding.launches import Launches
from hocket.backends.cupy.emulation.emulated import EmulatedBackend, EmulatedDriver
from hocket.backends.cupy.kernels import packed
from hocket.backends.operands import Operand
from hocket.graph import Graph, input, weight
from hocket.graph.dtypes import DType
from hocket.ops.quants import dequantise
from hocket.scheduler import load, plan_for

from ..random_rows import random_rows


def operand(array: np.ndarray) -> Operand:
    dtype = {"f4": DType.F32, "i4": DType.I32, "i1": DType.I8}[array.dtype.str[1:]]
    return Operand(array.ctypes.data, Tensor(0, 0, array.shape, contiguous_strides(array.shape), dtype))


def rounded(x: np.ndarray, driver: EmulatedDriver) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows as the kernel rounds them: codes, scales, and the numbers that they stand for."""
    rows, columns = x.shape
    codes, scales = np.zeros((rows, columns), np.int8), np.zeros((rows, columns // 32, 4), np.float32)
    launches = Launches(keep=lambda _: 0)
    words = [operand(x), columns, rows, columns // 32, operand(codes), operand(scales)]
    launches.add(packed.SHARED["round_rows"], -(-rows * -(-columns // 128) // 8), 256, words)
    driver.record(launches.items, driver.device(0))()
    with np.errstate(invalid="ignore"):
        meant = codes.reshape(rows, -1, 32).astype(np.float64) * scales[..., :1]
    return codes, scales, meant


def product(dtype: DType, rows: int, columns: int, tokens: int, backend: EmulatedBackend):
    """A product, and what it must be: exact in the rounded activations."""
    rng = np.random.default_rng((rows, columns, tokens))
    raw, x = random_rows(dtype, rows, columns, rng), rng.standard_normal((tokens, columns)).astype(np.float32)
    graph = Graph({"y": ops.mul_mat(weight("w", (rows, columns), dtype), input("x", (tokens, columns)))})
    run = load(plan_for(graph, [(backend, backend.device(0))]), {"w": raw})
    meant = rounded(x, EmulatedDriver())[2].reshape(tokens, columns)
    w = dequantise(raw, dtype).astype(np.float64)
    return [run.run({"x": x})["y"] for _ in range(4)], meant @ w.T, np.abs(meant) @ np.abs(w).T
