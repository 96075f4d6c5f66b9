"""A jinja2 sandbox with limits on time and memory, for hostile chat templates.

The sandbox of jinja2 hides the internals of Python. It permits nested loops, ``x ~ x`` in a loop and ``'a' * 10**9``.
This sandbox adds two limits:

1. Fuel: each loop iteration, macro call, filter, comparison and text operator consumes fuel in proportion to its
   data.
2. Size: no text, list or mapping may exceed `MAX_TEXT_CHARACTERS`, contents included.

Fuel is a budget of execution steps. It is independent of the clock, so a template has the same result on every
machine. Example: the loop ``{% for x in range(9) %}`` consumes 9 units for the iterations, and more for the call of
``range`` and for each output.
"""

from __future__ import annotations

import datetime
import json
import re
import threading
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, MappingView, ValuesView
from functools import lru_cache, wraps
from typing import Any

from jinja2 import Template, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from ..errors import ModelError

MAX_TEXT_CHARACTERS = 1 << 22
"""Characters of the longest intermediate text or output of a template."""
INITIAL_FUEL = 1 << 19
"""Units of fuel of one rendering; a loop iteration, a call or an operator on little data consumes one unit."""
CHARACTERS_PER_FUEL, ITEMS_PER_FUEL = 64, 4
"""Characters of text, and items of a collection, that consume one unit of fuel."""
MAX_COMPILED_TEMPLATES = 16
"""Compiled templates in memory; the least recently used one is dropped."""
MAX_INTEGER_BITS = 1 << 12
"""Bits of the largest integer that ``*`` and ``**`` may produce."""
WIDE_FIELD_PATTERN = re.compile(r"%[^a-zA-Z%]*(\d{6}|\*)|\{[^{}]*:[^{}]*(\d{6}|\{)")
"""A format with a width of six or more digits, or with a variable width."""
GROWING_FILTERS = ("batch", "center", "format", "indent", "join", "replace", "slice", "wordwrap")
GROWING_METHODS = ("center", "expandtabs", "format", "format_map", "join", "ljust", "replace", "rjust", "zfill")
"""Filters, and methods of strings, with results that may be far longer than their arguments."""
SHALLOW_FILTERS = ("abs", "attr", "count", "d", "default", "first", "items", "last", "length", "round")
"""Filters that do not read the contents of a list, a mapping or a text; they consume one unit."""
ITEMWISE_FILTERS = ("batch", "list", "map", "reject", "rejectattr", "reverse", "select", "selectattr", "slice")
"""Filters that visit the items of a list, but not the contents of the items."""
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
"""Tests that read their arguments completely."""
REMOVED_FILTERS = ("pprint", "striptags", "urlencode", "urlize", "wordcount", "wordwrap", "xmlattr")
"""Filters that no chat template uses; their time per character is high, for some of them quadratic."""


