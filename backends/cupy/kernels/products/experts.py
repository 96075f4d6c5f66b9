"""Fusion of the MoE feed-forward network of a few tokens into two launches: gated units, and the weighted sum.

A shared expert that every token uses is part of the same launches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ....fusion.dataflow import Dataflow, has_same_elements, require_no_alias
from ....fusion.operands import BoundInstruction, Operand, require_supported
from ....fusion.patterns import match_expert_sum, match_expert_sum_with_shared
from ...binding.fused_binding import FusionBinder
from ...binding.launch_builder import LaunchBuilder
from . import dense, packed
from .matmul import (
    MAX_GRID_SIZE,
    has_few_slots_per_expert,
    is_complete_packed_weight,
    is_gemv_readable,
    launch_gemv_of_any_weights,
    make_slot_map_and_choice_fields,
)
from .routes import GATED_UNIT_CODES, WeightedExpertSum, WeightsAndResults
from .same_rows import as_matrix, find_gated_unit_as_only_reader, match_gated_products


@dataclass(frozen=True, slots=True)
class _GatedUnitMatch:
    """A gated unit that was found in a program: two matmuls of the same rows, and the op that joins them (`swiglu`).

    - `products`: the instruction indices of the two matmuls.
    - `unit`: the instruction index of the op that joins them.
    - `gate` and `up`: the two matmuls.
    - `out`: the result of the unit.
    """

    products: tuple[int, ...]
    unit: int
    gate: BoundInstruction
    up: BoundInstruction
    out: Operand

    @classmethod
    def match_gated_unit(cls, flow: Dataflow, product: int) -> _GatedUnitMatch:
        """Match the gated unit that the matmul `product` begins.

        Raise `NoKernelError` if there is none, or if its two matmuls have different operands.
        """
        products, unit = match_gated_products(flow, product)
        gate, up = map(flow.bound_instruction, products)
        pattern = cls(products, unit, gate, up, flow.bound_instruction(unit).out)
        require_supported(
            all(has_same_elements(up.operand(k), gate.operand(k)) for k in range(1, len(gate.src))),
            "rows or experts differ",
        )
        require_supported(dict(gate.attrs) == dict(up.attrs), "experts differ")
        w, other = gate.operand(0), up.operand(0)
        require_supported(
            is_gemv_readable(w) and is_gemv_readable(other) and (other.shape, other.dtype) == (w.shape, w.dtype),
            "weights differ",
        )
        require_supported(pattern.out.is_dense, "a result is not dense")
        return pattern

    @property
    def instruction_numbers(self) -> list[int]:
        """The indices of the two matmuls and of the unit."""
        return [*self.products, self.unit]

    @property
    def weights_and_results(self) -> WeightsAndResults:
        """The weights of both matmuls, each with the operand that receives its result.

        The kernel writes only the value of the gated unit, to the first result.
        """
        return [(self.gate.operand(0), as_matrix(self.out)), (self.up.operand(0), as_matrix(self.up.out))]


def _launch_gated_units(
    launches: LaunchBuilder, flow: Dataflow, chosen: _GatedUnitMatch, other: _GatedUnitMatch | None = None
) -> None:
    x, ids, w = chosen.gate.operand(1), chosen.gate.operand(2), chosen.gate.operand(0)
    slots, tokens = math.prod(ids.shape), 0
    require_supported(
        has_few_slots_per_expert(chosen.gate) and slots <= MAX_GRID_SIZE // 2 and x.is_float, "slots are many"
    )
    require_no_alias(chosen.out, [x, ids])
    if other is not None:
        tokens, matrix = math.prod(x.shape[:-1]), other.gate.operand(0)
        require_supported((matrix.shape, matrix.dtype) == (w.shape[1:], w.dtype), "the other expert is of another kind")
        require_supported(
            x.is_dense and has_same_elements(other.gate.operand(1), x) and x.shape[-2] == 1, "rows differ"
        )
        require_supported(
            flow.bound_instruction(other.unit).op == flow.bound_instruction(chosen.unit).op, "units differ"
        )
        require_no_alias(other.out, [x, ids, chosen.out])
    before, launches.number = launches.number, chosen.products[0]
    spread, choice = make_slot_map_and_choice_fields(launches, chosen.gate)
    launches.number = before
    unit, others = (
        GATED_UNIT_CODES[flow.bound_instruction(chosen.unit).op],
        () if other is None else other.weights_and_results,
    )
    launch_gemv_of_any_weights(
        launches, chosen.weights_and_results, x, slots, 1, [*spread, *choice], unit, others, tokens
    )


def _fuse_expert_gated_units(launches: LaunchBuilder, flow: Dataflow, number: int) -> Sequence[int]:
    """Compute the gated units of chosen experts in one launch: two matmuls with each, and the op that joins them."""
    chosen = _GatedUnitMatch.match_gated_unit(flow, number)
    _launch_gated_units(launches, flow, chosen)
    return chosen.instruction_numbers


def _fuse_expert_and_shared_gated_units(launches: LaunchBuilder, flow: Dataflow, number: int) -> Sequence[int]:
    """Fuse the gated units of the chosen experts and of the shared expert into one launch."""
    readers = [
        n
        for n in flow.require_readers(flow.require_producer(number, 1))
        if find_gated_unit_as_only_reader(flow, n) is not None
    ]
    of_op = {flow.bound_instruction(n).op: n for n in reversed(readers)}
    require_supported(of_op.keys() == {"mul_mat_id", "mul_mat"}, "there are no experts of both kinds")
    chosen, other = (_GatedUnitMatch.match_gated_unit(flow, of_op[op]) for op in ("mul_mat_id", "mul_mat"))
    numbers = [*chosen.instruction_numbers, *other.instruction_numbers]
    require_supported(number in numbers, "it is none of their products")
    _launch_gated_units(launches, flow, chosen, other)
    return numbers


def _launch_weighted_expert_sum(
    launches: LaunchBuilder,
    down: BoundInstruction,
    total: BoundInstruction,
    out: Operand,
    shared_down: BoundInstruction | None = None,
    gate: Operand | None = None,
) -> None:
    """Launch one GEMV that computes the last matmul ("down") of each chosen expert and adds the weighted results.

    It also adds the result of the shared expert, if there is one.

    Args:
        launches: Receives the launch.
        down: The down projections of the chosen experts.
        total: The weighted sum of these products.
        out: The result.
        shared_down: The down projection of the shared expert.
        gate: The logit of the shared expert's share; without it the share is 1.
    """
    w, x, ids, shares = down.operand(0), down.operand(1), down.operand(2), total.operand(1)
    used, width, answers = ids.shape[-1], w.shape[-2], total.operand(0)
    tokens = math.prod(ids.shape) // used if used else 0
    require_supported(w.tensor.spec.size > 0, "a device may have nothing of the experts")
    require_supported(answers.shape[-2:] == (width, used) and answers.strides[-2] == 1, "answers are not added up")
    require_supported(
        x.is_float and x.is_dense and x.shape[-2] == used and shares.is_float and shares.is_dense,
        "rows of x are shared",
    )
    require_supported(
        shares.shape[-2:] == (1, used) and shares.tensor.spec.size == tokens * used, "shares are of others"
    )
    require_supported(
        is_gemv_readable(w) and len(w.shape) == 3 and tokens and has_few_slots_per_expert(down), "slots are many"
    )
    require_supported(
        out.is_dense and out.tensor.spec.size == tokens * width and tokens <= MAX_GRID_SIZE, "results are not dense"
    )
    matrix = other_x = None
    if shared_down is not None:
        matrix, other_x = shared_down.operand(0), shared_down.operand(1)
        require_supported(is_gemv_readable(matrix) and len(matrix.shape) == 2, "weights are not read so")
        require_supported(
            matrix.shape == w.shape[1:] and matrix.dtype is w.dtype, "the other expert is of another kind"
        )
        require_supported(
            other_x.is_float and other_x.has_uniform_row_stride and math.prod(other_x.shape[:-1]) == tokens,
            "its rows are others",
        )
        require_supported(
            gate is None or (gate.is_float and gate.has_uniform_row_stride and gate.tensor.spec.size == tokens),
            "shares differ",
        )
    require_no_alias(out, [x, ids, shares, other_x, gate])
    by_token = replace(shares, tensor=replace(shares.tensor, shape=(tokens, used), strides=(used, 1)))
    summed = WeightedExpertSum(by_token, make_slot_map_and_choice_fields(launches, down)[1], matrix, other_x, gate)
    (packed if is_complete_packed_weight(w) else dense).launch_gemv_with_expert_sum(
        launches, w, x, as_matrix(out), summed
    )


def _fuse_down_projections_and_weighted_sum(launches: LaunchBuilder, flow: Dataflow, number: int) -> Sequence[int]:
    """Compute the last matmuls ("down") of chosen experts and the weighted sum of their results in one launch."""
    chain = match_expert_sum(flow, number)
    down, total = map(flow.bound_instruction, chain)
    _launch_weighted_expert_sum(launches, down, total, total.out)
    return chain


def _fuse_weighted_expert_and_shared_sum(launches: LaunchBuilder, flow: Dataflow, number: int) -> Sequence[int]:
    """Compute the last matmuls ("down") of chosen and shared experts and their weighted sum in one launch."""
    chain = match_expert_sum_with_shared(flow, number)
    down, total, both, other = (flow.bound_instruction(n) for n in chain[:4] if n is not None)
    gate = None if chain.sigmoid is None else flow.bound_instruction(chain.sigmoid).operand(0)
    _launch_weighted_expert_sum(launches, down, total, both.out, other, gate)
    return chain.instruction_numbers


FUSED: Mapping[str, Sequence[FusionBinder]] = {
    "mul_mat": (_fuse_expert_and_shared_gated_units,),
    "mul_mat_id": (
        _fuse_expert_gated_units,
        _fuse_expert_and_shared_gated_units,
        _fuse_down_projections_and_weighted_sum,
        _fuse_weighted_expert_and_shared_sum,
    ),
}
