"""Runs of plans that follow each other through devices: in what order, and what that gains."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..graph.errors import PlanError
from .acts import Act, Order
from .plan import Plan
from .stages import clocks, finished
from .verifier.acts import meets_otherwise, order_faults

LONG = 64
"""Runs after which the devices of a pipeline are as busy as they get."""


def in_succession(plans: Sequence[Plan]) -> Order:
    """A run of each plan behind the one before: a device begins the next when its part of the last is done and kept.

    Raises `PlanError` if the devices meet otherwise than by letters.
    """
    acts = [act for run in range(len(plans)) for act in (Act("put", run), Act("run", run), Act("keep", run))]
    order = [acts] * max((len(plan.lanes) for plan in plans), default=0)
    for why in order_faults([[lane.program for lane in plan.lanes] for plan in plans], order):
        devices = ", ".join(str(lane.device) for lane in plans[0].lanes)
        raise PlanError(f"plan for {devices}, {len(plans)} runs: {why}")
    return order


def seconds_apart(plan: Plan, under_way: int) -> float:
    """Seconds from the end of a run to that of the next where so many runs are under way, and each begins when the
    first of them has ended; infinite where devices meet otherwise than by letters."""
    if any(meets_otherwise([lane.program for lane in plan.lanes])):
        return math.inf
    clock = [0.0] * len(plan.lanes)
    ends: list[float] = []
    for run in range(LONG):
        if run >= under_way:
            clock = [max(now, ends[run - under_way]) for now in clock]
        clock = clocks(plan.stages, clock)
        ends.append(max(clock))
    return (ends[-1] - ends[LONG // 2 - 1]) / (LONG // 2)


def gain(plan: Plan) -> float:
    """How many times as fast runs are predicted to be that follow each other as runs that wait for each other: at most
    the number of devices, and 1 where these meet otherwise than by letters, or each waits for the last."""
    devices = len(plan.lanes)
    if devices < 2 or any(meets_otherwise([lane.program for lane in plan.lanes])):
        return 1.0
    once, often = finished(plan.stages, devices), finished(plan.stages * LONG, devices)
    return once * (LONG - 1) / (often - once) if often > once else 1.0
