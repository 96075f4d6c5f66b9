"""``hocket serve`` in a process of its own, on the embedded model."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hocket.cli import build_parser_for_command
from hocket.frontends.commands.serve import refuse_generation_flags_for_encoder
from hocket.frontends.errors import ModelError
from hocket.frontends.language_model import Model
from hocket.frontends.serving.prefix_cache import STATE_ALIGNMENT

from ...given.models.goldens import TINY
from ...given.waits import WAIT_SECONDS, wait_until

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("msgspec")

STORY = "Once upon a time"
PROMPTS = (STORY, "It is a truth universally acknowledged, that")


class ServeProcess:
    """A running ``hocket serve``; the constructor waits for the line with its address."""

    def __init__(self, *flags: str) -> None:
        command = [sys.executable, "-m", "hocket", "serve", TINY, "--port", "0", "--devices", "cpu", "-t", "1", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self.line = self.process.stderr.readline()
        self.port = int(self.line.rpartition(":")[2] or 0) if "http" in self.line else 0

    def await_health(self) -> None:
        """Wait until the plans and kernels of the server are ready."""
        until = time.monotonic() + WAIT_SECONDS
        while self.request("GET", "/health")[0] != 200 and time.monotonic() < until:
            time.sleep(0.05)

    def request(self, method: str, path: str, body: object = None, **headers: str) -> tuple[int, str]:
        """Return the status and the text of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_SECONDS)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def complete(self, prompt: str, **fields: object) -> dict[str, Any]:
        """Return the answer of ``/v1/completions`` at temperature 0."""
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, **fields}
        status, text = self.request("POST", "/v1/completions", body)
        assert status == 200, text
        answer: dict[str, Any] = json.loads(text)
        return answer

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(WAIT_SECONDS)


@contextmanager
def run_serve(*flags: str) -> Iterator[ServeProcess]:
    """Return a context with a server that is ended at last."""
    server = ServeProcess(*flags)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.communicate()


@pytest.fixture(scope="module")
def server() -> Iterator[ServeProcess]:
    with run_serve("-np", "2", "-c", "256") as running:
        running.await_health()
        yield running


def run_refused(*flags: str) -> tuple[int, str]:
    """Return the exit code and the only line of a command that fails at once."""
    command = [sys.executable, "-m", "hocket", "serve", *flags]
    run = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False)
    assert run.stdout == ""
    (line,) = run.stderr.splitlines()
    return run.returncode, line


@pytest.mark.long
def test_a_server_names_its_address_and_is_healthy(server: ServeProcess) -> None:
    assert server.line == f"hocket: serves hocket-tiny-q8_0 at http://127.0.0.1:{server.port}\n"
    assert server.request("GET", "/health") == (200, '{"status":"ok"}')


@pytest.mark.long
def test_a_completion_has_the_text_of_hocket_run(server: ServeProcess) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "hocket", "run", TINY, "-p", STORY, "-n", "24", "--temp", "0", "-t", "1"],
        capture_output=True,
        text=True,
        check=True,
    )
    choice = server.complete(STORY)["choices"][0]
    assert run.stdout == f"{STORY}{choice['text']}\n"
    assert choice["finish_reason"] == "length"


@pytest.mark.long
def test_the_pieces_of_a_stream_are_the_text(server: ServeProcess) -> None:
    body = {"prompt": STORY, "max_tokens": 24, "temperature": 0, "stream": True}
    status, text = server.request("POST", "/v1/completions", body)
    events = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert (status, events.pop()) == (200, "[DONE]")
    pieces = [choice["text"] for event in events for choice in json.loads(event)["choices"]]
    assert len(pieces) > 10
    assert "".join(pieces) == server.complete(STORY)["choices"][0]["text"]


def test_two_clients_get_the_texts_that_they_get_alone(server: ServeProcess) -> None:
    fields = {"max_tokens": 60, "temperature": 0.8, "seed": 5}
    alone = [server.complete(prompt, **fields)["choices"][0]["text"] for prompt in PROMPTS]
    texts: dict[str, str] = {}

    def ask(prompt: str) -> None:
        texts[prompt] = server.complete(prompt, **fields)["choices"][0]["text"]

    threads = [threading.Thread(target=ask, args=[prompt]) for prompt in PROMPTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [texts[prompt] for prompt in PROMPTS] == alone


def test_a_prompt_is_read_from_the_cache_with_the_same_text(server: ServeProcess) -> None:
    prompt = "The sea was calm and the morning was bright, and they walked along the shore. " * 3
    first, second = (server.complete(prompt) for _ in range(2))
    count = (first["usage"]["prompt_tokens"] - 1) // STATE_ALIGNMENT * STATE_ALIGNMENT
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == count > 0
    assert first["choices"] == second["choices"]


def test_a_prompt_beyond_the_context_of_a_slot_is_refused(server: ServeProcess) -> None:
    status, text = server.request("POST", "/v1/completions", {"prompt": "word " * 400})
    assert status == 400
    assert json.loads(text)["error"]["n_ctx"] == 256


def test_the_slot_of_a_client_that_has_left_is_free(server: ServeProcess) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_SECONDS)
    body = {"prompt": STORY, "n_predict": 200, "ignore_eos": True, "stream": True}
    connection.request("POST", "/completion", json.dumps(body))
    connection.getresponse().readline()
    connection.close()
    wait_until(lambda: '"is_processing":true' not in server.request("GET", "/slots")[1])


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_server_with_exit_code_0(number: int) -> None:
    with run_serve() as server:
        assert server.end(number) == 0


