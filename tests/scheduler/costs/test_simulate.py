"""Plans for absent hardware, and for models with only a header."""

from __future__ import annotations

import re

import numpy as np
import pytest

from hocket import ops
from hocket.cli import main
from hocket.frontends.commands.plan import read_step_graph_and_context
from hocket.frontends.models import Step
from hocket.frontends.open_model import open_model
from hocket.graph import BackendError, Graph, PlanError, input, weight
from hocket.scheduler import load, plan_for_group
from hocket.scheduler.costs.device_catalogue import DATA_SHEETS, LINKS
from hocket.scheduler.costs.simulated_devices import parse_simulated_group
from hocket.scheduler.planning.memory_fit import describe_memory_problem

from ...given.models.goldens import path_of
from ...given.models.large_headers import LARGE, llama, llama_70b, llama_405b, qwen_80b


@pytest.fixture(scope="module", params=LARGE)
def large(request, tmp_path_factory):
    """Write a large model with only the header."""
    return LARGE[request.param](tmp_path_factory.mktemp("header") / f"{request.param}.gguf")


@pytest.mark.nightly(cases=1)
@pytest.mark.long
def test_a_large_model_is_planned_for_eight_devices(large, capsys):
    """How long that takes is measured by benchmarks/planning/planning_time.py."""
    assert main(["plan", large, "--simulate", "h200:8,nvlink", "-c", "4096", "--split-mode", "tensor"]) == 0
    out = capsys.readouterr().out
    assert "a run estimated" in out
    assert re.search(r"h200:7 +\d", out)


@pytest.mark.long
@pytest.mark.parametrize("kind", LARGE)
def test_auto_predicts_for_eight_devices_no_more_than_for_one(kind, tmp_path):
    graph, _ = read_step_graph_and_context(LARGE[kind](tmp_path / "few.gguf", layers=8), context=4096, tokens=1)
    simulation = parse_simulated_group("h200:8,nvlink")
    one = plan_for_group(graph, simulation.group[:1], hardware=simulation.hardware)
    many = plan_for_group(graph, simulation.group, split_mode="auto", hardware=simulation.hardware)
    assert describe_memory_problem(one) is None
    assert many.cost.total <= one.cost.total * (1 + 1e-9)


@pytest.mark.nightly(cases=2)
@pytest.mark.long
@pytest.mark.parametrize("devices", ["h200:2,nvlink", "h200:2,ethernet", "rtx4090:4,pcie4", "cpu:2"])
def test_auto_never_predicts_more_than_one_device_where_that_fits(devices, tmp_path):
    for path in (llama_70b(tmp_path / "a.gguf", layers=2), qwen_80b(tmp_path / "b.gguf", layers=4)):
        graph, _ = read_step_graph_and_context(path, context=1024, tokens=1)
        simulation = parse_simulated_group(devices)
        one = plan_for_group(graph, simulation.group[:1], hardware=simulation.hardware)
        many = plan_for_group(graph, simulation.group, split_mode="auto", hardware=simulation.hardware)
        assert describe_memory_problem(one) is None
        assert many.cost.total <= one.cost.total * (1 + 1e-9)


@pytest.mark.long
def test_a_context_that_does_not_fit_comes_with_one_that_does(tmp_path, capsys):
    shapes = {"width": 16384, "heads": 8, "inner": 53248}  # large caches: each query head has its own key head
    path = llama(tmp_path / "model.gguf", 8, **shapes)
    flags = ["--simulate", "rtx4090", "-c"]
    assert main(["plan", path, *flags, "8192"]) == 0
    path = llama(tmp_path / "larger.gguf", 10, **shapes)
    assert main(["plan", path, *flags, "8192"]) == 1
    fitting = int(re.search(r"--ctx-size (\d+)", capsys.readouterr().err)[1])
    assert 1024 <= fitting < 8192
    assert main(["plan", path, *flags, str(fitting)]) == 0
    assert main(["plan", path, *flags, str(fitting + 256)]) == 1


@pytest.mark.long
def test_weights_that_do_not_fit_come_with_the_number_of_devices_that_would_do(tmp_path, capsys):
    path = llama_405b(tmp_path / "model.gguf", layers=15)
    assert main(["plan", path, "--simulate", "rtx3090:1", "-c", "1024"]) == 1
    text = capsys.readouterr().err
    number = int(re.search(r"use (\d+) such devices", text)[1])
    assert "fewer bits" in text
    assert main(["plan", path, "--simulate", f"rtx3090:{number}", "-c", "1024", "--split-mode", "tensor"]) == 0


