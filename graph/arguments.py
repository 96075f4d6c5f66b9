"""The doors of the package: arguments of public functions are checked where they come in, by declared kinds."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np

from .errors import HocketError

P = ParamSpec("P")
R = TypeVar("R")
SHOWN = 60
"""Characters of a value in a message."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What an argument may be, in words and as a test."""

    words: str
    holds: Callable[[Any], bool]

    def __or__(self, other: Kind) -> Kind:
        return Kind(f"{self.words} or {other.words}", lambda v: self.holds(v) or other.holds(v))


def a(*types: type, words: str = "") -> Kind:
    """An instance of one of `types`."""
    names = " or ".join(t.__name__ for t in types)
    return Kind(words or f"a {names}", lambda v: isinstance(v, types))


def list_of(entry: Kind, words: str) -> Kind:
    """A sequence, other than text, of such entries."""
    return Kind(
        words, lambda v: isinstance(v, Sequence) and not isinstance(v, str | bytes) and all(map(entry.holds, v))
    )


def pair_of(first: Kind, second: Kind) -> Kind:
    return Kind(
        f"a pair of {first.words} and {second.words}",
        lambda v: isinstance(v, tuple | list) and len(v) == 2 and first.holds(v[0]) and second.holds(v[1]),
    )


def table_of(key: Kind, entry: Kind, words: str) -> Kind:
    """A mapping from such keys to such entries."""
    return Kind(
        words,
        lambda v: isinstance(v, Mapping) and all(map(key.holds, v)) and all(map(entry.holds, v.values())),
    )


def whole(low: int, high: int = sys.maxsize) -> Kind:
    """An integer in a range; False and True are none."""
    words = f"an integer from {low}" + ("" if high == sys.maxsize else f" to {high}")
    return Kind(words, lambda v: isinstance(v, int | np.integer) and not isinstance(v, bool) and bool(low <= v <= high))


def real(low: float, high: float) -> Kind:
    """A real number in a range; NaN is in none, and False and True are none."""
    return Kind(
        f"a number from {low:g} to {high:g}",
        lambda v: (
            isinstance(v, int | float | np.integer | np.floating) and not isinstance(v, bool) and bool(low <= v <= high)
        ),
    )


ANY = Kind("anything", lambda v: True)
TEXT = a(str, words="text")
NONE = Kind("None", lambda v: v is None)
CALLABLE = Kind("a function", callable)
FINITE = Kind("a finite number", real(-1e30, 1e30).holds)
BOOL = a(bool, words="True or False")


def shown(value: object) -> str:
    """A value as a message shows it: on one line and short, or what type it is of."""
    try:
        text = repr(value)
    except Exception:  # of what is not ours; Python itself refuses integers of more than 4,300 digits
        text = "\n"
    return f"a {type(value).__name__}" if "\n" in text else text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def demand(error: type[HocketError], who: str, name: str, value: object, kind: Kind) -> None:
    """Raise `error` unless `value` is of `kind`."""
    if not kind.holds(value):
        raise error(f"{who}: {name} is {shown(value)}; it must be {kind.words}")


def needs(error: type[HocketError], **kinds: Kind) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A function whose arguments of these names are of these kinds: `error` is raised for any other."""

    def checked(function: Callable[P, R]) -> Callable[P, R]:
        names = tuple(inspect.signature(function).parameters)
        who = function.__qualname__.removesuffix(".__init__")
        assert kinds.keys() <= set(names), who

        @wraps(function)
        def door(*given: P.args, **named: P.kwargs) -> R:
            for name, value in (*zip(names, given, strict=False), *named.items()):
                if name in kinds:
                    demand(error, who, name, value, kinds[name])
            return function(*given, **named)

        return door

    return checked
