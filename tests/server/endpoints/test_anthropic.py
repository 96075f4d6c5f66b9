"""Messages through the client of Anthropic."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from ...given.fakes.fake_service import FakeService, RunningServer, serve

anthropic = pytest.importorskip("anthropic")

ONE_MESSAGE = [{"role": "user", "content": "hi"}]
CITY = {"city": {"enum": ["Rome", "Oslo"]}}
SCHEMA = {"type": "object", "properties": CITY, "required": ["city"], "additionalProperties": False}
TOOL = {"name": "weather", "input_schema": SCHEMA}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city":"Oslo"}}\n</tool_call>'


@pytest.fixture(name="server", scope="module")
def message_server() -> Iterator[RunningServer]:
    with serve(FakeService(), api_keys=("secret",)) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    server.service.answer = "the answer"
    server.service.requests.clear()
    with anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0) as connected:
        yield connected


def create(client: anthropic.Anthropic, **options: Any):
    return client.messages.create(**{"model": "any", "max_tokens": 300, "messages": ONE_MESSAGE, **options})


def last_prompt(server: RunningServer) -> str:
    return server.service.tokenizer.decode(server.service.requests[-1].prompt, special=True)


def test_an_answer_is_a_list_of_blocks(client: anthropic.Anthropic) -> None:
    answer = create(client)
    assert [(block.type, block.text) for block in answer.content] == [("text", "the answer")]
    assert (answer.role, answer.stop_reason, answer.stop_sequence) == ("assistant", "end_turn", None)
    usage = answer.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (3, 1, 8)
    assert answer.id.startswith("msg_")


def test_a_stream_has_its_events_in_order(client: anthropic.Anthropic, server: RunningServer) -> None:
    server.service.answer = f"<think>hm</think>I look.{CALL}{CALL}"
    events = list(create(client, stream=True, tools=[TOOL]))
    kinds = [event.type for event in events]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    starts = [(e.index, e.content_block.type) for e in events if e.type == "content_block_start"]
    assert starts == [(0, "thinking"), (1, "text"), (2, "tool_use"), (3, "tool_use")]
    assert [event.index for event in events if event.type == "content_block_stop"] == [0, 1, 2, 3]
    open_block = None
    for event in events:
        if event.type == "content_block_start":
            assert open_block is None
            open_block = event.index
        elif event.type == "content_block_delta":
            assert event.index == open_block
        elif event.type == "content_block_stop":
            open_block = None
    assert events[-2].delta.stop_reason == "tool_use"


def test_the_helper_of_the_client_joins_a_stream(client: anthropic.Anthropic, server: RunningServer) -> None:
    server.service.answer = f"<think>hm</think>I look.{CALL}"
    with client.messages.stream(model="m", max_tokens=200, messages=ONE_MESSAGE, tools=[TOOL]) as stream:
        message = stream.get_final_message()
    whole = create(client, tools=[TOOL], max_tokens=200)
    for each in (message, whole):
        thought, text, use = each.content
        assert (thought.thinking, text.text) == ("hm", "I look.")
        assert (use.name, use.input) == ("weather", {"city": "Oslo"})
        assert each.stop_reason == "tool_use"


def test_limits_and_stop_sequences_are_distinct(client: anthropic.Anthropic) -> None:
    assert create(client, max_tokens=2).stop_reason == "max_tokens"
    answer = create(client, stop_sequences=["swer"])
    assert (answer.content[0].text, answer.stop_reason, answer.stop_sequence) == ("the an", "stop_sequence", "swer")


def test_blocks_become_messages_of_the_template(client: anthropic.Anthropic, server: RunningServer) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "so"},
                {"type": "tool_use", "id": "t", "name": "weather", "input": {"city": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "sun"}]},
                {"type": "text", "text": "well"},
            ],
        },
    ]
    create(client, messages=messages, system=[{"type": "text", "text": "be kind"}])
    want = '<|system|>be kind<|user|>a\nb<|assistant|>soweather({"city": "Rome"})<|tool|>sun<|user|>well<|assistant|>'
    assert last_prompt(server) == want
    create(client, thinking={"type": "enabled", "budget_tokens": 1024})
    assert last_prompt(server).endswith("<|assistant|><think>")
    create(client, messages=[*ONE_MESSAGE, {"role": "assistant", "content": "Well"}])
    assert last_prompt(server) == "<|user|>hi<|assistant|>Well"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_required_tool_is_called(client: anthropic.Anthropic, choice: dict[str, str]) -> None:
    answer = create(client, tools=[TOOL], tool_choice=choice, extra_body={"temperature": 0})
    (use,) = answer.content
    assert (use.type, use.name, answer.stop_reason) == ("tool_use", "weather", "tool_use")
    assert use.input["city"] in ("Rome", "Oslo")


def test_an_answer_follows_a_schema(client: anthropic.Anthropic) -> None:
    format = {"type": "json_schema", "schema": SCHEMA}
    text = (
        create(client, output_config={"effort": "low", "format": format}, extra_body={"temperature": 0}).content[0].text
    )
    assert json.loads(text)["city"] in ("Rome", "Oslo")


def test_tokens_are_counted(client: anthropic.Anthropic) -> None:
    assert client.messages.count_tokens(model="m", messages=ONE_MESSAGE).input_tokens == 4


@pytest.mark.parametrize(
    "options",
    [
        {"messages": [{"role": "system", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]},
        {"messages": []},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tool_choice": {"type": "some"}},
        {"thinking": {"type": "much"}},
        {"output_config": {"colour": "red"}},
        {"extra_body": {"temperature": -1}},
        {"extra_body": {"mcp_servers": [{}]}},
    ],
)
def test_errors_have_the_shape_of_anthropic(client: anthropic.Anthropic, options: dict[str, object]) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        create(client, stream=True, **options)
    body = caught.value.body
    assert isinstance(body, dict)
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")


def test_other_errors_have_their_classes(client: anthropic.Anthropic, server: RunningServer) -> None:
    with pytest.raises(anthropic.AuthenticationError):
        create(client.with_options(api_key="wrong"))
    server.service.fails_after = 1
    try:
        with pytest.raises(anthropic.InternalServerError):
            create(client)
        with pytest.raises(anthropic.APIStatusError, match="lost a device"):
            list(create(client, stream=True))
    finally:
        server.service.fails_after = None
    response = server.post("/v1/messages", {"messages": ONE_MESSAGE}, headers={"x-api-key": "secret"})
    assert response.json()["error"]["message"] == "max_tokens is missing"


def test_the_model_is_listed(client: anthropic.Anthropic) -> None:
    page = client.models.list()
    assert [(model.id, model.type, model.display_name) for model in page.data] == [
        ("fake-model", "model", "fake-model")
    ]
    assert page.data[0].created_at.year >= 2025
    assert (page.has_more, page.first_id, page.last_id) == (False, "fake-model", "fake-model")
