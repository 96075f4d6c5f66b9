"""Kernels that overlap collectives: they are ordered whichever runs first, and a missing event is found."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from hocket.backends.capabilities import can_group_overlap
from hocket.backends.cupy import cuda_driver
from hocket.backends.cupy.device.driver import CollectiveOverlap
from hocket.backends.cupy.emulation import access_log as ordered
from hocket.backends.cupy.emulation.access_log import SIDE_STREAM, AccessLogBackend, AccessLogDriver
from hocket.backends.cupy.emulation.emulated_driver import EmulatedBackend
from hocket.backends.cupy.emulation.race_detector import list_races_between_launches
from hocket.backends.reference.backend import ReferenceBackend
from hocket.graph.errors import BackendError
from hocket.ops.collectives import COLLECTIVES
from hocket.scheduler import load

from ...given.devices.emulation import needs_compiler
from ...given.fakes.fake_cupy import Stream, StreamError, install_fake_cupy
from ...given.plans.branches import branches_on
from ...given.plans.grouped import weights_of

pytestmark = needs_compiler
RUN_COUNT = 12


def inputs():
    rng = np.random.default_rng(0)
    weights = {f"down.{i}": rng.standard_normal((16, 16)).astype(np.float32) for i in range(2)}
    return weights, {"x": rng.standard_normal((8, 16)).astype(np.float32)}


def running(backend):
    """Return a plan and a function that runs it by number.

    Each number has other inputs, so that stale values are wrong.
    """
    plan, (weights, feed) = branches_on(backend), inputs()
    run = load(plan, weights_of(plan.graph, weights))
    return plan, lambda number=0: run.run({"x": feed["x"] + number})


def bits(outputs):
    return {name: value.tobytes() for name, value in outputs.items()}


class RecordingBackend(EmulatedBackend):
    """Keeps the steps that are recorded."""

    def __init__(self):
        super().__init__()
        self.recorded, record = [], self.driver.record

        def record_steps(steps, on):
            self.recorded.append(steps)
            return record(steps, on)

        self.driver.record = record_steps


def test_launches_that_need_nothing_of_a_sum_are_beside_it():
    backend = RecordingBackend()
    plan, run = running(backend)
    run()
    program = plan.device_plans[0].program.instructions
    both = [step for step in backend.recorded[0] if isinstance(step, CollectiveOverlap)]
    assert all(program[beside.number].op in COLLECTIVES for beside in both)
    assert [[program[step.number].node for step in beside.overlapped] for beside in both] == [["product.1"], ["norm.0"]]
    alone = [program[step.number].node for step in backend.recorded[0] if not isinstance(step, CollectiveOverlap)]
    assert alone[1:] == ["product.0", "norm.1"]


def test_launches_beside_a_sum_are_timed_as_all_others():
    plan, weights, feed = branches_on(EmulatedBackend()), *inputs()
    loaded = load(plan, weights_of(plan.graph, weights))
    loaded.run(feed)
    with ThreadPoolExecutor(2) as pool:
        timed = [*pool.map(lambda replay: replay.run_timed(), loaded._program_runners.values())]
    order = [i.node for i in plan.device_plans[0].program.instructions]
    for times in timed:
        seen = [order[n] for t in times for n in t.instruction_numbers]
        assert [*dict.fromkeys(seen)] == order


# ------------------------------------------------------------------------------------- through memory of the host


class Apart(RecordingBackend):
    """Devices that do not reach each other's memory, and have no library."""

    def __init__(self):
        super().__init__()
        self.driver.enable_peer_access = lambda devices: False


def test_a_sum_through_memory_of_the_host_hides_nothing_in_the_clock_as_in_the_run():
    backend = Apart()
    plan, run = running(backend)
    run()
    assert not [step for steps in backend.recorded for step in steps if isinstance(step, CollectiveOverlap)]
    assert plan.cost.overlapped_seconds == 0 < plan.cost.collectives
    assert not any(stage.is_overlapped and stage.count for stage in plan.timeline)
    assert "devices compute beside" not in plan.explain()
    assert branches_on(EmulatedBackend()).cost.overlapped_seconds > 0


def test_devices_that_do_not_reach_each_other_take_no_sums_in_chunks():
    devices = [EmulatedBackend().device(d) for d in range(2)]
    assert can_group_overlap([(Apart(), device) for device in devices]) is False
    assert can_group_overlap([(EmulatedBackend(), device) for device in devices]) is True


