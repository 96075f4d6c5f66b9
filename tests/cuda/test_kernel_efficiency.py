"""The predicted times of GPUs: efficiencies of kernel families, against times that were measured on H100 and H200."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from hocket import ops
from hocket.backends.capabilities import OTHER_OPS
from hocket.backends.cupy.kernel_efficiency import read_kernel_efficiencies
from hocket.benchmarks.gpu import fit_efficiency
from hocket.benchmarks.gpu.compare_predictions import WRONG_PREDICTION_FACTOR
from hocket.graph import DType, Graph, input, weight
from hocket.ops import REGISTRY, mul_mat
from hocket.scheduler import plan_for_group, plan_from_json, plan_to_json
from hocket.scheduler.costs.device_catalogue import DATA_SHEETS
from hocket.scheduler.costs.hardware import MANY_ROWS, PRODUCTS, WorkCounter
from hocket.scheduler.costs.simulated_devices import parse_simulated_group

STEPS = fit_efficiency.read_model_steps()


@pytest.mark.nightly(cases=9)
@pytest.mark.long
@pytest.mark.parametrize("step", STEPS, ids=[f"{s.kind}-{s.model}-{s.tokens}-on-{s.cells}" for s in STEPS])
def test_a_step_is_predicted_within_the_limit_of_the_measured_time(step):
    assert 1e6 * step.predict_plan().cost.total == pytest.approx(step.microseconds, rel=WRONG_PREDICTION_FACTOR - 1)


def test_pages_state_the_limit_of_predictions():
    facts = tomllib.loads((Path(fit_efficiency.__file__).parents[2] / "docs" / "facts.toml").read_text("utf-8"))
    assert facts["prediction-limit"]["text"] == f"{100 * (WRONG_PREDICTION_FACTOR - 1):.0f} %"


def test_three_models_are_measured_for_decoding_and_for_prompts():
    assert {(step.model, step.tokens == 1) for step in STEPS} == {
        (model, decodes) for model in ("tiny", "qwen3.5-4b", "qwen3-next-80b") for decodes in (False, True)
    }
    pages = {path.stem for path in fit_efficiency.RESULTS.glob("*.md")}
    assert {step.page for step in STEPS} | {*fit_efficiency.KERNEL_RESULTS} <= pages


@pytest.mark.long
def test_the_efficiencies_are_those_that_the_measured_times_give():
    """Write them anew with ``python benchmarks/gpu/fit_efficiency.py``."""
    pytest.importorskip("scipy")
    known, fitted = (
        read_kernel_efficiencies(),
        fit_efficiency.fit_efficiencies(list(fit_efficiency.list_measured_work())),
    )
    for table in fit_efficiency.START:
        assert getattr(known, table) == pytest.approx(getattr(fitted, table), rel=0.01)


def test_efficiencies_are_shares_of_a_data_sheet():
    known = read_kernel_efficiencies()
    classes = {*map(str, DType), *REGISTRY, OTHER_OPS, PRODUCTS, MANY_ROWS}
    for table in (known.memory, known.arithmetic, known.launch):
        assert table.keys() <= classes
    assert all(0.01 < share <= 1 for share in (*known.memory.values(), *known.arithmetic.values()))
    assert {OTHER_OPS, PRODUCTS, "attention", "gated_delta_net", "q4_K"} <= known.memory.keys()
    assert {PRODUCTS, "f32", "attention", "gated_delta_net"} <= known.arithmetic.keys()
    assert {OTHER_OPS, MANY_ROWS} <= known.launch.keys()
    assert {*known.measured_on} <= DATA_SHEETS.keys()


def price(simulation, graph):
    """Return the predicted seconds of the node of the result, without its launch."""
    node = graph.outputs["y"].node
    return simulation.hardware_for(graph).compute_seconds(*WorkCounter().count_work(node), launches=0.0)


def product(dtype, rows=1):
    return Graph({"y": mul_mat(weight("w", (4096, 4096), dtype), input("x", (rows, 4096)))})


def test_a_product_is_priced_by_the_dtype_of_its_weights_and_by_its_rows():
    simulation, known, sheet = parse_simulated_group("h200:2,nvlink"), read_kernel_efficiencies(), DATA_SHEETS["h200"]
    for dtype in (DType.Q4_K, DType.Q8_0):
        graph = product(dtype)
        nbytes = graph.weights[0].spec.nbytes
        assert price(simulation, graph) == pytest.approx(nbytes / known.memory[str(dtype)] / sheet.bandwidth, rel=0.03)
        hardware = simulation.hardware_for(graph)
        assert hardware.bandwidth == pytest.approx(known.memory[str(dtype)] * sheet.bandwidth)
        assert hardware.link_bandwidth == simulation.hardware.link_bandwidth
    many = product(DType.Q4_K, 8192)
    flops = 2 * 4096 * 4096 * 8192
    assert price(simulation, many) == pytest.approx(flops / known.arithmetic[PRODUCTS] / sheet.flops, rel=0.02)
    few, rows = (WorkCounter().count_work(product(DType.Q4_K, n).outputs["y"].node) for n in (8, 9))
    hardware = simulation.hardware_for(many)
    launch = [hardware.compute_seconds(*work) - hardware.compute_seconds(*work, launches=0.0) for work in (few, rows)]
    assert launch == pytest.approx([known.launch[name] * sheet.launch for name in (OTHER_OPS, MANY_ROWS)])
    rare = product(DType.TQ1_0)  # not measured: as slow as the slowest measured dtype
    assert known.memory[PRODUCTS] == min(share for name, share in known.memory.items() if name in {*map(str, DType)})
    assert simulation.hardware_for(rare).bandwidth == pytest.approx(known.memory[PRODUCTS] * sheet.bandwidth)


def test_devices_of_several_kinds_are_priced_by_the_slowest():
    graph = product(DType.Q8_0)
    slow, mixed = (parse_simulated_group(text) for text in ("rtx4090:1,pcie4", "h200:1,rtx4090:1,pcie4"))
    assert price(mixed, graph) == price(slow, graph)
    assert mixed.hardware_for(graph).op_bandwidth == slow.hardware_for(graph).op_bandwidth
    with_cpu = parse_simulated_group("h200:1,cpu:1,pcie4").hardware_for(graph)
    assert with_cpu.op_flops["attention"] == DATA_SHEETS["cpu"].flops
    assert parse_simulated_group("cpu:2").hardware_for(graph) == parse_simulated_group("cpu:2").hardware


def test_attention_is_priced_by_its_bytes_and_its_arithmetic():
    simulation, known, sheet = parse_simulated_group("h200:2,nvlink"), read_kernel_efficiencies(), DATA_SHEETS["h200"]
    keys = input("k", (8192, 8, 128), DType.F16), input("v", (8192, 8, 128), DType.F16)
    graph = Graph({"y": ops.attention(input("q", (8192, 32, 128)), *keys, scale=0.1)})
    flops, nbytes, *_ = WorkCounter().count_work(graph.outputs["y"].node)
    assert price(simulation, graph) == pytest.approx(
        flops / known.arithmetic["attention"] / sheet.flops + nbytes / known.memory[OTHER_OPS] / sheet.bandwidth
    )
    summed = Graph({"y": ops.add(*(input(n, (4096, 4096)) for n in "ab"))})
    assert price(simulation, summed) == pytest.approx(
        3 * 4 * 4096**2 / known.memory[OTHER_OPS] / sheet.bandwidth, rel=0.01
    )


@pytest.mark.parametrize(
    ("spec", "source"),
    [
        ("h200:2,nvlink", "kernels measured on h100 and h200"),
        ("b200", "estimate for b200, data sheet with the kernels of h100 and h200"),
        ("mi300x", "estimate for mi300x, data sheet with the kernels of h100 and h200"),
        ("h100:1,rtx4090:1,pcie4", "kernels measured on h100 and h200, estimate for rtx4090, data sheet with"),
        ("cpu:2", "built in"),
    ],
)
def test_speeds_of_kinds_that_were_not_measured_are_called_an_estimate(spec, source):
    first, *_ = parse_simulated_group(spec).describe_speeds(product(DType.Q8_0))
    assert first.startswith(f"speeds: {source}")


def test_a_plan_with_priced_launches_comes_back_from_json():
    graph = Graph({"y": ops.silu(input("x", (64, 64)))})
    simulation = parse_simulated_group("h200:2,nvlink")
    plan = plan_for_group(graph, simulation.group, hardware=simulation.hardware_for(graph))
    back = plan_from_json(plan_to_json(plan))
    assert back.hardware == plan.hardware
    assert back.hardware.op_launch
    assert back.cost.total == plan.cost.total
    assert replace(plan.hardware, op_flops={"attention": 0.0}).is_valid is False
    assert replace(plan.hardware, op_launch={"attention": -1.0}).is_valid is False
