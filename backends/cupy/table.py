"""Every family of kernels: how its ops are bound, and what has to be compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType

from ..table import brought, merged, merged_lists
from .binding.chains import Fused
from .binding.launches import Binding
from .device.driver import Source
from .kernels import (
    choosing,
    collective,
    elementwise,
    indexer,
    integers,
    moves,
    reductions,
    rotary,
    routing,
    rows,
    sliding,
    sorting,
)
from .kernels.attention import attention
from .kernels.products import experts, matmul, products, same_rows
from .kernels.recurrent import gated_delta_net, recurrences, short_convolution

FAMILIES: tuple[ModuleType, ...] = (
    elementwise,
    moves,
    integers,
    choosing,
    sliding,
    matmul,
    same_rows,
    experts,
    products,
    rotary,
    rows,
    routing,
    reductions,
    sorting,
    indexer,
    short_convolution,
    gated_delta_net,
    recurrences,
    attention,
    collective,
)
"""Modules that have ``BINDINGS``, how each op is bound, or ``FUSED``, how chains that begin with an op are; and
``SOURCES``, all that they launch and no other module has."""


BINDINGS: Mapping[str, Binding] = merged(*(getattr(family, "BINDINGS", {}) for family in FAMILIES))


def binding(op: str) -> Binding | None:
    """How an op is bound, one that brings its kernels with it included; None if there are none."""
    return BINDINGS.get(op) or brought(op, "cuda")


FUSED: Mapping[str, Sequence[Fused]] = merged_lists(*(getattr(family, "FUSED", {}) for family in FAMILIES))
"""Tried in this order, before an instruction is bound by itself."""
SOURCES: tuple[Source, ...] = tuple(source for family in FAMILIES for source in getattr(family, "SOURCES", ()))