def test_devices_of_two_backends_hide_nothing():
    one, other = EmulatedBackend(), ReferenceBackend()
    assert not can_group_overlap([(one, one.device(0)), (other, other.device(0))])


# ------------------------------------------------------------------------------------------------ order of accesses


def find_disorders_beside():
    driver = AccessLogDriver()
    _, run = running(AccessLogBackend(driver))
    faults = []
    for _ in range(2):
        run()
        faults += list_races_between_launches(driver.take_log(), driver.memory)
    return faults


@pytest.mark.long
def test_all_accesses_beside_a_sum_are_in_order():
    assert find_disorders_beside() == []


def fork_of(edit):
    """The first launch of the collective that is at the side."""

    def edit_launches(launches):
        first = next(n for n, one in enumerate(launches) if one.stream == SIDE_STREAM)
        return [edit(one, n) if n == first else one for n, one in enumerate(launches)]

    return edit_launches


def join_of(edit):
    """The first launch behind both."""

    def edit_launches(launches):
        last = max(n for n, one in enumerate(launches) if one.stream == SIDE_STREAM)
        behind = next(n for n, one in enumerate(launches) if one.predecessors_end > last)
        return [edit(one, n) if n == behind else one for n, one in enumerate(launches)]

    return edit_launches


MISSING = {
    "no event where they part": fork_of(lambda one, at: replace(one, predecessors_end=0)),
    "the event of the launch before that one": fork_of(
        lambda one, at: replace(one, predecessors_end=one.predecessors_end - 1)
    ),
    "no event where they meet": join_of(lambda one, at: replace(one, predecessors_end=0)),
    "an event from before the sum": join_of(lambda one, at: replace(one, predecessors_end=1)),
}


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("what", MISSING)
def test_an_event_that_is_missing_or_wrong_leaves_accesses_in_no_order(what, monkeypatch):
    queued = ordered.assign_launches_to_streams
    monkeypatch.setattr(ordered, "assign_launches_to_streams", lambda steps: MISSING[what](queued(steps)))
    assert find_disorders_beside()


# --------------------------------------------------------------------------------------------- events of real devices


@pytest.fixture
def on_devices(monkeypatch):
    """A plan on real devices, over a stand-in for CuPy that runs graphs in any order that their events leave."""
    install_fake_cupy(monkeypatch)
    yield lambda: running(cuda_driver.CudaBackend())[1]
    cuda_driver._compile_and_load_module.cache_clear()


def no_fork(stream, event, wait):
    if not stream.priority:
        wait(stream, event)


def no_join(stream, event, wait):
    if stream.priority:
        wait(stream, event)


def wrong_fork(stream, event, wait):
    """Record the event of the previous launch."""
    if stream.priority:
        event.behind = frozenset().union(*(event.capture.nodes[n][1] for n in event.behind))
    wait(stream, event)


def expected_outputs():
    run = running(EmulatedBackend())[1]
    return [bits(run(number)) for number in range(RUN_COUNT)]


def runs_right(make, want):
    run = make()
    assert [bits(run(number)) for number in range(RUN_COUNT)] == want


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("planted", [no_fork, no_join, wrong_fork])
def test_a_graph_without_one_of_its_waits_is_found(planted, on_devices, monkeypatch):
    want, wait = expected_outputs(), Stream.wait_event
    monkeypatch.setattr(Stream, "wait_event", lambda stream, event: planted(stream, event, wait))
    with pytest.raises((AssertionError, BackendError)):
        runs_right(on_devices, want)


def test_a_graph_with_a_sum_at_its_side_gives_the_same_bits_in_any_order(on_devices):
    runs_right(on_devices, expected_outputs())


def at_the_side(stream):
    return bool(stream.priority)


def while_the_side_is_away(stream):
    return not stream.priority and len(stream.capture.streams) > 1


@pytest.mark.parametrize("where", [at_the_side, while_the_side_is_away])
def test_a_launch_that_fails_during_capture_is_reported_and_ends_all_captures(where, on_devices, monkeypatch):
    want, put, streams = expected_outputs(), Stream.put, []

    def failing(stream, run):
        if stream.is_capturing and not streams and where(stream):
            streams.extend(stream.capture.streams)
            raise StreamError("no such launch")
        put(stream, run)

    monkeypatch.setattr(Stream, "put", failing)
    with pytest.raises(BackendError, match=r"on cuda:\d: .*: no such launch"):
        runs_right(on_devices, want)
    assert len(streams) > 1
    assert not any(stream.is_capturing for stream in streams)
    runs_right(on_devices, want)
