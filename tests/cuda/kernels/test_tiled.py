"""Products of many tokens in 16-bit terms on emulated CUDA devices, compared with float64 less the omitted terms."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

from hocket import ops
from hocket.backends.base import Tensor
from hocket.backends.cupy.backend import DriverBackend
from hocket.backends.cupy.binding.launch_builder import LaunchBuilder
from hocket.backends.cupy.binding.weight_packing import PLANE_LAYOUTS
from hocket.backends.cupy.device.device_limits import KIB, LARGEST_LIMITS, KernelLimits, find_kernel_limits
from hocket.backends.cupy.device.driver import KernelLaunch
from hocket.backends.cupy.emulation.emulated_driver import EmulatedBackend, EmulatedDriver
from hocket.backends.cupy.kernels.elementwise import CUDA_TYPE_NAMES
from hocket.backends.cupy.kernels.products import tiled
from hocket.backends.fusion.operands import Operand
from hocket.graph import Graph, input, weight
from hocket.graph.dtypes import DType
from hocket.ops.quantisation import dequantise
from hocket.scheduler import load, plan_for_group

from ...given.devices.attention import by_candidates
from ...given.devices.emulation import needs_compiler
from ...given.devices.products import dense, half_bits_to_float64, run_unpacked_product, tiles_of, to_half_bits
from ...given.random_rows import random_rows

pytestmark = needs_compiler
RNG = np.random.default_rng(5)
LEFT_OUT = {DType.F16: 2.0**-22, DType.BF16: 2.0**-17}
"""Of a number, by its two terms."""
SUMMED = 2e-6
"""Of the size of its terms, by a sum in float32."""


class Noting(EmulatedDriver):
    """A driver that records the names of launched kernels."""

    def __init__(self, limits: KernelLimits = LARGEST_LIMITS) -> None:
        super().__init__(limits=limits)
        self.names = []

    def record(self, launches, on):
        self.names += [launch.kernel.name for launch in launches if isinstance(launch, KernelLaunch)]
        return super().record(launches, on)


@pytest.mark.nightly(cases=40)
@pytest.mark.long
@pytest.mark.parametrize(
    ("tile", "shares", "kernel"),
    [
        *((tile, shares, f"tiled<{{}}, {tile}>") for tile, shares in ((tiled.SMALL_TILE, 1), (tiled.LARGE_TILE, 1))),
        *((tiled.TALL_TILE, shares, f"tiled<{{}}, {tiled.TALL_TILE}>") for shares in (1, 2)),
        *((tiled.WARPGROUP_TILE, shares, "grouped<{}, 2>") for shares in (1, 2, 4)),
        *((tiled.CLUSTER_TILE, shares, "clustered<{}, 2>") for shares in (1, 2, 4)),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "shape", [(70, 136, 9), (131, 33, 140), (64, 64, 64), (1, 7, 65), (300, 200, 130), (500, 328, 300)], ids=str
)
@pytest.mark.parametrize("dtype", LEFT_OUT, ids=str)
def test_weights_of_16_bits_lose_no_more_than_terms_leave_out(dtype, shape, tile, shares, kernel):
    driver = Noting()
    with tiles_of(lambda *_: (tile, shares)):
        results, want, size = dense(dtype, *shape, DriverBackend(driver))
    assert all(np.array_equal(y, results[0]) for y in results), "an order of threads shows"
    assert kernel.format(CUDA_TYPE_NAMES[dtype]) in driver.names
    assert (np.abs(results[0] - want) <= (LEFT_OUT[dtype] + SUMMED) * size).all()
    nmse = ((results[0] - want) ** 2).sum(1) / (size**2).sum(1)
    assert nmse.max() < {DType.F16: 1e-14, DType.BF16: 2e-11}[dtype]


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("shape", [(70, 136, 9), (300, 200, 130)], ids=str)
@pytest.mark.parametrize(
    ("tile", "terms"), [(tiled.WARPGROUP_TILE, 1), (tiled.CLUSTER_TILE, 1), (tiled.LARGE_TILE, 2)], ids=str
)
@pytest.mark.parametrize("dtype", LEFT_OUT, ids=str)
def test_what_need_not_be_exact_is_one_term_of_warpgroups(dtype, tile, terms, shape):
    driver = Noting()
    with tiles_of(lambda *_: (tile, 1)):
        results, want, size = dense(dtype, *shape, DriverBackend(driver), is_exact=False)
    assert all(np.array_equal(y, results[0]) for y in results), "an order of threads shows"
    split = "split_tiles" if tile == tiled.CLUSTER_TILE else "split_rows"
    assert f"{split}<{CUDA_TYPE_NAMES[dtype]}, {terms}>" in driver.names
    left_out = tiled.find_activation_rounding_error(dtype, is_exact=False) if terms == 1 else LEFT_OUT[dtype]
    assert (np.abs(results[0] - want) <= (left_out + SUMMED) * size).all()


@pytest.mark.long
@pytest.mark.parametrize("multiprocessors", [1, 32])
@pytest.mark.parametrize("shape", [(70, 136, 9), (300, 200, 300), (129, 61, 513), (130, 72, 516)], ids=str)
@pytest.mark.parametrize("dtype", LEFT_OUT, ids=str)
def test_warps_with_roles_multiply_as_clusters_do(dtype, shape, multiprocessors, monkeypatch):
    """A cluster takes one tile after another, or each has one; the order of sums is the same."""
    monkeypatch.setattr(EmulatedDriver, "count_multiprocessors", lambda self, on: multiprocessors)
    results = []
    for choose, kernel in ((nullcontext, "clustered<{}, 1>"), (by_candidates, "multiply_by_roles<{}>")):
        driver = Noting()
        with choose(), tiles_of(lambda *_: (tiled.CLUSTER_TILE, 1)):
            found, want, size = dense(dtype, *shape, DriverBackend(driver), is_exact=False)
        assert driver.names[-1] == kernel.format(CUDA_TYPE_NAMES[dtype])
        assert (np.abs(found[0] - want) <= (tiled.find_activation_rounding_error(dtype, False) + SUMMED) * size).all()
        results += found
    assert all(np.array_equal(y, results[0]) for y in results)


def test_blocks_of_a_persistent_kernel_are_resident_at_once():
    count = tiled._count_persistent_blocks
    assert [count(132, cluster, 1000) for cluster in (1, 2, 4)] == [132, 128, 128]
    assert [count(132, cluster, 3) for cluster in (1, 2, 4)] == [3, 6, 12]
    assert [count(2, cluster, 3) for cluster in (1, 2, 4)] == [2, 2, 4]


@pytest.mark.nightly(cases=23)
@pytest.mark.long
@pytest.mark.parametrize("columns", [256, 512])
@pytest.mark.parametrize(
    ("limits", "kernel"),
    [(find_kernel_limits("80"), "tiled_packed<{}>"), (find_kernel_limits("90"), "grouped_packed<{}>")],
)
@pytest.mark.parametrize("once", [1 << 30, 130])
@pytest.mark.parametrize("dtype", PLANE_LAYOUTS, ids=str)
def test_packed_weights_are_multiplied_as_bfloat16(dtype, once, limits, kernel, columns, monkeypatch):
    """Unpacked tile by tile, or once for all."""
    if limits.has_warpgroups and once == 130:
        kernel = "unpacked<{}>"
    monkeypatch.setattr(tiled, "MIN_UNPACKED_ENTRIES", once)
    monkeypatch.setattr(tiled, "FULL_DEVICE_TILES", 2)  # a tile and a bit, shared by two blocks
    monkeypatch.setattr(tiled, "MIN_SPLIT_COLUMNS", 64)
    columns += 0 if dtype.block > 32 else 32
    driver = Noting(limits)
    results, want, size = run_unpacked_product(dtype, 150, columns, 130, DriverBackend(driver))
    assert kernel.format(dtype.name) in driver.names
    assert all(np.array_equal(y, results[0]) for y in results), "an order of threads shows"
    assert (np.abs(results[0] - want) <= 2e-5 * size + 1e-30).all()


@pytest.mark.long
@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16, DType.Q8_0], ids=str)
def test_slots_of_experts_fill_tiles(dtype, monkeypatch):
    monkeypatch.setattr(tiled, "MIN_BF16_TILES", 0)
    experts, tokens, columns = 3, 260, 96
    if dtype is DType.Q8_0:
        raw = random_rows(dtype, experts * 40, columns, RNG)
        w = half_bits_to_float64(to_half_bits(dequantise(raw, dtype), DType.BF16)).reshape(experts, 40, columns)
        raw = raw.reshape(experts, 40, -1)
    else:
        raw = to_half_bits(RNG.standard_normal((experts, 40, columns)).astype(np.float32), dtype)
        w = half_bits_to_float64(raw)
    x = RNG.standard_normal((tokens, 1, columns)).astype(np.float32)
    ids = np.stack([RNG.permutation(4)[:2] for _ in range(tokens)]).astype(np.int32)
    driver = Noting()
    backend = DriverBackend(driver)
    node = ops.mul_mat_id(
        weight("w", (experts, 40, columns), dtype), input("x", x.shape), input("ids", ids.shape, DType.I32), total=4
    )
    run = load(plan_for_group(Graph({"y": node}), [(backend, backend.device(0))]), {"w": raw})
    y = run.run({"x": x, "ids": ids})["y"]
    assert any(name.startswith("tiled") for name in driver.names)
    x16 = half_bits_to_float64(to_half_bits(x, DType.BF16)) if dtype is DType.Q8_0 else x
    here = (ids < experts)[..., None]
    want = np.einsum("tink,tk->tin", w[np.clip(ids, 0, 2)], x16[:, 0]) * here
    assert (np.abs(y - want) <= 2e-5 * np.abs(want).max()).all()
    assert not y[~here[..., 0]].any()


@pytest.mark.parametrize(("matrices", "tokens"), [(2, 300), (3, 9)])
def test_each_matrix_begins_a_tile_of_a_cluster(matrices, tokens):
    w = to_half_bits(RNG.standard_normal((matrices, 130, 72)).astype(np.float32), DType.F16)
    x = RNG.standard_normal((matrices, tokens, 72)).astype(np.float32)
    driver = Noting()
    backend = DriverBackend(driver)
    graph = Graph({"y": ops.mul_mat(weight("w", w.shape, DType.F16), input("x", x.shape))})
    with tiles_of(lambda *_: (tiled.CLUSTER_TILE, 1)):
        y = load(plan_for_group(graph, [(backend, backend.device(0))]), {"w": w}).run({"x": x})["y"]
    assert "clustered<half_bits, 2>" in driver.names
    want = x @ half_bits_to_float64(w).swapaxes(1, 2)
    assert (np.abs(y - want) <= 2e-6 * np.abs(x) @ np.abs(half_bits_to_float64(w)).swapaxes(1, 2)).all()


@pytest.mark.parametrize(
    ("blocks", "size"), [(32, 4), (25, 4), (24, 4), (21, 2), (9, 2), (8, 4), (6, 2), (5, 1), (3, 1), (1, 1)]
)
def test_clusters_are_as_large_as_leaves_hardly_any_block_without_rows(blocks, size):
    assert tiled._choose_largest_cluster_with_few_idle(blocks) == size


@pytest.mark.parametrize(
    ("entries", "chosen"),
    [
        (128, tiled.WARPGROUP_TILE),
        (129, tiled.CLUSTER_TILE),
        (256, tiled.CLUSTER_TILE),
        (300, tiled.WARPGROUP_TILE),
        (600, tiled.CLUSTER_TILE),
    ],
)
def test_clusters_multiply_entries_that_fill_their_tiles(entries, chosen):
    w = Operand(0, Tensor(0, 0, (65536, 4096), (4096, 1), DType.BF16))
    launches = LaunchBuilder(upload_array=lambda array: 0, limits=find_kernel_limits("90"))
    assert tiled.choose_tile_shape(launches, w, entries, 1, True) == (chosen, 1)


@pytest.mark.parametrize("dtype", LEFT_OUT, ids=str)
def test_the_largest_and_smallest_numbers_stay_what_they_are(dtype):
    columns = 64
    x = np.ones((9, columns), np.float32)
    x[0] = 3.397e38  # as bfloat16, to the nearest, infinite
    x[1] = np.finfo(np.float32).tiny
    x[2], x[2, 0] = 1e-3, 1e30
    x[3] = 0
    x[4, 5], x[5, 6], x[6, 7] = np.inf, -np.inf, np.nan
    backend = EmulatedBackend()
    graph = Graph({"y": ops.mul_mat(weight("w", (columns, columns), dtype), input("x", x.shape))})
    run = load(
        plan_for_group(graph, [(backend, backend.device(0))]),
        {"w": to_half_bits(np.eye(columns, dtype=np.float32), dtype)},
    )
    y = run.run({"x": x})["y"]
    # Half a row's largest number is as far as half reaches down.
    floor = np.abs(x).max(1, keepdims=True) * 2.0**-38 if dtype is DType.F16 else 0
    finite = np.isfinite(x).all(1)
    left_out = np.abs(y[finite] - x[finite])
    assert (left_out <= (LEFT_OUT[dtype] * np.abs(x) + floor)[finite]).all()
    assert not np.isfinite(y[~finite]).any(), "0 times infinity is no number"


def test_numbers_that_are_none_spoil_their_row_alone():
    x = RNG.standard_normal((9, 64)).astype(np.float32)
    x[3, 5], x[4, 5] = np.inf, 5e37  # times a weight of up to 6 is finite
    w = to_half_bits(np.abs(RNG.standard_normal((16, 64))).astype(np.float32) + 1, DType.F16)
    backend = EmulatedBackend()
    graph = Graph({"y": ops.mul_mat(weight("w", w.shape, DType.F16), input("x", x.shape))})
    y = load(plan_for_group(graph, [(backend, backend.device(0))]), {"w": w}).run({"x": x})["y"]
    assert (y[3] == np.inf).all()
    assert np.isfinite(np.delete(y, 3, 0)).all()


@pytest.mark.parametrize(
    ("rows", "entries", "is_even", "chosen"),
    [
        (4096, 512, True, (tiled.TALL_TILE, 2)),
        (4096, 512, False, (tiled.LARGE_TILE, 1)),
        (14336, 512, True, (tiled.TALL_TILE, 1)),
        (14336, 512, False, (tiled.TALL_TILE, 1)),
        (14336, 100, True, (tiled.LARGE_TILE, 1)),
    ],
)
@pytest.mark.parametrize("limits", [find_kernel_limits("80"), find_kernel_limits("90")], ids=str)
def test_tiles_are_as_large_as_fill_a_device(rows, entries, is_even, chosen, limits):
    tile, shares = chosen
    by_warpgroups = limits.has_warpgroups and tile == tiled.TALL_TILE
    by_clusters = by_warpgroups and is_even
    floats, packed = (Operand(0, Tensor(0, 0, (rows, 4096), (4096, 1), t)) for t in (DType.BF16, DType.Q4_K))
    launches = LaunchBuilder(upload_array=lambda array: 0, limits=limits)
    assert tiled.choose_tile_shape(launches, floats, entries, 1, is_even) == (
        tiled.CLUSTER_TILE if by_clusters else tiled.WARPGROUP_TILE if by_warpgroups else tile,
        shares,
    )
    bytes_are_better = entries < tiled.MIN_BF16_ENTRIES
    instead = None if bytes_are_better else (tiled.WARPGROUP_TILE, shares) if by_warpgroups else (tiled.LARGE_TILE, 1)
    assert tiled.choose_tile_shape(launches, packed, entries, 1, is_even) == instead


@pytest.mark.parametrize(("rows", "columns", "shares"), [(2048, 4096, 4), (1024, 4096, 8), (2048, 2048, 4)])
def test_blocks_of_warpgroups_share_the_columns_of_few_tiles(rows, columns, shares):
    floats, packed = (Operand(0, Tensor(0, 0, (rows, columns), (columns, 1), t)) for t in (DType.BF16, DType.Q4_K))
    launches = LaunchBuilder(upload_array=lambda array: 0, limits=find_kernel_limits("90"))
    assert tiled.choose_tile_shape(launches, floats, 512, 1, True) == (tiled.CLUSTER_TILE, shares)
    assert tiled.choose_tile_shape(launches, packed, 512, 1, True) == (tiled.WARPGROUP_TILE, shares)


def test_no_more_than_two_blocks_share_columns_elsewhere():
    floats = Operand(0, Tensor(0, 0, (1024, 4096), (4096, 1), DType.BF16))
    launches = LaunchBuilder(upload_array=lambda array: 0, limits=find_kernel_limits("80"))
    assert tiled.choose_tile_shape(launches, floats, 512, 1, True) == (tiled.SMALL_TILE, 1)


@pytest.mark.parametrize(
    ("dtype", "kernel"),
    [(DType.BF16, f"tiled<bf16_bits, {tiled.SMALL_TILE}>"), (DType.Q8_0, "many<Q8_0, 4, 1, 8>")],
    ids=str,
)
def test_what_does_not_fit_the_memory_of_a_block_is_multiplied_otherwise(dtype, kernel, monkeypatch):
    monkeypatch.setattr(tiled, "FULL_DEVICE_TILES", 0)
    monkeypatch.setattr(tiled, "MIN_BF16_TILES", 0)
    driver = Noting(KernelLimits(64 * KIB, has_warpgroups=True))
    backend = DriverBackend(driver)
    raw = random_rows(dtype, 8, 64, RNG) if dtype is DType.Q8_0 else to_half_bits(np.ones((8, 64), np.float32), dtype)
    graph = Graph({"y": ops.mul_mat(weight("w", (8, 64), dtype), input("x", (130, 64)))})
    run = load(plan_for_group(graph, [(backend, backend.device(0))]), {"w": raw})
    run.run({"x": np.ones((130, 64), np.float32)})
    assert driver.names[-1] == kernel
