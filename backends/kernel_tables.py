"""Merging of kernel tables: the table of a backend is merged from the tables of its kernel families."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any, TypeVar

from ..graph.errors import BackendError
from ..ops import REGISTRY

T = TypeVar("T")


def merge_disjoint_tables(*tables: Mapping[str, T]) -> Mapping[str, T]:
    """Merge tables without common keys into one. Raises `ValueError` if two tables have the same key."""
    whole: dict[str, T] = {}
    for table in tables:
        if twice := sorted(whole.keys() & table.keys()):
            raise ValueError(f"bound twice: {', '.join(twice)}; keep one")
        whole.update(table)
    return MappingProxyType(whole)


def concatenate_list_tables(*tables: Mapping[str, tuple[T, ...]]) -> Mapping[str, tuple[T, ...]]:
    """Merge tables of tuples into one; the tuples of the same key are concatenated in the order of the tables."""
    keys = dict.fromkeys(key for table in tables for key in table)
    return MappingProxyType({key: tuple(x for table in tables for x in table.get(key, ())) for key in keys})


@cache
def find_op_package_binding(op: str, backend: str) -> Any:
    """Return the kernel binding of an op for a backend, from the package that declares the op; None without one.

    Raises `BackendError` if the binding does not load.
    """
    where = REGISTRY[op].kernels.get(backend) if op in REGISTRY else None
    try:
        return where and resolve_name(where)
    except (ImportError, AttributeError, ValueError) as why:
        raise BackendError(f"op {op!r}: its kernel for {backend}, {where}, does not load: {why}") from None
