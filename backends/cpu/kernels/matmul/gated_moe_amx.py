"""Gated MoE matmuls of prompts by AMX tiles: two products and their unit in one kernel that writes neither product."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial

from .....graph.dtypes import DType
from ....fusion.dataflow import Dataflow
from ....fusion.operands import require_supported
from ...compilation.compiler import Kernel
from ...steps.step_table import FusedBinding, FusionMatcher, StepTableBuilder
from ..packed.activation_quantisation import TERMS_BY_KIND
from . import amx_matmul, amx_moe
from .amx_weights import make_amx_weight_type
from .gated_matmul_few import GatedMatmul, match_gated_matmul
from .gated_matmul_many import make_store_gated_units_from_amx
from .moe_matmul import find_or_add_sorted_expert_slots
from .packed_matmul import find_result_read_forms


@cache
def make_many_row_gated_moe_kernel(dtype: DType, kind: str) -> Kernel:
    """Make the AMX kernel of a gated MoE matmul of many rows.

    ``y[i] = unit(gate[expert of slot i] @ x[row of slot i], up[expert of slot i] @ x[row of slot i])``. A slot is a
    pair of a token and one of its experts.
    """
    return amx_moe.make_amx_moe_matmul_kernel(
        f"gated_moe_amx.multiply.{dtype}.{kind}", make_amx_weight_type(dtype), make_store_gated_units_from_amx(kind), 1
    )


def _fuse_gated_moe_matmul(flow: Dataflow, number: int) -> FusedBinding:
    """Fuse two MoE matmuls of many rows, and the gated unit of their results, into one kernel with AMX tiles."""
    pair = match_gated_matmul(flow, number)
    first = pair.matmuls[0]
    require_supported(
        first.op == "mul_mat_id" and amx_matmul.choose_activation_rounding_kind(first) in TERMS_BY_KIND,
        "few rows use the unexpanded weight",
    )
    return FusedBinding(pair.instruction_numbers, partial(_add_many_row_gated_moe, pair=pair))


def _add_many_row_gated_moe(steps: StepTableBuilder, pair: GatedMatmul) -> None:
    """Add the step of a gated MoE matmul of many rows."""
    first, consumers = pair.matmuls[0], find_result_read_forms(steps, pair.unit)
    kernel, slots = (
        make_many_row_gated_moe_kernel(first.operand(0).dtype, pair.unit_kind),
        find_or_add_sorted_expert_slots(steps, first),
    )
    records = consumers.make_quantised_row_memory_per_thread(steps, shared=True)
    to = consumers.make_thread_target(
        pair.unit.out if consumers.needs_floats else None,
        consumers.view_thread_row_as_result_rows(steps)[0],
        records[0],
    )
    amx_moe.add_amx_moe_products_step(steps, kernel, pair.matmuls, pair.weight_addresses, slots, to)
    consumers.register_quantised_rows(steps, records)


FUSED: Mapping[str, tuple[FusionMatcher, ...]] = {"mul_mat_id": (_fuse_gated_moe_matmul,)}
