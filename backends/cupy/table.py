"""Every family of kernels: how its ops are bound, and what has to be compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType, ModuleType

import numpy as np
import numpy.typing as npt

from ...graph.dtypes import DType
from ...graph.spec import Spec
from .driver import Source
from .kernels import collective, elementwise, indexer, moves, products, rotary, rows
from .launches import Binding

FAMILIES: tuple[ModuleType, ...] = (elementwise, moves, products, rotary, rows, indexer, collective)
"""Modules with ``BINDINGS``, how each op is bound, and ``SOURCES``, all they launch."""

Packer = Callable[[npt.NDArray[np.uint8], Spec], npt.NDArray[np.uint8]]
"""The bytes of a quantised weight as a file holds them, and its spec, to as many bytes as kernels want them."""
PACKED: Mapping[DType, Packer] = MappingProxyType({})
"""Quantised types that weights keep; others become float32."""


def _merged() -> Mapping[str, Binding]:
    merged: dict[str, Binding] = {}
    for family in FAMILIES:
        assert not merged.keys() & family.BINDINGS.keys()
        merged.update(family.BINDINGS)
    return MappingProxyType(merged)


BINDINGS = _merged()
SOURCES: tuple[Source, ...] = tuple(source for family in FAMILIES for source in family.SOURCES)
