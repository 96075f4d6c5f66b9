"""The dump: one node a line, text that parses back.

``%up = mul_mat(%blk.0.ffn_up, %norm) : f32[3,8]``; result `i` of a node with several is ``%name#i``; an operand that
was left out is ``_``; the last lines are ``return logits=%out`` and ``update %cache = %new``.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from itertools import count

from .dtypes import BY_TEXT, DType
from .errors import GraphError
from .graph import Graph
from .node import Attr, Attrs, Node, Value
from .spec import Spec, make_spec

_PLAIN = re.compile(r"[A-Za-z0-9_.~/-]+")
_WORDS: dict[str, Attr] = {"true": True, "false": False, "none": None, **BY_TEXT}
_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_TOKEN = re.compile(
    r"\s*(?:(?P<ref>%(?:[A-Za-z0-9_.~/-]+|\"(?:[^\"\\]|\\.)*\")(?:#\d+)?)|(?P<hex>x\"[0-9a-f]*\")|(?P<str>\"(?:[^\"\\]|\\.)*\")"
    r"|(?P<num>-?(?:inf\b|\d+(?:\.\d+)?(?:e[+-]?\d+)?))|(?P<word>[A-Za-z_][A-Za-z0-9_.]*)|(?P<mark>[()\[\],=:]))"
)


# ------------------------------------------------------------------------------------------------------- writing


def names(graph: Graph) -> dict[Node, str]:
    """A distinct printable name for every node: its own, made unique with ``~2``; unnamed nodes are numbered."""
    found: dict[Node, str] = {}
    taken: set[str] = set()
    tried: Counter[str] = Counter()
    for node in sorted((n for n in graph.nodes if n.name), key=lambda n: not n.is_leaf):  # leaves' names are keys
        name = node.name
        while name in taken:
            tried[node.name] += 1
            name = f"{node.name}~{tried[node.name] + 1}"
        taken.add(name)
        found[node] = name
    numbers = (str(i) for i in count() if str(i) not in taken)
    found.update((node, next(numbers)) for node in graph.nodes if not node.name)
    return found


def quote(name: str) -> str:
    return name if _PLAIN.fullmatch(name) else json.dumps(name)


def attr_text(value: Attr) -> str:
    """One attribute as the dump writes it."""
    match value:
        case None:
            return "none"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            return json.dumps(value)
        case bytes():
            return f'x"{value.hex()}"'
        case DType():
            return value.text
        case tuple():
            return "(" + ", ".join(map(attr_text, value)) + ("," if len(value) == 1 else "") + ")"


def line(node: Node, called: dict[Node, str] | None = None) -> str:
    """The line of one node; without `called`, names are the nodes' own labels."""

    def ref(value: Value | None) -> str:
        if value is None:
            return "_"
        name = quote(called[value.node] if called else value.node.label)
        return f"%{name}" + (f"#{value.index}" if len(value.node.specs) > 1 else "")

    args = [ref(s) for s in node.src] + [f"{k}={attr_text(v)}" for k, v in node.attrs.items()]
    name = quote(called[node] if called else node.label)
    return f"%{name} = {node.op}({', '.join(args)}) : {', '.join(map(str, node.specs))}"


def dump(graph: Graph) -> str:
    """The whole graph as text; `parse` reads it back."""
    called = names(graph)

    def ref(value: Value) -> str:
        return f"%{quote(called[value.node])}" + (f"#{value.index}" if len(value.node.specs) > 1 else "")

    lines = [line(node, called) for node in graph.nodes]
    lines.append("return " + ", ".join(f"{quote(name)}={ref(v)}" for name, v in graph.outputs.items()))
    lines += [f"update {ref(old)} = {ref(new)}" for old, new in graph.updates.items()]
    return "\n".join(lines) + "\n"


# ------------------------------------------------------------------------------------------------------- reading


class _Line:
    """A cursor over the tokens of one line; every complaint names the line and the column."""

    def __init__(self, number: int, text: str) -> None:
        self.number, self.text, self.tokens = number, text, []
        at = 0
        while text[at:].strip():
            found = _TOKEN.match(text, at)
            if not found:
                raise GraphError(f"line {number}, column {at + 1}: cannot read {text[at : at + 20]!r}")
            kind = found.lastgroup
            assert kind is not None
            self.tokens.append((kind, found[kind], found.start(kind)))
            at = found.end()
        self.at = 0

    def peek(self, ahead: int = 0) -> tuple[str, str]:
        return self.tokens[self.at + ahead][:2] if self.at + ahead < len(self.tokens) else ("end", "end of line")

    def take(self, kind: str, text: str | None = None) -> str:
        got = self.peek()
        if got[0] != kind or text not in (None, got[1]):
            raise self.error(f"expected {text or kind}, got {got[1]!r}")
        self.at += 1
        return got[1]

    def skip(self, mark: str) -> bool:
        if self.peek() == ("mark", mark):
            self.at += 1
            return True
        return False

    def error(self, why: str) -> GraphError:
        column = self.tokens[self.at][2] + 1 if self.at < len(self.tokens) else len(self.text) + 1
        return GraphError(f"line {self.number}, column {column}: {why}")


