"""Access and limits: keys, hosts, origins, sizes, and the shapes of errors."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator

import httpx
import msgspec
import pytest

from hocket.frontends.errors import ModelError
from hocket.server.bodies.schemas import ChatBody, EmbeddingBody, NativeCompletionBody, TextCompletionBody, TokenizeBody
from hocket.server.endpoints.anthropic import MessagesBody
from hocket.server.errors import ApiError, as_api_error
from hocket.server.options import ServerOptions

from ..given.fakes.fake_service import FakeService, RunningServer, serve
from ..given.waits import WAIT_SECONDS

KEY, OTHER_KEY = "sk-first", "sk-zweiter-schlüssel"
PROMPT_BODY = {"prompt": "hi"}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serve(FakeService(), max_body_bytes=20_000, max_header_bytes=4096) as running:
        yield running


@pytest.fixture(scope="module")
def guarded_server() -> Iterator[RunningServer]:
    with serve(FakeService(), api_keys=(KEY, OTHER_KEY), cors_origins=("https://page.example", "localhost")) as running:
        yield running


def send_raw(server: RunningServer, data: bytes) -> bytes:
    """Return the answer of the server to bytes, until it closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_SECONDS) as connection:
        connection.sendall(data)
        answer = b""
        while part := connection.recv(65536):
            answer += part
        return answer


# ---------------------------------------------------------------------------------------------------------------- keys


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {KEY}"}, {"x-api-key": ""}, {"x-api-key": "é"}],
)
def test_a_wrong_key_is_refused(guarded_server: RunningServer, headers: dict[str, str]) -> None:
    encoded = {name: value.encode("latin-1") for name, value in headers.items()}
    for response in (
        guarded_server.post("/completion", PROMPT_BODY, headers=encoded),
        guarded_server.get("/metrics", headers=encoded),
    ):
        assert response.status_code == 401
        assert response.json()["error"]["type"] == "authentication_error"
        assert response.headers["www-authenticate"] == "Bearer"
    assert not guarded_server.service.requests


def test_every_key_is_accepted_in_both_headers(guarded_server: RunningServer) -> None:
    for key in (KEY, OTHER_KEY):
        for headers in ({"Authorization": b"Bearer " + key.encode()}, {"X-Api-Key": key.encode()}):
            assert guarded_server.get("/v1/models", headers=headers).status_code == 200
    assert guarded_server.get("/v1/models", headers={"Host": "any.example", "X-Api-Key": KEY}).status_code == 200
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{guarded_server.url}/v1", api_key=KEY) as client:
        assert client.models.list().data
    with (
        openai.OpenAI(base_url=f"{guarded_server.url}/v1", api_key="no") as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


@pytest.mark.parametrize("path", ["/health", "/v1/health", "/"])
def test_some_paths_are_public(guarded_server: RunningServer, path: str) -> None:
    assert guarded_server.get(path).status_code == 200


def test_an_open_address_needs_a_key() -> None:
    with pytest.raises(ModelError, match="reachable from other machines"):
        ServerOptions(host="0.0.0.0")
    with pytest.raises(ModelError, match="empty"):
        ServerOptions(api_keys=("",))
    for host in ("127.0.0.1", "127.1.2.3", "localhost", "::1", "[::1]"):
        assert ServerOptions(host=host).is_loopback_only
    assert ServerOptions(host="0.0.0.0", insecure=True).host
    assert ServerOptions(host="::", api_keys=(KEY,)).api_keys


# ---------------------------------------------------------------------------------------------------- hosts and origins


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:9", "[::1]:80", "LOCALHOST:1"])
def test_names_of_this_machine_are_served(server: RunningServer, host: str) -> None:
    assert server.get("/health", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "10.0.0.1", "[", ""])
def test_other_hosts_are_refused_without_a_key(server: RunningServer, host: str) -> None:
    response = server.get("/health", headers={"Host": host})
    assert (response.status_code, response.json()["error"]["type"]) == (403, "permission_error")


