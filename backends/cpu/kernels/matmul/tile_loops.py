"""Matrix products for all weight types: the loops over experts, activation rows and groups of weight rows.

1. Split the rows of the weight into groups of 16, and the columns into blocks.
2. Many activation rows: expand some blocks of a tile of groups, which stay in the nearest cache. Then multiply these
blocks with all activation rows of a chunk.
3. Few activation rows: multiply up to four of them at once with the unexpanded weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ....fusion.operands import BoundInstruction, Operand
from ...compilation.compiler import Kernel, Subroutine, subroutine
from ...compilation.kernel_args import declare_args
from ...compilation.prefetch_distance import find_l1_and_l2_prefetch_distances
from ...simd.dot_tiles import make_dot_tile_intrinsics
from ...simd.vectors import LANES, MANY_REGISTERS, count_vector_registers, load_int, prefetch, prefetch_l2, store_scalar
from ...steps.panel_hooks import PrologueWord, call_hooks, call_prologue, list_hook_accesses, make_hook_words
from ...steps.partition import compute_even_bounds
from ...steps.step_table import StepTableBuilder, ThreadWork
from ...steps.work_queue import (
    choose_row_span,
    compute_first_row_of_span,
    compute_span_queue_address,
    count_row_spans,
    reset_queue_after_last_ticket,
    take_work_item,
)

GROUP_ROWS, PAIR_ROWS = LANES, 2 * LANES
"""Rows of a group of the weight, and of two groups. Each row is one lane, so that no sum crosses lanes."""
FLOAT_ZERO = np.float32(0)
MIN_EVENLY_SHARED_ROWS = 32
"""Activation rows from which on threads share a product evenly instead of keeping their own columns.

