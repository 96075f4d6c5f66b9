"""Products with weights of 16 bits by tiles of AMX, which machines without it emulate."""

import numpy as np
import pytest

from hocket.backends.cpu.kernels import tiled, tiled_dense
from hocket.backends.cpu.kernels.rounding import LINE, TALL, TERMS, TERMS_AGAIN, rounded_bytes
from hocket.backends.cpu.kernels.tickets import NBYTES
from hocket.graph.dtypes import DType
from hocket.ops.quants import bf16_to_f32, f32_to_bf16

from ..given.packed_rows import call, near, room, target_of

RNG = np.random.default_rng(13)
LEFT_OUT = 2.0**-24
"""What three terms of bfloat16 leave out, at most, of a number."""


@pytest.mark.parametrize("kind", [TERMS, TERMS_AGAIN])
def test_terms_stand_side_by_side_and_add_up(kind: int):
    x = RNG.standard_normal((37, 96)).astype(np.float32)
    x[0, 0], x[1, 1], x[36, 95] = np.inf, -np.inf, np.nan
    tiles = target_of(x, kind).view(np.uint16).reshape(2, 3, -kind, TALL, LINE // 2)
    terms = bf16_to_f32(tiles.transpose(2, 0, 3, 1, 4).reshape(-kind, 2 * TALL, 96)[:, :37]).astype(np.float64)
    assert np.array_equal(terms[0], near(x), equal_nan=True)
    assert not terms[1][np.isinf(x)].any(), "nothing is left of what is infinite"
    fine = np.isfinite(x)
    assert (np.abs(terms[:3].sum(0)[fine] - x[fine]) <= LEFT_OUT * np.abs(x[fine])).all()
    assert kind == TERMS or np.array_equal(terms[3:], terms[:2], equal_nan=True)


@pytest.mark.long(every=3)
@pytest.mark.parametrize("count", [1, 24, 70, 545])
@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16], ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(72, 576), (25, 32), (300, 2304)])
def test_a_product_is_as_good_as_its_terms(dtype: DType, rows: int, columns: int, count: int):
    """Rows that fill no tile, nor a group of the weight, whose last one ends where memory may end."""
    x = RNG.standard_normal((count, columns)).astype(np.float32)
    w = RNG.standard_normal((rows, columns)).astype(np.float32)
    stored = w.astype(np.float16) if dtype is DType.F16 else f32_to_bf16(w)
    exact = (stored if dtype is DType.F16 else bf16_to_f32(stored)).astype(np.float64)
    kind, y = tiled_dense.KINDS[dtype][0], np.full((count, rows + 3), np.nan, np.float32)
    words = (stored, 2 * columns, rows, -kind * columns, target_of(x, kind), rounded_bytes(1, columns, kind), count)
    words = (*words, y, y.strides[0], room(tiled.SCRATCH), np.zeros(NBYTES, np.uint8))
    assert call(tiled_dense.product(dtype), *words) == 0
    want, size = x.astype(np.float64) @ exact.T, np.abs(x.astype(np.float64)) @ np.abs(exact).T
    error = np.abs(y[:, :rows] - want)
    assert (error <= 2e-6 * size).all()
    assert np.sqrt((error**2).mean()) <= 1e-6 * np.sqrt((want**2).mean())
    assert np.isnan(y[:, rows:]).all(), "nothing is written beside the result"
