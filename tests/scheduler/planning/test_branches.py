"""Independent branches of a graph run at the same time on different devices."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import pytest

from hocket import ops
from hocket.backends.base import find_device
from hocket.graph import Graph, PlanError, Value, input, state, weight
from hocket.scheduler import Plan, load, plan_for_group
from hocket.scheduler.costs.hardware import Hardware
from hocket.scheduler.costs.simulated_devices import parse_simulated_group
from hocket.scheduler.planning.branches import BranchScheduler
from hocket.scheduler.planning.candidate import DOUBLED_DEVICES_PENALTY
from hocket.scheduler.planning.plan_builder import PlanBuilder
from hocket.scheduler.serialisation.plan_json import plan_from_json, plan_to_json
from hocket.scheduler.sharding.cost import AssignmentCost
from hocket.scheduler.sharding.pins import Pin, PlacementRules
from hocket.scheduler.verifier.plan_verifier import verify_plan

from ...given.graphs.random_graphs import seeded_graph
from ...given.plans.grouped import as_file_bytes, group_of

BUSY = Hardware(flops=1e6, bandwidth=1e6, launch=0, link_bandwidth=1e9, link_latency=1e-6)
"""Devices that take much longer for a product than for a message."""


def build_tower(x: Value, name: str, layers: int, width: int = 2048) -> Value:
    for i in range(layers):
        x = x + ops.mul_mat(weight(f"{name}.{i}", (width, width), "f16"), ops.rms_norm(x))
    return x


def build_towers(sizes: tuple[int, ...], width: int = 2048, rows: int = 32) -> Graph:
    """Towers with inputs of their own, joined one by one; the last one is the first operand."""
    joined, *others = reversed(
        [build_tower(input(f"x{k}", (rows, width)), f"{k}", n, width) for k, n in enumerate(sizes)]
    )
    for other in others:
        joined = ops.concat(joined, other, axis=1)
    return Graph({"y": joined})


def build_fork(width: int = 2048, rows: int = 32) -> Graph:
    """A trunk, three branches of it, and a trunk again, twice."""
    x: Value = input("x", (rows, width))
    for block in range(2):
        x = build_tower(x, f"trunk{block}", 2, width)
        one, two, three = (build_tower(x, f"{block}.{k}", 3, width) for k in range(3))
        x = one + two + three
    return Graph({"y": x})


def build_experts(width: int = 1024, rows: int = 64) -> Graph:
    x = input("x", (rows, width))
    normed, total = ops.rms_norm(x), x
    for k in range(6):
        up, down = weight(f"{k}.up", (2 * width, width)), weight(f"{k}.down", (width, 2 * width))
        total = total + ops.scale(ops.mul_mat(down, ops.silu(ops.mul_mat(up, normed))), scale=0.1 * k)
    return Graph({"y": total})


def build_ensemble(width: int = 1024, rows: int = 16) -> Graph:
    x = input("x", (rows, width))
    return Graph({f"y{k}": build_tower(x, f"{k}", n, width) for k, n in enumerate((2, 6, 4, 3))})


def build_stateful(width: int = 1024, rows: int = 32) -> Graph:
    """Each branch reads and writes a state of its own."""
    outputs, updates = {}, {}
    for k in range(3):
        old = state(f"s{k}", (rows, width))
        new = build_tower(input(f"x{k}", (rows, width)), f"{k}", 3, width) + old
        outputs[f"y{k}"], updates[old] = build_tower(new, f"{k}b", 2, width), new
    return Graph(outputs, updates)


def build_diamonds(width: int = 2048, rows: int = 64) -> Graph:
    """A chain of forks of two branches that differ in length."""
    x: Value = input("x", (rows, width))
    for block in range(4):
        x = build_tower(x, f"left{block}", 1 + block % 3, width) * build_tower(x, f"right{block}", 2, width)
    return Graph({"y": x})


def build_branch_in_chain(width: int = 2048, rows: int = 256) -> Graph:
    """Three branches of uneven size in a chain."""
    x = build_tower(input("x", (rows, width)), "first", 3, width)
    longest, shorter = build_tower(x, "longest", 4, width), build_tower(x, "shorter", 2, width)
    joined = longest + shorter + ops.mul_mat(weight("shortest", (width, width), "f16"), x)
    return Graph({"y": build_tower(joined, "last", 3, width)})


def build_shared_weights(width: int = 2048, rows: int = 32) -> Graph:
    """Three towers that begin with the same weights."""
    shared, ends = [weight(f"w{i}", (width, width), "f16") for i in range(5)], list[Value]()
    for k in range(3):
        x: Value = input(f"x{k}", (rows, width))
        for each in shared:
            x = x + ops.mul_mat(each, ops.rms_norm(x))
        ends.append(build_tower(x, f"{k}", 2, width))
    return Graph({"y": ops.concat(ops.concat(ends[0], ends[1], axis=1), ends[2], axis=1)})


def build_routed_experts_and_tower(width: int = 1024, rows: int = 64, experts: int = 16) -> Graph:
    """A mixture of experts of three layers, and a tower that runs at the same time."""
    x: Value = input("x", (rows, width))
    for i in range(3):
        normed = ops.rms_norm(x)
        ids = ops.top_k(ops.mul_mat(weight(f"router{i}", (experts, width)), normed), k=2)
        rows_of = ops.reshape(normed, shape=(rows, 1, width))
        up = ops.mul_mat_id(weight(f"up{i}", (experts, 2 * width, width)), rows_of, ids)
        down = ops.mul_mat_id(weight(f"down{i}", (experts, width, 2 * width)), ops.silu(up), ids)
        total = ops.sum_rows(ops.cont(ops.permute(down, axes=(0, 2, 1))))
        x = x + ops.reshape(total, shape=(rows, width))
    return Graph({"y": x + build_tower(input("z", (rows, width)), "tower", 8, width)})


def build_tree(width: int = 1024, rows: int = 64) -> Graph:
    """Sixteen towers that join two by two."""
    level = [build_tower(input(f"x{i}", (rows, width)), f"leaf{i}", 2, width) for i in range(16)]
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=True)
        level = [build_tower(a + b, f"join{len(level)}.{i}", 1, width) for i, (a, b) in enumerate(pairs)]
    return Graph({"y": level[0]})


SMALL_GRAPHS: dict[str, Callable[[], Graph]] = {
    "towers": lambda: build_towers((2, 2, 2, 2), 16, 4),
    "uneven towers": lambda: build_towers((1, 5, 3), 16, 4),
    "fork": lambda: build_fork(16, 4),
    "diamonds": lambda: build_diamonds(16, 4),
    "branch in a chain": lambda: build_branch_in_chain(16, 4),
    "experts": lambda: build_experts(16, 4),
    "ensemble": lambda: build_ensemble(16, 4),
    "states": lambda: build_stateful(16, 4),
    "shared weights": lambda: build_shared_weights(16, 4),
    "routed experts": lambda: build_routed_experts_and_tower(16, 4, 4),
    "tree": lambda: build_tree(16, 4),
}


def run_twice(plan: Plan) -> list[np.ndarray]:
    """Return all outputs of two runs, so that states are written and read."""
    dice = np.random.default_rng(7)
    weights = {v.node.name: as_file_bytes(dice.normal(size=v.shape) / 4, v.dtype) for v in plan.graph.weights}
    inputs = {v.node.name: dice.normal(size=v.shape) for v in plan.graph.inputs}
    executor = load(plan, weights)
    return [value for _ in range(2) for value in executor.run(inputs).values()]


def has_branches(plan: Plan) -> bool:
    return any(reason.startswith("taken: independent branches") for reason in plan.reasons)


@pytest.mark.nightly(cases=17)
@pytest.mark.parametrize("devices", [2, 3, 5])
@pytest.mark.parametrize("name", SMALL_GRAPHS)
def test_branches_on_several_devices_give_the_numbers_of_one_device(name: str, devices: int):
    """Mode auto takes branches, or a plan that is as fast as all plans of branches."""
    graph, group = SMALL_GRAPHS[name](), group_of(devices, "numpy")
    hardware = Hardware(flops=1e6, bandwidth=1e9, launch=0, link_latency=1e-6)
    schedules = build_branches(graph, hardware, devices).find_time_saving_schedules(devices)
    assert schedules
    placed = [PlanBuilder(graph, group, (), hardware).build_branch_plan(schedule) for schedule in schedules]
    auto, fastest = plan_for_group(graph, group, hardware=hardware), min(plan.cost.total for plan in placed)
    assert auto.cost.total <= fastest * (1 + (DOUBLED_DEVICES_PENALTY if has_branches(auto) else 1e-3))
    expected = run_twice(plan_for_group(graph, [find_device("numpy:0")]))
    for plan in (auto, *placed[:2]):
        assert len(plan.device_plans) > 1
        assert all(np.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(run_twice(plan), expected, strict=True))
        assert plan_from_json(plan_to_json(plan)).digest() == plan.digest()


BUILDERS: dict[str, Callable[[], Graph]] = {
    "four towers": lambda: build_towers((6, 6, 6, 6)),
    "uneven towers": lambda: build_towers((2, 9, 5, 3, 7)),
    "four large towers": lambda: build_towers((3, 3, 3, 3), 4096, 512),
    "fork": build_fork,
    "diamonds": build_diamonds,
    "branch in a chain": build_branch_in_chain,
    "experts": build_experts,
    "ensemble": build_ensemble,
    "states": build_stateful,
    "shared weights": build_shared_weights,
    "routed experts": build_routed_experts_and_tower,
    "tree": build_tree,
}
MACHINES = (
    "rtx3090:4,pcie4",
    "rtx4090:3,pcie4",
    "cpu:4",
    "h200:2,nvlink",
    "h200:8,nvlink",
    "a100:4,ethernet",
    "h200:2,nvlink x 2,ib400",
)


def count_leaf_bytes(plan: Plan) -> int:
    return plan.count_memory_bytes_by_kind()["weight"] + plan.count_memory_bytes_by_kind()["state"]


@pytest.mark.nightly(cases=11)
@pytest.mark.long
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", BUILDERS)
def test_no_choice_by_hand_is_three_per_cent_faster_than_auto(name: str, machine: str):
    """Modes on each number of devices, and weights placed one after the other by the first part of their names."""
    graph, simulation = BUILDERS[name](), parse_simulated_group(machine)
    hardware, once = simulation.hardware_for(graph), sum(v.spec.nbytes for v in (*graph.weights, *graph.states))

    def plan(mode: str, devices: int, place: PlacementRules = ()) -> Plan | None:
        try:
            return plan_for_group(graph, simulation.group[:devices], split_mode=mode, hardware=hardware, place=place)
        except PlanError:
            return None

    device_count = len(simulation.group)
    auto = plan("auto", device_count)
    rivals = [plan(mode, n) for mode in ("layer", "tensor", "layer,tensor") for n in range(2, device_count + 1)]
    prefixes = sorted({value.node.name.partition(".")[0] for value in graph.weights})
    for n in range(2, device_count + 1):
        where = [(f"^{prefix}\\b", str(simulation.group[i % n][1])) for i, prefix in enumerate(prefixes)]
        rivals.append(plan("none", device_count, where))
    found = [rival for rival in (plan("none", 1), *rivals) if rival is not None]
    comparable = [p for p in found if count_leaf_bytes(p) <= once * (1 + (len(p.device_plans) - 1) / 2)]
    assert auto is not None
    assert auto.cost.total <= 1.03 * min(p.cost.total for p in comparable)


@pytest.mark.parametrize("name", ["four towers", "fork", "experts", "states"])
def test_the_reasons_name_independent_branches(name: str):
    graph, simulation = BUILDERS[name](), parse_simulated_group("rtx3090:4,pcie4")
    hardware = simulation.hardware_for(graph)
    plan = plan_for_group(graph, simulation.group, hardware=hardware)
    alone = plan_for_group(graph, simulation.group[:1], hardware=hardware)
    assert has_branches(plan)
    assert plan.cost.total < 0.75 * alone.cost.total
    assert plan.count_memory_bytes_by_kind()["weight"] == alone.count_memory_bytes_by_kind()["weight"]
    assert "it is in a branch of its own" in plan.explain()


@pytest.mark.parametrize("machine", ["cpu:2", "rtx3090:2,pcie4"])
def test_a_device_works_on_its_own_branch_before_it_waits_for_another(machine: str):
    """The join reads the tower of the other device first."""
    simulation, graph = parse_simulated_group(machine), build_towers((4, 4))
    plan = plan_for_group(graph, simulation.group, hardware=simulation.hardware_for(graph))
    (receiver,) = (own for own in plan.device_plans if any(n.op == "receive" for n in own.graph.nodes))
    ran = [i.op for i in receiver.program.instructions]
    assert ran.index("receive") > max(at for at, op in enumerate(ran) if op == "mul_mat")


@pytest.mark.parametrize("machine", ["cpu:4", "rtx3090:4,pcie4"])
def test_layers_work_on_towers_at_the_same_time(machine: str):
    simulation, graph = parse_simulated_group(machine), build_towers((6, 6, 6, 6))
    hardware = simulation.hardware_for(graph)
    alone, layers = (
        plan_for_group(graph, simulation.group, split_mode=m, hardware=hardware) for m in ("none", "layer")
    )
    assert layers.cost.total < 0.6 * alone.cost.total


def test_messages_at_the_same_time_do_not_add_up():
    """Three devices send their towers to the first one at the same time."""
    graph = build_towers((1, 1, 1, 1), 64, 4)
    slow = Hardware(flops=1e9, bandwidth=1e12, launch=0, link_latency=1.0)
    joins = [node for node in graph.nodes if node.op == "concat"]
    home = dict.fromkeys(joins, 0)
    for k, node in enumerate(source.node for join in joins for source in join.inputs if source.node.op == "add"):
        for own in Graph({"y": node.results[0]}).nodes:
            home.update({} if own.is_leaf else {own: k})
    pins = {node: Pin(device, "by hand") for node, device in home.items()}
    plan = PlanBuilder(graph, group_of(4, "numpy"), (), slow)._build_with_pinned_nodes(pins)
    assert plan.cost.collective_count == 3
    assert 1.0 < plan.cost.total < 1.1


def build_branches(graph: Graph, hardware: Hardware, devices: int, memory: float = math.inf) -> BranchScheduler:
    seconds = {
        node: hardware.compute_seconds(*work) for node, work in AssignmentCost(graph, 1, hardware).node_work.items()
    }
    return BranchScheduler(graph, devices, hardware, seconds, memory)


def test_one_chain_has_no_branches():
    graph = build_towers((8,), 64, 4)
    branches = build_branches(graph, BUSY, 4)
    assert branches.compute_lower_bound_with_unsplit_clusters(4) is None
    assert branches.estimate_time_share_with_overlap(4) == pytest.approx(1)
    plan = plan_for_group(graph, group_of(4, "numpy"), hardware=BUSY)
    assert not any("independent branches" in reason for reason in plan.reasons)


def test_branches_are_on_devices_that_have_room_for_their_weights():
    graph, tower = build_towers((3, 1, 1, 1), 64, 4), 3 * 64 * 64 * 2
    schedules = build_branches(graph, BUSY, 2, tower).find_time_saving_schedules(2)
    assert schedules
    assert all(sorted(schedule.leaf_bytes) == [tower] * 2 for schedule in schedules)


def test_schedules_keep_to_their_bound_and_list_operands_first():
    graph = build_tree(64, 4)
    branches = build_branches(graph, BUSY, 3)
    for schedule in branches.find_time_saving_schedules(3):
        place = {node: at for at, node in enumerate(schedule.order)}
        assert all(place[s.node] < at for node, at in place.items() for s in node.inputs if not s.node.is_leaf)
        assert branches.compute_time_lower_bound(3) <= schedule.seconds < branches.total_seconds
        assert set(place) == set(schedule.placement) == {node for node in graph.nodes if not node.is_leaf}


@pytest.mark.parametrize("seed", range(40))
def test_branches_of_any_graph_make_a_plan_that_is_proven(seed: int):
    """The verifier accepts plans of random graphs with states, and schedules have all nodes."""
    graph, devices = seeded_graph(seed), random.Random(seed).choice([2, 3, 4])
    slow = Hardware(flops=1e3, bandwidth=1e3, launch=0, link_latency=1e-9)
    planning = PlanBuilder(graph, group_of(devices, "numpy"), (), slow)
    for schedule in build_branches(graph, slow, devices).find_time_saving_schedules(devices):
        assert set(schedule.placement) == {node for node in graph.nodes if not node.is_leaf}
        verify_plan(planning.build_branch_plan(schedule))
    assert plan_for_group(graph, group_of(devices, "numpy"), hardware=slow).device_plans