Such a product takes longer than a barrier.
"""


@dataclass(frozen=True, slots=True)
class WeightTiling:
    """The subroutines and tile sizes with which a matmul kernel processes one weight type.

    In subroutine arguments, `stride` is the bytes of a weight row, and `left` is the number of rows that exist from the
    group on.

    Attributes:
        tile_rows, tile_groups: Activation rows and weight groups of a tile.
        rows_per_chunk: Activation rows that use expanded weights before the next weights are expanded.
        max_leftover_rows: A last tile of at most this many rows uses the unexpanded weight.
        max_unexpanded_rows: Products of at most this many rows use the unexpanded weight, because expanding costs more
            there.
        scratch_bytes: Scratch bytes per thread.
        multiply_expanded: ``(a, expanded, matrix, group, chunk, stop, coming)`` expands `tile_groups` weight groups,
            and multiplies them with slots `chunk` to `stop`.
        make_few_rows: ``(n)`` makes ``(to, group, stride, left, columns, x, l1_ahead, l2_ahead)`` for `n` activation
            rows. It stores the products of one group. `to` and `x` are results of
            `DotTileIntrinsics.row_addresses_by_slot`. `l1_ahead` and `l2_ahead` are the prefetch distances in bytes to
            the first and the second cache.
        make_few_rows_of_two: The same for two groups; the second may be absent. None without registers for it.
    """

    tile_rows: int
    tile_groups: int
    rows_per_chunk: int
    max_leftover_rows: int
    max_unexpanded_rows: int
    scratch_bytes: int
    multiply_expanded: Subroutine
    make_few_rows: Callable[[int], Subroutine]
    make_few_rows_of_two: Callable[[int], Subroutine] | None = None


@subroutine
def zero_remote_expert_rows(starts, experts, y, step, n):
    """Set the first `n` numbers of each result row with an expert on another device to zero.

    `starts` and `experts` are as in `make_grouped_expert_matmul_kernel`. Rows of `y` are `step` bytes apart.
    """
    slots = starts + 4 * (experts + 2)
    for i in range(load_int(starts + 4 * experts), load_int(starts + 4 * experts + 4)):
        row = y + load_int(slots + 4 * i) * step
        for c in range(n):
            store_scalar(row + 4 * c, FLOAT_ZERO)


@subroutine
def prefetch_cache_lines_to_l1_and_l2(p, lines, l1_ahead, l2_ahead):
    """Prefetch `lines` cache lines to the L1 cache, from ``p + l1_ahead`` on, and as many to the L2 cache.

    The lines for the L2 cache begin at ``p + l2_ahead``.
    """
    for line in range(lines):
        prefetch(p + l1_ahead + 64 * line)
        prefetch_l2(p + l2_ahead + 64 * line)


@subroutine
def prefetch_section_and_advance(p, nbytes, parts):
    """Prefetch one of `parts` sections of `nbytes` bytes, from `p` on, to the L2 cache; return the address after it.

    It prefetches one cache line more than fits into the section.
    """
    for _ in range(nbytes // parts // 64 + 1):
        prefetch_l2(p)
        p += 64
    return p


@subroutine
def compute_activation_row_of_slot(slot, slots_per_token, rows_per_token):
    """Return the number of the activation row that an expert slot reads.

    Slot i of a token reads row ``i mod rows_per_token`` of the token.
    """
    return slot // slots_per_token * rows_per_token + slot % slots_per_token % rows_per_token


def make_loop_over_activation_rows(rows_per_call: int, min_rows: int, multiply: Subroutine) -> Subroutine:
    """Make the loop that multiplies activation rows with weight rows, a few rows at a time.

    Args:
        rows_per_call: Activation rows that one call of `multiply` processes.
        min_rows: The loop ends when fewer slots (activation rows) are left.
        multiply: Multiplies `rows_per_call` rows with one or two groups of weight rows.

    Returns:
        ``(i, end, ...) -> i``: processes slots from `i` on and returns the first slot that it left out.
    """
    select_rows = make_dot_tile_intrinsics(rows_per_call, 1).row_addresses_by_slot

    def multiply_rows(i, end, slots, used, shared, x, pitch, y, step, at, stride, left, columns, l1_ahead, l2_ahead):
        while i + min_rows <= end:
            to = select_rows(slots + 4 * i, end - i, 1, 1, y, step)
            r = select_rows(slots + 4 * i, end - i, used, shared, x, pitch)
            multiply(to, at, stride, left, columns, r, l1_ahead, l2_ahead)
            i += rows_per_call
        return i

    return subroutine(multiply_rows)


@subroutine
def skip_loop_over_two_weight_groups(
    i, end, slots, used, shared, x, pitch, y, step, at, stride, left, columns, l1_ahead, l2_ahead
):
    """Return `i` unchanged, in place of the loop that multiplies two weight groups at once.

    It replaces that loop on machines with too few registers. The next loop then processes all activation rows, one
    group at a time.
    """
    return i


def make_multiply_unexpanded_rows(blocks: WeightTiling) -> Subroutine:
    """Make the subroutine that multiplies a few activation rows with `PAIR_ROWS` weight rows without expanding them.

    It processes expert slots `i` to `end`. The weight rows begin at `at`; `left` rows exist. The subroutine is:

    ``(i, end, slots, used, shared, x, pitch, y, step, at, stride, left, columns, l1_ahead, l2_ahead)``
    """
    multiply_one_row = make_loop_over_activation_rows(1, 1, blocks.make_few_rows(1))
    multiply_two_rows = make_loop_over_activation_rows(2, 2, blocks.make_few_rows(2))
    many = count_vector_registers() == MANY_REGISTERS
    multiply_four_rows = make_loop_over_activation_rows(4, 3, blocks.make_few_rows(4)) if many else multiply_two_rows
    multiply_two_groups = (
        make_loop_over_activation_rows(4, 3, blocks.make_few_rows_of_two(4))
        if many and blocks.make_few_rows_of_two
        else skip_loop_over_two_weight_groups
    )

    def multiply_unexpanded(
        i, end, slots, used, shared, x, pitch, y, step, at, stride, left, columns, l1_ahead, l2_ahead
    ):
        i = multiply_two_groups(
            i, end, slots, used, shared, x, pitch, y, step, at, stride, left, columns, l1_ahead, l2_ahead
        )
        for row in range(0, min(left, PAIR_ROWS), GROUP_ROWS):
            p, to, n, j = at + row * stride, y + 4 * row, left - row, i
            j = multiply_four_rows(
                j, end, slots, used, shared, x, pitch, to, step, p, stride, n, columns, l1_ahead, l2_ahead
            )
            j = multiply_two_rows(
                j, end, slots, used, shared, x, pitch, to, step, p, stride, n, columns, l1_ahead, l2_ahead
            )
            multiply_one_row(j, end, slots, used, shared, x, pitch, to, step, p, stride, n, columns, l1_ahead, l2_ahead)

    return subroutine(multiply_unexpanded)


ARGS = declare_args(
    "w stride between rows columns x pitch starts experts used shared y step scratch l1_ahead l2_ahead tickets "
    "first_column prologue hooks[*]"
)
HOOKS_WORD = ARGS.first_word_index("hooks")


def make_grouped_expert_matmul_kernel(name: str, blocks: WeightTiling) -> Kernel:
    """Make the kernel of a matmul with experts (MoE), or of a plain matmul, which is the case of one expert.

    It computes ``y[i] = w[expert of slot i] @ x[row of slot i]``. A slot is a pair of a token and one of its experts.
    All slots of an expert are multiplied together, with the tiles of `blocks`. Kernel arguments:

    - `stride`, `between`, `pitch`, `step`: bytes from weight row to weight row, from expert to expert, from row to row
      of x, and from row to row of y.
    - `starts` (int32): the number of slots before each expert, then before the experts of other devices, then of all
      slots. The slots, sorted by expert, follow.
    - `used`: the slots per token; `shared`: the activation rows per token.
    - `scratch`: `WeightTiling.scratch_bytes` for each thread.
    - If `tickets` is not 0, threads take groups of the weight from a work queue (`work_queue.take_work_item`).
    - `prologue` lists kernels that are called first (`panel_hooks`).
    - `hooks` are called for each panel of the result (`panel_hooks`). Without experts, rows of a panel are activation
      rows, and columns are weight rows; `first_column` is the number of the first one. Few rows are one panel.
    """
    multiply_expanded, multiply_unexpanded = blocks.multiply_expanded, make_multiply_unexpanded_rows(blocks)
    scratch, tall, tile_groups, many = blocks.scratch_bytes, blocks.tile_rows, blocks.tile_groups, blocks.rows_per_chunk
    max_leftover_rows, max_unexpanded_rows = blocks.max_leftover_rows, blocks.max_unexpanded_rows

    def body(a, thread, threads):
        call_prologue(a, ARGS.prologue(a))
        w, stride, between, rows, columns = ARGS.w(a), ARGS.stride(a), ARGS.between(a), ARGS.rows(a), ARGS.columns(a)
        x, pitch, starts, experts = ARGS.x(a), ARGS.pitch(a), ARGS.starts(a), ARGS.experts(a)
        used, shared, l1_ahead, l2_ahead = ARGS.used(a), ARGS.shared(a), ARGS.l1_ahead(a), ARGS.l2_ahead(a)
        y, step, expanded, tickets = ARGS.y(a), ARGS.step(a), ARGS.scratch(a) + thread * scratch, ARGS.tickets(a)
        groups, slots = (rows + GROUP_ROWS - 1) // GROUP_ROWS, starts + 4 * (experts + 2)
        count_of_rows, first_column = load_int(starts + 4 * experts), ARGS.first_column(a)
        has_panels = ARGS.hooks(a, 0) != 0 and count_of_rows >= MIN_EVENLY_SHARED_ROWS
        spans = count_row_spans(load_int(starts + 4) - load_int(starts), many, threads) if experts == 1 else 1
        for turn in range(spans):
            span = choose_row_span(turn, spans, thread, threads)
            own = compute_span_queue_address(tickets, span)
            item, mine = 0, take_work_item(own, 0)
            for expert in range(experts):
                first = load_int(starts + 4 * expert)
                count = load_int(starts + 4 * (expert + 1)) - first
                start = first + compute_first_row_of_span(count, many, span, spans)
                end = first + compute_first_row_of_span(count, many, span + 1, spans)
                matrix, last = w + expert * between, end
                if end - start <= max_unexpanded_rows:
                    last = start
                elif (end - start) % tall <= max_leftover_rows:
                    last -= (end - start) % tall
                for chunk in range(start, last, many):
                    for group in range(0, groups, tile_groups):
                        if item == mine:
                            coming = matrix + (group + threads * tile_groups) * GROUP_ROWS * stride
                            multiply_expanded(a, expanded, matrix, group, chunk, min(last, chunk + many), coming)
                            if has_panels:
                                row = group * GROUP_ROWS
                                panel_rows, panel_columns = min(many, last - chunk), tile_groups * GROUP_ROWS
                                call_hooks(
                                    a, HOOKS_WORD, chunk, panel_rows, first_column + row, min(panel_columns, rows - row)
                                )
                            mine = take_work_item(own, item + 1)
                        item += 1
                for row in range(0, rows if last < end else 0, PAIR_ROWS):
                    if item == mine:
                        left, at, to = rows - row, matrix + row * stride, y + 4 * row
                        multiply_unexpanded(
                            last,
                            end,
                            slots,
                            used,
                            shared,
                            x,
                            pitch,
                            to,
                            step,
                            at,
                            stride,
                            left,
                            columns,
                            l1_ahead,
                            l2_ahead,
                        )
                        if has_panels:
                            call_hooks(a, HOOKS_WORD, last, end - last, first_column + row, min(PAIR_ROWS, left))
                        mine = take_work_item(own, item + 1)
                    item += 1
            reset_queue_after_last_ticket(own, mine, item, threads)
        if thread == 0:
            zero_remote_expert_rows(starts, experts, y, step, rows)
        if not has_panels:
            call_hooks(a, HOOKS_WORD, 0, count_of_rows, first_column, rows)
        return 0

    return Kernel(name, body)


@dataclass(frozen=True, slots=True)
class ExpertSlots:
    """The slots of a matmul with experts; a slot is a pair of a token and one of its experts.

    Attributes:
        operand: The sorted slots in the layout of `make_grouped_expert_matmul_kernel`.
        expert_count: Experts on this device.
        slots_per_token: Slots of a token.
        rows_per_token: Activation rows of a token.
    """

    operand: Operand
    expert_count: int
    slots_per_token: int
    rows_per_token: int


def make_single_expert_slots(steps: StepTableBuilder, x: Operand) -> ExpertSlots:
    """Make the slots of a matmul without experts: each activation row belongs to the only expert, in order."""
    count = math.prod(x.shape[:-1])
    return ExpertSlots(steps.constant(np.array([0, count, count, *range(count)], np.int32)), 1, 1, 1)


def add_grouped_expert_matmul_step(
    steps: StepTableBuilder,
    call: BoundInstruction,
    kernel: Kernel,
    tiling: WeightTiling,
    row_stride: int,
    expert_stride: int,
    x: Sequence[Operand],
    pitch: int,
    slots: ExpertSlots,
) -> None:
    """Add the step of a matmul that groups activation rows by expert; each thread has whole tiles of weight rows.

    Weight rows are columns of the result.

    Args:
        steps: The steps of the program.
        call: The `mul_mat` or `mul_mat_id`.
        kernel: The result of `make_grouped_expert_matmul_kernel`.
        tiling: The tiling of the weight type.
        row_stride: Bytes of a weight row.
        expert_stride: Bytes of the weight of an expert.
        x: The activations of each thread.
        pitch: Bytes from row to row of the activations.
        slots: The slots of the experts.
    """
    w, y, hooks = call.operand(0), call.out, steps.hooks
    columns, tile = w.shape[-1], tiling.tile_groups * GROUP_ROWS
    if y.shape[-1] < tile * steps.threads:
        tile = GROUP_ROWS  # else a thread has no work
    unit = math.lcm(tile, *(hook.panel_columns for hook in hooks))
    memory = steps.scratch(f"product {tiling.scratch_bytes}", tiling.scratch_bytes * steps.threads)
    l1_ahead, l2_ahead = find_l1_and_l2_prefetch_distances(
        w.dtype, several=math.prod(y.shape[:-1]) > slots.expert_count
    )

    def make_thread_work(first: int, last: int, thread: int, tickets: int = 0) -> ThreadWork:
        mine, own = y.slice_axis(len(y.shape) - 1, first, last - first), x[thread]
        words = ARGS(
            w=w.address + first * row_stride,
            stride=row_stride,
            between=expert_stride,
            rows=last - first,
            columns=columns,
            x=own.address,
            pitch=pitch,
            y=mine.address,
            step=y.row_stride_bytes,
            starts=slots.operand.address,
            experts=slots.expert_count,
            used=slots.slots_per_token,
            shared=slots.rows_per_token,
            scratch=memory.address + thread * tiling.scratch_bytes,
            l1_ahead=l1_ahead,
            l2_ahead=l2_ahead,
            tickets=tickets,
            first_column=first,
            prologue=PrologueWord(),
            hooks=make_hook_words(hooks),
        )
        read, written = list_hook_accesses(hooks, first, last)
        return ThreadWork(words, [w, own, slots.operand, *read], [mine, *written])

    is_shared = is_matmul_shared_by_threads(steps, call)
    if is_shared and math.prod(y.shape[:-1]) >= MIN_EVENLY_SHARED_ROWS * slots.slots_per_token:
        steps.add_queued(kernel, lambda tickets: make_thread_work(0, y.shape[-1], 0, tickets))
    elif is_shared:
        bounds = choose_tile_column_bounds_per_thread(call, unit, steps.threads)
        results = [y, *list_hook_accesses(hooks, 0, y.shape[-1])[1]]
        parts = [
            make_thread_work(*pair, thread) if pair[0] < pair[1] else None
            for thread, pair in enumerate(pairwise(bounds))
        ]
        steps.add_by_columns(kernel, parts, results, bounds)
    elif y.shape[-1]:
        steps.add_per_thread(kernel, [make_thread_work(0, y.shape[-1], 0)])


def is_matmul_shared_by_threads(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    """Return whether several threads share one matmul, instead of each thread computing it for itself."""
    return steps.is_step_shared_by_threads([call.operand(0), call.operand(1)], [call.out])


def choose_tile_column_bounds_per_thread(call: BoundInstruction, unit: int, threads: int) -> Sequence[int]:
    """Choose the bounds of the result columns of each thread, in whole tiles of `unit` columns.

    If an op that reads the result has attention heads, and all threads can get equally many whole heads, the bounds are
    at heads.
    """
    y = call.out
    rows, readers = y.shape[-1], call.find_readers() if threads > 1 else None
    sizes = {o.shape[-1] for r in readers or () for o in r.src if o and o.shape and o.region == y.region}
    for size in sorted(sizes - {rows}):
        whole = math.lcm(unit, size)
        if rows % (whole * threads) == 0:
            return compute_even_bounds(rows, whole, threads)
    return compute_even_bounds(rows, unit, threads)
