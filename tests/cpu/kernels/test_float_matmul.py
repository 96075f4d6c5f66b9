"""Products of float weights: near the reference, and equal bits for every number of activation rows."""

from __future__ import annotations

import numpy as np
import pytest

from hocket.backends.cpu.kernels.matmul.float_matmul import make_float_matmul_kernel, make_float_weight_tiling
from hocket.graph.dtypes import DType
from hocket.ops.quantisation import bf16_to_f32, f32_to_bf16

from ...given.packed_rows import multiply_in_tiles

SHAPES = ((100, 576), (33, 64), (17, 2096), (50, 100), (5, 7), (70, 4112))


def multiply(w: np.ndarray, x: np.ndarray, dtype: DType) -> np.ndarray:
    """Multiply rows of x with rows of w in one thread, by the kernel."""
    kernel, tiling = make_float_matmul_kernel(dtype), make_float_weight_tiling(dtype)
    return multiply_in_tiles(kernel, tiling, w, w.strides[0], w.shape, x)


@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_beside_any_number_of_rows(dtype: DType, shape: tuple[int, int]):
    if dtype is not DType.F32 and shape[1] % 16:
        shape = shape[0], -(-shape[1] // 16) * 16
    rng = np.random.default_rng(11)
    plain, x = rng.standard_normal(shape, np.float32), rng.standard_normal((200, shape[1]), np.float32)
    w = f32_to_bf16(plain) if dtype is DType.BF16 else plain.astype(dtype.storage)
    alone = np.concatenate([multiply(w, x[i : i + 1], dtype) for i in range(len(x))])
    for count in (2, 3, 4, 6, 7, 8, 13, 16, 31, 200):
        together = multiply(w, x[:count].copy(), dtype)
        assert np.array_equal(together.view(np.int32), alone[:count].view(np.int32)), count
    exact = (bf16_to_f32(w) if dtype is DType.BF16 else w).astype(np.float64)
    np.testing.assert_array_less(np.abs(alone - x @ exact.T), 1e-6 * (np.abs(x) @ np.abs(exact).T) + 1e-30)
