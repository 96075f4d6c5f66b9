"""Quantisers of weights: exact bytes where ggml defines them, else bounds of the error that a planted fault exceeds."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from hocket.backends.cpu.kernels.quantisers.row_quantiser import KERNELS, WRITABLE_DTYPES, quantise_rows
from hocket.graph import GraphError
from hocket.graph.dtypes import DType
from hocket.ops.block_layouts import BLOCK_LAYOUTS
from hocket.ops.quantisation import dequantise

from ...given.quantiser_rows import normal_rows, special_rows, weighted_nmse

DEFINED_DTYPES = (DType.Q4_0, DType.Q4_1, DType.Q5_0, DType.Q5_1, DType.Q8_0, DType.MXFP4, DType.TQ1_0, DType.TQ2_0)
"""Types with one result in ggml."""
MAX_NMSE = {
    DType.Q4_1: 0.00495,
    DType.Q5_1: 0.00114,
    DType.Q2_K: 0.0730,
    DType.Q3_K: 0.0218,
    DType.Q4_K: 0.00500,
    DType.Q5_K: 0.00122,
    DType.Q6_K: 0.000293,
    DType.IQ3_S: 0.0176,
    DType.IQ4_NL: 0.00562,
    DType.IQ4_XS: 0.00570,
}
"""Bounds for normal numbers, 3 % above the error of these quantisers. The errors of llama-quantize b11434 are above."""
SEARCHED = tuple(MAX_NMSE)
IMPORTANCE_GAIN = 0.97
"""The largest ratio of weighted errors with and without importances."""


@pytest.mark.long
@pytest.mark.parametrize("dtype", DEFINED_DTYPES, ids=str)
@pytest.mark.parametrize("rows", [normal_rows, special_rows])
def test_types_that_ggml_defines_have_its_bytes(dtype, rows):
    x = normal_rows() if rows is normal_rows else special_rows(dtype.block)
    with np.errstate(all="ignore"):
        want = gguf.quants.quantize(x, gguf.GGMLQuantizationType(dtype.ggml))
    assert np.array_equal(quantise_rows(x, dtype, searches=False), want.view(np.uint8).reshape(len(x), -1))


@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16], ids=str)
def test_floats_are_rounded_to_nearest(dtype):
    x = np.concatenate(
        [normal_rows(5, 27), np.float32([[1e-40, -3e-39, 1.00390625, 1.01171875, 65504, 0] + [0.1] * 21])]
    )
    want = gguf.quants.quantize(x, gguf.GGMLQuantizationType(dtype.ggml))
    assert quantise_rows(x, dtype).tobytes() == want.tobytes()


@pytest.mark.long
@pytest.mark.parametrize("dtype", SEARCHED, ids=str)
def test_the_error_of_normal_numbers_is_below_a_bound_that_one_wrong_byte_per_block_exceeds(dtype):
    x = normal_rows()
    raw = quantise_rows(x, dtype)
    assert weighted_nmse(dequantise(raw, dtype), x) < MAX_NMSE[dtype]
    wrong = raw.copy().reshape(-1).view(BLOCK_LAYOUTS[dtype])
    wrong["qs"][:, 3] ^= 0x33
    assert weighted_nmse(dequantise(wrong.view(np.uint8).reshape(raw.shape), dtype), x) > MAX_NMSE[dtype]


@pytest.mark.long
@pytest.mark.parametrize("dtype", SEARCHED, ids=str)
def test_special_rows_are_stored_with_finite_scales_and_small_errors(dtype):
    x = special_rows(dtype.block)
    got = dequantise(quantise_rows(x, dtype), dtype)
    assert np.isfinite(got).all()
    assert not got[0].any()
    small = 0.2 if dtype is DType.IQ3_S else 0.01
    # A single number is the peak of its block: it is stored with the precision of the scales.
    for row, column in ((3, 5), (4, 7), (11, 0)):
        assert got[row, column] == pytest.approx(x[row, column], rel=0.07)
        # IQ types have no code of 0. IQ3_S has few entries with the largest magnitude and small others.
        assert np.abs(np.delete(got[row], column)).max() <= small * np.abs(x[row, column])
    for row in (1, 2, 5):
        assert np.abs(got[row] - x[row]).max() <= 0.07 * np.abs(x[row]).max()
    for row in (6, 7, 8, 10):
        assert weighted_nmse(got[row], x[row]) < 0.08


@pytest.mark.parametrize("dtype", [*SEARCHED, DType.Q4_0, DType.Q5_0], ids=str)
def test_importances_lower_the_error_of_important_columns(dtype):
    x = normal_rows()
    importance = np.random.default_rng(4).random(x.shape[1]).astype(np.float32) ** 3
    plain, weighted = (dequantise(quantise_rows(x, dtype, w), dtype) for w in (None, importance))
    assert weighted_nmse(weighted, x, importance) < IMPORTANCE_GAIN * weighted_nmse(plain, x, importance)


@pytest.mark.long
@pytest.mark.parametrize("importance", [np.zeros(1024), np.full(1024, 1e-30), np.full(1024, 1e30)], ids=str)
def test_equal_importances_of_any_size_give_equal_bytes(importance):
    x = normal_rows(4)
    want = quantise_rows(x, DType.Q4_K, np.ones(1024, np.float32))
    assert np.array_equal(quantise_rows(x, DType.Q4_K, importance.astype(np.float32)), want)


def test_columns_without_importance_still_have_a_scale():
    x = normal_rows(4)
    importance = np.ones(1024, np.float32)
    importance[:256] = 0
    got = dequantise(quantise_rows(x, DType.Q4_K, importance), DType.Q4_K)
    assert weighted_nmse(got[:, :256], x[:, :256]) < 2 * MAX_NMSE[DType.Q4_K]


@pytest.mark.long
@pytest.mark.parametrize("dtype", KERNELS, ids=str)
def test_rows_do_not_depend_on_each_other(dtype):
    x = normal_rows(5, 512)
    whole = quantise_rows(x, dtype)
    assert all(np.array_equal(quantise_rows(x[i : i + 1], dtype)[0], whole[i]) for i in range(5))
    assert quantise_rows(x[:0], dtype).shape == (0, whole.shape[1])


def test_dtypes_without_quantiser_and_broken_blocks_are_refused():
    with pytest.raises(GraphError, match=r"^quantise_rows\(q8_K\): there is no quantiser for this dtype; need "):
        quantise_rows(normal_rows(1), DType.Q8_K)
    with pytest.raises(GraphError, match=r"^quantise_rows\(q4_K\): rows have 288 columns; need a multiple of 256$"):
        quantise_rows(normal_rows(1, 288), DType.Q4_K)
    assert DType.Q8_K not in WRITABLE_DTYPES
