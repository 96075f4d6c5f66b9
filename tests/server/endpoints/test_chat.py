"""Chat completions through the client of OpenAI."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from typing import Any

import pytest

from hocket.server.grammars import GrammarCache

from ...given.fakes.fake_service import FakeService, RunningServer, serve

openai = pytest.importorskip("openai")

ONE_MESSAGE = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/City"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"City": {"enum": ["Rome", "Oslo"]}},
        },
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city":"Oslo"}}\n</tool_call>'


@pytest.fixture(name="server", scope="module")
def chat_server() -> Iterator[RunningServer]:
    with serve(FakeService()) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    server.service.answer = "the answer"
    server.service.requests.clear()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as connected:
        yield connected


def create(client: openai.OpenAI, **options: Any):
    return client.chat.completions.create(model="any", messages=ONE_MESSAGE, **options)


def read_stream(client: openai.OpenAI, **options: Any) -> tuple[str, list]:
    chunks = list(create(client, stream=True, **options))
    return "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices), chunks


def test_an_answer_has_its_counts(client: openai.OpenAI) -> None:
    answer = create(client)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "the answer", "stop")
    assert answer.id.startswith("chatcmpl-")
    assert (answer.model, answer.system_fingerprint) == ("fake-model", "b0-fake")
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (4, 8, 12)
    assert usage.prompt_tokens_details.cached_tokens == 1
    assert answer.timings["predicted_n"] == 8
    assert answer.timings["predicted_per_second"] == 3.5


def test_a_stream_has_the_same_text(client: openai.OpenAI) -> None:
    text, chunks = read_stream(client)
    assert text == "the answer"
    first, last = chunks[0].choices[0], chunks[-1].choices[0]
    assert (first.delta.role, first.delta.content) == ("assistant", None)
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert (last.finish_reason, last.delta.content) == ("stop", None)
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert all(chunk.choices for chunk in chunks)


def test_usage_is_a_chunk_without_choices_if_it_is_asked_for(client: openai.OpenAI) -> None:
    _, chunks = read_stream(client, stream_options={"include_usage": True})
    assert [chunk.choices == [] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].usage.completion_tokens == 8
    assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.parametrize(
    ("options", "text", "reason"),
    [
        ({"max_tokens": 3}, "the a", "length"),
        ({"max_completion_tokens": 3}, "the a", "length"),
        ({"stop": "swe"}, "the an", "stop"),
        ({"stop": ["zz", "answers"]}, "the answer", "stop"),
        ({"stop": "the"}, "", "stop"),
    ],
)
def test_limits_and_stop_strings_end_an_answer(
    client: openai.OpenAI, options: dict[str, object], text: str, reason: str
) -> None:
    choice = create(client, **options).choices[0]
    assert (choice.message.content, choice.finish_reason) == (text, reason)
    streamed, chunks = read_stream(client, **options)
    assert (streamed, chunks[-1].choices[0].finish_reason) == (text, reason)


def test_a_stop_string_ends_the_request_in_the_engine(client: openai.OpenAI, server: RunningServer) -> None:
    server.service.answer = "one stop " + "two " * 300
    answer = create(client, stop="stop")
    assert answer.choices[0].message.content == "one "
    assert answer.usage.completion_tokens == 5  # "stop" is one token
    assert server.service.requests[0].id in server.service.cancelled


def test_several_choices_have_seeds_of_their_own(client: openai.OpenAI, server: RunningServer) -> None:
    answer = create(client, n=3, seed=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [request.params.seed for request in server.service.requests] == [5, 6, 7]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 24)
    _, chunks = read_stream(client, n=2)
    for i in range(2):
        parts = [c for chunk in chunks for c in chunk.choices if c.index == i]
        assert "".join(c.delta.content or "" for c in parts) == "the answer"
        assert (parts[0].delta.role, parts[-1].finish_reason) == ("assistant", "stop")


def test_more_choices_than_slots_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="4 slots"):
        create(client, n=5)


def test_logprobs_join_to_the_text(client: openai.OpenAI, server: RunningServer) -> None:
    server.service.answer = "é 😀 stop"
    options = {"logprobs": True, "top_logprobs": 2, "stop": "stop"}
    whole = create(client, **options).choices[0].logprobs.content
    _, chunks = read_stream(client, **options)
    streamed = [t for chunk in chunks for c in chunk.choices if c.logprobs for t in c.logprobs.content]
    for tokens in (whole, streamed):
        assert b"".join(bytes(token.bytes) for token in tokens).decode() == "é 😀 "
        assert {token.logprob for token in tokens} == {-0.25}
        assert all(len(token.top_logprobs) == 2 for token in tokens)
    assert whole[0].token == "bytes:\\xc3"
    assert create(client).choices[0].logprobs is None


def test_sampling_options_reach_the_engine(client: openai.OpenAI, server: RunningServer) -> None:
    extra = {"top_k": -1, "min_p": 0.2, "repeat_penalty": 1.5, "repeat_last_n": -1, "cache_prompt": False}
    bias = {"65": -100, "z": 3}
    create(client, temperature=0, top_p=0, seed=-7, logit_bias=bias, presence_penalty=1, extra_body=extra)
    request = server.service.requests[0]
    sampling = request.params.sampling
    assert (sampling.temperature, sampling.top_k, sampling.min_p, sampling.repeat_penalty) == (0, 0, 0.2, 1.5)
    assert 0 < sampling.top_p < 1e-6
    assert (sampling.presence_penalty, sampling.repeat_last_n) == (1, -1)
    (z,) = server.service.tokenizer.encode_continuation("z")
    assert dict(sampling.bias) == {65: -100, z: 3}
    assert request.params.seed == 2**64 - 7
    assert not request.uses_cache
    create(client, extra_body={"logit_bias": [[65, False]], "ignore_eos": True, "max_tokens": 12})
    params = server.service.requests[1].params
    assert dict(params.sampling.bias) == {65: -math.inf, server.service.tokenizer.eos_id: -math.inf}
    assert not params.end_tokens


def test_a_bias_outside_of_the_vocabulary_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="token 99999"):
        create(client, logit_bias={"99999": 1})


def test_ignored_fields_are_named_in_a_header(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model="m", messages=ONE_MESSAGE, user="me", store=False)
    assert raw.headers["x-hocket-ignored"] == "user"


# ----------------------------------------------------------------------------------------------------- constrained text


def test_a_response_format_constrains_the_text(client: openai.OpenAI, server: RunningServer) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 5}}, "required": ["a"], "additionalProperties": False}
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert json.loads(create(client, response_format=format, temperature=0).choices[0].message.content) == {"a": 5}
    server.service.answer = '{"b":[1]}'
    for kind in ("json_object", "text"):
        assert create(client, response_format={"type": kind}).choices[0].message.content == '{"b":[1]}'


def test_grammars_are_compiled_once(client: openai.OpenAI, server: RunningServer) -> None:
    for _ in range(2):
        answer = create(client, temperature=0, extra_body={"grammar": 'root ::= "a"{5,5}'})
        assert answer.choices[0].message.content == "aaaaa"
    first, second = (request.params.grammar for request in server.service.requests)
    assert first is second


@pytest.mark.parametrize(
    "extra",
    [
        {"grammar": "root ::= this is (not valid"},
        {"json_schema": {"type": "hiccup"}},
        {"response_format": {"type": "sound"}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_object"}, "grammar": 'root ::= "a"'},
        {"json_schema": {}, "grammar": 'root ::= "a"'},
    ],
)
def test_a_wrong_grammar_is_refused_before_a_stream_begins(client: openai.OpenAI, extra: dict[str, object]) -> None:
    with pytest.raises(openai.BadRequestError):
        create(client, stream=True, extra_body=extra)


def test_a_grammar_that_compiles_too_slowly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GrammarCache, "compile_grammar", lambda *args: time.sleep(0.5))
    with serve(grammar_seconds=0.05) as server:
        response = server.post("/v1/chat/completions", {"messages": ONE_MESSAGE, "grammar": 'root ::= "a"'})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "grammar")
        assert "took longer than 0.05 s" in response.json()["error"]["message"]


def test_keywords_that_a_schema_loses_are_named(client: openai.OpenAI, server: RunningServer) -> None:
    schema = {"type": "array", "items": {"const": 1}, "uniqueItems": True, "minItems": 1}
    body: dict[str, object] = {"messages": ONE_MESSAGE, "max_tokens": 3}
    response = server.post("/v1/chat/completions", {**body, "json_schema": schema})
    assert "uniqueItems" in response.headers["x-hocket-ignored"]
    format = {"type": "json_schema", "json_schema": {"schema": schema, "strict": True}}
    refused = server.post("/v1/chat/completions", {**body, "response_format": format})
    assert (refused.status_code, "uniqueItems" in refused.text) == (400, True)


# ------------------------------------------------------------------------------------------------------------- messages


def show_prompt(server: RunningServer, **body: object) -> str:
    response = server.post("/apply-template", {"messages": ONE_MESSAGE, **body})
    assert response.status_code == 200, response.text
    return str(response.json()["prompt"])


def test_messages_are_rendered(server: RunningServer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be"}, {"role": "user", "content": parts}]
    assert show_prompt(server, messages=messages) == "<|system|>be<|user|>a\nb<|assistant|>"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        *ONE_MESSAGE,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ]
    assert show_prompt(server, messages=messages) == '<|user|>hi<|assistant|>f({"a": 1})<|tool|>2<|assistant|>'
    assert show_prompt(server, chat_template_kwargs={"enable_thinking": True}).endswith("<|assistant|><think>")
    assert show_prompt(server, add_generation_prompt=False) == "<|user|>hi"


def test_an_answer_of_the_assistant_is_continued(server: RunningServer) -> None:
    messages = [*ONE_MESSAGE, {"role": "assistant", "content": "Well"}]
    assert show_prompt(server, messages=messages) == "<|user|>hi<|assistant|>Well"
    extra = {"add_generation_prompt": False, "continue_final_message": True}
    assert show_prompt(server, messages=messages, **extra) == "<|user|>hi<|assistant|>Well"
    both = {"messages": messages, "add_generation_prompt": True, "continue_final_message": True}
    assert server.post("/v1/chat/completions", both).status_code == 400
    complete = show_prompt(server, messages=messages, continue_final_message=False)
    assert complete == "<|user|>hi<|assistant|>Well<|assistant|>"


@pytest.mark.parametrize(
    "messages",
    [
        [{}],
        [{"role": 123}],
        [{"role": "wizard", "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": 123}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": "x", "tool_calls": []}, {"role": "user", "content": "x", "tool_calls": 1}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
        [{"role": "assistant", "tool_calls": [1]}],
        [*ONE_MESSAGE, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}],
        [{"role": "assistant", "content": "a"}],
    ],
)
def test_a_malformed_message_is_refused(server: RunningServer, messages: list[dict[str, object]]) -> None:
    response = server.post("/v1/chat/completions", {"messages": messages, "stream": True})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_the_tokens_of_a_chat_are_counted(server: RunningServer) -> None:
    response = server.post("/v1/chat/completions/input_tokens", {"messages": ONE_MESSAGE})
    assert response.json()["input_tokens"] == 4


def test_variables_of_the_template_have_defaults() -> None:
    with serve(FakeService(), template_variables={"enable_thinking": True}) as server:
        assert show_prompt(server).endswith("<think>")
        assert not show_prompt(server, chat_template_kwargs={"enable_thinking": False}).endswith("<think>")


def test_times_are_reported_with_every_chunk(client: openai.OpenAI) -> None:
    _, chunks = read_stream(client, extra_body={"timings_per_token": True, "return_progress": True})
    counts = [chunk.timings["predicted_n"] for chunk in chunks if getattr(chunk, "timings", None)]
    assert counts == [0, *range(1, 9), 8]
    assert chunks[0].prompt_progress == {"total": 4, "cache": 4, "processed": 4}


def test_reserved_variables_of_the_template_are_refused(server: RunningServer) -> None:
    body = {"messages": ONE_MESSAGE, "chat_template_kwargs": {"messages": []}}
    assert server.post("/v1/chat/completions", body).status_code == 400


# --------------------------------------------------------------------------------------------------- thoughts and tools


def test_thoughts_are_apart_from_the_answer(client: openai.OpenAI, server: RunningServer) -> None:
    server.service.answer = "<think>hm 😀</think>\n\nyes"
    message = create(client).choices[0].message
    assert (message.content, message.reasoning_content) == ("yes", "hm 😀")
    _, chunks = read_stream(client)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "hm 😀"
    assert "".join(delta.content or "" for delta in deltas) == "yes"
    raw = create(client, extra_body={"reasoning_format": "none"}).choices[0].message
    assert raw.content == server.service.answer
    server.service.answer = "hm</think>yes"
    message = create(client, extra_body={"chat_template_kwargs": {"enable_thinking": True}}).choices[0].message
    assert (message.content, message.reasoning_content) == ("yes", "hm")


def test_a_grammar_begins_behind_the_thoughts(client: openai.OpenAI, server: RunningServer) -> None:
    extra = {"grammar": 'root ::= "ok"', "chat_template_kwargs": {"enable_thinking": True}}
    assert create(client, temperature=0, extra_body=extra).choices[0].message.content == "ok"
    prompt = server.service.tokenizer.decode(server.service.requests[0].prompt, special=True)
    assert prompt.endswith("<think>\n</think>\n\n")


def test_a_tool_is_called(client: openai.OpenAI, server: RunningServer) -> None:
    server.service.answer = f"<think>hm</think>I look.\n{CALL}\n{CALL}"
    choice = create(client, tools=[WEATHER]).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    calls = [(call.type, call.function.name, call.function.arguments) for call in choice.message.tool_calls]
    assert calls == [("function", "weather", '{"city":"Oslo"}')] * 2
    assert len({call.id for call in choice.message.tool_calls}) == 2
    choice = create(client, tools=[WEATHER], parallel_tool_calls=False).choices[0]
    assert len(choice.message.tool_calls) == 1


def test_the_arguments_of_a_call_are_streamed(client: openai.OpenAI, server: RunningServer) -> None:
    server.service.answer = CALL
    text, chunks = read_stream(client, tools=[WEATHER])
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert (deltas[0].function.name, deltas[0].index, deltas[0].type) == ("weather", 0, "function")
    assert all(delta.id is None for delta in deltas[1:])
    assert "".join(delta.function.arguments for delta in deltas) == '{"city":"Oslo"}'
    assert len(deltas) > 5
    assert (text, chunks[-1].choices[0].finish_reason) == ("", "tool_calls")


def test_a_call_that_reaches_the_limit_ends_with_length(client: openai.OpenAI, server: RunningServer) -> None:
    server.service.answer = CALL
    choice = create(client, tools=[WEATHER], max_tokens=44).choices[0]
    assert choice.finish_reason == "length"
    assert '{"city":"Oslo"}'.startswith(choice.message.tool_calls[0].function.arguments)


@pytest.mark.parametrize(
    "tool_choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=["required", "named"]
)
def test_a_required_call_follows_the_schema(client: openai.OpenAI, server: RunningServer, tool_choice: object) -> None:
    server.service.answer = '{"name":"weather","arguments":{"city":"Paris"}}'  # no such city
    choice = create(client, tools=[TIME, WEATHER], tool_choice=tool_choice, temperature=0).choices[0]
    (call,) = choice.message.tool_calls
    assert (call.function.name, choice.finish_reason, choice.message.content) == ("weather", "tool_calls", None)
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    prompt = server.service.tokenizer.decode(server.service.requests[0].prompt, special=True)
    assert prompt.endswith("<|assistant|><tool_call>\n")


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_without_arguments_yet_has_no_content(server: RunningServer, stream: bool) -> None:
    server.service.answer = '{"name":"weather","arguments":{"city":"Rome"}}'
    body = {"messages": ONE_MESSAGE, "tools": [WEATHER], "tool_choice": "required", "temperature": 0, "max_tokens": 12}
    answer = server.post("/v1/chat/completions", {**body, "stream": stream})
    if stream:
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        deltas = [event["choices"][0]["delta"] for event in events]
        assert not any(delta.get("content") or delta.get("tool_calls") for delta in deltas)
        assert events[-1]["choices"][0]["finish_reason"] == "length"
    else:
        (choice,) = answer.json()["choices"]
        assert (choice["message"], choice["finish_reason"]) == ({"role": "assistant", "content": None}, "length")


def test_a_function_without_parameters_gets_no_arguments(client: openai.OpenAI, server: RunningServer) -> None:
    server.service.answer = '{"name":"time","arguments":{"zone":1}}'
    (call,) = create(client, tools=[TIME], tool_choice="required", temperature=0).choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("time", {})


def test_no_tool_is_called_if_none_may_be(client: openai.OpenAI, server: RunningServer) -> None:
    server.service.answer = CALL
    choice = create(client, tools=[WEATHER], tool_choice="none").choices[0]
    assert (choice.message.content, choice.finish_reason, choice.message.tool_calls) == (CALL, "stop", None)
    assert "weather" not in server.service.tokenizer.decode(server.service.requests[0].prompt, special=True)


@pytest.mark.parametrize(
    "options",
    [
        {"tool_choice": "required"},
        {"tool_choice": "sometimes", "tools": [TIME]},
        {"tool_choice": {"type": "function", "function": {"name": "other"}}, "tools": [TIME]},
        {"tools": [{"type": "retrieval", "function": {"name": "f"}}]},
        {"tools": [{"type": "function"}]},
        {"tools": [TIME], "response_format": {"type": "json_object"}},
        {"tools": [TIME], "extra_body": {"grammar": 'root ::= "a"'}},
        {"top_logprobs": 2},
        {"max_tokens": 0},
        {"max_tokens": 1, "max_completion_tokens": 2},
    ],
)
def test_contradictions_are_refused(client: openai.OpenAI, options: dict[str, object]) -> None:
    with pytest.raises(openai.BadRequestError):
        create(client, **options)
