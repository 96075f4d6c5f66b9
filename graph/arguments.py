"""The doors of the package: arguments of public functions are checked where they come in, by declared kinds."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np

from .errors import HocketError
from .records import dataclass

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)
SHOWN = 60
"""Characters of a value in a message."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What an argument may be, in words and as a test."""

    words: str
    holds: Callable[[Any], bool]

    def __or__(self, other: Kind) -> Kind:
        return Kind(f"{self.words} or {other.words}", lambda v: self.holds(v) or other.holds(v))


def article(word: str) -> str:
    """The indefinite one."""
    return "an" if word[:1].lower() in tuple("aeio") else "a"


def near(word: object, known: Iterable[object], *, least: float = 0.6) -> str:
    """The end of a message about an unknown name: the known one that begins so, or else is most like it, if at
    least this share of the letters agrees, capital or not; else nothing."""
    from difflib import get_close_matches  # 2 ms that only mistakes pay

    if not isinstance(word, str) or len(word) > SHOWN:
        return ""
    names = {name.lower(): name for name in known if isinstance(name, str)}
    begun = [name for name in names if name.startswith(word.lower())] if len(word) > 2 else []
    matches = begun if len(begun) == 1 else get_close_matches(word.lower(), names, n=1, cutoff=least)
    return f"; near it: {names[matches[0]]}" if matches else ""


def a(*types: type, words: str = "") -> Kind:
    """An instance of one of `types`."""
    names = " or ".join(t.__name__ for t in types)
    return Kind(words or f"{article(names)} {names}", lambda v: isinstance(v, types))


def list_of(entry: Kind, words: str) -> Kind:
    """A sequence, other than text, of such entries."""

    def holds(v: Any) -> bool:
        listed = isinstance(v, (list, tuple, Sequence)) and not isinstance(v, (str, bytes))  # quickest for the first
        return listed and (entry is ANY or all(map(entry.holds, v)))

    return Kind(words, holds)


def tuple_of(entry: Kind, words: str) -> Kind:
    """A tuple of such entries."""
    return Kind(words, lambda v: isinstance(v, tuple) and all(map(entry.holds, v)))


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


def misfit(signature: inspect.Signature, given: Sequence[object], named: Mapping[str, object]) -> str:
    """Why a function of that signature cannot be called so; nothing if it can."""
    try:
        signature.bind(*given, **named)
    except TypeError as why:
        own = [name for name in signature.parameters if name != "self"]
        strange = next((name for name in named if name not in own), None)
        hint = near(strange, own) or f"; arguments: {', '.join(own)}"
        return (str(why) if strange is None else f"there is no argument {strange!r:.{SHOWN}}") + hint
    return ""


def _names(function: Callable[..., object]) -> tuple[str, ...]:
    """The arguments of a function in order; to ask for its whole signature takes ten times as long."""
    code = inspect.unwrap(function).__code__
    named = code.co_argcount + code.co_kwonlyargcount
    rest = bool(code.co_flags & inspect.CO_VARARGS)  # it stands before those that only a name gives
    names = code.co_varnames
    return (*names[: code.co_argcount], *names[named : named + rest], *names[code.co_argcount : named])


def needs(error: type[HocketError], **kinds: Kind) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A function whose arguments of these names are of these kinds: `error` is raised for any other, and for arguments
    that it does not have."""

    def checked(function: Callable[P, R]) -> Callable[P, R]:
        names = _names(function)
        who = function.__qualname__.removesuffix(".__init__")
        assert kinds.keys() <= set(names), who
        in_order = [kinds.get(name, ANY) for name in names]

        @wraps(function)
        def door(*given: P.args, **named: P.kwargs) -> R:
            if kinds:
                for name, kind, value in zip(names, in_order, given, strict=False):
                    if not kind.holds(value):
                        demand(error, who, name, value, kind)
                for name, value in named.items():
                    if name in kinds:
                        demand(error, who, name, value, kinds[name])
            try:
                return function(*given, **named)
            except TypeError:
                if why := misfit(inspect.signature(function), given, named):
                    raise error(f"{who}: {why}") from None
                raise

        return door

    return checked


def made_of(error: type[HocketError], **kinds: Kind) -> Callable[[C], C]:
    """A class whose constructor takes such arguments only, as `needs` says of functions."""

    def checked(record: C) -> C:
        record.__init__ = needs(error, **kinds)(record.__init__)  # type: ignore[misc]  # that of its dataclass
        return record

    return checked
