"""Products on CUDA devices, emulated: each kernel against exact integers."""

from __future__ import annotations

import numpy as np
import pytest

from hocket import ops
from hocket.backends.cupy.binding.weight_packing import (
    PLANE_LAYOUTS,
    pack_quantised_weight_for_kernels,
    pad_packed_spec_rows_to_units,
)
from hocket.backends.cupy.emulation.emulated_driver import EmulatedBackend, EmulatedDriver
from hocket.graph import Graph, Spec, input, weight
from hocket.graph.dtypes import DType
from hocket.graph.errors import BackendError
from hocket.ops.quantisation import dequantise
from hocket.scheduler import load, plan_for_group

from ...given.devices.emulation import needs_compiler
from ...given.devices.products import product, quantise_rows
from ...given.random_rows import random_rows

pytestmark = needs_compiler
RNG = np.random.default_rng(11)


@pytest.mark.parametrize("columns", [32, 96, 256])
def test_activations_are_rounded_to_127_steps_of_the_largest_in_a_block(columns):
    x = RNG.standard_normal((5, columns)).astype(np.float32)
    x[1, :32], x[2], x[3] = 0.0, x[2] * np.float32(1e-38), x[3] * np.float32(1e30)
    codes, scales, meant = quantise_rows(x, EmulatedDriver())
    blocks = x.reshape(5, -1, 32)
    step = np.abs(blocks).max(-1, keepdims=True) / 127
    assert (np.abs(meant - blocks) <= 0.5002 * step + 1e-44).all()
    d, minus, whole, first = np.moveaxis(scales, -1, 0)
    assert np.array_equal(minus, -np.float32(12582912) * d)
    assert np.array_equal(minus.astype(np.float64), -12582912.0 * d), "what the sums rest on is exact"
    sums = codes.reshape(5, -1, 2, 16).astype(np.int32).sum(-1)
    assert np.array_equal(whole, d * sums.sum(-1).astype(np.float32))
    assert np.array_equal(first, d * sums[..., 0].astype(np.float32))


def test_what_is_no_number_stays_so_in_its_block_alone():
    x = RNG.standard_normal((1, 96)).astype(np.float32)
    x[0, 40], x[0, 70] = np.nan, np.inf
    scales = quantise_rows(x, EmulatedDriver())[1][0, :, 0]
    assert np.isfinite(scales[0])
    assert not np.isfinite(scales[1:]).any()


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("number", [DType.I32, DType.I64], ids=str)
@pytest.mark.parametrize("dtype", PLANE_LAYOUTS, ids=str)
def test_packing_loses_nothing(dtype, number):
    spec = Spec((2, 37, 512), dtype)
    raw = random_rows(dtype, 74, 512, RNG)
    assert (
        len(pack_quantised_weight_for_kernels(raw.reshape(-1), spec))
        == pad_packed_spec_rows_to_units(spec).nbytes
        == 2 * 64 * raw.shape[1]
    )
    table = weight("w", (37, 512), dtype)
    ids = RNG.permutation(37).astype(number.storage)
    backend = EmulatedBackend()
    graph = Graph({"y": ops.get_rows(table, input("ids", (37,), number))})
    run = load(plan_for_group(graph, [(backend, backend.device(0))]), {"w": raw[:37]})
    assert np.array_equal(run.run({"ids": ids})["y"], dequantise(raw[:37], dtype)[ids])
    with pytest.raises(BackendError, match="id 37 names no row"):
        run.run({"ids": np.where(ids == 3, 37, ids)})


@pytest.mark.nightly(cases=67)
@pytest.mark.long(cases=1)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 9, 33, 65])
@pytest.mark.parametrize("dtype", PLANE_LAYOUTS, ids=str)
def test_a_packed_product_is_exact_in_its_rounded_activations(dtype, tokens):
    """In four orders of threads, to the bit; with rows that fill no unit, and blocks of columns that fill no stage."""
    columns = 256 if dtype.block > 32 or tokens % 2 else 96
    found, want, size = product(dtype, 70 if tokens < 9 else 35, columns, tokens, EmulatedBackend())
    assert all(np.array_equal(f, found[0]) for f in found)
    np.testing.assert_array_less(np.abs(found[0] - want), 2e-6 * size + 1e-30)


