"""Gated matmuls of many rows: two products and their gated unit in one kernel that writes neither product.

A tile combines activation rows with one group of the gate weight and one group of the up weight. A plain product uses
two groups of one weight instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial

from .....graph.dtypes import DType
from ....fusion.dataflow import Dataflow
from ....fusion.operands import require_supported
from ...compilation.compiler import Kernel, Subroutine, subroutine
from ...compilation.kernel_args import declare_args
from ...simd.amx import TILE_BYTES, TILE_ROW_BYTES, TILE_ROWS
from ...simd.dot_tiles import make_dot_tile_intrinsics
from ...simd.vectors import load
from ...steps.step_table import FusedBinding, FusionMatcher, StepTableBuilder, ThreadWork
from ...steps.work_queue import (
    choose_row_span,
    compute_first_row_of_span,
    compute_span_queue_address,
    count_row_spans,
    reset_queue_after_last_ticket,
    take_work_item,
)
from ..packed.activation_quantisation import (
    PANEL_ROWS,
    TERMS_BY_KIND,
    compute_quantised_activation_bytes,
    find_or_add_quantised_activations,
    quantise_block_to_targets,
)
from ..packed.format_table import BLOCK_COLUMNS, FORMATS, PackedFormat
from ..vector.amx_tiles import TileOperation, select_amx_tile_operations, skip_tile_configuration
from ..vector.elementwise import store_lanes
from . import amx_matmul
from .amx_matmul import count_matrices_expanded_together
from .amx_weights import AmxBf16WeightType, make_amx_weight_type
from .gated_matmul_few import GatedMatmul, match_gated_matmul
from .gated_units import GATED
from .packed_matmul import compute_weight_strides, find_result_read_forms, make_packed_block_tiling
from .tile_loops import GROUP_ROWS, is_matmul_shared_by_threads, prefetch_section_and_advance

VECTOR_BYTES, BLOCK_BYTES = 4 * GROUP_ROWS, 4 * BLOCK_COLUMNS
"""Bytes of the units of a row in a group, and in a block, which is quantised at once."""
TILE_SUFFIX = ".tiles"
"""Suffix of the names of kernels that use AMX tiles."""
CACHED_CHUNK_BYTES = 1 << 20
"""Bytes of the activations of a chunk that stay in the second cache."""
MIN_PREFILL_ROWS = 32
"""Activation rows from which on an incomplete tile costs little."""

ARGS = declare_args("weights[2] stride rows columns x pitch count y step scratch tickets rounding[*]")
ROUNDING_WORD = ARGS.first_word_index("rounding")
"""First word of `ThreadResultTarget.rounding_words`."""


@dataclass(frozen=True, slots=True)
class GatedMatmulMethod:
    """A method to compute a gated matmul of many rows: by AMX tiles or by int8 dot products.

    Attributes:
        compute_units: ``(a, mine, row, wide, chunk, stop, y, step, ahead)`` writes gated units to rows of `y`: for up
            to `wide` weight rows from `row` on, and for activation rows `chunk` to `stop`. It prefetches the weight
            rows `ahead` rows further on to the second cache. `mine` is the scratch of the thread.
        block_width: ``(columns)`` returns how many blocks of 32 weight rows one call of `compute_units` processes.
        max_block_width: Upper limit of `block_width`.
        unit_scratch_bytes: Scratch bytes of a thread.
        rows_per_chunk: Activation rows for which the weight is expanded once.
        begin: Called with ``(mine)`` before all units.
        end: Called with ``(mine)`` after all units.
    """

    compute_units: Subroutine
    block_width: Subroutine
    max_block_width: int
    unit_scratch_bytes: int
    rows_per_chunk: int
    begin: TileOperation = skip_tile_configuration
    end: TileOperation = skip_tile_configuration


@cache
def make_amx_or_int8_method(dtype: DType, kind: str, rounding: int) -> GatedMatmulMethod:
    """Make the subroutines of a gated matmul of many rows: by AMX tiles, or by int8 dot products.

    Args:
        dtype: The type of both weights.
        kind: The gated unit, a key of `GATED`.
        rounding: The kind of rounding of the activations (`activation_quantisation`).
    """
    if rounding in TERMS_BY_KIND:
        unit = select_amx_tile_operations()
        compute_units, block_width = (
            make_compute_gated_units_by_amx(dtype, kind),
            _make_choose_amx_blocks_per_call(make_amx_weight_type(dtype)),
        )
        return GatedMatmulMethod(
            compute_units,
            block_width,
            amx_matmul.MAX_MATRICES // 2,
            amx_matmul.SCRATCH_BYTES,
            amx_matmul.ROWS_PER_CHUNK,
            unit.configure,
            unit.release,
        )
    blocks = make_packed_block_tiling(FORMATS[dtype])
    return GatedMatmulMethod(
        make_compute_gated_units_by_int8(FORMATS[dtype], kind),
        choose_one_int8_block_per_call,
        1,
        blocks.scratch_bytes_per_thread + blocks.tile_rows * 2 * VECTOR_BYTES,
        blocks.rows_per_chunk,
    )


@subroutine
def choose_one_int8_block_per_call(columns):
    """Return 1, the number of weight blocks that int8 dot products process per call; more blocks gain nothing.

    It serves as `GatedMatmulMethod.block_width`; `columns` has no effect.
    """
    return 1


def _make_choose_amx_blocks_per_call(weight: AmxBf16WeightType) -> Subroutine:
    """Make the subroutine that chooses how many blocks of 32 weight rows AMX tiles process per call.

    It serves as `GatedMatmulMethod.block_width`. It chooses one block if the activations of a chunk fit into the second
    cache: then the gated units of the block stay in the nearest cache. Otherwise it chooses as many as fit in scratch.
    """
    terms, x_block, tall = weight.term_count, weight.activation_block_bytes, amx_matmul.ROWS_PER_CHUNK // PANEL_ROWS

    def choose_block_width(columns):
        return (
            1
            if columns // BLOCK_COLUMNS * x_block * tall <= CACHED_CHUNK_BYTES
            else count_matrices_expanded_together(columns, terms) // 2
        )

    return subroutine(choose_block_width)


def make_store_gated_units_from_amx(kind: str) -> Subroutine:
    """Make the subroutine that computes gated units from the AMX sums of gate and up, and stores them.

    The subroutine is ``(mine, sums, rows, left, to, step)``, the argument `store_sums` of
    `amx_matmul.make_multiply_rows_by_amx`. The gate sums are one group of 16 columns, the up sums another one.
    """
    unit, stores = GATED[kind], select_amx_tile_operations().store
    store_0, store_1, store_2, store_3 = stores[:4]

    def store_units(mine, sums, rows, left, to, step):
        store_0(mine, sums, TILE_ROW_BYTES)
        store_1(mine, sums + TILE_BYTES, TILE_ROW_BYTES)
        store_2(mine, sums + 2 * TILE_BYTES, TILE_ROW_BYTES)
        store_3(mine, sums + 3 * TILE_BYTES, TILE_ROW_BYTES)
        for i in range(rows):
            at = sums + i // TILE_ROWS * 2 * TILE_BYTES + i % TILE_ROWS * TILE_ROW_BYTES
            store_lanes(to + i * step, 0, left, unit(load(at), load(at + TILE_BYTES)))

    return subroutine(store_units)


def make_compute_gated_units_by_amx(dtype: DType, kind: str) -> Subroutine:
    """Make the subroutine that computes gated units by AMX tiles: two matmuls of the same activations, then the unit.

    Its arguments are as in `GatedMatmulMethod.compute_units`; `kind` names the unit, such as ``swiglu``.
    """
    multiply_matrices = amx_matmul.make_multiply_rows_by_amx(
        make_amx_weight_type(dtype), make_store_gated_units_from_amx(kind), 1
    )

    def compute_units(a, mine, row, wide, chunk, stop, y, step, ahead):
        stride, columns, x, pitch = ARGS.stride(a), ARGS.columns(a), ARGS.x(a), ARGS.pitch(a)
        gate, up = ARGS.weights(a, 0) + row * stride, ARGS.weights(a, 1) + row * stride
        left = ARGS.rows(a) - row
        matrices = (min(wide, left) + GROUP_ROWS - 1) // GROUP_ROWS
        multiply_matrices(
            mine, gate, up, matrices, left, stride, columns, x, pitch, chunk, stop, y, step, ahead * stride
        )

    return subroutine(compute_units)


def make_compute_gated_units_by_int8(form: PackedFormat, kind: str) -> Subroutine:
    """Make the subroutine that computes gated units by int8 dot products: two matmuls of equal activations, then unit.

    Its arguments are as in `GatedMatmulMethod.compute_units`; `kind` names the unit, such as ``swiglu``.
    """
    blocks, unit = make_packed_block_tiling(form), GATED[kind]
    tile = make_dot_tile_intrinsics(blocks.tile_rows, 2)
    row_addresses, zeros, spill, reload = tile.row_addresses, tile.zero_sums, tile.spill, tile.reload
    expand, add = blocks.expand_blocks, blocks.add_block
    width, record, size, wide = blocks.block_columns, blocks.record_bytes, blocks.block_bytes, blocks.blocks_per_pass
    span = blocks.expanded_group_bytes
    tall, nbytes = blocks.tile_rows, blocks.tile_rows * 2 * VECTOR_BYTES

    @subroutine
    def compute_group_units(a, expanded, group, chunk, stop, y, step, coming):
        stride, columns, left = ARGS.stride(a), ARGS.columns(a), ARGS.rows(a) - group
        x, pitch, n = ARGS.x(a), ARGS.pitch(a), (columns + width - 1) // width
        gate, up = ARGS.weights(a, 0) + coming * stride, ARGS.weights(a, 1) + coming * stride
        parts, products = (stop - chunk + tall - 1) // tall * ((n + wide - 1) // wide), expanded + 2 * span
        for first in range(0, max(1, n), wide):
            count, sums, to = min(wide, n - first), products + nbytes, y
            for k in range(2):
                at = ARGS.weights(a, k) + group * stride
                expand(expanded + k * span, at, stride, left, columns, first, count)
            for i in range(chunk, stop, tall):
                r = row_addresses(x + i * pitch + first * record, pitch, stop - i)
                gate = prefetch_section_and_advance(gate, GROUP_ROWS * stride, parts)
                up = prefetch_section_and_advance(up, GROUP_ROWS * stride, parts)
                acc = reload(sums) if first > 0 else zeros()
                for b in range(count):
                    acc = add(acc, expanded + b * size, r, b * record)
                if first + wide < n:
                    spill(sums, acc)
                else:
                    spill(products, acc)
                    for k in range(min(tall, stop - i)):
                        at = products + 2 * k * VECTOR_BYTES
                        store_lanes(to + k * step, 0, left, unit(load(at), load(at + VECTOR_BYTES)))
                sums += nbytes
                to += tall * step

    def compute_units(a, expanded, row, wide, chunk, stop, y, step, ahead):
        second = row + GROUP_ROWS
        compute_group_units(a, expanded, row, chunk, stop, y, step, second)
        if second < ARGS.rows(a):
            compute_group_units(a, expanded, second, chunk, stop, y + VECTOR_BYTES, step, row + ahead)

    return subroutine(compute_units)


@cache
def make_many_row_gated_matmul_kernel(dtype: DType, kind: str, rounding: int) -> Kernel:
    """Make the kernel of a gated matmul of many rows.

    The kernel quantises its result block by block. ``y[i] = unit(gate @ x[i], up @ x[i])`` for `count` rows. Kernel
    arguments, in addition to `tile_loops.make_grouped_expert_matmul_kernel`:

    - `weights`: the gate weight and the up weight, with `rows` rows each.
    - `step`: bytes from row to row of y; with 0 no float32 is stored.
    - `scratch`: `compute_scratch_bytes_per_thread` for each thread.
    - `rounding`: `ThreadResultTarget.rounding_words`.

    Args:
        dtype: The type of both weights.
        kind: The gated unit, a key of `GATED`.
        rounding: The kind of rounding of x (`activation_quantisation`).
    """
    variant = make_amx_or_int8_method(dtype, kind, rounding)
    compute_units, block_width, many = variant.compute_units, variant.block_width, variant.rows_per_chunk
    begin, end = variant.begin, variant.end
    own = variant.unit_scratch_bytes
    passing, scratch = compute_padded_gated_unit_row_bytes(variant), compute_scratch_bytes_per_thread(variant)

    def body(a, thread, threads):
        rows, count, step, tickets = ARGS.rows(a), ARGS.count(a), ARGS.step(a), ARGS.tickets(a)
        mine, wide = ARGS.scratch(a) + thread * scratch, block_width(ARGS.columns(a)) * BLOCK_COLUMNS
        begin(mine)
        spans = count_row_spans(count, many, threads)
        for turn in range(spans):
            span = choose_row_span(turn, spans, thread, threads)
            start, last = (
                compute_first_row_of_span(count, many, span, spans),
                compute_first_row_of_span(count, many, span + 1, spans),
            )
            queue = compute_span_queue_address(tickets, span)
            item, ticket = 0, take_work_item(queue, 0)
            for chunk in range(start, last, many):
                stop = min(last, chunk + many)
                row = 0
                while row < rows:
                    if item == ticket:
                        y, pace = ARGS.y(a) + chunk * step + 4 * row, step
                        if step == 0:
                            y, pace = mine + own, passing
                        compute_units(a, mine, row, wide, chunk, stop, y, pace, threads * wide)
                        blocks = (min(wide, rows - row) + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
                        for i in range(chunk, stop):
                            for b in range(blocks):
                                quantise_block_to_targets(
                                    a,
                                    ROUNDING_WORD,
                                    i,
                                    row // BLOCK_COLUMNS + b,
                                    y + (i - chunk) * pace + b * BLOCK_BYTES,
                                )
                        ticket = take_work_item(queue, item + 1)
                    item += 1
                    row += wide
            reset_queue_after_last_ticket(queue, ticket, item, threads)
        end(mine)
        return 0

    return Kernel(f"gated_matmul_many.multiply.{dtype}.{kind}" + TILE_SUFFIX * (rounding in TERMS_BY_KIND), body)


def compute_padded_gated_unit_row_bytes(variant: GatedMatmulMethod) -> int:
    """Return the bytes of a row of gated units in scratch memory, which is used if no float32 result is stored.

    The row has the units of one call of `GatedMatmulMethod.compute_units`. 64 bytes of padding spread the rows over the
    sets of the nearest cache.
    """
    return variant.max_block_width * BLOCK_BYTES + 64


def compute_scratch_bytes_per_thread(variant: GatedMatmulMethod) -> int:
    """Return the scratch bytes of a thread in a gated matmul of many rows.

    The scratch has the memory of the method (AMX tiles or int8 dot products), and a row of gated units for each
    activation row of a chunk.
    """
    return variant.unit_scratch_bytes + variant.rows_per_chunk * compute_padded_gated_unit_row_bytes(variant)


def _fuse_many_row_gated_matmul(flow: Dataflow, number: int) -> FusedBinding:
    """Fuse two matmuls of many rows, and the gated unit of their results, into one kernel."""
    pair = match_gated_matmul(flow, number)
    w, x = pair.matmuls[0].operand(0), pair.matmuls[0].operand(1)
    require_supported(
        pair.matmuls[0].op == "mul_mat" and math.prod(x.shape[:-1]) >= MIN_PREFILL_ROWS,
        "few rows use the unexpanded weight",
    )
    kind = amx_matmul.choose_activation_rounding_kind(pair.matmuls[0])
    require_supported(kind is not None, "activations are not rounded")
    require_supported(
        kind in TERMS_BY_KIND or make_packed_block_tiling(FORMATS[w.dtype]).tile_groups == 2, "a tile is of one group"
    )
    return FusedBinding(pair.instruction_numbers, partial(_add_many_row_gated_matmul, pair=pair))


def _add_many_row_gated_matmul(steps: StepTableBuilder, pair: GatedMatmul) -> None:
    """Add the step of a gated matmul of many rows: two matmuls and their gated unit."""
    first, consumers = pair.matmuls[0], find_result_read_forms(steps, pair.unit)
    w, x = first.operand(0), first.operand(1)
    rounding, is_shared, (stride, _) = (
        amx_matmul.choose_activation_rounding_kind(first),
        is_matmul_shared_by_threads(steps, first),
        compute_weight_strides(w),
    )
    assert rounding is not None
    q = find_or_add_quantised_activations(steps, x, rounding, for_all=is_shared)[0]
    records = consumers.make_quantised_row_memory_per_thread(steps, shared=True)
    to = consumers.make_thread_target(
        pair.unit.out if consumers.needs_floats else None,
        consumers.view_thread_row_as_result_rows(steps)[0],
        records[0],
    )
    nbytes = compute_scratch_bytes_per_thread(make_amx_or_int8_method(w.dtype, pair.unit_kind, rounding))
    memory = steps.scratch(f"pair {nbytes}", nbytes * steps.threads)

    def make_thread_work(tickets: int) -> ThreadWork:
        words = ARGS(
            weights=pair.weight_addresses,
            stride=stride,
            rows=consumers.columns,
            columns=w.shape[-1],
            x=q.address,
            pitch=compute_quantised_activation_bytes(1, w.shape[-1], rounding),
            count=consumers.rows,
            y=to.float_rows.address,
            step=to.float_row_step_bytes,
            scratch=memory.address,
            tickets=tickets,
            rounding=to.rounding_words,
        )
        return ThreadWork(words, [*(p.operand(0) for p in pair.matmuls), q], to.writes)

    if is_shared:
        steps.add_queued(make_many_row_gated_matmul_kernel(w.dtype, pair.unit_kind, rounding), make_thread_work)
    else:
        steps.add_per_thread(
            make_many_row_gated_matmul_kernel(w.dtype, pair.unit_kind, rounding), [make_thread_work(0)]
        )
    consumers.register_quantised_rows(steps, records)


FUSED: Mapping[str, tuple[FusionMatcher, ...]] = {"mul_mat": (_fuse_many_row_gated_matmul,)}
