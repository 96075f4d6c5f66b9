"""Tool calls that the model decides to make follow the schemas of their functions."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from ..given.fakes.fake_service import FakeService, RunningServer, serve

CITY_PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(name="server", scope="module")
def lazy_server() -> Iterator[RunningServer]:
    with serve(FakeService()) as running:
        yield running


def call(server: RunningServer, answer: str, **function: object):
    """Return the response to a chat with one function; the model tries to write `answer`."""
    server.service.answer = answer
    tools = [{"type": "function", "function": {"name": "weather", "parameters": CITY_PARAMETERS, **function}}]
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": tools, "temperature": 0, "max_tokens": 200}
    return server.post("/v1/chat/completions", body)


def test_a_call_that_the_model_begins_follows_the_schema(server: RunningServer) -> None:
    response = call(server, 'I look. <tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>')
    (choice,) = response.json()["choices"]
    assert choice["message"]["content"] == "I look."
    function = choice["message"]["tool_calls"][0]["function"]
    assert function["name"] == "weather"
    assert json.loads(function["arguments"])["city"] in ("Rome", "Oslo")
    assert "X-Hocket-Ignored" not in response.headers


def test_an_answer_without_a_call_is_free(server: RunningServer) -> None:
    text = 'no {"city": "Paris"} call'
    (choice,) = call(server, text).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")


def test_parameters_that_cannot_be_compiled_leave_the_call_free(server: RunningServer) -> None:
    wrong = {"type": "object", "properties": {"city": {"type": "town"}}}
    answer = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    response = call(server, answer, parameters=wrong)
    (choice,) = response.json()["choices"]
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris"}
    assert response.headers["X-Hocket-Ignored"].startswith("tools.function.parameters (the JSON schema is wrong")
    refused = call(server, answer, parameters=wrong, strict=True)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")
