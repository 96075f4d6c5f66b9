"""States are lost if a run cannot be undone: no later run uses them, and no other states are affected."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import numpy as np
import pytest

import hocket
from hocket import ops
from hocket.backends.cupy.emulation.emulated_driver import EmulatedBackend
from hocket.distributed import RanksError
from hocket.distributed.world import FirstRankFailure
from hocket.graph.errors import StatesLostError, StepError
from hocket.scheduler import Executor, LaunchedRun, load, plan_for_group


def make_counter() -> Executor:
    """Return an executor with a state ``s`` that is 1 larger after each run."""
    s = hocket.state("s", (3,))
    graph = hocket.Graph({"before": ops.scale(s, scale=1.0)}, {s: ops.scale(s, scale=1.0, bias=1.0)})
    return hocket.load(hocket.plan(graph, "numpy:0"), {})


def fail() -> None:
    raise OSError("no power")


def test_a_failed_undo_is_reported_to_the_owner_of_the_states_alone() -> None:
    own, other = make_counter(), make_counter()
    own.run({})
    own._device_stages[0].rollback_log.undo_last_run = fail
    with own.store.device_lock:
        own.store.device_lock.leave_launched_run(own.launch({}))
    with ThreadPoolExecutor(1) as pool:  # takes the lock next, which undoes the launched run
        assert pool.submit(other.run, {}).result()["before"].tolist() == [0, 0, 0]
    for use in (lambda: own.run({}), lambda: own.launch({}), lambda: np.asarray(own.store.state("s"))):
        with pytest.raises(StatesLostError, match=r"an earlier run has lost the states .*numpy:0 .*no power") as caught:
            use()
        assert caught.value.is_of_earlier_run
    with pytest.raises(StatesLostError):
        own.store.copy_state_rows("s", 0, 1, 1)
    part = own.store.view_sequences(0, 1, 1)
    part.zero_states()
    with pytest.raises(StatesLostError):  # parts do not say that the others are good
        own.run({})
    own.store.zero_states()
    assert [own.run({})["before"][0] for _ in range(2)] == [0, 1]


def test_a_launched_run_that_has_failed_is_undone_as_far_as_it_came() -> None:
    """Without this, entries that the failed run has not saved would come from the run before it."""
    executor = make_counter()
    for _ in range(2):
        executor.run({})

    def finish() -> NoReturn:
        raise StepError("y", "numpy:0", 0, "planted")

    LaunchedRun(executor, finish).undo()
    assert executor.run({})["before"].tolist() == [2, 2, 2]


@pytest.mark.parametrize("has_follower", [False, True])
def test_a_launched_run_ends_before_the_loss_by_another_view_is_reported(has_follower: bool) -> None:
    """Otherwise the next run would report the fault of the run without a wait."""
    backend, table, ids = EmulatedBackend(), hocket.state("table", (8, 8)), hocket.input("ids", (1,), "i32")
    changed = ops.set_rows(table, hocket.input("x", (1, 8)), ids)
    graph = hocket.Graph({"y": ops.neg(changed)}, {table: changed})
    whole = load(plan_for_group(graph, [(backend, backend.device(0))]), {})
    small = hocket.Graph({"y": ops.scale(s := hocket.state("table", (4, 8)), scale=1.0)}, {s: ops.neg(s)})
    plan = plan_for_group(small, [(backend, backend.device(0))], like=whole.plan)
    other = Executor(plan, whole.store.view_sequences(1, 1, 2))
    x = np.ones((1, 8), np.float32)
    whole.run({"x": x, "ids": [1]})
    with whole.store.device_lock:
        launched = whole.launch({"x": 2 * x, "ids": [77]})  # there is no such row
        follower = whole.launch({"x": 3 * x, "ids": [2]}) if has_follower else None
        other._device_stages[0].rollback_log.undo_last_run = fail
        other.launch({}).undo()
        with pytest.raises(StatesLostError, match="no power"):
            launched.finish(follower)
    whole.store.zero_states()
    assert whole.run({"x": x, "ids": [2]})["y"].sum() == -8


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Yield an event for which a device waits in vain until the end of the test."""
    gate = threading.Event()
    yield gate
    gate.set()


def make_executor_of_stuck_device(gate: threading.Event) -> Executor:
    """Return an executor with two devices: the first one fails, and the second one does not stop before an event."""
    s = hocket.state("s", (4, 8))
    new = ops.add(s, ops.mul_mat(hocket.weight("w", (8, 8)), hocket.input("x", (4, 8))))
    graph = hocket.Graph({"y": ops.scale(s, scale=1.0)}, {s: new})
    plan = hocket.plan(graph, ["numpy:0", "numpy:1"], split_mode="tensor")
    executor = Executor(plan, hocket.load(plan, {"w": np.eye(8)}).store, timeout=0.05)
    executor._output_runners |= {0: fail, 1: gate.wait}
    return executor


FEED = {"x": np.ones((4, 8))}


def list_arenas(executor: Executor) -> list[Any]:
    """Return the arena of each device to which an executor is bound."""
    devices = executor.plan.device_plans
    return [
        buffer
        for number, buffers in executor._bound_plan._buffers.items()
        for spec, buffer in zip(devices[number].program.buffers, buffers, strict=True)
        if spec.kind == "arena"
    ]


def test_memory_to_which_a_device_may_still_write_is_not_used_again(gate: threading.Event) -> None:
    """It had been said to be good after zeros. Then the device added 1 to the zeros of another executor."""
    executor = make_executor_of_stuck_device(gate)
    plan, store = executor.plan, executor.store
    with pytest.raises(StatesLostError, match=r"no power; and numpy:1 does not stop: states are lost, load anew$"):
        executor.run(FEED)
    for use in (store.zero_states, lambda: executor.run(FEED), lambda: Executor(plan, store).run(FEED)):
        with pytest.raises(StatesLostError, match=r"does not stop: states are lost, load anew\)$") as caught:
            use()
        assert not caught.value.can_begin_anew


def test_an_arena_to_which_a_device_may_still_write_is_used_by_no_other_store(gate: threading.Event) -> None:
    """Other stores had shared it without an error, so a late write changed their results."""
    executor = make_executor_of_stuck_device(gate)
    plan, store = executor.plan, executor.store
    earlier = Executor(plan, store.share_weights_and_arena())
    assert [*map(id, list_arenas(earlier))] == [*map(id, list_arenas(executor))]
    with pytest.raises(StatesLostError):
        executor.run(FEED)
    with pytest.raises(StatesLostError, match=r"does not stop: states are lost, load anew\)$"):
        earlier.run(FEED)
    later, last = (Executor(plan, store.share_weights_and_arena()) for _ in range(2))
    assert [later.run(FEED)["y"][0, 0] for _ in range(2)] == [0, 1]
    assert not {*map(id, list_arenas(later))} & {*map(id, list_arenas(executor))}
    assert [*map(id, list_arenas(later))] == [*map(id, list_arenas(last))]


def test_a_loss_on_a_rank_after_a_failure_of_ranks_is_their_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine goes on after lost states, but not without the other ranks."""
    own = make_counter()
    own.store.lost_states.reason = "planted"
    monkeypatch.setattr(own.store.between.world, "failure", FirstRankFailure(1, "host", "no power"))
    with pytest.raises(RanksError, match="rank 1 on host: no power"):
        own.run({})
