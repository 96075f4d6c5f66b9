"""The restart of an engine: a failed step ends its own requests, and all others get the text that they get alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from hocket import Model
from hocket.backends.cpu.backend import CpuBackend
from hocket.frontends.errors import ModelError
from hocket.frontends.generation.generate import GenerationParams
from hocket.frontends.generation.sampling import Sampling
from hocket.frontends.serving.engine import Engine
from hocket.frontends.serving.requests import EndEvent, Event, GenerationRequest, PromptProgressEvent, TokenEvent
from hocket.frontends.serving.running_requests import QueuedRequest, start_request
from hocket.frontends.serving.slots import SlotPool
from hocket.frontends.serving.step_runner import MAX_RESTARTS
from hocket.frontends.serving.thread import EngineOptions, EngineThread
from hocket.graph.errors import BackendError, StatesLostError
from hocket.scheduler.runtime.rollback_log import RollbackLog

from ...given.models.goldens import path_of
from ...given.serving.engine_runs import BASE, end_of, make_engine, make_request, run_all, tokens_of
from ...given.serving.fake_pool import FakePool, generate_alone
from ...given.waits import WAIT_SECONDS, wait_until


def breaks_a_step(engine: Engine, events: list[Event]) -> bool:
    """Run a step, and return whether it raises."""
    try:
        events += engine.step()
    except RuntimeError:
        return True
    return False


@pytest.mark.parametrize("recurrent", [False, True], ids=["attention", "recurrent"])
def test_a_broken_chunk_ends_its_request_and_the_others_go_on(recurrent: bool) -> None:
    pool = FakePool(3, recurrent=recurrent, context=128)
    engine = make_engine(pool)
    requests = [make_request(str(i), BASE[: 4 + i], limit=12, seed=i + 3) for i in range(2)]
    for request in requests:
        engine.submit(request)
    events: list[Event] = []
    while not all(len(tokens_of(events, request.id)) > 2 for request in requests):
        events += engine.step()
    engine.submit(make_request("bad", [7] * 20))
    engine.submit(make_request("queued", BASE[:9], seed=8))
    pool.breaks = frozenset(["read"])
    while not breaks_a_step(engine, events):
        pass
    pool.breaks = frozenset()
    assert engine.requests_in_step == ("bad",)
    events += engine.restart_and_requeue_requests(engine.requests_in_step, "broken")
    events += run_all(engine)
    assert (end_of(events, "bad").reason, end_of(events, "bad").message) == ("error", "broken")
    assert pool.rebuilds == 1
    assert engine.status.sums.restarts == 1
    for request in (*requests, make_request("queued", BASE[:9], seed=8)):
        new, reason = generate_alone(request, pool.context)
        assert (tokens_of(events, request.id), end_of(events, request.id).reason) == (new, reason)
    read = [event.read_tokens for event in events if isinstance(event, PromptProgressEvent) and event.request == "0"]
    assert read == sorted(set(read))  # progress is reported once


def test_requests_of_a_broken_decode_step_end_and_later_ones_work() -> None:
    pool = FakePool(2)
    engine = make_engine(pool)
    for i in range(2):
        engine.submit(make_request(str(i), BASE[: 4 + i], limit=12, seed=i + 3))
    events: list[Event] = []
    while not all(tokens_of(events, str(i)) for i in range(2)):
        events += engine.step()
    pool.breaks = frozenset(["decode"])
    with pytest.raises(RuntimeError):
        engine.step()
    pool.breaks = frozenset()
    assert sorted(engine.requests_in_step) == ["0", "1"]
    events += engine.restart_and_requeue_requests(engine.requests_in_step, "broken")
    assert [end_of(events, str(i)).message for i in range(2)] == ["broken"] * 2
    assert not engine.has_work
    later = make_request("later", BASE, seed=5)
    engine.submit(later)
    assert tokens_of(run_all(engine), "later") == generate_alone(later, pool.context)[0]


# ------------------------------------------------------------------------------------------------------- with a model


class Receiver:
    """Collects the events of requests, which come in the thread of the engine."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._ends: dict[str, threading.Event] = {}

    def submit(self, service: EngineThread, name: str, prompt: tuple[int, ...], limit: int = 6) -> None:
        self._ends[name] = threading.Event()
        params = GenerationParams(limit, Sampling(), 1, frozenset())
        service.submit(GenerationRequest(name, prompt, params), self.receive)

    def receive(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, EndEvent):
            self._ends[event.request].set()

    def wait(self, name: str) -> EndEvent:
        assert self._ends[name].wait(WAIT_SECONDS)
        return end_of(self.events, name)

    def generate(self, service: EngineThread, name: str, prompt: tuple[int, ...], limit: int = 6) -> list[int]:
        self.submit(service, name, prompt, limit)
        assert self.wait(name).reason == "length", self.wait(name)
        return tokens_of(self.events, name)


