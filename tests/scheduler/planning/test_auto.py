"""The mode auto: memory and devices have their price, and rejected candidates are reported."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from hocket import ops
from hocket.backends import base
from hocket.backends.base import find_device
from hocket.backends.numpy.backend import NumpyBackend
from hocket.frontends.commands.plan import read_step_graph_and_context
from hocket.graph import Graph, PlanError, input, state, weight
from hocket.scheduler import plan_for_group
from hocket.scheduler.costs.hardware import DEFAULT_HARDWARE, Estimate
from hocket.scheduler.costs.simulated_devices import SimulatedGpu, parse_simulated_group
from hocket.scheduler.lowering.structural_equality import make_program_key_without_names
from hocket.scheduler.planning.auto_candidates import fit_launch_costs_to_plan
from hocket.scheduler.planning.candidate import Candidate, choose_plan_with_fewest_missing_bytes
from hocket.scheduler.sharding.cost import AssignmentCost

from ...given.models.large_headers import llama_8b, llama_70b, qwen_80b
from ...given.plans.ways import SLOW


def make_candidate(kind, devices, seconds, weight_bytes, lacking=0.0):
    """A way to plan with a plan of these numbers; it notes when it is made."""
    built = []

    def make():
        built.append(kind)
        x = input("x", (1, 4))
        plan = plan_for_group(
            Graph({"y": ops.silu(x)}), parse_simulated_group(f"h200:{devices}").group, choose=lambda g, f: frozenset()
        )
        return plan

    return Candidate(kind, devices, seconds, weight_bytes, lacking, make), built


@pytest.mark.parametrize(
    ("seconds", "weight_bytes", "taken"),
    [
        (0.95, 8.0, "one"),  # a twentieth is too little for a copy on every device
        (0.85, 8.0, "many"),
        (0.95, 1.1, "many"),  # little memory, so that little time pays for it
        (0.995, 1.0, "one"),  # more devices that do not help
        (1.0, 1.0, "one"),
    ],
)
def test_time_is_weighed_against_memory_and_devices(seconds, weight_bytes, taken):
    one, many = (
        Candidate(kind, n, s, h, 0.0, lambda: None)
        for kind, n, s, h in [("one", 1, 1, 1), ("many", 8, seconds, weight_bytes)]
    )
    assert min(one, many, key=lambda w: w.compute_device_and_copy_penalised_seconds(1.0)).kind == taken


@pytest.mark.parametrize(("seconds", "taken"), [(0.995, 8), (0.98, 16)])
def test_machines_are_joined_only_where_that_helps(seconds, taken):
    candidates = [Candidate("way", n, s, 1.0, 0.0, lambda: None) for n, s in [(8, 1.0), (16, seconds)]]
    assert min(candidates, key=lambda w: w.compute_device_and_copy_penalised_seconds(1.0)).device_count == taken


def test_plans_are_built_of_the_best_candidates_until_one_reaches_its_estimate():
    slow, plain, short = (
        make_candidate("slow", 2, 1.0, 1.0),
        make_candidate("quick", 2, 0.0, 1.0),
        make_candidate("short", 2, 0.0, 1.0, lacking=5.0),
    )
    plan = choose_plan_with_fewest_missing_bytes([slow[0], plain[0], short[0]], 1.0)
    assert (slow[1], plain[1], short[1]) == ([], ["quick"], [])
    assert plan.reasons[-3].startswith("taken: quick, on 2 devices: ")
    assert plan.reasons[-2].startswith("left aside: slow, on 2 devices: about 1 s")
    assert "% slower" in plan.reasons[-2]
    assert plan.reasons[-1].endswith("5 B short; does not fit")


def test_a_candidate_that_cannot_be_built_is_left_aside_with_its_reason():
    one, _ = make_candidate("one", 1, 1.0, 1.0)

    def refuse_candidate():
        raise PlanError("stages go back")

    taken = choose_plan_with_fewest_missing_bytes([one, Candidate("many", 4, 0.1, 1.0, 0.0, refuse_candidate)], 1.0)
    assert "left aside: many, on 4 devices; it cannot be built: stages go back" in taken.reasons


def test_a_record_of_the_planner_with_a_wrong_type_is_no_reason_to_leave_a_candidate_aside():
    """The planner built the record, so hocket is at fault; the error is raised."""
    one, _ = make_candidate("one", 1, 1.0, 1.0)
    x = input("x", (1, 4))
    plan = plan_for_group(Graph({"y": ops.silu(x)}), [find_device("numpy:0")])
    (device_plan,) = plan.device_plans
    hollow = replace(device_plan, program=replace(device_plan.program, buffers=None))
    many = Candidate("many", 4, 0.1, 1.0, 0.0, lambda: replace(plan, device_plans=(hollow,)))
    with pytest.raises(PlanError, match=r"Program.buffers is None"):
        choose_plan_with_fewest_missing_bytes([one, many], 1.0)


def leaves_only() -> Graph:
    x, s = input("x", (2, 6)), state("s", (2, 6))
    return Graph({"s": s, "turned": ops.transpose(x)}, {s: x})


def read_before_written() -> Graph:
    """A state that is read by early layers and written by late ones."""
    a, x = state("a", (4, 6)), input("x", (2, 6))
    h = ops.mul_mat(weight("w", (6, 6)), x)
    late = ops.concat(ops.slice_(a, axis=0, start=2, stop=4), h, axis=0)
    early = ops.mul_mat(weight("w2", (3, 3)), ops.reshape(a, shape=(8, 3)))
    return Graph({"early": early, "late": late}, {a: late})


@pytest.mark.parametrize("hardware", [DEFAULT_HARDWARE, SLOW], ids=["fast", "slow"])
@pytest.mark.parametrize("count", [2, 4, 5, 8])
@pytest.mark.parametrize("build", [leaves_only, read_before_written])
def test_auto_refuses_no_graph_that_one_device_can_run(build, count, hardware):
    assert plan_for_group(
        build(), [find_device(f"numpy:{number}") for number in range(count)], hardware=hardware
    ).device_plans


@pytest.mark.parametrize("kind", ["cuda-emulated", "hip-emulated", "third-party.kind", "numpy"])
@pytest.mark.parametrize("mode", ["none", "auto"])
def test_a_device_of_any_kind_may_be_left_free(kind, mode, monkeypatch):
    if kind == "third-party.kind":

        class Other(NumpyBackend):
            name = kind

            def device(self, index):
                return replace(super().device(index), kind=kind)

        monkeypatch.setattr(base, "load_backend", lambda asked: Other())
    new_plan = plan_for_group(
        Graph({"y": ops.silu(input("x", (1, 4)))}), [find_device(f"{kind}:{n}") for n in (0, 1)], split_mode=mode
    )
    assert new_plan.unused_devices == (f"{kind}:1",)


def test_estimates_are_corrected_by_the_error_of_the_first_one():
    """Check a search with an estimate of a thousandth of the plan's time: the other estimates are scaled likewise."""
    (first, one), (second, two) = make_candidate("first", 2, 1e-9, 1.0), make_candidate("second", 2, 1.01e-9, 1.0)
    plan = choose_plan_with_fewest_missing_bytes(
        [replace(first, is_from_search=True), replace(second, is_from_search=True)], 1.0
    )
    assert (one, two) == (["first"], [])
    assert plan.reasons[-1].startswith("left aside: second, on 2 devices: about")
    assert plan.reasons[-1].endswith("1.0% slower")
    choose_plan_with_fewest_missing_bytes(
        [replace(first, is_from_search=True), second], 1.0
    )  # other estimates are taken at their word
    assert two == ["second"]


