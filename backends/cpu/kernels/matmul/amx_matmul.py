"""Products of many activation rows with a weight by AMX tiles: bfloat16 terms, float32 sums.

1. Expand some columns of two weight groups, or of one group of each of two weights (`amx_weights`).
2. Multiply them with 32 activation rows after another: two activation tiles times two weight tiles.
3. Keep the four tiles of sums in registers.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from ....fusion.operands import BoundInstruction
from ... import target_cpu
from ...compilation.compiler import Kernel, Subroutine, subroutine
from ...compilation.kernel_args import declare_args
from ...simd.amx import TILE_BYTES, TILE_MEMORY_BYTES, TILE_ROW_BYTES, TILE_ROWS
from ...simd.vectors import load, prefetch_l2
from ...steps.step_table import StepTableBuilder, ThreadWork
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
    compute_quantised_activation_bytes,
    find_or_add_quantised_activations,
)
from ..packed.format_table import BLOCK_COLUMNS, FORMATS
from ..vector.amx_tiles import select_amx_tile_operations
from ..vector.elementwise import store_lanes
from .amx_weights import BLOCK_BYTES, AmxBf16WeightType, make_amx_weight_type, make_multiply_bf16_terms
from .tile_loops import GROUP_ROWS, is_matmul_shared_by_threads, prefetch_section_and_advance

MATRIX_SUM_BYTES = 4 * TILE_BYTES
"""Bytes of the sums of 32 rows and two groups, tile by tile."""
TERMS_PER_PASS, ROWS_PER_CHUNK, MAX_EXPANDED_TERMS, MAX_MATRICES = 64, 512, 256, 8
"""Terms of a group's blocks per expansion; activation rows per expansion; expanded terms of two groups; matrices.