@contextmanager
def open_service(**hooks: Any) -> Iterator[EngineThread]:
    with Model(path_of("qwen35"), context=128, batch=32) as model:
        service = EngineThread(model, EngineOptions(2, 4), name="m", version="0", **hooks)
        try:
            wait_until(lambda: service.is_compiled_and_ready or service.engine_end_reason)
            yield service
        finally:
            service.close(0)


PROMPTS = tuple(range(3, 40)), tuple(range(60, 20, -1))


@pytest.mark.long
@pytest.mark.parametrize("operation", ["decode", "read_prompt"])
def test_an_exception_in_a_step_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    """The other request has the text that it has alone, and later requests work."""
    restarts: list[str] = []
    with open_service(on_restart=restarts.append) as service:
        receiver = Receiver()
        alone = receiver.generate(service, "alone", PROMPTS[0], 60)
        run, has_failed = getattr(SlotPool, operation), threading.Event()

        def fail_once(pool: SlotPool, *args: Any) -> object:
            if not has_failed.is_set() and len(tokens_of(receiver.events, "first")) > 4:
                has_failed.set()
                raise RuntimeError("planted\nfault")
            return run(pool, *args)

        monkeypatch.setattr(SlotPool, operation, fail_once)
        monkeypatch.setattr(SlotPool, "predict_seconds_saved_by_mixing", lambda *args: 0.0)
        receiver.submit(service, "first", PROMPTS[0], 60)
        if operation == "read_prompt":
            wait_until(lambda: len(tokens_of(receiver.events, "first")) > 4)
            receiver.submit(service, "second", PROMPTS[1])
            assert receiver.wait("second").message == "RuntimeError: planted fault"
            assert receiver.wait("first").reason == "length"
            assert tokens_of(receiver.events, "first") == alone
        else:
            assert receiver.wait("first").message == "RuntimeError: planted fault"
        assert receiver.generate(service, "later", PROMPTS[0], 60) == alone
        assert restarts == ["RuntimeError: planted fault"]
        assert service.status.sums.restarts == 1
        assert not service.engine_end_reason


@pytest.mark.long
def test_a_device_that_was_killed_is_bound_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_service() as service:
        receiver = Receiver()
        alone = receiver.generate(service, "alone", PROMPTS[0])
        is_dead = threading.Event()

        def plant(name: str) -> None:
            run = getattr(SlotPool, name)

            def fail(pool: SlotPool, *args: Any) -> object:
                if is_dead.is_set():
                    raise BackendError("cpu:0: the device is gone")
                return run(pool, *args)

            monkeypatch.setattr(SlotPool, name, fail)

        plant("decode")
        plant("read_prompt")
        rebuild = SlotPool.rebind_plans_and_zero_states

        def rebuild_and_revive(pool: SlotPool) -> None:
            rebuild(pool)
            is_dead.clear()

        monkeypatch.setattr(SlotPool, "rebind_plans_and_zero_states", rebuild_and_revive)
        is_dead.set()
        receiver.submit(service, "unlucky", PROMPTS[0])
        assert receiver.wait("unlucky").message == "cpu:0: the device is gone"
        assert receiver.generate(service, "later", PROMPTS[0]) == alone
        assert service.status.sums.restarts == 1


@pytest.mark.long
def test_a_fault_of_one_request_needs_no_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_service() as service:
        receiver, read = Receiver(), SlotPool.read_prompt

        def fail(pool: SlotPool, slot: int, tokens: Any, before: Any) -> object:
            if 77 in tokens:
                raise BackendError("a kernel has met a NaN")
            return read(pool, slot, tokens, before)

        monkeypatch.setattr(SlotPool, "read_prompt", fail)
        receiver.submit(service, "bad", (77, 78))
        assert receiver.wait("bad").message == "a kernel has met a NaN"
        receiver.generate(service, "good", PROMPTS[0])
        assert service.status.sums.restarts == 0


def test_an_engine_that_fails_again_and_again_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[str] = []
    with open_service(on_failure=failures.append) as service:
        receiver = Receiver()

        def fail(pool: SlotPool, *args: Any) -> object:
            if len(args[1]) > 1:  # a probe has one token
                raise RuntimeError("planted")
            return read(pool, *args)

        read = SlotPool.read_prompt
        monkeypatch.setattr(SlotPool, "read_prompt", fail)
        for i in range(MAX_RESTARTS + 1):
            receiver.submit(service, str(i), PROMPTS[0])
            assert receiver.wait(str(i)).message == "RuntimeError: planted"
        wait_until(lambda: failures)
        assert failures == ["RuntimeError: planted"]
        with pytest.raises(ModelError, match="the engine has ended: RuntimeError: planted"):
            receiver.submit(service, "late", PROMPTS[0])


