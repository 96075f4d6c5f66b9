"""Attributes of nodes, and the text of names and attributes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from .dtypes import DType

Attr: TypeAlias = "bool | int | float | str | bytes | DType | tuple[Attr, ...] | None"
Attrs: TypeAlias = Mapping[str, Attr]

NO_ATTRS: Attrs = MappingProxyType({})
MAX_DEPTH = 8
"""The largest depth of nested tuples in one attribute."""

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.~/-]+")
_WORD = re.compile(r"(?!inf\b|_$)[A-Za-z_][A-Za-z0-9_.]*")
_WITH_FLOATS = frozenset({float, tuple})
"""Types of attributes with equal values that differ, such as 0.0 and -0.0."""


def attribute_key(attrs: Attrs) -> tuple[tuple[str, Attr], ...]:
    """Return a hashable key that is equal for equal attributes only: 0.0 is not -0.0, and NaN is itself."""
    return tuple([(name, repr(value) if type(value) in _WITH_FLOATS else value) for name, value in attrs.items()])


def quote_node_name(name: str) -> str:
    """Return the text of a node name after ``%``, in quotes unless plain. Plain numbers stand for unnamed nodes."""
    return name if _PLAIN_NAME.fullmatch(name) and not name.isdecimal() else json.dumps(name)


def quote_word(name: str) -> str:
    """Return the text of the name of an op, attribute or output, in quotes unless it is one word."""
    return name if _WORD.fullmatch(name) else json.dumps(name)


MAX_PLAIN_FLOAT_CHARACTERS = 12
"""Floats with more characters are written as a float32 if that text is exact and shorter."""


def _format_float(value: float) -> str:
    """Return the shortest exact text of a float; ``1e-05f`` is a float32, as most numbers of models are."""
    text = repr(value)
    with np.errstate(over="ignore"):
        single = np.float32(value)
    short = f"{single!s}f"
    return short if float(single) == value and len(text) > MAX_PLAIN_FLOAT_CHARACTERS > len(short) else text


def format_attribute(value: Attr) -> str:
    """Return the text of one attribute in a dump."""
    match value:
        case None:
            return "none"
        case bool():
            return "true" if value else "false"
        case int():
            return repr(value)
        case float():
            return _format_float(value)
        case str():
            return json.dumps(value)
        case bytes():
            return f'x"{value.hex()}"'
        case DType():
            return value.text
        case tuple():
            return "(" + ", ".join(map(format_attribute, value)) + ("," if len(value) == 1 else "") + ")"
