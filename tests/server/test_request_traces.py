"""The traces of requests over the steps of a real engine, as JSON and as a page."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from starlette.testclient import TestClient

from hocket.frontends.serving import step_history
from hocket.frontends.serving.step_history import StepHistory
from hocket.server.endpoints.request_traces import describe_trace
from hocket.view.request_page import build_request_page

from ..given.serving.real_service import BODY, TEXT_TOKENS, complete, open_client

SAVED_TOKENS = 32
"""The last multiple of 16 tokens in the prompt, at which the recurrent states of the embedded model are saved."""


def read_trace(client: TestClient, name: str) -> dict[str, Any]:
    answer = client.get(f"/requests/{name}/trace")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.long
def test_a_trace_has_every_step_of_a_request() -> None:
    with open_client(None) as client:
        answer = client.post("/completion", json=BODY)
        name = answer.headers["X-Hocket-Request"]
        (choice,) = read_trace(client, name)["choices"]
        assert (choice["id"], choice["state"], choice["reason"]) == (f"{name}-0", "ended", "length")
        assert choice["submitted"] > 1.7e9  # seconds since 1970
        assert (choice["prompt_tokens"], choice["cached_tokens"], choice["new_tokens"]) == (len(TEXT_TOKENS), 0, 6)
        steps = choice["steps"]
        prompts = [step for step in steps if step["kind"] == "prompt"]
        decodes = [step for step in steps if step["kind"] == "decode"]
        assert sum(step["tokens"] for step in prompts) == len(TEXT_TOKENS)
        assert [step["tokens"] for step in decodes] == [1] * 5  # the first token comes with the prompt
        assert steps == sorted(steps, key=lambda step: step["start_after"])
        assert all(0 <= step["start_after"] <= choice["ended_after"] and step["seconds"] > 0 for step in steps)
        assert choice["mean_requests"] == 1
        again = client.post("/completion", json={**BODY, "n": 2}).headers["X-Hocket-Request"]
        first, second = read_trace(client, again)["choices"]
        assert first["cached_tokens"] == SAVED_TOKENS
        shared = {step["step"] for step in first["steps"]} & {step["step"] for step in second["steps"]}
        assert {step["requests"] for step in first["steps"] if step["step"] in shared} == {2}
        assert shared
        assert read_trace(client, f"{again}-1")["choices"] == [second]
        listed = client.get("/requests").json()
        assert [record["id"] for record in listed] == [f"{again}-1", f"{again}-0", f"{name}-0"]
        assert not any("steps" in record for record in listed)
        page = client.get(f"/requests/{name}/trace?format=html")
        assert page.headers["content-type"].startswith("text/html")
        assert len(re.findall("<rect ", page.text)) == len(steps) + 1  # and the wait
        assert client.get("/requests/none/trace").status_code == 404
        assert client.get(f"/requests/{name}/trace?format=xml").status_code == 400


@pytest.mark.long
def test_a_chat_and_a_stream_name_their_request() -> None:
    with open_client(None) as client:
        answer = client.post("/completion", json={**BODY, "stream": True})
        name = answer.headers["X-Hocket-Request"]
        assert read_trace(client, name)["choices"][0]["new_tokens"] == 6
        assert complete(client)["timings"]["cache_n"] == SAVED_TOKENS


def test_a_page_escapes_its_texts() -> None:
    choice = {"id": "<b>", "ended_after": None, "started_after": None, "steps": [], "reason": "<i>"}
    page = build_request_page("<script>", [choice])
    assert "<script" not in page
    assert "<b>-" not in page
    assert "&lt;i&gt;" in page


def test_a_history_keeps_the_last_requests_and_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_history, "MAX_REQUESTS", 3)
    history = StepHistory()
    for i in range(5):
        history.record_submission(f"r-{i}", float(i), 10)
        history.record_start(f"r-{i}", i + 0.5, 0, 4)
        history.record_step("prompt", i + 0.5, 0.25, [(f"r-{i}", 6)])
        history.record_end(f"r-{i}", i + 0.75, "length", 1)
    assert [record.id for record in history.list_requests()] == ["r-2", "r-3", "r-4"]
    assert [trace.record.id for trace in history.trace_request_or_choices("r")] == ["r-2", "r-3", "r-4"]
    (trace,) = history.trace_request_or_choices("r-3")
    assert [step.number for step in trace.steps] == [3]
    assert not history.trace_request_or_choices("r-0")
    assert json.dumps(trace.steps[0].tokens) == '[["r-3", 6]]'


def test_the_mean_of_requests_leaves_out_the_prompt_of_a_mixed_step() -> None:
    history = StepHistory()
    history.record_submission("a", 0.0, 3)
    history.record_step("prompt", 0.0, 1.0, [("a", 3)])
    history.record_step("mixed", 1.0, 1.0, [("b", 16), ("a", 1)])
    history.record_step("decode", 2.0, 1.0, [("a", 1), ("b", 1)])
    (trace,) = history.trace_request_or_choices("a")
    assert describe_trace(trace)["mean_requests"] == 1.5