@pytest.mark.long
def test_keys_of_a_file_are_needed(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first\n\n  second \n", "utf-8")
    with run_serve("--api-key-file", str(keys), "--host", "0.0.0.0", "--alias", "austen") as server:
        assert server.request("GET", "/v1/models")[0] == 401
        assert server.request("GET", "/health")[0] in (200, 503)  # without a key
        status, text = server.request("GET", "/v1/models", None, Authorization="Bearer second")
        assert (status, json.loads(text)["data"][0]["id"]) == (200, "austen")


def test_a_port_in_use_is_found_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        reason = "Address already in use; choose another --host or --port"
        assert run_refused("no-such.gguf", "--port", str(port)) == (2, f"hocket: 127.0.0.1:{port}: {reason}")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--slots", "4"], "hocket serve: there is no flag '--slots'"),
        (["-np", "0"], "argument -np/--parallel: got '0'; need an integer of at least 1"),
        (["--max-gap", "-1"], "argument --max-gap: got '-1'; need a finite number of at least 0"),
        (["--drain", "nan"], "argument --drain: got 'nan'; need a finite number of at least 0"),
        (["--port", "65536"], "hocket: --port is 65536; need at most 65535"),
        (["--host", "0.0.0.0"], "--host '0.0.0.0' is reachable from other machines; give an API key"),
        (["--api-key-file", os.devnull], "has no API key; write one in a line"),
        (["--alias", ""], "hocket: --alias is empty; give a name"),
        (["--cors-origin", ""], "hocket: --cors-origin is empty; give an origin, as https://page.example"),
        (["--ssl-cert-file", "a"], "hocket: HTTPS needs both --ssl-cert-file and --ssl-key-file"),
        (["--ssl-cert-file", "a", "--ssl-key-file", "b"], "HTTPS cannot use a with b: No such file or directory"),
        (["--chat-template", "BAD"], "hocket: --chat-template: line 1: Expected an expression"),
        (["-c", "100000"], "hocket: --ctx-size is 100000, but the model was trained for 512; choose less"),
    ],
    ids=lambda value: "-".join(value).strip("-") if isinstance(value, list) else "",
)
def test_wrong_flags_end_with_2_and_one_line(
    flags: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hocket.cli import main

    (tmp_path / "BAD").write_text("{% if %}", "utf-8")
    monkeypatch.chdir(tmp_path)
    try:
        code = main(["serve", TINY, *(flags if "--port" in flags else ["--port", "0", *flags])])
    except SystemExit as end:
        code = end.code
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    (line,) = captured.err.splitlines()
    assert message in line


def test_wrong_flags_of_a_process_end_with_2_and_one_line() -> None:
    code, line = run_refused(TINY, "--prot", "80")
    assert (code, line.partition(";")[0]) == (2, "hocket serve: there is no flag '--prot'")


@pytest.mark.long
def test_a_dry_run_prints_memory_and_speed_and_loads_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hocket.cli import main

    monkeypatch.setattr(Model, "__init__", None)
    assert main(["serve", TINY, "--dry-run", "-np", "3", "-c", "256"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("3 slots of 256 tokens; fits: ")
    assert "tokens a second; first token of a prompt of 256 after" in out
    assert main(["serve", TINY, "--dry-run", "-np", "100000"]) == 1
    assert "hocket: does not fit with 100000 slots: cpu:0: needs" in capsys.readouterr().err


def test_a_missing_extra_is_named() -> None:
    code = "import sys; sys.modules['starlette'] = None; from hocket.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "serve", TINY, "--port", "0"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False)
    assert (run.returncode, run.stderr.count("\n")) == (2, 1)
    assert """run python -m pip install -e ".[server]" in a clone""" in run.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pool-tokens", "4096"], "--pool-tokens is for models that generate text; an encoder has no KV caches"),
        (
            ["--log-requests", "x.log"],
            "--log-requests is for models that generate text; an encoder has no steps",
        ),
    ],
)
def test_flags_of_generation_are_refused_for_an_encoder(flags, message):
    words = ["serve", "model.gguf", *flags]
    args = build_parser_for_command(words).parse_args(words)
    with pytest.raises(ModelError, match=message):
        refuse_generation_flags_for_encoder(args)
