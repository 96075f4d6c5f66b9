"""Runs that wait for results of earlier ones are pipelined with runs of other groups: one of each group is pending."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hocket import ops
from hocket.backends.null.backend import ClockedInstruction as NullStep
from hocket.backends.null.backend import NullBackend
from hocket.graph import Graph, PlanError, StepError, input, weight
from hocket.scheduler import Executor, PipelinedPlan, PipelinedRuns, Plan, choose_micro_batches, plan_for_group
from hocket.scheduler.costs.hardware import Hardware
from hocket.scheduler.ir.formatting import format_seconds

from ...given.plans.chained import RUNS, chain, copy_states, feeds, make_store, plant_fault, same
from ...given.plans.faults import tensor_plan
from ...given.waits import WAIT_SECONDS


def in_groups(plan: Plan, groups: int = 2) -> list[Executor]:
    """The plan over the same weights, with states of its own for each group."""
    first = make_store(plan)
    stores = [first, *(first.share_weights() for _ in range(groups - 1))]
    return [PipelinedPlan(plan, store, timeout=WAIT_SECONDS) for store in stores]


def next_feed(results: dict[str, Any], feed: dict[str, Any]) -> dict[str, Any]:
    """Return the next inputs, which depend on the results."""
    return {**feed, "x": np.tanh(results["y"])}


def decode_in_groups(groups: list[Executor], steps: int = RUNS) -> list[list[Any]]:
    """Return the results of each group in `steps` steps; one step of each group is pending."""
    results: list[list[Any]] = [[] for _ in groups]
    with PipelinedRuns(groups[0]) as runs:
        for number, group in enumerate(groups):
            runs.enqueue([(group, feeds()[number])])
        for turn in range(steps * len(groups)):
            group = turn % len(groups)
            results[group].append(runs.wait_for_outputs())
            step = len(results[group])
            if step < steps:
                runs.enqueue([(groups[group], next_feed(results[group][-1], feeds()[step]))])
    return results


def expected_of_group(plan: Plan, group: int, steps: int = RUNS) -> tuple[list[Any], Any]:
    """Return the results of a single group, and its final states."""
    store = make_store(plan)
    executor, feed, expected = Executor(plan, store, timeout=WAIT_SECONDS), feeds()[group], []
    for step in range(steps):
        expected.append(executor.run(feed))
        feed = next_feed(expected[-1], feeds()[min(step + 1, RUNS - 1)])
    return expected, copy_states(store)


@pytest.mark.parametrize(
    ("devices", "groups", "group_size"), [(1, 2, 1), (2, 2, 1), (3, 2, 1), (2, 4, 1), (2, 2, 2), (2, 3, 2)]
)
def test_groups_whose_steps_wait_for_their_last_give_what_each_gives_alone(devices, groups, group_size):
    plan, _ = chain(devices, group_size=group_size)
    pipelines = in_groups(plan, groups)
    for group, results in enumerate(decode_in_groups(pipelines)):
        expected, states = expected_of_group(plan, group)
        assert all(same(one, two) for one, two in zip(expected, results, strict=True))
        assert same(copy_states(pipelines[group].store), states)


@pytest.mark.parametrize("group_size", [1, 2])
@pytest.mark.parametrize("late", [0, 1, 5])
def test_returned_results_stay_when_a_later_run_fails(late, group_size):
    plan, backend = chain(2, group_size=group_size)
    pipelines, results, begun = in_groups(plan), [0, 0], [0, 0]
    states = [[expected_of_group(plan, group, steps)[1] for steps in range(1, RUNS + 1)] for group in range(2)]
    nothing = copy_states(pipelines[0].store)
    plant_fault(backend, plan.device_plans[-1].device, 4, late)

    def go_on() -> None:
        with PipelinedRuns(pipelines[0]) as runs:
            feed = [feeds()[0], feeds()[1]]
            for _ in range(RUNS):
                for group in range(2):
                    if begun[group]:
                        last = runs.wait_for_outputs()
                        results[group] += 1
                        feed[group] = next_feed(last, feeds()[begun[group]])
                    runs.enqueue([(pipelines[group], feed[group])])
                    begun[group] += 1

    with pytest.raises(StepError, match="PlantedError"):
        go_on()
    assert sum(results) == late
    for group, count in enumerate(results):
        assert same(copy_states(pipelines[group].store), states[group][count - 1] if count else nothing)
    assert len(decode_in_groups(pipelines)[0]) == RUNS, "they go on"


def test_runs_without_a_waiting_caller_are_rolled_back():
    plan, _ = chain(2)
    pipelines = in_groups(plan)
    before = copy_states(pipelines[1].store)

    def leave() -> None:
        with PipelinedRuns(pipelines[0]) as runs:
            runs.enqueue([(pipeline, feeds()[0]) for pipeline in pipelines])
            runs.wait_for_outputs()
            raise ArithmeticError("no token is left")

    with pytest.raises(ArithmeticError):
        leave()
    assert same(copy_states(pipelines[1].store), before)
    assert same(copy_states(pipelines[0].store), expected_of_group(plan, 0, 1)[1])


def test_a_run_over_a_store_with_a_pending_run_is_refused():
    plan, _ = chain(2)
    (pipeline,) = in_groups(plan, 1)
    before = copy_states(pipeline.store)

    def begin() -> None:
        with PipelinedRuns(pipeline) as runs:
            runs.enqueue([(pipeline, feeds()[0])])
            runs.enqueue([(pipeline, feeds()[1])])

    with pytest.raises(PlanError, match="a run over the same store is under way"):
        begin()
    assert same(copy_states(pipeline.store), before)


# --------------------------------------------------------------------------------------------- the virtual clock


def sequences_on(stages: int, hardware: Hardware, group_size: int = 1) -> tuple[NullBackend, Callable[[int], Plan]]:
    """Return devices of that kind, and the plan of a step that gives each sequence a token.

    Each stage is one device or sharded over a group of `group_size`, and has equally many layers.
    """
    hardware = replace(hardware, machine=group_size) if group_size > 1 else hardware
    backend = NullBackend(hardware, goes_on=True)
    group = [(backend, backend.device(d)) for d in range(stages * group_size)]
    mode = "layer" if group_size == 1 else "layer,tensor"

    def plan_of(sequences: int) -> Plan:
        x = input("x", (sequences, 512))
        for layer in range(8):
            up = ops.mul_mat(weight(f"up.{layer}", (512, 512)), x, name=f"h.{layer}")
            x = ops.mul_mat(weight(f"down.{layer}", (512, 512)), ops.silu(up), name=f"y.{layer}")
        return plan_for_group(Graph({"y": x}), group, split_mode=mode, hardware=hardware)

    return backend, plan_of


BUSY = Hardware(flops=1e9, bandwidth=1e12, launch=0.0, link_latency=0.0)
"""It has little to do but arithmetic."""


def measure_on_clock(backend: NullBackend, pipelines: list[Executor], steps: int) -> float:
    """Return the seconds of `steps` steps of all groups on the devices' clock.

    A step begins when the previous step of its group has ended.
    """
    devices, begun, ends = len(pipelines[0].plan.device_plans), [0], []

    def waits(replay):
        def run():
            track = backend.tracks.get("null:0", [])
            if begun[0] >= len(pipelines):
                end = max(track[-1].end, ends[begun[0] - len(pipelines)])
                backend.tracks["null:0"] = [*track, NullStep("", "wait", track[-1].end, end)]
            begun[0] += 1
            replay()

        return run

    def record_end(replay):
        def run():
            replay()
            ends.append(backend.tracks[f"null:{devices - 1}"][-1].end)

        return run

    for pipeline in pipelines:
        pipeline._device_stages[0].run_program = waits(pipeline._device_stages[0].run_program)
        pipeline._device_stages[devices - 1].run_program = record_end(pipeline._device_stages[devices - 1].run_program)
    feed = {"x": np.zeros(pipelines[0].plan.graph.inputs[0].shape)}
    with PipelinedRuns(pipelines[0]) as runs:
        runs.enqueue([(pipeline, feed) for pipeline in pipelines])
        for turn in range(steps * len(pipelines)):
            runs.wait_for_outputs()
            if turn < (steps - 1) * len(pipelines):
                runs.enqueue([(pipelines[turn % len(pipelines)], feed)])
    return ends[-1]


IDEAL = replace(BUSY, link_bandwidth=1e15, across_bandwidth=1e15, across_latency=0.0)
"""Nor does it wait for messages."""


@pytest.mark.long
@pytest.mark.parametrize(("group_size", "through"), [(1, "4 devices"), (2, "4 teams of 2 devices")])
def test_on_a_virtual_clock_sixteen_sequences_keep_four_stages_busy(group_size, through):
    backend, plan_of = sequences_on(4, IDEAL, group_size)
    micro_batches = choose_micro_batches(16, plan_of)
    assert micro_batches.batch_sizes == (4, 4, 4, 4)
    following = measure_on_clock(backend, in_groups(plan_of(4), 4), 32)
    backend.tracks.clear()
    at_once = measure_on_clock(backend, in_groups(plan_of(16), 1), 32)
    assert at_once / following == pytest.approx(4 * 128 / (128 + 3), rel=1e-3), "they fill and empty once"
    times = dict(micro_batches.seconds_of_counts)
    assert times[1] / times[4] == pytest.approx(4.0, rel=1e-3)
    assert str(micro_batches) == (
        f"16 sequences run in 4 micro-batches that follow each other through {through}, predicted to take "
        f"{format_seconds(times[4])} a step; in 2 micro-batches {format_seconds(times[2])}, "
        f"as one {format_seconds(times[1])}"
    )


def test_sequences_are_not_split_where_weights_would_be_read_again_for_nothing():
    _, plan_of = sequences_on(4, replace(BUSY, flops=1e15, bandwidth=1e9))
    micro_batches = choose_micro_batches(16, plan_of)
    assert micro_batches.batch_sizes == (16,)
    assert str(micro_batches) == (
        "16 sequences run as one, predicted to take 18.4 ms a step; in 4 micro-batches 17.2 ms, in 2 micro-batches "
        "17.6 ms; several have to be 1.1 times as fast"
    )


def test_sequences_are_not_split_where_all_devices_run_collectives():
    plan = tensor_plan()
    assert str(choose_micro_batches(16, lambda _: plan)) == (
        f"16 sequences run as one, predicted to take {format_seconds(plan.cost.total)} a step; "
        "all devices meet, so that none can begin with other sequences"
    )


@pytest.mark.parametrize(("sequences", "sizes"), [(1, (1,)), (2, (1, 1)), (3, (1, 1, 1)), (6, (2, 2, 1, 1))])
def test_as_many_micro_batches_as_there_are_devices_or_sequences(sequences, sizes):
    assert choose_micro_batches(sequences, sequences_on(4, BUSY)[1]).batch_sizes == sizes
