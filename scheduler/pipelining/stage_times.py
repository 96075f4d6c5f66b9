"""Pipelined runs: the order of actions in which runs follow each other through devices, and the predicted speedup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...graph.errors import PlanError
from ..costs.timeline import compute_device_end_seconds
from ..ir.execution_plan import Plan
from ..ir.pipeline_actions import PipelineAction, PipelineOrder
from ..lowering.device_plan import find_collective_groups
from ..verifier.communication.pipeline_order import find_all_device_collective_faults, find_pipeline_order_faults

MIN_PIPELINE_SPEEDUP = 1.1
"""The least predicted speedup for which prefill chunks or micro-batches are pipelined."""
STEADY_STATE_RUNS = 64
"""The number of simulated runs after which a pipeline is in steady state."""


class StageTime(NamedTuple):
    """The predicted seconds of one pipeline stage in one run: messages to the stage, and its compute."""

    message_seconds: float
    compute_seconds: float


def build_pipeline_order(plans: Sequence[Plan]) -> PipelineOrder:
    """Build the pipeline order: the order of each device's actions when several runs follow each other.

    A device begins a run when it has saved the results of its part of the previous run.

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
        raise PlanError(f"plan for {devices}, {len(plans)} runs: {why}")
    return order


def count_pipeline_stages(plan: Plan) -> int:
    """Count the pipeline stages of a plan; the count is 1 if all devices share a collective."""
    return (
        1
        if any(find_all_device_collective_faults([device_plan.program for device_plan in plan.device_plans]))
        else len(_list_stage_devices(plan))
    )


def _list_stage_devices(plan: Plan) -> list[tuple[int, ...]]:
    """List the devices of each pipeline stage, in the order of the device numbers."""
    groups = dict.fromkeys(find_collective_groups([device_plan.program for device_plan in plan.device_plans]))
    return [(number,) for number in range(len(plan.device_plans))] if len(groups) == 1 else [*groups]


def estimate_stage_times(plan: Plan) -> list[StageTime]:
    """Estimate the seconds of each pipeline stage in steady state, when all devices work."""
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


def format_stage_count(stages: int, devices: int) -> str:
    """Format the number of pipeline stages as text: ``4 devices``, or ``2 teams of 4 devices``.

    Args:
        stages: The number of pipeline stages.
        devices: The number of all devices.
    """
    return f"{stages} devices" if stages == devices else f"{stages} teams of {devices // stages} devices"


def estimate_run_interval(plan: Plan, runs_in_progress: int) -> float:
    """Estimate the interval between the ends of two pipelined runs in steady state, in seconds.

    Args:
        plan: The plan of each run.
        runs_in_progress: The number of runs in progress. A run begins when the first of them ends.
    """
    clock = [0.0] * len(plan.device_plans)
    ends: list[float] = []
    for run in range(STEADY_STATE_RUNS):
        if run >= runs_in_progress:
            clock = [max(now, ends[run - runs_in_progress]) for now in clock]
        clock = compute_device_end_seconds(plan.pipelined_timeline, clock)
        ends.append(max(clock))
    return (ends[-1] - ends[STEADY_STATE_RUNS // 2 - 1]) / (STEADY_STATE_RUNS // 2)


def estimate_pipeline_speedup(plan: Plan) -> float:
    """Estimate the speedup of pipelined runs over single runs that wait for each other.

    The speedup is 1 if all devices share a collective. It is at most the number of pipeline stages, or slightly more
    where messages overlap with compute.
    """
    if count_pipeline_stages(plan) == 1:
        return 1.0
    apart = estimate_run_interval(plan, STEADY_STATE_RUNS)
    return plan.cost.total / apart if apart else 1.0
