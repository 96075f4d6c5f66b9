"""GBNF as llama.cpp's documentation describes it: each construct accepts its texts and no others."""

from __future__ import annotations

import random
import re
from functools import cache
from itertools import product

import pytest

from hocket.frontends.errors import ModelError
from hocket.frontends.generation.gbnf import convert_gbnf_to_lark

llguidance = pytest.importorskip("llguidance")
END, SPECIAL, PIECE = 256, 257, 258
"""Tokens behind the 256 of single bytes: the end, a special one, and one of several letters."""


class Words:
    """A vocabulary of all bytes."""

    tokens = (*(bytes([byte]) for byte in range(256)), b"</s>", b"<|im_start|>", b"abc")
    eos_token_id, bos_token_id, special_token_ids = END, None, (END, SPECIAL)

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


VOCABULARY = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Words()), len(Words.tokens), [END])


def lark_text(grammar: str) -> str:
    return convert_gbnf_to_lark(grammar, {"<|im_start|>": SPECIAL}.get, len(Words.tokens), frozenset([END]))


def matcher(grammar: str):
    matcher = llguidance.LLMatcher(VOCABULARY, llguidance.LLMatcher.grammar_from_lark(lark_text(grammar)), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def accepts(start, text: str | list[int]) -> bool:
    one = start.deep_copy()
    tokens = list(text.encode()) if isinstance(text, str) else text
    return all(one.consume_token(token) for token in tokens) and one.is_accepting() and not one.is_error()


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        pytest.param(r'root ::= "\u0042\u00e9" [\u0061-\u0061] "\x41"', ["BéaA"], ["BéA"], id="escapes of 2 and 4"),
        pytest.param(r'root ::= "\U0001F600" [\U0001F600-\U0001F610]', ["😀😀", "😀😐"], ["😀a"], id="escapes of 8"),
        pytest.param(r'root ::= "\t\r\n\\\"\[\]" [\\\]]', ['\t\r\n\\"[]]', '\t\r\n\\"[]\\'], [""], id="escapes"),
        pytest.param("root ::= ([x]*)*", ["", "x", "xxx"], ["y"], id="nested repetition"),
        pytest.param('root ::= ("a"?)+ "b"{2}', ["bb", "aabb"], ["b", "bbb"], id="an optional one repeated"),
        pytest.param('root ::= "a"{0,0} "b"{0} "c"{1,}', ["c", "cc"], ["", "ac", "bc"], id="no times"),
        pytest.param('root ::= "a"{2,3}', ["aa", "aaa"], ["a", "aaaa"], id="two to three times"),
        pytest.param("root ::= [^a] . [x^-]", ["\n\n-", "bé^"], ["ab-", "bbb"], id="classes"),
        pytest.param('root ::= 1a A a\n1a ::= "1"\nA ::= "2"\na ::= "3"', ["123"], ["133", "122"], id="names"),
        pytest.param('start ::= "a"\nroot ::= start start', ["aa"], ["a"], id="a rule called start"),
        pytest.param('root ::= (# one\n "a" # two\n | "b"\n)\n\n# end', ["a", "b"], ["ab"], id="lines and comments"),
        pytest.param('root ::= "a" |\n "b"\r\n', ["a", "b"], [""], id="an alternative in the next line"),
        pytest.param('root ::= x "c"\nx ::= | "a" | "b"', ["c", "ac"], ["abc"], id="an empty alternative"),
        pytest.param('root ::= "(" root ")" | ', ["", "(())"], ["(()"], id="recursion"),
        pytest.param('root ::= root "x" | "y"', ["y", "yxx"], ["x"], id="recursion on the left"),
        pytest.param('root ::= word "s" "."\nword ::= [a-z]+', ["cats.", "ss."], ["cat.", "s."], id="no lexer"),
        pytest.param('root ::= p\np ::= "(" p? ")" [a-z]* "s"', ["()s", "(()ss)as"], ["()"], id="no lexer, recursive"),
        pytest.param('root ::= "ab" q | "abd" "f"\nq ::= "d" "e" | q "!"', ["abde!", "abdf"], ["abd"], id="prefixes"),
        pytest.param('root ::= x x\nx ::= "é" | "éè" | "è" | x "!"', ["éè", "ééè!"], ["é"], id="parts of characters"),
    ],
)
def test_a_construct_accepts_its_texts_and_no_others(grammar, right, wrong):
    start = matcher(grammar)
    assert [text for text in right if not accepts(start, text)] == []
    assert [text for text in wrong if accepts(start, text)] == []


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        ('root ::= <[258]> "x"', [PIECE], [ord("a")]),
        ('root ::= <|im_start|> "x"', [SPECIAL], [PIECE]),
        ('root ::= !<|im_start|> "x"', [PIECE, ord("a")], [SPECIAL, END]),
        ('root ::= !<[258]> "x"', [SPECIAL, 0], [PIECE, END]),
    ],
)
def test_a_token_reference_matches_one_token(grammar, right, wrong):
    start = matcher(grammar)
    assert all(accepts(start, [token, ord("x")]) for token in right)
    assert not any(accepts(start, [token, ord("x")]) for token in wrong)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("root ::= (((", "Expected '\\)' at line 1, column 13, got the end"),
        ('root ::= "a', "Expected a closing quote"),
        ("root ::= [a", "Expected a closing bracket"),
        ("root ::= []", "Expected a character in the class"),
        ("root ::= [b-a]", "Expected a range from a lower to a higher character"),
        ("root ::= b", "Expected a rule named 'b' at line 1, column 10"),
        ('a ::= "x"', "Expected a rule named 'root'"),
        ("", "Expected a rule named 'root'"),
        ('root ::= "a" )', "Expected the end of the rule"),
        ('root ::= "\\q"', "Expected an escape of"),
        ("root ::= [\\uD800-\\uDFFF]", "Expected an escape of a Unicode character"),
        ("root ::= <[259]>", "Expected a token of the model, from 0 to 258"),
        ("root ::= <nothing>", "Expected a token of the model"),
        ("root ::= *", "Expected a text in quotes"),
        ('root ::= "a"{3,1}', "Expected a largest count"),
        ('root "a"', "Expected '::='"),
        ("root ::= " + "(" * 300, "Expected at most 50 nested"),
        ('root ::= "a"' + "*" * 300, "Expected at most 50 nested"),
        ("root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(5000)) + 'r5000 ::= ""', "too many steps"),
    ],
)
def test_an_error_in_gbnf_names_its_place(grammar, message):
    with pytest.raises(ModelError, match=message) as error:
        lark_text(grammar)
    assert "\n" not in str(error.value)


