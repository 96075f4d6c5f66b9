"""Texts follow a grammar or a schema from their first token to their last, whatever the model would rather say."""

from __future__ import annotations

import json

import pytest

import hocket
from hocket.cli import main
from hocket.frontends.generation.grammar import Grammar

pytest.importorskip("llguidance")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "rich": {"type": "boolean"}},
    "required": ["name", "rich"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model():
    with hocket.Model(context=128) as opened:
        yield opened


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
    ("wrong", "said"),
    [
        ({"grammar": "root ::= ((("}, "the grammar is wrong: Expected"),
        ({"json_schema": "{"}, "the JSON schema is wrong"),
        ({"json_schema": {"type": "nothing"}}, "the JSON schema is wrong: Invalid type"),
        ({"json_schema": "{}", "grammar": 'root ::= "a"'}, "give one"),
    ],
)
def test_a_wrong_grammar_is_said_in_one_line(model, wrong, said):
    with pytest.raises(hocket.ModelError, match=said) as error:
        model.generate("a", **wrong)
    assert "\n" not in str(error.value)


def test_without_llguidance_it_says_what_to_install(model, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(hocket.ModelError, match=r"pip install hocket\[grammar\]"):
        Grammar(model.tokenizer, grammar='root ::= "a"')
