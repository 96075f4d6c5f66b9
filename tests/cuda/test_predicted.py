"""The predicted work of a launch on an absent GPU: the counts of machine-code blocks, and their time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hocket import ops
from hocket.backends.base import Tensor
from hocket.backends.capabilities import OTHER_OPS
from hocket.backends.cupy.binding.launch_builder import LaunchBuilder
from hocket.backends.cupy.device import disassembly, nvrtc
from hocket.backends.cupy.device.driver import KernelSource, read_kernel_text
from hocket.backends.cupy.emulation.access_counters import AccessCountingDriver, run_with_counters
from hocket.backends.cupy.kernels.products import packed, tiled
from hocket.backends.cupy.predicted_speeds import load_predicted_speeds
from hocket.backends.cupy.time_model.block_counts import estimate_block_executions
from hocket.backends.cupy.time_model.control_flow import build_control_flow_graphs
from hocket.backends.cupy.time_model.launch_time import GPUS, LaunchWork, estimate_launch_time
from hocket.backends.cupy.time_model.launch_work import estimate_launch_work
from hocket.backends.fusion.operands import Operand
from hocket.conformance.reports.emulator_checks import emulate_cases_and_count_accesses
from hocket.graph import DType, Graph, input, weight
from hocket.ops import REGISTRY, mul_mat
from hocket.scheduler import plan_for_group, plan_from_json, plan_to_json
from hocket.scheduler.costs.device_catalogue import DATA_SHEETS
from hocket.scheduler.costs.hardware import WorkCounter
from hocket.scheduler.costs.simulated_devices import parse_simulated_group

from ..given.devices.emulation import EditedSource, needs_compiler
from ..given.devices.tools import needs

pytestmark = pytest.mark.long()
ARCHITECTURES = ("sm_80", "sm_90a")
PLANTED = """#line 1 "planted.cu"
struct Walked { i64 count, step; const float *x; float *out; };
template <int KIND> __global__ void walked(const __grid_constant__ Walked a) {
    float sum = 0.0f;
    i64 at = threadIdx.x;
    if (KIND == 0)
#pragma unroll 1
        for (i64 i = 0; i < a.count; i++) sum += a.x[threadIdx.x + i * a.step];
    if (KIND == 1)
#pragma unroll 8
        for (i64 i = 0; i < a.count; i++) sum += a.x[threadIdx.x + i * a.step];
    if (KIND == 2)
#pragma unroll 1
        for (i64 i = 0; i < a.count; i++) at = (i64)a.x[at];
    if (KIND == 3 && threadIdx.x < 32)
#pragma unroll 1
        for (i64 i = 0; i < a.count; i++) sum += a.x[threadIdx.x + i * a.step];
    a.out[threadIdx.x] = sum + (float)at;
}
"""
NAMES = tuple(f"walked<{kind}>" for kind in range(4))
SOURCE = EditedSource(
    "planted.cu",
    NAMES,
    body="".join(f'#line 1 "prelude.cuh"\n{read_kernel_text(name)}' for name in KernelSource("", ()).files[:-1])
    + PLANTED,
)
ONE, SERIAL, CHAIN, SOME = NAMES


def test_the_extra_work_of_a_longer_launch_is_repeated_as_predicted():
    short = LaunchWork(2, 64, 99, 1024, 300.0, 10.0, 0.0, 0.0, 40.0, 500.0, 500.0, 2.0)
    longer = replace(short, block_count=4, warp_instructions=500.0, cache_bytes=800.0, dependent_loads=3.0)
    assert short.extrapolate(longer, 0) == short
    assert short.extrapolate(longer, 1) == longer
    assert short.extrapolate(longer, 10) == replace(
        short, block_count=22, warp_instructions=2300.0, cache_bytes=3500.0, dependent_loads=12.0
    )


@pytest.fixture(scope="module")
def _tools():
    pytest.importorskip("scipy")
    needs(nvrtc.load_nvrtc, disassembly.find_nvdisasm)


def count_launch(kernel, times, step=0):
    """Return the block counts of a block of 128 threads that runs its loop `times` times."""
    driver = AccessCountingDriver()
    memory = [driver.alloc(4096, driver.device(0)) for _ in range(2)]
    operands = [Operand(driver.address(m), Tensor(i, 0, (1024,), (1,), DType.F32)) for i, m in enumerate(memory)]
    launches = LaunchBuilder(upload_array=lambda array: 0)
    launches.add_launch(SOURCE[kernel], 1, 128, [times, step, *operands])
    return run_with_counters(launches.items[0])


def loops(kernel, counted, arch):
    """How often blocks run that come back to themselves, with how many loads of 4 bytes each has."""
    cubin = nvrtc.compile(SOURCE[kernel].single_kernel_source, arch, (*nvrtc.OPTIONS, "-lineinfo"))
    blocks = build_control_flow_graphs(cubin.image)[cubin.mangled_names[kernel]]
    ran = estimate_block_executions(blocks, counted.sites, 4)
    loads = [sum(n for place, n in b.access_bytes.items() if not place.is_store) / 4 for b in blocks]
    return [
        (n, have) for i, (n, have) in enumerate(zip(ran, loads, strict=True)) if i in blocks[i].successors and n > 0
    ]


@needs_compiler
@pytest.mark.usefixtures("_tools")
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("times", [1, 5, 37])
def test_a_loop_runs_as_often_as_it_does(arch, times):
    assert loops(ONE, count_launch(ONE, times), arch) == [(pytest.approx(4 * times), 1)]


@needs_compiler
@pytest.mark.usefixtures("_tools")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_loop_that_is_unrolled_runs_less_often(arch):
    assert sum(ran * loads for ran, loads in loops(SERIAL, count_launch(SERIAL, 37), arch)) == pytest.approx(
        4 * 37, rel=0.2
    )


@needs_compiler
@pytest.mark.usefixtures("_tools")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_loop_that_one_warp_of_four_enters_runs_for_it_alone(arch):
    assert sum(ran for ran, _ in loops(SOME, count_launch(SOME, 20), arch)) == pytest.approx(20)


@needs_compiler
@pytest.mark.usefixtures("_tools")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_loads_that_need_one_another_wait_for_one_another(arch):
    apart, chain = (
        estimate_launch_work(count_launch(SERIAL, 32), arch),
        estimate_launch_work(count_launch(CHAIN, 32), arch),
    )
    assert 32 <= chain.dependent_loads <= 34
    assert apart.dependent_loads <= 32 / 8 + 2


@needs_compiler
@pytest.mark.usefixtures("_tools")
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("case", "products"), [
    ("mul_mat(w=q8_0[64,256], x=f32[64,256])", {"products_8bit": 64 * 64 * 256 / (16 * 8 * 32)}),
    ("mul_mat(w=bf16[64,64], x=f32[64,64])", {"products_16bit": 2 * 64 * 64 * 64 / (16 * 8 * 16)}),
], ids=["packed", "dense"])  # fmt: skip
def test_products_of_tensor_cores_are_those_of_the_arithmetic(case, products, arch):
    works = [estimate_launch_work(launch, arch) for launch in emulate_cases_and_count_accesses([case])]
    assert {name: sum(getattr(work, name) for work in works) for name in products} == pytest.approx(products, rel=0.15)


@needs_compiler
@pytest.mark.usefixtures("_tools")
def test_products_of_warpgroups_are_those_of_the_arithmetic(monkeypatch):
    monkeypatch.setattr(tiled, "FULL_DEVICE_TILES", 1)
    works = [
        estimate_launch_work(launch, "sm_90a")
        for launch in emulate_cases_and_count_accesses(["mul_mat(w=bf16[256,128], x=f32[128,128])"])
    ]
    assert sum(work.warpgroup_products for work in works) == pytest.approx(
        2 * 256 * 128 * 128 / (16 * 8 * 16), rel=0.15
    )


@needs_compiler
@pytest.mark.usefixtures("_tools")
def test_products_of_warpgroups_with_rows_in_registers_are_those_of_the_arithmetic():
    """And loops run as often as their products read: no more than was counted."""
    cases = (f"attention(q=f32[128,1,128], k=f16[{keys},1,128], v=f16[{keys},1,128], scale=0.1)" for keys in (256, 512))
    short, long = (
        estimate_launch_work(emulate_cases_and_count_accesses([case])[0], "sm_90a").warpgroup_products for case in cases
    )
    assert long - short == pytest.approx(2 * 128 * 256 * 128 / (16 * 8 * 16), rel=0.02)


def test_what_takes_longest_sets_the_time():
    idle = LaunchWork(132, 128, 32, 0, *[0.0] * 8)
    gpu = GPUS["h200"]
    moved = estimate_launch_time(replace(idle, memory_bytes=4.32e9), gpu)
    assert (moved.limiting_resource, moved.total_seconds) == ("memory", pytest.approx(1e-3, rel=0.01))
    products = estimate_launch_time(replace(idle, products_16bit=132 * 4 * 1.755e9 / 6 / 1000), gpu)
    assert (products.limiting_resource, products.total_seconds) == ("tensor cores", pytest.approx(1e-3, rel=0.01))
    grouped = estimate_launch_time(replace(idle, warpgroup_products=132 * 4 * 1.755e9 / 5 / 1000), gpu)
    assert (grouped.limiting_resource, grouped.total_seconds) == ("tensor cores", pytest.approx(1e-3, rel=0.01))
    loads = estimate_launch_time(replace(idle, dependent_loads=100.0), gpu)
    assert (loads.limiting_resource, loads.total_seconds) == ("latency", pytest.approx(101 * 0.8e-6))
    assert estimate_launch_time(replace(idle, dependent_loads=100.0), gpu, cached=True).total_seconds == pytest.approx(
        101 * 0.3e-6
    )


def test_the_busiest_processor_sets_the_time_of_instructions():
    gpu = GPUS["h200"]
    even, uneven = (
        estimate_launch_time(LaunchWork(blocks, 128, 32, 0, blocks * 1e6, *[0.0] * 7), gpu) for blocks in (132, 133)
    )
    assert even.limiting_resource == uneven.limiting_resource == "instructions"
    assert uneven.resource_seconds["instructions"] == pytest.approx(2 * even.resource_seconds["instructions"], rel=0.2)


def test_blocks_that_follow_others_end_alone():
    gpu = GPUS["h200"]
    once, twice = (estimate_launch_time(LaunchWork(132 * n, 1024, 32, 0, *[0.0] * 7, 10.0), gpu) for n in (2, 4))
    assert (once.idle_seconds, twice.idle_seconds) == (pytest.approx(0.8e-6), pytest.approx(4.8e-6))


def test_twice_the_blocks_do_twice_the_work():
    work = LaunchWork(10, 128, 32, 0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)
    assert work.scale_blocks_and_block_work(2) == LaunchWork(20, 128, 32, 0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 8.0)
    assert work.scale_blocks_and_block_work(1, 2) == LaunchWork(
        10, 128, 32, 0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0
    )


def test_a_block_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="more than a multiprocessor has"):
        estimate_launch_time(LaunchWork(1, 1024, 80, 0, *[0.0] * 8), GPUS["h200"])


def test_speeds_are_below_the_data_sheet():
    own = {kind: machine for kind, machine in DATA_SHEETS.items() if not machine.like}
    of_nvidia = {kind for kind, machine in own.items() if machine.capability and machine.backend == "cuda"}
    assert load_predicted_speeds().keys() == GPUS.keys() == of_nvidia
    limits = {"memory", "second cache", "instructions", "tensor cores", "shared memory", "latency"}
    for kind, of in load_predicted_speeds().items():
        assert (
            set(of.products.flops)
            == set(of.products.bandwidth)
            == {*map(str, packed.TILED_SOURCE_BY_DTYPE), "f16", "bf16", "f32"}
        )
        assert set(of.ops.flops) < set(of.ops.bandwidth) <= {*REGISTRY, OTHER_OPS}
        assert {"attention", "gated_delta_net", OTHER_OPS} <= set(of.ops.bandwidth)
        assert {"q8_0", "q4_K", "q4_0"} <= of.products.prompt_limits.keys()
        assert of.ops.prompt_limits.keys() == of.ops.flops.keys()
        for reached in (of.products, of.ops):
            assert all(0.01 < speed / DATA_SHEETS[kind].bandwidth < 1 for speed in reached.bandwidth.values())
            assert all(0.01 < speed / DATA_SHEETS[kind].flops < 1 for speed in reached.flops.values())
            assert reached.vector_limits.keys() == reached.bandwidth.keys()
            assert reached.prompt_limits.keys() <= reached.flops.keys()
            assert {*reached.vector_limits.values(), *reached.prompt_limits.values()} <= limits


def test_a_plan_is_scored_by_the_rates_of_its_weights():
    def graph(dtype):
        return Graph({"y": mul_mat(weight("w", (256, 256), dtype), input("x", (1, 256)))})

    simulation = parse_simulated_group("h200:2,nvlink")
    speeds = {dtype: simulation.hardware_for(graph(dtype)) for dtype in (DType.Q4_K, DType.Q8_0)}
    for dtype, hardware in speeds.items():
        reached = load_predicted_speeds()["h200"].products.bandwidth[str(dtype)]
        assert hardware.bandwidth == pytest.approx(reached, rel=1e-15)
        assert hardware.flops == pytest.approx(load_predicted_speeds()["h200"].products.flops[str(dtype)], rel=1e-15)
        assert reached < simulation.hardware.bandwidth
        assert hardware.flops < simulation.hardware.flops
        assert hardware.link_bandwidth == simulation.hardware.link_bandwidth
    mixed = parse_simulated_group("h200:1,rtx4090:1,pcie4").hardware_for(graph(DType.Q8_0))
    assert mixed.bandwidth == load_predicted_speeds()["rtx4090"].products.bandwidth["q8_0"]
    assert parse_simulated_group("cpu:2").hardware_for(graph(DType.Q8_0)) == parse_simulated_group("cpu:2").hardware


def seconds(simulation, graph):
    """Return the predicted seconds of the node of the result, without its launch."""
    node = graph.outputs["y"].node
    return simulation.hardware_for(graph).compute_seconds(*WorkCounter().count_work(node), launches=0.0)


def test_an_op_without_weights_is_scored_by_its_own_rates():
    """Check attention of one token by its bytes and of many tokens by its arithmetic.

    Ops without a line use the others.
    """

    def attention_graph(tokens):
        keys = input("k", (8192, 8, 128), DType.F16), input("v", (8192, 8, 128), DType.F16)
        return Graph({"y": ops.attention(input("q", (tokens, 32, 128)), *keys, scale=0.1)})

    simulation = parse_simulated_group("h200:2,nvlink")
    known, sheet = load_predicted_speeds()["h200"].ops, simulation.hardware
    one, many, summed = (
        attention_graph(1),
        attention_graph(8192),
        Graph({"y": ops.add(*(input(n, (4096, 4096)) for n in "ab"))}),
    )
    for graph, op, part in ((one, "attention", 1), (many, "attention", 0), (summed, OTHER_OPS, 1)):
        work = WorkCounter().count_work(graph.outputs["y"].node)[part]
        speed, sheet_speed = ((known.flops, sheet.flops), (known.bandwidth, sheet.bandwidth))[part]
        assert seconds(simulation, graph) == pytest.approx(work / speed[op])
        assert seconds(simulation, graph) > work / sheet_speed
    mixed = parse_simulated_group("h200:1,rtx4090:1,pcie4")
    assert (
        mixed.hardware_for(one).op_bandwidth["attention"]
        == load_predicted_speeds()["rtx4090"].ops.bandwidth["attention"]
    )
    assert (
        parse_simulated_group("h200:1,cpu:1,pcie4").hardware_for(one).op_flops["attention"] == DATA_SHEETS["cpu"].flops
    )


def test_a_plan_on_known_ops_comes_back_from_json():
    graph = Graph({"y": ops.silu(input("x", (64, 64)))})
    simulation = parse_simulated_group("h200:2,nvlink")
    plan = plan_for_group(graph, simulation.group, hardware=simulation.hardware_for(graph))
    back = plan_from_json(plan_to_json(plan))
    assert back.hardware == plan.hardware
    assert back.hardware.op_bandwidth
    assert back.cost.total == plan.cost.total
    assert replace(plan.hardware, op_flops={"attention": 0.0}).is_valid is False
