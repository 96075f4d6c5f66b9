"""Node attributes, checked and converted by the type annotations of the parameters of the reference function.

An annotation is a key of `ATTRIBUTE_TYPES`, or a tuple of one type: ``tuple[int, ...]``. Tuples nest.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from ...graph.attrs import Attr, Attrs
from ...graph.dtypes import DType, find_dtype
from ...graph.validation import format_value
from .signature import SignatureMismatch

MAX_ATTRIBUTE_CHARACTERS = 200
"""Maximum characters of a text attribute."""
_MIN_FLOAT32_OVERFLOW = (2 - 2**-24) * 2.0**127
"""The smallest number that float32 rounds to infinity; kernels compute with attributes in float32."""


def _as_int(value: object) -> int:
    if isinstance(value, bool):
        raise TypeError
    number = operator.index(value)  # type: ignore[arg-type]  # raises TypeError, as wanted
    if not -(2**63) <= number < 2**63:
        raise TypeError
    return number


def _as_float(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise TypeError
    number = float(value)
    if _MIN_FLOAT32_OVERFLOW <= abs(number) < math.inf:
        raise TypeError
    return number


def _as_bool(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _as_text(value: object) -> str:
    if not isinstance(value, str) or len(value) > MAX_ATTRIBUTE_CHARACTERS:
        raise TypeError
    return value


def _as_dtype(value: object) -> DType:
    dtype = find_dtype(value)
    if dtype is None:
        raise TypeError
    return dtype


ATTRIBUTE_TYPES: Mapping[str, tuple[str, Callable[[object], Attr]]] = MappingProxyType(
    {
        "int": ("an integer of 64 bits", _as_int),
        "float": ("a number of at most 3.4028235e38 in magnitude, or an infinity", _as_float),
        "bool": ("true or false", _as_bool),
        "str": (f"text of at most {MAX_ATTRIBUTE_CHARACTERS} characters", _as_text),
        "DType": ("a DType or the name of one", _as_dtype),
    }
)
"""By annotation: the needed type as text for messages, and the conversion, which raises `TypeError`."""


def float_attribute(attrs: Attrs, name: str) -> float:
    """Return attribute `name` as a float. `normalise_attribute` has checked that it is a number."""
    value = attrs[name]
    assert isinstance(value, int | float), f"{name} is normalised to a number"
    return value


def normalise_attribute(name: str, annotation: str, value: object) -> Attr:
    """Check the value of an attribute, and convert it to the type that a graph stores for `annotation`.

    Args:
        name: name of the attribute, for the message.
        annotation: a key of `ATTRIBUTE_TYPES` or a tuple of one, as text.
        value: value of the caller.

    Raises:
        SignatureMismatch: the value has another type.
    """
    need, convert = _find_attribute_type(annotation)
    try:
        return convert(value)
    except (TypeError, ValueError, OverflowError):
        raise SignatureMismatch(f"{name} is {format_value(value)}; it must be {need}") from None


def is_attribute_type(annotation: str) -> bool:
    """Return whether graphs can store attributes with the type annotation `annotation`."""
    inner = annotation.removeprefix("tuple[").removesuffix(", ...]")
    return inner in ATTRIBUTE_TYPES or (inner != annotation and is_attribute_type(inner))


def _find_attribute_type(annotation: str) -> tuple[str, Callable[[object], Attr]]:
    if not annotation.startswith("tuple["):
        return ATTRIBUTE_TYPES[annotation]
    inner = annotation.removeprefix("tuple[").removesuffix("]").removesuffix(", ...")
    need, convert = _find_attribute_type(inner)

    def convert_entries(value: object) -> Attr:
        if not isinstance(value, tuple | list):
            raise TypeError
        return tuple(map(convert, value))

    return f"a tuple, each entry {need}", convert_entries
