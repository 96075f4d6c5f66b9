"""Quantisers of IQ1, IQ2 and IQ3_XXS against the best entries of an exhaustive search, and of Q1_0, Q2_0 and NVFP4."""

from __future__ import annotations

import numpy as np
import pytest

from hocket.backends.cpu.kernels.quantisers.row_quantiser import quantise_rows
from hocket.graph.dtypes import DType
from hocket.ops.block_layouts import BLOCK_LAYOUTS
from hocket.ops.quantisation import dequantise, load_code_book

from ...given.quantiser_rows import normal_rows, special_rows, weighted_nmse

LATTICES = (DType.IQ3_XXS, DType.IQ2_S, DType.IQ2_XS, DType.IQ2_XXS, DType.IQ1_M, DType.IQ1_S)
ERROR_BOUNDS = {
    DType.IQ3_XXS: 0.0329,
    DType.IQ2_S: 0.0597,
    DType.IQ2_XS: 0.0852,
    DType.IQ2_XXS: 0.1134,
    DType.IQ1_M: 0.1810,
    DType.IQ1_S: 0.2097,
    DType.Q1_0: 0.3669,
    DType.Q2_0: 0.1305,
    DType.NVFP4: 0.00752,
}
"""Bounds for normal numbers, 2 % above the error of these quantisers. The errors of llama-quantize b11434 are above."""
EVEN_SIGNS = (DType.IQ3_XXS, DType.IQ2_XS, DType.IQ2_XXS)
MAX_EXCESS = 1.01
"""The largest ratio of the error to the error of the best entries for the stored scales."""


def read_scales(raw: np.ndarray, dtype: DType) -> np.ndarray:
    """The scale of each group of 8 numbers, [blocks, 32]: the factor of an entry of the code book."""
    block = raw.reshape(-1).view(BLOCK_LAYOUTS[dtype])
    if dtype is DType.IQ2_XXS:
        codes, count = block["qs"][:, 1::2] >> 28, 4
    elif dtype is DType.IQ3_XXS:
        codes, count = block["signs"] >> 28, 4
    else:
        codes = np.stack([block["scales"] & 15, block["scales"] >> 4], axis=-1).reshape(len(block), 16)
        count = 2
    d = block["d"].astype(np.float64)[:, None] * (2 * codes.astype(np.float64) + 1)
    return np.repeat(d, count, axis=1) / (4 if dtype is DType.IQ3_XXS else 8)


def find_best_errors(x: np.ndarray, scales: np.ndarray, weights: np.ndarray, dtype: DType) -> np.ndarray:
    """The smallest weighted error of each group of 8 numbers over all entries and permitted signs."""
    book = load_code_book(dtype).astype(np.float64)
    groups, w = np.abs(x).reshape(-1, 8).astype(np.float64), weights.reshape(-1, 8)
    is_odd = (x.reshape(-1, 8) < 0).sum(1) % 2 == 1
    best = np.empty(len(groups))
    for i, (g, s) in enumerate(zip(groups, scales.reshape(-1), strict=True)):
        parts = []
        for part in range(0, 8, book.shape[1]):
            columns = slice(part, part + book.shape[1])
            errors = ((s * book - g[columns]) ** 2) @ w[i, columns]
            flips = errors + (4 * s * book * g[columns] * w[i, columns]).min(1)
            parts.append((errors.min(), flips.min()))
        best[i] = sum(plain for plain, _ in parts)
        if is_odd[i] and dtype in EVEN_SIGNS:
            best[i] += min(flipped - plain for plain, flipped in parts)
    return best


@pytest.mark.long
@pytest.mark.parametrize("dtype", [d for d in LATTICES if d not in (DType.IQ1_M, DType.IQ1_S)], ids=str)
def test_entries_and_signs_are_nearly_as_good_as_the_best_of_all(dtype):
    x = normal_rows(8, 512)
    importance = (np.random.default_rng(5).random(512) ** 2 + 0.01).astype(np.float32)
    importance /= importance.mean()
    raw = quantise_rows(x, dtype, importance)
    blocks = x.reshape(-1, 256).astype(np.float64)
    rms = (blocks**2).mean(1, keepdims=True)
    weights = np.tile(importance.reshape(-1, 256), (8, 1)) * np.sqrt(blocks**2 + rms)
    error = ((dequantise(raw, dtype).reshape(-1, 256) - blocks) ** 2 * weights).reshape(-1, 8).sum(1)
    best = find_best_errors(x, read_scales(raw, dtype), weights, dtype)
    assert (error >= best * (1 - 1e-5)).all()
    assert error.sum() <= MAX_EXCESS * best.sum()


@pytest.mark.long
@pytest.mark.parametrize("dtype", ERROR_BOUNDS, ids=str)
def test_the_error_of_normal_numbers_is_below_a_bound_that_one_wrong_byte_per_block_exceeds(dtype):
    x = normal_rows()
    raw = quantise_rows(x, dtype)
    assert weighted_nmse(dequantise(raw, dtype), x) < ERROR_BOUNDS[dtype]
    wrong = raw.copy().reshape(-1, dtype.block_bytes)
    wrong[:, 7] ^= 0x5A
    assert weighted_nmse(dequantise(wrong.reshape(raw.shape), dtype), x) > ERROR_BOUNDS[dtype]


@pytest.mark.long
@pytest.mark.parametrize("dtype", ERROR_BOUNDS, ids=str)
def test_special_rows_are_stored_with_finite_scales(dtype):
    x = special_rows(dtype.block)
    got = dequantise(quantise_rows(x, dtype), dtype)
    assert np.isfinite(got).all()
    assert not got[0].any()
    for row in (1, 2, 5):
        assert np.abs(got[row] - x[row]).max() <= 0.2 * np.abs(x[row]).max()


@pytest.mark.long
@pytest.mark.parametrize("dtype", ERROR_BOUNDS, ids=str)
def test_importances_lower_the_error_of_important_columns(dtype):
    x = normal_rows()
    importance = np.random.default_rng(4).random(x.shape[1]).astype(np.float32) ** 3
    plain, weighted = (dequantise(quantise_rows(x, dtype, w), dtype) for w in (None, importance))
    assert weighted_nmse(weighted, x, importance) < 0.995 * weighted_nmse(plain, x, importance)


def test_ternary_numbers_are_stored_exactly_in_two_bits():
    x = np.random.default_rng(6).integers(-1, 2, (4, 256)).astype(np.float32) * np.float32(0.5)
    assert np.array_equal(dequantise(quantise_rows(x, DType.Q2_0), DType.Q2_0), x)


def test_signs_have_the_mean_magnitude_as_their_scale():
    x = normal_rows(2, 256)
    got = dequantise(quantise_rows(x, DType.Q1_0), DType.Q1_0)
    assert np.array_equal(got < 0, x < 0)
    assert np.abs(got).reshape(-1, 128)[:, 0] == pytest.approx(np.abs(x).reshape(-1, 128).mean(1), rel=1e-3)
