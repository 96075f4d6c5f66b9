"""The load generator of ``benchmarks/server/serving.py``, against a server of this process without a model."""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import ClassVar

import pytest

from hocket.benchmarks.server import load_generator as load
from hocket.benchmarks.server import serving

GAP_SECONDS = 0.002


class StubHandler(BaseHTTPRequestHandler):
    """Streams as many tokens as the request asks for, in the form of llama-server or of OpenAI."""

    protocol_version = "HTTP/1.1"
    bodies: ClassVar[list[dict[str, object]]]
    url: ClassVar[str]
    vanishes = False

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        data = json.dumps({"data": [{"id": "stub", "meta": {"n_vocab": 1000}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        if "input" in body:
            prompt = sum(map(len, body["input"]))
            answer = json.dumps({"data": [{"embedding": [0.5]}], "usage": {"prompt_tokens": prompt}}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            return self.wfile.write(answer)
        count = body.get("n_predict", body.get("max_tokens"))
        if len(body["prompt"]) > 5000:
            return self.send_error(400, "too long")
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for i in range(count):
            time.sleep(GAP_SECONDS)
            if self.vanishes and i == 2:
                self.close_connection = True
                return None
            native = {"content": " a", "tokens": [i], "stop": False}
            self._send(native if "n_predict" in body else {"choices": [{"text": " a"}]})
        timings = {"cache_n": 3, "prompt_n": len(body["prompt"]) - 3, "predicted_n": count}
        if "n_predict" in body:
            self._send({"content": "", "tokens": [], "stop": True, "timings": timings})
        else:
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
            usage["prompt_tokens_details"] = {"cached_tokens": 3}
            self._send({"choices": [], "usage": usage})
            self._write(b"data: [DONE]\n\n")
        return self._write(b"")

    def _send(self, event: dict[str, object]) -> None:
        self._write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _write(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


@pytest.fixture
def stub() -> Iterator[type[StubHandler]]:
    class Handler(StubHandler):
        bodies: ClassVar[list[dict[str, object]]] = []

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        Handler.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield Handler
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("api", ["native", "openai"])
def test_a_closed_loop_counts_tokens_and_times(stub: type[StubHandler], api: str) -> None:
    row = serving.measure_load(serving.find_target("stub", stub.url, api), serving.LoadCase("S", 2), 2, "seed")
    assert (row["requests"], row["errors"]) == (4, 0), row["error"]
    assert round(row["new_per_second"] * row["seconds"]) == 4 * 64
    assert round(row["prompt_per_second"] * row["seconds"]) == 4 * 32
    assert row["cached_share"] == 4 * 3 / (4 * 32)
    assert row["first_ms_p50"] >= 1e3 * GAP_SECONDS
    assert row["gap_ms_p99"] >= row["gap_ms_p50"] >= 0.5 * 1e3 * GAP_SECONDS
    assert all(body["ignore_eos"] and body["temperature"] == 0 and body["stream"] for body in stub.bodies)
    assert all(125 <= token < 750 for body in stub.bodies for token in body["prompt"])


def test_an_open_loop_starts_requests_while_others_run(stub: type[StubHandler]) -> None:
    case = serving.LoadCase("S", rate=100.0)
    row = serving.measure_load(serving.find_target("stub", stub.url, "native"), case, 10, "seed")
    assert (row["requests"], row["errors"], row["load"]) == (10, 0, "100/s")
    assert row["seconds"] < 10 * 64 * GAP_SECONDS


@pytest.mark.long
def test_a_talk_repeats_the_prompt_and_the_answers(stub: type[StubHandler]) -> None:
    serving.measure_load(serving.find_target("stub", stub.url, "native"), serving.LoadCase("T", 1), 1, "seed")
    prompts = [body["prompt"] for body in stub.bodies]
    assert [len(prompt) for prompt in prompts] == [1060 + 140 * i for i in range(6)]
    assert all(after[: len(before) + 80] == [*before, *range(80)] for before, after in pairwise(prompts))


def test_a_long_prompt_arrives_while_others_decode(stub: type[StubHandler]) -> None:
    case = serving.LoadCase("I", 3)
    row = serving.measure_load(serving.find_target("stub", stub.url, "native"), case, 1, "seed")
    assert [len(body["prompt"]) for body in stub.bodies] == [32, 32, 32, 1500]
    assert (row["requests"], row["errors"]) == (4, 0)


def test_errors_are_counted_and_the_load_goes_on(stub: type[StubHandler], monkeypatch: pytest.MonkeyPatch) -> None:
    target = serving.find_target("stub", stub.url, "native")
    monkeypatch.setitem(serving.WORKLOADS, "S", load.Workload(6000, 8))
    row = serving.measure_load(target, serving.LoadCase("S", 2), 2, "seed")
    assert (row["requests"], row["errors"]) == (4, 4)
    assert "400" in row["error"]
    monkeypatch.setitem(serving.WORKLOADS, "S", load.Workload(6, 8))
    stub.vanishes = True
    row = serving.measure_load(target, serving.LoadCase("S", 2), 2, "seed")
    assert (row["requests"], row["errors"]) == (4, 4)
    assert "closed the connection" in row["error"]


def test_jobs_depend_on_the_seed_alone() -> None:
    first, again, other = (load.make_jobs(load.WORKLOADS["M"], 5, seed, 1000) for seed in ("a", "a", "b"))
    assert first == again != other
    assert len({len(job.prompt) for job in first}) > 1
    assert load.WORKLOADS["T"].context == 1060 + 80 + 5 * 140


def test_the_table_has_medians_and_ratios_of_rounds() -> None:
    row = {"workload": "S", "load": "1", "errors": 1}
    rates = [("a", 2.0), ("b", 1.0), ("a", 4.0), ("b", 4.0), ("a", 8.0), ("b", 2.0)]
    ours, theirs = serving.format_rows([{**row, "server": server, "new_per_second": rate} for server, rate in rates])
    assert (ours[3], theirs[3], ours[-1], theirs[-1]) == ("4.0", "2.0", "1.00", "0.50")
    assert ours[3 + list(serving.TABLE_COLUMNS).index("errors")] == "3"


def test_the_ratio_of_gaps_needs_gaps_that_can_be_measured() -> None:
    def summarise(*times: float) -> dict[str, object]:
        reads = [(at, b'data: {"content": "word"}\n\n') for at in times]
        return serving.summarise_exchanges([load.Exchange(0, 0.0, 200, reads=reads)], 1.0, has_late=False)

    row = summarise(1.0, 1.01, 1.02, 1.05)
    assert (row["gap_ms_p50"], row["gap_ms_p99"], row["gap_ratio"]) == pytest.approx((10, 30, 3))
    assert "gap_ratio" not in summarise(1.0, 1.0, 1.0, 1.05)


def test_a_soak_reports_failed_requests_and_memory_that_grows(stub: type[StubHandler], monkeypatch) -> None:
    sizes = iter([50.0, *[100.0] * 8, 101.0])
    target = replace(serving.find_target("stub", stub.url, "native"), pid=1)
    monkeypatch.setattr(serving, "read_memory_mib", lambda pid: next(sizes))
    monkeypatch.setattr(serving, "read_cpu_seconds", lambda pid: 0.0)
    monkeypatch.setitem(serving.WORKLOADS, "S", load.Workload(6, 3))
    rows = list(serving.run_soak(target, serving.LoadCase("S", 2), 40))
    assert (len(rows), len(stub.bodies)) == (10, 40)
    assert serving.find_soak_faults(rows) == ["memory grew by 102.0%, from 50.0 to 101.0 MiB"]
    assert serving.find_soak_faults(rows[1:]) == []
    failed = {**rows[1], "errors": 2, "error": "no room"}
    assert serving.find_soak_faults([failed, *rows[2:]]) == ["2 requests failed: no room"]


def test_a_server_that_ends_is_reported() -> None:
    command = [sys.executable, "-c", "print('no such model')"]
    with pytest.raises(SystemExit, match="no such model"), serving.run_server("stub", command, 0, "native"):
        pass


def test_embeddings_count_tokens_of_prompts_alone(stub: type[StubHandler]) -> None:
    row = serving.measure_load(serving.find_target("stub", stub.url, "native"), serving.LoadCase("E", 2), 2, "seed")
    assert (row["requests"], row["errors"], row["new_per_second"], row["gap_ms_p50"]) == (4, 0, 0, 0), row["error"]
    assert round(row["prompt_per_second"] * row["seconds"]) == sum(len(body["input"][0]) for body in stub.bodies)
    assert row["first_ms_p50"] > 0


def test_fairness_is_that_of_the_worst_window() -> None:
    def exchange(client: int, *times: float) -> load.Exchange:
        reads = [(at, b'data: {"content": "word"}\n\n') for at in times]
        return load.Exchange(client, 0.0, 200, reads=reads)

    assert serving.find_lowest_fairness([exchange(0, 0.0, 1.0), exchange(1, 0.5, 1.5)]) == 1.0
    assert serving.find_lowest_fairness([exchange(0, 0.0, 1.0), exchange(1)]) == 0.5
    late = [exchange(0, 0.0, 1.0, 11.0, 21.0), exchange(1, 0.5, 1.5)]
    assert serving.find_lowest_fairness(late) == 0.5  # from 10 s on, client 1 gets nothing


@pytest.mark.long
def test_all_workloads_end_in_time(stub: type[StubHandler], monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Every case runs at most once in a round, and the cases that would end too late are named."""
    for name in load.WORKLOADS:
        monkeypatch.setitem(serving.WORKLOADS, name, load.Workload(6, 0 if name == "E" else 3))
    monkeypatch.setattr(serving, "LONG", load.Workload(40, 2))
    cases = serving.list_all_cases([2, 1], 100.0)
    assert {case.workload for case in cases} == set(load.WORKLOADS)
    target = serving.find_target("stub", stub.url, "native")
    args = argparse.Namespace(minutes=1.0, rounds=2, requests=1)
    rows = list(serving.run_cases([target], [replace(case, jobs=min(case.jobs, 3)) for case in cases], args))
    assert len(rows) == 2 * len(cases)
    assert not any(row["errors"] for row in rows)
    llama = replace(target, name="llama")
    assert all(row["workload"] != "E" for row in serving.run_cases([llama], cases[4:5], args))
    assert not list(serving.run_cases([target], cases, argparse.Namespace(minutes=-1.0, rounds=1, requests=1)))
    assert "left out for lack of time: M 2, round 0" in capsys.readouterr().out
