"""Sums over several machines: one over all devices, or within each machine first, whichever is predicted to be less."""

from __future__ import annotations

import re

import pytest

from hocket import ops
from hocket.graph import Graph, input, weight
from hocket.scheduler import Hardware, parse_simulated_group, plan_for_group
from hocket.scheduler.costs.timeline import count_bytes_of_exchanged_value

TWO_BY_FOUR = Hardware(link_bandwidth=100e9, link_latency=1e-6, machine=4, across_bandwidth=10e9, across_latency=20e-6)
ALL = range(8)


def test_a_large_sum_is_taken_within_each_machine_first():
    """Gathering 8 MB of four devices sends three quarters of it, twice; a piece of 2 MB is summed over two machines."""
    collective = TWO_BY_FOUR.estimate_fastest_collective_cost("all_reduce", 8e6, ALL)
    assert collective.inside_machine_seconds == pytest.approx(2 * (1e-6 + 6e6 / 100e9))
    assert collective.across_machines_seconds == pytest.approx(20e-6 + 2e6 / 10e9)
    assert collective.bytes_sent == pytest.approx(2 * 6e6 + 2e6)
    assert collective.seconds < TWO_BY_FOUR.collective_seconds(2 * 7 / 8 * 8e6, 2) / 4


def test_a_small_sum_does_not_wait_for_two_collectives_more():
    collective = TWO_BY_FOUR.estimate_fastest_collective_cost("all_reduce", 1e3, ALL)
    assert (collective.inside_machine_seconds, collective.across_machines_seconds) == (
        0.0,
        TWO_BY_FOUR.collective_seconds(2 * 7 / 8 * 1e3, 2),
    )


@pytest.mark.parametrize("nbytes", [1.0, 1e4, 1e5, 1e6, 1e9])
@pytest.mark.parametrize("devices", [range(8), range(4), range(6), (0, 4), (0, 1, 4, 5), (3, 4)], ids=str)
@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter"])
def test_no_algorithm_is_slower_than_one_collective_of_all_devices(op, devices, nbytes):
    moved = (2 if op == "all_reduce" else 1) * (len(devices) - 1) / len(devices) * nbytes
    machines = len({device // 4 for device in devices})
    collective = TWO_BY_FOUR.estimate_fastest_collective_cost(op, nbytes, devices)
    assert collective.seconds <= TWO_BY_FOUR.collective_seconds(moved, machines)
    uneven = op != "all_reduce" or machines == 1 or devices in (range(6), (0, 4), (3, 4))
    assert (collective.inside_machine_seconds > 0 and collective.across_machines_seconds > 0) <= (not uneven)
    assert collective.machine_count == machines


@pytest.mark.parametrize(("rows", "is_first_within"), [(4096, True), (1, False)])
def test_a_plan_says_where_a_sum_is_taken_within_machines_first(rows, is_first_within):
    x = input("x", (rows, 4096))
    hidden = ops.silu(ops.mul_mat(weight("up", (16384, 4096)), x))
    graph = Graph({"y": ops.mul_mat(weight("down", (4096, 16384)), hidden)})
    simulation = parse_simulated_group("h200:4,nvlink x 2,ib400")
    new_plan = plan_for_group(graph, simulation.group, split_mode="tensor", hardware=simulation.hardware)
    sums = [stage for stage in new_plan.timeline if stage.op == "all_reduce"]  # of some rows at a time
    assert len(sums) > 1 or rows == 1
    for sum_ in sums:
        nbytes = count_bytes_of_exchanged_value(new_plan.device_plans[0].program.instructions[sum_.first_instruction])
        collective = simulation.hardware.estimate_fastest_collective_cost("all_reduce", nbytes, range(8))
        assert (sum_.seconds, sum_.bytes_sent) == (collective.seconds, collective.bytes_sent)
    line = re.search(r"all_reduce over 2 x 4: \S+ [mu]s inside, \S+ [mu]s across", new_plan.explain())
    assert bool(line) == is_first_within
