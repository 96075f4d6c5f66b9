"""Pipelined runs: the order of actions in which runs follow each other through devices, and the predicted speedup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..graph.errors import PlanError
from .acts import Act, Order
from .lowering.lane import teams_of
from .plan import Plan
from .stages import clocks
from .verifier.acts import meets_all, order_faults

GAIN = 1.1
"""The least predicted speedup for which prefill chunks or micro-batches are pipelined."""
LONG = 64
"""The number of simulated runs after which a pipeline is in steady state."""


class Leg(NamedTuple):
    """The seconds of one run in one pipeline stage: messages to it, and its compute."""

    letters: float
    work: float


def in_succession(plans: Sequence[Plan]) -> Order:
    """Return the pipeline order of one run of each plan.

    A device begins a run when it has retained the results of its part of the previous run.

    Args:
        plans: The plan of each run, in order.

    Raises:
        PlanError: Runs cannot follow each other, for example because all devices share a collective.
    """
    acts = [act for run in range(len(plans)) for act in (Act("put", run), Act("run", run), Act("keep", run))]
    order = [acts] * max((len(plan.lanes) for plan in plans), default=0)
    for why in order_faults([[lane.program for lane in plan.lanes] for plan in plans], order):
        devices = ", ".join(str(lane.device) for lane in plans[0].lanes)
        raise PlanError(f"plan for {devices}, {len(plans)} runs: {why}")
    return order


def followed(plan: Plan) -> int:
    """Return the number of pipeline stages of a plan; 1 if all devices share a collective."""
    return 1 if any(meets_all([lane.program for lane in plan.lanes])) else len(_stops(plan))


def _stops(plan: Plan) -> list[tuple[int, ...]]:
    """Return the devices of each pipeline stage, in the order of their numbers."""
    teams = dict.fromkeys(teams_of([lane.program for lane in plan.lanes]))
    return [(number,) for number in range(len(plan.lanes))] if len(teams) == 1 else [*teams]


def legs(plan: Plan) -> list[Leg]:
    """Return the seconds of each pipeline stage in steady state."""
    letters, work = [0.0] * len(plan.lanes), [0.0] * len(plan.lanes)
    for stage in plan.together:
        sent = stage.op == "send"
        for device in stage.devices:
            if not (sent and device == stage.source):
                (letters if sent else work)[device] += stage.seconds
    return [Leg(*(max(times[device] for device in stop) for times in (letters, work))) for stop in _stops(plan)]


def stages_text(stages: int, devices: int) -> str:
    """Return the pipeline stages as text: ``4 devices``, ``2 teams of 4 devices``."""
    return f"{stages} devices" if stages == devices else f"{stages} teams of {devices // stages} devices"


def seconds_apart(plan: Plan, under_way: int) -> float:
    """Return the seconds between the ends of two runs in steady state.

    Args:
        plan: The plan of each run.
        under_way: The number of runs in progress. A run begins when the first of them ends.
    """
    clock = [0.0] * len(plan.lanes)
    ends: list[float] = []
    for run in range(LONG):
        if run >= under_way:
            clock = [max(now, ends[run - under_way]) for now in clock]
        clock = clocks(plan.together, clock)
        ends.append(max(clock))
    return (ends[-1] - ends[LONG // 2 - 1]) / (LONG // 2)


def gain(plan: Plan) -> float:
    """Return the predicted speedup of pipelined runs over runs that wait for each other.

    The speedup is 1 if all devices share a collective. It is at most the number of pipeline stages, or slightly more
    where messages overlap with compute.
    """
    if followed(plan) == 1:
        return 1.0
    apart = seconds_apart(plan, LONG)
    return plan.cost.total / apart if apart else 1.0
