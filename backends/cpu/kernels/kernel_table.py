"""All families of kernels: the bindings of their ops and their fused patterns."""

from __future__ import annotations

from collections.abc import Mapping

from ...kernel_tables import concatenate_list_tables, merge_disjoint_tables
from ..steps.step_table import FusionMatcher, InstructionBinder
from . import collectives
from .attention import bind_attention, lightning_indexer
from .matmul import (
    gated_matmul_few,
    gated_matmul_many,
    gated_moe_amx,
    gated_units,
    moe_matmul,
    packed_matmul,
    permuted_products,
)
from .recurrent import gated_delta_net, linear_attention, selective_scan, short_convolution, sliding_windows
from .rows import gather_scatter, norms, reductions, rope
from .rowwise import arrangements, hyper_connections
from .vector import elementwise

BINDINGS: Mapping[str, InstructionBinder] = merge_disjoint_tables(
    elementwise.BINDINGS,
    gated_units.BINDINGS,
    packed_matmul.BINDINGS,
    gather_scatter.BINDINGS,
    rope.BINDINGS,
    bind_attention.BINDINGS,
    lightning_indexer.BINDINGS,
    collectives.BINDINGS,
    moe_matmul.BINDINGS,
    gated_delta_net.BINDINGS,
    linear_attention.BINDINGS,
    selective_scan.BINDINGS,
    short_convolution.BINDINGS,
    reductions.BINDINGS,
    sliding_windows.BINDINGS,
    arrangements.BINDINGS,
    hyper_connections.BINDINGS,
)
FUSED: Mapping[str, tuple[FusionMatcher, ...]] = concatenate_list_tables(
    rope.FUSED,
    norms.FUSED,
    gated_matmul_few.FUSED,
    gated_matmul_many.FUSED,
    gated_moe_amx.FUSED,
    permuted_products.FUSED,
    gather_scatter.FUSED,
    gated_delta_net.FUSED,
    short_convolution.FUSED,
    sliding_windows.FUSED,
)
"""Fused patterns by the op of their first instruction. They are tried before the instruction is bound alone."""
