"""The doors of the package: arguments of public functions are checked where they come in, by declared kinds."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np

from .errors import HocketError
from .lazy_dataclass import dataclass

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")
_Class = TypeVar("_Class", bound=type)
MAX_MESSAGE_CHARACTERS = 60
"""Characters of a value in a message."""


@dataclass(frozen=True, slots=True)
class ArgumentKind:
    """What an argument may be, in words and as a test."""

    description: str
    accepts: Callable[[Any], bool]

    def __or__(self, other: ArgumentKind) -> ArgumentKind:
        return ArgumentKind(f"{self.description} or {other.description}", lambda v: self.accepts(v) or other.accepts(v))


def indefinite_article(word: str) -> str:
    """The indefinite one."""
    return "an" if word[:1].lower() in tuple("aeio") else "a"


def did_you_mean(word: object, known: Iterable[object], *, least: float = 0.6) -> str:
    """The end of a message about an unknown name: the known one that begins so, or else is most like it, if at
    least this share of the letters agrees, capital or not; else nothing."""
    from difflib import get_close_matches  # 2 ms that only mistakes pay

    if not isinstance(word, str) or len(word) > MAX_MESSAGE_CHARACTERS:
        return ""
    names = {name.lower(): name for name in known if isinstance(name, str)}
    begun = [name for name in names if name.startswith(word.lower())] if len(word) > 2 else []
    matches = begun if len(begun) == 1 else get_close_matches(word.lower(), names, n=1, cutoff=least)
    return f"; near it: {names[matches[0]]}" if matches else ""


def instance_of(*types: type, words: str = "") -> ArgumentKind:
    """An instance of one of `types`."""
    names = " or ".join(t.__name__ for t in types)
    return ArgumentKind(words or f"{indefinite_article(names)} {names}", lambda v: isinstance(v, types))


def list_of(entry: ArgumentKind, words: str) -> ArgumentKind:
    """A sequence, other than text, of such entries."""

    def holds(v: Any) -> bool:
        listed = isinstance(v, (list, tuple, Sequence)) and not isinstance(v, (str, bytes))  # quickest for the first
        return listed and (entry is ANY or all(map(entry.accepts, v)))

    return ArgumentKind(words, holds)


def tuple_of(entry: ArgumentKind, words: str) -> ArgumentKind:
    """A tuple of such entries."""
    return ArgumentKind(words, lambda v: isinstance(v, tuple) and all(map(entry.accepts, v)))


def pair_of(first: ArgumentKind, second: ArgumentKind) -> ArgumentKind:
    return ArgumentKind(
        f"a pair of {first.description} and {second.description}",
        lambda v: isinstance(v, tuple | list) and len(v) == 2 and first.accepts(v[0]) and second.accepts(v[1]),
    )


def mapping_of(key: ArgumentKind, entry: ArgumentKind, words: str) -> ArgumentKind:
    """A mapping from such keys to such entries."""
    return ArgumentKind(
        words,
        lambda v: isinstance(v, Mapping) and all(map(key.accepts, v)) and all(map(entry.accepts, v.values())),
    )


def integer_between(low: int, high: int = sys.maxsize) -> ArgumentKind:
    """An integer in a range; False and True are none."""
    words = f"an integer from {low}" + ("" if high == sys.maxsize else f" to {high}")
    return ArgumentKind(
        words, lambda v: isinstance(v, int | np.integer) and not isinstance(v, bool) and bool(low <= v <= high)
    )


def number_between(low: float, high: float) -> ArgumentKind:
    """A real number in a range; NaN is in none, and False and True are none."""
    return ArgumentKind(
        f"a number from {low:g} to {high:g}",
        lambda v: (
            isinstance(v, int | float | np.integer | np.floating) and not isinstance(v, bool) and bool(low <= v <= high)
        ),
    )


ANY = ArgumentKind("anything", lambda v: True)
TEXT = instance_of(str, words="text")
NONE = ArgumentKind("None", lambda v: v is None)
CALLABLE = ArgumentKind("a function", callable)
FINITE = ArgumentKind("a finite number", number_between(-1e30, 1e30).accepts)
BOOL = instance_of(bool, words="True or False")


def format_value(value: object) -> str:
    """A value as a message shows it: on one line and short, or what type it is of."""
    try:
        text = repr(value)
    except Exception:  # of what is not ours; Python itself refuses integers of more than 4,300 digits
        text = "\n"
    return (
        f"a {type(value).__name__}"
        if "\n" in text
        else text
        if len(text) <= MAX_MESSAGE_CHARACTERS
        else f"{text[: MAX_MESSAGE_CHARACTERS - 3]}..."
    )


def require(error: type[HocketError], who: str, name: str, value: object, kind: ArgumentKind) -> None:
    """Raise `error` unless `value` is of `kind`."""
    if not kind.accepts(value):
        raise error(f"{who}: {name} is {format_value(value)}; it must be {kind.description}")


def describe_call_mismatch(signature: inspect.Signature, given: Sequence[object], named: Mapping[str, object]) -> str:
    """Why a function of that signature cannot be called so; nothing if it can."""
    try:
        signature.bind(*given, **named)
    except TypeError as why:
        own = [name for name in signature.parameters if name != "self"]
        strange = next((name for name in named if name not in own), None)
        hint = did_you_mean(strange, own) or f"; arguments: {', '.join(own)}"
        return (str(why) if strange is None else f"there is no argument {strange!r:.{MAX_MESSAGE_CHARACTERS}}") + hint
    return ""


def _list_parameter_names(function: Callable[..., object]) -> tuple[str, ...]:
    """The arguments of a function in order; to ask for its whole signature takes ten times as long."""
    code = inspect.unwrap(function).__code__
    named = code.co_argcount + code.co_kwonlyargcount
    rest = bool(code.co_flags & inspect.CO_VARARGS)  # it stands before those that only a name gives
    names = code.co_varnames
    return (*names[: code.co_argcount], *names[named : named + rest], *names[code.co_argcount : named])


def validate_arguments(
    error: type[HocketError], **kinds: ArgumentKind
) -> Callable[[Callable[_Params, _Result]], Callable[_Params, _Result]]:
    """A function whose arguments of these names are of these kinds: `error` is raised for any other, and for arguments
    that it does not have."""

    def decorate(function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
        names = _list_parameter_names(function)
        who = function.__qualname__.removesuffix(".__init__")
        assert kinds.keys() <= set(names), who
        in_order = [kinds.get(name, ANY) for name in names]

        @wraps(function)
        def door(*given: _Params.args, **named: _Params.kwargs) -> _Result:
            if kinds:
                for name, kind, value in zip(names, in_order, given, strict=False):
                    if not kind.accepts(value):
                        require(error, who, name, value, kind)
                for name, value in named.items():
                    if name in kinds:
                        require(error, who, name, value, kinds[name])
            try:
                return function(*given, **named)
            except TypeError:
                if why := describe_call_mismatch(inspect.signature(function), given, named):
                    raise error(f"{who}: {why}") from None
                raise

        return door

    return decorate


def validate_constructor(error: type[HocketError], **kinds: ArgumentKind) -> Callable[[_Class], _Class]:
    """A class whose constructor takes such arguments only, as `needs` says of functions."""

    def decorate(record: _Class) -> _Class:
        record.__init__ = validate_arguments(error, **kinds)(record.__init__)  # type: ignore[misc]  # that of its dataclass
        return record

    return decorate
