"""Products by tiles of AMX, which machines without it emulate."""

import doctest
import os
import subprocess
import sys
from itertools import chain, permutations
from pathlib import Path

import numpy as np
import pytest

from hocket.backends.cpu.kernels.matmul import amx_matmul
from hocket.backends.cpu.kernels.matmul.amx_weights import make_amx_weight_type
from hocket.backends.cpu.kernels.packed.activation_quantisation import (
    PANEL_ROWS,
    SPLIT_KIND,
    TERMS_BY_KIND,
    TILE_ROW_BYTES,
    TILED_KIND,
    compute_quantised_activation_bytes,
    quantise_activation_rows,
)
from hocket.backends.cpu.kernels.packed.format_table import FORMATS
from hocket.backends.cpu.simd import amx
from hocket.backends.cpu.steps.work_queue import QUEUE_BYTES
from hocket.graph.dtypes import DType
from hocket.ops.block_layouts import BLOCK_LAYOUTS
from hocket.ops.quantisation import bf16_to_f32, dequantise

from ...given.packed_rows import aligned_scratch, call, pack_rows, round_to_bf16, target_of, tile_operands
from ...given.random_rows import nightly_unless, random_rows

RNG = np.random.default_rng(11)
TRIED = (DType.Q4_0, DType.Q5_1, DType.Q8_0, DType.Q6_K, DType.IQ3_S, DType.BF16, DType.F16, DType.F32)
"""Types with a kernel in each run: each float, and packed types of different planes, scales, biases and code books.

`test_kernels` reads all packed types by the same functions, with the instructions of any processor.
"""
OF_TILES = ["kernels/test_amx_matmul.py", "kernels/test_amx_moe.py"]
STEPS = [
    f"execution/test_step_table.py::test_{case}"
    for case in (
        "threads_with_work_items_and_copies_of_their_own_compute_the_bits_of_one[40-q8_0]",
        "threads_with_work_items_and_copies_of_their_own_compute_the_bits_of_one[40-f16]",
        "halves_of_one_product_are_a_unit_where_both_begin_with_a_group[50-1056-2-False]",
        "units_of_routed_experts_are_computed_with_their_products[90-2-7]",
        "a_run_that_was_stopped_leaves_no_work_item_of_the_next_one_undone[2]",
    )
]
"""Whole steps with rows enough for tiles: products, chains of units, routed experts and work items that are left."""


def test_the_worked_example():
    assert doctest.testmod(amx).failed == 0


def test_rows_are_rounded_side_by_side():
    x = RNG.standard_normal((37, 96)).astype(np.float32)
    x[3, 5], x[36, 95] = np.nan, -np.inf
    tiles = target_of(x, TILED_KIND).view(np.uint16).reshape(2, 3, PANEL_ROWS, TILE_ROW_BYTES // 2)
    rows = tiles.transpose(0, 2, 1, 3).reshape(2 * PANEL_ROWS, 96)[:37]
    assert np.array_equal(bf16_to_f32(rows), round_to_bf16(x), equal_nan=True)


@pytest.mark.parametrize("kinds", [*permutations([SPLIT_KIND, TILED_KIND, 8])], ids=str)
def test_rows_are_rounded_in_several_formats_at_once(kinds: tuple[int, ...]):
    """As a norm's are where products with several types of weights read them."""
    x = RNG.standard_normal((37, 96)).astype(np.float32)
    targets = [aligned_scratch(compute_quantised_activation_bytes(*x.shape, kind)) for kind in kinds]
    words = [
        (target, compute_quantised_activation_bytes(1, 96, kind), kind)
        for target, kind in zip(targets, kinds, strict=True)
    ]
    for target in targets:
        target[:] = 0
    assert call(quantise_activation_rows, x, 4 * 96, *x.shape, len(kinds), *chain.from_iterable(words)) == 0
    for target, kind in zip(targets, kinds, strict=True):
        assert np.array_equal(target, target_of(x, kind))


def test_three_terms_hold_what_float32_does():
    """Check numbers of very different size. Values that round to infinity are infinite, and NaN stays."""
    x = (RNG.standard_normal((37, 96)) * 2.0 ** RNG.integers(-60, 60, (37, 96))).astype(np.float32)
    x[3, 5], x[36, 95], x[0, 0], x[1, 1] = np.nan, -np.inf, np.inf, 3.4e38
    tiles = (
        target_of(x, SPLIT_KIND)
        .view(np.uint16)
        .reshape(2, 3, TERMS_BY_KIND[SPLIT_KIND], PANEL_ROWS, TILE_ROW_BYTES // 2)
    )
    terms = bf16_to_f32(tiles.transpose(2, 0, 3, 1, 4).reshape(TERMS_BY_KIND[SPLIT_KIND], 2 * PANEL_ROWS, 96)[:, :37])
    x[1, 1] = np.inf
    assert np.array_equal(terms.sum(0, dtype=np.float64), x.astype(np.float64), equal_nan=True)


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 24, 33, 70, 545])
@pytest.mark.parametrize("dtype", nightly_unless(TRIED, [*FORMATS, DType.BF16, DType.F16, DType.F32]), ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(72, 768), (16, 256), (300, 2304)])
def test_a_product_is_that_of_weights_and_activations_in_tiles(dtype: DType, rows: int, columns: int, count: int):
    """Check rows that fill no tile, several weight panels, more columns than are expanded at once, and two chunks
    or spans.

    Threads draw work items; the first or the last thread does all of them.
    """
    raw, x = random_rows(dtype, rows, columns, RNG), RNG.standard_normal((count, columns)).astype(np.float32)
    weight, threads = pack_rows(dtype, raw, columns), 3
    scratch, tickets = aligned_scratch(threads * amx_matmul.SCRATCH_BYTES), np.zeros(QUEUE_BYTES, np.uint8)
    taken = make_amx_weight_type(dtype)
    tiles, pitch = (
        target_of(x, taken.activation_kind),
        compute_quantised_activation_bytes(1, columns, taken.activation_kind),
    )
    words = (weight, raw.shape[1], rows, columns, tiles, pitch, count)
    products = []
    for order in (range(threads), reversed(range(threads))):
        y = np.full((count, rows + 3), np.nan, np.float32)
        for thread in order:  # the others draw a ticket more of each span
            own = (*words, y, y.strides[0], scratch, tickets)
            assert call(amx_matmul.make_many_row_amx_matmul_kernel(taken), *own, thread=thread, threads=threads) == 0
        assert not tickets.any(), "the last thread lays out new tickets"
        products.append(y)
    assert np.array_equal(*products, equal_nan=True)
    w, v = tile_operands(dtype, dequantise(raw, dtype)), tile_operands(dtype, x)
    size = np.abs(v) @ np.abs(w).T
    assert (np.abs(y[:, :rows] - v @ w.T) <= 2e-6 * size + 1e-30).all(), "but for the order of float32 sums"
    assert np.isnan(y[:, rows:]).all(), "nothing is written beside the result"


