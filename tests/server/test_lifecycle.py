"""Clients that leave, full queues, failing engines, and the end of the server."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from hocket.server.lifecycle import bind_sockets, restart_in_fresh_process
from hocket.server.options import ServerOptions

from ..given.fakes.fake_service import FakeService, serve
from ..given.open_requests import CHAT, open_request, read_until
from ..given.waits import WAIT_SECONDS, wait_until

LONG = "word " * 400


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/completion", "/v1/chat/completions"])
def test_a_client_that_leaves_ends_its_request(path: str, stream: bool) -> None:
    with serve(FakeService(LONG, delay=0.01)) as server:
        with open_request(server, path, stream=stream) as connection:
            wait_until(lambda: server.service.status.running == 1)
            if stream:
                read_until(connection, b"data: ")
        wait_until(lambda: server.service.status.running == 0)
        assert len(server.service.cancelled) == 1
        server.service.answer = "short"
        assert server.post("/completion", {"prompt": "hi"}).json()["content"] == "short"


def test_a_queued_client_that_leaves_ends_its_request_alone() -> None:
    with serve(FakeService(LONG, slots=1, delay=0.01)) as server, open_request(server, stream=True) as first:
        wait_until(lambda: server.service.status.running == 1)
        with open_request(server, stream=True), open_request(server):
            wait_until(lambda: server.service.status.queued == 2)
        wait_until(lambda: server.service.status.queued == 0)
        assert server.service.status.running == 1
        assert b"data: " in read_until(first, b"data: ")


def test_all_choices_of_a_client_that_leaves_end() -> None:
    with serve(FakeService(LONG, delay=0.01)) as server:
        with open_request(server, "/v1/chat/completions", n=3):
            wait_until(lambda: server.service.status.running == 3)
        wait_until(lambda: server.service.status.running == 0)


def test_a_full_queue_is_429_with_a_time() -> None:
    service = FakeService(slots=1, queue=1)
    service.pauses = True
    with serve(service) as server, open_request(server), open_request(server):
        wait_until(lambda: service.status.queued == 2)
        for path, body in (("/completion", {"prompt": "a", "stream": True}), ("/v1/chat/completions", CHAT)):
            response = server.post(path, body)
            assert (response.status_code, response.headers["retry-after"]) == (429, "7")
            assert response.json()["error"]["type"] == "rate_limit_error"


def test_choices_that_do_not_all_fit_into_the_queue_are_withdrawn() -> None:
    service = FakeService(slots=3, queue=0)
    service.pauses = True
    with serve(service) as server, open_request(server):
        wait_until(lambda: service.status.queued == 1)
        assert server.post("/v1/chat/completions", {**CHAT, "n": 3}).status_code == 429
        wait_until(lambda: service.status.queued == 1)
        assert len(service.cancelled) == 2


def test_the_number_of_waiting_embeddings_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hocket.server.state.MAX_EMBEDDINGS", 1)
    service = FakeService()
    service.pauses = True
    with serve(service) as server:
        results: list[int] = []
        first = threading.Thread(
            target=lambda: results.append(server.post("/v1/embeddings", {"input": "a"}).status_code)
        )
        first.start()
        wait_until(lambda: server.server._state.embedding_count == 1)
        assert server.post("/v1/embeddings", {"input": "a"}).status_code == 429
        service.pauses = False
        first.join()
        assert results == [200]
        assert server.post("/v1/embeddings", {"input": "a"}).status_code == 200


def test_silent_streams_get_comments() -> None:
    service = FakeService()
    service.pauses = True
    with serve(service, ping_seconds=0.05) as server, open_request(server, stream=True) as connection:
        data = read_until(connection, b": ping\n\n")
        assert b": ping\n\n" in data
        assert b"data: " not in data
        service.pauses = False
        assert b'"stop":true' in read_until(connection, b'"stop":true')


def test_requests_that_find_no_slot_in_time_end() -> None:
    service = FakeService()
    service.pauses = True
    with serve(service, queue_seconds=0.1, ping_seconds=0.05) as server:
        response = server.post("/completion", {"prompt": "hi"})
        assert (response.status_code, response.json()["error"]["type"]) == (503, "unavailable_error")
        wait_until(lambda: service.status.queued == 0)
    with serve(FakeService(LONG, delay=0.1), request_seconds=0.2, ping_seconds=0.05) as server:
        assert server.post("/completion", {"prompt": "hi"}).status_code == 503


@pytest.mark.long
def test_a_client_that_reads_nothing_is_cancelled() -> None:
    data = json.dumps({"prompt": "hi", "stream": True, "n_probs": 20}).encode()
    head = f"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    service = FakeService("x" * 40_000, context=50_000)
    with serve(service, stall_seconds=0.2) as server, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(head.encode() + data)
        wait_until(lambda: bool(service.cancelled))
        wait_until(lambda: not service.status.running)


# -------------------------------------------------------------------------------------------------------------- engine


@pytest.mark.parametrize("path", ["/completion", "/v1/chat/completions"])
def test_an_error_of_the_engine_ends_a_stream_with_an_error(path: str) -> None:
    with serve(FakeService()) as server:
        server.service.fails_after = 2
        whole = server.post(path, {"prompt": "a"} if path == "/completion" else CHAT)
        assert (whole.status_code, whole.json()["error"]["message"]) == (500, "the engine has lost a device")
        body = {"prompt": "a", "stream": True} if path == "/completion" else {**CHAT, "stream": True}
        events = server.post(path, body).text.split("\n\n")
        assert json.loads(events[-2].removeprefix("data: "))["error"]["type"] == "server_error"
        assert "[DONE]" not in "".join(events)


def test_health_follows_the_engine() -> None:
    with serve(FakeService(), heartbeat_seconds=5) as server:
        server.service.seconds_since_heartbeat = 6.0
        response = server.get("/health")
        assert (response.status_code, response.json()["error"]["type"]) == (503, "unavailable_error")
        server.service.seconds_since_heartbeat = 0.0
        assert server.get("/health").status_code == 200
        server.service.engine_end_reason = "out of memory"
        assert "out of memory" in server.get("/v1/health").json()["error"]["message"]
        for path in ("/completion", "/v1/embeddings", "/v1/chat/completions"):
            response = server.post(path, {"prompt": "a"})
            assert response.status_code == 503
            assert response.headers["retry-after"] == "10"
        assert "hocket_engine_up 0.0" in server.get("/metrics").text


def test_requests_wait_for_a_model_that_loads() -> None:
    service = FakeService()
    service.pauses, service.is_compiled_and_ready = True, False
    with serve(service, queue_seconds=0.1, ping_seconds=0.05) as server, open_request(server, stream=True) as waiting:
        response = server.get("/health")
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.json()["error"]["message"] == "the model is loading"
        for _ in range(5):  # more than `queue_seconds`
            assert b": ping" in read_until(waiting, b": ping\n\n")
        service.pauses, service.is_compiled_and_ready = False, True
        assert b'"stop":true' in read_until(waiting, b'"stop":true')
        assert server.get("/health").status_code == 200


def test_an_engine_that_ends_takes_its_streams_with_it() -> None:
    service = FakeService()
    service.pauses = True
    with serve(service, ping_seconds=0.05) as server, open_request(server, stream=True) as connection:
        wait_until(lambda: service.status.queued == 1)
        service.engine_end_reason = "killed"
        data = read_until(connection, b"0\r\n\r\n")
        assert b"the engine has ended: killed" in data


# ------------------------------------------------------------------------------------------------------------- shutdown


@pytest.mark.long
def test_running_requests_end_before_the_server() -> None:
    with serve(FakeService("x" * 200, slots=1, delay=0.01)) as server:
        with ExitStack() as connections:
            running = connections.enter_context(open_request(server, stream=True))
            wait_until(lambda: server.service.status.running == 1)
            server.service.pauses = True
            queued = connections.enter_context(open_request(server, stream=True))
            wait_until(lambda: server.service.status.queued == 1)
            server.server.request_exit()
            server.server.request_exit()  # the same signal at once is no second one
            assert b"shutting down" in read_until(queued, b"0\r\n\r\n")
            assert server.get("/health").status_code == 503
            assert server.post("/completion", {"prompt": "a"}).status_code == 503
            server.service.pauses = False
            assert b'"stop_type":"eos"' in read_until(running, b"0\r\n\r\n")
        server.thread.join(5)
        assert not server.thread.is_alive()


def test_requests_that_outlast_the_drain_end_with_an_error() -> None:
    with serve(FakeService(LONG, delay=0.02), drain_seconds=0.2) as server:
        results: list[httpx.Response] = []
        whole = threading.Thread(target=lambda: results.append(server.post("/completion", {"prompt": "a"})))
        whole.start()
        with open_request(server, "/v1/chat/completions", stream=True) as connection:
            wait_until(lambda: server.service.status.running == 2)
            server.server.request_exit()
            data = read_until(connection, b"0\r\n\r\n")
        whole.join()
        assert b"the server is shutting down" in data
        assert b"[DONE]" not in data
        assert results[0].status_code == 503
        server.thread.join(5)
        assert not server.thread.is_alive()
        assert server.service.status.running == 0


def test_several_addresses_are_served() -> None:
    options = ServerOptions(host="127.0.0.1,127.0.0.2", port=0)
    listeners = bind_sockets(options)
    try:
        (first, port), second = (listener.getsockname() for listener in listeners)
        assert (first, second) == ("127.0.0.1", ("127.0.0.2", port)), "one port for all"
        with pytest.raises(OSError, match="in use") as caught:
            bind_sockets(ServerOptions(host="127.0.0.3,127.0.0.2", port=port))
        assert caught.value.filename == f"127.0.0.2:{port}"
        with socket.create_server(("127.0.0.3", port)):
            pass  # the socket of the first address was closed
    finally:
        for listener in listeners:
            listener.close()


def test_answers_wait_for_no_acknowledgement() -> None:
    """On a connection that is used again, a client acknowledges the head of an answer after 40 ms."""
    (listener,) = bind_sockets(ServerOptions(port=0))
    with listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_port_that_is_free_at_all_addresses_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port in use at the second address had ended the server."""
    create, tries = socket.create_server, list[tuple[str, int]]()

    def refuse_twice(address: tuple[str, int], **options: Any) -> socket.socket:
        tries.append(address)
        if address[0] == "127.0.0.2" and len(tries) <= 4:
            raise OSError(errno.EADDRINUSE, "Address already in use")
        return create(address, **options)

    monkeypatch.setattr(socket, "create_server", refuse_twice)
    for listener in bind_sockets(ServerOptions(host="127.0.0.1,127.0.0.2", port=0)):
        listener.close()
    assert len(tries) == 6
    with pytest.raises(OSError, match="in use"):  # the same address twice
        bind_sockets(ServerOptions(host="127.0.0.1,127.0.0.1", port=0))


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from hocket.server import ServerOptions, run_server
from hocket.tests.given.fakes.fake_service import FakeService
service = FakeService("word " * 300, delay=0.02)
code = run_server(service, ServerOptions(port=0, drain_seconds=30.0), lambda url: print(url, flush=True))
print("closed", service._is_closed, flush=True)
sys.exit(code)
"""


@pytest.mark.long
@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_signals_end_a_server() -> None:
    root = Path(sys.modules["hocket"].__file__ or "").parent.parent
    command = [sys.executable, "-c", SCRIPT, str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        with httpx.stream("POST", f"{url}/completion", json={"prompt": "a", "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: httpx.get(f"{url}/health").status_code == 503)
            process.send_signal(signal.SIGINT)  # the second one ends it at once
            assert any("shutting down" in line for line in lines)
        out, err = process.communicate(timeout=WAIT_SECONDS)
        assert (process.returncode, out, err) == (0, "closed True\n", "")


def test_a_fresh_process_gets_the_port_as_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words after ``--`` are no flags. A process that has served for long begins a new row of restarts."""
    commands, lines = list[list[str]](), list[str]()

    def execute(program: str, words: list[str]) -> None:
        commands.append(words)
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(os, "execv", execute)
    monkeypatch.setenv("HOCKET_RESTARTS", "2")
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "hocket", "serve", "m", "--port", "0"])
    restart_in_fresh_process(77, 1.0, lines.append)
    restart_in_fresh_process(77, 1.0, lines.append)  # the fourth one in a row
    monkeypatch.setattr(sys, "orig_argv", ["python", "hocket", "serve", "--", "m"])
    restart_in_fresh_process(77, 601.0, lines.append)
    assert [words[1:] for words in commands] == [
        ["-m", "hocket", "serve", "m", "--port", "0", "--port", "77"],
        ["hocket", "serve", "--port", "77", "--", "m"],
    ]
    why = f"not possible: {sys.executable}: No such file or directory"
    assert lines == ["restart 3 of 3 in a row", why, "restart 1 of 3 in a row", why]
