"""Requests over plain sockets, which a test can leave open or close at any moment."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from .fakes.fake_service import RunningServer
from .waits import WAIT_SECONDS

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@contextmanager
def open_request(server: RunningServer, path: str = "/completion", **body: object) -> Iterator[socket.socket]:
    """Return a connection that has sent a request; it closes with the context."""
    data = json.dumps({"prompt": "hi", **body} if path == "/completion" else {**CHAT, **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_SECONDS) as connection:
        connection.sendall(head.encode() + data)
        yield connection


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    """Return the bytes until a mark, or until the connection ends."""
    data = b""
    while mark not in data and (part := connection.recv(65536)):
        data += part
    return data