@pytest.mark.parametrize(("stages", "planned"), [(2, ["few"]), (4, [])])
def test_what_many_stages_did_not_keep_says_nothing_of_few(stages, planned):
    (many, _), (few, built) = make_candidate("many", 4, 1e-9, 1.0), make_candidate("few", 4, 2e-9, 1.0)
    choose_plan_with_fewest_missing_bytes(
        [
            replace(many, assumes_pipelining=True, stage_count=4),
            replace(few, assumes_pipelining=True, stage_count=stages),
        ],
        1.0,
    )
    assert built == planned


def test_an_estimate_with_pipelining_is_not_corrected_by_a_plan_without():
    (one, _), (stages, built) = make_candidate("one", 4, 1e-9, 1.0), make_candidate("stages", 4, 2e-9, 1.0)
    stages = replace(stages, is_from_search=True, assumes_pipelining=True, stage_count=2)
    choose_plan_with_fewest_missing_bytes([replace(one, is_from_search=True), stages], 1.0)
    assert built == ["stages"]


@pytest.mark.parametrize("tokens", [1, 16])
def test_launch_costs_are_fitted_so_that_nodes_take_the_time_of_the_plan(tmp_path, tokens):
    """Check with launches that have their own cost in each class, as GPUs have."""
    graph, _ = read_step_graph_and_context(llama_8b(tmp_path / "model.gguf", layers=2), context=64, tokens=tokens)
    simulation = parse_simulated_group("h200:1")
    hardware = simulation.hardware_for(graph)
    plan, costs = plan_for_group(graph, simulation.group, hardware=hardware), AssignmentCost(graph, 1, hardware)
    fitted = fit_launch_costs_to_plan(costs, plan)
    assert fitted.op_launch
    assert sum(fitted.compute_seconds(*work) for work in costs.node_work.values()) == pytest.approx(plan.cost.total)


