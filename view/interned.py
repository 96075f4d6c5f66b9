"""Tables in which equal things stand once: what makes the data of a page small."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Interned(Generic[T]):
    """Gives each new item the next number, and an item that is known its old one."""

    def __init__(self, *first: T) -> None:
        self._numbers: dict[T, int] = {item: number for number, item in enumerate(first)}

    def __call__(self, item: T) -> int:
        return self._numbers.setdefault(item, len(self._numbers))

    @property
    def items(self) -> list[T]:
        """All items, by number."""
        return list(self._numbers)
