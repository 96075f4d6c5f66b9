"""``mpiexec -n 2 hocket serve``: answers, cancellations, shutdown and a killed rank, at real processes."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..given.models.goldens import TINY
from ..given.models.rewritten import with_blocks_ahead
from ..given.open_requests import read_until
from ..given.ranks.mpi import MPIEXEC, hocket_in, left_behind, needs_mpi
from ..given.serving.server_process import COMPLETION, FREE_DRAFTS_COMMAND, ServerProcess, run_server
from ..given.waits import WAIT_SECONDS, wait_until

pytestmark = [needs_mpi, pytest.mark.long]

LAUNCHER = (str(MPIEXEC), "-iface", "lo", "-n", "2")
ALIAS = f"served-ranks-{os.getpid()}"
SERVER_FLAGS = ("-np", "2", "-c", "128", "-b", "16", "-t", "1", "--split-mode", "tensor", "--alias", ALIAS)
SERVED_PROMPTS = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune must want a wife",
    "Emma",
    "The carriage was",
)
DRAFT_FLAGS = {"mtp": ("--draft-max", "3"), "model": ("-md", TINY, "--draft-max", "3")}
LOG_ERROR = "hocket: --log-requests is for one process; leave it out, or start the server without mpiexec"


@pytest.fixture(name="model", scope="module")
def model_with_blocks_ahead(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_blocks_ahead(tmp_path_factory.mktemp("ahead") / "ahead.gguf", Path(TINY), 30.0).gguf.path


@pytest.fixture(name="expected", scope="module")
def answers_of_one_process(model: Path) -> list[tuple[Any, ...]]:
    with run_server(words=(*SERVER_FLAGS, "--devices", "cpu:0,cpu:1"), model=model) as alone:
        return complete_all(alone)


@pytest.fixture(name="ranks", scope="module")
def serving_ranks(model: Path) -> Iterator[ServerProcess]:
    with run_server(words=(*SERVER_FLAGS, "--devices", "cpu:0"), launcher=LAUNCHER, model=model) as server:
        yield server


@pytest.fixture(name="drafting_ranks", scope="module", params=DRAFT_FLAGS)
def serving_ranks_with_drafts(model: Path, request: pytest.FixtureRequest) -> Iterator[tuple[str, ServerProcess]]:
    flags = (*SERVER_FLAGS, "--devices", "cpu:0", *DRAFT_FLAGS[request.param])
    with run_server(words=flags, launcher=LAUNCHER, command=FREE_DRAFTS_COMMAND, model=model) as server:
        yield request.param, server


def complete_all(server: ServerProcess) -> list[tuple[Any, ...]]:
    """Return texts, exact probabilities and cached tokens: of prompts alone, again, and with a temperature."""
    found: list[tuple[Any, ...]] = []
    for prompt in SERVED_PROMPTS:
        for options in ({}, {}, {"temperature": 0.9, "seed": 5, "cache_prompt": False}):
            body = {**COMPLETION, "prompt": prompt, "n_probs": 5, "n_predict": 8, **options}
            answer = server.post("/completion", body).json()
            found.append((answer["content"], answer["completion_probabilities"], answer["timings"]["cache_n"]))
    vectors = server.post("/v1/embeddings", {"model": "m", "input": list(SERVED_PROMPTS)}).json()["data"]
    return [*found, *((vector["embedding"],) for vector in vectors)]


def find_rank_processes(launcher: int) -> list[int]:
    """Return the process of each rank that runs the server, by rank: the child of a supervisor."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            environment = path.read_bytes().split(b"\0")
            parent = int((path.parent / "stat").read_text().rpartition(")")[2].split()[1])
            grandparent = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
            proxy = int(Path(f"/proc/{grandparent}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        ranks = [int(word[len(b"PMI_RANK=") :]) for word in environment if word.startswith(b"PMI_RANK=")]
        if ranks and proxy == launcher:
            found[ranks[0]] = int(path.parent.name)
    return [found[rank] for rank in sorted(found)]


def test_answers_are_those_of_one_process_bit_by_bit(expected: list[tuple[Any, ...]], ranks: ServerProcess) -> None:
    assert complete_all(ranks) == expected
    assert any(answer[2] > 0 for answer in expected if len(answer) == 3)


def test_a_client_that_leaves_frees_its_slot_on_all_ranks(ranks: ServerProcess) -> None:
    text = ranks.post("/completion", COMPLETION).json()["content"]
    streams = [ranks.open_stream(n_predict=100) for _ in range(3)]
    wait_until(lambda: ranks.count_busy_slots() == 2)
    for stream in streams:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # the end is a reset
        stream.close()
    assert ranks.post("/completion", COMPLETION).json()["content"] == text
    wait_until(lambda: ranks.count_busy_slots() == 0)


def test_a_signal_drains_and_ends_all_ranks(ranks: ServerProcess) -> None:
    """A launcher sends the signal to all ranks; a stream that runs goes on to its end."""
    with ranks.open_stream(n_predict=60) as stream:
        data = read_until(stream, b"data: ")
        ranks.process.send_signal(signal.SIGTERM)
        while part := stream.recv(65536):
            data += part
    assert b'"stop_type":"limit"' in data
    assert ranks.process.wait(WAIT_SECONDS) == 0
    assert not left_behind(ALIAS)


def test_answers_with_drafts_are_those_without(
    expected: list[tuple[Any, ...]], drafting_ranks: tuple[str, ServerProcess]
) -> None:
    drafts, server = drafting_ranks
    assert complete_all(server) == expected
    answer = server.post("/completion", {**COMPLETION, "n_predict": 20}).json()
    assert answer["timings"]["draft_n"] > 0
    assert (answer["timings"]["draft_n_accepted"] > 0) == (drafts == "mtp")


def require_end_by_killed_rank(server: ServerProcess) -> None:
    """Kill rank 1 of a server that generates. Check that all ranks end, and that one line names the rank."""
    with server.open_stream(n_predict=100) as stream:
        assert stream.recv(65536).startswith(b"HTTP/1.1 200")
    processes = find_rank_processes(server.process.pid)
    assert len(processes) == 2
    os.kill(processes[1], signal.SIGKILL)
    code = server.process.wait(WAIT_SECONDS)
    assert server.process.stderr is not None
    lines = [line for line in server.process.stderr.read().splitlines() if line.startswith("hocket: ")]
    assert code == 2
    assert len(lines) == 1
    assert lines[0].startswith(f"hocket: rank 1 on {socket.gethostname()}: nothing was heard of it for 4 s")


def test_a_killed_rank_with_drafts_ends_all_with_one_line(drafting_ranks: tuple[str, ServerProcess]) -> None:
    require_end_by_killed_rank(drafting_ranks[1])


@pytest.mark.nightly(cases=0)
def test_a_killed_rank_ends_all_with_one_line(model: Path) -> None:
    flags = (*SERVER_FLAGS, "--devices", "cpu:0")
    with run_server(words=flags, launcher=LAUNCHER, model=model) as server:
        require_end_by_killed_rank(server)


def test_a_log_of_requests_needs_one_process() -> None:
    done = hocket_in(2, "serve", TINY, "--log-requests", "log")
    assert (done.code, done.lines) == (2, [LOG_ERROR])
