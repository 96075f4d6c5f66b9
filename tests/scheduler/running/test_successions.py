"""Runs that wait for what others give follow each other all the same: of each group one is under way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hocket import ops
from hocket.backends.null.backend import NullBackend
from hocket.backends.null.backend import Step as NullStep
from hocket.graph import Graph, PlanError, StepError, input, weight
from hocket.scheduler import Executor, Pipeline, Plan, Succession, dealing, plan_for
from hocket.scheduler.machines.hardware import Hardware
from hocket.scheduler.units import time_text

from ...given.plans.chained import RUNS, chain, feeds, held, planted, same, stored
from ...given.plans.faults import tensor_plan
from ...given.waits import HOUR


def in_groups(made: Plan, groups: int = 2) -> list[Pipeline]:
    """The plan over the same weights, with states of its own for each group."""
    first = stored(made)
    stores = [first, *(first.beside() for _ in range(groups - 1))]
    return [Pipeline(made, store, timeout=HOUR) for store in stores]


def next_feed(given: dict[str, Any], feed: dict[str, Any]) -> dict[str, Any]:
    """What goes in next depends on what came out."""
    return {**feed, "x": np.tanh(given["y"])}


def decoded(groups: list[Pipeline], steps: int = RUNS) -> list[list[Any]]:
    """What each group gives in so many steps, of which as many are under way as there are groups."""
    given: list[list[Any]] = [[] for _ in groups]
    with Succession(groups[0]) as succession:
        for number, group in enumerate(groups):
            succession.begin([(group, feeds()[number])])
        for turn in range(steps * len(groups)):
            group = turn % len(groups)
            given[group].append(succession.ended())
            step = len(given[group])
            if step < steps:
                succession.begin([(groups[group], next_feed(given[group][-1], feeds()[step]))])
    return given


def wanted_of(made: Plan, group: int, steps: int = RUNS) -> tuple[list[Any], Any]:
    """What a group gives by itself, and the states that it leaves."""
    store = stored(made)
    executor, feed, wanted = Executor(made, store, timeout=HOUR), feeds()[group], []
    for step in range(steps):
        wanted.append(executor.run(feed))
        feed = next_feed(wanted[-1], feeds()[min(step + 1, RUNS - 1)])
    return wanted, held(store)


@pytest.mark.parametrize(
    ("devices", "groups", "team"), [(1, 2, 1), (2, 2, 1), (3, 2, 1), (2, 4, 1), (2, 2, 2), (2, 3, 2)]
)
def test_groups_whose_steps_wait_for_their_last_give_what_each_gives_alone(devices, groups, team):
    made, _ = chain(devices, team=team)
    pipelines = in_groups(made, groups)
    for group, given in enumerate(decoded(pipelines)):
        wanted, states = wanted_of(made, group)
        assert all(same(one, two) for one, two in zip(wanted, given, strict=True))
        assert same(held(pipelines[group].store), states)


@pytest.mark.parametrize("team", [1, 2])
@pytest.mark.parametrize("late", [0, 1, 5])
def test_what_was_given_out_stays_when_a_later_run_fails(late, team):
    made, backend = chain(2, team=team)
    pipelines, given, begun = in_groups(made), [0, 0], [0, 0]
    states = [[wanted_of(made, group, steps)[1] for steps in range(1, RUNS + 1)] for group in range(2)]
    nothing = held(pipelines[0].store)
    planted(backend, made.lanes[-1].device, 4, late)

    def go_on() -> None:
        with Succession(pipelines[0]) as succession:
            feed = [feeds()[0], feeds()[1]]
            for _ in range(RUNS):
                for group in range(2):
                    if begun[group]:
                        last = succession.ended()
                        given[group] += 1
                        feed[group] = next_feed(last, feeds()[begun[group]])
                    succession.begin([(pipelines[group], feed[group])])
                    begun[group] += 1

    with pytest.raises(StepError, match="PlantedError"):
        go_on()
    assert sum(given) == late
    for group, count in enumerate(given):
        assert same(held(pipelines[group].store), states[group][count - 1] if count else nothing)
    assert len(decoded(pipelines)[0]) == RUNS, "they go on"


def test_what_nobody_waits_for_is_taken_back():
    made, _ = chain(2)
    pipelines = in_groups(made)
    before = held(pipelines[1].store)

    def leave() -> None:
        with Succession(pipelines[0]) as succession:
            succession.begin([(pipeline, feeds()[0]) for pipeline in pipelines])
            succession.ended()
            raise ArithmeticError("no token is left")

    with pytest.raises(ArithmeticError):
        leave()
    assert same(held(pipelines[1].store), before)
    assert same(held(pipelines[0].store), wanted_of(made, 0, 1)[1])


def test_a_run_over_a_store_that_has_one_under_way_is_refused():
    made, _ = chain(2)
    (pipeline,) = in_groups(made, 1)
    before = held(pipeline.store)

    def begin() -> None:
        with Succession(pipeline) as succession:
            succession.begin([(pipeline, feeds()[0])])
            succession.begin([(pipeline, feeds()[1])])

    with pytest.raises(PlanError, match="a run over the same store is under way"):
        begin()
    assert same(held(pipeline.store), before)


# --------------------------------------------------------------------------------------------- the virtual clock


def sequences_on(stages: int, hardware: Hardware, team: int = 1) -> tuple[NullBackend, Callable[[int], Plan]]:
    """Devices of that kind, and the plan of a step in which so many sequences get a token: each stage, of one device or
    cut among a `team`, has as many layers."""
    hardware = replace(hardware, machine=team) if team > 1 else hardware
    backend = NullBackend(hardware, goes_on=True)
    group = [(backend, backend.device(d)) for d in range(stages * team)]
    mode = "layer" if team == 1 else "layer,tensor"

    def plan_of(sequences: int) -> Plan:
        x = input("x", (sequences, 512))
        for layer in range(8):
            up = ops.mul_mat(weight(f"up.{layer}", (512, 512)), x, name=f"h.{layer}")
            x = ops.mul_mat(weight(f"down.{layer}", (512, 512)), ops.silu(up), name=f"y.{layer}")
        return plan_for(Graph({"y": x}), group, split_mode=mode, hardware=hardware)

    return backend, plan_of


BUSY = Hardware(flops=1e9, bandwidth=1e12, launch=0.0, link_latency=0.0)
"""It has little to do but arithmetic."""


def clocked(backend: NullBackend, pipelines: list[Pipeline], steps: int) -> float:
    """Seconds that so many steps of all groups take on the clock of devices, where a step begins when its group's last
    one has ended."""
    devices, begun, ends = len(pipelines[0].plan.lanes), [0], []

    def waits(replay):
        def run():
            track = backend.tracks.get("null:0", [])
            if begun[0] >= len(pipelines):
                end = max(track[-1].end, ends[begun[0] - len(pipelines)])
                backend.tracks["null:0"] = [*track, NullStep("", "wait", track[-1].end, end)]
            begun[0] += 1
            replay()

        return run

    def ended(replay):
        def run():
            replay()
            ends.append(backend.tracks[f"null:{devices - 1}"][-1].end)

        return run

    for pipeline in pipelines:
        pipeline._lanes[0].replay = waits(pipeline._lanes[0].replay)
        pipeline._lanes[devices - 1].replay = ended(pipeline._lanes[devices - 1].replay)
    feed = {"x": np.zeros(pipelines[0].plan.graph.inputs[0].shape)}
    with Succession(pipelines[0]) as succession:
        succession.begin([(pipeline, feed) for pipeline in pipelines])
        for turn in range(steps * len(pipelines)):
            succession.ended()
            if turn < (steps - 1) * len(pipelines):
                succession.begin([(pipelines[turn % len(pipelines)], feed)])
    return ends[-1]


IDEAL = replace(BUSY, link_bandwidth=1e15, across_bandwidth=1e15, across_latency=0.0)
"""Nor does it wait for messages."""


@pytest.mark.parametrize(("team", "through"), [(1, "4 devices"), (2, "4 teams of 2 devices")])
def test_on_a_virtual_clock_sixteen_sequences_keep_four_stages_busy(team, through):
    backend, plan_of = sequences_on(4, IDEAL, team)
    dealt = dealing(16, plan_of)
    assert dealt.sizes == (4, 4, 4, 4)
    following = clocked(backend, in_groups(plan_of(4), 4), 32)
    backend.tracks.clear()
    at_once = clocked(backend, in_groups(plan_of(16), 1), 32)
    assert at_once / following == pytest.approx(4 * 128 / (128 + 3), rel=1e-3), "they fill and empty once"
    times = dict(dealt.considered)
    assert times[1] / times[4] == pytest.approx(4.0, rel=1e-3)
    assert str(dealt) == (
        f"16 sequences run in 4 micro-batches that follow each other through {through}, predicted to take "
        f"{time_text(times[4])} a step; in 2 micro-batches {time_text(times[2])}, as one {time_text(times[1])}"
    )


def test_sequences_are_not_dealt_where_weights_would_be_read_again_for_nothing():
    _, plan_of = sequences_on(4, replace(BUSY, flops=1e15, bandwidth=1e9))
    dealt = dealing(16, plan_of)
    assert dealt.sizes == (16,)
    assert str(dealt) == (
        "16 sequences run as one, predicted to take 18.4 ms a step; in 4 micro-batches 17.2 ms, in 2 micro-batches "
        "17.6 ms; several have to be 1.1 times as fast"
    )


def test_sequences_are_not_dealt_where_all_devices_meet():
    made = tensor_plan()
    assert str(dealing(16, lambda _: made)) == (
        f"16 sequences run as one, predicted to take {time_text(made.cost.total)} a step; "
        "all devices meet, so that none can begin with other sequences"
    )


@pytest.mark.parametrize(("sequences", "sizes"), [(1, (1,)), (2, (1, 1)), (3, (1, 1, 1)), (6, (2, 2, 1, 1))])
def test_as_many_micro_batches_as_there_are_devices_or_sequences(sequences, sizes):
    assert dealing(sequences, sequences_on(4, BUSY)[1]).sizes == sizes
