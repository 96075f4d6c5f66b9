"""The memory of a server: requests leave no objects that only the cyclic garbage collector could free."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hocket.frontends.commands.serve import GC_THRESHOLD_OBJECTS, run_cyclic_gc_more_often

from ..given.fakes.fake_service import FakeService, RunningServer, serve
from ..given.open_requests import open_request, read_until
from ..given.waits import wait_until

COUNTED_TYPES = (
    "AnswerStream",
    "ApiError",
    "CancelledError",
    "EventStream",
    "GenerationRequest",
    "Protocol",
    "RequestResponseCycle",
    "TCPTransport",
    "Task",
)
"""Types of objects that most requests create; `Protocol` is the class of a connection."""
MAX_GROWTH = 10
"""Objects of one type that the last requests may still hold."""


@contextmanager
def without_collector() -> Iterator[None]:
    """Return a context without the cyclic garbage collector."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def send_requests(server: RunningServer, count: int) -> None:
    """Send requests of four kinds in turn: complete ones, refused ones, and two kinds of clients that leave."""
    for i in range(count):
        stream = i // 4 % 2 == 1
        server.service.answer = "short" if i % 4 == 0 else "word " * 400
        if i % 4 == 0:
            assert server.post("/completion", {"prompt": "hi", "stream": stream}).status_code == 200
        elif i % 4 == 1:
            assert server.post("/completion", {"prompt": "hi", "unknown": 1}).status_code == 400
        else:
            with open_request(server, stream=stream) as connection:
                wait_until(lambda: server.service.status.running > 0)
                if stream and i % 4 == 2:
                    read_until(connection, b"data: ")
        wait_until(lambda: server.service.status.running == 0)
    server.service.requests.clear()  # the fake service keeps all requests


def count_objects() -> Counter[str]:
    """Return the number of objects of each counted type."""
    names = (type(each).__name__ for each in gc.get_objects())
    return Counter(name for name in names if name in COUNTED_TYPES)


@pytest.mark.long
def test_requests_leave_no_cycles() -> None:
    with serve(FakeService(delay=0.002)) as server:
        send_requests(server, 8)  # the first requests fill caches
        with without_collector():
            before = count_objects()
            send_requests(server, 104)  # 13 of each kind
            grown = count_objects() - before
    assert not {name: count for name, count in grown.items() if count > MAX_GROWTH}


@pytest.mark.parametrize(
    ("threshold", "expected"), [(1_000_000, GC_THRESHOLD_OBJECTS), (700, 700), (0, 0)], ids=["command", "own", "off"]
)
def test_a_server_searches_for_garbage_more_often_than_a_command(
    monkeypatch: pytest.MonkeyPatch, threshold: int, expected: int
) -> None:
    thresholds = [(threshold, 10, 10)]
    monkeypatch.setattr(gc, "get_threshold", lambda: thresholds[-1])
    monkeypatch.setattr(gc, "set_threshold", lambda *new: thresholds.append(new))
    monkeypatch.setattr(gc, "freeze", lambda: None)
    run_cyclic_gc_more_often()
    assert thresholds[-1] == (expected, 10, 10)
