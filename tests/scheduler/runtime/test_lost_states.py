"""States are lost if a run cannot be undone: no later run uses them, and no other states are affected."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import hocket
from hocket import ops
from hocket.graph.errors import StatesLostError, StepError
from hocket.scheduler import Executor, LaunchedRun


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
        own.store.device_lock.leave_launched(own.launch({}))
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

    def finish() -> list[object]:
        raise StepError("y", "numpy:0", 0, "planted")

    LaunchedRun(executor, finish).undo()  # type: ignore[arg-type]
    assert executor.run({})["before"].tolist() == [2, 2, 2]
