"""The critical path of a plan: the chain of stages that decides how long a run takes.

Devices 0 and 1 work for 3 and 5 us, meet for 2 us, and work for 4 and 1 us::

    cpu:0  work 3 ──┐            ┌── work 4
    cpu:1  work 5 ──┴── meet 2 ──┴── work 1        path: work 5 (cpu:1), meet 2, work 4 (cpu:0): 11 us
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..stages import WORK, Stage

Point = tuple[int, int]
"""A stage by its number, and a device that does it; one for all of them where they meet."""
START: Point = (-1, -1)


@dataclass(frozen=True, slots=True)
class Link:
    """A stage on the critical path, with the device whose work it is; None for a meeting."""

    stage: Stage
    device: int | None


def critical_path(stages: Sequence[Stage], devices: int) -> list[Link]:
    """The stages that follow each other without a gap from the start of a run to its end.

    Their times add up to the time of the run as `stages.estimate` gives it.  Stages that take no time are left out.
    """
    ends: dict[Point, tuple[float, Point]] = {START: (0.0, START)}  # when, and after which other point
    worked, met = [START] * devices, [START] * devices  # the last work of each device, and its last meeting
    before_that = [START] * devices  # the meeting before that one

    def follow(point: Point, before: Point, seconds: float) -> None:
        end = ends[before][0] + seconds
        if point not in ends or end > ends[point][0]:
            ends[point] = end, before

    for number, stage in enumerate(stages):
        points = {d: (number, d if stage.op == WORK else stage.source) for d in stage.devices}
        waiting = [stage.source] if stage.op == "send" else stage.devices
        for d in stage.devices:
            if stage.op == WORK or d in waiting:
                for before in (worked[d], before_that[d] if stage.beside else met[d]):
                    follow(points[d], before, stage.seconds)
        for d in stage.devices:
            if stage.op == WORK:
                worked[d] = points[d]
            elif stage.op != "send" or d != stage.source:
                before_that[d], met[d] = met[d], points[d]
    path = [max(ends, key=lambda point: ends[point][0])]
    while path[-1] != START:
        path.append(ends[path[-1]][1])
    path.reverse()
    kept = [(stages[number], d) for number, d in path if number >= 0 and d < devices and stages[number].seconds]
    return [Link(stage, d if stage.op == WORK else None) for stage, d in kept]
