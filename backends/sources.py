"""What a program calls, for people who ask before it runs: kernels by name, and where their source stands."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Protocol, runtime_checkable

from .base import Device, Program

LONGEST = 4096
"""Characters of a source that are told with its place."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a kernel is written: a file of a package and a line, as ``hocket/ops/norms.py:12``; and `text`, which is
    empty where it is long."""

    place: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class Called:
    """A kernel that a program calls, and the instructions that it computes, by position."""

    kernel: str
    source: Source
    numbers: tuple[int, ...]


@runtime_checkable
class Foretells(Protocol):
    """A backend that can say what a program will call before there is memory for it."""

    def foretold(self, program: Program, on: Device) -> Sequence[Called]:
        """The kernels in the order in which they run.  What is known only when devices meet is left out."""


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
