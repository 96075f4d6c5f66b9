"""The thread of an engine: what it shows while it waits and while it prepares."""

from __future__ import annotations

import time
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

from hocket.frontends.open import open_model
from hocket.frontends.serving import thread as engine_thread
from hocket.frontends.serving.requests import QueueFullError
from hocket.frontends.serving.slots import SlotPool
from hocket.frontends.serving.thread import EngineThread
from hocket.frontends.session import Session

from ...given.models.goldens import path_of


def test_an_idle_engine_waits_for_one_order_and_then_shows_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a cancellation, `status` had shown the ended request until the next heartbeat."""
    monkeypatch.setattr(engine_thread, "HEARTBEAT_SECONDS", 5.0)
    engine = EngineThread.__new__(EngineThread)
    engine._engine, engine._orders = SimpleNamespace(has_work=False), SimpleQueue()
    engine._orders.put(list)
    start = time.monotonic()
    assert engine._take_orders()
    assert time.monotonic() - start < 4
    engine._orders.put(None)
    assert not engine._take_orders()


def test_every_step_that_is_prepared_is_reported() -> None:
    """The engine gives a sign of life after each step, because plans and kernels of all steps may take minutes."""
    pool = SlotPool(Session(open_model(path_of("llama"))), 4, context=64, batch=64)
    reports: list[None] = []
    pool.prepare(lambda: reports.append(None))
    assert len(reports) == 3 + 3  # prompts of 16, 32 and 64 tokens; 1, 2 and 4 sequences


def test_a_full_queue_says_how_many_wait() -> None:
    assert str(QueueFullError(3, 2.0)) == "3 requests wait already; try again in 2 s"
    assert str(QueueFullError(0, 1.0)) == "all slots are busy; try again in 1 s"