def _unquote(name: str) -> str:
    return str(json.loads(name)) if name.startswith('"') else name


def _attr(cursor: _Line, depth: int = 0) -> Attr:
    if depth > 8:
        raise cursor.error("attributes are nested more than 8 deep")
    kind, text = cursor.peek()
    if cursor.skip("("):
        items: list[Attr] = []
        while not cursor.skip(")"):
            items.append(_attr(cursor, depth + 1))
            if not cursor.skip(","):
                cursor.take("mark", ")")
                break
        return tuple(items)
    cursor.at += 1
    if text in _FLOATS:
        return _FLOATS[text]
    if kind == "num":
        return float(text) if set(text) & set(".e") else int(text)
    if kind == "str":
        return _unquote(text)
    if kind == "hex" and len(text) % 2:
        return bytes.fromhex(text[2:-1])
    if kind == "word" and text in _WORDS:
        return _WORDS[text]
    cursor.at -= 1
    raise cursor.error(f"expected an attribute value, got {text!r}")


def _spec(cursor: _Line) -> Spec:
    dtype = cursor.take("word")
    cursor.take("mark", "[")
    shape: list[int] = []
    while not cursor.skip("]"):
        shape.append(int(cursor.take("num")))
        if not cursor.skip(","):
            cursor.take("mark", "]")
            break
    return make_spec(shape, dtype)


class _Parser:
    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.outputs: dict[str, Value] = {}
        self.updates: dict[Value, Value] = {}

    def ref(self, cursor: _Line) -> Value:
        text = cursor.take("ref")[1:]
        name, _, index = text.rpartition("#") if re.search(r"#\d+$", text) else (text, "", "0")
        name = _unquote(name)
        if name not in self.nodes:
            raise cursor.error(f"%{name} is used before it is defined")
        if int(index) >= len(self.nodes[name].specs):
            raise cursor.error(f"%{name} has {len(self.nodes[name].specs)} results, so there is no #{index}")
        return Value(self.nodes[name], int(index))

    def line(self, cursor: _Line) -> None:
        kind, text = cursor.peek()
        if kind == "word" and text in ("return", "update"):
            cursor.at += 1
            (self.returns if text == "return" else self.update)(cursor)
        else:
            self.node(cursor)
        if cursor.peek()[0] != "end":
            raise cursor.error(f"unexpected {cursor.peek()[1]!r}")

    def returns(self, cursor: _Line) -> None:
        while cursor.peek()[0] != "end":
            name = _unquote(cursor.take(cursor.peek()[0]))
            cursor.take("mark", "=")
            self.outputs[name] = self.ref(cursor)
            cursor.skip(",")

    def update(self, cursor: _Line) -> None:
        old = self.ref(cursor)
        cursor.take("mark", "=")
        self.updates[old] = self.ref(cursor)

    def node(self, cursor: _Line) -> None:
        name = _unquote(cursor.take("ref")[1:])
        if name in self.nodes:
            raise cursor.error(f"%{name} is defined twice")
        cursor.take("mark", "=")
        op = cursor.take("word")
        src, attrs = self.arguments(cursor)
        cursor.take("mark", ":")
        specs = [_spec(cursor)]
        while cursor.skip(","):
            specs.append(_spec(cursor))
        self.nodes[name] = Node(op, tuple(src), attrs, tuple(specs), "" if name.isdecimal() else name)

    def arguments(self, cursor: _Line) -> tuple[list[Value | None], Attrs]:
        src: list[Value | None] = []
        attrs: dict[str, Attr] = {}
        cursor.take("mark", "(")
        while not cursor.skip(")"):
            kind, text = cursor.peek()
            if kind == "ref":
                src.append(self.ref(cursor))
            elif (kind, text) == ("word", "_"):
                cursor.at += 1
                src.append(None)
            else:
                name = cursor.take("word")
                cursor.take("mark", "=")
                attrs[name] = _attr(cursor)
            if not cursor.skip(","):
                cursor.take("mark", ")")
                break
        return src, attrs


def parse(text: str) -> Graph:
    """The graph that `dump` wrote.  Raises `GraphError` with line and column; ops are checked by `verify`."""
    parser = _Parser()
    for number, written in enumerate(text.splitlines(), 1):
        if written.strip() and not written.lstrip().startswith("//"):
            parser.line(_Line(number, written))
    return Graph(parser.outputs, parser.updates)


def parse_case(text: str) -> dict[str, Spec | Attr]:
    """Operand specs and attributes of a case like ``w=q4_K[64,256], x=f32[7,256], eps=1e-06``."""
    cursor = _Line(1, text)
    found: dict[str, Spec | Attr] = {}
    while cursor.peek()[0] != "end":
        name = cursor.take("word")
        cursor.take("mark", "=")
        is_spec = cursor.peek(1)[1] == "["
        found[name] = _spec(cursor) if is_spec else _attr(cursor)
        if cursor.peek()[0] != "end":
            cursor.take("mark", ",")
    return found
