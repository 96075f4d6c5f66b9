"""Gated matmuls of few rows: two products of the same activations and their gated unit, in one kernel.

The products themselves are not written to memory. Each thread computes its rows of the gate weight, then its rows of
the up weight, then the unit. Each weight is read front to back, because two alternating streams are a third slower.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise

from ....fusion.dataflow import Dataflow
from ....fusion.operands import BoundInstruction, Operand, require_supported
from ....fusion.patterns import match_gated_unit
from ...compilation.compiler import Kernel
from ...compilation.kernel_args import declare_args
from ...compilation.prefetch_distance import find_l1_and_l2_prefetch_distances
from ...simd.vectors import load, load_int, zeros
from ...steps.panel_hooks import PrologueWord, call_prologue
from ...steps.step_table import FusedBinding, FusionMatcher, StepTableBuilder, ThreadWork
from ..packed.activation_quantisation import (
    ThreadResultTarget,
    compute_quantised_activation_bytes,
    find_or_add_quantised_activations,
    quantise_row_to_targets,
)
from ..packed.format_table import FORMATS, PackedFormat
from ..vector.elementwise import store_lanes
from .gated_units import GATED, GATED_OPS, split_gated_unit_operands
from .moe_matmul import find_or_add_sorted_expert_slots
from .packed_matmul import (
    compute_weight_strides,
    find_result_read_forms,
    has_matmul_kernel,
    make_packed_matmul_subroutines_and_tiling,
)
from .tile_loops import (
    GROUP_ROWS,
    PAIR_ROWS,
    choose_tile_column_bounds_per_thread,
    is_matmul_shared_by_threads,
    make_multiply_unexpanded_rows,
    make_single_expert_slots,
)

ARGS = declare_args(
    "weights[2] stride between rows columns x pitch starts experts used shared sums[2] wide y step passing l1_ahead "
    "l2_ahead prologue rounding[*]"
)
ROUNDING_WORD = ARGS.first_word_index("rounding")
"""First word of `ThreadResultTarget.rounding_words`."""


@cache
def make_quantising_few_row_gated_kernel(form: PackedFormat, kind: str) -> Kernel:
    """Make the kernel of a gated matmul of few rows with packed weights, which also quantises its result.

    ``y[i] = unit(gate[expert of slot i] @ x[row of slot i], up[expert of slot i] @ x[row of slot i])``. A slot is a
    pair of a token and one of its experts, and `kind` names the unit, such as ``swiglu``. Kernel arguments, in addition
    to `tile_loops.make_grouped_expert_matmul_kernel`:

    - `weights`: the gate weight and the up weight.
    - `sums`: for each weight, the address of its matmul results before the unit; each slot has `wide` bytes.
    - `rounding`: `ThreadResultTarget.rounding_words`.
    """
    multiply_unexpanded, unit = (
        make_multiply_unexpanded_rows(make_packed_matmul_subroutines_and_tiling(form)),
        GATED[kind],
    )

    def body(a, thread, threads):
        call_prologue(a, ARGS.prologue(a))
        stride, between, rows, columns = ARGS.stride(a), ARGS.between(a), ARGS.rows(a), ARGS.columns(a)
        x, pitch, starts, experts = ARGS.x(a), ARGS.pitch(a), ARGS.starts(a), ARGS.experts(a)
        used, shared, y, step = ARGS.used(a), ARGS.shared(a), ARGS.y(a), ARGS.step(a)
        slots, l1_ahead, l2_ahead = starts + 4 * (experts + 2), ARGS.l1_ahead(a), ARGS.l2_ahead(a)
        gate, up, wide = ARGS.sums(a, 0), ARGS.sums(a, 1), ARGS.wide(a)
        for expert in range(experts + 1):
            start, end = load_int(starts + 4 * expert), load_int(starts + 4 * (expert + 1))
            for k in range(2 if expert < experts and start < end else 0):
                matrix, sums = ARGS.weights(a, k) + expert * between, ARGS.sums(a, k)
                for row in range(0, rows, PAIR_ROWS):
                    at, to, left = matrix + row * stride, sums + 4 * row, wide // 4 - row
                    multiply_unexpanded(
                        start,
                        end,
                        slots,
                        used,
                        shared,
                        x,
                        pitch,
                        to,
                        wide,
                        at,
                        stride,
                        left,
                        columns,
                        l1_ahead,
                        l2_ahead,
                    )
            for i in range(start, end):
                slot = load_int(slots + 4 * i)
                to = y + slot * step
                for c in range(0, rows, GROUP_ROWS):
                    if expert < experts:
                        at = slot * wide + 4 * c
                        store_lanes(to, c, rows, unit(load(gate + at), load(up + at)))
                    else:
                        store_lanes(to, c, rows, zeros())
                quantise_row_to_targets(a, ROUNDING_WORD, slot, to, rows)
        return 0

    return Kernel(f"gated_matmul_few.multiply.{form.dtype}.{kind}", body)


@dataclass(frozen=True, slots=True)
class GatedMatmul:
    """Two matmuls of the same activations, and the gated unit that combines their results.

    Attributes:
        instruction_numbers: The instructions of the matmuls and of the unit.
        matmuls: The matmuls.
        unit: The gated unit.
        unit_kind: The gated unit, as a key of `GATED`.
        weight_addresses: Addresses of the weight rows of the gate and of its other operand.
    """

    instruction_numbers: Sequence[int]
    matmuls: Sequence[BoundInstruction]
    unit: BoundInstruction
    unit_kind: str
    weight_addresses: Sequence[int]


def match_gated_matmul(flow: Dataflow, number: int) -> GatedMatmul:
    """Find the gated matmul to which the matmul with instruction number `number` belongs.

    Raises:
        NoKernelError: There is none, or its weight rows are incomplete groups.
    """
    numbers, unit = match_gated_unit(flow, number, GATED_OPS)
    products, call = [flow.bound_instruction(n) for n in numbers], flow.bound_instruction(unit)
    (kind, *units), first, y = split_gated_unit_operands(call), products[0], call.out
    require_supported(kind in GATED, "the unit has no kernel")
    require_supported(
        all(has_matmul_kernel(p) and _has_same_activations_weight_type_and_shape(p, first) for p in products)
        and y.is_dense,
        "products differ",
    )
    begins = [
        at for o in units if (at := _find_first_weight_row_of_operand(o, products)) is not None and o.shape == y.shape
    ]
    require_supported(len(begins) == len(units), "operands are not products of whole groups of rows")
    return GatedMatmul([*numbers, unit], products, call, kind, begins)


def _fuse_few_row_packed_gated_matmul(flow: Dataflow, number: int) -> FusedBinding:
    """Fuse two matmuls of few rows with packed weights, and the gated unit of their results, into one kernel."""
    pair = match_gated_matmul(flow, number)
    first = pair.matmuls[0]
    w, x, row_axes = first.operand(0), first.operand(1), 2 if first.op == "mul_mat_id" else 1
    require_supported(w.dtype in FORMATS, "weights are not packed")
    max_unexpanded_rows = make_packed_matmul_subroutines_and_tiling(FORMATS[w.dtype]).max_unexpanded_rows
    require_supported(math.prod(x.shape[:-row_axes]) <= max_unexpanded_rows, "many rows use the expanded weight")
    return FusedBinding(pair.instruction_numbers, partial(_add_few_row_gated_matmul, pair=pair))


def _add_few_row_gated_matmul(steps: StepTableBuilder, pair: GatedMatmul) -> None:
    """Add the step of a gated matmul of few rows with packed weights: two matmuls and their gated unit."""
    first, call, y = pair.matmuls[0], pair.unit, pair.unit.out
    w, x = first.operand(0), first.operand(1)
    form, (stride, between) = FORMATS[w.dtype], compute_weight_strides(w)
    consumers, is_shared = find_result_read_forms(steps, call), is_matmul_shared_by_threads(steps, first)
    slots = (
        find_or_add_sorted_expert_slots(steps, first)
        if first.op == "mul_mat_id"
        else make_single_expert_slots(steps, x)
    )
    q = find_or_add_quantised_activations(steps, x, form.zero_point, for_all=is_shared)
    records = consumers.make_quantised_row_memory_per_thread(steps, shared=True)
    bounds = choose_tile_column_bounds_per_thread(call, 2 * GROUP_ROWS, steps.threads if is_shared else 1)
    targets = consumers.make_target_per_thread(steps, records, bounds)
    count, rows = math.prod(y.shape[:-1]), max(end - start for start, end in pairwise(bounds))
    wide = 4 * -(-rows // GROUP_ROWS) * GROUP_ROWS
    memory = steps.scratch("pair", 2 * count * wide * steps.threads)
    l1_ahead, l2_ahead = find_l1_and_l2_prefetch_distances(w.dtype, several=count > slots.expert_count)

    def make_thread_work(thread: int, to: ThreadResultTarget) -> ThreadWork:
        low, own = bounds[thread], bounds[thread + 1] - bounds[thread]
        words = ARGS(
            weights=[at + low * stride for at in pair.weight_addresses],
            stride=stride,
            between=between,
            rows=own,
            columns=w.shape[-1],
            x=q[thread].address,
            pitch=compute_quantised_activation_bytes(1, w.shape[-1], form.zero_point),
            starts=slots.operand.address,
            experts=slots.expert_count,
            used=slots.slots_per_token,
            shared=slots.rows_per_token,
            sums=[memory.address + (2 * thread + k) * count * wide for k in range(2)],
            wide=wide,
            y=to.float_rows.address,
            step=to.float_row_step_bytes,
            passing=to.thread_stride_bytes,
            l1_ahead=l1_ahead,
            l2_ahead=l2_ahead,
            prologue=PrologueWord(),
            rounding=to.rounding_words,
        )
        return ThreadWork(words, [*(p.operand(0) for p in pair.matmuls), q[thread], slots.operand], to.writes)

    shares = [None if to is None else make_thread_work(thread, to) for thread, to in enumerate(targets)]
    if is_shared:
        steps.add_by_columns(make_quantising_few_row_gated_kernel(form, pair.unit_kind), shares, [y], bounds)
    else:
        steps.add_per_thread(make_quantising_few_row_gated_kernel(form, pair.unit_kind), shares)
    consumers.register_quantised_rows(steps, records)


def _has_same_activations_weight_type_and_shape(product: BoundInstruction, first: BoundInstruction) -> bool:
    """Return whether two matmuls have the same activations, and weights of one type and shape."""
    w, v = product.operand(0), first.operand(0)
    return (w.dtype, w.shape, product.src[1:], product.attrs) == (v.dtype, v.shape, first.src[1:], first.attrs)


def _find_first_weight_row_of_operand(unit: Operand, products: Sequence[BoundInstruction]) -> int | None:
    """Find the address of the first weight row from which an operand of a gated unit is computed.

    The result is None if the operand is not computed by a matmul of `products`, or if its rows begin within a group of
    weight rows.
    """
    for product in products:
        out, skipped = product.out, (unit.address - product.out.address) // 4
        within = unit.tensor.buffer == out.tensor.buffer and 0 <= skipped <= out.shape[-1] - unit.shape[-1]
        if within and (unit.shape[:-1], unit.strides) == (out.shape[:-1], out.strides) and skipped % GROUP_ROWS == 0:
            return product.operand(0).address + skipped * compute_weight_strides(product.operand(0))[0]
    return None


FUSED: Mapping[str, tuple[FusionMatcher, ...]] = dict.fromkeys(
    ("mul_mat", "mul_mat_id"), (_fuse_few_row_packed_gated_matmul,)
)