@pytest.mark.long(cases=1)
@pytest.mark.parametrize(
    ("columns", "tokens"),
    [(n, t) for n in (32, 160) for t in (1, 8, 70)] + [(2304, 1), (2304, 8), (8192, 4), (32768, 1)],
)
def test_any_number_of_columns_is_shared_by_warps(columns, tokens):
    found, want, size = product(DType.Q5_0, 33, columns, tokens, EmulatedBackend())
    np.testing.assert_array_less(np.abs(found[0] - want), 2e-6 * size + 1e-30)


@pytest.mark.parametrize("tokens", [1, 3, 40, 200])
@pytest.mark.parametrize("first", [0, 2])
def test_experts_take_the_slots_that_chose_them(tokens, first):
    """Slots of experts that are elsewhere are zero; an id that is none is an error."""
    rows, columns, experts, total, used = 33, 64, 3, 6, 2
    raw = random_rows(DType.Q8_0, experts * rows, columns, RNG).reshape(experts, rows, -1)
    x = RNG.standard_normal((tokens, 1, columns)).astype(np.float32)
    ids = RNG.integers(0, total, (tokens, used)).astype(np.int32)
    backend = EmulatedBackend()
    node = ops.mul_mat_id(
        weight("w", (experts, rows, columns), DType.Q8_0),
        input("x", x.shape),
        input("ids", ids.shape, DType.I32),
        first=first,
        total=total,
    )
    run = load(plan_for_group(Graph({"y": node}), [(backend, backend.device(0))]), {"w": raw})
    results = [run.run({"x": x, "ids": ids})["y"] for _ in range(3)]
    assert all(np.array_equal(f, results[0]) for f in results)
    w = dequantise(raw.reshape(experts * rows, -1), DType.Q8_0).reshape(experts, rows, columns).astype(np.float64)
    meant = quantise_rows(x[:, 0], EmulatedDriver())[2].reshape(tokens, columns)
    for t in range(tokens):
        for i in range(used):
            mine = ids[t, i] - first
            want = w[mine] @ meant[t] if 0 <= mine < experts else np.zeros(rows)
            size = np.abs(w[mine]) @ np.abs(meant[t]) if 0 <= mine < experts else np.zeros(rows)
            assert (np.abs(results[0][t, i] - want) <= 2e-6 * size).all()
    ids[-1, -1] = total
    with pytest.raises(BackendError, match=f"id {total} is none of {total} experts"):
        run.run({"x": x, "ids": ids})
    ids[-1, -1] = 0
    run.run({"x": x, "ids": ids})


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16], ids=str)
@pytest.mark.parametrize("shape", [(70, 33, 5), (1, 64, 64), (130, 96, 9), (70, 64, 4), (3, 41, 2)])
def test_weights_of_16_bits_lose_no_more_than_their_terms(dtype, shape):
    rows, columns, tokens = shape
    w, x = (
        RNG.standard_normal((rows, columns)).astype(np.float32),
        RNG.standard_normal((tokens, columns)).astype(np.float32),
    )
    rounded_weight = w.astype(np.float16) if dtype is DType.F16 else (w.view(np.uint32) >> 16).astype(np.uint16)
    exact = (
        rounded_weight.astype(np.float64)
        if dtype is DType.F16
        else (rounded_weight.astype(np.uint32) << 16).view(np.float32)
    )
    backend = EmulatedBackend()
    graph = Graph({"y": ops.mul_mat(weight("w", (rows, columns), dtype), input("x", (tokens, columns)))})
    run = load(plan_for_group(graph, [(backend, backend.device(0))]), {"w": rounded_weight})
    want, size = x.astype(np.float64) @ exact.T, np.abs(x) @ np.abs(exact).T
    assert (np.abs(run.run({"x": x})["y"] - want) <= (2.0**-16 if tokens > 4 else 2e-6) * size).all()


@pytest.mark.long
def test_views_of_packed_weights_are_read_as_float32():
    raw = random_rows(DType.Q4_K, 40, 512, RNG)
    x = RNG.standard_normal((3, 256)).astype(np.float32)
    part = ops.slice_(weight("w", (40, 512), DType.Q4_K), axis=-1, start=256, stop=512)
    backend = EmulatedBackend()
    graph = Graph({"y": ops.mul_mat(part, input("x", (3, 256)))})
    run = load(plan_for_group(graph, [(backend, backend.device(0))]), {"w": raw})
    want = x @ dequantise(raw, DType.Q4_K)[:, 256:].T
    np.testing.assert_allclose(run.run({"x": x})["y"], want, rtol=1e-4, atol=1e-4)
