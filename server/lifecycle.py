"""The life of the server under uvicorn, from the bound socket to the graceful shutdown.

The first SIGTERM or SIGINT begins the drain:

1. ``/health`` and new requests get status 503. Requests without a slot end with 503.
2. Running requests continue for `ServerOptions.drain_seconds`, then they end with an error event.
3. The listening socket is closed, and then the service.

A second signal goes to step 3 at once. A signal that comes twice within half a second counts once: ``mpiexec`` sends it
to a rank and to its supervisor, which passes it on.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..frontends.serving.service import ModelService
from .app import create_app
from .options import ServerOptions
from .state import ServingState

END_SECONDS = 1.0
"""Seconds for sending error events after the drain."""
SIGNAL_PAUSE_SECONDS = 0.5
"""Seconds after a signal in which the same signal is not counted again."""
RESTARTS_VARIABLE = "HOCKET_RESTARTS"
"""The environment variable with the number of restarts in a row."""
MAX_PROCESS_RESTARTS, STABLE_SECONDS = 3, 600.0
"""Restarts in a row of the process; a process that has served for ten minutes begins a new row."""
MAX_PORT_TRIES = 16
"""Tries to find a port that is free at all addresses."""
BACKLOG = 2048
"""Maximum connections that wait to be accepted."""
HEADER_ERROR_BODY = (
    b'{"error":{"message":"the head of the request is too long","type":"invalid_request_error","code":431}}'
)
HEADER_ERROR = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Type: application/json\r\nConnection: close\r\n"
    + f"Content-Length: {len(HEADER_ERROR_BODY)}\r\n\r\n".encode()
    + HEADER_ERROR_BODY
)


def run_server(
    service: ModelService,
    options: ServerOptions,
    announce: Callable[[str], None] | None = None,
    *,
    listeners: Sequence[socket.socket] | None = None,
    on_drain: Callable[[], object] = lambda: None,
) -> int:
    """Serve a model until a signal, close the service, and return the exit code.

    Call it in the main thread, which handles the signals.

    Args:
        service: The model with its engine.
        options: The address, access, limits and defaults.
        announce: Receives each URL when connections are accepted.
        listeners: Sockets of `bind_sockets`, which this function closes; None binds them here.
        on_drain: Called when the drain begins.

    Raises:
        OSError: The address cannot be used.
    """
    app = create_app(service, options)
    state: ServingState = app.state.serving
    try:
        with ExitStack() as stack:
            sockets = list(bind_sockets(options) if listeners is None else listeners)
            for each in sockets:
                stack.enter_context(closing(each))
            DrainingServer(app, options, announce, on_drain).run(sockets=sockets)
    finally:
        state.builder.close()
        service.close(0.0)
    return 0


def bind_sockets(options: ServerOptions) -> list[socket.socket]:
    """Return a listening socket for each address of the options. All of them have the same port.

    Port 0 is a port that is free at all addresses.

    Raises:
        OSError: An address is in use, or does not belong to this machine; `filename` is the address.
    """
    for tries_left in reversed(range(MAX_PORT_TRIES)):
        with ExitStack() as after_error:
            listeners: list[socket.socket] = []
            port = options.port
            try:
                for host in options.hosts:
                    family = socket.AF_INET6 if ":" in host else socket.AF_INET
                    listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
                    listeners.append(after_error.enter_context(listener))
                    # Connections inherit it. asyncio sets it only for sockets that name the protocol TCP.
                    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    port = listener.getsockname()[1]
            except OSError as error:
                if tries_left and listeners and not options.port and error.errno == errno.EADDRINUSE:
                    continue
                reason = (error.strerror or "is no address").partition(" (while ")[0]
                raise OSError(error.errno, reason, f"{host}:{port}") from None
            after_error.pop_all()
            return listeners
    raise AssertionError("the last try returns or raises")


class DrainingServer(uvicorn.Server):
    """A uvicorn server that drains before it closes: running requests may end, new ones are refused.

    Args:
        app: The application, from `create_app`.
        options: The options of the application.
        announce: Receives each URL when connections are accepted.
        on_drain: Called when the drain begins.
    """

    def __init__(
        self,
        app: Starlette,
        options: ServerOptions,
        announce: Callable[[str], None] | None = None,
        on_drain: Callable[[], object] = lambda: None,
    ) -> None:
        class Protocol(LimitedHeadProtocol):
            header_seconds, max_header_bytes = options.header_seconds, options.max_header_bytes

        super().__init__(
            uvicorn.Config(
                app,
                http=Protocol,
                ws="none",
                lifespan="off",
                log_level="warning",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                headers=[("Server", "hocket")],
                limit_concurrency=options.max_connections,
                timeout_keep_alive=round(options.keep_alive_seconds),
                timeout_graceful_shutdown=round(END_SECONDS),
                ssl_certfile=options.tls_certificate,
                ssl_keyfile=options.tls_key,
            )
        )
        self._state: ServingState = app.state.serving
        self._options, self._announce, self._on_drain = options, announce, on_drain
        self._signal_count, self._last_signal = 0, (0, -math.inf)
        self._drain_end = self._final_end = 0.0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Count a signal that asks the server to exit; `on_tick` acts on it in the event loop within 0.1 s."""
        (last, moment), now = self._last_signal, time.monotonic()
        self._signal_count += sig != last or now - moment > SIGNAL_PAUSE_SECONDS
        self._last_signal = sig, now

    def request_exit(self) -> None:
        """Request the shutdown as a signal does; any thread may call it."""
        self.handle_exit(signal.SIGTERM, None)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections, and announce each URL."""
        await super().startup(sockets)
        if not self.started or self._announce is None:
            return
        for listener in sockets or ():
            host, port = listener.getsockname()[:2]
            scheme = "https" if self._options.tls_certificate else "http"
            self._announce(f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}")

    async def on_tick(self, counter: int) -> bool:
        """Continue the drain at a timer tick of uvicorn, and return whether the server should exit."""
        is_over = await super().on_tick(counter)
        now = asyncio.get_running_loop().time()
        if self._signal_count >= 2:
            self._state.is_draining = True
            self._state.end_all_for_shutdown()
            self.force_exit = True
            return True
        if self._signal_count and not self._state.is_draining:
            self._on_drain()
            self._state.begin_drain_and_end_queued()
            self._drain_end = now + self._options.drain_seconds
        if not self._state.is_draining:
            return is_over
        if self._state.is_idle:
            return True
        if now >= self._drain_end and not self._final_end:
            self._state.end_all_for_shutdown()
            self._final_end = now + END_SECONDS
        return bool(self._final_end) and now >= self._final_end


class LimitedHeadProtocol(HttpToolsProtocol):
    """HTTP/1.1 with limits on the bytes of a request head, and on the seconds until the head is complete."""

    header_seconds = 10.0
    max_header_bytes = 16 << 10

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_bytes, self._is_head_too_long = 0, False
        self._head_timer: asyncio.TimerHandle | None = None
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer and forget the requests of a closed connection, because they refer to this protocol."""
        self._stop_timer()
        super().connection_lost(exc)
        self.cycle = None  # type: ignore[assignment]  # its initial value in uvicorn
        self.pipeline.clear()

    def on_message_begin(self) -> None:
        """Start the byte count and the timer of a request head."""
        super().on_message_begin()
        self._head_bytes = 0
        self._start_timer()

    def on_url(self, url: bytes) -> None:
        """Add the bytes of the URL to the byte count."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add the bytes of a header to the byte count."""
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Stop the timer of a request head."""
        self._stop_timer()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer a malformed request with status 400, or a too long head with status 431."""
        if not self._is_head_too_long:
            return super().send_400_response(msg)
        self.transport.write(HEADER_ERROR)
        self.transport.close()

    def _count(self, count: int) -> None:
        self._head_bytes += count
        if self._head_bytes > self.max_header_bytes:
            self._is_head_too_long = True
            raise ValueError("the head is too long")  # the parser reports it to `send_400_response`

    def _start_timer(self) -> None:
        self._stop_timer()
        self._head_timer = self.loop.call_later(self.header_seconds, self._close_slow)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _close_slow(self) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.close()


def restart_in_fresh_process(port: int, served_seconds: float, announce: Callable[[str], object]) -> None:
    """Replace this process by a new one with the same command, which can use a device that this one has lost.

    Return without a new process after `MAX_PROCESS_RESTARTS` processes in a row that have ended early, or if the
    program cannot be started again.

    Args:
        port: The port of the server, which the new process uses too.
        served_seconds: Seconds for which this process has served, without the load of the model.
        announce: Writes a line about the restart.
    """
    known = os.environ.get(RESTARTS_VARIABLE, "")
    count = 1 + (int(known) if known.isdecimal() and served_seconds < STABLE_SECONDS else 0)
    if count > MAX_PROCESS_RESTARTS:
        return
    os.environ[RESTARTS_VARIABLE] = str(count)
    announce(f"restart {count} of {MAX_PROCESS_RESTARTS} in a row")
    words = sys.orig_argv[1:]
    end_of_flags = words.index("--") if "--" in words else len(words)
    words[end_of_flags:end_of_flags] = ["--port", str(port)]
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execv(sys.executable, [sys.executable, *words])
    except OSError as error:
        announce(f"not possible: {sys.executable}: {error.strerror}")
