"""Parses GBNF, the grammar format of llama.cpp: a text becomes rules of characters, tokens and other rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NoReturn

from ...graph.lazy_dataclass import dataclass
from ..errors import ModelError

ROOT_RULE = "root"
NAME_PATTERN = re.compile(r"[A-Za-z0-9_-]+")
BLANKS_PATTERN = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
LINES_PATTERN = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
COUNTS_PATTERN = re.compile(r"\{\s*(\d{1,9})\s*(?:(,)\s*(\d{1,9})?\s*)?\}")
CODE_DIGITS: Mapping[str, int] = {"x": 2, "u": 4, "U": 8}
"""Hexadecimal digits after each escape letter."""
ESCAPED_CHARACTERS: Mapping[str, str] = {"t": "\t", "r": "\r", "n": "\n", **{c: c for c in '\\"[]'}}
TOKEN_PATTERN = re.compile(r"(!?)<(?:\[(\d{1,9})\]>|([^<>\s]*>))")
LAST_CHARACTER = 0x10FFFF
MAX_NESTING = 50
"""Largest nesting of groups and repetitions in a rule."""


@dataclass(frozen=True, slots=True)
class CharacterRanges:
    """A grammar expression that matches one character by its code point.

    `ranges` are pairs (first, last) of code points. The character must be in one of them, or in none if the expression
    is negated.
    """

    ranges: tuple[tuple[int, int], ...]
    is_negated: bool = False

    @property
    def text(self) -> str:
        listed = "".join(f"\\x{{{first:x}}}-\\x{{{last:x}}}" for first, last in self.ranges)
        return f"/[{'^' * self.is_negated}{listed}]/"


@dataclass(frozen=True, slots=True)
class TokenIdRanges:
    """A grammar expression that matches one token by its id, which is in one of the ranges (first, last)."""

    ranges: tuple[tuple[int, int], ...]

    @property
    def text(self) -> str:
        return f"<[{','.join(f'{first}-{last}' for first, last in self.ranges)}]>"


@dataclass(frozen=True, slots=True)
class Sequence:
    items: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    items: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Repetition:
    item: Expression
    minimum: int
    maximum: int | None


@dataclass(frozen=True, slots=True)
class Reference:
    name: str


@dataclass(frozen=True, slots=True)
class LexemeMark:
    """A mark around an expression without recursion: the expression becomes one lexeme, a unit of the lexer."""

    body: Expression


Expression = CharacterRanges | TokenIdRanges | Sequence | Choice | Repetition | Reference | LexemeMark
Rules = Mapping[str, Expression]
EMPTY_SEQUENCE = Sequence(())


class GbnfParser:
    """A recursive-descent parser of GBNF grammars.

    Args:
        text: The grammar.
        token_id: Returns the id of the token with this text, or None.
        token_count: Tokens of the vocabulary.
        end_ids: Tokens that end a text; negated token references exclude them.
    """

    def __init__(
        self, text: str, token_id: Callable[[str], int | None], token_count: int, end_ids: frozenset[int]
    ) -> None:
        self.text, self.position, self.depth = text, 0, 0
        self.token_id, self.token_count, self.end_ids = token_id, token_count, end_ids
        self.first_use: dict[str, int] = {}

    def parse(self) -> Rules:
        rules: dict[str, Expression] = {}
        self.skip_blanks(LINES_PATTERN)
        while self.position < len(self.text):
            name = self.match_pattern(NAME_PATTERN, "a rule name")[0]
            self.skip_blanks(BLANKS_PATTERN)
            self.require_text("::=")
            self.skip_blanks(LINES_PATTERN)
            rules[name] = self.parse_choice()
            if self.next_character not in ("", "\r", "\n"):
                self.fail("the end of the rule")
            self.skip_blanks(LINES_PATTERN)
        for name, position in {ROOT_RULE: 0, **self.first_use}.items():
            if name not in rules:
                self.position = position
                self.fail(f"a rule named {name!r:.40}")
        return rules

    @property
    def next_character(self) -> str:
        return self.text[self.position : self.position + 1]

    def fail(self, need: str) -> NoReturn:
        before = self.text[: self.position]
        line, column = before.count("\n") + 1, self.position - before.rfind("\n")
        found = self.text[self.position : self.position + 20].partition("\n")[0]
        got = f"got {found!r}" if found else "got the end"
        raise ModelError(f"Expected {need} at line {line}, column {column}, {got}")

    def skip_blanks(self, blanks: re.Pattern[str]) -> None:
        matched = blanks.match(self.text, self.position)
        self.position = matched.end() if matched else self.position

    def match_pattern(self, pattern: re.Pattern[str], need: str) -> re.Match[str]:
        matched = pattern.match(self.text, self.position)
        if matched is None:
            self.fail(need)
        self.position = matched.end()
        return matched

    def require_text(self, text: str) -> None:
        if not self.text.startswith(text, self.position):
            self.fail(f"{text!r}")
        self.position += len(text)

    def parse_choice(self) -> Expression:
        items = [self.parse_sequence()]
        while self.next_character == "|":
            self.position += 1
            self.skip_blanks(LINES_PATTERN)
            items.append(self.parse_sequence())
        return items[0] if len(items) == 1 else Choice(tuple(items))

    def parse_sequence(self) -> Expression:
        blanks, items = LINES_PATTERN if self.depth else BLANKS_PATTERN, list[Expression]()
        while self.next_character and self.next_character not in "|)\r\n":
            item, depth = self.parse_element(), self.depth
            self.skip_blanks(blanks)
            while self.next_character and self.next_character in "*+?{":
                self.enter_level()
                item = self.parse_repetition(item)
                self.skip_blanks(blanks)
            self.depth = depth
            items.append(item)
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def parse_element(self) -> Expression:
        match self.next_character:
            case '"':
                return self.parse_literal()
            case "[":
                return self.parse_characters()
            case "(":
                return self.parse_group()
            case ".":
                self.position += 1
                return CharacterRanges(((0, LAST_CHARACTER),))
            case "<" | "!":
                return self.parse_tokens()
            case _:
                start = self.position
                name = self.match_pattern(
                    NAME_PATTERN, "a text in quotes, a class in brackets, a group, a token, or a rule name"
                )[0]
                self.first_use.setdefault(name, start)
                return Reference(name)

    def parse_literal(self) -> Expression:
        self.position += 1
        items = []
        while self.next_character != '"':
            code = self.parse_character_or_escape("a closing quote")
            items.append(CharacterRanges(((code, code),)))
        self.position += 1
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def parse_characters(self) -> CharacterRanges:
        self.position += 1
        ranges, is_negated = [], self.next_character == "^"
        self.position += is_negated
        while self.next_character != "]":
            start = self.position
            first = last = self.parse_character_or_escape("a closing bracket")
            if self.next_character == "-" and self.text[self.position + 1 : self.position + 2] not in ("]", ""):
                self.position += 1
                last = self.parse_character_or_escape("a closing bracket")
            if last < first:
                self.position = start
                self.fail("a range from a lower to a higher character")
            ranges.append((first, last))
        if not ranges:
            self.fail("a character in the class")
        self.position += 1
        return CharacterRanges(tuple(ranges), is_negated)

    def parse_character_or_escape(self, end: str) -> int:
        """Parse one character or escape sequence, and return its code point.

        `end` is the text that would close the literal; error messages name it.
        """
        start, char = self.position, self.next_character
        if not char:
            self.fail(end)
        self.position += 1
        if char != "\\":
            return ord(char)
        char = self.next_character
        self.position += 1
        if char in CODE_DIGITS:
            digits = self.text[self.position : self.position + CODE_DIGITS[char]]
            self.position += len(digits)
            is_code = len(digits) == CODE_DIGITS[char] and all(c in "0123456789abcdefABCDEF" for c in digits)
            code = int(digits, 16) if is_code else -1
            if not 0 <= code <= LAST_CHARACTER or 0xD800 <= code < 0xE000:
                self.position = start
                self.fail("an escape of a Unicode character, as \\x41, \\u0041 or \\U0001F600")
            return code
        if char not in ESCAPED_CHARACTERS:
            self.position = start
            self.fail('an escape of t, r, n, \\, ", [, ], x, u or U')
        return ord(ESCAPED_CHARACTERS[char])

    def enter_level(self) -> None:
        self.depth += 1
        if self.depth > MAX_NESTING:
            self.fail(f"at most {MAX_NESTING} nested brackets and repetitions")

    def parse_group(self) -> Expression:
        self.enter_level()
        self.position += 1
        self.skip_blanks(LINES_PATTERN)
        inside = self.parse_choice()
        if self.next_character != ")":
            self.fail("')'")
        self.position += 1
        self.depth -= 1
        return inside

    def parse_tokens(self) -> TokenIdRanges:
        start = self.position
        is_negated, number, name = self.match_pattern(TOKEN_PATTERN, "a token, as <[5]> or <|im_start|>").groups()
        token = int(number) if number else self.token_id(f"<{name}")
        if token is None or token >= self.token_count:
            self.position = start
            self.fail(f"a token of the model, from 0 to {self.token_count - 1}")
        if not is_negated:
            return TokenIdRanges(((token, token),))
        left_out = sorted({token, *self.end_ids})
        edges = zip([-1, *left_out], [*left_out, self.token_count], strict=True)
        return TokenIdRanges(tuple((low + 1, high - 1) for low, high in edges if high - low > 1))

    def parse_repetition(self, item: Expression) -> Expression:
        if self.next_character == "{":
            minimum, comma, maximum = self.match_pattern(COUNTS_PATTERN, "a count, as {2}, {2,} or {2,4}").groups()
            low, high = int(minimum), int(maximum or minimum) if maximum or not comma else None
            if high is not None and high < low:
                self.fail("a largest count of at minimum the smallest one")
            return EMPTY_SEQUENCE if high == 0 else Repetition(item, low, high)
        sign = self.next_character
        self.position += 1
        return Repetition(item, int(sign == "+"), 1 if sign == "?" else None)
