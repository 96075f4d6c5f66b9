"""A jinja2 sandbox that a hostile chat template can neither leave, nor keep busy, nor fill memory from.

jinja2's own sandbox keeps a template from Python's internals, but ``{% for %}`` in ``{% for %}``, ``x ~ x`` in a loop
or ``'a' * 10**9`` are all legal there.  So every loop turn, macro call, filter and operator that makes text burns
fuel, and no text may grow past ``MAX_TEXT``.  The count does not depend on the clock: a template always ends alike.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from ..errors import ModelError

MAX_TEXT = 1 << 23
"""Characters of the longest text a template may make, on the way or as its output."""
FUEL = 1 << 20
"""Loop turns, calls and operators, and 256 characters made by one of those, that a template may use."""
MAX_BITS = 1 << 12
"""Size of the largest integer that ``*`` and ``**`` may make."""
WIDE_FIELD = re.compile(r"%[^a-zA-Z%]*(\d{6}|\*)|\{[^{}]*:[^{}]*(\d{6}|\{)")
"""A format that may pad its text to any width."""
GROWING = ("batch", "center", "format", "indent", "join", "replace", "slice", "wordwrap")
GROWING_METHODS = ("center", "expandtabs", "format", "format_map", "join", "ljust", "replace", "rjust", "zfill")
"""Filters, and methods of strings, whose result may be far longer than their arguments."""
NOT_PRINTING = (
    *(
        "abs",
        "attr",
        "count",
        "d",
        "default",
        "dictsort",
        "first",
        "float",
        "groupby",
        "int",
        "items",
        "last",
        "length",
    ),
    *(
        "list",
        "map",
        "max",
        "min",
        "reject",
        "rejectattr",
        "reverse",
        "round",
        "select",
        "selectattr",
        "sort",
        "unique",
    ),
)
"""Filters that do not turn a list or a mapping into text."""
UNUSED = ("pprint", "urlize", "xmlattr", "striptags")
"""Filters no chat template uses, and some of which take time that grows with the square of the text."""


class GenerationTag(Extension):
    """``{% generation %} … {% endgeneration %}`` marks what the model wrote (for training); here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Meter(NodeTransformer):
    """Puts ``environment.burn()`` into every loop and macro, and turns ``a ~ b`` into a call that is counted."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802  (the visitor's naming)
        return self._metered(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802  (the visitor's naming)
        return self._metered(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:  # noqa: N802  (the visitor's naming)
        return self._metered(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802  (the visitor's naming)
        self.generic_visit(node)
        return _call("join_texts", node.nodes, node.lineno)

    def _metered(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("burn", [], node.lineno), lineno=node.lineno))
        return node


def _call(method: str, args: list[nodes.Expr], lineno: int) -> nodes.Call:
    callee = nodes.EnvironmentAttribute(method, lineno=lineno)
    return nodes.Call(callee, args, [], None, None, lineno=lineno)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox for one rendering, with the names HF ``transformers`` gives to chat templates."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        self.fuel = FUEL
        tags = [loopcontrols, GenerationTag]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=tags, finalize=self.printable)
        self.concat = self.join_all  # type: ignore[method-assign]  # a hook of jinja2
        self.filters["tojson"] = to_json
        self.filters = {name: self._counted(name, run) for name, run in self.filters.items() if name not in UNUSED}
        self.globals.pop("lipsum")
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = strftime_now

    def render_text(self, source: str, variables: Mapping[str, object]) -> str:
        """The output of the template ``source``; raises whatever its code raises."""
        tree = Meter().visit(self.parse(source))
        pieces, size = [], 0
        for piece in self.from_string(tree).generate(variables):
            size += len(piece)
            self._allow(size)
            pieces.append(piece)
        return "".join(pieces)

    def burn(self, made: object = None) -> None:
        """Pay for one step and for the text it made."""
        size = len(made) if isinstance(made, (str, list, tuple)) else 0
        self._allow(size)
        self.fuel -= 1 + size // 256
        if self.fuel < 0:
            raise ModelError("the chat template does not come to an end; use another one, or plain text")

    def printable(self, value: Any) -> Any:
        """``value``, if its text is not too long; lists that hold each other can have text without end."""
        size, todo = 0, [value]
        while todo:
            item = todo.pop()
            if isinstance(item, str):
                size += len(item)
            elif isinstance(item, Mapping):
                todo += [*item.keys(), *item.values()]
            elif isinstance(item, (list, tuple, set, frozenset)):
                todo += item
            size += 8
            self._allow(size)
        return value

    def join_texts(self, *parts: object) -> str:
        """``a ~ b ~ c``."""
        return self.join_all(str(self.printable(part)) for part in parts)

    def join_all(self, parts: Iterable[str]) -> str:
        """What macros and blocks wrote, as one text."""
        texts = list(parts)
        self._allow(sum(map(len, texts)))
        made = "".join(texts)
        self.burn(made)
        return made

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operator that may make something large, allowed or refused by what it would make."""
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            times = abs(right) if operator == "**" else 1
            if left.bit_length() * times + right.bit_length() > MAX_BITS:
                raise ModelError("the chat template makes a number too large; use another one")
        elif operator == "*":
            self._allow_growth((left, right))
        elif operator == "+":
            self._allow(sum(len(side) for side in (left, right) if isinstance(side, (str, list, tuple))))
        elif operator == "%" and isinstance(left, str):
            self._allow_growth((left, self.printable(right) and 1))
        made = super().call_binop(context, operator, left, right)
        self.burn(made)
        return made

    def call(self, context: Context, callee: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A call in the template, counted; methods of strings must not make a text too long."""
        method = getattr(callee, "__wrapped__", callee)  # jinja2 wraps str.format
        text = getattr(method, "__self__", None)
        if isinstance(text, str):
            args = self._given(args)
            if method.__name__ in GROWING_METHODS:
                self._allow_growth((text, *args, *kwargs.values()))
            self.burn(text)
        made = super().call(context, callee, *args, **kwargs)
        self.burn(made)
        return made

    def _counted(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(run)
        def counted(*args: Any, **kwargs: Any) -> Any:
            given = args if name in NOT_PRINTING else self._given(args)
            if name in GROWING:
                self._allow_growth((*given, *kwargs.values()))
            for arg in given:
                self.burn(arg)
            made = run(*given, **kwargs)
            self.burn(made)
            return made

        return counted

    def _given(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments that are about to become text; an iterator becomes a list, as its length must be known."""
        return tuple(self.printable(list(arg) if isinstance(arg, Iterator) else arg) for arg in args)

    def _allow(self, size: int) -> None:
        if size > MAX_TEXT:
            raise ModelError(f"the chat template makes a text of more than {MAX_TEXT} characters; shorten the chat")

    def _allow_growth(self, given: Iterable[object]) -> None:
        """Refuse arguments whose sizes multiply to far more than ``MAX_TEXT`` (padding, repeating, replacing)."""
        product = 1
        for arg in given:
            if isinstance(arg, (str, list, tuple)):
                product *= max(1, len(arg))
            elif isinstance(arg, int):
                product *= max(1, abs(arg))
            if isinstance(arg, str) and WIDE_FIELD.search(arg):
                raise ModelError("the chat template formats text with a width it does not need; use another one")
        self._allow(product // 16)


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter ``tojson`` as chat templates expect it: jinja2's own one escapes ``<``, ``>`` and ``&`` for HTML."""
    indent = None if indent is None else min(indent, 16)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: object) -> None:
    """How a template says that it cannot take these messages."""
    said = " ".join(str(message).split())[:200]
    raise ModelError(f"the chat template refuses these messages: {said}")


def strftime_now(format: str) -> str:
    """The local time, formatted."""
    return datetime.datetime.now().strftime(format)
