"""Every family of kernels: how its ops are bound, and its chains."""

from __future__ import annotations

from collections.abc import Mapping

from ...table import merged, merged_lists
from ..steps import Binding, Fused
from . import (
    attention,
    collective,
    experts,
    gated,
    moves,
    norms,
    pairs,
    products,
    recurrent,
    reductions,
    rotary,
    rows,
    short_convolution,
)

BINDINGS: Mapping[str, Binding] = merged(
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
    short_convolution.BINDINGS,
    reductions.BINDINGS,
)
FUSED: Mapping[str, tuple[Fused, ...]] = merged_lists(
    rotary.FUSED, norms.FUSED, pairs.FUSED, moves.FUSED, recurrent.FUSED, short_convolution.FUSED
)
"""Chains by the op of their first instruction, tried before it is bound by itself."""
