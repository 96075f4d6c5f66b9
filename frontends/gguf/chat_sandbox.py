"""A jinja2 sandbox that a hostile chat template can neither leave, nor keep busy, nor fill memory from.

jinja2's own sandbox keeps a template from Python's internals, but ``{% for %}`` in ``{% for %}``, ``x ~ x`` in a loop
or ``'a' * 10**9`` are all legal there.  So every loop turn, macro call, filter, comparison and operator that makes text
burns fuel by the size of what it works on, and no text, and no list or mapping with all that it holds, may grow past
``MAX_TEXT``.  The count does not depend on the clock: a template always ends alike.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, MappingView, ValuesView
from functools import wraps
from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from ..errors import ModelError

MAX_TEXT_CHARACTERS = 1 << 22
"""Characters of the longest text a template may make, on the way or as its output."""
INITIAL_FUEL = 1 << 19
"""Loop turns, calls and operators that a template may use, each with a few characters or items."""
CHARACTERS_PER_FUEL, ITEMS_PER_FUEL = 64, 4
"""How many of them burn as much fuel as one step."""
MAX_INTEGER_BITS = 1 << 12
"""Size of the largest integer that ``*`` and ``**`` may make."""
WIDE_FIELD_PATTERN = re.compile(r"%[^a-zA-Z%]*(\d{6}|\*)|\{[^{}]*:[^{}]*(\d{6}|\{)")
"""A format that may pad its text to any width."""
GROWING_FILTERS = ("batch", "center", "format", "indent", "join", "replace", "slice", "wordwrap")
GROWING_METHODS = ("center", "expandtabs", "format", "format_map", "join", "ljust", "replace", "rjust", "zfill")
"""Filters, and methods of strings, whose result may be far longer than their arguments."""
SHALLOW_FILTERS = ("abs", "attr", "count", "d", "default", "first", "items", "last", "length", "round")
"""Filters that do not look at what a list, a mapping or a text holds."""
ITEMWISE_FILTERS = ("batch", "list", "map", "reject", "rejectattr", "reverse", "select", "selectattr", "slice")
"""Filters that look at the items of a list, but not into them."""
DEEP_TESTS = (
    "!=",
    "<",
    "<=",
    "==",
    ">",
    ">=",
    "eq",
    "equalto",
    "ge",
    "greaterthan",
    "gt",
    "in",
    "le",
    "lessthan",
    "lt",
    "ne",
)
"""Tests that look at all that their arguments hold."""
REMOVED_FILTERS = ("pprint", "striptags", "urlencode", "urlize", "wordcount", "wordwrap", "xmlattr")
"""Filters no chat template uses; they take much time for each character, some of them even with its square."""


class GenerationTag(Extension):
    """``{% generation %} … {% endgeneration %}`` marks what the model wrote (for training); here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class FuelInstrumenter(NodeTransformer):
    """Puts ``environment.burn()`` into every loop and macro, and turns ``a ~ b`` into a call that is counted.

    What a literal makes, and what is compared, goes through ``environment.paid()``, a slice through ``counted()``.
    """

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802  (the visitor's naming)
        return self._instrument(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802  (the visitor's naming)
        return self._instrument(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:  # noqa: N802  (the visitor's naming)
        return self._instrument(node)

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802  (the visitor's naming)
        return self._charge(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802  (the visitor's naming)
        return self._charge(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802  (the visitor's naming)
        return self._charge(node) if node.ctx == "load" else self.generic_visit(node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802  (the visitor's naming)
        self.generic_visit(node)
        return _build_call("charge_length", [node], node.lineno) if isinstance(node.arg, nodes.Slice) else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802  (the visitor's naming)
        self.generic_visit(node)
        node.expr = _build_call("charge_value", [node.expr], node.lineno)
        for operand in node.ops:
            operand.expr = _build_call("charge_value", [operand.expr], node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802  (the visitor's naming)
        self.generic_visit(node)
        return _build_call("join_texts", node.nodes, node.lineno)

    def _charge(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        return _build_call("charge_value", [node], node.lineno)

    def _instrument(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_build_call("consume_fuel", [], node.lineno), lineno=node.lineno))
        return node


def _build_call(method: str, args: list[nodes.Expr], lineno: int) -> nodes.Call:
    callee = nodes.EnvironmentAttribute(method, lineno=lineno)
    return nodes.Call(callee, args, [], None, None, lineno=lineno)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox for one rendering, with the names HF ``transformers`` gives to chat templates."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        self.remaining_fuel = INITIAL_FUEL
        tags = [loopcontrols, GenerationTag]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=tags, finalize=self.charge_value)
        self.concat = self.join_all  # type: ignore[method-assign]  # a hook of jinja2
        self.filters["tojson"] = to_json
        self.filters = {
            name: self._wrap_counted(name, run) for name, run in self.filters.items() if name not in REMOVED_FILTERS
        }
        self.tests |= {name: self._wrap_counted(name, self.tests[name]) for name in DEEP_TESTS}
        self.globals.pop("lipsum")
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = strftime_now

    def render_text(self, source: str, variables: Mapping[str, object]) -> str:
        """The output of the template ``source``; raises whatever its code raises."""
        tree = FuelInstrumenter().visit(self.parse(source))
        pieces, size = [], 0
        for piece in self.from_string(tree).generate(variables):
            size += len(piece)
            self._require_size(size)
            pieces.append(piece)
        return "".join(pieces)

    def consume_fuel(self, steps: int = 1) -> None:
        """Pay for so many steps."""
        self.remaining_fuel -= steps
        if self.remaining_fuel < 0:
            raise ModelError("the chat template does not come to an end; use another one, or plain text")

    def charge_value(self, value: Any) -> Any:
        """``value``, if its text is not too long, against fuel for all that it holds.

        Lists that hold each other can have text without end, and take as long to compare.
        """
        size, items, todo = 0, 0, [value]
        while todo:
            item = todo.pop()
            if isinstance(item, str):
                size += len(item)
            elif isinstance(item, Mapping) and not isinstance(item, Context):
                todo += [*item.keys(), *item.values()]
            elif isinstance(item, (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)):
                todo += item
            elif isinstance(item, range):
                items += len(item)
            elif isinstance(item, Namespace):
                todo.append(item._Namespace__attrs)  # its text shows them
            items += 1
            self._require_size(size + 8 * items)
        self.consume_fuel(1 + size // CHARACTERS_PER_FUEL + items // ITEMS_PER_FUEL)
        return value

    def charge_length(self, value: Any) -> Any:
        """``value``, against fuel for its length."""
        if isinstance(value, str):
            self.consume_fuel(1 + len(value) // CHARACTERS_PER_FUEL)
        elif isinstance(value, (Mapping, list, tuple, range, MappingView)) and not isinstance(value, Context):
            self._require_size(8 * len(value))
            self.consume_fuel(1 + len(value) // ITEMS_PER_FUEL)
        return value

    def join_texts(self, *parts: object) -> str:
        """``a ~ b ~ c``."""
        return self.join_all(str(self.charge_value(part)) for part in parts)

    def join_all(self, parts: Iterable[str]) -> str:
        """What macros and blocks wrote, as one text."""
        texts = list(parts)
        self._require_size(sum(map(len, texts)))
        made = "".join(texts)
        return self.charge_value(made)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operator that may make something large, allowed or refused by what it would make."""
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            times = abs(right) if operator == "**" else 1
            if left.bit_length() * times + right.bit_length() > MAX_INTEGER_BITS:
                raise ModelError("the chat template makes a number too large; use another one")
        elif operator == "*":
            times, series = sorted((left, right), key=lambda side: not isinstance(side, int))
            if isinstance(times, int) and isinstance(series, (str, list, tuple)):
                self._require_size(times * len(series) * (1 if isinstance(series, str) else 8))
        elif operator == "+":
            self._require_size(sum(len(side) for side in (left, right) if isinstance(side, (str, list, tuple))))
        elif operator == "%" and isinstance(left, str):
            self._require_growth((left, self.charge_value(right) and 1))
        made = super().call_binop(context, operator, left, right)
        # All that compares or prints a list pays for what it holds; of a tuple nobody sees when it is hashed.
        return self.charge_length(made) if isinstance(made, list) else self.charge_value(made)

    def call(self, context: Context, callee: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A call in the template, counted; methods of strings must not make a text too long."""
        method = getattr(callee, "__wrapped__", callee)  # jinja2 wraps str.format
        owner = getattr(method, "__self__", None)
        if owner is self:  # what `Meter` put there
            return callee(*args)
        if isinstance(owner, (str, list, tuple)):
            args = tuple(self.charge_value(list(arg) if isinstance(arg, Iterator) else arg) for arg in args)
            if isinstance(owner, str) and method.__name__ in GROWING_METHODS:
                self._require_growth((owner, *args, *kwargs.values()))
            self.charge_value(owner)
        return self.charge_value(super().call(context, callee, *args, **kwargs))

    def _wrap_counted(self, name: str, run: Any) -> Callable[..., Any]:
        @wraps(run)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if name in SHALLOW_FILTERS:
                self.consume_fuel()
                return run(*args, **kwargs)
            pay = self.charge_length if name in ITEMWISE_FILTERS else self.charge_value
            given = tuple(pay(list(arg) if isinstance(arg, Iterator) else arg) for arg in args)
            if name in GROWING_FILTERS:
                self._require_growth((*given, *kwargs.values()))
            return pay(run(*given, **kwargs))

        return counted

    def _require_size(self, size: int) -> None:
        if size > MAX_TEXT_CHARACTERS:
            raise ModelError(
                f"the chat template makes a text of more than {MAX_TEXT_CHARACTERS} characters; shorten the chat"
            )

    def _require_growth(self, given: Iterable[object]) -> None:
        """Refuse arguments whose sizes multiply to far more than ``MAX_TEXT`` (padding, repeating, replacing)."""
        product = 1
        for arg in given:
            if isinstance(arg, (str, list, tuple)):
                product *= max(1, len(arg))
            elif isinstance(arg, int):
                product *= max(1, abs(arg))
            if isinstance(arg, str) and WIDE_FIELD_PATTERN.search(arg):
                raise ModelError("the chat template formats text with a width it does not need; use another one")
        self._require_size(product // 4)


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
