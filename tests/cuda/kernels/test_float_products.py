"""Products with weights in float32 and many tokens on emulated devices: small integers give exact sums; mistakes in the
kernel are found."""

from __future__ import annotations

import re
from functools import partial

import numpy as np
import pytest

from hocket import ops
from hocket.backends.cupy.backend import DriverBackend
from hocket.backends.cupy.emulation.emulated_driver import EmulatedDriver
from hocket.graph import Graph, input, weight
from hocket.graph.dtypes import DType
from hocket.ops.quantisation import encode_array
from hocket.scheduler import load, plan_for_group

from ...given.devices.emulation import PAST_END, WRONG_RESULTS, finding, needs_compiler

pytestmark = needs_compiler


def is_right(rows, columns, tokens, matrices=1, dtype=DType.F32, *, is_transposed=False, backend=None):
    """Return whether four runs with different orders of threads are right."""
    rng = np.random.default_rng(0)
    backend = backend or DriverBackend(EmulatedDriver())
    w = rng.integers(-3, 4, (matrices, rows, columns)).astype(np.float32)
    x = rng.integers(-3, 4, (matrices, columns, tokens) if is_transposed else (matrices, tokens, columns)).astype(
        np.float32
    )
    x_input = input("x", x.shape)
    node = ops.mul_mat(weight("w", w.shape, dtype), ops.transpose(x_input) if is_transposed else x_input)
    run = load(plan_for_group(Graph({"y": node}), [(backend, backend.device(0))]), {"w": encode_array(w, dtype)})
    want = np.einsum("bnk,bmk->bmn", w.astype(np.float64), x.swapaxes(1, 2) if is_transposed else x)
    return all(np.array_equal(run.run({"x": x})["y"], want) for _ in range(4))


@pytest.mark.parametrize("tokens", [17, 31, 33, 64, 65, 130])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (31, 33), (128, 16), (129, 100), (260, 7)])
def test_sums_are_exact(rows, columns, tokens):
    assert is_right(rows, columns, tokens)


@pytest.mark.parametrize("columns", [0, 1023, 1024, 1025, 4099])
def test_the_sums_of_few_tiles_are_shared_out_among_blocks(columns):
    assert is_right(5, columns, 20, matrices=2)


@pytest.mark.parametrize("tokens", [3, 40])
@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16])
def test_operands_may_lie_anyhow(dtype, tokens):
    assert is_right(33, 260, tokens, matrices=3, dtype=dtype, is_transposed=True)


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("tokens", [1, 2, 3])
@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16])
@pytest.mark.parametrize(("rows", "columns"), [(1, 512), (5, 1031), (8, 2048), (2, 4099)])
def test_columns_of_few_rows_are_shared_out_among_warps(rows, columns, tokens, dtype):
    assert is_right(rows, columns, tokens, dtype=dtype)


def sum_is_right(rows, columns, tokens, dtype=DType.F32, backend=None):
    """Check sums over neighbouring rows of weights, as for the answers of experts."""
    rng = np.random.default_rng(2)
    backend = backend or DriverBackend(EmulatedDriver())
    w = rng.integers(-3, 4, (3, columns, rows)).astype(np.float32)
    x = rng.integers(-3, 4, (3, tokens, columns)).astype(np.float32)
    graph = Graph({"y": ops.mul_mat(ops.transpose(weight("w", w.shape, dtype)), input("x", x.shape))})
    y = load(plan_for_group(graph, [(backend, backend.device(0))]), {"w": encode_array(w, dtype)}).run({"x": x})["y"]
    return np.array_equal(y, np.einsum("bkn,bmk->bmn", w.astype(np.float64), x))


@pytest.mark.parametrize("tokens", [1, 3, 16])
@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (127, 10), (129, 64), (300, 65)])
def test_few_columns_of_rows_that_neighbour_are_added_up(rows, columns, tokens, dtype):
    assert sum_is_right(rows, columns, tokens, dtype)


@pytest.mark.long
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("blockIdx.x * 128 + threadIdx.x", "blockIdx.x * 64 + threadIdx.x", WRONG_RESULTS),
        ("for (i64 c = 0; c < a.k; c++) {", "for (i64 c = 1; c < a.k; c++) {", WRONG_RESULTS),
        (
            "if (r < rows) a.out.at[p.at[2] + (first + r) * a.n + row] = sum[r];",
            "a.out.at[p.at[2] + (first + r) * a.n + row] = sum[r];",
            PAST_END,
        ),
    ],
)
def test_a_mistake_in_a_sum_of_few_columns_is_found(old, new, message):
    assert re.search(
        message, finding("products.cu", old, new, lambda backend: sum_is_right(200, 10, 3, backend=backend))
    )


