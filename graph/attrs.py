"""Attributes of nodes: keys for comparison, and the text of names and attributes in graph text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from .dtypes import DType
from .spec import MAX_SIZE
from .validation import ArgumentKind

Attr: TypeAlias = "bool | int | float | str | bytes | DType | tuple[Attr, ...] | None"
Attrs: TypeAlias = Mapping[str, Attr]

NO_ATTRS: Attrs = MappingProxyType({})
MAX_DEPTH = 8
"""The largest depth of nested tuples in one attribute."""


def is_plain_attribute(value: object, depth: int = 0) -> bool:
    """Return whether a value is plain data: a 64-bit number, text, bytes, a `DType`, None, or a tuple of them."""
    if isinstance(value, tuple):
        return depth < MAX_DEPTH and all(is_plain_attribute(v, depth + 1) for v in value)
    if type(value) is int:
        return abs(value) <= MAX_SIZE
    return value is None or type(value) in (bool, float, str, bytes, DType)


def are_attributes_plain(attrs: Attrs) -> bool:
    """Return whether each name of `attrs` is text, and each value is plain data (`is_plain_attribute`)."""
    return all(isinstance(name, str) and is_plain_attribute(value) for name, value in attrs.items())


def describe_attribute_fault(attrs: object) -> str:
    """Describe the first attribute with a value that graphs cannot store; empty if there is none.

    Attributes that are no mapping give an empty text too.
    """
    if not isinstance(attrs, Mapping) or not all(isinstance(name, str) for name in attrs):
        return ""
    wrong = [name for name, value in attrs.items() if not is_plain_attribute(value)]
    return f"attribute {quote_word(wrong[0])} has a value that a graph cannot keep" if wrong else ""


ATTRS_KIND = ArgumentKind(
    "a mapping from names to numbers of 64 bits, text, bytes, a DType, None, or tuples of them",
    lambda v: isinstance(v, Mapping) and are_attributes_plain(v),
    describe_attribute_fault,
)
"""The argument kind of the attributes of a node."""
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.~/-]+")
_WORD = re.compile(r"(?!inf\b|_$)[A-Za-z_][A-Za-z0-9_.]*")
_WITH_FLOATS = frozenset({float, tuple})
"""Types of attributes that may contain floats, which compare equal although they differ, such as 0.0 and -0.0."""


def make_attribute_key(attrs: Attrs) -> tuple[tuple[str, Attr], ...]:
    """Return a hashable key of attributes; keys are equal only for identical attributes.

    The key distinguishes 0.0 from -0.0, and NaN equals NaN.
    """
    return tuple([(name, repr(value) if type(value) in _WITH_FLOATS else value) for name, value in attrs.items()])


def quote_node_name(name: str) -> str:
    """Return the text of a node name after ``%``, as a JSON string unless the name is a plain word.

    A name of digits is quoted, because plain numbers stand for unnamed nodes.
    """
    return name if _PLAIN_NAME.fullmatch(name) and not name.isdecimal() else json.dumps(name)


def quote_word(name: str) -> str:
    """Return the name of an op, attribute or output as graph text, as a JSON string unless it is a plain word."""
    return name if _WORD.fullmatch(name) else json.dumps(name)


MAX_PLAIN_FLOAT_CHARACTERS = 12
"""The largest number of characters of a float. A longer float is written as a float32 if that is exact and shorter."""


def _format_float_shortest(value: float) -> str:
    """Return the shortest text that reads back as the same float.

    The suffix ``f`` marks a float32, such as ``1e-05f``: most numbers of models are rounded to float32.
    """
    text = repr(value)
    with np.errstate(over="ignore"):
        single = np.float32(value)
    short = f"{single!s}f"
    return short if float(single) == value and len(text) > MAX_PLAIN_FLOAT_CHARACTERS > len(short) else text


def format_attribute(value: Attr) -> str:
    """Return the value of one attribute as graph text, which the parser reads back."""
    match value:
        case None:
            return "none"
        case bool():
            return "true" if value else "false"
        case int():
            return repr(value)
        case float():
            return _format_float_shortest(value)
        case str():
            return json.dumps(value)
        case bytes():
            return f'x"{value.hex()}"'
        case DType():
            return value.text
        case tuple():
            return "(" + ", ".join(map(format_attribute, value)) + ("," if len(value) == 1 else "") + ")"
