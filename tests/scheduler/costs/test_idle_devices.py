"""A device with waiting neighbours has more of the shared resources, and plans are priced so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hocket.backends.base import find_device
from hocket.frontends.inference.device_group import DeviceGroup, resolve_devices
from hocket.frontends.inference.model_layout import find_speeds_of_first_device_alone
from hocket.graph import DType
from hocket.scheduler import plan_for_group
from hocket.scheduler.costs.calibration_file import choose_calibrated_or_built_in_hardware
from hocket.scheduler.costs.hardware import Hardware
from hocket.scheduler.costs.timeline import COMPUTE, TimelineEntry, is_timeline_sequential
from hocket.scheduler.measurement.probe_graphs import build_matmul_chain_graph
from hocket.scheduler.pipelining.stage_times import estimate_pipeline_speedup
from hocket.scheduler.planning.workload import Workload

from ...given.graphs.layered import decoder

SHARED = Hardware(flops=1e9, bandwidth=1e9, launch=0.0, link_bandwidth=1e12, link_latency=1e-9)
GROUP = [find_device("numpy:0"), find_device("numpy:1")]


@pytest.mark.parametrize("rows", [1, 256])  # bound by memory, and bound by arithmetic
def test_two_devices_that_share_one_processor_are_left_for_one_that_has_all_of_it(rows):
    graph = build_matmul_chain_graph(DType.F32, 4, rows)
    apart = plan_for_group(graph, GROUP, hardware=SHARED)
    assert len(apart.device_plans) == 2
    worthless = replace(SHARED, alone_flops=2.0, alone_bandwidth=2.0)
    whole = plan_for_group(graph, GROUP, hardware=worthless)
    assert len(whole.device_plans) == 1
    one = plan_for_group(graph, GROUP[:1], hardware=SHARED)
    assert whole.cost.total == pytest.approx(one.cost.total / 2, rel=1e-6)
    quarrel = replace(SHARED, alone_flops=1.2, alone_bandwidth=1.2)
    assert len(plan_for_group(graph, GROUP, hardware=quarrel).device_plans) == 2


def test_a_workload_is_scored_by_the_device_that_has_all_to_itself():
    graph = decoder(4)
    use = Workload(lambda sequences, tokens: graph, (), new_tokens=8)
    taken = {
        times: plan_for_group(
            graph, GROUP, use=use, hardware=replace(SHARED, alone_flops=times, alone_bandwidth=times), split_mode="auto"
        )
        for times in (1.0, 2.0)
    }
    assert [len(plan.device_plans) for plan in taken.values()] == [2, 1]


def test_a_device_that_is_used_alone_is_scored_with_the_speeds_that_it_then_has():
    graph = decoder(4)
    fast = replace(SHARED, flops=2e9, bandwidth=2e9)
    uses = [Workload(lambda sequences, tokens: graph, (), new_tokens=8, lone_hardware=lone) for lone in (SHARED, fast)]
    plans = [plan_for_group(graph, GROUP, use=use, hardware=SHARED, split_mode="auto") for use in uses]
    assert [len(plan.device_plans) for plan in plans] == [2, 1]
    assert plans[1].hardware == fast


def test_a_session_knows_the_speeds_of_a_device_that_gets_the_threads_of_the_others(monkeypatch):
    monkeypatch.setattr("hocket.scheduler.costs.calibration_file.find_saved_speeds", lambda group: None)
    monkeypatch.setattr("hocket.scheduler.costs.rank_speeds.find_saved_speeds", lambda group: None)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    graph = decoder(1)
    shared = DeviceGroup(devices=("cpu:0", "cpu:1"))
    lone = find_speeds_of_first_device_alone(shared, resolve_devices(shared), graph)
    together = choose_calibrated_or_built_in_hardware(graph, resolve_devices(shared))
    assert lone is not None
    assert lone.flops == pytest.approx(2 * together.flops)
    assert find_speeds_of_first_device_alone(replace(shared, threads=1), resolve_devices(shared), graph) is None
    assert find_speeds_of_first_device_alone(shared, resolve_devices(DeviceGroup(devices=("cpu:0",))), graph) is None


def test_layers_in_turn_take_what_a_device_takes_alone_and_gain_less_where_runs_follow_each_other():
    graph = build_matmul_chain_graph(DType.F32, 4, 1)
    plain = plan_for_group(graph, GROUP, hardware=SHARED, split_mode="layer")
    shared = plan_for_group(graph, GROUP, hardware=replace(SHARED, alone_bandwidth=2.0), split_mode="layer")
    assert shared.cost.total == pytest.approx(plain.cost.total / 2, rel=1e-3)
    assert estimate_pipeline_speedup(plain) == pytest.approx(2.0, rel=0.01)
    assert estimate_pipeline_speedup(shared) == pytest.approx(1.0, rel=0.01)


def test_devices_that_work_at_once_are_not_alone():
    def make_stages(*devices: tuple[int, ...]) -> list[TimelineEntry]:
        return [TimelineEntry(COMPUTE, of, 0, 1, 0.0, 0.0, 1.0) for of in devices]

    reduction = TimelineEntry("all_reduce", (0, 1), 1, 1, 0.0, 0.0, 1.0)
    send = replace(reduction, op="send")
    assert is_timeline_sequential([*make_stages((0,)), send, *make_stages((1,))], 2)
    assert not is_timeline_sequential([*make_stages((0, 1)), reduction, *make_stages((0, 1))], 2)
    assert not is_timeline_sequential(make_stages((0,), (1,)), 2)
    graph = build_matmul_chain_graph(DType.F32, 4, 1)
    plan = plan_for_group(graph, GROUP, hardware=replace(SHARED, alone_bandwidth=2.0), split_mode="tensor")
    assert plan.cost == plan_for_group(graph, GROUP, hardware=SHARED, split_mode="tensor").cost
