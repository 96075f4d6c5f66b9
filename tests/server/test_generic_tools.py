"""Tools with chat templates that have none, or that have no markers of calls."""

from __future__ import annotations

import pytest

from ..given.fakes.fake_service import CHAT_TEMPLATE, FakeService, serve

USER_MESSAGES = [{"role": "user", "content": "hi"}]
CITY_SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
CITY_TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY_SCHEMA}}
TIME_TOOL = {"type": "function", "function": {"name": "time"}}
CITY_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city":"Oslo"}}\n</tool_call>'

PLAIN_TEMPLATE = """{%- for message in messages %}<|{{ message.role }}|>{{ message.content }}
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
NO_SYSTEM_TEMPLATE = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('there is no system role') }}{% endif %}" + PLAIN_TEMPLATE
)


@pytest.mark.parametrize(("template", "role"), [(PLAIN_TEMPLATE, "system"), (NO_SYSTEM_TEMPLATE, "user")])
def test_a_template_without_tools_describes_them_as_text(template: str, role: str) -> None:
    with serve(FakeService(f"I look.\n{CITY_CALL}", template=template)) as server:
        body = {"messages": USER_MESSAGES, "tools": [CITY_TOOL]}
        choice = server.post("/v1/chat/completions", body).json()["choices"][0]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "I look.")
        call = choice["message"]["tool_calls"][0]
        assert call["function"] == {"name": "weather", "arguments": '{"city":"Oslo"}'}
        (request,) = server.service.requests
        prompt = server.service.tokenizer.decode(request.prompt, special=True)
        assert prompt.startswith(f"<|{role}|>You can call functions.")
        assert '{"name": "weather", "parameters": {"type": "object"' in prompt
        history = [*USER_MESSAGES, choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "rain"}]
        rendered = server.post("/apply-template", {"messages": history}).json()["prompt"]
        assert rendered == (
            '<|user|>hi<|assistant|>I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n'
            "</tool_call><|user|><tool_response>\nrain\n</tool_response><|assistant|>"
        )


def test_a_forced_call_works_with_a_template_without_tools() -> None:
    with serve(FakeService('{"name":"weather","arguments":{"city":"Rome"}}', template=PLAIN_TEMPLATE)) as server:
        body = {"messages": USER_MESSAGES, "tools": [CITY_TOOL], "tool_choice": "required", "temperature": 0}
        message = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]
        assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city":"Rome"}'}


def test_a_template_without_marks_has_calls_that_are_whole_answers() -> None:
    service = FakeService('{"name": "time", "parameters": {}}', template=CHAT_TEMPLATE.replace("<tool_call>", ""))
    with serve(service) as server:
        body = {"messages": USER_MESSAGES, "tools": [TIME_TOOL]}
        choice = server.post("/v1/chat/completions", body).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "time", "arguments": "{}"}
