"""Options: fields of a configuration that have a check, flags of commands, and a description.

A configuration is a frozen dataclass with fields made by `option_field`. Flags, arguments, messages and pages follow
from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field, fields
from functools import wraps
from textwrap import fill
from types import MappingProxyType
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from ..graph.validation import BOOL, ArgumentKind, convert_integers, require
from .errors import ModelError

_Self = TypeVar("_Self")
_Config = TypeVar("_Config")
_Params = ParamSpec("_Params")
_Value = TypeVar("_Value")


class ConfigOption(NamedTuple):
    """How a field of a configuration is checked, and how commands and pages present it.

    - `kind` checks the value; `help` describes it for commands and for Python, with the default in brackets.
    - `flags` are the spellings. Messages have the last one.
    - `scope` tells which commands have the flag. ``plan``: commands that plan or run a model. ``run``: commands that
      run a model. ``generate``: commands that generate text with drafts.
    - `llama_cpp` has the programs of llama.cpp with the same flag, as in `terminal.llama_cpp.LlamaCppFlag`.
    - `argparse` has further options of ``add_argument``.
    """

    default: object
    kind: ArgumentKind
    flags: tuple[str, ...]
    help: str
    scope: str
    llama_cpp: str
    argparse: Mapping[str, Any]


def option_field(
    default: _Value,
    kind: ArgumentKind,
    *flags: str,
    help: str,
    scope: str = "run",
    llama_cpp: str = "",
    **more: Any,
) -> _Value:
    """Return a dataclass field with a `ConfigOption`: its default, kind, flags and help.

    `more` is the field `argparse` of `ConfigOption`.
    """
    if kind is BOOL:
        more["action"] = "store_true"
    row = ConfigOption(default, kind, flags, help, scope, llama_cpp, MappingProxyType(more))
    return field(default=default, metadata={"option": row})


def list_options(config: type) -> Mapping[str, ConfigOption]:
    """Return the options of a configuration class by field name."""
    return MappingProxyType({f.name: f.metadata["option"] for f in fields(config) if "option" in f.metadata})


def check_options(config: object, subject: str) -> None:
    """Check the values of all options of a configuration.

    Args:
        config: The configuration.
        subject: The subject of messages.

    Raises:
        ModelError: A value is of another kind than its option needs.
    """
    for name, row in list_options(type(config)).items():
        require(ModelError, subject, name, getattr(config, name), row.kind)


def format_options_as_args_section(config: type) -> str:
    """Describe the options of a configuration class as lines of an ``Args:`` section."""
    return "".join(
        fill(f"{name}: {row.help}", 120, initial_indent=" " * 8, subsequent_indent=" " * 12) + "\n"
        for name, row in list_options(config).items()
    )


def accept_config_fields_as_keywords(
    config: Callable[_Params, _Config],
) -> Callable[[Callable[[_Self, _Config], None]], Callable[Concatenate[_Self, _Params], None]]:
    """Return a decorator for a constructor that takes a configuration: callers pass its fields as keywords instead.

    Example: ``@accept_config_fields_as_keywords(RunConfig)`` on ``__init__(self, config)`` allows the call
    ``Model(path, threads=4)``.
    """

    def decorate(function: Callable[[_Self, _Config], None]) -> Callable[Concatenate[_Self, _Params], None]:
        @wraps(function)
        def build_and_call(self: _Self, /, *args: _Params.args, **kwargs: _Params.kwargs) -> None:
            function(self, config(*args, **convert_integers(kwargs)))

        build_and_call.__wrapped__ = vars(config)["__init__"].__get__(None, config)  # the signature that is shown
        return build_and_call

    return decorate
