"""Products with weights on processors that this machine is not, or is with less."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hocket.backends.cpu.kernels import rounding
from hocket.backends.cpu.kernels.formats import FORMATS
from hocket.graph.dtypes import DType
from hocket.ops.quants import decoded, dequantise, encoded

from ..given.other_processors import ProductOnArm, translated
from ..given.packed_rows import packed, rounded
from ..given.random_rows import random_rows

RNG = np.random.default_rng(6)


@pytest.mark.long
@pytest.mark.parametrize(
    ("without", "op"),
    [("avx512,avxvnni", "mul_mat"), ("avx512,avxvnni", "rms_norm|softmax"), ("avx512vnni", "mul_mat")],
)
def test_a_lesser_processor_computes_the_same(without: str, op: str):
    """All packed types, and plain vector code, for vectors of 256 bits and without dot products of bytes."""
    surroundings = {**os.environ, "HOCKET_WITHOUT": without}
    command = [sys.executable, "-m", "hocket", "check", "--backend", "cpu", "--op", op]
    done = subprocess.run(command, env=surroundings, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 pass" not in done.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    ("like", "features", "instruction"),
    [
        ("x86-64-v3", "avxvnni", "vpdpbusd"),
        ("x86-64-v3", "", "vpmaddubsw"),
        ("aarch64", "i8mm", "usdot"),
        ("aarch64", "dotprod", "sdot"),
    ],
)
def test_products_use_the_best_instruction_that_adds_up_bytes(like: str, features: str, instruction: str):
    text = translated(like, features, "text", "q8_0", "q4_K", "iq4_nl")
    assert text.count(f"\t{instruction}\t") >= 3 * 16


ON_ARM = [("q8_0", ""), ("q8_0", "dotprod"), ("q8_0", "i8mm"), ("q4_K", "dotprod"), ("q6_K", ""), ("iq4_xs", "dotprod")]


def words_of(w: np.ndarray, stride: int, columns: int, x: np.ndarray, pitch: int, y: np.ndarray) -> tuple[object, ...]:
    """Those of a product of rows that all meet the same weight."""
    count, rows = y.shape
    slots, scratch = np.array([0, count, count, *range(count)], np.int32), np.zeros(1 << 21, np.uint8)
    return w, stride, 0, rows, columns, x, pitch, slots, 1, 1, 1, y, 4 * rows, scratch, 64, 128


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "features"), ON_ARM)
def test_a_packed_product_on_arm_is_exact_in_its_rounded_activations(dtype: str, features: str, tmp_path: Path):
    form, rows, columns = FORMATS[DType(dtype)], 72, 768
    raw = random_rows(form.dtype, rows, columns, RNG)
    program = ProductOnArm(tmp_path, features, dtype, f"hocket.products.product.{dtype}")
    weight, w = packed(form.dtype, raw, columns), dequantise(raw, form.dtype).astype(np.float64)
    for count in (1, 3, 18):
        q, meant = rounded(RNG.standard_normal((count, columns)).astype(np.float32), form.zero)
        y = np.full((count, rows), np.nan, np.float32)
        program(words_of(weight, raw.shape[1], columns, q, rounding.rounded_bytes(1, columns), y), threads=2)
        np.testing.assert_array_less(np.abs(y - meant @ w.T), 1e-6 * (np.abs(meant) @ np.abs(w).T) + 1e-30)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_product_with_plain_weights_on_arm_is_as_exact_as_float32(dtype: str, tmp_path: Path):
    rows, columns = 40, 304
    raw = encoded(RNG.standard_normal((rows, columns)).astype(np.float32), DType(dtype))
    w = decoded(raw, DType(dtype)).astype(np.float64)
    program = ProductOnArm(tmp_path, "", dtype, f"hocket.dense.product.{dtype}")
    for count in (1, 4, 20):
        x, y = RNG.standard_normal((count, columns)).astype(np.float32), np.full((count, rows), np.nan, np.float32)
        program(words_of(raw, raw.nbytes // rows, columns, x, 4 * columns, y), threads=2)
        size = np.abs(x).astype(np.float64) @ np.abs(w).T
        np.testing.assert_array_less(np.abs(y - x.astype(np.float64) @ w.T), 3e-6 * size + 1e-30)
