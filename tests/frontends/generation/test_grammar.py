"""Texts follow a grammar or a schema from their first token to their last, against the preference of the model."""

from __future__ import annotations

import json

import numpy as np
import pytest

import hocket
from hocket.cli import main
from hocket.frontends.generation.grammar import Grammar, GrammarState

from ...given.models.spelled import ASCII, BYTES, NORMAL, SENTENCEPIECE, UNKNOWN, write_llama

pytest.importorskip("llguidance")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "rich": {"type": "boolean"}},
    "required": ["name", "rich"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model():
    with hocket.Model(context=128) as loaded_model:
        yield loaded_model


@pytest.mark.parametrize("seed", range(3))
def test_json_follows_its_schema(model, seed):
    answer = json.loads("".join(model.generate("She was", json_schema=SCHEMA, seed=seed, max_tokens=100)))
    assert answer.keys() == {"name", "rich"}
    assert type(answer["rich"]) is bool
    assert len(answer["name"]) <= 8


def test_a_grammar_is_that_of_llama_cpp_and_holds_in_a_batch(model):
    rules = 'root ::= answer " " [0-9]{3}\nanswer ::= "yes" | "no"'
    for text in model.generate_batch(["Is it?", "Was she happy?"], grammar=rules, seed=1):
        answer, number = text.split(" ")
        assert answer in ("yes", "no")
        assert number.isdecimal()
        assert len(number) == 3


def test_the_command_has_it_too(capsys, tmp_path):
    (tmp_path / "rules").write_text('root ::= " never" " again"?')
    assert main(["run", "-p", "It is", "-c", "32", "--temp", "0", "--grammar-file", str(tmp_path / "rules")]) == 0
    assert capsys.readouterr().out.strip() in ("It is never", "It is never again")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"grammar": "root ::= ((("}, "the grammar is wrong: Expected"),
        ({"json_schema": "{"}, "the JSON schema is wrong"),
        ({"json_schema": {"type": "nothing"}}, "the JSON schema is wrong: Invalid type"),
        ({"json_schema": "{}", "grammar": 'root ::= "a"'}, "give one"),
    ],
)
def test_a_wrong_grammar_is_reported_in_one_line(model, wrong, message):
    with pytest.raises(hocket.ModelError, match=message) as error:
        model.generate("a", **wrong)
    assert "\n" not in str(error.value)


