"""Runs of plans that follow each other through devices: in what order, and what that gains."""

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
"""How many times as fast runs that follow each other have to be predicted to be, parts of a prompt or micro-batches."""
LONG = 64
"""Runs after which the devices of a pipeline are as busy as they get."""


class Leg(NamedTuple):
    """The way of a run through one device, or a team of devices: seconds of the letters to it, and of its work."""

    letters: float
    work: float


def in_succession(plans: Sequence[Plan]) -> Order:
    """A run of each plan behind the one before: a device begins the next when its part of the last is done and kept.

    Raises `PlanError` if all of them meet.
    """
    acts = [act for run in range(len(plans)) for act in (Act("put", run), Act("run", run), Act("keep", run))]
    order = [acts] * max((len(plan.lanes) for plan in plans), default=0)
    for why in order_faults([[lane.program for lane in plan.lanes] for plan in plans], order):
        devices = ", ".join(str(lane.device) for lane in plans[0].lanes)
        raise PlanError(f"plan for {devices}, {len(plans)} runs: {why}")
    return order


def followed(plan: Plan) -> int:
    """Through how many devices, or teams of devices, runs of a plan follow each other; 1 where all of them meet."""
    return 1 if any(meets_all([lane.program for lane in plan.lanes])) else len(_stops(plan))


def _stops(plan: Plan) -> list[tuple[int, ...]]:
    """The devices, or teams of devices, through which runs go, in the order of their numbers."""
    teams = dict.fromkeys(teams_of([lane.program for lane in plan.lanes]))
    return [(number,) for number in range(len(plan.lanes))] if len(teams) == 1 else [*teams]


def legs(plan: Plan) -> list[Leg]:
    """What a run takes on each device or team that it goes through, where all of them work at once."""
    letters, work = [0.0] * len(plan.lanes), [0.0] * len(plan.lanes)
    for stage in plan.together:
        sent = stage.op == "send"
        for device in stage.devices:
            if not (sent and device == stage.source):
                (letters if sent else work)[device] += stage.seconds
    return [Leg(*(max(times[device] for device in stop) for times in (letters, work))) for stop in _stops(plan)]


def stages_text(stages: int, devices: int) -> str:
    """``4 devices``; ``2 teams of 4 devices``."""
    return f"{stages} devices" if stages == devices else f"{stages} teams of {devices // stages} devices"


def seconds_apart(plan: Plan, under_way: int) -> float:
    """Seconds from the end of a run to that of the next where so many runs are under way, and each begins when the
    first of them has ended."""
    clock = [0.0] * len(plan.lanes)
    ends: list[float] = []
    for run in range(LONG):
        if run >= under_way:
            clock = [max(now, ends[run - under_way]) for now in clock]
        clock = clocks(plan.together, clock)
        ends.append(max(clock))
    return (ends[-1] - ends[LONG // 2 - 1]) / (LONG // 2)


def gain(plan: Plan) -> float:
    """How many times as fast runs are predicted to be that follow each other as runs that wait for each other: at most
    the number of devices or teams, more only by letters that are on their way meanwhile; 1 where all devices meet."""
    if followed(plan) == 1:
        return 1.0
    apart = seconds_apart(plan, LONG)
    return plan.cost.total / apart if apart else 1.0
