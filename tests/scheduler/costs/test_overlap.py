"""Work during collectives: the waits of a device, undisturbed transfers, and the saved time."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from hocket.backends.base import find_device
from hocket.backends.fusion import overlap
from hocket.backends.fusion.overlap import find_instructions_beside_collectives
from hocket.backends.null.backend import NullBackend
from hocket.backends.reference.backend import ReferenceBackend
from hocket.graph.errors import StepError
from hocket.ops.collectives import COLLECTIVES, POINT_TO_POINT_OPS
from hocket.scheduler import plan_for_group
from hocket.scheduler.costs.timeline import COMPUTE, TimelineEntry, estimate_run_time
from hocket.scheduler.lowering.lower import lower_graph
from hocket.scheduler.reports.critical_path import find_critical_path
from hocket.scheduler.runtime.virtual_clock import simulate_run

from ...given.graphs.random_graphs import bindings, seeded_graph
from ...given.plans.branches import SPEEDS, branches_on, two_branches
from ...given.plans.faults import decoder
from ...given.plans.grouped import everything_that_fits, make_binder
from ...given.plans.interleaved import InterleavedPlan

OVERLAP_SEEDS = (1, 11, 13, 14, 16, 20, 30, 32, 34, 41, 42, 43, 45, 46, 51, 53, 54, 57)
"""Random graphs with plans that overlap a collective."""


class Overlapping(ReferenceBackend):
    """Plans are made as for devices that compute while they meet."""

    def can_overlap_collectives(self, devices):
        return True


def random_sharded_plan(seed: int, backend):
    graph, dice = seeded_graph(seed), random.Random(seed)
    group = [(backend, backend.device(d)) for d in range(dice.choice([2, 3]))]
    return plan_for_group(graph, group, choose=lambda g, f: everything_that_fits(g, f, dice), hardware=SPEEDS)


def as_late(plan):
    """The same plan with each collective where the device waits for it."""
    device_plans = []
    for device_plan in plan.device_plans:
        behind = {at: numbers[-1] + 0.5 for at, numbers in device_plan.overlapped_instructions.items()}
        numbers = sorted(range(len(device_plan.program.instructions)), key=lambda at, behind=behind: behind.get(at, at))
        steps = tuple(device_plan.program.instructions[at] for at in numbers)
        program = dataclasses.replace(device_plan.program, instructions=steps, undo=())
        device_plans.append(dataclasses.replace(device_plan, program=program))
    return dataclasses.replace(plan, device_plans=tuple(device_plans))


def outputs_of(plan, seed: int):
    values = bindings(plan.graph, np.random.default_rng(seed))
    run = InterleavedPlan(plan, make_binder(plan.graph, values, plan.leaves))
    got = run.run({v.node.name: values[v.node.name] for v in plan.graph.inputs}, seed)
    return got, {name: np.array(run.store.state(name)) for name in run.store.states}


# ----------------------------------------------------------------------------------------------- where a device waits


def test_the_second_product_runs_beside_the_first_sum_and_what_follows_that_beside_the_second():
    device_plan = branches_on(Overlapping()).device_plans[0]
    order = [i.node for i in device_plan.program.instructions]
    first, second = (n for n, i in enumerate(device_plan.program.instructions) if i.op in COLLECTIVES)
    assert device_plan.overlapped_instructions == {first: (first + 1,), second: (second + 1,)}
    assert [order[first + 1], *order[second + 1 :]] == ["product.1", "norm.0", "norm.1"]


def test_a_device_that_does_one_thing_at_a_time_waits_at_once():
    device_plan = branches_on(find_device("reference:0")[0]).device_plans[0]
    assert device_plan.overlapped_instructions == {}


def test_of_instructions_that_are_launched_together_all_wait_where_one_has_to():
    program = branches_on(Overlapping()).device_plans[0].program
    order = [i.node for i in program.instructions]
    together = (order.index("product.1"), order.index("norm.0"))
    first = next(n for n, i in enumerate(program.instructions) if i.op in COLLECTIVES)
    assert first in find_instructions_beside_collectives(program)
    others = [(n,) for n in range(len(order)) if n not in together]
    assert first not in find_instructions_beside_collectives(program, sorted([*others, together]))


def test_what_a_collective_reads_is_not_written_over_before_the_wait():
    device_plan = branches_on(Overlapping()).device_plans[0]
    first = next(n for n, i in enumerate(device_plan.program.instructions) if i.op in COLLECTIVES)
    collective, product = device_plan.program.instructions[first], device_plan.program.instructions[first + 1]
    for there in (*collective.src, *collective.dst):
        (low, high), (begin, end) = ((t.offset, t.offset + t.spec.nbytes) for t in (there, product.dst[0]))
        assert max(low, begin) >= min(high, end)


@pytest.mark.parametrize("seed", OVERLAP_SEEDS)
def test_a_collective_that_comes_as_late_as_it_may_gives_the_same_bits(seed):
    plan = random_sharded_plan(seed, Overlapping())
    late = as_late(plan)
    assert any(device_plan.overlapped_instructions for device_plan in plan.device_plans)
    for one, other in zip(outputs_of(plan, seed), outputs_of(late, seed), strict=True):
        for name, array in one.items():
            np.testing.assert_array_equal(other[name], array)


def test_a_wait_that_comes_too_late_is_seen(monkeypatch):
    """Plant a fault: a device that ignores the operands of an overlapped collective."""

    def disturbs(collective, other):
        return any(a.overlaps(b) for touched in collective for a in touched for b in other[1])

    monkeypatch.setattr(overlap, "has_conflict_with_collective", disturbs)
    seen = 0
    for seed in OVERLAP_SEEDS:
        plan = random_sharded_plan(seed, Overlapping())
        want, _ = outputs_of(plan, seed)
        try:
            got, _ = outputs_of(as_late(plan), seed)
        except StepError:  # noise is no number of a row
            seen += 1
            continue
        seen += any(not np.array_equal(want[name], got[name]) for name in want)
    assert seen


@pytest.mark.parametrize("what", ["src", "dst"])
def test_what_would_write_where_a_collective_reads_or_writes_waits_for_it(what):
    """Planted: the second product lies where the first sum is taken from, or where it goes."""
    program = branches_on(Overlapping()).device_plans[0].program
    first = next(n for n, i in enumerate(program.instructions) if i.op in COLLECTIVES)
    steps = [*program.instructions]
    (there,) = getattr(steps[first], what)
    (product,) = steps[first + 1].dst
    steps[first + 1] = dataclasses.replace(steps[first + 1], dst=(dataclasses.replace(product, offset=there.offset),))
    assert first in find_instructions_beside_collectives(program)
    assert first not in find_instructions_beside_collectives(dataclasses.replace(program, instructions=tuple(steps)))


# --------------------------------------------------------------------------------------------------------- saved time


def test_the_worked_example_waits_for_whichever_takes_longer():
    """Check work of 3, a collective of 5 during work of 4, then work of 1: 3 + 5 + 1 instead of 13."""
    work = TimelineEntry(COMPUTE, (0, 1), 0, 1, 0.0, 0.0, 3.0)
    reduction = TimelineEntry("all_reduce", (0, 1), 0, 1, 0.0, 0.0, 5.0)
    stages = [
        work,
        reduction,
        dataclasses.replace(work, seconds=4.0, is_overlapped=True),
        dataclasses.replace(work, seconds=1.0),
    ]
    cost = estimate_run_time(stages, 2)
    assert (cost.total, cost.compute, cost.collectives, cost.overlapped_seconds) == (9.0, 8.0, 5.0, 4.0)
    assert [link.stage.seconds for link in find_critical_path(stages, 2)] == [3.0, 5.0, 1.0]
    longer = dataclasses.replace(stages[2], seconds=7.0)
    assert [link.stage.seconds for link in find_critical_path([*stages[:2], longer, stages[3]], 2)] == [3.0, 7.0, 1.0]


@pytest.mark.parametrize("seed", range(40))
def test_the_virtual_clock_and_the_path_take_the_estimated_time(seed):
    plan = random_sharded_plan(seed, NullBackend(SPEEDS, computes_beside=True))
    path = find_critical_path(plan.timeline, len(plan.device_plans))
    assert np.isclose(sum(link.stage.seconds for link in path), plan.cost.total)
    assert 0.0 <= plan.cost.overlapped_seconds <= plan.cost.collectives * (1 + 1e-9)


def test_the_virtual_clock_computes_beside_a_sum_and_waits_behind_it():
    beside_it, one_by_one = (
        simulate_run(branches_on(NullBackend(SPEEDS, computes_beside=does))) for does in (True, False)
    )
    plan = branches_on(NullBackend(SPEEDS, computes_beside=True))
    assert beside_it.total_seconds < one_by_one.total_seconds
    assert beside_it.total_seconds == pytest.approx(plan.cost.total)
    assert one_by_one.total_seconds == pytest.approx(plan.cost.total + plan.cost.overlapped_seconds)
    for track in beside_it.events_by_device:
        step = {s.node: s for s in track}
        first = next(s for s in track if s.op in COLLECTIVES)
        assert step["product.1"].start == pytest.approx(first.start)
        assert step["norm.0"].start >= first.end
    assert 0 < beside_it.compute_busy_share(0) <= 1


def test_a_plan_says_what_computing_beside_collectives_saves():
    text = branches_on(NullBackend(SPEEDS, computes_beside=True)).explain()
    assert "devices compute beside 2 of 2 collectives, which saves" in text
    assert "beside the meeting before it" in text
    assert "beside" not in branches_on(NullBackend(SPEEDS)).explain()


def test_messages_are_waited_for_at_once():
    backend = Overlapping()
    plan = plan_for_group(decoder(), [(backend, backend.device(d)) for d in range(2)], split_mode="layer")
    assert any(i.op in POINT_TO_POINT_OPS for i in plan.device_plans[0].program.instructions)
    assert all(device_plan.overlapped_instructions == {} for device_plan in plan.device_plans)


def test_one_device_alone_has_nothing_beside_which_to_compute():
    backend = Overlapping()
    _, program = lower_graph(two_branches(), backend, backend.device(0))
    assert find_instructions_beside_collectives(program) == {}
