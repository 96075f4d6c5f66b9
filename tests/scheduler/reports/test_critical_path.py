"""The critical path of a plan takes the time of the plan, and tells which device decides it."""

from __future__ import annotations

import numpy as np
import pytest

import hocket
from hocket.scheduler.costs.timeline import COMPUTE, TimelineEntry, estimate_run_time
from hocket.scheduler.reports.critical_path import find_critical_path

from ...given.graphs.random_graphs import seeded_graph


def work(device: int, seconds: float) -> TimelineEntry:
    return TimelineEntry(COMPUTE, (device,), 0, 1, 0.0, 0.0, seconds)


def test_the_worked_example_goes_over_the_slower_device_each_time():
    reduction = TimelineEntry("all_reduce", (0, 1), 0, 1, 0.0, 0.0, 2.0)
    stages = [work(0, 3.0), work(1, 5.0), reduction, work(0, 4.0), work(1, 1.0)]
    path = [(link.device, link.stage.seconds) for link in find_critical_path(stages, 2)]
    assert path == [(1, 5.0), (None, 2.0), (0, 4.0)]


def test_who_sends_does_not_wait_for_who_receives():
    send = TimelineEntry("send", (0, 1), 0, 1, 0.0, 0.0, 1.0)
    stages = [work(1, 9.0), work(0, 2.0), send, work(0, 3.0), work(1, 1.0)]
    path = [(link.device, link.stage.seconds) for link in find_critical_path(stages, 2)]
    assert path == [(1, 9.0), (1, 1.0)]


@pytest.mark.parametrize("mode", ["none", "layer", "tensor"])
@pytest.mark.parametrize("seed", range(6))
def test_the_path_takes_the_estimated_time(seed, mode):
    plan = hocket.plan(seeded_graph(seed), "numpy:0,numpy:1,numpy:2", split_mode=mode)
    path = find_critical_path(plan.timeline, len(plan.device_plans))
    assert np.isclose(
        sum(link.stage.seconds for link in path), estimate_run_time(plan.timeline, len(plan.device_plans)).total
    )
