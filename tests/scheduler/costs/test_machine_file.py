"""Machines of one's own: `parse_simulated_group` reads kinds of devices and links from a TOML file."""

from __future__ import annotations

from pathlib import Path

import pytest

from hocket import ops
from hocket.cli import main
from hocket.graph import Graph, PlanError, input, weight
from hocket.scheduler import plan_for_group
from hocket.scheduler.costs.device_catalogue import DATA_SHEETS, GIB, LINKS
from hocket.scheduler.costs.simulated_devices import parse_simulated_group
from hocket.scheduler.serialisation.plan_json import plan_from_json, plan_to_json

from ...given.models.goldens import TINY

WHOLE = """
simulate = "server:4,cable"
[kinds.server]
like = "rtx4090"
memory_gib = 48
tb_per_s = 2.02
[kinds.board]
memory_gib = 0.5
tb_per_s = 0.001
tflops = 0.01
link = "cable"
[links.cable]
gb_per_s = 40
latency_us = 8
"""


def write(folder: Path, text: str | bytes) -> str:
    path = folder / "machines.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def test_a_kind_has_the_figures_of_the_file_and_of_the_kind_it_is_like(tmp_path):
    simulation = parse_simulated_group(write(tmp_path, WHOLE))
    assert [str(device) for _, device in simulation.group] == [f"server:{i}" for i in range(4)]
    assert {device.memory for _, device in simulation.group} == {48 * GIB}
    hardware = simulation.hardware
    assert (hardware.bandwidth, hardware.flops) == (2.02e12, DATA_SHEETS["rtx4090"].flops)
    assert (hardware.link_bandwidth, hardware.link_latency) == pytest.approx((40e9, 8e-6))


def test_kernels_reach_the_shares_of_the_data_sheet_of_the_kind_it_is_like(tmp_path):
    graph = Graph({"y": ops.mul_mat(weight("w", (256, 256), "q8_0"), input("x", (1, 256)))})
    own = parse_simulated_group(write(tmp_path, WHOLE)).hardware_for(graph)
    known = parse_simulated_group("rtx4090:4,pcie4").hardware_for(graph)
    assert own.bandwidth == pytest.approx(2 * known.bandwidth)
    assert own.flops == pytest.approx(known.flops)
    assert own.op_bandwidth["attention"] == pytest.approx(2 * known.op_bandwidth["attention"])


def test_a_kind_without_like_is_planned_by_its_own_figures(tmp_path):
    text = WHOLE.replace('"server:4,cable"', '"board:2 x 3,cable"')
    simulation = parse_simulated_group(write(tmp_path, text))
    assert len(simulation.group) == 6
    assert (simulation.hardware.bandwidth, simulation.hardware.flops) == pytest.approx((1e9, 1e10))
    assert simulation.hardware.machine == 2
    assert simulation.group[0][1].memory == GIB // 2


def test_a_plan_for_an_own_machine_comes_back_from_json(tmp_path):
    graph = Graph({"y": ops.mul_mat(weight("w", (4096, 4096), "q8_0"), input("x", (1, 4096)))})
    machines = parse_simulated_group(write(tmp_path, WHOLE))
    plan = plan_for_group(graph, machines.group, hardware=machines.hardware_for(graph), split_mode="tensor")
    again = plan_from_json(plan_to_json(plan))
    assert plan_to_json(again) == plan_to_json(plan)
    assert [one.device.memory for one in again.device_plans] == [48 * GIB] * len(plan.device_plans)
    assert "machines" not in plan_to_json(plan_for_group(graph, parse_simulated_group("rtx4090:2").group))


@pytest.mark.long
def test_commands_take_the_file(tmp_path, capsys):
    path = write(tmp_path, WHOLE)
    assert main(["plan", TINY, "--simulate", path]) == 0
    assert capsys.readouterr().out.startswith("fits: 5.3 MiB of 48.00 GiB on server:0;")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("memory_gib = 48", "memory_gib = -1"), "kinds.server.memory_gib is -1; it must be a number from 0.001"),
        (("memory_gib = 48", "memory_gib = nan"), "kinds.server.memory_gib is nan"),
        (("memory_gib = 48", "memory_gib = true"), "kinds.server.memory_gib is True"),
        (("memory_gib = 48", "memory = 48"), "kinds.server.'memory' is unknown; known: like, memory_gib"),
        (('like = "rtx4090"', 'like = "abacus"'), "kinds.server.like is 'abacus'; it must be one of b300, b200"),
        (('like = "rtx4090"', ""), "kinds.server.tflops is missing"),
        (('like = "rtx4090"', 'capability = "x"\nlike = "h100"'), "kinds.server.capability is 'x'"),
        (('link = "cable"', 'link = "string"'), "kinds.board.link is 'string'; it must be one of nvlink5"),
        (("latency_us = 8", ""), "links.cable.latency_us is missing"),
        (("[kinds.server]", "[kinds.h200]"), "kinds.h200 is built in"),
        (("[kinds.server]", '[kinds."a b"]'), "kinds.'a b' is no name"),
        (("[kinds.server]", "[[kinds.server]]"), "kinds.server is"),
        (('simulate = "server:4,cable"', ""), "simulate is missing"),
        (('simulate = "server:4,cable"', "simulate = 3"), "simulate is 3; it must be text"),
        (("server:4", "serv:4"), "cannot simulate 'serv:4,cable'"),
        (("memory_gib = 48", '"a\\nb" = 48'), "kinds.server.'a\\nb' is unknown"),
        (("[kinds.server]", "[kinds"), "the file is no TOML"),
    ],
)
def test_a_wrong_file_costs_one_line_with_the_file_and_the_key(change, problem, tmp_path):
    path = write(tmp_path, WHOLE.replace(*change))
    with pytest.raises(PlanError) as why:
        parse_simulated_group(path)
    assert problem in str(why.value)
    assert "\n" not in str(why.value)
    assert path in str(why.value) or "cannot simulate" in problem


@pytest.mark.parametrize("data", [b"\xff\xfe", b"a = " + b"[" * 100_000, b"#" * (2 << 20)])
def test_hostile_bytes_cost_one_line(data, tmp_path):
    with pytest.raises(PlanError) as why:
        parse_simulated_group(write(tmp_path, data))
    assert "\n" not in str(why.value)
    assert len(str(why.value)) < 400


def test_a_missing_file_costs_one_line(tmp_path):
    with pytest.raises(PlanError, match="No such file or directory; give a TOML file"):
        parse_simulated_group(str(tmp_path / "none.toml"))
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(PlanError, match="Is a directory"):
        parse_simulated_group(str(tmp_path / "folder.toml"))


@pytest.mark.parametrize("kind", DATA_SHEETS)
def test_every_built_in_kind_is_planned_for(kind):
    graph = Graph({"y": ops.mul_mat(weight("w", (4096, 4096), "q8_0"), input("x", (1, 4096)))})
    machines = parse_simulated_group(f"{kind}:2")
    plan = plan_for_group(graph, machines.group, hardware=machines.hardware_for(graph), split_mode="tensor")
    assert 0 < plan.cost.total < 1
    assert machines.hardware.link_bandwidth == LINKS[DATA_SHEETS[kind].link].bandwidth
