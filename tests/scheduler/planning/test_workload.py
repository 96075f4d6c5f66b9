"""The mode auto where runs follow each other: layouts are judged by prompts and the tokens behind them."""

from __future__ import annotations

import re
from functools import cache

import pytest

from hocket.frontends.inference.model_layout import create_layout_workload
from hocket.frontends.models import Step
from hocket.frontends.open_model import open_model
from hocket.scheduler import plan_for_group
from hocket.scheduler.costs.simulated_devices import parse_simulated_group

from ...given.models.large_headers import llama_8b

CONTEXT = 4096


def layout(tmp_path, machine, sequences, mode="auto", devices=None, layers=4):
    """The plan of a step, and the use that it was made for."""
    model = open_model(llama_8b(tmp_path / "model.gguf", layers=layers), header_only=True)
    use = create_layout_workload(
        lambda n, tokens: model.graph(Step(n, tokens, CONTEXT, CONTEXT, n)), sequences, CONTEXT
    )
    graph, simulation = use.build_graph(sequences, 1), parse_simulated_group(machine)
    hardware = simulation.hardware_for(graph)
    return plan_for_group(graph, simulation.group[:devices], split_mode=mode, hardware=hardware, use=use), use


def score_plan(plan, use):
    """By plans that are proven."""
    return use.score_plans(
        cache(lambda *asked: plan_for_group(use.build_graph(*asked), plan.group, hardware=plan.hardware, like=plan))
    )


@pytest.mark.long
def test_layers_are_taken_where_micro_batches_keep_devices_busy_that_a_slow_link_joins(tmp_path):
    plan, _ = layout(tmp_path, "a100:4,ethernet", 16, layers=8)
    assert plan.reasons[0] == "judged by 16 sequences, each of a prompt of 512 tokens and 128 steps"
    taken = re.compile(r"taken: layers \(in [24] micro-batches, prompts in [4-8] parts\), on [24] devices: ")
    assert any(map(taken.match, plan.reasons)), plan.reasons


@pytest.mark.long
def test_models_are_sharded_where_links_are_fast(tmp_path):
    plan, _ = layout(tmp_path, "h200:4,nvlink", 8)
    assert any(reason.startswith("taken: cut") for reason in plan.reasons), plan.reasons


@pytest.mark.long
def test_halves_of_a_machine_that_follow_each_other_are_built_though_a_single_stage_missed_its_estimate(tmp_path):
    plan, _ = layout(tmp_path, "h200:4,nvlink", 16, layers=2)
    taken = "taken: layers across 2 teams, cut within each (in 2 micro-batches"
    assert any(reason.startswith(taken) for reason in plan.reasons), plan.reasons


@pytest.mark.long
def test_without_a_workload_a_layout_is_scored_by_one_run(tmp_path):
    _, use = layout(tmp_path, "a100:2,ethernet", 16)
    graph, simulation = use.build_graph(16, 1), parse_simulated_group("a100:2,ethernet")
    plan = plan_for_group(graph, simulation.group, hardware=simulation.hardware_for(graph))
    assert not any("judged by" in reason or "micro-batches" in reason for reason in plan.reasons)


def test_the_predicted_time_of_a_workload_is_the_time_of_verified_plans(tmp_path):
    plan, use = layout(tmp_path, "a100:2,ethernet", 16, mode="layer")
    seconds, how = score_plan(plan, use)
    step = plan_for_group(use.build_graph(8, 1), plan.group, hardware=plan.hardware, like=plan).cost.total
    assert re.fullmatch("in 2 micro-batches, prompts in [4-8] parts", how), how
    assert seconds > 128 * step, "two micro-batches on two devices take as long as one of them by itself, or longer"


@pytest.mark.nightly(cases=3)
@pytest.mark.long
@pytest.mark.parametrize("sequences", [1, 16])
@pytest.mark.parametrize("machine", ["h200:4,nvlink", "rtx4090:2,pcie4", "a100:4,ethernet", "h200:2,nvlink x 2,ib400"])
def test_auto_is_no_slower_for_a_use_than_what_is_chosen_by_hand(tmp_path, machine, sequences):
    """Check all plans except copies of weights on every device that gain less than a tenth."""
    auto, use = layout(tmp_path, machine, sequences)
    own = score_plan(auto, use)[0]
    for count in {1, 2, len(parse_simulated_group(machine).group)}:
        for mode in ("layer", "tensor", "layer,tensor")[: 2 + (count > 2)] if count > 1 else ("none",):
            plan, _ = layout(tmp_path, machine, sequences, mode, count)
            once = sum(v.spec.nbytes for v in (*plan.graph.weights, *plan.graph.states))
            copies = (
                plan.count_memory_bytes_by_kind()["weight"] + plan.count_memory_bytes_by_kind()["state"] > 1.1 * once
            )
            dear = 1 / 0.9 if copies else 1.03
            assert own <= score_plan(plan, use)[0] * dear, (mode, count)
