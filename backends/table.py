"""Tables of kernels made of tables of families."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeVar

T = TypeVar("T")


def merged(*tables: Mapping[str, T]) -> Mapping[str, T]:
    """One table from several.  Raises `ValueError` if two of them have the same key: one would hide the other."""
    whole: dict[str, T] = {}
    for table in tables:
        if twice := sorted(whole.keys() & table.keys()):
            raise ValueError(f"bound twice: {', '.join(twice)}; keep one")
        whole.update(table)
    return MappingProxyType(whole)


def merged_lists(*tables: Mapping[str, tuple[T, ...]]) -> Mapping[str, tuple[T, ...]]:
    """One table from several, in which all that they have under a key follows each other."""
    keys = dict.fromkeys(key for table in tables for key in table)
    return MappingProxyType({key: tuple(x for table in tables for x in table.get(key, ())) for key in keys})
