"""Attributes of nodes, and how names and attributes are written in text."""

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
"""Tuples within tuples in one attribute."""

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.~/-]+")
_WORD = re.compile(r"(?!inf\b|_$)[A-Za-z_][A-Za-z0-9_.]*")


def quote_node_name(name: str) -> str:
    """A node's name as text shows it after ``%``: in quotes unless plain; bare numbers are for unnamed nodes."""
    return name if _PLAIN_NAME.fullmatch(name) and not name.isdecimal() else json.dumps(name)


def quote_word(name: str) -> str:
    """The name of an op, attribute or output as text shows it: in quotes unless it reads as one word."""
    return name if _WORD.fullmatch(name) else json.dumps(name)


MAX_PLAIN_FLOAT_CHARACTERS = 12
"""Characters of a float that is written as a float32 if that is shorter."""


def _format_float(value: float) -> str:
    """A float as short as it reads back: ``1e-05f`` is the float32 nearest to it, as most numbers of models are."""
    text = repr(value)
    with np.errstate(over="ignore"):
        single = np.float32(value)
    short = f"{single!s}f"
    return short if float(single) == value and len(text) > MAX_PLAIN_FLOAT_CHARACTERS > len(short) else text


def format_attribute(value: Attr) -> str:
    """One attribute as the dump writes it."""
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
