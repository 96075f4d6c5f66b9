"""Every family of kernels: how its ops are bound, and what has to be compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType, ModuleType

from .binding.chains import Fused
from .binding.launches import Binding
from .device.driver import Source
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
"""Modules with ``BINDINGS``, how each op is bound, and ``SOURCES``, all they launch; some with ``FUSED``, how
chains that begin with an op are."""


def _merged() -> Mapping[str, Binding]:
    merged: dict[str, Binding] = {}
    for family in FAMILIES:
        assert not merged.keys() & family.BINDINGS.keys()
        merged.update(family.BINDINGS)
    return MappingProxyType(merged)


def _chains() -> Mapping[str, Sequence[Fused]]:
    found: dict[str, list[Fused]] = {}
    for family in FAMILIES:
        for op, binds in getattr(family, "FUSED", {}).items():
            found.setdefault(op, []).extend(binds)
    return MappingProxyType(found)


BINDINGS = _merged()
FUSED = _chains()
"""Tried in this order, before an instruction is bound by itself."""
SOURCES: tuple[Source, ...] = tuple(source for family in FAMILIES for source in family.SOURCES)
