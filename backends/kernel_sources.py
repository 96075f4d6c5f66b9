"""Locations and texts of the sources of kernels, for reports."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from .capabilities import SourceLocation

MAX_SOURCE_CHARACTERS = 4096
"""Maximum characters of a source text that is reported with its location."""


@lru_cache(maxsize=4096)
def read_source_location_and_text(function: Callable[..., Any]) -> SourceLocation:
    """Return the file, the line and the source text of a Python function."""
    plain: Any = inspect.unwrap(function.func if isinstance(function, partial) else function)
    place = f"{plain.__module__.replace('.', '/')}.py:{plain.__code__.co_firstlineno}"
    try:
        return SourceLocation(place, dedent_source_unless_too_long(inspect.getsource(plain)))
    except OSError:  # typed into an interpreter
        return SourceLocation(place)


def dedent_source_unless_too_long(text: str) -> str:
    """Return a source text without its common indentation, or "" if it is too long to store with a kernel."""
    return inspect.cleandoc(text) if len(text) <= MAX_SOURCE_CHARACTERS else ""
