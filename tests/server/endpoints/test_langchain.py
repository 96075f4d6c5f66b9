"""Chats, streams, tools and embeddings through LangChain."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ...given.fakes.fake_service import FakeService, RunningServer, serve

langchain_openai = pytest.importorskip("langchain_openai")

WEATHER_SCHEMA = {
    "title": "weather",
    "description": "The weather of a city",
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
OSLO_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city":"Oslo"}}\n</tool_call>'


@pytest.fixture(name="server", scope="module")
def langchain_server() -> Iterator[RunningServer]:
    with serve(FakeService(), api_keys=("secret",)) as running:
        yield running


def make_chat(server: RunningServer, answer: str, **options: Any):
    """Return a chat model of LangChain, to which the server answers `answer`."""
    server.service.answer = answer
    server.service.requests.clear()
    address = {"base_url": f"{server.url}/v1", "api_key": "secret", "max_retries": 0}
    return langchain_openai.ChatOpenAI(model="any", temperature=0, **address, **options)


def read_last_prompt(server: RunningServer) -> str:
    return server.service.tokenizer.decode(server.service.requests[-1].prompt, special=True)


def test_an_answer_has_its_counts(server: RunningServer) -> None:
    chat = make_chat(server, "the answer")
    answer = chat.invoke([("system", "be kind"), ("human", "hi")], stop=["swer"])
    assert (answer.content, answer.response_metadata["finish_reason"]) == ("the an", "stop")
    assert read_last_prompt(server) == "<|system|>be kind<|user|>hi<|assistant|>"
    assert chat.invoke("hi").usage_metadata["input_token_details"]["cache_read"] == 1
    assert [each.content for each in chat.batch(["a", "b", "c"])] == ["the answer"] * 3


def test_a_stream_joins_to_the_answer(server: RunningServer) -> None:
    chunks = list(make_chat(server, "the answer", stream_usage=True).stream("hi"))
    assert "".join(chunk.content for chunk in chunks) == "the answer"
    assert sum(bool(chunk.content) for chunk in chunks) == 8
    (usage,) = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert (usage["input_tokens"], usage["output_tokens"]) == (4, 8)


def test_a_tool_is_called_and_its_result_is_read(server: RunningServer) -> None:
    chat = make_chat(server, f"I look.{OSLO_CALL}{OSLO_CALL}").bind_tools([WEATHER_SCHEMA])
    whole = chat.invoke("hi")
    first, *rest = chat.stream("hi")
    streamed = sum(rest, first)
    for message in (whole, streamed):
        assert message.content == "I look."
        assert [(call["name"], call["args"]) for call in message.tool_calls] == [("weather", {"city": "Oslo"})] * 2
    results = [{"role": "tool", "content": "sun", "tool_call_id": call["id"]} for call in whole.tool_calls]
    server.service.answer = "fine"
    assert chat.invoke([("human", "hi"), whole, *results]).content == "fine"
    call = 'weather({"city": "Oslo"})'
    assert read_last_prompt(server).endswith(f"I look.{call}{call}<|tool|>sun<|tool|>sun<|assistant|>")


@pytest.mark.parametrize("choice", ["any", "weather"])
def test_a_required_tool_is_called(server: RunningServer, choice: str) -> None:
    chat = make_chat(server, "no call").bind_tools([WEATHER_SCHEMA], tool_choice=choice)
    (call,) = chat.invoke("hi").tool_calls
    assert call["name"] == "weather"
    assert call["args"]["city"] in ("Rome", "Oslo")


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_an_answer_has_the_structure_of_a_schema(server: RunningServer, method: str) -> None:
    answer = '{"name":"weather","arguments":{"city":"Rome"}}' if method == "function_calling" else '{"city":"Rome"}'
    chat = make_chat(server, answer).with_structured_output(WEATHER_SCHEMA, method=method)
    assert chat.invoke("hi") == {"city": "Rome"}
    assert list(chat.stream("hi"))[-1] == {"city": "Rome"}


def test_the_responses_api_keeps_thoughts_and_calls(server: RunningServer) -> None:
    chat = make_chat(server, f"<think>hm</think>I look.{OSLO_CALL}", use_responses_api=True).bind_tools(
        [WEATHER_SCHEMA]
    )
    answer = chat.invoke("hi")
    first, *rest = chat.stream("hi")
    streamed = sum(rest, first)
    for message in (answer, streamed):
        assert (message.text, message.tool_calls[0]["args"]) == ("I look.", {"city": "Oslo"})
    assert answer.content[0]["content"][0]["text"] == "hm"
    server.service.answer = "fine"
    result = {"role": "tool", "content": "sun", "tool_call_id": answer.tool_calls[0]["id"]}
    assert chat.invoke([("human", "hi"), answer, result]).text == "fine"
    assert read_last_prompt(server).endswith('I look.weather({"city": "Oslo"})<|tool|>sun<|assistant|>')


def test_texts_are_continued_and_embedded(server: RunningServer) -> None:
    server.service.answer = "the answer"
    options = {"base_url": f"{server.url}/v1", "api_key": "secret", "model": "any", "max_retries": 0}
    model = langchain_openai.OpenAI(**options)
    assert model.invoke("hi") == "".join(model.stream("hi")) == "the answer"
    embeddings = langchain_openai.OpenAIEmbeddings(check_embedding_ctx_length=False, **options)
    vectors = embeddings.embed_documents(["hi", "the"])
    assert [len(vector) for vector in vectors] == [4, 4]
    assert embeddings.embed_query("the") == vectors[1] != vectors[0]


def test_a_wrong_key_and_a_failure_are_raised(server: RunningServer) -> None:
    chat = make_chat(server, "the answer")
    with pytest.raises(Exception, match="API key is missing or wrong"):
        chat.model_copy(update={"client": chat.root_client.with_options(api_key="no").chat.completions}).invoke("hi")
    server.service.fails_after = 1
    try:
        with pytest.raises(Exception, match="lost a device"):
            list(chat.stream("hi"))
    finally:
        server.service.fails_after = None
