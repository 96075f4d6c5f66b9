"""Layers over teams of devices, each stage cut among its team."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hocket import ops
from hocket.backends.base import find_devices
from hocket.graph import Graph, PlanError, input, state, weight
from hocket.scheduler import parse_simulated_group, plan_for_group, plan_from_json, plan_to_json
from hocket.scheduler.ir.layout import Local, Shard
from hocket.scheduler.lowering.device_plan import find_collective_group_of_each_device
from hocket.scheduler.runtime.virtual_clock import simulate_run
from hocket.scheduler.sharding.hybrid_split import split_devices_into_groups
from hocket.scheduler.verifier.plan_verifier import find_plan_faults

from ...given.plans.faults import SLOW, decoder
from ...given.plans.ways import compare_results, results, values_of

MODE = "layer,tensor"


def group(kind, devices):
    return find_devices([f"{kind}:{d}" for d in range(devices)], None)


def plan_stages(graph=None, kind="numpy", devices=4, **options):
    return plan_for_group(graph or decoder(), group(kind, devices), split_mode=MODE, hardware=SLOW, **options)


def blocks(layers, width=8, name="b"):
    """A residual of blocks that are all alike, each with a state."""
    x = input("x", (2, width))
    updates = {}
    for i in range(layers):
        old_state = state(f"{name}{i}.kept", (2, 2 * width))
        wide = ops.add(ops.silu(ops.mul_mat(weight(f"{name}{i}.up", (2 * width, width)), x)), old_state)
        updates[old_state] = wide
        x = ops.add(x, ops.mul_mat(weight(f"{name}{i}.down", (width, 2 * width)), wide), name=f"{name}{i}.out")
    return Graph({"y": x}, updates)


def widths(graph, factors):
    """The inner width of each block."""
    return frozenset(f for w in graph.weights if w.node.name.endswith("up") for f in factors.axes_of(w)[0][0])


@pytest.mark.parametrize(("make", "devices", "shares"), [(decoder, 4, ()), (lambda: blocks(3), 6, (3, 1, 1, 2, 1, 1))])
def test_sharded_stages_give_the_results_of_one_device(make, devices, shares):
    graph = make()
    values = values_of(graph, 1)
    plan = plan_stages(graph, "reference", devices, tensor_split=shares)
    assert {
        len(members)
        for members in find_collective_group_of_each_device([device_plan.program for device_plan in plan.device_plans])
    } == {devices // 2}
    assert not compare_results(results(plan, values), results(plan_for_group(graph, group("reference", 1)), values))


def test_a_state_that_no_node_reads_stays_with_its_group():
    wide, few, old_state = weight("wide", (8, 6)), weight("few", (7,)), state("kept", (8,))
    new = ops.reshape(ops.mul_mat(wide, input("x", (1, 6))), shape=(8,))
    outputs = {
        "y": new,
        "z": ops.cont(ops.transpose(input("up", (1, 6)))),
        "v": ops.gather(few, input("i", (3,), "i32")),
    }
    graph = Graph(outputs, {old_state: new})
    values = {**values_of(graph, 3), "i": np.array([0, 6, 2])}
    plan = plan_stages(graph, "reference", choose=lambda g, f: frozenset(f.axes_of(wide)[1][0]))
    assert plan.leaves["kept"] == Local((2, 3)), "the graph has to be one whose new value is made before"
    assert not compare_results(results(plan, values), results(plan_for_group(graph, group("reference", 1)), values))


def test_devices_that_only_send_messages_are_one_group_and_still_run_collectives_in_their_memory():
    plan = plan_for_group(decoder(), group("reference", 3), split_mode="layer")
    assert (
        find_collective_group_of_each_device([device_plan.program for device_plan in plan.device_plans])
        == ((0, 1, 2),) * 3
    )


def test_compiled_code_sums_in_groups():
    graph = blocks(3, 32)
    values = values_of(graph, 1)
    want = results(plan_for_group(graph, group("cpu", 1)), values)
    for got, right in zip(results(plan_stages(graph, "cpu"), values), want, strict=True):
        for name, array in right.items():
            assert np.abs(got[name] - array).max() <= 1e-5 * np.abs(array).max()


def test_each_stage_holds_its_own_layers_sharded_in_its_group():
    plan = plan_stages(blocks(2), choose=widths)
    assert plan.leaves["b0.up"] == Shard(0, (((0, 8),), ((8, 8),), (), ()))
    assert plan.leaves["b1.up"] == Shard(0, ((), (), ((0, 8),), ((8, 8),)))
    assert plan.leaves["b1.kept"] == Shard(1, ((), (), ((0, 8),), ((8, 8),)))
    assert plan.outputs["y"] == Local((2,))
    assert [r for r in plan.reasons if r.startswith("stage ")] == [
        "stage 0 of the layers is on numpy:0, numpy:1",
        "stage 1 of the layers is on numpy:2, numpy:3",
    ]


def test_a_weight_that_two_stages_shard_on_different_axes_is_whole_on_both():
    x, shared = input("x", (2, 8)), weight("shared", (8, 8))
    first = ops.mul_mat(weight("a", (8, 32)), ops.silu(ops.mul_mat(weight("b", (32, 8)), ops.mul_mat(shared, x))))
    last = ops.mul_mat(weight("c", (8, 32)), ops.silu(ops.mul_mat(weight("d", (32, 8)), first)))
    graph = Graph({"y": ops.mul_mat(ops.transpose(shared), last)})
    plan, values = plan_stages(graph, "reference"), values_of(graph, 2)
    assert not compare_results(results(plan, values), results(plan_for_group(graph, group("reference", 1)), values))


def test_a_plan_in_json_is_the_same_plan():
    plan = plan_for_group(blocks(2), group("numpy", 4), split_mode=MODE, hardware=replace(SLOW, launch=1e-9, machine=2))
    again = plan_from_json(plan_to_json(plan))
    assert again.digest() == plan.digest()
    assert again.hardware == plan.hardware


def test_device_groups_are_machines_or_the_squarest_division():
    assert split_devices_into_groups(0, 6) == [[0, 1, 2], [3, 4, 5]]
    assert split_devices_into_groups(2, 6) == [[0, 1], [2, 3], [4, 5]]
    for machine, devices in ((0, 3), (4, 6), (1, 4)):
        with pytest.raises(PlanError, match="layer,tensor needs device groups of equal size"):
            split_devices_into_groups(machine, devices)


def test_what_cannot_be_staged_is_refused_in_one_line():
    with pytest.raises(PlanError, match="leave place='REGEX=DEVICE' out"):
        plan_stages(place=[("wq", "numpy:1")])
    with pytest.raises(PlanError, match="nothing to cut within a stage"):
        plan_stages(Graph({"y": ops.neg(input("x", (2,)))}))


def test_the_verifier_finds_a_device_that_stays_away_from_its_group():
    plan = plan_stages(blocks(3))
    others = plan_for_group(blocks(3), group("numpy", 4), split_mode="tensor", hardware=SLOW)
    for number in (0, 3):
        mixed = list(plan.device_plans)
        mixed[number] = replace(others.device_plans[number], device=plan.device_plans[number].device)
        assert list(find_plan_faults(replace(plan, device_plans=tuple(mixed))))
    swapped = [plan.device_plans[d] for d in (2, 1, 0, 3)]
    device_plans = tuple(
        replace(device_plan, device=plan.device_plans[d].device) for d, device_plan in enumerate(swapped)
    )
    assert list(find_plan_faults(replace(plan, device_plans=device_plans)))


def test_the_virtual_clock_runs_device_groups():
    plan = plan_stages(blocks(2), "null")
    assert simulate_run(plan).total_seconds > 0


def test_machines_are_simulated_with_the_link_between_them():
    mesh = parse_simulated_group("h200:2,nvlink x 3,ib400")
    assert [str(device) for _, device in mesh.group] == [f"h200:{i}" for i in range(6)]
    assert mesh.hardware.machine == 2
    assert mesh.hardware.count_machines((1, 2)) == 2
    assert mesh.hardware.count_machines((2, 3)) == 1
    assert mesh.hardware.collective_seconds(1e9, 2) > mesh.hardware.collective_seconds(1e9)
    assert mesh.hardware.collective_seconds(0.0, 8) == 3 * mesh.hardware.collective_seconds(0.0, 2)
    for wrong in ("h200:2 x 3", "h200:2 x 0,ib400", "h200:2 x 3,wires", "h200:200 x 6,ib400", "x 3,ib400"):
        with pytest.raises(PlanError, match="cannot simulate"):
            parse_simulated_group(wrong)


def test_auto_says_what_stages_across_machines_would_take():
    mesh = parse_simulated_group("h200:2,nvlink x 2,ib400")
    plan = plan_for_group(blocks(4, 256), mesh.group, hardware=mesh.hardware)
    assert any("layers across 2 machines, cut within each, on 4 devices" in reason for reason in plan.reasons)
    assert plan.cost.total <= plan_for_group(blocks(4, 256), mesh.group[:1], hardware=mesh.hardware).cost.total


def test_states_of_stages_are_read_and_written_as_one_array():
    graph = blocks(2)
    values = values_of(graph, 3)
    first, _, states = results(plan_stages(graph), values)
    assert states["b1.kept"].shape == (2, 16)
    assert np.isfinite(first["y"]).all()
