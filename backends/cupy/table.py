"""Every family of kernels: how its ops are bound, and what has to be compiled."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, ModuleType

from .driver import Source
from .kernels import (
    attention,
    collective,
    elementwise,
    gated_delta_net,
    indexer,
    matmul,
    moves,
    products,
    recurrences,
    rotary,
    rows,
    short_convolution,
    sorting,
)
from .launches import Binding

FAMILIES: tuple[ModuleType, ...] = (
    elementwise,
    moves,
    matmul,
    products,
    rotary,
    rows,
    sorting,
    indexer,
    short_convolution,
    gated_delta_net,
    recurrences,
    attention,
    collective,
)
"""Modules with ``BINDINGS``, how each op is bound, and ``SOURCES``, all they launch."""


def _merged() -> Mapping[str, Binding]:
    merged: dict[str, Binding] = {}
    for family in FAMILIES:
        assert not merged.keys() & family.BINDINGS.keys()
        merged.update(family.BINDINGS)
    return MappingProxyType(merged)


BINDINGS = _merged()
SOURCES: tuple[Source, ...] = tuple(source for family in FAMILIES for source in family.SOURCES)
