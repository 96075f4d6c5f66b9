"""Plans on a virtual clock, and plans with random turns of their devices."""

from __future__ import annotations

import numpy as np
import pytest

from hocket import ops
from hocket.backends.base import find_device
from hocket.backends.null.backend import NullBackend
from hocket.graph import Graph, PlanError, input, weight
from hocket.scheduler import Executor, Store, load, plan_for_group
from hocket.scheduler.costs.hardware import DEFAULT_HARDWARE, Hardware
from hocket.scheduler.runtime.virtual_clock import simulate_run

from ...given.graphs.random_graphs import bindings
from ...given.plans.faults import decoder, gather_plan, layer_plan, renumber_collectives, tensor_plan
from ...given.plans.grouped import as_file_bytes, devices, make_binder, random_plan
from ...given.plans.interleaved import DeadlockError, InterleavedPlan


def null_group(n: int, **options):
    backend = NullBackend(**options)
    return [(backend, backend.device(i)) for i in range(n)]


# -------------------------------------------------------------------------------------------------------- the clock


def test_a_plan_for_null_devices_runs_through_the_executor_like_any_other():
    plan = plan_for_group(decoder(), null_group(2), split_mode="tensor")
    out = Executor(plan, _bind_plan(plan)).run({"x": np.zeros((3, 8)), "ids": [0, 1, 2]})
    assert {name: a.shape for name, a in out.items()} == {"logits": (3, 10), "z": (3, 8)}


def _bind_plan(plan):
    store = Store([(device_plan.backend, device_plan.device) for device_plan in plan.device_plans])
    for v in plan.graph.weights:
        store.bind(v.node.name, np.zeros(v.shape, np.float32), v.spec, plan.leaves[v.node.name])
    return store


@pytest.mark.parametrize("make_plan", [tensor_plan, layer_plan, gather_plan])
def test_time_passes_without_gaps_and_devices_leave_a_collective_together(make_plan):
    events = simulate_run(make_plan(), NullBackend(DEFAULT_HARDWARE))
    for track, device_plan in zip(events.events_by_device, make_plan().device_plans, strict=True):
        assert [s.node for s in track] == [i.node for i in device_plan.program.instructions]
        now = 0.0
        for s in track:
            assert s.start == pytest.approx(now + s.idle_seconds)
            assert s.end >= s.start
            now = s.end
    ends = [{s.node: s.end for s in track if s.op in ("all_reduce", "all_gather")} for track in events.events_by_device]
    assert ends[0] == ends[1]
    assert all(0 < events.compute_busy_share(d) <= 1 for d in range(2))
    assert events.peak_bytes == tuple(
        sum(device_plan.count_memory_bytes_by_kind().values()) for device_plan in make_plan().device_plans
    )


def test_in_a_layer_split_the_second_device_waits_for_the_first():
    events = simulate_run(layer_plan(), NullBackend(DEFAULT_HARDWARE))
    (received,) = (s for s in events.events_by_device[1] if s.op == "receive")
    (sent,) = (s for s in events.events_by_device[0] if s.op == "send")
    assert received.end == pytest.approx(sent.end)
    assert received.idle_seconds > 0
    assert events.compute_busy_share(1) < 1


def test_two_devices_halve_what_is_bound_by_arithmetic():
    w, x = weight("w", (256, 256)), input("x", (64, 256))
    graph = Graph({"y": ops.mul_mat(w, x)})
    slow = Hardware(flops=1e6, launch=0, link_latency=0, link_bandwidth=1e12)
    one, two = (
        simulate_run(
            plan_for_group(graph, null_group(n, speeds=slow), split_mode="tensor", hardware=slow)
        ).total_seconds
        for n in (1, 2)
    )
    assert two == pytest.approx(one / 2, rel=0.01)


def test_the_same_plan_takes_the_same_time_every_time():
    assert len({simulate_run(tensor_plan(), NullBackend()).total_seconds for _ in range(5)}) == 1


def test_a_plan_for_devices_without_a_virtual_clock_is_refused():
    with pytest.raises(PlanError, match="cpu:0 keeps no virtual clock"):
        simulate_run(tensor_plan())


# ---------------------------------------------------------------------------------------------------- interleavings


@pytest.mark.parametrize("mode", ["tensor", "layer"])
@pytest.mark.parametrize("seed", range(1000, 1025))
def test_every_interleaving_gives_the_result_of_one_device(seed, mode):
    plan, whole, values = random_plan(seed, mode)
    one = load(whole, {v.node.name: as_file_bytes(values[v.node.name], v.dtype) for v in plan.graph.weights})
    many = InterleavedPlan(plan, make_binder(plan.graph, values, plan.leaves))
    feed = {v.node.name: values[v.node.name] for v in plan.graph.inputs}
    for turn in range(3):
        want, got = one.run(feed), many.run(feed, turn, poison=None if turn == 2 else 0xFF)
        for name in want:
            np.testing.assert_allclose(got[name], want[name], rtol=1e-9, atol=1e-9)
        for name in one.store.states:
            np.testing.assert_allclose(
                np.array(many.store.state(name)), np.array(one.store.state(name)), rtol=1e-9, atol=1e-9
            )


def test_an_interleaving_shows_a_deadlock():
    group = [find_device(name) for name in devices(2, "reference")]
    whole = plan_for_group(decoder(), group, split_mode="layer")
    broken = renumber_collectives(whole, 1, {0: 5})
    values = bindings(whole.graph, np.random.default_rng(0))
    run = InterleavedPlan(broken, make_binder(whole.graph, values, whole.leaves))
    with pytest.raises(DeadlockError):
        run.run({"x": values["x"], "ids": [0, 1, 2]}, seed=0)