@pytest.mark.long
def test_a_device_that_stays_dead_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[str] = []
    with open_service(on_failure=failures.append) as service:

        def fail(pool: SlotPool, *args: Any) -> object:
            raise BackendError("cpu:0: the device is gone")

        monkeypatch.setattr(SlotPool, "read_prompt", fail)
        receiver = Receiver()
        receiver.submit(service, "unlucky", PROMPTS[0])
        assert receiver.wait("unlucky").message == "cpu:0: the device is gone"
        wait_until(lambda: failures)
        assert "a new engine does not run either, start the server again" in failures[0]


def test_tokens_come_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is read again after a restart sends no token twice, with random numbers and without."""
    pool = FakePool(2, context=128)
    engine = make_engine(pool)
    engine.submit(make_request("a", BASE[:5], limit=20, seed=4))
    events: list[Event] = []
    for _ in range(5):
        events += engine.step()
        events += engine.restart_and_requeue_requests((), "again")
    events += run_all(engine)
    request = make_request("a", BASE[:5], limit=20, seed=4)
    assert tokens_of(events, "a") == generate_alone(request, pool.context)[0]
    assert len([event for event in events if isinstance(event, TokenEvent)]) == end_of(events, "a").timing.new_tokens


def test_a_request_that_is_repeated_keeps_its_draft_counts():
    queued = QueuedRequest(make_request("a", (1, 2, 3)), submitted=0.0)
    running = start_request(queued, 0, now=1.0, cached_tokens=2)
    running.drafted_tokens, running.accepted_tokens = 7, 4
    waiting = running.requeue_with_sent_tokens()
    again = start_request(waiting, 1, now=2.0, cached_tokens=3)
    for timing in (waiting.measure_timing_and_token_counts(3.0), again.measure_timing_and_token_counts(3.0)):
        assert (timing.cached_tokens, timing.drafted_tokens, timing.accepted_tokens) == (2, 7, 4)


@pytest.mark.long
def test_a_step_that_cannot_be_undone_ends_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that comes undoes the launched step of another one. A fault of the undo had ended the new request."""
    monkeypatch.setattr(CpuBackend, "has_separate_memory", True, raising=False)
    restarts: list[str] = []
    with open_service(on_restart=restarts.append) as service:
        receiver = Receiver()
        alone = [receiver.generate(service, f"alone {i}", prompt, 40) for i, prompt in enumerate(PROMPTS)]
        undo = RollbackLog.undo_last_run.func
        monkeypatch.setattr(RollbackLog, "undo_last_run", property(lambda log: undo(log) if restarts else fail()))
        monkeypatch.setattr(SlotPool, "predict_seconds_saved_by_mixing", lambda *args: 0.0)

        def fail() -> None:
            raise OSError("no power")

        receiver.submit(service, "first", PROMPTS[0], 40)
        wait_until(lambda: len(tokens_of(receiver.events, "first")) > 4)
        assert receiver.generate(service, "second", PROMPTS[1], 40) == alone[1]
        assert receiver.wait("first").reason == "length"
        assert tokens_of(receiver.events, "first") == alone[0]
        (restart,) = restarts
        assert "StatesLostError: an earlier run has lost the states" in restart
        assert "no power" in restart


@pytest.mark.long
def test_an_idle_engine_heals_lost_states_before_a_restore() -> None:
    """Until a request came, a restore was refused, or its states were lost again."""
    restarts: list[str] = []
    with open_service(on_restart=restarts.append) as service:
        receiver = Receiver()
        alone = receiver.generate(service, "a", PROMPTS[0], 8)
        saved = service.capture_slot(0).result()
        lost = service._pool.all_slots_session.store.lost_states
        lost.reason = "planted"
        length = service.restore_slot(1, saved, "file").result()
        assert (length, restarts) == (len(PROMPTS[0]) + 7, ["planted"])
        assert service.capture_slot(1).result().header == saved.header
        assert receiver.generate(service, "b", PROMPTS[0], 8) == alone
        lost.record(StatesLostError("cpu:1 does not stop, load anew", can_begin_anew=False))
        with pytest.raises(ModelError, match=r"the engine has ended: StatesLostError.*cpu:1 does not stop, load anew"):
            service.restore_slot(1, saved, "file").result()
    assert restarts == ["planted"]