@pytest.mark.parametrize(("devices", "follows", "planned"), [(4, False, []), (4, True, ["all"]), (2, False, ["all"])])
def test_stages_in_turn_take_no_less_than_one_that_has_all_layers(devices, follows, planned):
    (one, _), (stages, built) = make_candidate("one", 4, 1e-9, 1.0), make_candidate("all", 8, 2e-9, 1.0)
    one = replace(one, group_sharding=(4, frozenset()))
    choose_plan_with_fewest_missing_bytes(
        [one, replace(stages, stage_count=2, assumes_pipelining=follows, group_sharding=(devices, frozenset()))], 1.0
    )
    assert built == planned


def test_layers_across_halves_of_a_machine_are_considered(tmp_path):
    graph, _ = read_step_graph_and_context(llama_70b(tmp_path / "model.gguf", layers=4), context=1024, tokens=1)
    simulation = parse_simulated_group("h200:4,nvlink")
    plan = plan_for_group(graph, simulation.group, hardware=simulation.hardware)
    assert any("layers across 2 teams, cut within each, on 4 devices" in why for why in plan.reasons)


def test_a_candidate_is_planned_after_one_with_overlap_only_if_full_overlap_would_suffice():
    (first, one), (second, two) = make_candidate("first", 4, 0.9, 1.0), make_candidate("second", 2, 3.0, 1.0)
    hidden = replace(first, is_from_search=True, build_plan=lambda: with_hidden(first.build_plan(), 0.5))
    choose_plan_with_fewest_missing_bytes([hidden, replace(second, is_from_search=True, lower_bound_seconds=2.0)], 1.0)
    assert (one, two) == (["first"], [])
    choose_plan_with_fewest_missing_bytes([hidden, replace(second, is_from_search=True, lower_bound_seconds=0.5)], 1.0)
    assert two == ["second"]


def with_hidden(plan, seconds):
    """Return the plan as if this part of its collectives were hidden by work."""
    object.__setattr__(plan, "cost", Estimate(1.0, seconds, 1, seconds))
    return plan


