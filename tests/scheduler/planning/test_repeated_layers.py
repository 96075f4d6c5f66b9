"""Plans that repeat a shortened graph equal plans that are lowered step by step, and are verified."""

from __future__ import annotations

import dataclasses
from copy import copy
from functools import cache

import numpy as np
import pytest

from hocket.backends.base import find_device
from hocket.backends.capabilities import KernelCall, SourceLocation
from hocket.backends.cpu.backend import CpuBackend
from hocket.graph import PlanError
from hocket.scheduler import Plan, load, parse_simulated_group, plan_for_group
from hocket.scheduler.lowering.device_plan import build_device_plans
from hocket.scheduler.lowering.unroll import find_short_repetition_of_each_instruction, unroll_kernel_calls
from hocket.scheduler.planning import repeated_layers
from hocket.scheduler.verifier.plan_verifier import find_plan_faults

from ...given.graphs.layered import KV, D, decoder, perceptron
from ...given.plans.ways import SLOW, difference, results, values_of

GRAPHS = {
    "decoder": (decoder(9), 3, (3, 2, 1)),
    "few heads": (decoder(12, kv_heads=2), 4, (1, 1, 1, 2)),
    "even shares": (decoder(6), 2, (1, 1)),
    "more layers than kinds": (decoder(14), 3, (5, 4, 2)),
    "perceptron": (perceptron(12), 3, (3, 2, 2)),
}


def plan_graph(name: str, backend: str = "cpu") -> Plan:
    graph, devices, shares = GRAPHS[name]
    group = [find_device(f"{backend}:{d}") for d in range(devices)]
    return plan_for_group(graph, group, split_mode="tensor", tensor_split=shares, hardware=SLOW)


@cache
def _plan_repeated_graph_once(name: str) -> Plan:
    return plan_graph(name)


def plan_repeated_graph(name: str) -> Plan:
    """Return a fresh copy of the plan for CPUs, without values that an earlier test derived from it."""
    plan = copy(_plan_repeated_graph_once(name))
    object.__setattr__(plan, "device_plans", tuple(map(copy, plan.device_plans)))
    return plan


@pytest.fixture(autouse=True)
def allow_any_gain(monkeypatch):
    monkeypatch.setattr(repeated_layers, "MIN_SAVED_NODES", 1)


def step_by_step(plan: Plan) -> Plan:
    """Return the same plan without its repetition."""
    return dataclasses.replace(
        plan, device_plans=tuple(dataclasses.replace(device_plan) for device_plan in plan.device_plans)
    )


@pytest.mark.long
@pytest.mark.parametrize("name", GRAPHS)
def test_what_is_proven_of_a_short_plan_holds_of_the_long_one_step_by_step(name):
    plan = plan_repeated_graph(name)
    assert all(
        device_plan.short is not None and "program" not in vars(device_plan) for device_plan in plan.device_plans
    )
    assert list(find_plan_faults(plan)) == []
    long = step_by_step(plan)
    assert all(device_plan.short is None for device_plan in long.device_plans)
    assert list(find_plan_faults(long)) == []


@pytest.mark.parametrize("name", GRAPHS)
def test_a_plan_that_repeats_itself_computes_what_one_device_does(name):
    plan = plan_graph(name, "reference")
    values = values_of(plan.graph, 1)
    alone = plan_for_group(plan.graph, [find_device("reference:0")])
    for got, want in zip(results(plan, values), results(alone, values), strict=True):
        assert got.keys() == want.keys()
        assert not any(difference(np.asarray(got[key]), np.asarray(want[key])) for key in want)


@pytest.mark.parametrize("name", GRAPHS)
def test_a_plan_over_weights_that_lie_already_repeats_itself_too(name):
    plan = plan_repeated_graph(name)
    again = plan_for_group(plan.graph, plan.group, hardware=SLOW, like=plan)
    assert all(
        device_plan.short is not None and "program" not in vars(device_plan) for device_plan in again.device_plans
    )
    assert again.leaves == plan.leaves


@pytest.mark.parametrize("name", GRAPHS)
def test_a_plan_lowered_step_by_step_takes_the_shares_of_loaded_weights(name, monkeypatch):
    """Check that shares of repeated runs recur sooner than rounding evens out."""
    plan = plan_repeated_graph(name)
    monkeypatch.setattr(repeated_layers, "MIN_SAVED_NODES", float("inf"))
    again = plan_for_group(plan.graph, plan.group, hardware=SLOW, like=plan)
    assert all(device_plan.short is None for device_plan in again.device_plans)
    assert again.leaves == plan.leaves
    assert again.count_collectives() == plan.count_collectives()
    assert list(find_plan_faults(again)) == []