def test_pages_of_other_origins_are_refused(server: RunningServer) -> None:
    for headers in ({"Origin": "https://evil.example"}, {"Origin": "null"}):
        response = server.post("/completion", PROMPT_BODY, headers=headers)
        assert response.status_code == 403
        assert "access-control-allow-origin" not in response.headers
    same = {"Origin": server.url}
    assert server.post("/tokenize", {"content": "a"}, headers=same).status_code == 200


@pytest.mark.parametrize(
    "origin", ["https://page.example", "http://localhost:3000", "http://127.0.0.1", "http://[::1]:3"]
)
def test_permitted_origins_get_the_headers(guarded_server: RunningServer, origin: str) -> None:
    asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    preflight = httpx.options(f"{guarded_server.url}/v1/chat/completions", headers=asked)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == origin
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert "Authorization" in preflight.headers["access-control-allow-headers"]
    response = guarded_server.get("/v1/models", headers={"Origin": origin, "x-api-key": KEY})
    assert (response.headers["access-control-allow-origin"], response.headers["vary"]) == (origin, "Origin")
    refused = guarded_server.get("/v1/models", headers={"Origin": origin})
    assert refused.status_code == 401


@pytest.mark.parametrize("origin", ["http://page.example", "http://localhost.evil.example", "https://notlocalhost"])
def test_preflights_of_other_origins_get_no_permission(guarded_server: RunningServer, origin: str) -> None:
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    response = httpx.options(f"{guarded_server.url}/completion", headers=headers)
    assert response.status_code == 200
    assert "access-control-allow-origin" not in response.headers


# --------------------------------------------------------------------------------------------------------------- limits


def test_a_body_that_is_declared_too_long_is_refused_before_it_is_read(server: RunningServer) -> None:
    head = b"POST /completion HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 30000\r\n\r\n"
    assert b" 413 " in send_raw(server, head).partition(b"\r\n")[0]
    response = httpx.post(f"{server.url}/completion", content=b"x" * 30_000)
    assert (response.status_code, response.json()["error"]["type"]) == (413, "request_too_large")


def test_a_body_without_length_is_counted(server: RunningServer) -> None:
    response = httpx.post(f"{server.url}/completion", content=iter([b"x" * 9000] * 4))
    assert response.status_code == 413
    fitting = httpx.post(f"{server.url}/tokenize", content=iter([b'{"content":', b'"hi"}']))
    assert len(fitting.json()["tokens"]) == 2


def test_a_head_that_is_too_long_is_refused(server: RunningServer) -> None:
    assert server.get("/health", headers={"X-Long": "x" * 3000}).status_code == 200
    long = b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X-A: " + b"x" * 5000 + b"\r\n\r\n"
    answer = send_raw(server, long)
    assert b" 431 " in answer.partition(b"\r\n")[0]
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == 431


def test_what_is_no_http_is_refused(server: RunningServer) -> None:
    assert b" 400 " in send_raw(server, b"\x16\x03\x01\x02\x00nonsense\r\n\r\n").partition(b"\r\n")[0]


def test_slow_heads_and_bodies_end() -> None:
    with serve(FakeService(), header_seconds=0.2, body_seconds=0.2) as server:
        assert send_raw(server, b"") == b""
        assert send_raw(server, b"GET / HTTP/1.1\r\n") == b""
        head = b"POST /completion HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 9\r\n\r\n{"
        assert b" 408 " in send_raw(server, head).partition(b"\r\n")[0]