The last two are limits, so that the expanded terms and the sums stay in the second cache.
"""
MIN_EXPANSION_ROWS = 256
"""Fewest activation rows of a span: fewer do not pay for expanding the weight."""
EXPANDED_OFFSET, SUMS_OFFSET = TILE_MEMORY_BYTES, TILE_MEMORY_BYTES + MAX_EXPANDED_TERMS * BLOCK_BYTES
"""Offsets into the scratch of a thread: the expanded blocks behind the registers, and the sums of a chunk."""
SCRATCH_BYTES = SUMS_OFFSET + ROWS_PER_CHUNK // PANEL_ROWS * MAX_MATRICES * MATRIX_SUM_BYTES


def choose_activation_rounding_kind(call: BoundInstruction) -> int | None:
    """Choose the form in which a matmul reads its activations: int8 blocks or bfloat16 tiles; None for plain float32.

    The form is one of the numbers that `activation_quantisation` lists as kinds of rounding.
    """
    w, packed = call.operand(0), FORMATS.get(call.operand(0).dtype)
    experts = (int(np.asarray(call.attrs["total"])) or w.shape[0]) if call.op == "mul_mat_id" else 1
    if target_cpu.find_native_or_emulated_amx() and w.shape[-1] and w.shape[-1] % BLOCK_COLUMNS == 0:
        weight = make_amx_weight_type(w.dtype)
        if math.prod(call.out.shape[:-1]) >= weight.min_activation_rows * experts:
            return weight.activation_kind
    return packed.zero_point if packed else None


@subroutine
def count_matrices_expanded_together(columns, terms):
    """Return how many matrices (pairs of weight groups) are expanded together: as many as fit into the scratch.

    A matrix has `columns` columns in `terms` bfloat16 terms.
    With more matrices, activations are loaded from distant memory less often.
    """
    return min(MAX_MATRICES, MAX_EXPANDED_TERMS // (terms * min(TERMS_PER_PASS // terms, columns // BLOCK_COLUMNS)))


def make_multiply_rows_by_amx(
    weight: AmxBf16WeightType, store_sums: Subroutine, first_weight_groups: int
) -> Subroutine:
    """Make the subroutine that multiplies a chunk of activation rows with weight groups by AMX tiles.

    The subroutine is ``(mine, w, v, matrices, left, stride, columns, x, pitch, chunk, stop, to, step, ahead)``:

    - `mine` is the scratch of the thread.
    - Each of `matrices` matrices has two groups of 16 weight rows. Its first `first_weight_groups` groups are rows at
      `w`, the others rows at `v`. Rows are `stride` bytes apart; `left` of them exist.
    - `x` are activation tiles, with `pitch` bytes for 32 rows. Rows `chunk` to `stop` are processed.
    - `to` receives the results, `step` bytes from row to row.
    - Weight rows `ahead` bytes further on are prefetched to the second cache, and so are the next activation rows.

    Args:
        weight: The weight type.
        store_sums: ``(mine, sums, rows, left, to, step)`` stores the sums of `rows` rows from the first four registers.
        first_weight_groups: Groups of a matrix that belong to `w`: 2, or 1 for two weights.
    """
    unit, expand = select_amx_tile_operations(), weight.expand_blocks
    multiply_one, multiply_two = make_multiply_bf16_terms(weight, 1), make_multiply_bf16_terms(weight, 2)
    clear_0, clear_1, clear_2, clear_3 = unit.clear[:4]
    load_0, load_1, load_2, load_3 = unit.load[:4]
    store_0, store_1, store_2, store_3 = unit.store[:4]
    w_block, x_block = weight.expanded_block_bytes, weight.activation_block_bytes
    lines, wide = x_block // MAX_MATRICES // 64, TERMS_PER_PASS // weight.term_count

    def multiply_matrices(mine, w, v, matrices, left, stride, columns, x, pitch, chunk, stop, to, step, ahead):
        n, apart = columns // BLOCK_COLUMNS, first_weight_groups * GROUP_ROWS * stride
        passes = (n + wide - 1) // wide
        parts = passes * matrices * ((stop - chunk + PANEL_ROWS - 1) // PANEL_ROWS)
        next_w, next_v = w + ahead, v + ahead
        for number in range(passes):
            first, last = n * number // passes, n * (number + 1) // passes
            for k in range(matrices):
                block = mine + EXPANDED_OFFSET + k * (last - first) * w_block
                here, there = (
                    left - k * first_weight_groups * GROUP_ROWS,
                    left - (k * first_weight_groups + first_weight_groups - 1) * GROUP_ROWS,
                )
                expand(block, w + k * apart, stride, here, first, last, n)
                if there > 0:
                    expand(block + TILE_BYTES, v + k * apart, stride, there, first, last, n)
            sums = mine + SUMS_OFFSET
            for i in range(chunk, stop, PANEL_ROWS):
                block, coming = mine + EXPANDED_OFFSET, x + (i // PANEL_ROWS + 1) * pitch + first * x_block
                for k in range(matrices):
                    next_w = prefetch_section_and_advance(next_w, matrices * GROUP_ROWS * stride, parts)
                    next_v = prefetch_section_and_advance(next_v, matrices * GROUP_ROWS * stride, parts)
                    if number == 0:
                        clear_0(mine)
                        clear_1(mine)
                        clear_2(mine)
                        clear_3(mine)
                    else:
                        load_0(mine, sums, TILE_ROW_BYTES)
                        load_1(mine, sums + TILE_BYTES, TILE_ROW_BYTES)
                        load_2(mine, sums + 2 * TILE_BYTES, TILE_ROW_BYTES)
                        load_3(mine, sums + 3 * TILE_BYTES, TILE_ROW_BYTES)
                    r = x + i // PANEL_ROWS * pitch + first * x_block
                    for _ in range(first, last):
                        for line in range(lines):
                            prefetch_l2(coming + 64 * line)
                        coming += 64 * lines
                        if stop - i > TILE_ROWS:
                            multiply_two(mine, r, block)
                        else:
                            multiply_one(mine, r, block)
                        r += x_block
                        block += w_block
                    if number + 1 < passes:
                        store_0(mine, sums, TILE_ROW_BYTES)
                        store_1(mine, sums + TILE_BYTES, TILE_ROW_BYTES)
                        store_2(mine, sums + 2 * TILE_BYTES, TILE_ROW_BYTES)
                        store_3(mine, sums + 3 * TILE_BYTES, TILE_ROW_BYTES)
                    else:
                        place = to + (i - chunk) * step + k * first_weight_groups * TILE_ROW_BYTES
                        store_sums(
                            mine,
                            sums,
                            min(PANEL_ROWS, stop - i),
                            left - k * first_weight_groups * GROUP_ROWS,
                            place,
                            step,
                        )
                    sums += MATRIX_SUM_BYTES

    return subroutine(multiply_matrices)


def make_store_amx_sums() -> Subroutine:
    """Make the subroutine ``(mine, sums, rows, left, to, step)`` that stores the AMX sums of a matmul with one weight.

    It stores `rows` rows at `to`, `step` bytes apart, and `left` columns of each. `make_multiply_rows_by_amx` calls it.
    """
    unit = select_amx_tile_operations()
    store_0, store_1, store_2, store_3 = unit.store[:4]

    def store_sums(mine, sums, rows, left, to, step):
        if rows == PANEL_ROWS and left >= 2 * GROUP_ROWS:
            store_0(mine, to, step)
            store_1(mine, to + TILE_ROW_BYTES, step)
            store_2(mine, to + 16 * step, step)
            store_3(mine, to + 16 * step + TILE_ROW_BYTES, step)
        else:
            store_0(mine, sums, TILE_ROW_BYTES)
            store_1(mine, sums + TILE_BYTES, TILE_ROW_BYTES)
            store_2(mine, sums + 2 * TILE_BYTES, TILE_ROW_BYTES)
            store_3(mine, sums + 3 * TILE_BYTES, TILE_ROW_BYTES)
            for i in range(rows):
                at = sums + i // 16 * 2 * TILE_BYTES + i % 16 * TILE_ROW_BYTES
                store_lanes(to + i * step, 0, left, load(at))
                if left > GROUP_ROWS:
                    store_lanes(to + i * step, GROUP_ROWS, left, load(at + TILE_BYTES))

    return subroutine(store_sums)


ARGS = declare_args("w stride rows columns x pitch count y step scratch tickets")


@cache
def make_many_row_amx_matmul_kernel(weight: AmxBf16WeightType) -> Kernel:
    """Make the AMX kernel of a matmul of many rows: ``y[i] = w @ x[i]`` for `count` rows.

    Kernel arguments in bytes:

    - `pitch`: 32 rows of activation tiles,
    - `stride`: a weight row,
    - `step`: from row to row of y,
    - `scratch`: `SCRATCH_BYTES` for each thread.
    """
    multiply_matrices, configure = (
        make_multiply_rows_by_amx(weight, make_store_amx_sums(), 2),
        select_amx_tile_operations().configure,
    )
    release = select_amx_tile_operations().release

    terms = weight.term_count

    def body(a, thread, threads):
        stride, rows, count, step, tickets = ARGS.stride(a), ARGS.rows(a), ARGS.count(a), ARGS.step(a), ARGS.tickets(a)
        columns, x, pitch, mine = ARGS.columns(a), ARGS.x(a), ARGS.pitch(a), ARGS.scratch(a) + thread * SCRATCH_BYTES
        spans = count_row_spans(count, MIN_EXPANSION_ROWS, threads)
        matrices_per_pass = count_matrices_expanded_together(columns, terms)
        configure(mine)
        for turn in range(spans):
            span = choose_row_span(turn, spans, thread, threads)
            start = compute_first_row_of_span(count, PANEL_ROWS, span, spans)
            end = compute_first_row_of_span(count, PANEL_ROWS, span + 1, spans)
            own = compute_span_queue_address(tickets, span)
            item, ticket = 0, take_work_item(own, 0)
            for chunk in range(start, end, ROWS_PER_CHUNK):
                row = 0
                while row < rows:
                    if item == ticket:
                        matrices = min(matrices_per_pass, (rows - row + 2 * GROUP_ROWS - 1) // (2 * GROUP_ROWS))
                        w, to = ARGS.w(a) + row * stride, ARGS.y(a) + chunk * step + 4 * row
                        v, stop = w + GROUP_ROWS * stride, min(end, chunk + ROWS_PER_CHUNK)
                        ahead = threads * matrices_per_pass * 2 * GROUP_ROWS * stride
                        multiply_matrices(
                            mine, w, v, matrices, rows - row, stride, columns, x, pitch, chunk, stop, to, step, ahead
                        )
                        ticket = take_work_item(own, item + 1)
                    item += 1
                    row += matrices_per_pass * 2 * GROUP_ROWS
            reset_queue_after_last_ticket(own, ticket, item, threads)
        release(mine)
        return 0

    return Kernel(f"amx_matmul.multiply.{weight.dtype}", body)


def bind_amx_matmul(steps: StepTableBuilder, call: BoundInstruction, stride: int) -> None:
    """Add the steps of a matmul by AMX tiles: convert the activations to bfloat16 tiles, then multiply.

    `stride` is the bytes of a weight row.
    """
    w, x, y = call.operand(0), call.operand(1), call.out
    weight, is_shared, columns = make_amx_weight_type(w.dtype), is_matmul_shared_by_threads(steps, call), w.shape[-1]
    tiled = find_or_add_quantised_activations(steps, x, weight.activation_kind, for_all=is_shared)[0]
    memory = steps.scratch("tiled", SCRATCH_BYTES * steps.threads)

    def make_thread_work(tickets: int) -> ThreadWork:
        words = ARGS(
            w=w.address,
            stride=stride,
            rows=y.shape[-1],
            columns=columns,
            x=tiled.address,
            pitch=compute_quantised_activation_bytes(1, columns, weight.activation_kind),
            count=math.prod(y.shape[:-1]),
            y=y.address,
            step=y.row_stride_bytes,
            scratch=memory.address,
            tickets=tickets,
        )
        return ThreadWork(words, [w, tiled], [y])

    if is_shared:
        steps.add_queued(make_many_row_amx_matmul_kernel(weight), make_thread_work)
    elif y.shape[-1]:
        steps.add_per_thread(make_many_row_amx_matmul_kernel(weight), [make_thread_work(0)])
