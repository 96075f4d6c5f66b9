"""Validation of the arguments of public functions by declared argument kinds."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from numbers import Integral
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np

from .errors import HocketError
from .lazy_dataclass import dataclass

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")
_Class = TypeVar("_Class", bound=type)
MAX_MESSAGE_CHARACTERS = 60
"""The largest number of characters of one value in a message."""


@dataclass(frozen=True, slots=True)
class ArgumentKind:
    """A kind of argument: a test function, and a description of accepted arguments for error messages.

    `describe_fault` describes the fault inside an argument of the right class; it is empty for other arguments.
    """

    description: str
    accepts: Callable[[Any], bool]
    describe_fault: Callable[[Any], str] = lambda value: ""

    def __or__(self, other: ArgumentKind) -> ArgumentKind:
        return ArgumentKind(
            f"{self.description} or {other.description}",
            lambda v: self.accepts(v) or other.accepts(v),
            lambda v: self.describe_fault(v) or other.describe_fault(v),
        )


def indefinite_article(word: str) -> str:
    """Return "a" or "an", whichever is right before `word`."""
    return "an" if word[:1].lower() in tuple("aeio") else "a"


def did_you_mean(word: object, known: Iterable[object], *, min_ratio: float = 0.6) -> str:
    """Return the hint "; did you mean NAME" with the most similar known name, or an empty string.

    A single known name that begins with `word` wins. Case is ignored.

    Args:
        word: The unknown name.
        known: The known names. Entries that are not text are ignored.
        min_ratio: The smallest similarity, from 0 to 1, as `difflib.SequenceMatcher.ratio` defines it.
    """
    from difflib import get_close_matches  # the import takes 2 ms, which only an error pays

    if not isinstance(word, str) or len(word) > MAX_MESSAGE_CHARACTERS:
        return ""
    names = {name.lower(): name for name in known if isinstance(name, str)}
    completions = [name for name in names if name.startswith(word.lower())] if len(word) > 2 else []
    is_unique = len(completions) == 1
    matches = completions if is_unique else get_close_matches(word.lower(), names, n=1, cutoff=min_ratio)
    return f"; did you mean {names[matches[0]]}" if matches else ""


def instance_of(*types: type, description: str = "") -> ArgumentKind:
    """Return the argument kind that accepts the instances of `types`."""
    names = " or ".join(t.__name__ for t in types)
    return ArgumentKind(description or f"{indefinite_article(names)} {names}", lambda v: isinstance(v, types))


def list_of(entry: ArgumentKind, description: str) -> ArgumentKind:
    """Return the argument kind that accepts sequences, except text and bytes, in which each entry is of kind `entry`.

    `description` describes such sequences in error messages.
    """

    def accepts(v: Any) -> bool:
        is_sequence = isinstance(v, (list, tuple, Sequence)) and not isinstance(v, (str, bytes))  # frequent types first
        return is_sequence and (entry is ANY or all(map(entry.accepts, v)))

    return ArgumentKind(description, accepts)


def tuple_of(entry: ArgumentKind, description: str) -> ArgumentKind:
    """Return the argument kind that accepts tuples in which each entry is of kind `entry`.

    `description` describes such tuples in error messages.
    """
    return ArgumentKind(description, lambda v: isinstance(v, tuple) and all(map(entry.accepts, v)))


def pair_of(first: ArgumentKind, second: ArgumentKind) -> ArgumentKind:
    """Return the argument kind that accepts pairs: tuples and lists of two entries of these kinds."""
    return ArgumentKind(
        f"a pair of {first.description} and {second.description}",
        lambda v: isinstance(v, tuple | list) and len(v) == 2 and first.accepts(v[0]) and second.accepts(v[1]),
    )


def mapping_of(key: ArgumentKind, entry: ArgumentKind, description: str) -> ArgumentKind:
    """Return the argument kind that accepts mappings from keys of kind `key` to values of kind `entry`.

    `description` describes such mappings in error messages.
    """
    return ArgumentKind(
        description,
        lambda v: isinstance(v, Mapping) and all(map(key.accepts, v)) and all(map(entry.accepts, v.values())),
    )


def integer_between(low: int, high: int = sys.maxsize) -> ArgumentKind:
    """Return the argument kind that accepts integers from `low` to `high`, except False and True."""
    return ArgumentKind(
        f"an integer from {low} to {high}",
        lambda v: isinstance(v, int | np.integer) and not isinstance(v, bool) and bool(low <= v <= high),
    )


def convert_integers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments by name with every integer of another type, such as ``np.int64``, as an `int`."""
    return {
        name: int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value
        for name, value in values.items()
    }


def number_between(low: float, high: float) -> ArgumentKind:
    """Return the argument kind that accepts real numbers from `low` to `high`. It rejects NaN, False and True."""
    return ArgumentKind(
        f"a number from {low:g} to {high:g}",
        lambda v: (
            isinstance(v, int | float | np.integer | np.floating) and not isinstance(v, bool) and bool(low <= v <= high)
        ),
    )


