"""Pipelined runs: the order of actions in which runs follow each other through devices, and the predicted speedup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...graph.errors import PlanError, format_count
from ...graph.validation import integer_between, validate_arguments
from ..costs.timeline import compute_device_end_seconds
from ..ir.execution_plan import PLAN_KIND, Plan
from ..ir.pipeline_actions import PipelineAction, PipelineOrder
from ..lowering.device_plan import find_collective_group_of_each_device
from ..verifier.communication.pipeline_order import find_collective_that_forbids_pipelining, find_pipeline_order_faults

MIN_PIPELINE_SPEEDUP = 1.1
"""The least predicted speedup for which prefill chunks or micro-batches are pipelined."""
STEADY_STATE_RUNS = 64
"""The number of simulated runs after which a pipeline is in steady state."""


class StageTime(NamedTuple):
    """The predicted seconds of one pipeline stage in one run: for messages to the stage, and for its compute."""

    message_seconds: float
    compute_seconds: float


def build_pipelined_action_order(plans: Sequence[Plan]) -> PipelineOrder:
    """Return the order of the actions of each device when several runs are pipelined.

    A device begins a run as soon as it has saved its results of the previous run.

    Args:
        plans: The plan of each run, in order.

    Raises:
        PlanError: Runs cannot follow each other, for example because all devices share a collective.
    """
    actions = [
        action
        for run in range(len(plans))
        for action in (PipelineAction("put", run), PipelineAction("run", run), PipelineAction("keep", run))
    ]
    order = [actions] * max((len(plan.device_plans) for plan in plans), default=0)
    for why in find_pipeline_order_faults(
        [[device_plan.program for device_plan in plan.device_plans] for plan in plans], order
    ):
        devices = ", ".join(str(device_plan.device) for device_plan in plans[0].device_plans)
        raise PlanError(f"plan for {devices}, {format_count(len(plans), 'run')}: {why}")
    return order


@validate_arguments(PlanError, plan=PLAN_KIND)
def count_pipeline_stages(plan: Plan) -> int:
    """Return the number of pipeline stages of a plan; it is 1 if all devices share a collective."""
    return (
        1
        if any(find_collective_that_forbids_pipelining([device_plan.program for device_plan in plan.device_plans]))
        else len(_list_stage_devices(plan))
    )


def _list_stage_devices(plan: Plan) -> list[tuple[int, ...]]:
    """Return the device numbers of each pipeline stage, which is a collective group or else a single device."""
    groups = dict.fromkeys(
        find_collective_group_of_each_device([device_plan.program for device_plan in plan.device_plans])
    )
    return [(number,) for number in range(len(plan.device_plans))] if len(groups) == 1 else [*groups]


def estimate_stage_times(plan: Plan) -> list[StageTime]:
    """Estimate the seconds of each pipeline stage in one run. Meanwhile all stages work on different runs."""
    message_seconds, work = [0.0] * len(plan.device_plans), [0.0] * len(plan.device_plans)
    for stage in plan.pipelined_timeline:
        sent = stage.op == "send"
        for device in stage.devices:
            if not (sent and device == stage.sending_device):
                (message_seconds if sent else work)[device] += stage.seconds
    return [
        StageTime(*(max(times[device] for device in stop) for times in (message_seconds, work)))
        for stop in _list_stage_devices(plan)
    ]


@validate_arguments(PlanError, stages=integer_between(1), devices=integer_between(1))
def format_stage_count(stages: int, devices: int) -> str:
    """Describe the pipeline stages in words: ``4 devices`` for stages of one device, else ``2 teams of 4 devices``.

    Args:
        stages: The number of pipeline stages.
        devices: The number of all devices.
    """
    return (
        format_count(stages, "device")
        if stages == devices
        else f"{stages} teams of {format_count(devices // stages, 'device')}"
    )


def estimate_run_interval(plan: Plan, runs_in_progress: int) -> float:
    """Estimate the seconds between the ends of two successive pipelined runs, long after the start.

    Args:
        plan: The plan of each run.
        runs_in_progress: The most runs in progress. A further run begins when the oldest of them ends.
    """
    clock = [0.0] * len(plan.device_plans)
    ends: list[float] = []
    for run in range(STEADY_STATE_RUNS):
        if run >= runs_in_progress:
            clock = [max(now, ends[run - runs_in_progress]) for now in clock]
        clock = compute_device_end_seconds(plan.pipelined_timeline, clock)
        ends.append(max(clock))
    return (ends[-1] - ends[STEADY_STATE_RUNS // 2 - 1]) / (STEADY_STATE_RUNS // 2)


@validate_arguments(PlanError, plan=PLAN_KIND)
def estimate_pipeline_speedup(plan: Plan) -> float:
    """Estimate how much faster pipelined runs are than single runs that wait for each other.

    The speedup is 1 if all devices share a collective. It is at most the number of pipeline stages, or slightly more
    where messages overlap with compute.
    """
    if count_pipeline_stages(plan) == 1:
        return 1.0
    apart = estimate_run_interval(plan, STEADY_STATE_RUNS)
    return plan.cost.total / apart if apart else 1.0
