"""Where the source of a kernel stands, for people who ask."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from .abilities import Source

LONGEST = 4096
"""Characters of a source that are told with its place."""


@lru_cache(maxsize=4096)
def source_of(function: Callable[..., Any]) -> Source:
    """Where a Python function is written."""
    plain: Any = inspect.unwrap(function.func if isinstance(function, partial) else function)
    place = f"{plain.__module__.replace('.', '/')}.py:{plain.__code__.co_firstlineno}"
    try:
        return Source(place, short(inspect.getsource(plain)))
    except OSError:  # it was typed in
        return Source(place)


def short(text: str) -> str:
    """A source that may be told, without what its lines have in common in front."""
    return inspect.cleandoc(text) if len(text) <= LONGEST else ""
