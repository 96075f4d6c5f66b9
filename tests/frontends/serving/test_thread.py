"""The thread of an engine: its status while it waits and while it prepares."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty
from threading import Lock
from types import SimpleNamespace

import pytest

from hocket.frontends.inference.session import Session
from hocket.frontends.open_model import open_model
from hocket.frontends.serving.requests import EndEvent, Event, QueueFullError, RequestTiming
from hocket.frontends.serving.slots import SlotPool
from hocket.frontends.serving.thread import EngineThread, PendingSlotAction

from ...given.models.goldens import path_of


class RecordedQueue:
    """A queue of orders that records whether each call waits."""

    def __init__(self, *orders: Callable[[], list[Event]]) -> None:
        self._orders, self.waits = deque(orders), list[bool]()

    def get(self, waits: bool, seconds: float | None) -> Callable[[], list[Event]]:
        self.waits.append(waits)
        if not self._orders:
            raise Empty
        return self._orders.popleft()


def test_an_idle_engine_waits_for_one_order_and_then_shows_its_result() -> None:
    """After a cancellation, `status` had shown the ended request until the next heartbeat."""
    engine, queue = EngineThread.__new__(EngineThread), RecordedQueue(list, list)
    engine._engine, engine._orders = SimpleNamespace(has_work=False), queue
    assert engine._execute_queued_orders_unless_ended()
    assert queue.waits == [True, False, False]


def test_the_receiver_of_an_event_sees_status_that_counts_it() -> None:
    """A client that read the metrics after its answer had missed the tokens of the last step."""
    thread, seen = EngineThread.__new__(EngineThread), list[object]()
    thread._engine, thread._receivers_lock = SimpleNamespace(status="after the step"), Lock()
    thread._status = "before the step"
    thread._receivers = {"a": lambda _: seen.append(thread.status)}
    thread._send_events([EndEvent("a", "length", RequestTiming())])
    assert seen == ["after the step"]


@pytest.mark.long
def test_every_step_that_is_prepared_is_reported() -> None:
    """The engine gives a sign of life after each step, because plans and kernels of all steps may take minutes."""
    pool = SlotPool(Session(open_model(path_of("llama"))), 4, context=64, batch=64)
    reports: list[None] = []
    pool.compile_short_steps(lambda: reports.append(None))
    assert len(reports) == 3 + 3 + 3 * 2  # prompts of 16, 32 and 64 tokens; 1, 2 and 4 sequences; both of 2 and 4


def test_a_cancelled_action_of_a_busy_slot_is_dropped() -> None:
    """The action of a client that has left would hold the content of its file until the slot is free."""
    thread, waiting, cancelled = EngineThread.__new__(EngineThread), Future[int](), Future[int]()
    cancelled.cancel()
    thread._engine = SimpleNamespace(status=SimpleNamespace(slot_requests=("busy",)))
    thread._pool = SimpleNamespace(lost_states_reason="")
    thread._slot_actions = [PendingSlotAction(0, lambda: None, future) for future in (waiting, cancelled)]
    thread._run_actions_of_free_slots()
    assert [action.future for action in thread._slot_actions] == [waiting]


def test_a_full_queue_says_how_many_wait() -> None:
    assert str(QueueFullError(3, 2.0)) == "3 requests wait already; try again in 2 s"
    assert str(QueueFullError(0, 1.0)) == "all slots are busy; try again in 1 s"
