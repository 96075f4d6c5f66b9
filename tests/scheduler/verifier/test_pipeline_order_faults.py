"""Orders in which a plan is run several times: every way in which one can be wrong is found, and nothing else."""

from __future__ import annotations

import dataclasses

import pytest

from hocket import ops
from hocket.graph import Graph, PlanError, input, state, weight
from hocket.ops.collectives import COLLECTIVES, POINT_TO_POINT_OPS
from hocket.scheduler import plan
from hocket.scheduler.ir.pipeline_actions import PipelineAction
from hocket.scheduler.pipelining.stage_times import build_pipelined_action_order, estimate_pipeline_speedup
from hocket.scheduler.verifier.communication.pipeline_order import find_pipeline_order_faults

from ...given.plans.chained import chain
from ...given.plans.faults import layer_plan, tensor_plan


def passed_on(stages: int = 3):
    """Build a plan with a weight and a state on each of `stages` devices, through which a value goes."""
    x = input("x", (4, 8))
    updates = {}
    for stage in range(stages):
        old_state = state(f"kept.{stage}", (4, 8))
        x = ops.add(ops.mul_mat(weight(f"w.{stage}", (8, 8)), x), old_state)
        updates[old_state] = x
    return plan(Graph({"y": x}, updates), [f"reference:{d}" for d in range(stages)], split_mode="layer")


def programs_of(plan):
    return [device_plan.program for device_plan in plan.device_plans]


def orders(plan, runs):
    return [list(actions) for actions in build_pipelined_action_order([plan] * runs)]


def find_faults(plan, order, runs=3):
    return list(find_pipeline_order_faults([programs_of(plan)] * runs, order))


def plan_in_groups():
    """Two stages, each cut among three devices."""
    return chain(2, group_size=3)[0]


@pytest.mark.parametrize("make_plan", [passed_on, layer_plan, plan_in_groups], ids=["chain", "decoder", "teams"])
@pytest.mark.parametrize("runs", [0, 1, 5])
def test_runs_that_follow_each_other_are_right(make_plan, runs):
    assert not find_faults(make_plan(), orders(make_plan(), runs), runs)


def swap_actions(actions, one, two):
    actions = list(actions)
    i, j = actions.index(one), actions.index(two)
    actions[i], actions[j] = actions[j], actions[i]
    return actions


@pytest.mark.parametrize(
    ("one", "two", "why"),
    [
        (PipelineAction("put", 1), PipelineAction("run", 0), "the arena has inputs of run 0, which has not begun yet"),
        (
            PipelineAction("put", 1),
            PipelineAction("keep", 0),
            "the arena has results of run 0, which are not retained yet",
        ),
        (PipelineAction("put", 0), PipelineAction("run", 0), "the arena has no inputs after"),
        (PipelineAction("run", 1), PipelineAction("keep", 1), "the arena has inputs of run 1"),
        (PipelineAction("run", 0), PipelineAction("run", 1), "the arena belongs to run 0"),
    ],
)
def test_memory_is_not_used_for_a_run_before_the_last_has_done_with_it(one, two, why):
    plan = passed_on()
    order = orders(plan, 3)
    order[1] = swap_actions(order[1], one, two)
    complaints = find_faults(plan, order)
    assert complaints
    assert all(complaint.startswith("device 1: ") for complaint in complaints)
    assert any(why in complaint for complaint in complaints)


def test_a_run_finds_the_states_that_the_one_before_it_has_left():
    """A device that makes two runs in the other order has everything else in order."""
    plan = passed_on()
    order = orders(plan, 3)
    order[2] = [PipelineAction(what, {0: 1, 1: 0}.get(run, run)) for what, run in order[2]]
    assert "device 2: run 1: the states are from before run 0" in find_faults(plan, order)


def test_an_overtaking_message_is_found_in_stateless_programs():
    """Check a device that sends a message twice in each run: the second one contains the leftover of the first."""
    plan = passed_on()
    stateless = [dataclasses.replace(p, undo=()) for p in programs_of(plan)]
    messages = [[i for i in p.instructions if i.op in ("send", "receive")] for p in stateless]
    assert [len(own) for own in messages] == [1, 2, 1]
    order = [[PipelineAction(w, r) for r in runs for w in ("put", "run", "keep")] for runs in ((0, 1), (0, 1), (0, 1))]
    first = stateless[0]
    twice = dataclasses.replace(first, instructions=(*first.instructions, messages[0][0]))  # sends each letter twice
    complaints = list(find_pipeline_order_faults([[twice, *stateless[1:]]] * 2, order))
    assert complaints
    assert "receive 0 (%" in complaints[0]
    assert "in run 1 does not match send 0 (%" in complaints[0]
    assert complaints[0].endswith("in run 0")


