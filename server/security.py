"""ASGI middleware for access and limits: errors, origins, hosts, API keys, and the size and duration of bodies.

No layer buffers a response, so streams pass through unchanged.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import LOGGER, ApiError, as_api_error
from .metrics import ServerMetrics
from .options import LOOPBACK_NAMES, ServerOptions
from .responses import JsonResponse

PUBLIC_PATHS = frozenset(("/", "/health", "/v1/health"))
"""Paths that need no API key."""
ANTHROPIC_PREFIX = "/v1/messages"
LOCAL_ORIGINS = "localhost"
"""Entry of `ServerOptions.cors_origins` that permits every origin of this machine."""
ORIGIN_HEADERS = {b"vary": b"Origin", b"access-control-expose-headers": b"*"}
FRAMING_HEADERS = (b"content-length", b"transfer-encoding", b"connection")
PREFLIGHT_HEADERS = {
    b"access-control-allow-methods": b"GET, POST, DELETE, OPTIONS",
    b"access-control-allow-headers": b"*, Authorization",
    b"access-control-max-age": b"600",
}
"""Headers of the response to a preflight request."""


class HeaderName(bytes):
    """A header name with capitals, such as ``Retry-After``, which some clients of llama-server expect.

    uvicorn calls `lower` on names, so this class keeps the capitals there. uvicorn compares the names in
    `FRAMING_HEADERS`, so those stay lower-case.
    """

    @classmethod
    def with_capitals(cls, name: bytes) -> bytes:
        """Return a header name with capitals, such as ``Retry-After``."""
        return name if name.lower() in FRAMING_HEADERS else cls(name.title())

    def lower(self) -> HeaderName:
        """Return the header name unchanged, so that uvicorn keeps the capitals."""
        return self


class ErrorResponseMiddleware:
    """Middleware that converts every exception to an error response.

    It also counts responses.

    Args:
        app: The next layer.
        metrics: Counts responses by path and status.
        paths: The paths that are counted one by one; all unknown paths are counted together.
    """

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, paths: Iterable[str]) -> None:
        self._app, self._metrics, self._paths = app, metrics, frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        path, has_started = scope["path"], False

        async def send_counted(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                known = path if path in self._paths else "other"
                self._metrics.responses.labels(known, str(message["status"])).inc()
                message = {
                    **message,
                    "headers": [(HeaderName.with_capitals(name), value) for name, value in message["headers"]],
                }
            await send(message)

        try:
            await self._app(scope, receive, send_counted)
        except Exception as error:  # every error becomes a response in the form of the API
            if has_started:
                LOGGER.exception("%s: the response has failed", path)
                raise
            response = _make_error_response(error, path)
            await response(scope, receive, send_counted)


def _make_error_response(error: Exception, path: str) -> JsonResponse:
    """Return the error response for an exception, in the format of the API of `path`.

    `ErrorResponseMiddleware.__call__` must keep no variable with the error: the error refers to the frame of this call,
    so the variable would form a cycle.
    """
    answer = as_api_error(error)
    content = answer.as_anthropic_body() if path.startswith(ANTHROPIC_PREFIX) else answer.as_openai_body()
    return JsonResponse(content, answer.status, answer.headers)


class CorsOriginMiddleware:
    """CORS middleware: permits requests of web pages from the configured origins, and refuses other origins."""

    def __init__(self, app: ASGIApp, origins: tuple[str, ...]) -> None:
        self._app, self._origins = app, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        origin = Headers(scope=scope).get("origin") if scope["type"] == "http" else None
        if origin is None or _is_same_origin(origin, Headers(scope=scope).get("host", "")):
            return await self._app(scope, receive, send)
        is_preflight = scope["method"] == "OPTIONS" and "access-control-request-method" in Headers(scope=scope)
        if not self._permits(origin):
            if is_preflight:  # without the headers below, the browser sends no request
                return await JsonResponse({})(scope, receive, send)
            raise ApiError(403, f"the origin {origin!a:.80} is not permitted; start the server with --cors-origin")
        headers = {**ORIGIN_HEADERS, b"access-control-allow-origin": origin.encode("latin-1")}

        async def send_permitted(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = headers | (PREFLIGHT_HEADERS if is_preflight else {})
                message = {**message, "headers": [*message["headers"], *added.items()]}
            await send(message)

        if is_preflight:
            return await JsonResponse({})(scope, receive, send_permitted)
        return await self._app(scope, receive, send_permitted)

    def _permits(self, origin: str) -> bool:
        is_local = _parse_host_name(origin.partition("://")[2]) in LOOPBACK_NAMES
        return "*" in self._origins or origin in self._origins or (is_local and LOCAL_ORIGINS in self._origins)


def _is_same_origin(origin: str, host: str) -> bool:
    return bool(host) and origin.partition("://")[2] == host


class ApiKeyOrHostMiddleware:
    """Middleware that refuses requests without a valid API key.

    If no keys are configured on a loopback address, it requires a Host header that names this machine. This prevents
    DNS rebinding.
    """

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app, self._keys = app, tuple(key.encode() for key in options.api_keys)
        self._checks_host = options.is_loopback_only and not options.api_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            if self._checks_host and _parse_host_name(headers.get("host", "")) not in LOOPBACK_NAMES:
                raise ApiError(403, f"the host {headers.get('host', '')!a:.80} is not this machine; use localhost")
            if self._keys and scope["path"] not in PUBLIC_PATHS and not self._has_valid_api_key(headers):
                raise ApiError(401, "the API key is missing or wrong; send Authorization: Bearer KEY")
        await self._app(scope, receive, send)

    def _has_valid_api_key(self, headers: Headers) -> bool:
        """Whether the headers contain a valid API key; all keys are compared, so that the time reveals nothing."""
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        offered = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        found = [hmac.compare_digest(key, offered.encode("latin-1", "replace")) for key in self._keys]
        return any(found)


def _parse_host_name(host: str) -> str:
    """Return the host name of a Host header without its port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


class BodyLimitMiddleware:
    """Middleware that limits the bytes of a request body, and the seconds for reading it.

    It checks the declared length, and the bytes that arrive.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, max_seconds: float) -> None:
        self._app, self._max_bytes, self._max_seconds = app, max_bytes, max_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        declared = Headers(scope=scope).get("content-length", "0")
        if not (declared.isascii() and declared.isdigit()):
            raise ApiError(400, "the Content-Length is no number")
        if int(declared[:20]) > self._max_bytes:
            raise self._make_error()
        read_bytes, is_complete = 0, False
        deadline = asyncio.get_running_loop().time() + self._max_seconds

        async def receive_limited() -> Message:
            nonlocal read_bytes, is_complete
            if is_complete:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise ApiError(408, f"the body did not arrive within {self._max_seconds:.0f} s") from None
            read_bytes += len(message.get("body", b""))
            is_complete = not message.get("more_body", False)
            if read_bytes > self._max_bytes:
                raise self._make_error()
            return message

        return await self._app(scope, receive_limited, send)

    def _make_error(self) -> ApiError:
        return ApiError(413, f"the body has more than {self._max_bytes} bytes")