@pytest.mark.long
def test_kernels_are_listed_once_for_devices_with_programs_of_equal_structure(tmp_path, monkeypatch):
    graph, _ = read_step_graph_and_context(llama_8b(tmp_path / "model.gguf", layers=2), context=64, tokens=1)
    simulation, listed = parse_simulated_group("h200:8,nvlink"), []
    list_kernels = SimulatedGpu.list_kernels
    monkeypatch.setattr(
        SimulatedGpu, "list_kernels", lambda self, *asked: (listed.append(asked), list_kernels(self, *asked))[1]
    )
    plan = plan_for_group(graph, simulation.group, split_mode="layer,tensor", hardware=simulation.hardware_for(graph))
    assert plan.cost.total > 0
    programs = {id(device_plan.program): device_plan.program for device_plan in plan.device_plans}
    keys = {make_program_key_without_names(program) for program in programs.values()}
    asked = [id(program) for program, _ in listed if id(program) in programs]
    assert len(asked) == len(keys) < len(programs)
    assert plan.pipelined_timeline is plan.timeline


def test_instructions_of_a_chain_share_its_launch(tmp_path):
    graph, _ = read_step_graph_and_context(llama_8b(tmp_path / "model.gguf", layers=2), context=64, tokens=1)
    simulation = parse_simulated_group("h200:1")
    plan = plan_for_group(graph, simulation.group, hardware=simulation.hardware)
    (device_plan,) = plan.device_plans
    assert sum(device_plan.predict_launches_by_instruction()) == pytest.approx(len(device_plan.predicted_kernel_calls))
    assert len(device_plan.predicted_kernel_calls) < 0.7 * len(device_plan.program.instructions)
    dear = replace(plan, hardware=replace(plan.hardware, launch=plan.hardware.launch + 1e-3))
    assert dear.cost.total - plan.cost.total == pytest.approx(len(device_plan.predicted_kernel_calls) * 1e-3)


@pytest.mark.parametrize(
    ("layers", "devices"), [(12, 2), pytest.param(48, 8, marks=[pytest.mark.long(), pytest.mark.nightly(cases=0)])]
)
def test_devices_that_do_not_help_are_left_free_and_the_first_line_says_so(tmp_path, layers, devices):
    """One token of a mixture of experts waits for launches, which no cut makes fewer."""
    graph, _ = read_step_graph_and_context(qwen_80b(tmp_path / "model.gguf", layers=layers), context=1024, tokens=1)
    simulation = parse_simulated_group(f"h200:{devices},nvlink")
    plan = plan_for_group(graph, simulation.group, hardware=simulation.hardware)
    free = [str(device) for _, device in simulation.group[1:]]
    assert list(plan.unused_devices) == free
    assert re.match(r"h200:[1-7-]+ left free; ", plan.explain())
    once = sum(v.spec.nbytes for v in (*graph.weights, *graph.states))
    stored_bytes = plan.count_memory_bytes_by_kind()["weight"] + plan.count_memory_bytes_by_kind()["state"]
    assert stored_bytes < 1.2 * once


@pytest.mark.nightly(cases=7)
@pytest.mark.long
@pytest.mark.parametrize("tokens", [1, 512])
@pytest.mark.parametrize("devices", ["h200:1", "h200:4,nvlink", "rtx4090:2", "h100:2,ethernet", "cpu:2"])
@pytest.mark.parametrize("model", [llama_70b, qwen_80b])
def test_auto_is_no_slower_than_what_is_chosen_by_hand(tmp_path, model, devices, tokens):
    """Check all plans except copies of weights on every device that gain less than a tenth."""
    graph, _ = read_step_graph_and_context(model(tmp_path / "model.gguf", layers=4), context=1024, tokens=tokens)
    simulation = parse_simulated_group(devices)
    auto = plan_for_group(graph, simulation.group, hardware=simulation.hardware).cost.total
    for count in {1, 2, len(simulation.group)}:
        for mode in ("layer", "tensor") if count > 1 else ("none",):
            plan = plan_for_group(graph, simulation.group[:count], split_mode=mode, hardware=simulation.hardware)
            memory, once = (
                plan.count_memory_bytes_by_kind(),
                sum(v.spec.nbytes for v in (*graph.weights, *graph.states)),
            )
            copies = memory["weight"] + memory["state"] > 1.1 * once
            assert auto <= plan.cost.total * {"none": 1.0}.get(mode, 1 / 0.9 if copies else 1.03), (mode, count)
