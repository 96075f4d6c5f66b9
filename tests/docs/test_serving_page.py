"""The page about serving and its examples, against a server with the embedded model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from hocket.cli import main

from ..given.models.goldens import ROOT, TINY
from ..given.pages import as_it_prints, without_numbers
from ..given.waits import WAIT_SECONDS, wait_until

for package in ("starlette", "uvicorn", "msgspec", "llguidance", "openai"):
    pytest.importorskip(package)

PAGE = (ROOT / "docs" / "serving.md").read_text("utf-8")
EXAMPLES = ROOT / "examples" / "serving"
ADDRESS = "http://localhost:8080"
"""The address on the page; a test replaces it by its own."""
FENCE = re.compile(r"^( *)```(\w+)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
PATH_NAMES = re.compile(r"\{([\w:]+)\}")
BLOCKS = [(language, textwrap.dedent(text)) for _, language, text in FENCE.findall(PAGE)]


@pytest.fixture(scope="module")
def server_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the slot files and of the log of the server."""
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def address(server_folder: Path) -> Iterator[str]:
    """The address of a server with the chat template of the examples, once its model is loaded."""
    flags = ["--port", "0", "--devices", "cpu", "-t", "1", "--chat-template", str(EXAMPLES / "story.jinja")]
    flags += ["--slot-save-path", str(server_folder), "--log-requests", str(server_folder / "day.log")]
    command = [sys.executable, "-m", "hocket", "serve", TINY, *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            url = server.stderr.readline().rpartition(" at ")[2].strip()
            wait_until(lambda: httpx.get(f"{url}/health").is_success)
            yield url
        finally:
            server.kill()


def contains(whole: object, part: object) -> bool:
    """Return whether a JSON value has all entries of another one."""
    if isinstance(part, dict) and isinstance(whole, dict):
        return all(name in whole and contains(whole[name], value) for name, value in part.items())
    if isinstance(part, list) and isinstance(whole, list):
        return len(part) == len(whole) and all(map(contains, whole, part))
    return whole == part


@pytest.mark.long
def test_the_python_blocks_print_what_stands_below_them(address: str) -> None:
    page = "\n".join(f"```{language}\n{text}```\n" for language, text in BLOCKS if language in ("python", "text"))
    page = page.replace(ADDRESS, address)
    assert as_it_prints(page) == page


@pytest.mark.long
def test_the_requests_get_the_answers_that_stand_below_them(address: str) -> None:
    commands = [(i, text) for i, (language, text) in enumerate(BLOCKS) if language == "sh" and text[:4] == "curl"]
    assert len(commands) == 5
    for i, command in commands:
        run = subprocess.run(
            command.replace(ADDRESS, address),
            shell=True,
            capture_output=True,
            text=True,
            check=True,
            timeout=WAIT_SECONDS,
        )
        language, expected = BLOCKS[i + 1]
        assert language == "json"
        assert contains(json.loads(run.stdout), json.loads(expected)), run.stdout


@pytest.mark.long
def test_the_commands_print_the_lines_below_them(
    capsys: pytest.CaptureFixture[str], monkeypatch, address: str, server_folder: Path
) -> None:
    """The second command reads the log of the server, which still runs."""
    blocks = [text for language, text in BLOCKS if language == "console"]
    assert len(blocks) == 2
    httpx.post(f"{address}/completion", json={"prompt": "a", "n_predict": 2}, timeout=WAIT_SECONDS)
    for block, place in zip(blocks, (ROOT, server_folder), strict=True):
        monkeypatch.chdir(place)
        command, *lines = block.splitlines()
        assert main(command.removeprefix("$ hocket ").split()) == 0
        printed = {without_numbers(line) for line in capsys.readouterr().out.splitlines()}
        assert {without_numbers(line) for line in lines} <= printed


@pytest.mark.long
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_a_client_runs(path, address: str) -> None:
    run = subprocess.run(
        [sys.executable, path, address], capture_output=True, text=True, check=False, timeout=WAIT_SECONDS
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()


@pytest.mark.long
def test_every_endpoint_answers_curl_and_is_on_the_page(address: str) -> None:
    script = str(EXAMPLES / "curl.sh")
    run = subprocess.run(["sh", script, address], capture_output=True, text=True, check=False, timeout=WAIT_SECONDS)
    assert run.returncode == 0, run.stdout[-500:] + run.stderr
    called = re.findall(r"^call (\S+)", (EXAMPLES / "curl.sh").read_text("utf-8"), re.MULTILINE)
    assert all(f"{path}`" in PAGE for path in called)


def test_the_page_has_all_paths_and_no_other() -> None:
    from hocket.server.app import build_routes

    names = {"name:path": "NAME", "id": "ID", "slot": "N"}
    routes = {PATH_NAMES.sub(lambda match: names[match[1]], route.path) for route in build_routes()}
    section = PAGE[PAGE.index("## Endpoints") : PAGE.index("## Fields")]
    table = {path for line in section.splitlines() if line[:1] == "|" for path in re.findall(r"(/[\w/-]*)`", line)}
    assert table <= routes
    assert routes - table <= {"/", *(path.removeprefix("/v1") for path in table)}