def test_without_llguidance_it_says_what_to_install(model, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(hocket.ModelError, match=r"pip install -e \"\.\[grammar\]\""):
        Grammar(model.tokenizer, grammar='root ::= "a"')


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def text_of(model, **rules) -> str:
    return "".join(model.generate("a", max_tokens=30, temperature=0, **rules))


UNIGRAMS = ["<pad>", "</s>", "<unk>", "▁", "▁a", "yes", *ASCII, *BYTES]


@pytest.mark.parametrize(
    ("kind", "tokens", "types", "eos"),
    [
        ("llama", SENTENCEPIECE, None, None),
        ("t5", UNIGRAMS, [3, 3, UNKNOWN, *[NORMAL] * (3 + len(ASCII)), *[6] * 256], 1),
    ],
)
def test_no_space_comes_before_forced_text(folder, kind, tokens, types, eos):
    path = write_llama(folder / f"{kind}.gguf", tokens, *([types] if types else []), kind=kind, eos=eos)
    with hocket.Model(path) as spaced:
        assert text_of(spaced, grammar='root ::= "abc"') == "abc"
        assert text_of(spaced, grammar='root ::= "yes" | "no"') in ("yes", "no")
        assert text_of(spaced, grammar='root ::= "{" "}"') == "{}"
        assert text_of(spaced, grammar='root ::= "私"') == "私"
        assert text_of(spaced, grammar='root ::= " yes  a"') == " yes  a"
        yes = {"type": "object", "properties": {"k": {"type": "boolean"}}, "required": ["k"]}
        assert json.loads(text_of(spaced, json_schema={**yes, "additionalProperties": False}))["k"] in (True, False)


@pytest.mark.parametrize("format", ["password", "binary", "path", "uri", "email", "no such format"])
def test_an_unknown_format_is_no_constraint(model, format, recwarn):
    text_of(model, json_schema={"type": "string", "format": format, "maxLength": 4}, schema_lenient=False)
    assert not recwarn


KEYWORDS = {
    "uniqueItems": {"type": "array", "items": {"enum": [1]}, "uniqueItems": True, "maxItems": 2},
    "contains": {"type": "array", "contains": {"type": "integer"}, "maxItems": 1, "items": {"enum": [1]}},
    "not": {"not": {"type": "integer"}, "enum": ["a"]},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^a"}, "additionalProperties": False},
    "if": {"if": {"type": "integer"}, "then": {"minimum": 3}, "enum": [3]},
    "oneOf": {"oneOf": [{"type": "integer", "maximum": 3}, {"enum": [3]}]},
}


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_a_keyword_that_cannot_be_followed_is_left_out_by_name_or_refused(model, keyword):
    with pytest.warns(UserWarning, match=f"is followed without a part of it: .*{keyword}"):
        json.loads(text_of(model, json_schema=KEYWORDS[keyword]))
    with pytest.raises(
        hocket.ModelError, match=f"cannot be followed: .*{keyword}.*[^.]; remove it.*schema_lenient=True"
    ):
        text_of(model, json_schema=KEYWORDS[keyword], schema_lenient=False)


def test_a_keyword_with_its_default_is_followed(model, recwarn):
    schema = {"type": "array", "items": {"enum": [1]}, "uniqueItems": False, "maxItems": 1}
    assert json.loads(text_of(model, json_schema=schema, schema_lenient=False)) in ([], [1])
    assert not recwarn


def test_the_command_leaves_keywords_out_on_request(capsys):
    words = ["run", "-p", "It is", "-c", "64", "--temp", "0", "-j", json.dumps(KEYWORDS["uniqueItems"])]
    assert main(words) == 2
    assert "uniqueItems" in capsys.readouterr().err
    assert main([*words, "--schema-lenient"]) == 0
    out, err = capsys.readouterr()
    assert "uniqueItems" in err
    json.loads(out.removeprefix("It is"))


@pytest.mark.parametrize("pattern", ["^score$", "^(score|rank)$", "^(?:rank|score)$"])
def test_a_property_follows_a_pattern_that_lists_it(model, pattern):
    score = {"type": "integer", "minimum": 4, "maximum": 8}
    schema = {"type": "object", "properties": {"score": score}, "required": ["score"], "additionalProperties": False}
    patterns = {pattern: {"type": "integer", "multipleOf": 5}}
    assert json.loads(text_of(model, json_schema={**schema, "patternProperties": patterns}))["score"] == 5


def test_a_text_that_cannot_be_completed_is_no_end(model):
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    rules = {**schema, "patternProperties": {"^[a]$": {"enum": [1]}}}
    follower = Grammar(model.tokenizer, json_schema=rules).make_state()
    assert all(map(follower.accept_token_and_can_continue, model.tokenizer.encode_continuation('{"a":1,')))
    with pytest.raises(hocket.ModelError, match="cannot be completed") as error:
        follower.mask_logits(np.zeros(2048, np.float32))
    assert "\n" not in str(error.value)


class Failing:
    """A matcher that fails at its first token."""

    def consume_token(self, token: int) -> bool:
        return False

    def is_error(self) -> bool:
        return True

    def get_error(self) -> str:
        return "ParserTooComplex\nat some place"

    def stop_reason(self) -> str:
        return "InternalError"

    def is_stopped(self) -> bool:
        return True


def test_a_matcher_that_failed_is_not_done():
    with pytest.raises(hocket.ModelError, match=r"cannot be completed \(ParserTooComplex\)"):
        GrammarState(Failing(), 8).accept_token_and_can_continue(3)


def test_no_token_without_a_row_and_no_row_without_a_token_is_chosen(folder):
    with hocket.Model(write_llama(folder / "padded.gguf", rows=2000)) as padded:
        assert all(one.id < len(SENTENCEPIECE) for one in padded.tokens("a", max_tokens=90, temperature=5.0, seed=1))
        assert len(text_of(padded, grammar="root ::= [a-z]{3}")) == 3
    with hocket.Model(write_llama(folder / "short.gguf", rows=len(SENTENCEPIECE) - 20)) as short:
        assert len(text_of(short, grammar="root ::= [a-e]{3}", ignore_eos=True)) == 3