@pytest.mark.parametrize("device", range(3))
def test_a_device_that_leaves_a_run_out_is_found(device):
    plan = passed_on()
    order = orders(plan, 3)
    order[device] = order[device][:-3]
    assert f"device {device}: it executes 2 of 3 runs" in find_faults(plan, order)


def test_a_run_without_retained_results_is_found():
    plan = passed_on()
    order = orders(plan, 3)
    del order[0][-1]
    assert find_faults(plan, order) == ["device 0: run 2 begins, but its results are not retained"]


def test_messages_to_and_fro_are_no_fault_and_no_gain():
    """Check that a message back to the first device delays its next run."""
    x = input("x", (64, 64))
    for number in range(4):
        x = ops.mul_mat(weight(f"w.{number}", (64, 64)), x, name=f"y.{number}")
    place = [("y.1", "reference:1"), ("y", "reference:0")]
    new_plan = plan(Graph({"y": x}), ["reference:0", "reference:1"], split_mode="layer", place=place)
    assert not find_faults(new_plan, orders(new_plan, 3))
    assert estimate_pipeline_speedup(new_plan) < 1.1
    assert estimate_pipeline_speedup(passed_on(2)) > 1.5


def test_devices_that_wait_for_each_other_are_found():
    """Check a device that sends a message to one that receives it only after its own message has arrived."""
    plan = passed_on(2)
    (sent,) = (i for i in plan.device_plans[0].program.instructions if i.op == "send")
    (taken,) = (i for i in plan.device_plans[1].program.instructions if i.op == "receive")
    there = dataclasses.replace(sent, attrs={**sent.attrs, "to": 0, "sequence": 1})
    here = dataclasses.replace(taken, attrs={**taken.attrs, "source": 1, "sequence": 1})
    one, two = programs_of(plan)
    programs = [
        dataclasses.replace(one, instructions=(here, sent)),
        dataclasses.replace(two, instructions=(taken, there)),
    ]
    (why,) = find_pipeline_order_faults([programs], build_pipelined_action_order([plan]))
    assert why.startswith("devices wait for each other: receive 1")


def collectives_of(program):
    """The collectives of a program."""
    return [i for i in program.instructions if i.op in COLLECTIVES and i.op not in POINT_TO_POINT_OPS]


def test_a_group_with_collectives_in_different_orders_is_found():
    plan = plan_in_groups()
    programs = programs_of(plan)
    programs[1] = dataclasses.replace(programs[1], instructions=(*reversed(collectives_of(programs[1])),))
    (why,) = find_pipeline_order_faults([programs] * 2, orders(plan, 2))
    assert why.startswith("all_gather 2 (")
    assert "of device 1 in run 0 does not match all_gather 0 (" in why
    assert why.endswith("of device 0 in run 0")


def test_a_group_with_members_in_different_runs_is_found():
    """One of them comes to its only meeting twice in each run: in the second the others are in their next run."""
    plan = plan_in_groups()
    gathering = [dataclasses.replace(p, instructions=(collectives_of(p)[0],)) for p in programs_of(plan)]
    twice = dataclasses.replace(gathering[0], instructions=gathering[0].instructions * 2)
    (why,) = find_pipeline_order_faults([[twice, *gathering[1:]]] * 2, orders(plan, 2))
    assert "of device 1 in run 1 does not match all_gather 0 (" in why
    assert why.endswith("of device 0 in run 0")


def test_only_devices_without_common_collectives_are_pipelined():
    with pytest.raises(PlanError, match=r"joins all devices; pipelined runs need stages that exchange messages,"):
        build_pipelined_action_order([tensor_plan()] * 2)
    assert estimate_pipeline_speedup(tensor_plan()) == 1.0
    assert estimate_pipeline_speedup(plan_in_groups()) > 1.5