@pytest.mark.long
def test_mode_none_with_several_devices_names_the_modes_that_split(tmp_path, capsys):
    path = llama_405b(tmp_path / "model.gguf", layers=15)
    assert main(["plan", path, "--simulate", "rtx3090:2", "-c", "1024", "--split-mode", "none"]) == 1
    assert "--split-mode tensor" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------- the table


@pytest.mark.parametrize(
    ("text", "devices", "link"),
    [
        ("h200:8,nvlink", 8, "nvlink"),
        ("cpu:2", 2, "memory"),
        ("rtx3090:2,pcie4", 2, "pcie4"),
        ("h100", 1, "nvlink"),
        ("a100:4,ethernet", 4, "ethernet"),
        ("rtx4090:1,rtx3090:1,pcie5", 2, "pcie5"),
    ],
)
def test_hardware_is_read_from_its_name(text, devices, link):
    simulation = parse_simulated_group(text)
    assert len({str(d) for _, d in simulation.group}) == devices
    assert simulation.hardware.link_latency == LINKS[link].latency
    for backend, device in simulation.group:
        assert device.memory == DATA_SHEETS[backend.kind].memory


@pytest.mark.parametrize(
    "text",
    ["", "abacus:3", "h200:0", "h200:-1", "h200:x", "h200:1:2", "nvlink", "h200,nvlink,pcie4", "h200:1025", "h200:٣"],
)
def test_unknown_hardware_is_refused_with_what_is_known(text):
    with pytest.raises(PlanError) as why:
        parse_simulated_group(text)
    assert "h200" in str(why.value)
    assert "nvlink" in str(why.value)
    assert "\n" not in str(why.value)


def test_devices_of_several_kinds_are_scored_by_the_slowest():
    mixed = parse_simulated_group("h200:1,cpu:1,pcie4").hardware
    assert mixed.flops == DATA_SHEETS["cpu"].flops
    assert mixed.link_bandwidth == LINKS["pcie4"].bandwidth


def test_a_simulated_device_refuses_to_run_and_says_why():
    x = input("x", (4,))
    plan = plan_for_group(Graph({"y": ops.add(x, weight("w", (4,)))}), parse_simulated_group("h200:1").group)
    with pytest.raises(BackendError, match="h200 is simulated and cannot allocate"):
        load(plan, {"w": np.ones(4, np.float32)})


def test_a_simulated_device_keeps_weights_as_the_file_has_them(tmp_path):
    path = llama_70b(tmp_path / "model.gguf", layers=1)
    model = open_model(path, header_only=True)
    graph = model.graph(Step(1, 1, 64, 64, 1))
    plan = plan_for_group(graph, parse_simulated_group("h200:1").group)
    assert plan.device_plans[0].count_memory_bytes_by_kind()["weight"] == sum(v.spec.nbytes for v in graph.weights)


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("h200", "kernels measured on h100 and h200"),
        ("mi300x", "estimate for mi300x, data sheet with the kernels of h100 and h200"),
        ("cpu", "built in"),
    ],
)
def test_a_plan_says_what_its_speeds_are(kind, source, capsys):
    assert main(["plan", str(path_of("llama")), "--simulate", kind]) == 0
    text = capsys.readouterr().out
    assert f"\nspeeds: {source}; weights read at " in text
    assert ("with few tokens" in text) is (kind != "cpu")


def test_a_plan_says_how_fast_products_are():
    x, keys = input("x", (1, 256)), input("k", (64, 2, 128), "f16")
    heads = ops.reshape(ops.mul_mat(weight("w", (256, 256), "q8_0"), x), shape=(1, 2, 128))
    graph = Graph({"y": ops.attention(heads, keys, keys, scale=0.1)})
    _, *lines = parse_simulated_group("h200:2,rtx4090,nvlink").describe_speeds(graph)
    few = r"[\d.]+ TB/s( with few tokens)?, \d\d% of the data sheet"
    many = r"[\d.]+ TFLOP/s with many, \d\d%"
    found = [re.fullmatch(rf"  (\w+), (\w+): {few}(; {many})?", line) for line in lines]
    assert [match and match.group(1, 2) for match in found] == [
        (kind, name) for kind in ("h200", "rtx4090") for name in ("q8_0", "attention", "others")
    ]
    for group in (3, 4):  # types without a time of their own for many tokens are the same for few
        assert [bool(match and match[group]) for match in found] == 2 * [True, True, False]
