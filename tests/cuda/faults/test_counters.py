"""Memory requests of kernels: the main path stays within its access budget, and planted faults are found."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hocket.backends.base import Tensor
from hocket.backends.cupy.backend import DriverBackend
from hocket.backends.cupy.binding.launch_builder import LaunchBuilder
from hocket.backends.cupy.device.device_limits import find_kernel_limits
from hocket.backends.cupy.device.driver import AddressSpan, KernelSource, find_kernel_path, read_kernel_text
from hocket.backends.cupy.emulation.access_budget import ACCESS_ALLOWANCES, MAIN_PATH_CASES, list_budget_violations
from hocket.backends.cupy.emulation.access_counters import AccessCountingDriver, run_with_counters
from hocket.backends.cupy.kernels import collective
from hocket.backends.cupy.kernels.products import tiled
from hocket.backends.fusion.operands import BoundInstruction, Operand
from hocket.cli import main
from hocket.conformance.reports.emulator_checks import emulate_cases_and_count_accesses
from hocket.graph import DType

from ...given.devices.attention import by_candidates, by_warps
from ...given.devices.chains import MEMORY_REQUESTS, run_graph
from ...given.devices.delta_launches import copy_aligned, operand
from ...given.devices.emulation import EditedSource, needs_compiler
from ...given.devices.products import tiles_of
from ...given.devices.recorded import MORE, find_access_regressions

pytestmark = [needs_compiler, pytest.mark.long()]
SIZE, SUMMED = 1024, 1 << 15
"""Numbers that warps walk over, and of a summand."""
PLANTED = """
struct Walked { i64 load, first, store, put, get; const float *x; float *out; };
template <class Number> __global__ void walked(const __grid_constant__ Walked a) {
    SHARED(held, Number[32 * 33]);
    const int lane = threadIdx.x;
    held[lane * a.put % (32 * 33)] = (Number)a.x[lane * a.load + a.first];
    __syncwarp();
    a.out[lane * a.store] = (float)held[lane * a.get % (32 * 33)];
}
"""
NAMES = ("walked<float>", "walked<double>")
SOURCE = EditedSource(
    "walked.cu",
    NAMES,
    body="".join(read_kernel_text(name) for name in KernelSource("", ()).files[:-1]) + PLANTED,
)


def count_walk(load=1, first=0, store=1, put=1, get=1, kernel=NAMES[0]):
    """Return the access counters of a warp that walks with these steps, in elements."""
    driver = AccessCountingDriver()
    device = driver.device(0)
    memory = [driver.alloc(4 * SIZE + 4, device) for _ in range(2)]
    operands = [Operand(driver.address(m), Tensor(i, 0, (SIZE + 1,), (1,), DType.F32)) for i, m in enumerate(memory)]
    launches = LaunchBuilder(upload_array=lambda array: 0)
    launches.add_launch(SOURCE[kernel], 1, 32, [load, first, store, put, get, *operands])
    return run_with_counters(launches.items[0])


@pytest.mark.parametrize("kernel", NAMES)
def test_adjacent_lanes_have_the_smallest_cost(kernel):
    assert list_budget_violations(count_walk(kernel=kernel)) == []
    costs = {site.access_kind: (site.requests, site.cost, site.minimum_cost) for site in count_walk().sites}
    assert costs == {
        "global load of 4 bytes": (1, 4, 4),
        "global store of 4 bytes": (1, 4, 4),
        "shared load of 4 bytes": (1, 1, 1),
        "shared store of 4 bytes": (1, 1, 1),
    }


@pytest.mark.parametrize(("steps", "what", "cost"), [
    ({"load": 2}, "global load", 8),
    ({"load": 4}, "global load", 16),
    ({"load": 8}, "global load", 32),
    ({"load": 32}, "global load", 32),
    ({"first": 1}, "global load", 5),
    ({"first": 7}, "global load", 5),
    ({"store": 2}, "global store", 8),
    ({"store": 4}, "global store", 16),
    ({"store": 32}, "global store", 32),
    *(({"put": step}, "shared store", step) for step in (2, 4, 8, 16)),
    *(({"get": step}, "shared load", step) for step in (2, 4, 8, 16)),
    ({"put": 32}, "shared store", 32),
    ({"get": 12}, "shared load", 4),
], ids=str)  # fmt: skip
def test_what_is_planted_is_counted_and_named(steps, what, cost):
    found = count_walk(**steps)
    (site,) = (site for site in found.sites if site.access_kind.startswith(what))
    assert (site.requests, site.cost) == (1, cost)
    assert any(f"a {site.access_kind}" in why for why in list_budget_violations(found))


@pytest.mark.parametrize("step", [2, 4, 8])
def test_conflicts_of_wide_accesses_are_found_by_their_lower_bound(step):
    (site,) = (s for s in count_walk(put=step, kernel=NAMES[1]).sites if s.access_kind == "shared store of 8 bytes")
    assert site.cost == 2 * step == step * site.minimum_cost


def test_lanes_that_want_the_same_number_ask_once():
    costs = {site.access_kind: (site.cost, site.minimum_cost) for site in count_walk(load=0, get=0).sites}
    assert costs["global load of 4 bytes"] == costs["shared load of 4 bytes"] == (1, 1)


def test_unneeded_bytes_of_sectors_are_moved():
    found = count_walk(load=32)
    assert (found.sector_bytes, found.requested_bytes) == (32 * 32 + 32 * 4, 2 * 32 * 4)


def test_what_is_allowed_is_one_line():
    for allowed in ACCESS_ALLOWANCES:
        lines = find_kernel_path(allowed.file).read_text("utf-8").splitlines()
        assert sum(allowed.code in line for line in lines) == 1, f"{allowed.file}: {allowed.code}"


@pytest.mark.nightly(cases=12)
@pytest.mark.parametrize("case", MAIN_PATH_CASES)
def test_kernels_of_the_main_path_ask_for_no_more_than_they_must(case):
    """As often as is recorded, and with as much under way; docs/add-a-cuda-kernel.md says how the page is written."""
    found = emulate_cases_and_count_accesses([case])
    assert found
    assert [
        why for counted in found for why in (*list_budget_violations(counted), *find_access_regressions(counted))
    ] == []


@pytest.mark.nightly(cases=5)
@pytest.mark.parametrize("kernel", MEMORY_REQUESTS)
def test_kernels_of_chains_ask_for_no_more_than_they_must(kernel):
    driver, (graph, requests) = AccessCountingDriver(), MEMORY_REQUESTS[kernel]
    run_graph(graph(False), True, backend=DriverBackend(driver))
    assert list_budget_violations(driver.counters[kernel]) == []
    assert sum(site.requests for site in driver.counters[kernel].sites) <= MORE * requests


def test_a_sum_over_devices_asks_for_no_more_than_it_must():
    """Of a device that reads half of either summand, and writes it to both results."""
    x, y, sum_x, sum_y = (copy_aligned(np.ones(SUMMED, np.float32)) for _ in range(4))
    room = np.zeros(1 << 20, np.uint8)  # for signals, the signal pad and pushed data; the sum touches none of it
    offers = [
        collective.OneDeviceCollectiveOperands(operand(x), operand(sum_x)),
        collective.OneDeviceCollectiveOperands(operand(y), operand(sum_y)),
    ]
    peers = tuple(collective.PeerAddresses(room.ctypes.data, 0, room.ctypes.data, {0: operands}) for operands in offers)
    launches = LaunchBuilder(upload_array=lambda array: 0)
    call = BoundInstruction("all_reduce", (operand(x),), (operand(sum_x),), {"sequence": 0}, 0)
    collective.bind_peer_collective(launches, call, collective.PeerGroup(0, room.ctypes.data, 1.0, peers))
    (launch,) = (item for item in launches.items if item.kernel.name == "sum_parts<float>")
    spans = tuple(AddressSpan(0, array.ctypes.data, array.ctypes.data + array.nbytes) for array in (x, y, sum_x, sum_y))
    counted = run_with_counters(replace(launch, spans=spans))
    assert list_budget_violations(counted) == []
    assert counted.block_requested_bytes == counted.requested_bytes == 4 * SUMMED * 4 // 2


def test_packed_weights_that_are_unpacked_ask_for_no_more_than_they_must(monkeypatch):
    monkeypatch.setattr(tiled, "MIN_BF16_TILES", 1)  # one tile stands for many
    found = emulate_cases_and_count_accesses(["mul_mat(w=q4_K[128,256], x=f32[128,256])"])
    assert [counted.launch.kernel.name for counted in found] == ["split_rows<bf16_bits, 1>", "tiled_packed<Q4_K>"]
    assert [counted.copies_in_flight for counted in found] == [None, 2]
    assert [why for counted in found for why in list_budget_violations(counted)] == []


@pytest.mark.parametrize(
    ("dtype", "exact", "kernel", "terms"),
    [
        ("bf16", "true", "grouped<bf16_bits, 2>", 2),
        ("bf16", "false", "grouped<bf16_bits, 1>", 1),
        ("q4_K", "true", "grouped_packed<Q4_K>", 1),
    ],
    ids=str,
)
def test_warpgroups_ask_for_no_more_than_they_must(dtype, exact, kernel, terms, monkeypatch):
    monkeypatch.setattr(tiled, "FULL_DEVICE_TILES", 1)
    found = emulate_cases_and_count_accesses([f"mul_mat(w={dtype}[256,256], x=f32[128,256], exact={exact})"])
    assert found[-1].launch.kernel.name == kernel
    assert found[-1].copies_in_flight == 3 - terms, "shared memory has room for as many stages"
    assert [why for counted in found for why in list_budget_violations(counted)] == []
    (read,) = (site for site in found[-1].sites if site.source_line.startswith("wgmma.cuh"))
    # A product reads 64 x 16 and 256 x 16 numbers: four wavefronts for 32 lanes, wherever they lie.
    products = 256 // 16 * 2 * terms
    assert read.cost == read.minimum_cost == products * (64 + 256) * 16 * 2 // 128


@pytest.mark.nightly(cases=2)
@pytest.mark.parametrize(
    ("exact", "terms", "shares"), [("true", 2, 1), ("true", 2, 2), ("false", 1, 2), ("false", 1, 1)]
)
def test_clusters_ask_for_no_more_than_they_must(exact, terms, shares):
    columns = 256 * shares
    with tiles_of(lambda *_: (tiled.CLUSTER_TILE, shares)):
        found = emulate_cases_and_count_accesses(
            [f"mul_mat(w=bf16[256,{columns}], x=f32[256,{columns}], exact={exact})"]
        )
    names = [counted.launch.kernel.name for counted in found]
    assert names == [f"{kernel}<bf16_bits, {terms}>" for kernel in ("split_tiles", "clustered")]
    assert [counted.copies_in_flight for counted in found] == [None, 3 - terms]
    assert [why for counted in found for why in list_budget_violations(counted)] == []
    (read,) = (site for site in found[-1].sites if site.source_line.startswith("wgmma.cuh"))
    products = columns // 16 * 4 * terms  # 64 x 16 and 256 x 16 numbers each
    assert read.cost == read.minimum_cost == products * (64 + 256) * 16 * 2 // 128


PROMPT = "attention(q=f32[32,4,128], k=bf16[128,1,128], v=bf16[128,1,128], scale=0.1)"


def test_attention_by_warpgroups_reads_no_more_than_it_must():
    (found,) = emulate_cases_and_count_accesses([PROMPT])
    assert found.launch.kernel.name == "attend_warpgroups<bf16_bits, 128, 128, 128, 8>"
    read = [site for site in found.sites if site.source_line.startswith("wgmma.cuh")]
    # Per warpgroup: scores, 64 x 16 and 128 x 16 numbers eight times; sums, which have their weights in registers.
    numbers = 2 * 8 * ((64 + 128) * 16 + 128 * 16)
    assert sum(site.cost for site in read) == sum(site.minimum_cost for site in read) == numbers * 2 // 128


def test_attention_by_warps_with_roles_reads_no_more_than_it_must():
    with by_candidates():
        (found,) = emulate_cases_and_count_accesses([PROMPT])
    assert found.launch.kernel.name == "attend_roles<bf16_bits, 128, 128, 128>"
    read = [site for site in found.sites if site.source_line.startswith("wgmma.cuh")]
    numbers = 2 * 8 * ((64 + 128) * 16 + 128 * 16)  # as above
    assert sum(site.cost for site in read) == sum(site.minimum_cost for site in read) == numbers * 2 // 128


def test_attention_by_single_warps_asks_for_no_more_than_it_must():
    with by_warps():
        (found,) = emulate_cases_and_count_accesses([PROMPT])
    assert found.launch.kernel.name == "attend_short<bf16_bits, 128, 128, 64, 2, 8, false>"
    assert (list_budget_violations(found), found.copies_in_flight) == ([], 1)


def test_a_delta_net_that_is_scanned_without_clusters_asks_for_no_more_than_it_must():
    (case,) = (case for case in MAIN_PATH_CASES if case.startswith("gated_delta_net(q=f32[70"))
    prepare, scan = emulate_cases_and_count_accesses([case], find_kernel_limits("80"))
    assert scan.launch.kernel.name == "delta_scan<64, 32, 16, false, true>"
    assert [why for counted in (prepare, scan) for why in list_budget_violations(counted)] == []
    assert (prepare.copies_in_flight, scan.copies_in_flight) == (None, 1)


def test_what_is_allowed_has_a_reason():
    assert all(a.max_ratio > 1 and a.reason for a in ACCESS_ALLOWANCES)


def test_the_command_prints_the_table(capsys):
    assert main(["check", "--backend", "cuda-emulated", "--counters", "--case", "add(a=f32[64], b=f32[64])"]) == 0
    text = capsys.readouterr().out
    assert "| global load of 4 bytes | 4 |" in text
    assert "Allowed" not in text, "that concerns other kernels"
    assert main(["check", "--backend", "numpy", "--counters"]) == 2
    assert main(["check", "--backend", "cuda-emulated", "--counters", "--case", "reshape(x=f32[6], shape=(6,))"]) == 2
    assert "these cases launch no kernel" in capsys.readouterr().err
