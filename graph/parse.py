"""The parser of graph text, with one node on each line.

A node is ``%up = mul_mat(%blk.0.ffn_up, %norm) : f32[3,8]``. Result `i` of a node with several results is ``%name#i``,
and an omitted operand is ``_``. The last lines are ``return logits=%out`` and ``update %cache = %new``. Names that are
not plain words are JSON strings: ``%"two words"``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Container

import numpy as np

from .attrs import MAX_DEPTH, Attr, Attrs
from .dtypes import DTYPE_BY_NAME
from .errors import GraphError, format_count
from .graph import Graph
from .node import Node, Value
from .spec import MAX_SIZE, Spec, make_spec
from .validation import TEXT, validate_arguments

_WORDS: dict[str, Attr] = {"true": True, "false": False, "none": None, **DTYPE_BY_NAME}
_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_TOKEN = re.compile(
    r"\s*(?:(?P<ref>%(?:[A-Za-z0-9_.~/-]+|\"(?:[^\"\\]|\\.)*\")(?:#[0-9]+)?)|(?P<hex>x\"[0-9a-f]*\")|(?P<str>\"(?:[^\"\\]|\\.)*\")"
    r"|(?P<num>-?(?:inf\b|[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?(?:f\b)?))|(?P<word>[A-Za-z_][A-Za-z0-9_.]*)|(?P<mark>[()\[\],=:]))"
)
_INDEX = re.compile(r"#[0-9]+$")
AttributeCompleter = Callable[[str, Attrs], Attrs]


def keep_attributes_unchanged(op: str, attrs: Attrs) -> Attrs:
    """Return the attributes unchanged; `parse` calls this function unless it gets another one."""
    return attrs


class _LineCursor:
    """A cursor over the tokens of one line of graph text; error messages name the line and the column."""

    def __init__(self, number: int, text: str) -> None:
        self.number, self.text, self.tokens = number, text, []
        at, end = 0, len(text.rstrip())
        while at < end:
            token = _TOKEN.match(text, at)
            if not token:
                raise GraphError(f"line {number}, column {at + 1}: cannot read {text[at : at + 20]!r}")
            kind = token.lastgroup
            assert kind is not None
            self.tokens.append((kind, token[kind], token.start(kind)))
            at = token.end()
        self.at = 0

    def peek(self, ahead: int = 0) -> tuple[str, str]:
        return self.tokens[self.at + ahead][:2] if self.at + ahead < len(self.tokens) else ("end", "end of line")

    def expect(self, kind: str, text: str | None = None) -> str:
        got = self.peek()
        if got[0] != kind or text not in (None, got[1]):
            raise self.error(f"expected {text or kind}, got {got[1]!r}")
        self.at += 1
        return got[1]

    def accept(self, mark: str) -> bool:
        if self.peek() == ("mark", mark):
            self.at += 1
            return True
        return False

    def expect_name(self, what: str, taken_names: Container[str] = ()) -> str:
        """Consume the name of an op, attribute or output: a word or a quoted string that is not in `taken_names`."""
        kind, text = self.peek()
        if kind not in ("word", "str"):
            raise self.error(f"expected {what}, got {text!r}")
        name = self.remove_quotes(text)
        if name in taken_names:
            raise self.error(f"{text} is given twice")
        self.at += 1
        return name

    def remove_quotes(self, text: str) -> str:
        """Remove the quotes of `text`, a JSON string in the current token; errors name this token."""
        try:
            return str(json.loads(text)) if text.startswith('"') else text
        except ValueError:
            raise self.error(f"{text} is no JSON string; escape control characters and backslashes") from None

    def expect_integer(self) -> int:
        """Consume one integer of at most 64 bits."""
        kind, text = self.peek()
        if kind != "num" or not text.lstrip("-").isdecimal():
            raise self.error(f"expected an integer, got {text!r}")
        if len(text) > 20 or not -MAX_SIZE <= int(text) <= MAX_SIZE:
            raise self.error(f"an integer of {len(text)} digits does not fit in 64 bits")
        self.at += 1
        return int(text)

    def error(self, problem: str) -> GraphError:
        column = self.tokens[self.at][2] + 1 if self.at < len(self.tokens) else len(self.text) + 1
        text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in problem[:301])  # it may quote any character
        return GraphError(f"line {self.number}, column {column}: {text if len(text) <= 300 else f'{text[:297]}...'}")


def _parse_attribute(cursor: _LineCursor, depth: int = 0) -> Attr:
    kind, text = cursor.peek()
    if cursor.accept("("):
        if depth == MAX_DEPTH:
            raise cursor.error(f"attributes are nested more than {MAX_DEPTH} deep")
        items: list[Attr] = []
        while not cursor.accept(")"):
            items.append(_parse_attribute(cursor, depth + 1))
            if not cursor.accept(","):
                cursor.expect("mark", ")")
                break
        return tuple(items)
    value: Attr
    if text in _FLOATS:
        value = _FLOATS[text]
    elif kind == "num":
        if not set(text) & set(".ef"):
            return cursor.expect_integer()
        value = float(np.float32(text[:-1])) if text.endswith("f") else float(text)
    elif kind == "str":
        value = cursor.remove_quotes(text)
    elif kind == "hex" and len(text) % 2:
        value = bytes.fromhex(text[2:-1])
    elif kind == "word" and text in _WORDS:
        value = _WORDS[text]
    else:
        raise cursor.error(f"expected an attribute value, got {text!r}")
    cursor.at += 1
    return value


def _parse_spec(cursor: _LineCursor) -> Spec:
    start, dtype = cursor.at, cursor.expect("word")
    cursor.expect("mark", "[")
    shape: list[int] = []
    while not cursor.accept("]"):
        shape.append(cursor.expect_integer())
        if not cursor.accept(","):
            cursor.expect("mark", "]")
            break
    try:
        return make_spec(shape, dtype)
    except GraphError as why:
        cursor.at = start
        raise cursor.error(str(why)) from None


class _GraphParser:
    """The parser of a whole graph, with the nodes, outputs and updates of the lines read so far."""

    def __init__(self, complete: AttributeCompleter) -> None:
        self.complete = complete
        self.nodes: dict[str, Node] = {}
        self.outputs: dict[str, Value] = {}
        self.updates: dict[Value, Value] = {}

    def parse_reference(self, cursor: _LineCursor) -> Value:
        kind, text = cursor.peek()
        if kind != "ref":
            raise cursor.error(f"expected a value, got {text!r}")
        number = _INDEX.search(text)
        reference = text[: number.start()] if number else text
        node = self.nodes.get(cursor.remove_quotes(reference[1:]))
        if node is None:
            raise cursor.error(f"{reference} is used before it is defined")
        index = number[0][1:] if number else "0"
        if len(index) > 9 or int(index) >= len(node.specs):
            raise cursor.error(f"{reference} has {format_count(len(node.specs), 'result')}, so there is no #{index}")
        cursor.at += 1
        return node.results[int(index)]

    def parse_line(self, cursor: _LineCursor) -> None:
        kind, text = cursor.peek()
        if kind == "word" and text in ("return", "update"):
            cursor.at += 1
            (self.parse_outputs if text == "return" else self.parse_update)(cursor)
        else:
            self.parse_node(cursor)
        if cursor.peek()[0] != "end":
            raise cursor.error(f"unexpected {cursor.peek()[1]!r}")

    def parse_outputs(self, cursor: _LineCursor) -> None:
        while cursor.peek()[0] != "end":
            name = cursor.expect_name("the name of an output", taken_names=self.outputs)
            cursor.expect("mark", "=")
            self.outputs[name] = self.parse_reference(cursor)
            if not cursor.accept(","):
                break

    def parse_update(self, cursor: _LineCursor) -> None:
        start, old = cursor.at, self.parse_reference(cursor)
        if old in self.updates:
            cursor.at = start
            raise cursor.error(f"{old.label} is updated twice")
        cursor.expect("mark", "=")
        self.updates[old] = self.parse_reference(cursor)

    def parse_node(self, cursor: _LineCursor) -> None:
        kind, text = cursor.peek()
        if kind != "ref" or _INDEX.search(text):
            raise cursor.error(f"expected %name, return or update, got {text!r}")
        name = cursor.remove_quotes(text[1:])
        if name in self.nodes:
            raise cursor.error(f"{text} is defined twice")
        cursor.at += 1
        cursor.expect("mark", "=")
        op = cursor.expect_name("the name of an op")
        src, attrs = self.parse_arguments(cursor)
        cursor.expect("mark", ":")
        specs = [_parse_spec(cursor)]
        while cursor.accept(","):
            specs.append(_parse_spec(cursor))
        self.nodes[name] = Node(
            op, tuple(src), self.complete(op, attrs), tuple(specs), "" if text[1:].isdecimal() else name
        )

    def parse_arguments(self, cursor: _LineCursor) -> tuple[list[Value | None], Attrs]:
        src: list[Value | None] = []
        attrs: dict[str, Attr] = {}
        cursor.expect("mark", "(")
        while not cursor.accept(")"):
            kind, text = cursor.peek()
            if kind == "ref":
                src.append(self.parse_reference(cursor))
            elif (kind, text) == ("word", "_"):
                cursor.at += 1
                src.append(None)
            else:
                name = cursor.expect_name("a value or an attribute", taken_names=attrs)
                cursor.expect("mark", "=")
                attrs[name] = _parse_attribute(cursor)
            if not cursor.accept(","):
                cursor.expect("mark", ")")
                break
        return src, attrs


@validate_arguments(GraphError, text=TEXT)
def parse(text: str, complete: AttributeCompleter = keep_attributes_unchanged) -> Graph:
    """Parse the text of a graph into a graph. The ops stay unchecked; `verify` checks them.

    Args:
        text: The text that `format_graph` wrote.
        complete: Adds the omitted attributes of an op.

    Raises:
        GraphError: A line is not in the format; the message has the line and the column.
    """
    parser = _GraphParser(complete)
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("//"):
            parser.parse_line(_LineCursor(number, line))
    return Graph(parser.outputs, parser.updates)


@validate_arguments(GraphError, text=TEXT)
def parse_case(text: str) -> dict[str, Spec | Attr]:
    """Parse the text of a conformance case into its operand specs and attributes, by name.

    An example of such a text is ``w=q4_K[64,256], x=f32[7,256], eps=1e-06``.
    """
    cursor = _LineCursor(1, text)
    parts: dict[str, Spec | Attr] = {}
    while cursor.peek()[0] != "end":
        name = cursor.expect("word")
        cursor.expect("mark", "=")
        is_spec = cursor.peek(1)[1] == "["
        parts[name] = _parse_spec(cursor) if is_spec else _parse_attribute(cursor)
        if cursor.peek()[0] != "end":
            cursor.expect("mark", ",")
    return parts
