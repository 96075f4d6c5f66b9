"""All families of kernels: the bindings of their ops and their fused patterns."""

from __future__ import annotations

from collections.abc import Mapping

from ...table import merge_list_tables, merge_tables
from ..steps import FusionMatcher, InstructionBinder
from . import collective, moves, norms, reductions, rotary, rows
from .attention import attention
from .products import experts, gated, pairs, pairs_experts, pairs_many, products
from .recurrent import recurrent, scans, selective_scan, short_convolution, windows
from .rowwise import arrangements, hyper_connections, parametric_units

BINDINGS: Mapping[str, InstructionBinder] = merge_tables(
    rows.BINDINGS,
    norms.BINDINGS,
    gated.BINDINGS,
    products.BINDINGS,
    moves.BINDINGS,
    rotary.BINDINGS,
    attention.BINDINGS,
    collective.BINDINGS,
    experts.BINDINGS,
    recurrent.BINDINGS,
    scans.BINDINGS,
    selective_scan.BINDINGS,
    short_convolution.BINDINGS,
    reductions.BINDINGS,
    windows.BINDINGS,
    arrangements.BINDINGS,
    hyper_connections.BINDINGS,
    parametric_units.BINDINGS,
)
FUSED: Mapping[str, tuple[FusionMatcher, ...]] = merge_list_tables(
    rotary.FUSED,
    norms.FUSED,
    pairs.FUSED,
    pairs_many.FUSED,
    pairs_experts.FUSED,
    moves.FUSED,
    recurrent.FUSED,
    short_convolution.FUSED,
    windows.FUSED,
)
"""Fused patterns by the op of their first instruction. They are tried before the instruction is bound alone."""