def test_leaves_lie_as_the_programs_of_the_long_plan_have_them():
    plan = plan_repeated_graph("more layers than kinds")
    assert plan.leaves.keys() == {node.name for node in plan.graph.nodes if node.is_leaf}
    for device, device_plan in enumerate(plan.device_plans):
        rows = {b.name: b.declared_spec.shape[0] for b in device_plan.program.buffers if b.name.endswith("gate")}
        assert len(rows) == 14
        assert rows == {name: plan.leaves[name].count_entries(device) for name in rows}


def test_a_device_regains_in_later_runs_the_rows_that_rounding_takes():
    plan = plan_repeated_graph("more layers than kinds")
    assert plan.device_plans[0].short.shortened_graph.short_count == 8
    caches = [layout for name, layout in plan.leaves.items() if name.endswith("cache_k")]
    heads = [sum(layout.count_entries(device) for layout in caches) / D for device in range(3)]
    assert all(abs(n - 14 * KV * share / 11) < 2.5 for n, share in zip(heads, (5, 4, 2), strict=True))


def test_a_plan_that_saves_little_is_lowered_step_by_step(monkeypatch):
    monkeypatch.setattr(repeated_layers, "MIN_SAVED_NODES", 20_000)
    assert all(device_plan.short is None for device_plan in plan_graph("decoder").device_plans)


def test_fused_kernels_of_an_unrolled_program_are_verified_when_it_is_loaded(monkeypatch):
    plan = plan_repeated_graph("decoder")
    right = CpuBackend.describe_fusion

    def leave_out_an_instruction(self, program):
        fusion = right(self, program)
        return dataclasses.replace(fusion, order=fusion.order[:-1])

    monkeypatch.setattr(CpuBackend, "describe_fusion", leave_out_an_instruction)
    with pytest.raises(PlanError, match=r"^program of \d+ steps: order: instruction \d+ runs 0 times$"):
        load(plan, values_of(plan.graph, 1))


@pytest.mark.long
def test_runs_that_cannot_be_repeated_are_planned_one_by_one_and_the_plan_says_why(monkeypatch):
    monkeypatch.setattr(
        repeated_layers, "build_device_plans", lambda graphs, group, of: build_device_plans(graphs, group)
    )
    monkeypatch.setattr(repeated_layers, "_has_repeatable_instructions", lambda device_plan, of: True)
    plan = plan_graph("decoder")
    assert all(device_plan.short is None for device_plan in plan.device_plans)
    assert any("planned by itself" in why for why in plan.reasons)
    assert list(find_plan_faults(plan)) == []


@pytest.mark.parametrize(("name", "devices"), [("decoder", 2), ("perceptron", 3), ("decoder", 1)])
def test_kernels_of_repeated_runs_are_those_of_a_plan_lowered_step_by_step(name, devices, monkeypatch):
    """Check that products are launched together in both, without a look at the long program."""
    graph, group = GRAPHS[name][0], parse_simulated_group(f"h200:{devices},nvlink").group
    plan = plan_for_group(graph, group, split_mode="tensor")
    assert any("program" not in vars(device_plan) for device_plan in plan.device_plans)
    calls = [(call.kernel, call.instruction_numbers) for call in plan.device_plans[0].predicted_kernel_calls]
    assert "program" not in vars(plan.device_plans[0])
    long = plan.device_plans[0].backend.list_kernels(plan.device_plans[0].program, plan.device_plans[0].device)
    assert calls == [(call.kernel, call.instruction_numbers) for call in long]
    assert any(len(numbers) > 1 for _, numbers in calls) == (name == "decoder")
    monkeypatch.setattr(repeated_layers, "MIN_SAVED_NODES", float("inf"))
    assert plan.cost == pytest.approx(plan_for_group(graph, group, split_mode="tensor").cost)


def test_a_kernel_of_two_runs_is_predicted_by_the_long_program():
    short = plan_repeated_graph("decoder").device_plans[0].short
    kinds = find_short_repetition_of_each_instruction(short.graph, short.program, short.shortened_graph)
    first, last = kinds.index(0), len(kinds) - 1
    calls = [KernelCall("one", SourceLocation(""), (n,)) for n in range(len(kinds))]
    assert len(unroll_kernel_calls(short.graph, short.program, short.shortened_graph, calls)) == len(
        short.unrolled_graph_and_program[1].instructions
    )
    assert (
        unroll_kernel_calls(
            short.graph, short.program, short.shortened_graph, [KernelCall("two", SourceLocation(""), (first, last))]
        )
        is None
    )


def test_memory_for_intermediate_values_grows_little(monkeypatch):
    short = plan_repeated_graph("decoder").count_memory_bytes_by_kind()["arena"]
    monkeypatch.setattr(repeated_layers, "MIN_SAVED_NODES", float("inf"))
    assert short <= 1.1 * plan_graph("decoder").count_memory_bytes_by_kind()["arena"]
