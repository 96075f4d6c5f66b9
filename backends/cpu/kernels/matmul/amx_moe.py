"""MoE products of many activation rows by AMX tiles, one expert after another.

1. Gather the activation rows of an expert into tiles. They are scattered in memory.
2. Multiply the tiles with all rows of the expert's weight.
3. Scatter the results to their slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from ....fusion.operands import BoundInstruction
from ...compilation.compiler import Kernel, Subroutine, subroutine
from ...compilation.kernel_args import declare_args
from ...simd.vectors import load, load_int, store, store_int, zeros
from ...steps.step_table import StepTableBuilder, ThreadWork
from ...steps.work_queue import reset_queue_after_last_ticket, take_work_item
from ..packed.activation_quantisation import (
    PANEL_ROWS,
    TILE_ROW_BYTES,
    ThreadResultTarget,
    compute_quantised_activation_bytes,
    find_or_add_quantised_activations,
    quantise_block_to_targets,
)
from ..packed.format_table import BLOCK_COLUMNS
from ..vector.amx_tiles import select_amx_tile_operations
from ..vector.elementwise import store_lanes
from .amx_matmul import (
    MAX_MATRICES,
    ROWS_PER_CHUNK,
    SCRATCH_BYTES,
    count_matrices_expanded_together,
    make_multiply_rows_by_amx,
    make_store_amx_sums,
)
from .amx_weights import BLOCK_BYTES, AmxBf16WeightType, make_amx_weight_type
from .packed_matmul import compute_weight_strides
from .tile_loops import (
    GROUP_ROWS,
    ExpertSlots,
    compute_activation_row_of_slot,
    is_matmul_shared_by_threads,
    zero_remote_expert_rows,
)

RESULT_ROW_BYTES = MAX_MATRICES * 2 * GROUP_ROWS * 4 + 64
"""Bytes from row to row of the results; 64 extra bytes spread the rows over the sets of the nearest cache."""
RESULTS_OFFSET, ROW_NUMBERS_OFFSET = SCRATCH_BYTES, SCRATCH_BYTES + ROWS_PER_CHUNK * RESULT_ROW_BYTES
"""Offsets into the scratch of a thread: the results, and the activation row of each row of the tiles."""
GATHERED_OFFSET = ROW_NUMBERS_OFFSET + ROWS_PER_CHUNK * 4
"""Offset of the gathered activation tiles in the scratch of a thread."""

ARGS = declare_args(
    "weights[2] stride between rows columns x pitch starts experts used shared y step scratch tickets rounding[*]"
)
ROUNDING_WORD = ARGS.first_word_index("rounding")
"""First word of `ThreadResultTarget.rounding_words`."""


@subroutine
def gather_activation_rows_of_slots(a, mine, chunk, stop):
    """Copy the activation rows of some expert slots, which are scattered in memory, to adjacent AMX tiles.

    A slot is a pair of a token and one of its experts.

    Args:
        a: the kernel arguments.
        mine: address of the thread's scratch, which receives the tiles.
        chunk: number of the first slot, in the order of experts.
        stop: number after the last slot.
    """
    x, pitch, used, shared = ARGS.x(a), ARGS.pitch(a), ARGS.used(a), ARGS.shared(a)
    slots, numbers = ARGS.starts(a) + 4 * (ARGS.experts(a) + 2), mine + ROW_NUMBERS_OFFSET
    for i in range(chunk, stop):
        store_int(numbers + 4 * (i - chunk), compute_activation_row_of_slot(load_int(slots + 4 * i), used, shared))
    for first in range(0, stop - chunk, PANEL_ROWS):
        to = mine + GATHERED_OFFSET + first // PANEL_ROWS * pitch
        for start in range(0, pitch, BLOCK_BYTES):
            for i in range(min(PANEL_ROWS, stop - chunk - first)):
                row = load_int(numbers + 4 * (first + i))
                store(
                    to + start + i * TILE_ROW_BYTES,
                    load(x + row // PANEL_ROWS * pitch + row % PANEL_ROWS * TILE_ROW_BYTES + start),
                )


@subroutine
def scatter_rows_as_f32_and_quantised(a, mine, chunk, stop, first, count):
    """Write the results of some expert slots to the rows of their slots, quantised and as float32.

    A slot is a pair of a token and one of its experts. float32 is written only if `step` is not 0.

    Args:
        a: the kernel arguments.
        mine: address of the thread's scratch, which has the results.
        chunk: number of the first slot, in the order of experts.
        stop: number after the last slot.
        first: first column of the results.
        count: count of columns.
    """
    slots, y, step = ARGS.starts(a) + 4 * (ARGS.experts(a) + 2), ARGS.y(a), ARGS.step(a)
    results = mine + RESULTS_OFFSET
    for i in range(chunk, stop):
        slot = load_int(slots + 4 * i)
        if step != 0:
            for c in range(0, count, GROUP_ROWS):
                store_lanes(y + slot * step + 4 * first, c, count, load(results + 4 * c))
        for b in range((count + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS):
            quantise_block_to_targets(
                a, ROUNDING_WORD, slot, first // BLOCK_COLUMNS + b, results + 4 * BLOCK_COLUMNS * b
            )
        results += RESULT_ROW_BYTES


@subroutine
def zero_result_rows_of_remote_experts(a, mine):
    """Set the result rows of slots with an expert on another device to zero, quantised and as float32."""
    starts, experts, rows, results = ARGS.starts(a), ARGS.experts(a), ARGS.rows(a), mine + RESULTS_OFFSET
    slots = starts + 4 * (experts + 2)
    if ARGS.step(a) != 0:
        zero_remote_expert_rows(starts, experts, ARGS.y(a), ARGS.step(a), rows)
    store(results, zeros())
    store(results + 64, zeros())
    for i in range(load_int(starts + 4 * experts), load_int(starts + 4 * experts + 4)):
        for b in range((rows + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS):
            quantise_block_to_targets(a, ROUNDING_WORD, load_int(slots + 4 * i), b, results)


def make_amx_moe_matmul_kernel(
    name: str, weight: AmxBf16WeightType, store_sums: Subroutine, first_weight_groups: int
) -> Kernel:
    """Make the AMX kernel of an MoE matmul, or of the gated unit of two MoE matmuls (gate and up).

    An MoE matmul is ``y[i] = w[expert of slot i] @ x[row of slot i]``. A slot is a pair of a token and one of its
    experts. The kernel also quantises the result for the ops that read it. Kernel arguments, in addition to
    `tile_loops.make_grouped_expert_matmul_kernel`:

    - `weights`: two weights, or one weight and its second group of rows.
    - `x`: activation tiles.
    - `step`: bytes from row to row of y; with 0 no float32 is stored.
    - `scratch`: `compute_amx_moe_thread_scratch_bytes` for each thread.

    Args:
        name: The name of the kernel.
        weight: The weight type.
        store_sums: Stores the sums of a tile, or computes and stores their gated units
            (`amx_matmul.make_multiply_rows_by_amx`).
        first_weight_groups: Groups of a matrix that belong to the first weight: 1 for a gated unit, else 2.
    """
    multiply_matrices, configure = (
        make_multiply_rows_by_amx(weight, store_sums, first_weight_groups),
        select_amx_tile_operations().configure,
    )
    release = select_amx_tile_operations().release
    terms = weight.term_count

    def body(a, thread, threads):
        stride, between, rows, columns = ARGS.stride(a), ARGS.between(a), ARGS.rows(a), ARGS.columns(a)
        pitch, starts, tickets = ARGS.pitch(a), ARGS.starts(a), ARGS.tickets(a)
        mine = ARGS.scratch(a) + thread * (GATHERED_OFFSET + ROWS_PER_CHUNK // PANEL_ROWS * pitch)
        wide = count_matrices_expanded_together(columns, terms) // 2 * 2 * first_weight_groups * GROUP_ROWS
        ahead, results = threads * wide * stride, mine + RESULTS_OFFSET
        configure(mine)
        item, ticket, gathered_chunk = 0, take_work_item(tickets, 0), -1
        for expert in range(ARGS.experts(a)):
            start, end = load_int(starts + 4 * expert), load_int(starts + 4 * (expert + 1))
            for chunk in range(start, end, ROWS_PER_CHUNK):
                stop = min(end, chunk + ROWS_PER_CHUNK)
                row = 0
                while row < rows:
                    if item == ticket:
                        if gathered_chunk != chunk:
                            gather_activation_rows_of_slots(a, mine, chunk, stop)
                            gathered_chunk = chunk
                        skipped, left = expert * between + row * stride, rows - row
                        w, v = ARGS.weights(a, 0) + skipped, ARGS.weights(a, 1) + skipped
                        matrices = (min(wide, left) + first_weight_groups * GROUP_ROWS - 1) // (
                            first_weight_groups * GROUP_ROWS
                        )
                        x, count = mine + GATHERED_OFFSET, stop - chunk
                        multiply_matrices(
                            mine,
                            w,
                            v,
                            matrices,
                            left,
                            stride,
                            columns,
                            x,
                            pitch,
                            0,
                            count,
                            results,
                            RESULT_ROW_BYTES,
                            ahead,
                        )
                        scatter_rows_as_f32_and_quantised(a, mine, chunk, stop, row, min(wide, left))
                        ticket = take_work_item(tickets, item + 1)
                    item += 1
                    row += wide
        reset_queue_after_last_ticket(tickets, ticket, item, threads)
        release(mine)
        if thread == 0:
            zero_result_rows_of_remote_experts(a, mine)
        return 0

    return Kernel(name, body)


def compute_amx_moe_thread_scratch_bytes(pitch: int) -> int:
    """Return the scratch bytes of a thread in an AMX MoE matmul; `pitch` is the size of 32 activation rows in bytes."""
    return GATHERED_OFFSET + ROWS_PER_CHUNK // PANEL_ROWS * pitch


@cache
def make_single_weight_amx_moe_kernel(weight: AmxBf16WeightType) -> Kernel:
    """Make the AMX kernel of an MoE matmul with a single weight."""
    return make_amx_moe_matmul_kernel(f"amx_moe.multiply.{weight.dtype}", weight, make_store_amx_sums(), 2)


# ----------------------------------------------------------------------------------------------------- binding


def bind_amx_moe_matmul(steps: StepTableBuilder, call: BoundInstruction, slots: ExpertSlots) -> None:
    """Add the steps of an MoE matmul of many rows by AMX tiles: convert the activations to tiles, then multiply."""
    w, y = call.operand(0), call.out
    second = w.address + GROUP_ROWS * compute_weight_strides(w)[0]
    add_amx_moe_products_step(
        steps,
        make_single_weight_amx_moe_kernel(make_amx_weight_type(w.dtype)),
        [call],
        [w.address, second],
        slots,
        ThreadResultTarget(y, [y]),
    )


def add_amx_moe_products_step(
    steps: StepTableBuilder,
    kernel: Kernel,
    products: Sequence[BoundInstruction],
    weight_addresses: Sequence[int],
    slots: ExpertSlots,
    to: ThreadResultTarget,
) -> None:
    """Add the step of one MoE matmul, or of a gate and an up matmul of the same activations, by AMX tiles.

    Args:
        steps: The steps of the program.
        kernel: The result of `make_amx_moe_matmul_kernel`.
        products: One matmul, or the gate and the up matmul.
        weight_addresses: Addresses of two weights, or of a weight and its second group of rows.
        slots: The pairs of a token and one of its experts, sorted by expert.
        to: The memory of the result rows.
    """
    w, x = products[0].operand(0), products[0].operand(1)
    is_shared = is_matmul_shared_by_threads(steps, products[0])
    columns, (stride, between) = w.shape[-1], compute_weight_strides(w)
    kind = make_amx_weight_type(w.dtype).activation_kind
    tiled, pitch = (
        find_or_add_quantised_activations(steps, x, kind, for_all=is_shared)[0],
        compute_quantised_activation_bytes(1, columns, kind),
    )
    rows = to.float_rows.shape[-1]
    nbytes = compute_amx_moe_thread_scratch_bytes(pitch)
    memory = steps.scratch(f"experts {nbytes}", nbytes * steps.threads)

    def make_thread_work(tickets: int) -> ThreadWork:
        words = ARGS(
            weights=weight_addresses,
            stride=stride,
            between=between,
            rows=rows,
            columns=columns,
            x=tiled.address,
            pitch=pitch,
            starts=slots.operand.address,
            experts=slots.expert_count,
            used=slots.slots_per_token,
            shared=slots.rows_per_token,
            y=to.float_rows.address,
            step=to.float_row_step_bytes,
            scratch=memory.address,
            tickets=tickets,
            rounding=to.rounding_words,
        )
        return ThreadWork(words, [*(p.operand(0) for p in products), tiled, slots.operand], to.writes)

    if is_shared:
        steps.add_queued(kernel, make_thread_work)
    elif rows:
        steps.add_per_thread(kernel, [make_thread_work(0)])