def test_a_text_that_cannot_fit_is_not_tokenized(server: RunningServer) -> None:
    server.service.context = 16
    try:
        for path, body in (
            ("/completion", {"prompt": "x" * 15_000}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 300}], "stream": True}),
        ):
            error = server.post(path, body).json()["error"]
            assert (error["type"], error["n_ctx"]) == ("exceed_context_size_error", 16)
            assert error["n_prompt_tokens"] > 16
    finally:
        server.service.context = 2048


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/no/such/path", b"", 404),
        ("GET", "/v1/chat/completions", b"", 405),
        ("POST", "/health", b"", 405),
        ("POST", "/completion", b"not json", 400),
        ("POST", "/completion", b'{"prompt": NaN}', 400),
        ("POST", "/completion", b'{"prompt":' + b"[" * 9_000, 400),
        ("POST", "/completion", b'{"prompt":' + b"[" * 9_000 + b"]" * 9_000 + b"}", 400),
        ("POST", "/completion", b'{"prompt": "\\ud800"}', 400),
        ("POST", "/completion", b'{"prompt": "a", "temperature": 1e999}', 400),
        ("POST", "/completion", b'{"prompt": "a", "mirostat": 1}', 400),
        ("POST", "/completion", b"{}", 400),
        ("POST", "/v1/audio/speech", b"{}", 404),
    ],
)
def test_errors_have_one_shape(server: RunningServer, method: str, path: str, body: bytes, status: int) -> None:
    response = httpx.request(method, server.url + path, content=body)
    assert response.status_code == status
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert "\n" not in error["message"]
    assert response.headers["server"] == "hocket"


ODD_VALUES: tuple[object, ...] = (
    0,
    -1,
    2,
    1.5,
    1e300,
    10**25,
    "",
    "a",
    "\0",
    "é😀",
    [],
    [1],
    ["a"],
    [[1]],
    [{}],
    {},
    True,
)
ODD_VALUES += (
    {"a": 1},
    {"1": False, "zz": -3},
    {"bos": 1},
    {"messages": 1},
    {"type": []},
    {"type": "tool"},
    "required",
)
ODD_VALUES += ({"type": "json_schema", "json_schema": {"schema": {"$ref": "#/x"}}}, [{"type": "function"}], [None])
ODD_VALUES += ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[[["}}]}],)
ODD_BODIES = {
    "/v1/chat/completions": (ChatBody, {"messages": [{"role": "user", "content": "hi"}]}),
    "/v1/messages": (MessagesBody, {"messages": [{"role": "user", "content": "hi"}]}),
    "/v1/completions": (TextCompletionBody, {"prompt": "hi"}),
    "/completion": (NativeCompletionBody, {"prompt": "hi"}),
    "/v1/embeddings": (EmbeddingBody, {"input": "hi"}),
    "/tokenize": (TokenizeBody, {}),
}


@pytest.mark.parametrize("path", ODD_BODIES)
def test_no_value_of_a_field_makes_the_server_fail(server: RunningServer, path: str) -> None:
    kind, body = ODD_BODIES[path]
    names = [field.encode_name for field in msgspec.structs.fields(kind)]
    limit = {"max_tokens": 2} if "max_tokens" in names else {}
    rng = random.Random(path)
    with httpx.Client(base_url=server.url, timeout=WAIT_SECONDS) as client:
        for _ in range(60):
            odd = {name: rng.choice(ODD_VALUES) for name in rng.sample(names, rng.choice((1, 1, 2)))}
            response = client.post(path, json={**body, **limit, **odd})
            assert response.status_code in (200, 400, 429), (odd, response.text)


def test_an_unexpected_exception_has_an_id_alone(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    def fail(prompt: str) -> str:
        raise ZeroDivisionError("a secret")

    server.service.answer = fail
    try:
        response = server.post("/completion", PROMPT_BODY)
    finally:
        server.service.answer = "the answer"
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (500, "server_error")
    assert "secret" not in response.text
    assert error["id"] in error["message"]
    assert error["id"] in caplog.text
    assert "a secret" in caplog.text


def test_known_errors_keep_their_messages() -> None:
    assert as_api_error(ModelError("wrong")).status == 400
    assert as_api_error(RecursionError()).status == 400
    assert ApiError(503, "x", retry_seconds=0.2).headers == {"Retry-After": "1"}
    assert ApiError(429, "x").as_anthropic_body()["error"] == {"type": "rate_limit_error", "message": "x"}


def test_names_of_headers_have_capitals(server: RunningServer) -> None:
    answer = send_raw(server, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert b"\r\nProcess-Start-Time-Unix: " in answer
    assert b"\r\ncontent-length: " in answer
