"""The critical path of a plan: the chain of timeline entries that determines the time of a run.

Example: The devices 0 and 1 work for 3 and 5 us, run a collective of 2 us, and work for 4 and 1 us:

    cpu:0  work 3 ──┐            ┌── work 4
    cpu:1  work 5 ──┴── meet 2 ──┴── work 1        path: work 5 (cpu:1), meet 2, work 4 (cpu:0): 11 us
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..costs.timeline import COMPUTE, TimelineEntry

StagePoint = tuple[int, int]
"""The number of a timeline entry, and a device that runs the entry. In a collective, one device stands for all."""
START_POINT: StagePoint = (-1, -1)
"""The point before the first entry."""


@dataclass(frozen=True, slots=True)
class CriticalPathEntry:
    """A timeline entry on the critical path.

    - `stage`: the timeline entry.
    - `device`: the device that computes it; None for a collective.
    """

    stage: TimelineEntry
    device: int | None


def find_critical_path(timeline: Sequence[TimelineEntry], devices: int) -> list[CriticalPathEntry]:
    """Return the timeline entries that determine the time of a run: each begins when the entry before it ends.

    Their seconds add up to the time of the run (`timeline.compute_last_end_seconds`). Entries that take no time are
    left out.
    """
    ends: dict[StagePoint, tuple[float, StagePoint]] = {
        START_POINT: (0.0, START_POINT)
    }  # end in seconds, and the point before
    last_work, last_collectives = (
        [START_POINT] * devices,
        [START_POINT] * devices,
    )  # the last work and the last collective of each device
    before_that = [START_POINT] * devices  # the collective before the last one

    def follow(point: StagePoint, before: StagePoint, seconds: float) -> None:
        end = ends[before][0] + seconds
        if point not in ends or end > ends[point][0]:
            ends[point] = end, before

    for number, stage in enumerate(timeline):
        points = {d: (number, d if stage.op == COMPUTE else stage.sending_device) for d in stage.devices}
        waiting = [stage.sending_device] if stage.op == "send" else stage.devices
        for d in stage.devices:
            if stage.op == COMPUTE or d in waiting:
                for before in (last_work[d], before_that[d] if stage.is_overlapped else last_collectives[d]):
                    follow(points[d], before, stage.seconds)
        for d in stage.devices:
            if stage.op == COMPUTE:
                last_work[d] = points[d]
            elif stage.op != "send" or d != stage.sending_device:
                before_that[d], last_collectives[d] = last_collectives[d], points[d]
    path = [max(ends, key=lambda point: ends[point][0])]
    while path[-1] != START_POINT:
        path.append(ends[path[-1]][1])
    path.reverse()
    path_points = [
        (timeline[number], d) for number, d in path if number >= 0 and d < devices and timeline[number].seconds
    ]
    return [CriticalPathEntry(stage, d if stage.op == COMPUTE else None) for stage, d in path_points]