class IgnoredGenerationTag(Extension):
    """A jinja2 extension that accepts and ignores ``{% generation %} ... {% endgeneration %}``.

    The tag marks text of the model for training.
    """

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class FuelInstrumenter(NodeTransformer):
    """Rewrites a chat template so that each execution step is counted, because a hostile template could run forever.

    The syntax tree gets calls of methods of `LimitedChatSandbox`. Fuel is the number of steps that are left.

    - Loops and macros begin with ``consume_fuel()``.
    - Literals and comparison operands pass through ``charge_value()``, slices through ``charge_length()``.
    - ``a ~ b`` becomes ``join_texts(a, b)``.
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


class FuelGauge(threading.local):
    """How many execution steps ("fuel") a template may still take; each thread that renders has its own count."""

    remaining = INITIAL_FUEL


class LimitedChatSandbox(ImmutableSandboxedEnvironment):
    """The jinja2 environment of one template: a sandbox with fuel, size limits and the functions of transformers.

    Any number of threads may render the template. The fuel is the only state of a rendering outside of its context.
    """

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        self._fuel = FuelGauge()
        tags = [loopcontrols, IgnoredGenerationTag]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=tags, finalize=self.charge_value)
        self.concat = self.join_output_pieces  # type: ignore[method-assign]  # a hook of jinja2
        self.filters["tojson"] = to_json_without_html_escapes
        self.filters = {
            name: self._wrap_counted(name, run) for name, run in self.filters.items() if name not in REMOVED_FILTERS
        }
        self.tests |= {name: self._wrap_counted(name, self.tests[name]) for name in DEEP_TESTS}
        self.globals.pop("lipsum")
        self.globals["raise_exception"] = raise_template_error
        self.globals["strftime_now"] = strftime_now

    def compile_template_charging_constants(self, source: str) -> Template:
        """Compile the template `source`; constants that jinja2 computes in advance count as execution steps.

        Syntax errors propagate.
        """
        self._fuel.remaining = INITIAL_FUEL
        return self.from_string(FuelInstrumenter().visit(self.parse(source)))

    def render_template_with_fuel(self, template: Template, variables: Mapping[str, object]) -> str:
        """Render a compiled template with a new budget of execution steps; exceptions of the template propagate."""
        self._fuel.remaining = INITIAL_FUEL
        pieces, size = [], 0
        for piece in template.generate(variables):
            size += len(piece)
            self._require_size(size)
            pieces.append(piece)
        return "".join(pieces)

    def consume_fuel(self, steps: int = 1) -> None:
        """Subtract `steps` from the remaining fuel, the budget of execution steps of one rendering.

        Raises:
            ModelError: The fuel is exhausted.
        """
        self._fuel.remaining -= steps
        if self._fuel.remaining < 0:
            raise ModelError("the chat template does not come to an end; use another one, or plain text")

    def charge_value(self, value: Any) -> Any:
        """Consume fuel (steps of the execution budget) for the complete contents of `value`, and return `value`.

        The contents of nested lists count too. Lists that contain each other have endless contents, so the traversal
        stops at `MAX_TEXT_CHARACTERS`.
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
        """Consume fuel (steps of the execution budget) for the length of `value`, and return `value`.

        The contents of its entries do not count; see `charge_value`.
        """
        if isinstance(value, str):
            self.consume_fuel(1 + len(value) // CHARACTERS_PER_FUEL)
        elif isinstance(value, (Mapping, list, tuple, range, MappingView)) and not isinstance(value, Context):
            self._require_size(8 * len(value))
            self.consume_fuel(1 + len(value) // ITEMS_PER_FUEL)
        return value

    def join_texts(self, *parts: object) -> str:
        """Join values as one text, as ``a ~ b`` in a template does; the values consume fuel for their sizes first."""
        return self.join_output_pieces(str(self.charge_value(part)) for part in parts)

    def join_output_pieces(self, parts: Iterable[str]) -> str:
        """Join the output pieces of a macro or a block to one text; raise an error if the text is too long."""
        texts = list(parts)
        self._require_size(sum(map(len, texts)))
        text = "".join(texts)
        return self.charge_value(text)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply a binary operator of a template, after a check that its result is not too large."""
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
            self._require_bounded_result_size((left, self.charge_value(right) and 1))
        result = super().call_binop(context, operator, left, right)
        # Comparing or printing a list consumes fuel later. Hashing a tuple does not, so its contents are charged here.
        return self.charge_length(result) if isinstance(result, list) else self.charge_value(result)

    def call(self, context: Context, callee: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function for a template, and refuse a result that is too large.

        The arguments consume fuel (steps of the execution budget) before the call.
        """
        method = getattr(callee, "__wrapped__", callee)  # jinja2 wraps str.format
        owner = getattr(method, "__self__", None)
        if owner is self:  # inserted by `FuelInstrumenter`
            return callee(*args)
        if isinstance(owner, (str, list, tuple)):
            args = tuple(self.charge_value(list(arg) if isinstance(arg, Iterator) else arg) for arg in args)
            if isinstance(owner, str) and method.__name__ in GROWING_METHODS:
                self._require_bounded_result_size((owner, *args, *kwargs.values()))
            self.charge_value(owner)
        return self.charge_value(super().call(context, callee, *args, **kwargs))

    def _wrap_counted(self, name: str, run: Any) -> Callable[..., Any]:
        @wraps(run)
        def count_call(*args: Any, **kwargs: Any) -> Any:
            if name in SHALLOW_FILTERS:
                self.consume_fuel()
                return run(*args, **kwargs)
            pay = self.charge_length if name in ITEMWISE_FILTERS else self.charge_value
            charged = tuple(pay(list(arg) if isinstance(arg, Iterator) else arg) for arg in args)
            if name in GROWING_FILTERS:
                self._require_bounded_result_size((*charged, *kwargs.values()))
            return pay(run(*charged, **kwargs))

        return count_call

    def _require_size(self, size: int) -> None:
        if size > MAX_TEXT_CHARACTERS:
            raise ModelError(
                f"the chat template makes a text of more than {MAX_TEXT_CHARACTERS} characters; shorten the chat"
            )

    def _require_bounded_result_size(self, arguments: Iterable[object]) -> None:
        """Raise `ModelError` if the result of a call with these arguments could exceed the size limit.

        Padding, repeating and replacing can make a result much longer than the arguments. The estimate of the size is
        the product of the argument sizes.
        """
        product = 1
        for arg in arguments:
            if isinstance(arg, (str, list, tuple)):
                product *= max(1, len(arg))
            elif isinstance(arg, int):
                product *= max(1, abs(arg))
            if isinstance(arg, str) and WIDE_FIELD_PATTERN.search(arg):
                raise ModelError("the chat template formats text with a width it does not need; use another one")
        self._require_size(product // 4)


class CompiledChatTemplate:
    """A compiled chat template.

    Any number of threads may render it.

    Args:
        source: The jinja2 text of the template.
    """

    def __init__(self, source: str) -> None:
        self._environment = LimitedChatSandbox()
        self._template = self._environment.compile_template_charging_constants(source)

    def render_with_new_fuel(self, variables: Mapping[str, object]) -> str:
        """Render the template with these variables and a new budget of execution steps.

        Exceptions of the template propagate.
        """
        return self._environment.render_template_with_fuel(self._template, variables)


@lru_cache(MAX_COMPILED_TEMPLATES)
def compile_chat_template(source: str) -> CompiledChatTemplate:
    """Return the compiled template of a text; a compilation takes milliseconds, and leaves thousands of objects."""
    return CompiledChatTemplate(source)


def to_json_without_html_escapes(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return `value` as JSON text, without the HTML escapes of ``<``, ``>`` and ``&`` that jinja2's ``tojson`` adds."""
    indent = None if indent is None else min(indent, 16)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_template_error(message: object) -> None:
    """Raise a `ModelError` with `message`; a template calls this function to refuse its input."""
    text = " ".join(str(message).split())[:200]
    raise ModelError(f"the chat template refuses these messages: {text}")


def strftime_now(format: str) -> str:
    """Return the current local time in the given format; templates call this function."""
    return datetime.datetime.now().strftime(format)