def test_lark_stays_as_it_is():
    for lark in ('start: "a"', '%llguidance {}\n\nstart: A\nA: "a"'):
        assert lark_text(lark) == lark


def test_strings_of_json_are_one_lexeme():
    """A lexeme for each character would take 10 ms for a token of a vocabulary of 150,000."""
    grammar = (
        "root ::= object\nvalue ::= object | string | number\n"
        'object ::= "{" (string ":" value ("," string ":" value)*)? "}"\n'
        'string ::= "\\"" ([^"\\\\] | "\\\\" ["\\\\nt])* "\\""\n'
        'number ::= "-"? ([0-9] | [1-9] [0-9]*) ("." [0-9]+)?'
    )
    lexemes = [line for line in lark_text(grammar).splitlines() if line.startswith("L")]
    inside = {line.partition(":")[0] for line in lark_text(grammar).splitlines() if line.startswith("RULE")}
    assert len(inside) == 2
    assert {name for line in lexemes for name in inside if name in line} == inside
    assert accepts(matcher(grammar), '{"a":{"b\\n":-1.5},"c":10}')


def random_grammar(rng: random.Random):
    """A recursive grammar of a, b, c, d and e, and a function that says whether a text follows it."""
    rules: list[tuple[str, str]] = []

    def expression(depth: int) -> tuple[str, str]:
        """GBNF, and the same as a regular expression."""
        kind = rng.choice("lllccrsaq" if depth else "lc")
        if kind == "l":
            text = "".join(rng.choices("ab", k=rng.choice([1, 1, 2, 3])))
            return f'"{text}"', text
        if kind == "c":
            text = rng.choice(["[ab]", "[a]", "[b]", "[^acde]"])
            return text, text.replace("[^acde]", "b")
        if kind == "r" and rules:
            at = rng.randrange(len(rules))
            return f"s{at}", f"(?:{rules[at][1]})"
        if kind == "q":
            inner, count = expression(depth - 1), rng.choice(["*", "+", "?", "{2}", "{1,2}", "{0,2}"])
            return f"({inner[0]}){count}", f"(?:{inner[1]}){count}"
        inner = [expression(depth - 1) for _ in range(2 if kind == "a" else rng.choice([2, 3]))]
        by = "|" if kind == "a" else ""
        return f"({f' {by} '.join(x for x, _ in inner)})", f"(?:{by.join(f'(?:{x})' for _, x in inner)})"

    for _ in range(3):
        rules.append(expression(2))
    top = expression(3)
    whole, behind = re.compile(top[1]), re.compile(f"(?:{rules[0][1]})(?:{rules[1][1]})")

    @cache
    def follows(text: str) -> bool:
        if whole.fullmatch(text) or (text[:1] == "c" and text[-1:] == "d" and follows(text[1:-1])):
            return True
        places = range(1, len(text) + 1) if text[:1] == "e" else ()
        return any(behind.fullmatch(text[at:]) and follows(text[1:at]) for at in places)

    named = "".join(f"s{i} ::= {gbnf}\n" for i, (gbnf, _) in enumerate(rules))
    return f'root ::= p\np ::= {top[0]} | "c" p "d" | "e" p {rules[0][0]} {rules[1][0]}\n{named}', follows


@pytest.mark.parametrize("seed", range(12))
def test_random_grammars_accept_what_regular_expressions_accept(seed):
    grammar, follows = random_grammar(random.Random(seed))
    start = matcher(grammar)
    words = ["".join(letters) for size in range(4) for letters in product("abc", repeat=size)]
    words += [f"c{word}d" for word in words[:30]] + [f"e{word}" for word in words]
    assert [word for word in words if accepts(start, word) != follows(word)] == []
