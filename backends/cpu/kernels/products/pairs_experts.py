"""Gated MoE matmuls of prompts by AMX tiles: two products and their unit in one kernel that writes neither product."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial

from .....graph.dtypes import DType
from ....flow import Flow
from ....operands import need
from ...compiler import Kernel
from ...steps import Chain, Fused, Steps
from . import tiled, tiled_experts
from .experts import sorted_slots
from .pairs import Pair, pair_of
from .pairs_many import emit_of
from .products import wanted_of
from .rounding import TERMS
from .tiled_weights import tiled_weight


@cache
def pair_experts(dtype: DType, kind: str) -> Kernel:
    """Make the kernel ``y[i] = unit(gate[expert of slot i] @ x[row of slot i], up[...] @ x[...])``."""
    return tiled_experts.product_of(f"pairs_experts.pair.{dtype}.{kind}", tiled_weight(dtype), emit_of(kind), 1)


def _pair(flow: Flow, number: int) -> Chain:
    """Fuse a gated MoE matmul with activations are tiles."""
    pair = pair_of(flow, number)
    first = pair.products[0]
    need(first.op == "mul_mat_id" and tiled.kind_of(first) in TERMS, "few rows use the unexpanded weight")
    return Chain(pair.numbers, partial(_add, pair=pair))


def _add(steps: Steps, pair: Pair) -> None:
    """Add the step of a gated MoE matmul of many rows."""
    first, wanted = pair.products[0], wanted_of(steps, pair.call)
    kernel, slots = pair_experts(first.operand(0).dtype, pair.kind), sorted_slots(steps, first)
    records = wanted.records(steps, shared=True)
    to = wanted.target(pair.call.out if wanted.floats else None, wanted.passing(steps)[0], records[0])
    tiled_experts.add(steps, kernel, pair.products, pair.begins, slots, to)
    wanted.remember(steps, records)


FUSED: Mapping[str, tuple[Fused, ...]] = {"mul_mat_id": (_pair,)}