ANY = ArgumentKind("anything", lambda v: True)
TEXT = instance_of(str, description="text")
NONE = ArgumentKind("None", lambda v: v is None)
CALLABLE = ArgumentKind("a function", callable)
REAL = ArgumentKind(
    "a real number", lambda v: isinstance(v, float | np.floating) or number_between(-1e300, 1e300).accepts(v)
)
FINITE = ArgumentKind("a finite number", number_between(-1e30, 1e30).accepts)
BOOL = instance_of(bool, description="True or False")


def _is_file_path(value: object) -> bool:
    """Return whether a value is a path that the operating system can read: not empty, without NUL or surrogates."""
    if not isinstance(value, str | Path) or value == "":
        return False
    try:
        return b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False


FILE_KIND = ArgumentKind("the path of a file", _is_file_path)


def format_value(value: object) -> str:
    """Return an argument as text for a message: one short line, or the type of a value with several lines."""
    try:
        text = repr(value)
    except Exception:  # classes of users may raise anything; Python refuses integers of more than 4,300 digits
        text = "\n"
    if "\n" in text:
        return f"a {type(value).__name__}"
    return text if len(text) <= MAX_MESSAGE_CHARACTERS else f"{text[: MAX_MESSAGE_CHARACTERS - 3]}..."


def describe_exception(error: BaseException) -> str:
    """Return an exception of foreign code as one line. Its class comes first, except for an error of hocket."""
    text = " ".join(str(error).split())
    return text if isinstance(error, HocketError) else f"{type(error).__name__}{': ' if text else ''}{text}"


def require(error: type[HocketError], subject: str, name: str, value: object, kind: ArgumentKind) -> None:
    """Require that an argument is of an argument kind; raise `error` if it is not.

    Args:
        error: The class of the error.
        subject: The name of the function or class at the start of the message.
        name: The name of the argument.
        value: The argument.
        kind: The kind that the argument needs.

    Raises:
        HocketError: The value is of another kind; the class is `error`.
    """
    if not kind.accepts(value):
        fault = kind.describe_fault(value)
        problem = f": {fault}" if fault else f" is {format_value(value)}; it must be {kind.description}"
        raise error(f"{subject}: {name}{problem}")


def describe_call_mismatch(signature: inspect.Signature, args: Sequence[object], kwargs: Mapping[str, object]) -> str:
    """Describe why the arguments of a call do not fit `signature`; return an empty string if they fit."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        known = [name for name in signature.parameters if name != "self"]
        unknown = next((name for name in kwargs if name not in known), None)
        hint = did_you_mean(unknown, known) or f"; arguments: {', '.join(known)}"
        return (str(error) if unknown is None else f"there is no argument {unknown!r:.{MAX_MESSAGE_CHARACTERS}}") + hint
    return ""


def _list_parameter_names(function: Callable[..., object]) -> tuple[str, ...]:
    """Return the names of the parameters of a function in order, ten times as fast as `inspect.signature`."""
    code = inspect.unwrap(function).__code__
    count = code.co_argcount + code.co_kwonlyargcount
    has_varargs = bool(code.co_flags & inspect.CO_VARARGS)  # `*args` comes before the keyword-only parameters
    names = code.co_varnames
    return (*names[: code.co_argcount], *names[count : count + has_varargs], *names[code.co_argcount : count])


def validate_arguments(
    error: type[HocketError], **kinds: ArgumentKind
) -> Callable[[Callable[_Params, _Result]], Callable[_Params, _Result]]:
    """Return a decorator that validates the arguments of each call of a function.

    Args:
        error: The class of the error for an argument of a wrong kind or with an unknown name.
        **kinds: The argument kind of each validated parameter, by its name.
    """

    def decorate(function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
        names = _list_parameter_names(function)
        subject = function.__qualname__.removesuffix(".__init__")
        assert kinds.keys() <= set(names), subject
        in_order = [kinds.get(name, ANY) for name in names]

        @wraps(function)
        def validate_and_call(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
            if kinds:
                for name, kind, value in zip(names, in_order, args, strict=False):
                    if not kind.accepts(value):
                        require(error, subject, name, value, kind)
                for name, value in kwargs.items():
                    if name in kinds:
                        require(error, subject, name, value, kinds[name])
            try:
                return function(*args, **kwargs)
            except TypeError:
                if problem := describe_call_mismatch(inspect.signature(function), args, kwargs):
                    raise error(f"{subject}: {problem}") from None
                raise

        return validate_and_call

    return decorate


def validate_constructor(error: type[HocketError], **kinds: ArgumentKind) -> Callable[[_Class], _Class]:
    """Return a decorator that validates the arguments of the constructor of a class, as in `validate_arguments`."""

    def decorate(cls: _Class) -> _Class:
        cls.__init__ = validate_arguments(error, **kinds)(cls.__init__)  # type: ignore[misc]  # a dataclass has one
        return cls

    return decorate
