"""Pipelined runs give the results of single runs, and are all undone if one fails."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hocket import ops
from hocket.backends.base import find_device
from hocket.backends.null.backend import NullBackend
from hocket.distributed import thread_group
from hocket.distributed.thread_group import MAX_PENDING_MESSAGES, ThreadGroup
from hocket.graph import BackendError, Graph, PlanError, StepError, input, state, weight
from hocket.graph.errors import StatesLostError
from hocket.scheduler import Executor, PipelinedPlan, Store, compute_balanced_proportions, plan_for_group, run_pipelined
from hocket.scheduler.costs.hardware import Hardware

from ...given.devices.faulty import FaultyReference
from ...given.plans.chained import ROWS, RUNS, WIDTH, chain, copy_states, feeds, follow, make_store, plant_fault, same
from ...given.waits import WAIT_SECONDS, wait_until

GROUP_SIZES = pytest.mark.parametrize("group_size", [1, 2], ids=["devices", "teams"])


@pytest.mark.parametrize(("devices", "group_size"), [(1, 1), (2, 1), (4, 1), (2, 2), (2, 3), (3, 2)])
def test_pipelined_runs_give_the_results_of_single_runs(devices, group_size):
    plan, _ = chain(devices, group_size=group_size)
    alone, theirs = make_store(plan), make_store(plan)
    executor = Executor(plan, alone, timeout=WAIT_SECONDS)
    expected = [executor.run(feed) for feed in feeds()]
    results = follow(PipelinedPlan(plan, theirs, timeout=WAIT_SECONDS), feeds())
    assert [one.keys() for one in results] == [{"y"}] * RUNS
    assert all(same(one, two) for one, two in zip(expected, results, strict=True))
    assert same(copy_states(alone), copy_states(theirs))


@GROUP_SIZES
def test_runs_of_several_plans_follow_each_other_over_the_same_states(group_size):
    plan, backend = chain(2, group_size=group_size)
    other = plan_for_group(plan.graph, plan.group, like=plan)
    alone, theirs = make_store(plan), make_store(plan)
    executor = Executor(plan, alone, timeout=WAIT_SECONDS)
    expected = [executor.run(feed) for feed in feeds()]
    pipelines = [PipelinedPlan(one, theirs, timeout=WAIT_SECONDS) for one in (plan, other)]
    runs = [(pipelines[run > 1], feed) for run, feed in enumerate(feeds())]
    before = copy_states(theirs)
    plant_fault(backend, plan.device_plans[1].device, 4, 3)
    with pytest.raises(StepError, match="PlantedError"):
        run_pipelined(runs)
    assert same(copy_states(theirs), before)
    assert all(same(one, two) for one, two in zip(expected, run_pipelined(runs), strict=True))
    assert same(copy_states(alone), copy_states(theirs))


@GROUP_SIZES
@pytest.mark.parametrize("depth", [1, 2, MAX_PENDING_MESSAGES])
@pytest.mark.parametrize("slow", range(3))
def test_however_slow_a_device_is_runs_do_not_mix(slow, depth, group_size, monkeypatch):
    """One device, or the last of a team, begins its second run when all others have gone as far as they get without
    it: of its team, into that run."""
    monkeypatch.setattr(thread_group, "MAX_PENDING_MESSAGES", depth)
    plan, _ = chain(3, group_size=group_size)
    executor = Executor(plan, make_store(plan), timeout=WAIT_SECONDS)
    expected = [executor.run(feed) for feed in feeds()]
    pipeline, calls = PipelinedPlan(plan, make_store(plan), timeout=WAIT_SECONDS), [0] * (3 * group_size)
    last = slow * group_size + group_size - 1
    stages = [number // group_size for number in range(3 * group_size)]
    ahead = [min(RUNS, 1 + depth + 1) if stage < slow else 2 if stage == slow else 1 for stage in stages]

    def delay_replay(number, replay):
        def run():
            if calls[number] == 1 and number == last:
                wait_until(lambda: all(calls[d] >= ahead[d] for d in range(len(calls)) if d != last))
            calls[number] += 1
            replay()

        return run

    for number, device_plan in pipeline._device_stages.items():
        device_plan.run_program = delay_replay(number, device_plan.run_program)
    results = follow(pipeline, feeds())
    assert all(same(one, two) for one, two in zip(expected, results, strict=True))


@GROUP_SIZES
@pytest.mark.parametrize("run", [0, RUNS - 2])
def test_wherever_a_run_fails_states_are_those_before_the_first(run, group_size):
    plan, backend = chain(2, group_size=group_size)
    store, rng = make_store(plan), np.random.default_rng(2)
    pipeline = PipelinedPlan(plan, store, timeout=WAIT_SECONDS)
    for name in store.states:
        if not name.startswith("at"):
            store.state(name)[...] = rng.standard_normal(store.state(name).shape)
    before = copy_states(store)
    for device_plan in plan.device_plans:
        for number, i in enumerate(device_plan.program.instructions):
            plant_fault(backend, device_plan.device, number, run)
            with pytest.raises(StepError, match="PlantedError") as caught:
                follow(pipeline, feeds())
            assert (caught.value.node, caught.value.device) == (i.node, str(device_plan.device))
            assert same(copy_states(store), before), i
    follow(pipeline, feeds())
    assert not same(copy_states(store), before)


def test_a_state_of_which_one_plan_writes_rows_and_another_all_is_taken_back():
    """Check that the first run does not restore the bytes that the second run overwrites, since it saved two rows."""
    backend, table, total = FaultyReference(), state("table", (8, WIDTH)), state("total", (ROWS, WIDTH))
    x, at = input("x", (2, WIDTH)), input("at", (2,), "i32")
    group = [(backend, backend.device(d)) for d in range(2)]
    out, more = {"y": ops.add(total, total, name="y")}, {total: ops.scale(total, scale=2.0, name="doubled")}
    rows, whole = ops.set_rows(table, x, at, name="written"), ops.scale(table, scale=3.0, name="written")
    place = [("table", "reference:0"), ("total", "reference:1")]
    first = plan_for_group(Graph(out, {table: rows, **more}), group, split_mode="layer", place=place)
    other = plan_for_group(Graph(out, {table: whole, **more}), group, like=first)
    store = Store(group)
    setting, scaling = (PipelinedPlan(plan, store, timeout=WAIT_SECONDS) for plan in (first, other))
    for name in store.states:
        store.state(name)[...] = 1 + np.arange(store.state(name).shape[0])[:, None]
    before, feed = copy_states(store), {"x": np.ones((2, WIDTH)), "at": [0, 1]}
    plant_fault(backend, group[0][1], 1, 2)
    with pytest.raises(StepError, match="PlantedError"):
        run_pipelined([(setting, feed), (scaling, {}), (setting, feed)])
    assert same(copy_states(store), before)


def test_unrestored_states_are_not_saved_from_run_to_run_and_all_others_are_restored():
    plan, backend = chain(2)
    store, staying = make_store(plan), {"cache.0", "cache.1"}
    pipeline, other = (PipelinedPlan(plan, store, timeout=WAIT_SECONDS, staying=names) for names in (staying, ()))
    before = copy_states(store)
    plant_fault(backend, plan.device_plans[1].device, 4, RUNS - 1)
    with pytest.raises(StepError, match="PlantedError"):
        follow(pipeline, feeds())
    after = copy_states(store)
    assert {name for name in before if not np.array_equal(before[name], after[name])} == staying
    fewer, all_ = (
        sum(map(len, device_plan.rollback_log.save_undo_data(frozenset()).values()))
        for device_plan in (pipeline._device_stages[0], other._device_stages[0])
    )
    assert fewer == all_ - 2 * ROWS, "rows of the cache, and their numbers"


def test_runs_whose_states_were_lost_are_not_taken_back_with_later_ones():
    plan, backend = chain(2)
    store = make_store(plan)
    pipeline = PipelinedPlan(plan, store, timeout=WAIT_SECONDS)
    device_plan, replay, runs = pipeline._device_stages[0], pipeline._device_stages[0].run_program, []

    def loses_power() -> None:
        runs.append(0)
        if len(runs) == 3:
            raise OSError("no power")
        replay()

    device_plan.run_program = loses_power
    with pytest.raises(BackendError, match=r"no power; and states of \S+ are lost: it does not say how far it came"):
        follow(pipeline, feeds())
    with pytest.raises(StatesLostError, match=r"an earlier run has lost the states .*no power"):
        follow(pipeline, feeds())
    store.zero_states()
    before = copy_states(store)
    plant_fault(backend, plan.device_plans[0].device, 2, 1)
    with pytest.raises(StepError, match="PlantedError"):
        follow(pipeline, feeds())
    assert same(copy_states(store), before)


@pytest.fixture(autouse=True)
def wake_main_thread():
    """A signal that only wakes the main thread: one that comes just before it begins to wait is not noticed alone."""
    before = signal.signal(signal.SIGURG, lambda *_: None)
    yield
    signal.signal(signal.SIGURG, before)


def interrupt() -> None:
    """Press Ctrl-C, and go on when it has been noticed."""
    old_handler, main = signal.getsignal(signal.SIGINT), threading.main_thread().ident
    signal.pthread_kill(main, signal.SIGINT)

    def is_noticed() -> bool:
        signal.pthread_kill(main, signal.SIGURG)
        return signal.getsignal(signal.SIGINT) is not old_handler

    wait_until(is_noticed)


def test_an_interrupt_stops_all_devices_and_takes_all_runs_back():
    plan, backend = chain(2)
    store = make_store(plan)
    pipeline, before = PipelinedPlan(plan, store, timeout=WAIT_SECONDS), copy_states(store)
    first = plan.device_plans[0]
    plant_fault(backend, first.device, 2, 2, interrupt)
    begun = []
    device_plan = pipeline._device_stages[0]
    replay = device_plan.run_program
    device_plan.run_program = lambda: (begun.append(0), replay())
    with pytest.raises(KeyboardInterrupt):
        follow(pipeline, feeds())
    assert len(begun) == 3, "the run that was interrupted is the last"
    assert same(copy_states(store), before)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_with_a_handler_of_the_user_waits_for_the_end():
    plan, backend = chain(2)
    heard = []
    before = signal.signal(signal.SIGINT, lambda *_: heard.append(len(begun)))
    try:
        pipeline, begun = PipelinedPlan(plan, make_store(plan), timeout=WAIT_SECONDS), []
        replay = pipeline._device_stages[0].run_program
        pipeline._device_stages[0].run_program = lambda: (begun.append(0), replay())
        plant_fault(backend, plan.device_plans[0].device, 2, 2, interrupt)
        assert len(follow(pipeline, feeds())) == RUNS
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [RUNS]


def test_a_failure_before_the_first_run_changes_nothing():
    plan, _ = chain(2)
    store = make_store(plan)
    pipeline, before = PipelinedPlan(plan, store, timeout=WAIT_SECONDS), copy_states(store)
    wrong = feeds()
    wrong[-1] = {**wrong[-1], "x": np.ones((ROWS, 1))}
    with pytest.raises(PlanError, match="input %x"):
        follow(pipeline, wrong)
    assert same(copy_states(store), before)


# ------------------------------------------------------------------------------------------------------- letters


def test_a_message_holds_the_bytes_of_its_sending_and_none_overtakes():
    group, value = ThreadGroup(2, WAIT_SECONDS), np.zeros(2, np.float32)
    sender, receiver = group.member(0), group.member(1)
    for number in range(MAX_PENDING_MESSAGES):
        value[:] = number
        sender.send(value, 1, 7)
    value[:] = -1
    into = np.empty(2, np.float32)
    for number in range(MAX_PENDING_MESSAGES):
        receiver.receive(into, 0, 7)
        assert into.tolist() == [number, number]


def test_a_sender_waits_while_the_receiver_has_too_many_messages():
    group, value = ThreadGroup(2, WAIT_SECONDS), np.zeros(2, np.float32)
    sent = []

    def send() -> None:
        for number in range(MAX_PENDING_MESSAGES + 1):
            group.member(0).send(value, 1, number)
            sent.append(number)

    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(send)
        wait_until(lambda: len(sent) == MAX_PENDING_MESSAGES)
        group.member(1).receive(np.empty(2, np.float32), 0, 0)
        done.result()
    assert sent == [*range(MAX_PENDING_MESSAGES + 1)]


def test_a_message_without_receiver_or_sender_is_an_error_and_not_a_hang():
    group, value = ThreadGroup(2, timeout=0.05), np.zeros(2, np.float32)
    with pytest.raises(BackendError, match=r"copy 3 to device 0 of 2: device 1 sent nothing within 0\.05 s"):
        group.member(0).receive(value, 1, 3)
    for _ in range(MAX_PENDING_MESSAGES):
        group.member(0).send(value, 1, 5)
    with pytest.raises(BackendError, match=r"copy 5 from device 0 of 2: device 1 took none within 0\.05 s"):
        group.member(0).send(value, 1, 5)


def test_a_message_in_the_place_of_another_is_refused():
    group, value = ThreadGroup(2, WAIT_SECONDS), np.zeros(2, np.float32)
    group.member(0).send(value, 1, 4)
    with pytest.raises(BackendError, match="copy 5 to device 1 of 2: device 0 sent copy 4; the plans of the devices"):
        group.member(1).receive(value, 0, 5)


# --------------------------------------------------------------------------------------------- the virtual clock


def test_on_a_virtual_clock_four_devices_are_all_busy():
    """Each stage takes a quarter of the time of one device, and runs as many as thirty-two wait for nothing else."""

    def seconds(devices: int) -> float:
        backend = NullBackend(Hardware(launch=0.0), goes_on=True)
        group = [(backend, backend.device(d)) for d in range(devices)]
        x = input("x", (64, 512))
        for stage in range(8):
            x = ops.mul_mat(weight(f"w.{stage}", (512, 512)), x, name=f"y.{stage}")
        plan = plan_for_group(Graph({"y": x}), group, split_mode="layer")
        follow(PipelinedPlan(plan, make_store(plan), timeout=WAIT_SECONDS), [{"x": np.zeros((64, 512))}] * 32)
        return max(track[-1].end for track in backend.tracks.values())

    one, four = seconds(1), seconds(4)
    assert 3.4 < one / four < 4.0


def test_layers_are_distributed_by_time_where_bytes_would_mislead():
    """Check a table that has most of the bytes, but little of the time, since few of its rows are read."""
    x = ops.get_rows(weight("table", (4096, 64)), input("ids", (64,), "i32"), name="rows")
    for number in range(4):
        x = ops.mul_mat(weight(f"w.{number}", (64, 64)), x, name=f"y.{number}")
    graph, group = Graph({"y": x}), [find_device(f"reference:{d}") for d in range(2)]

    def first(**shares):
        program = plan_for_group(graph, group, split_mode="layer", **shares).device_plans[0].program
        return [i.node for i in program.instructions if i.op != "send"]

    assert first() == ["rows"]
    assert first(tensor_split=compute_balanced_proportions(graph, 2, Hardware(launch=0.0))) == ["rows", "y.0", "y.1"]


def test_an_executor_of_pipelined_runs_also_runs_alone():
    plan, _ = chain(2)
    expected = [Executor(plan, make_store(plan)).run(feed) for feed in feeds()[:1]]
    assert same(expected[0], Executor(plan, make_store(plan), pipelined=True).run(feeds()[0]))


def test_an_executor_of_single_runs_is_refused_in_a_pipeline():
    plan, _ = chain(2)
    executor = Executor(plan, make_store(plan))
    with pytest.raises(PlanError, match="an executor is for single runs; make it with pipelined=True"):
        run_pipelined([(executor, feeds()[0])])
