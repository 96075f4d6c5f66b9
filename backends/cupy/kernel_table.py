"""Collects the kernel families: the binder of each op, the fusion binders, and the sources to compile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType

from ..kernel_tables import concatenate_list_tables, find_op_package_binding, merge_disjoint_tables
from .binding.fused_binding import FusionBinder
from .binding.launch_builder import OpBinder
from .device.driver import KernelSource
from .kernels import (
    blocks,
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
    token_sampling,
)
from .kernels.attention import attention, heads
from .kernels.products import experts, matmul, products, same_rows
from .kernels.recurrent import delta_step, gated_delta_net, recurrences, short_convolution

KERNEL_FAMILIES: tuple[ModuleType, ...] = (
    elementwise,
    moves,
    integers,
    blocks,
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
    token_sampling,
    indexer,
    short_convolution,
    delta_step,
    gated_delta_net,
    recurrences,
    attention,
    heads,
    collective,
)
"""The modules of kernels, by family. Each module defines `SOURCES`, all sources that it alone launches.

It also defines ``BINDINGS``, a binder for each op, or ``FUSED``, fusion binders by the op of the first instruction.
"""


BINDINGS: Mapping[str, OpBinder] = merge_disjoint_tables(
    *(getattr(family, "BINDINGS", {}) for family in KERNEL_FAMILIES)
)


def find_op_binder(op: str) -> OpBinder | None:
    """Find the function that adds the launches of an op, here or in an installed op package; `None` if missing."""
    return BINDINGS.get(op) or find_op_package_binding(op, "cuda")


FUSED: Mapping[str, Sequence[FusionBinder]] = concatenate_list_tables(
    *(getattr(family, "FUSED", {}) for family in KERNEL_FAMILIES)
)
"""Fusion binders by the first op, in the order of trial. They are tried before the binder of a single instruction."""
SOURCES: tuple[KernelSource, ...] = tuple(
    source for family in KERNEL_FAMILIES for source in getattr(family, "SOURCES", ())
)
