"""Chats, streams, tools and embeddings through LiteLLM, which CI does not install."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from ...given.fakes.fake_service import FakeService, RunningServer, serve

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # the import would fetch the prices of models
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its own import warns
    litellm = pytest.importorskip("litellm")

pytestmark = pytest.mark.filterwarnings("ignore")  # it warns of its own types

USER_MESSAGES = [{"role": "user", "content": "hi"}]
CITY = {"city": {"enum": ["Rome", "Oslo"]}}
WEATHER_SCHEMA = {"type": "object", "properties": CITY, "required": ["city"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER_SCHEMA}}
OSLO_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city":"Oslo"}}\n</tool_call>'
PROVIDERS = pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])


@pytest.fixture(name="server", scope="module")
def litellm_server() -> Iterator[RunningServer]:
    with serve(FakeService(), api_keys=("secret",)) as running:
        yield running


def list_address(server: RunningServer, provider: str) -> dict[str, Any]:
    """Return the arguments of LiteLLM that name the server."""
    url = server.url if provider == "anthropic" else f"{server.url}/v1"
    return {"model": f"{provider}/any", "api_base": url, "api_key": "secret", "num_retries": 0}


def chat(server: RunningServer, provider: str, answer: str, messages: list = USER_MESSAGES, **options: Any):
    """Return the result of a chat in which the server answers `answer`."""
    server.service.answer = answer
    return litellm.completion(messages=messages, **list_address(server, provider), **options)


@PROVIDERS
def test_a_stream_joins_to_the_answer(server: RunningServer, provider: str) -> None:
    answer = chat(server, provider, "the answer")
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("the answer", "stop")
    assert (answer.usage.completion_tokens, answer.usage.prompt_tokens_details.cached_tokens) == (8, 1)
    chunks = list(chat(server, provider, "the answer", stream=True, stream_options={"include_usage": True}))
    assert "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices) == "the answer"
    (usage,) = [chunk.usage for chunk in chunks if chunk.get("usage")]
    assert usage.completion_tokens == 8


@PROVIDERS
def test_a_tool_is_called_and_its_result_is_read(server: RunningServer, provider: str) -> None:
    answer = f"<think>hm</think>I look.{OSLO_CALL}"
    whole = chat(server, provider, answer, tools=[TOOL])
    streamed = litellm.stream_chunk_builder(list(chat(server, provider, answer, tools=[TOOL], stream=True)))
    for each in (whole, streamed):
        message, function = each.choices[0].message, each.choices[0].message.tool_calls[0].function
        assert (message.content, message.reasoning_content) == ("I look.", "hm")
        assert (function.name, json.loads(function.arguments)) == ("weather", {"city": "Oslo"})
        assert each.choices[0].finish_reason == "tool_calls"
    message = whole.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sun"}
    answer = chat(server, provider, "fine", [*USER_MESSAGES, message, result], tools=[TOOL])
    assert answer.choices[0].message.content == "fine"
    prompt = server.service.tokenizer.decode(server.service.requests[-1].prompt, special=True)
    assert prompt.endswith('I look.weather({"city": "Oslo"})<|tool|>sun<|assistant|>')


@PROVIDERS
def test_a_required_tool_is_called(server: RunningServer, provider: str) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    text = '{"name":"weather","arguments":{"city":"Oslo"}}'
    answer = chat(server, provider, text, tools=[TOOL], tool_choice=choice, temperature=0)
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Oslo"}


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_texts_are_embedded_and_follow_schemas(server: RunningServer, provider: str) -> None:
    data = litellm.embedding(input=["hi", "the"], **list_address(server, provider)).data
    assert [(each["index"], len(each["embedding"])) for each in data] == [(0, 4), (1, 4)]
    assert data[0]["embedding"] != data[1]["embedding"]
    format = {"type": "json_schema", "json_schema": {"name": "city", "schema": WEATHER_SCHEMA, "strict": True}}
    answer = chat(server, provider, '{"city":"Rome"}', response_format=format, temperature=0)
    assert json.loads(answer.choices[0].message.content) == {"city": "Rome"}


def test_other_endpoints_answer(server: RunningServer) -> None:
    server.service.answer = "the answer"
    options = list_address(server, "openai")
    text = litellm.text_completion(prompt="hi", **{**options, "model": "text-completion-openai/any"})
    assert text.choices[0].text == "the answer"
    assert litellm.responses(input="hi", **options).output[0].content[0].text == "the answer"
    ranked = litellm.rerank("hosted_vllm/any", "he", ["x", "he"], api_base=server.url, api_key="secret").results
    assert [each["index"] for each in ranked] == [1, 0]


def test_errors_have_their_classes(server: RunningServer) -> None:
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(messages=USER_MESSAGES, **{**list_address(server, "openai"), "api_key": "wrong"})
    with pytest.raises(litellm.ContextWindowExceededError, match="2048 tokens"):
        chat(server, "openai", "the answer", [{"role": "user", "content": "hi" * 3000}])
