"""Grammars that begin inside a text: free text stays free, and an object after a trigger follows its schema."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest

from hocket.frontends.generation.grammar import Grammar
from hocket.frontends.generation.lazy_grammar import LazyGrammarState, LazyJsonGrammar
from hocket.frontends.gguf.tokenization.tokenizer import Tokenizer, tokenizer_from_metadata

from ...given.fakes.fake_service import build_metadata

TOKENIZER = tokenizer_from_metadata(build_metadata())
CITY_SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(name="lazy", scope="module")
def lazy_grammar() -> LazyJsonGrammar:
    return LazyJsonGrammar(TOKENIZER, Grammar(TOKENIZER, json_schema=CITY_SCHEMA, allows_spaces=True), "<tool_call>")


def write_under_grammar(state: LazyGrammarState, text: str) -> str:
    """Let a model write a text at temperature 0, and return the text that it writes under the grammar."""
    written: list[int] = []
    for token in TOKENIZER.encode_continuation(text):
        logits = -np.arange(TOKENIZER.n_tokens, dtype=np.float32)
        logits[token] = 50
        chosen = int(state.mask_logits(logits).argmax())
        assert state.accept_token_and_can_continue(chosen)
        written.append(chosen)
    return TOKENIZER.decode(written, special=True)


@pytest.mark.parametrize(
    "text",
    [
        "I say {no} <tool> and <tool_cal",
        'a <tool_call>\n{"city": "Oslo"}\n</tool_call> b <tool_call>{ "city":"Rome" }</tool_call>',
        "<tool_call>\n<function=f><parameter=a>{}</parameter></function>",
        '<think>I call <tool_call>{"town": 1}</tool_call></think> {"town": 1}',
    ],
    ids=["text", "valid", "other form", "thought"],
)
def test_valid_texts_stay_as_they_are(lazy: LazyJsonGrammar, text: str) -> None:
    assert write_under_grammar(lazy.make_state(), text) == text


@pytest.mark.parametrize("before", ["", "I look. ", "<think><tool_call>{</think>", 'a<tool_call>{"city":"Rome"}b'])
@pytest.mark.parametrize("start", ['{"', " \n {", "{"])
def test_an_object_follows_its_schema(lazy: LazyJsonGrammar, before: str, start: str) -> None:
    state = lazy.make_state()
    write_under_grammar(state, f"{before}<tool_call>{start}")
    assert state.is_constrained
    rest = '"city": "Paris"}' if start[-1] == "{" else 'city": "Paris"}'
    written = write_under_grammar(state, rest)
    assert written.startswith(rest.partition("Paris")[0])
    assert written.partition(": ")[2][:2] in ('"R', '"O')


def test_a_beginning_that_the_grammar_forbids_stays_free(lazy: LazyJsonGrammar) -> None:
    class JoinedTokens:
        """A vocabulary in which one token has the trigger and the beginning of an object."""

        encode_continuation = staticmethod(TOKENIZER.encode_continuation)
        token_bytes = {0: b'<tool_call>{"town', 1: b'<tool_call>{"ci', 2: b"<tool_call>{\xff"}.__getitem__

    for token, is_constrained in ((0, False), (1, True), (2, False)):
        state = LazyJsonGrammar(cast(Tokenizer, JoinedTokens()), lazy.grammar, "<tool_call>").make_state()
        assert state.accept_token_and_can_continue(token)
        assert state.is_constrained == is_constrained


def test_a_text_may_begin_inside_a_thought(lazy: LazyJsonGrammar) -> None:
    state = LazyJsonGrammar(TOKENIZER, lazy.grammar, "<tool_call>", begins_in_thought=True).make_state()
    write_under_grammar(state, '<tool_call>{"')
    assert not state.is_constrained
    write_under_grammar(state, 'a"}</think><tool_call>{"')
    assert state.is_constrained
