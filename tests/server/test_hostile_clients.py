"""Clients with impossible wishes get status 400, and all other clients get the answers that they get alone."""

from __future__ import annotations

import errno
import io
import sys
from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from hocket.frontends.terminal.output import write_line_to_stderr

from ..given.serving.real_service import complete, open_client

RESULT = {"type": "tool_result", "tool_use_id": "a"}
BANNED = [[token, False] for token in range(2048)]
"""A logit bias that bans all tokens of the embedded model."""


@pytest.fixture(name="client", scope="module")
def open_shared_client() -> Iterator[TestClient]:
    with open_client(None) as client:
        yield client


@pytest.mark.long
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            {"grammar": "root ::= root"},
            "the grammar leads to a text that cannot be completed; simplify it, for example its recursive rules",
        ),
        ({"logit_bias": BANNED}, "bias is -inf for every token"),
    ],
    ids=["grammar", "bias"],
)
def test_options_that_allow_no_token_are_a_fault_of_the_client(
    client: TestClient, fields: dict[str, object], reason: str
) -> None:
    """They had status 500, as faults of the server have."""
    alone = complete(client, n_probs=2)
    answer = client.post("/completion", json={"prompt": "It is", "n_predict": 2, **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert reason in error["message"]
    stream = client.post("/completion", json={"prompt": "It is", "n_predict": 2, "stream": True, **fields}).text
    assert '"code":400' in stream
    again = complete(client, n_probs=2)
    assert all(again[name] == alone[name] for name in ("tokens", "completion_probabilities"))


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        (
            "/v1/messages",
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": False}]}
                ]
            },
            "messages[0].content[0].content: need a text",
        ),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "a"}], "tool_choice": {"disable_parallel_tool_use": "no"}},
            "tool_choice.disable_parallel_tool_use: need true or false",
        ),
        ("/v1/responses", {"input": [{"type": "reasoning", "content": 0}]}, "input[0]: need a list of parts"),
        ("/v1/responses", {"input": [{"type": "reasoning", "summary": [3]}]}, "input[0]: need a list of parts"),
    ],
)
def test_values_of_another_type_are_refused_by_name(
    client: TestClient, path: str, body: dict[str, object], reason: str
) -> None:
    """They had been read as no value."""
    answer = client.post(path, json={"max_tokens": 3, **body} if path == "/v1/messages" else body)
    assert answer.status_code == 400
    assert reason in answer.json()["error"]["message"]


def test_a_full_disk_behind_stderr_ends_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine says there why its log has ended. If that raised, the full disk of the log ended the engine."""

    class FullDisk(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stderr", FullDisk())
    write_line_to_stderr("the log ends here")
