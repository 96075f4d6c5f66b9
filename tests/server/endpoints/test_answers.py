"""Thoughts, text and tool calls of an answer: the same however the answer is size into parts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hocket.server.bodies.answers import AnswerDelta, AnswerParser, AnswerParserOptions, merge_deltas

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "text": "} \\" {"}}\n</tool_call>'
ARGUMENTS = '{"a": 1, "text": "} \\" {"}'


def parse(parts: list[str], **options: Any) -> tuple[list[AnswerDelta], AnswerParser]:
    parser = AnswerParser(AnswerParserOptions(**options))
    deltas = [delta for part in parts for delta in parser.feed(part)]
    return merge_deltas([*deltas, *parser.finish()]), parser


def parse_in_parts(text: str, **options: Any) -> tuple[list[AnswerDelta], AnswerParser]:
    """Return the deltas of a text; check that they are equal for each way to divide it in two."""
    whole = parse([text], **options)
    for size in range(len(text) + 1):
        assert parse([text[:size], text[size:]], **options)[0] == whole[0], text[:size]
    assert parse(list(text), **options)[0] == whole[0]
    return whole


@pytest.mark.parametrize(
    ("text", "options", "want"),
    [
        ("plain", {}, [("content", "plain")]),
        ("<think>a</think>b", {}, [("content", "<think>a</think>b")]),
        ("<think>\nhm\n</think>\n\nyes", {"has_thoughts": True}, [("reasoning", "hm"), ("content", "yes")]),
        ("<thin", {"has_thoughts": True}, [("content", "<thin")]),
        ("<b>x</b>", {"has_thoughts": True}, [("content", "<b>x</b>")]),
        ("hm </thin </think>yes", {"opens_thought": True}, [("reasoning", "hm </thin"), ("content", "yes")]),
        ("size in the thought", {"opens_thought": True}, [("reasoning", "size in the thought")]),
        ("<think></think>\n\nyes", {"has_thoughts": True}, [("content", "yes")]),
        ("a <tool", {"has_calls": True}, [("content", "a <tool")]),
        ("", {"has_thoughts": True, "has_calls": True}, []),
    ],
)
def test_thoughts_and_text_are_separated(text: str, options: dict[str, bool], want: list[tuple[str, str]]) -> None:
    assert [(delta.kind, delta.text) for delta in parse_in_parts(text, **options)[0]] == want


def test_the_arguments_of_a_call_are_passed_on_verbatim() -> None:
    deltas, parser = parse_in_parts(CALL, has_calls=True)
    assert deltas == [AnswerDelta("call", "add", 0), AnswerDelta("arguments", ARGUMENTS, 0)]
    assert parser.call_count == 1


def test_several_calls_follow_text_and_thoughts() -> None:
    deltas, parser = parse_in_parts(f"<think>hm</think>I add.\n{CALL}\n{CALL}", has_thoughts=True, has_calls=True)
    kinds = [(delta.kind, delta.index) for delta in deltas]
    assert kinds == [("reasoning", 0), ("content", 0), ("call", 0), ("arguments", 0), ("call", 1), ("arguments", 1)]
    assert parser.call_count == 2
    assert deltas[1].text.strip() == "I add."


def test_the_number_of_calls_is_limited() -> None:
    deltas, parser = parse_in_parts(f"{CALL}{CALL}", has_calls=True, max_calls=1)
    assert parser.call_count == 1
    assert [delta.kind for delta in deltas] == ["call", "arguments", "content"]


@pytest.mark.parametrize(
    "call",
    [
        '{"arguments": {"a": 1}, "name": "f"}',
        '{"name": "f", "arguments": "{\\"a\\": 1}"}',
        '{"name":"f","parameters":{"a": 1}}',
        '{"name": "f", "id": 3, "arguments": {"a": 1}}',
    ],
)
def test_the_parts_of_a_call_come_in_any_form(call: str) -> None:
    deltas, parser = parse_in_parts(f"<tool_call>{call}</tool_call>", has_calls=True)
    assert (deltas[0].text, json.loads(deltas[1].text), parser.call_count) == ("f", {"a": 1}, 1)


@pytest.mark.parametrize("arguments", ["{}", "[]", "null", "5", "true"])
def test_arguments_may_be_any_value(arguments: str) -> None:
    deltas, parser = parse_in_parts(f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>', has_calls=True)
    assert (deltas[1].text.strip(), parser.call_count) == (arguments, 1)


def test_a_call_of_qwen_coder_has_typed_values() -> None:
    parameters = "".join(f"<parameter={name}>\n1\n</parameter>\n" for name in "ab")
    text = f"<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>"
    deltas, _ = parse_in_parts(text, has_calls=True, text_parameters={"f": frozenset("b")})
    assert (deltas[0].text, json.loads(deltas[1].text)) == ("f", {"a": 1, "b": "1"})


@pytest.mark.parametrize("text", ["<tool_call>no call</tool_call>", "<tool_call>{}</tool_call>", "<tool_call>{1}"])
def test_what_is_no_call_stays_text(text: str) -> None:
    deltas, parser = parse_in_parts(text, has_calls=True)
    assert ("".join(delta.text for delta in deltas), parser.call_count) == (text, 0)


@pytest.mark.parametrize("size", range(len(CALL)))
def test_an_unfinished_call_is_not_complete(size: int) -> None:
    deltas, parser = parse([CALL[:size]], has_calls=True)
    complete = CALL.index(ARGUMENTS) + len(ARGUMENTS)
    assert parser.call_count == (size >= complete)
    passed = "".join(delta.text for delta in deltas if delta.kind == "arguments")
    assert ARGUMENTS.startswith(passed)


def test_a_whole_answer_may_be_a_call() -> None:
    text = f'{{"name": "add", "arguments": {ARGUMENTS}}}'
    for option in ("is_call", "has_bare_calls"):
        deltas, parser = parse_in_parts(text, **{option: True})
        assert (deltas, parser.call_count) == (
            [AnswerDelta("call", "add", 0), AnswerDelta("arguments", ARGUMENTS, 0)],
            1,
        )
    deltas, parser = parse_in_parts('{"other": 1}', has_bare_calls=True)
    assert (deltas, parser.call_count) == ([AnswerDelta("content", '{"other": 1}')], 0)
