"""A process of ``hocket serve`` with the embedded model, and its clients."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from ..waits import WAIT_SECONDS, wait_until

ROOT = Path(sys.modules["hocket"].__file__ or "").parent
MODEL = ROOT / "data" / "hocket-tiny-q8_0.gguf"
PROCESS_SCRIPT = (
    "import sys; sys.path.insert(0, sys.argv[1]); from hocket.cli import main; sys.exit(main(sys.argv[2:]))"
)
COMMAND = (sys.executable, "-c", PROCESS_SCRIPT, str(ROOT.parent))
FREE_DRAFTS_SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from hocket.cli import main
from hocket.frontends.serving.drafting.drafting_pool import DraftingSlotPool

DraftingSlotPool.predict_break_even_acceptance = lambda *_: 0.0
sys.exit(main(sys.argv[2:]))
"""
"""The same, in which drafts are tried although plans predict that they are not worth their time."""
FREE_DRAFTS_COMMAND = (sys.executable, "-c", FREE_DRAFTS_SCRIPT, str(ROOT.parent))
LOST_DEVICE_SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from hocket.cli import main
from hocket.tests.given.serving.lost_devices import lose_devices_after_tokens

lose_devices_after_tokens(4)
sys.exit(main(sys.argv[2:]))
"""
"""The same, with a device that is lost while a request generates."""
LOST_DEVICE_COMMAND = (sys.executable, "-c", LOST_DEVICE_SCRIPT, str(ROOT.parent))
LOST_IN_DRAIN_SCRIPT = """
import sys, time
sys.path.insert(0, sys.argv[1])
from hocket.cli import main
from hocket.server.state import ServingState
from hocket.tests.given.serving.lost_devices import lose_devices_after_tokens
from hocket.scheduler import Executor

is_lost, run, begin = lose_devices_after_tokens(1 << 30), Executor.run, ServingState.begin_drain_and_end_queued
Executor.run = lambda *args, **options: time.sleep(0.02) or run(*args, **options)
ServingState.begin_drain_and_end_queued = lambda state: begin(state) or is_lost.set()
sys.exit(main(sys.argv[2:]))
"""
"""The same, with slow steps and a device that is lost when the drain begins."""
LOST_IN_DRAIN_COMMAND = (sys.executable, "-c", LOST_IN_DRAIN_SCRIPT, str(ROOT.parent))
COMPLETION = {"prompt": "It is a truth universally acknowledged", "temperature": 0, "ignore_eos": True, "n_predict": 40}


SERVER_WORDS = ("-np", "2", "-c", "256", "-b", "32")
"""Flags with few sizes of steps, because a server prepares all of them before it answers."""


class ServerProcess:
    """A process of ``hocket serve`` at a port; the words `launcher` come before its command."""

    def __init__(
        self,
        port: int,
        words: Sequence[str],
        launcher: Sequence[str] = (),
        command: Sequence[str] = COMMAND,
        model: Path = MODEL,
    ) -> None:
        command = [*launcher, *command, "serve", str(model), "--port", str(port), *words]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        while line and "serves" not in line:
            line = self.process.stderr.readline()
        assert line, "the server has ended"
        self.url = line.split()[-1]
        self.port = int(self.url.rpartition(":")[2])
        wait_until(lambda: httpx.get(f"{self.url}/health").status_code == 200)

    def is_healthy(self) -> bool:
        """Whether the server answers; it may be starting."""
        try:
            return httpx.get(f"{self.url}/health").status_code == 200
        except httpx.TransportError:
            return False

    def post(self, path: str, body: object, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=WAIT_SECONDS, **options)

    def count_busy_slots(self) -> int:
        return sum(slot["is_processing"] for slot in httpx.get(f"{self.url}/slots").json())

    def read_memory(self) -> int:
        """Return the bytes of memory of the process that belong to no file, swapped ones included."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "VmSwap"))) << 10

    def open_stream(self, **body: object) -> socket.socket:
        data = json.dumps({**COMPLETION, "stream": True, **body}).encode()
        head = f"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_SECONDS)
        connection.sendall(head.encode() + data)
        return connection


@contextmanager
def run_server(
    port: int = 0,
    words: Sequence[str] = SERVER_WORDS,
    launcher: Sequence[str] = (),
    command: Sequence[str] = COMMAND,
    model: Path = MODEL,
) -> Iterator[ServerProcess]:
    server = ServerProcess(port, words, launcher, command, model)
    try:
        yield server
    finally:
        with suppress(ProcessLookupError):
            server.process.kill()
        server.process.communicate()
