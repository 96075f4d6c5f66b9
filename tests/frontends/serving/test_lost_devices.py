"""A device that refuses all calls of the process ends the engine at once, and clients learn why."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from starlette.testclient import TestClient

from hocket import Model
from hocket.backends.cpu.backend import CpuBackend
from hocket.frontends.serving.served_model import EncoderService
from hocket.frontends.serving.slots import SlotPool
from hocket.frontends.serving.thread import EngineOptions, EngineThread
from hocket.graph.errors import BackendError, DeviceLostError, HocketError
from hocket.server.app import create_app
from hocket.server.options import ServerOptions
from hocket.server.state import RETRY_SECONDS

from ...given.serving.lost_devices import REASON, lose_devices_after_tokens
from ...given.serving.real_service import BODY
from ...given.waits import wait_until

LOST = f"cpu:0 refuses all calls of this process: {REASON}; start the process anew"


@contextmanager
def open_losing_client(failures: list[str]) -> Iterator[tuple[EngineThread, TestClient]]:
    with Model(None, context=128, batch=32) as model:
        service = EngineThread(model, EngineOptions(2, 4), name="m", version="0", on_failure=failures.append)
        app = create_app(service, ServerOptions())
        try:
            with TestClient(app, base_url="http://127.0.0.1") as client:
                wait_until(lambda: service.is_compiled_and_ready)
                yield service, client
        finally:
            app.state.serving.builder.close()
            service.close(0.0)


@pytest.mark.long
def test_streams_end_with_an_error_and_later_requests_get_503(monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[str] = []
    with open_losing_client(failures) as (service, client):
        lose_devices_after_tokens(3, monkeypatch)
        lines = client.post("/completion", json={**BODY, "n_predict": 40, "stream": True}).text.splitlines()
        events = [line for line in lines if line]
        tokens = [t for event in events[:-1] for t in json.loads(event.removeprefix("data: ")).get("tokens", ())]
        assert len(tokens) > 2  # before the loss; an event has one or more
        assert '"error"' in events[-1]
        assert LOST in events[-1]
        wait_until(lambda: failures)
        assert failures == [f"DeviceLostError: {LOST}"]
        assert isinstance(service.error, DeviceLostError)
        assert service.status.sums.restarts == 0
        answer = client.post("/completion", json=BODY)
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, str(round(RETRY_SECONDS)))
        assert LOST in answer.json()["error"]["message"]
        assert client.get("/health").status_code == 503


@pytest.mark.long
def test_a_device_that_is_lost_while_vectors_are_computed_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[str] = []
    with open_losing_client(failures) as (service, _):
        lose_devices_after_tokens(0, monkeypatch).set()
        with pytest.raises(BackendError, match="cannot end what was launched"):
            service.embed([[5, 6, 7]], normalise=True)
        wait_until(lambda: failures)
        assert failures == [f"DeviceLostError: {LOST}"]


def test_a_lost_device_ends_the_service_of_an_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[str] = []
    with Model(None, context=128, batch=32) as model:
        service = EncoderService(model, name="m", version="0", on_failure=failures.append)
        with pytest.raises(HocketError, match="text 1 of 1 has no tokens"):
            service.embed([[]], normalise=True)
        assert not service.engine_end_reason  # the error of a request is no loss
        is_lost = lose_devices_after_tokens(0, monkeypatch)
        is_lost.set()
        with pytest.raises(BackendError, match="cannot end what was launched"):
            service.embed([[5, 6, 7]], normalise=True)
        assert failures == [service.engine_end_reason] == [LOST]
        assert isinstance(service.error, DeviceLostError)
        is_lost.clear()


@pytest.mark.long
def test_a_fault_that_does_not_stay_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is built anew, and the next request has its whole text."""
    failures: list[str] = []
    with open_losing_client(failures) as (service, client):
        text = client.post("/completion", json=BODY).json()["content"]
        is_lost, rebuild = lose_devices_after_tokens(3, monkeypatch), SlotPool.rebind_plans_and_zero_states

        def revive_and_rebuild(pool: SlotPool) -> None:
            is_lost.clear()
            monkeypatch.undo()
            rebuild(pool)

        monkeypatch.setattr(CpuBackend, "find_device_loss", lambda self, on: "")
        monkeypatch.setattr(SlotPool, "rebind_plans_and_zero_states", revive_and_rebuild)
        assert client.post("/completion", json={**BODY, "n_predict": 40}).status_code == 500
        assert client.post("/completion", json=BODY).json()["content"] == text
        assert service.status.sums.restarts == 1
        assert not failures