TILES, SHARED = partial(is_right, 130, 50, 70), partial(is_right, 70, 400, 33, 2)
PLANTS = {
    "a stage is read before it is there": ("next_w[i];\n        __syncthreads();", "next_w[i];", TILES),
    "a stage is written over while it is read": (
        "vs[j], sum[i][j]);\n        }\n        __syncthreads();",
        "vs[j], sum[i][j]);\n        }",
        TILES,
    ),
    "the end of a row is not zeros": ("c + i < end ? to_float", "true ? to_float", TILES),
    "rows past the last are read": ("min(n0 + w_row, a.n - 1)", "(n0 + w_row)", TILES),
    "columns past the last are written": ("if (m < a.m && n < a.n) out", "if (m < a.m) out", TILES),
    "the fours of another half": ("j / 4 * 64 + right", "j / 4 * 32 + right", TILES),
    "a part takes what belongs to the next": ("end = min(k0 + a.run, a.k)", "end = min(k0 + a.run + 1, a.k)", SHARED),
    "the last part is left out": (
        "for (i64 s = 0; s < a.splits; s++) sum +=",
        "for (i64 s = 1; s < a.splits; s++) sum +=",
        SHARED,
    ),
    "parts of another matrix": ("blockIdx.y * a.splits * a.count", "blockIdx.y * a.count", SHARED),
}


PAST_THE_END = ("the end of a row is not zeros", "rows past the last are read", "columns past the last are written")
"""Mistakes that the emulation stops."""
PAST_OUT = "writes next to word 1"

FEW = partial(is_right, 5, 2051, 2)
OF_FEW = {
    "a warp takes the columns of another": ("warp % parts * 32 + lane", "lane"),
    "the last part is left out": ("for (int i = 1; i < parts; i++) sum", "for (int i = 1; i < parts - 1; i++) sum"),
    "the rest of a row is added by every warp": ("c = pieces + own;", "c = pieces + lane;"),
    "rows past the last are written": ("if (first + r < made.rows) out[r] = sum", "out[r] = sum"),
    "parts of another row are added": ("room[warp + i][n][r]", "room[warp + i][n][0]"),
}


def unit_is_right(rows, columns, backend=None):
    """Of a gated unit each warp has one row of both products."""
    rng = np.random.default_rng(1)
    backend = backend or DriverBackend(EmulatedDriver())
    up, gate = (rng.integers(-1, 2, (rows, columns)).astype(np.float32) for _ in range(2))
    x = rng.integers(-1, 2, (2, columns)).astype(np.float32)
    x_input, specs = input("x", x.shape), {"up": up, "gate": gate}
    products = {name: ops.mul_mat(weight(name, w.shape), x_input) for name, w in specs.items()}
    graph = Graph({"y": ops.swiglu(products["gate"], products["up"])})
    y = load(plan_for_group(graph, [(backend, backend.device(0))]), specs).run({"x": x})["y"]
    gate_result = (x @ gate.T).astype(np.float64)
    return np.allclose(y, gate_result / (1 + np.exp(-gate_result)) * (x @ up.T), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("rows", "columns"), [(1, 512), (3, 1031), (7, 2048)])
def test_columns_of_a_gated_unit_are_shared_out_among_warps(rows, columns):
    assert unit_is_right(rows, columns)


@pytest.mark.long
def test_a_row_past_the_last_of_a_gated_unit_is_found():
    edit = ("dense.cu", "if (warp % parts > 0 || !real) return;", "if (warp % parts > 0) return;")
    assert PAST_OUT in finding(*edit, lambda backend: unit_is_right(3, 1024, backend))


@pytest.mark.long
@pytest.mark.nightly(cases=2)
@pytest.mark.parametrize("name", OF_FEW)
def test_a_mistake_in_a_product_of_few_rows_is_found(name):
    message = PAST_OUT if name == "rows past the last are written" else WRONG_RESULTS
    assert message in finding("dense.cu", *OF_FEW[name], lambda backend: FEW(backend=backend))


@pytest.mark.nightly(cases=3)
@pytest.mark.long
@pytest.mark.parametrize("name", PLANTS)
def test_a_mistake_in_a_product_is_found(name):
    old, new, right = PLANTS[name]
    message = PAST_END if name in PAST_THE_END else WRONG_RESULTS
    assert re.search(message, finding("products.cu", old, new, lambda backend: right(backend=backend)))


@pytest.mark.parametrize("right", [TILES, SHARED])
def test_without_a_mistake_nothing_is_found(right):
    assert right()
