"""Orders in which a plan is run several times: every way in which one can be wrong is found, and nothing else."""

from __future__ import annotations

import dataclasses

import pytest

from hocket import ops
from hocket.graph import Graph, PlanError, input, state, weight
from hocket.ops.collectives import COLLECTIVES, POINT_TO_POINT_OPS
from hocket.scheduler import plan
from hocket.scheduler.acts import Act
from hocket.scheduler.succession import gain, in_succession
from hocket.scheduler.verifier.acts import order_faults

from ...given.plans.chained import chain
from ...given.plans.faults import layer_plan, tensor_plan


def passed_on(stages: int = 3):
    """A plan with a weight and a state on each of so many devices, through which a value goes."""
    x = input("x", (4, 8))
    updates = {}
    for stage in range(stages):
        kept = state(f"kept.{stage}", (4, 8))
        x = ops.add(ops.mul_mat(weight(f"w.{stage}", (8, 8)), x), kept)
        updates[kept] = x
    return plan(Graph({"y": x}, updates), [f"reference:{d}" for d in range(stages)], split_mode="layer")


def programs_of(made):
    return [lane.program for lane in made.lanes]


def orders(made, runs):
    return [list(acts) for acts in in_succession([made] * runs)]


def found(made, order, runs=3):
    return list(order_faults([programs_of(made)] * runs, order))


def in_teams():
    """Two stages, each cut among three devices."""
    return chain(2, team=3)[0]


@pytest.mark.parametrize("made", [passed_on, layer_plan, in_teams], ids=["chain", "decoder", "teams"])
@pytest.mark.parametrize("runs", [0, 1, 5])
def test_runs_that_follow_each_other_are_right(made, runs):
    assert not found(made(), orders(made(), runs), runs)


def swapped(acts, one, two):
    acts = list(acts)
    i, j = acts.index(one), acts.index(two)
    acts[i], acts[j] = acts[j], acts[i]
    return acts


@pytest.mark.parametrize(
    ("one", "two", "why"),
    [
        (Act("put", 1), Act("run", 0), "inputs of run 0 lie there, which it has not read yet"),
        (Act("put", 1), Act("keep", 0), "results of run 0 lie there, which nobody has kept"),
        (Act("put", 0), Act("run", 0), "no inputs lie there"),
        (Act("run", 1), Act("keep", 1), "inputs of run 1 lie there"),
        (Act("run", 0), Act("run", 1), "what lies there is of run 0"),
    ],
)
def test_memory_is_not_used_for_a_run_before_the_last_has_done_with_it(one, two, why):
    made = passed_on()
    order = orders(made, 3)
    order[1] = swapped(order[1], one, two)
    complaints = found(made, order)
    assert complaints
    assert all(said.startswith("device 1: ") for said in complaints)
    assert any(why in said for said in complaints)


def test_a_run_finds_the_states_that_the_one_before_it_has_left():
    """A device that makes two runs in the other order has everything else in order."""
    made = passed_on()
    order = orders(made, 3)
    order[2] = [Act(what, {0: 1, 1: 0}.get(run, run)) for what, run in order[2]]
    assert "device 2: run 1: its states are those before run 0" in found(made, order)


def test_a_letter_that_overtakes_is_found_where_states_are_not():
    """One device sends a letter twice in each run: in the second the next one takes what was left of the first."""
    made = passed_on()
    stateless = [dataclasses.replace(p, undo=()) for p in programs_of(made)]
    letters = [[i for i in p.instructions if i.op in ("send", "receive")] for p in stateless]
    assert [len(own) for own in letters] == [1, 2, 1]
    order = [[Act(w, r) for r in runs for w in ("put", "run", "keep")] for runs in ((0, 1), (0, 1), (0, 1))]
    first = stateless[0]
    twice = dataclasses.replace(first, instructions=(*first.instructions, letters[0][0]))  # sends each letter twice
    complaints = list(order_faults([[twice, *stateless[1:]]] * 2, order))
    assert complaints
    assert "receive 0 (%" in complaints[0]
    assert "in run 1: send 0 (%" in complaints[0]
    assert complaints[0].endswith("in run 0 comes in its place")


@pytest.mark.parametrize("device", range(3))
def test_a_device_that_leaves_a_run_out_is_found(device):
    made = passed_on()
    order = orders(made, 3)
    order[device] = order[device][:-3]
    assert f"device {device}: it makes 2 of 3 runs" in found(made, order)


def test_a_run_whose_results_nobody_keeps_is_found():
    made = passed_on()
    order = orders(made, 3)
    del order[0][-1]
    assert found(made, order) == ["device 0: run 2 is begun, and not kept"]


def test_letters_to_and_fro_are_no_fault_and_no_gain():
    """What comes back to the first device keeps it from the next run."""
    x = input("x", (64, 64))
    for number in range(4):
        x = ops.mul_mat(weight(f"w.{number}", (64, 64)), x, name=f"y.{number}")
    place = [("y.1", "reference:1"), ("y", "reference:0")]
    made = plan(Graph({"y": x}), ["reference:0", "reference:1"], split_mode="layer", place=place)
    assert not found(made, orders(made, 3))
    assert gain(made) < 1.1
    assert gain(passed_on(2)) > 1.5


def test_devices_that_wait_for_each_other_are_found():
    """The first sends the second what that takes only when it has itself been heard."""
    made = passed_on(2)
    (sent,) = (i for i in made.lanes[0].program.instructions if i.op == "send")
    (taken,) = (i for i in made.lanes[1].program.instructions if i.op == "receive")
    there = dataclasses.replace(sent, attrs={**sent.attrs, "to": 0, "sequence": 1})
    here = dataclasses.replace(taken, attrs={**taken.attrs, "source": 1, "sequence": 1})
    one, two = programs_of(made)
    programs = [
        dataclasses.replace(one, instructions=(here, sent)),
        dataclasses.replace(two, instructions=(taken, there)),
    ]
    (why,) = order_faults([programs], in_succession([made]))
    assert why.startswith("devices wait for each other: receive 1")


def met(program):
    """The collectives of a program."""
    return [i for i in program.instructions if i.op in COLLECTIVES and i.op not in POINT_TO_POINT_OPS]


def test_a_team_whose_members_come_to_meetings_in_another_order_is_found():
    made = in_teams()
    programs = programs_of(made)
    programs[1] = dataclasses.replace(programs[1], instructions=(*reversed(met(programs[1])),))
    (why,) = order_faults([programs] * 2, orders(made, 2))
    assert why.startswith("all_gather 2 (")
    assert "of device 1 in run 0: all_gather 0 (" in why
    assert why.endswith("of device 0 in run 0 comes in its place")


def test_a_team_whose_members_are_in_different_runs_is_found():
    """One of them comes to its only meeting twice in each run: in the second the others are in their next run."""
    made = in_teams()
    gathering = [dataclasses.replace(p, instructions=(met(p)[0],)) for p in programs_of(made)]
    twice = dataclasses.replace(gathering[0], instructions=gathering[0].instructions * 2)
    (why,) = order_faults([[twice, *gathering[1:]]] * 2, orders(made, 2))
    assert "of device 1 in run 1: all_gather 0 (" in why
    assert why.endswith("of device 0 in run 0 comes in its place")


def test_only_devices_that_do_not_all_meet_are_in_succession():
    with pytest.raises(
        PlanError, match=r"joins all devices: runs follow each other only where devices meet by letters,"
    ):
        in_succession([tensor_plan()] * 2)
    assert gain(tensor_plan()) == 1.0
    assert gain(in_teams()) > 1.5
