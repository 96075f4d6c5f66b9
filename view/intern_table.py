"""Intern tables, which hold equal items once and so keep the data of a page small."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class InternTable(Generic[T]):
    """A table that assigns consecutive numbers to distinct items; a call with an item returns its number."""

    def __init__(self, *first: T) -> None:
        self._numbers: dict[T, int] = {item: number for number, item in enumerate(first)}

    def __call__(self, item: T) -> int:
        return self._numbers.setdefault(item, len(self._numbers))

    @property
    def items(self) -> list[T]:
        """All distinct items, in the order of their numbers."""
        return list(self._numbers)
