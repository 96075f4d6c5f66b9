"""The responses API through the client of OpenAI."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from hocket.server.endpoints.openai_responses import ResponseFormatter
from hocket.server.errors import ApiError

from ...given.fakes.fake_service import FakeService, RunningServer, serve

openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
WEATHER_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city":"Oslo"}}\n</tool_call>'


@pytest.fixture(name="server", scope="module")
def response_server() -> Iterator[RunningServer]:
    with serve(FakeService()) as running:
        yield running


@pytest.fixture(name="client")
def responses_client(server: RunningServer) -> Iterator[openai.OpenAI]:
    server.service.answer = "the answer"
    server.service.requests.clear()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as connected:
        yield connected


def create(client: openai.OpenAI, **options: Any) -> Any:
    return client.responses.create(**{"model": "any", "input": "hi", **options})


def last_prompt(server: RunningServer) -> str:
    return server.service.tokenizer.decode(server.service.requests[-1].prompt, special=True)


def test_a_text_has_a_text(client: openai.OpenAI, server: RunningServer) -> None:
    answer = create(client, instructions="be kind", max_output_tokens=50, temperature=0.5)
    assert (answer.output_text, answer.status, answer.error) == ("the answer", "completed", None)
    (message,) = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert answer.id.startswith("resp_")
    assert message.id.startswith("msg_")
    assert (answer.temperature, answer.top_p, answer.instructions) == (0.5, 0.95, "be kind")
    usage = answer.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert (usage.output_tokens, usage.input_tokens_details.cached_tokens) == (8, 1)
    assert last_prompt(server) == "<|system|>be kind<|user|>hi<|assistant|>"


def test_items_become_messages(client: openai.OpenAI, server: RunningServer) -> None:
    items: Any = [
        {"role": "developer", "content": [{"type": "input_text", "text": "short"}]},
        {"role": "user", "content": "weather?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": '{"city":"Oslo"}'},
        {"type": "function_call_output", "call_id": "1", "output": "rain"},
    ]
    create(client, input=items, instructions="be kind")
    assert last_prompt(server) == (
        "<|system|>be kind\n\nshort<|user|>weather?"
        '<|assistant|>I look.weather({"city": "Oslo"})<|tool|>rain<|assistant|>'
    )
    count = client.responses.input_tokens.count(model="any", input=items, instructions="be kind")
    assert count.input_tokens == len(server.service.requests[-1].prompt)


def test_an_answer_can_be_the_next_input(client: openai.OpenAI, server: RunningServer) -> None:
    server.service.answer = f"<think>hm</think>I look.\n{WEATHER_CALL}"
    answer = create(client, tools=[WEATHER])
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
    call = answer.output[2]
    assert (call.name, call.arguments, call.status) == ("weather", '{"city":"Oslo"}', "completed")
    assert answer.output[0].content[0].text == "hm"
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens
    server.service.answer = "rain"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    history: Any = [{"role": "user", "content": "hi"}, *answer.output, result]
    assert create(client, input=history, tools=[WEATHER]).output_text == "rain"
    assert last_prompt(server).endswith('I look.weather({"city": "Oslo"})<|tool|>rain<|assistant|>')


def test_a_stream_has_the_events_of_its_items_in_order(client: openai.OpenAI, server: RunningServer) -> None:
    server.service.answer = f"<think>hm</think>I look.\n{WEATHER_CALL}"
    events = list(create(client, tools=[WEATHER], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    unique = [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
    item = ["response.output_item.added", "response.content_part.added"]
    ends = ["response.content_part.done", "response.output_item.done"]
    assert unique == [
        *("response.created", "response.in_progress"),
        *(*item, "response.reasoning_text.delta", "response.reasoning_text.done", *ends),
        *(*item, "response.output_text.delta", "response.output_text.done", *ends),
        "response.output_item.added",
        *("response.function_call_arguments.delta", "response.function_call_arguments.done"),
        *("response.output_item.done", "response.completed"),
    ]
    texts: dict[int, str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            texts[event.output_index] = texts.get(event.output_index, "") + event.delta
    assert texts == {0: "hm", 1: "I look.", 2: '{"city":"Oslo"}'}
    final = events[-1].response
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert [event.item.id for event in events if event.type == "response.output_item.done"] == [
        item.id for item in final.output
    ]
    assert final.usage.total_tokens > 0


def test_the_helpers_of_the_client_accumulate_a_stream(client: openai.OpenAI, server: RunningServer) -> None:
    server.service.answer = f"I look.\n{WEATHER_CALL}"
    with client.responses.stream(model="any", input="hi", tools=[WEATHER]) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert snapshots[-1] == "I look."
    call = final.output[1]
    assert call.type == "function_call"
    assert (call.name, call.arguments) == ("weather", '{"city":"Oslo"}')


def test_a_limit_makes_a_response_incomplete(client: openai.OpenAI) -> None:
    answer = create(client, max_output_tokens=3)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert "the answer".startswith(answer.output_text)
    assert answer.output[0].status == "incomplete"
    assert list(create(client, max_output_tokens=3, stream=True))[-1].type == "response.incomplete"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_required_call_follows_the_schema(client: openai.OpenAI, server: RunningServer, choice: Any) -> None:
    server.service.answer = '{"name":"weather","arguments":{"city":"Paris"}}'  # no such city
    (call,) = create(client, tools=[WEATHER], tool_choice=choice, temperature=0).output
    assert (call.type, call.name) == ("function_call", "weather")
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")


class Guest(pydantic.BaseModel):
    name: str


def test_a_format_constrains_the_text(client: openai.OpenAI, server: RunningServer) -> None:
    server.service.answer = '{"name":"Emma"}'
    parsed = client.responses.parse(model="any", input="hi", text_format=Guest, temperature=0)
    assert parsed.output_parsed == Guest(name="Emma")
    assert server.service.requests[-1].params.grammar is not None
    server.service.answer = "no object"
    text = create(client, text={"format": {"type": "json_object"}}, temperature=0, max_output_tokens=40).output_text
    assert text.startswith("{")


@pytest.mark.parametrize("answer", ["the answer 😀", "<think>\nhm hm\n</think>\n\nthe stop é"])
def test_logprobs_are_those_of_the_message(client: openai.OpenAI, server: RunningServer, answer: str) -> None:
    """Tokens of thoughts and of marks have none; the bytes of all tokens together are the text."""
    server.service.answer = answer
    options: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "temperature": 0}
    whole = create(client, **options)
    (part,) = whole.output[-1].content
    assert b"".join(bytes(each.bytes) for each in part.logprobs) == part.text.encode()
    assert {len(each.top_logprobs) for each in part.logprobs} == {2}
    assert {each.logprob for each in part.logprobs} == {-0.25}
    events = list(create(client, stream=True, **options))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    streamed = [each for event in deltas for each in event.logprobs]
    assert [each.token for each in streamed] == [each.token for each in part.logprobs]
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert [each.token for each in done.logprobs] == [each.token for each in part.logprobs]
    assert events[-1].response.output[-1].content[0].logprobs == part.logprobs
    assert create(client).output[-1].content[0].logprobs == []


def test_a_failure_ends_the_stream_with_an_event(client: openai.OpenAI, server: RunningServer) -> None:
    server.service.fails_after = 2
    try:
        last = list(create(client, stream=True))[-1]
    finally:
        server.service.fails_after = None
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert last.response.error.message == "the engine has lost a device"


def test_a_fault_of_a_request_has_its_code_in_a_whole_stream() -> None:
    formatter = ResponseFormatter.__new__(ResponseFormatter)
    formatter._has_begun, formatter._event_count, formatter._describe_response = False, 0, dict
    stream = formatter.format_stream_ending_error(ApiError(400, "no token is allowed")).decode()
    assert [line for line in stream.splitlines() if line.startswith("event: ")] == [
        f"event: response.{kind}" for kind in ("created", "in_progress", "failed")
    ]
    assert '"error":{"code":"invalid_prompt","message":"no token is allowed"}' in stream


@pytest.mark.parametrize(
    ("options", "param", "reason"),
    [
        (
            {"previous_response_id": "resp_1"},
            "previous_response_id",
            "stores no responses; send the whole conversation",
        ),
        ({"conversation": "conv_1"}, "conversation", "stores no responses"),
        ({"input": [{"type": "item_reference", "id": "rs_1"}]}, "input", "stores no responses"),
        ({"store": True}, "store", "store is not supported"),
        ({"background": True}, "background", "background is not supported"),
        ({"truncation": "auto"}, "truncation", "truncation is not supported"),
        ({"top_logprobs": 2}, "top_logprobs", "needs message.output_text.logprobs in include"),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs", "Expected `int` <= 20"),
        ({"input": []}, "input", "length"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input", "input has no message"),
        ({"input": [{"type": "computer_call"}]}, "input", "an item of type 'computer_call' is not supported"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input", "an item of type 'function_call'"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "messages",
            "this model reads text alone",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools", "this server runs no tools"),
        ({"tools": [{"type": "function"}]}, "tools", "length"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "need function with a name"),
        ({"text": {"format": {"type": "xml"}}}, "text", "need one of text, json_object, json_schema"),
        ({"text": {"verbosity": "low"}}, "text", "text.verbosity is not supported"),
        ({"max_output_tokens": 0}, "max_output_tokens", "Expected `int` >= 1"),
    ],
)
def test_unsupported_requests_are_refused(
    client: openai.OpenAI, options: dict[str, Any], param: str, reason: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, **options)
    assert (caught.value.param, reason in str(caught.value)) == (param, True), str(caught.value)


def test_harmless_fields_are_named(client: openai.OpenAI) -> None:
    raw = client.responses.with_raw_response.create(
        model="any", input="hi", user="me", store=False, include=["reasoning.encrypted_content"], truncation="disabled"
    )
    assert raw.headers["X-Hocket-Ignored"] == "user"
    other = client.responses.with_raw_response.create(model="any", input="hi", extra_body={"timings_per_token": True})
    assert other.headers["X-Hocket-Ignored"] == "timings_per_token"
    assert raw.parse().output_text == "the answer"
