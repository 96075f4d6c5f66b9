"""Faults at a real server process: clients that leave or do not read, hostile bodies, and the end of the process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from hocket.server.lifecycle import RESTARTS_VARIABLE

from ..given.open_requests import read_until
from ..given.serving.server_process import (
    COMMAND,
    COMPLETION,
    LOST_DEVICE_COMMAND,
    LOST_IN_DRAIN_COMMAND,
    SERVER_WORDS,
    ServerProcess,
    run_server,
)
from ..given.waits import WAIT_SECONDS, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

MAX_SENT_MEGABYTES = 40
"""Megabytes that a client can send before its body is refused: the limit is 16 MiB, and sockets have buffers."""
MAX_GROWTH_BYTES = 64 << 20
"""Growth of the memory of the server by bodies of 100 MB."""


@pytest.fixture(name="server", scope="module")
def shared_server() -> Iterator[ServerProcess]:
    with run_server() as server:
        yield server


@pytest.fixture(name="text", scope="module")
def text_alone(server: ServerProcess) -> str:
    found: str = server.post("/completion", COMPLETION).json()["content"]
    return found


@pytest.mark.long
def test_clients_that_are_killed_leave_no_busy_slot(server: ServerProcess, text: str) -> None:
    """Some clients leave in a stream, some while they wait; the text of a client that stays is the same."""
    streams = [server.open_stream(n_predict=200) for _ in range(6)]
    wait_until(lambda: server.count_busy_slots() == 2)
    for stream in streams:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # the end is a reset
        stream.close()
    assert server.post("/completion", COMPLETION).json()["content"] == text
    wait_until(lambda: server.count_busy_slots() == 0)


@pytest.mark.long
def test_a_reader_that_reads_nothing_delays_no_other_client(server: ServerProcess, text: str) -> None:
    with server.open_stream(n_predict=200) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        for _ in range(3):
            assert server.post("/completion", COMPLETION).json()["content"] == text
        first = slow.recv(1)
        assert first == b"H"
    wait_until(lambda: server.count_busy_slots() == 0)


@pytest.mark.parametrize("is_declared", [True, False], ids=["length", "chunked"])
def test_a_body_of_100_megabytes_is_refused(server: ServerProcess, is_declared: bool) -> None:
    count, sent, part, before = 100, 0, b"x" * (1 << 20), server.read_memory()
    length = f"Content-Length: {count << 20}" if is_declared else "Transfer-Encoding: chunked"
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_SECONDS) as connection:
        connection.sendall(f"POST /completion HTTP/1.1\r\nHost: localhost\r\n{length}\r\n\r\n".encode())
        with suppress(ConnectionError):
            for _ in range(count):
                connection.sendall(part if is_declared else b"%x\r\n%s\r\n" % (len(part), part))
                sent += 1
                connection.setblocking(False)
                try:
                    if connection.recv(1, socket.MSG_PEEK):
                        break
                except BlockingIOError:
                    pass
                finally:
                    connection.settimeout(WAIT_SECONDS)
        answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert sent < MAX_SENT_MEGABYTES
    assert server.read_memory() - before < MAX_GROWTH_BYTES


DEEP = b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"
LARGE_SCHEMA = json.dumps(
    {"prompt": "a", "json_schema": {"enum": ["x" * 100 + str(i) for i in range(50_000)]}}
).encode()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"prompt": "a"',
        b'{"prompt": NaN}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": 3}',
        b'{"prompt": [-1]}',
        b'{"prompt": [1e300]}',
        b'{"prompt": "a", "n_predict": "b"}',
        b'{"prompt": "a", "n_predict": 99999999999999999999}',
        DEEP,
        LARGE_SCHEMA,
    ],
    ids=range(17),
)
def test_malformed_bodies_are_one_line_and_reach_no_engine(server: ServerProcess, body: bytes) -> None:
    answer = httpx.post(f"{server.url}/completion", content=body, timeout=WAIT_SECONDS)
    assert answer.status_code == 400, answer.text
    assert len(answer.json()["error"]["message"].splitlines()) == 1
    assert server.count_busy_slots() == 0


@pytest.mark.long
def test_a_killed_server_ends_its_streams_and_is_started_again(text: str) -> None:
    with run_server() as first:
        port = first.port
        with first.open_stream(n_predict=200) as stream:
            assert stream.recv(65536).startswith(b"HTTP/1.1 200")
            first.process.send_signal(signal.SIGKILL)
            data = b""
            with suppress(ConnectionError):
                while part := stream.recv(65536):
                    data += part
            assert b"0\r\n\r\n" not in data  # the client sees that the stream has no end
    assert first.process.returncode == -signal.SIGKILL
    with run_server(port) as second:
        assert second.port == port
        assert second.post("/completion", COMPLETION).json()["content"] == text


@pytest.mark.long
def test_a_saved_slot_outlives_the_process(tmp_path: Path) -> None:
    """The talk goes on in another process with other devices: the same token, and no token is read again."""
    words = [*SERVER_WORDS, "--slot-save-path", str(tmp_path)]
    body = {**COMPLETION, "return_tokens": True, "id_slot": 1}
    with run_server(words=words) as first:
        answer = first.post("/completion", body).json()
        saved = first.post("/slots/1?action=save", {"filename": "talk"}).json()
        prompt = first.post("/tokenize", {"content": COMPLETION["prompt"], "add_special": True}).json()["tokens"]
        talk = {**COMPLETION, "prompt": [*prompt, *answer["tokens"], 9, 10], "n_predict": 1, "return_tokens": True}
        first.post("/slots/0?action=restore", {"filename": "talk"})
        token = first.post("/completion", talk).json()["tokens"]
        first.process.kill()
    with run_server(words=[*words, "--devices", "cpu:0,cpu:1"]) as second:
        assert second.post("/slots/0?action=restore", {"filename": "talk"}).json()["n_restored"] == saved["n_saved"]
        continued = second.post("/completion", talk).json()
        assert continued["tokens"] == token
        assert continued["timings"]["cache_n"] == saved["n_saved"] == len(prompt) + 39


@pytest.mark.long
def test_a_log_outlives_a_killed_process(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with run_server(words=[*SERVER_WORDS, "--log-requests", str(log)]) as server:
        server.post("/completion", COMPLETION)
        with server.open_stream(n_predict=200) as stream:
            read_until(stream, b"data: ")
            server.process.kill()
    replayed = subprocess.run([*COMMAND, "replay", str(log)], capture_output=True, text=True, check=False)
    assert (replayed.returncode, replayed.stderr) == (0, "")
    assert "2 requests" in replayed.stdout
    assert os.stat(log).st_mode & 0o777 == 0o600


def lose_device(server: ServerProcess) -> bytes:
    """Return the answer of a stream during which the device of a server is lost."""
    data = b""
    with server.open_stream(n_predict=100) as stream, suppress(ConnectionError):
        while part := stream.recv(65536):
            data += part
    return data


@pytest.mark.long
def test_a_lost_device_ends_the_streams_and_a_fresh_process_serves_at_the_same_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only a new process can use such a device. After two more restarts in a row, the exit code is 1."""
    monkeypatch.setenv(RESTARTS_VARIABLE, "1")
    with run_server(command=LOST_DEVICE_COMMAND) as server:
        data = lose_device(server)
        for restarts in (2, 3):
            wait_until(lambda: server.is_healthy())
            assert server.post("/completion", {**COMPLETION, "n_predict": 3}).status_code == 200, restarts
            lose_device(server)
        code = server.process.wait(WAIT_SECONDS)
        assert server.process.stderr is not None
        lines = server.process.stderr.read().splitlines()
    events = [line for line in data.splitlines() if line.startswith((b"data: ", b"error: "))]
    assert len(events) > 3
    assert b"refuses all calls of this process: cudaErrorIllegalAddress" in events[-1]
    assert code == 1
    restarts = [line for line in lines if "starts anew" in line]
    assert restarts == [f"hocket: starts anew, restart {n} of 3 in a row" for n in (2, 3)]
    assert len(lines) == 2 * 3 + 1  # each restart has a reason, its number, and the address
    assert lines[0].startswith(
        "hocket: the engine has failed: DeviceLostError: cpu:0 refuses all calls of this process"
    )


@pytest.mark.long
def test_a_device_that_is_lost_after_a_signal_starts_no_fresh_process() -> None:
    """A supervisor that stops the server waits for the end of this process."""
    with run_server(command=LOST_IN_DRAIN_COMMAND) as server:
        with server.open_stream(n_predict=200) as stream:
            read_until(stream, b"data: ")
            server.process.send_signal(signal.SIGTERM)
            code = server.process.wait(WAIT_SECONDS)
        assert server.process.stderr is not None
        (line,) = server.process.stderr.read().splitlines()
    assert code == 1
    assert line.startswith("hocket: the engine has failed: DeviceLostError: cpu:0 refuses all calls of this process")