@pytest.mark.parametrize("scale", [np.nan, np.inf])
def test_a_scale_or_an_activation_that_is_no_number_reaches_its_row_and_column_only(scale: float):
    """NaN and infinities are where the product in float64 has them. All other results are numbers."""
    raw, x = random_rows(DType.Q8_0, 40, 256, RNG), RNG.standard_normal((33, 256)).astype(np.float32)
    raw.view(BLOCK_LAYOUTS[DType.Q8_0]).reshape(40, -1)["d"][[5, 38], [3, 7]] = scale
    x[3, 70], x[32, 255] = np.nan, np.inf
    weight, taken = pack_rows(DType.Q8_0, raw, 256), make_amx_weight_type(DType.Q8_0)
    tiles = target_of(x, taken.activation_kind)
    pitch = compute_quantised_activation_bytes(1, 256, taken.activation_kind)
    scratch, tickets = aligned_scratch(amx_matmul.SCRATCH_BYTES), np.zeros(QUEUE_BYTES, np.uint8)
    y = np.zeros((33, 40), np.float32)
    own = (weight, raw.shape[1], 40, 256, tiles, pitch, 33, y, y.strides[0], scratch, tickets)
    assert call(amx_matmul.make_many_row_amx_matmul_kernel(taken), *own, thread=0, threads=1) == 0
    w, v = tile_operands(DType.Q8_0, dequantise(raw, DType.Q8_0)), tile_operands(DType.Q8_0, x)
    with np.errstate(invalid="ignore"):
        expected = v @ w.T
    assert np.isfinite(expected).sum() == 31 * 38
    for test in (np.isnan, np.isposinf, np.isneginf):
        assert np.array_equal(test(y), test(expected))


@pytest.mark.nightly(cases=1)
@pytest.mark.long
@pytest.mark.parametrize(
    ("without", "tests"),
    [
        ("", STEPS),
        ("", OF_TILES),
        ("avx512bf16", OF_TILES[:1]),
        ("avx512", OF_TILES),
    ],
)
def test_emulated_tiles_compute_the_same(without: str, tests: list[str]):
    """Products, chains and threads of whole steps where plain vector code stands for AMX."""
    surroundings = {**os.environ, "HOCKET_AMX": "emulated", "HOCKET_WITHOUT": without}
    files = [str(Path(__file__).parents[1] / name) for name in tests]
    run = ["pytest", "-q", "-x", "-n", "0", "--most", "2", "-k", "not emulated", *files]
    done = subprocess.run([sys.executable, "-m", *run], env=surroundings, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


def test_a_wrong_word_for_tiles_is_refused():
    script = "from hocket.backends.cpu import target_cpu; target_cpu.find_native_or_emulated_amx()"
    surroundings = {**os.environ, "HOCKET_AMX": "yes"}
    done = subprocess.run([sys.executable, "-c", script], env=surroundings, capture_output=True, text=True)
    assert done.returncode == 1
    assert "HOCKET_AMX is 'yes'; it may be emulated, or leave it out" in done.stderr
