"""The loops of a matrix product for all weight types: experts, rows of activations, groups of weight rows.

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

from ....operands import Bound, Operand
from ...compiler import Kernel, Part, part
from ...fetching import ahead
from ...simd.tiles import tile
from ...simd.vectors import LANES, MANY, load_int, prefetch, prefetch_far, store_scalar, vectors_in_registers
from ...steps import Share, Steps
from ...words import words
from ..tickets import draw, settle, span_at, span_of, spans_of, tickets_of

ROWS, PAIR = LANES, 2 * LANES
"""Rows of a group of the weight, and of two groups. Each row is one lane, so that no sum crosses lanes."""
NONE = np.float32(0)
MANY_ROWS = 32
"""Activation rows from which on threads share a product evenly instead of keeping their own columns.

Such a product takes longer than a barrier.
"""


@dataclass(frozen=True, slots=True)
class Blocks:
    """The kernels and tile sizes of the matrix products with one weight type.

    A block is `block_columns` columns of a group. Byte arguments `stride`, `left`: bytes of a weight row, rows that
    exist.

    Attributes:
        block_columns: Columns of a block.
        record_bytes: Bytes of an activation row for the columns of a block.
        block_bytes: Bytes of an expanded block.
        blocks_per_pass: Largest number of blocks that are expanded at a time.
        rows_per_chunk: Activation rows that use the expanded blocks before the next blocks are expanded.
        tile_rows, tile_groups: Activation rows and groups of a tile.
        max_leftover_rows: A last tile of at most this many rows uses the unexpanded weight.
        max_unexpanded_rows: Products of at most this many rows use the unexpanded weight. Expanding costs more there.
        expand_blocks: ``(to, group, stride, left, columns, first, count)`` expands blocks `first` to `first` + `count`.
        add_block: ``(acc, p, r, at) -> acc`` adds the products of the block at `p` and byte `at` of the rows `r`. The
            block of the next group is `group_bytes` behind `p`.
        make_few_rows: ``(n)`` makes ``(to, group, stride, left, columns, x, near, far)`` for `n` activation rows. It
            stores the products of one group. `to` and `x` are addresses as in `Tile.chosen`. `near` and `far` are the
            prefetch distances in bytes to the first and the second cache.
        make_few_rows_of_two: The same for two groups; the second may be absent. None without registers for it.
    """

    columns: int
    record: int
    size: int
    wide: int
    chunk: int
    rows: int
    groups: int
    left_over: int
    lying: int
    expand: Part
    add: Part
    few: Callable[[int], Part]
    few_of_two: Callable[[int], Part] | None = None

    @property
    def span(self) -> int:
        """Bytes of the expanded blocks of one group."""
        return self.wide * self.size

    @property
    def scratch(self) -> int:
        """Bytes of a thread: the expanded blocks, and the float32 sums of the whole tiles of a chunk."""
        tiles = -(-self.chunk // self.rows)
        return self.groups * (self.span + tiles * self.rows * ROWS * 4)


@part
def clear(starts, experts, y, step, n):
    """Zero `n` elements of each row of `y` that belongs to an expert of another device."""
    slots = starts + 4 * (experts + 2)
    for i in range(load_int(starts + 4 * experts), load_int(starts + 4 * experts + 4)):
        row = y + load_int(slots + 4 * i) * step
        for c in range(n):
            store_scalar(row + 4 * c, NONE)


@part
def fetch(p, lines, near, far):
    """Prefetch `lines` cache lines at ``p + near`` to the first cache, and at ``p + far`` to the second cache."""
    for line in range(lines):
        prefetch(p + near + 64 * line)
        prefetch_far(p + far + 64 * line)


@part
def fetch_part(p, nbytes, parts):
    """Prefetch one of `parts` equal parts of `nbytes` bytes at `p` to the second cache. Return the end of the part."""
    for _ in range(nbytes // parts // 64 + 1):
        prefetch_far(p)
        p += 64
    return p


@part
def row_of(slot, used, shared):
    """Return the activation row of a slot: slot i of a token reads row ``i mod shared`` of the token."""
    return slot // used * shared + slot % used % shared


def at_once(rows: int, least: int, few: Part) -> Part:
    """Make a kernel part that multiplies `rows` activation rows at once.

    Args:
        rows: Activation rows of one call of `few`.
        least: Smallest number of remaining slots for which the loop goes on.
        few: The product of these rows with one or two groups.

    Returns:
        ``(i, end, ...) -> i``: processes slots from `i` on and returns the first slot that is left.
    """
    chosen = tile(rows, 1).chosen

    def meet(i, end, slots, used, shared, x, pitch, y, step, at, stride, left, columns, near, far):
        while i + least <= end:
            to = chosen(slots + 4 * i, end - i, 1, 1, y, step)
            r = chosen(slots + 4 * i, end - i, used, shared, x, pitch)
            few(to, at, stride, left, columns, r, near, far)
            i += rows
        return i

    return part(meet)


@part
def meet_none(i, end, slots, used, shared, x, pitch, y, step, at, stride, left, columns, near, far):
    """Return `i`: the part for machines without registers for several rows of two groups."""
    return i


def lying_of(blocks: Blocks) -> Part:
    """Make the part that multiplies slots `i` to `end` with `PAIR_ROWS` rows of an unexpanded weight.

    The part is ``(i, end, slots, used, shared, x, pitch, y, step, at, stride, left, columns, near, far)``. The weight
    rows begin at `at`; `left` of them exist.
    """
    two, one = at_once(2, 2, blocks.few(2)), at_once(1, 1, blocks.few(1))
    many = vectors_in_registers() == MANY
    four = at_once(4, 3, blocks.few(4)) if many else two
    of_two = at_once(4, 3, blocks.few_of_two(4)) if many and blocks.few_of_two else meet_none

    def meet(i, end, slots, used, shared, x, pitch, y, step, at, stride, left, columns, near, far):
        i = of_two(i, end, slots, used, shared, x, pitch, y, step, at, stride, left, columns, near, far)
        for row in range(0, min(left, PAIR), ROWS):
            p, to, n, j = at + row * stride, y + 4 * row, left - row, i
            j = four(j, end, slots, used, shared, x, pitch, to, step, p, stride, n, columns, near, far)
            j = two(j, end, slots, used, shared, x, pitch, to, step, p, stride, n, columns, near, far)
            one(j, end, slots, used, shared, x, pitch, to, step, p, stride, n, columns, near, far)

    return part(meet)


ARGS = words("w stride between rows columns x pitch starts experts used shared y step scratch near far tickets")


def many_at_once(blocks: Blocks) -> Part:
    """Make the part that expands the groups of a tile and multiplies them with slots `chunk` to `stop`.

    The part is ``(a, expanded, matrix, group, chunk, stop, coming)``. Meanwhile the part prefetches the groups at
    `coming` to the second cache.
    """
    some = tile(blocks.rows, blocks.groups)
    chosen, zeros, put, save, saved = some.chosen, some.zeros, some.put, some.save, some.saved
    expand, add = blocks.expand, blocks.add
    width, record, size, wide, span = blocks.columns, blocks.record, blocks.size, blocks.wide, blocks.span
    tall, tile_groups = blocks.rows, blocks.groups

    def meet(a, expanded, matrix, group, chunk, stop, coming):
        stride, columns, x, pitch = ARGS.stride(a), ARGS.columns(a), ARGS.x(a), ARGS.pitch(a)
        used, shared, slots = ARGS.used(a), ARGS.shared(a), ARGS.starts(a) + 4 * (ARGS.experts(a) + 2)
        left, y, step = ARGS.rows(a) - group * ROWS, ARGS.y(a) + group * ROWS * 4, ARGS.step(a)
        n = (columns + width - 1) // width
        tiles = (stop - chunk + tall - 1) // tall * ((n + wide - 1) // wide)
        for first in range(0, max(1, n), wide):
            count, sums = min(wide, n - first), expanded + tile_groups * span
            for g in range(min(tile_groups, (left + ROWS - 1) // ROWS)):
                at = matrix + (group + g) * ROWS * stride
                expand(expanded + g * span, at, stride, left - g * ROWS, columns, first, count)
            for i in range(chunk, stop, tall):
                r = chosen(slots + 4 * i, stop - i, used, shared, x + first * record, pitch)
                coming = fetch_part(coming, tile_groups * ROWS * stride, tiles)
                acc = saved(sums) if first > 0 else zeros()
                for b in range(count):
                    acc = add(acc, expanded + b * size, r, b * record)
                if first + wide < n:
                    save(sums, acc)
                else:
                    put(chosen(slots + 4 * i, stop - i, 1, 1, y, step), acc, left)
                sums += tall * tile_groups * ROWS * 4

    return part(meet)


def product_of(name: str, blocks: Blocks) -> Kernel:
    """Make the kernel ``y[i] = w[expert of slot i] @ x[row of slot i]``.

    Words in bytes: `stride` (weight row), `between` (expert), `pitch` and `step` (row of x and of y). Each thread has
    `WeightTiling.scratch_bytes` of scratch.

    `starts` (int32) holds the slots before each expert, the slots before the remote experts, and the slots in all. The
    slots in the order of their experts follow. `used` is the slots of a token, `shared` its activation rows. If
    `tickets` is not 0, threads take groups of the weight from a work queue (`tickets.take_work_item`).
    """
    meet, lie = many_at_once(blocks), lying_of(blocks)
    scratch, tall, tile_groups, many = blocks.scratch, blocks.rows, blocks.groups, blocks.chunk
    left_over, lying = blocks.left_over, blocks.lying

    def body(a, thread, threads):
        w, stride, between, rows, columns = ARGS.w(a), ARGS.stride(a), ARGS.between(a), ARGS.rows(a), ARGS.columns(a)
        x, pitch, starts, experts = ARGS.x(a), ARGS.pitch(a), ARGS.starts(a), ARGS.experts(a)
        used, shared, near, far = ARGS.used(a), ARGS.shared(a), ARGS.near(a), ARGS.far(a)
        y, step, expanded, tickets = ARGS.y(a), ARGS.step(a), ARGS.scratch(a) + thread * scratch, ARGS.tickets(a)
        groups, slots = (rows + ROWS - 1) // ROWS, starts + 4 * (experts + 2)
        spans = spans_of(load_int(starts + 4) - load_int(starts), many, threads) if experts == 1 else 1
        for turn in range(spans):
            span = span_of(turn, spans, thread, threads)
            own = tickets_of(tickets, span)
            piece, mine = 0, draw(own, 0)
            for expert in range(experts):
                first = load_int(starts + 4 * expert)
                count = load_int(starts + 4 * (expert + 1)) - first
                start, end = first + span_at(count, many, span, spans), first + span_at(count, many, span + 1, spans)
                matrix, last = w + expert * between, end
                if end - start <= lying:
                    last = start
                elif (end - start) % tall <= left_over:
                    last -= (end - start) % tall
                for chunk in range(start, last, many):
                    for group in range(0, groups, tile_groups):
                        if piece == mine:
                            coming = matrix + (group + threads * tile_groups) * ROWS * stride
                            meet(a, expanded, matrix, group, chunk, min(last, chunk + many), coming)
                            mine = draw(own, piece + 1)
                        piece += 1
                for row in range(0, rows if last < end else 0, PAIR):
                    if piece == mine:
                        left, at, to = rows - row, matrix + row * stride, y + 4 * row
                        lie(last, end, slots, used, shared, x, pitch, to, step, at, stride, left, columns, near, far)
                        mine = draw(own, piece + 1)
                    piece += 1
            settle(own, mine, piece, threads)
        if thread == 0:
            clear(starts, experts, y, step, rows)
        return 0

    return Kernel(name, body)


@dataclass(frozen=True, slots=True)
class Slots:
    """The assignment of activation rows to experts.

    Attributes:
        operand: Sorted slots in the layout of `make_matmul_kernel`.
        expert_count: Experts on this device.
        slots_per_token: Slots of a token.
        rows_per_token: Activation rows of a token.
    """

    operand: Operand
    experts: int
    used: int
    shared: int


def in_order(steps: Steps, x: Operand) -> Slots:
    """Make the slots of a product in which all rows use the same weight."""
    count = math.prod(x.shape[:-1])
    return Slots(steps.constant(np.array([0, count, count, *range(count)], np.int32)), 1, 1, 1)


def add_product(
    steps: Steps,
    call: Bound,
    kernel: Kernel,
    blocks: Blocks,
    stride: int,
    between: int,
    x: Sequence[Operand],
    pitch: int,
    to: Slots,
) -> None:
    """Add the step of a product. Each thread computes whole tiles of weight rows, which are columns of y.

    Args:
        steps: The steps of the program.
        call: The `mul_mat` or `mul_mat_id`.
        kernel: The result of `make_matmul_kernel`.
        blocks: The tiling of the weight type.
        stride: Bytes of a weight row.
        between: Bytes of an expert.
        x: The activations of each thread.
        pitch: Bytes from row to row of the activations.
        to: The slots.
    """
    w, y = call.operand(0), call.out
    columns = w.shape[-1]
    memory = steps.scratch(f"product {blocks.scratch}", blocks.scratch * steps.threads)
    near, far = ahead(w.dtype, several=math.prod(y.shape[:-1]) > to.experts)

    def share(first: int, last: int, thread: int, tickets: int = 0) -> Share:
        mine, own = y.part(len(y.shape) - 1, first, last - first), x[thread]
        words = ARGS(
            w=w.address + first * stride,
            stride=stride,
            between=between,
            rows=last - first,
            columns=columns,
            x=own.address,
            pitch=pitch,
            y=mine.address,
            step=y.row_step,
            starts=to.operand.address,
            experts=to.experts,
            used=to.used,
            shared=to.shared,
            scratch=memory.address + thread * blocks.scratch,
            near=near,
            far=far,
            tickets=tickets,
        )
        return Share(words, [w, own, to.operand], [mine])

    dealt = is_dealt(steps, call)
    if dealt and math.prod(y.shape[:-1]) >= MANY_ROWS * to.used:
        steps.add_pieces(kernel, lambda tickets: share(0, y.shape[-1], 0, tickets))
    elif dealt:
        bounds = bounds_of(call, blocks.groups * ROWS, steps.threads)
        parts = [share(*pair, thread) if pair[0] < pair[1] else None for thread, pair in enumerate(pairwise(bounds))]
        steps.deal_columns(kernel, parts, y, bounds)
    elif y.shape[-1]:
        steps.deal(kernel, [share(0, y.shape[-1], 0)])


def is_dealt(steps: Steps, call: Bound) -> bool:
    """Return whether threads share a product."""
    return steps.is_shared([call.operand(0), call.operand(1)], [call.out])


def bounds_of(call: Bound, unit: int, threads: int) -> Sequence[int]:
    """Choose the result columns of each thread: whole tiles of `unit` columns.

    If all threads get the same number of whole heads, the bounds are at heads of the readers.
    """
    y = call.out
    rows, readers = y.shape[-1], call.readers() if threads > 1 else None
    sizes = {o.shape[-1] for r in readers or () for o in r.src if o and o.shape and o.region == y.region}
    for size in sorted(sizes - {rows}):
        whole = math.lcm(unit, size)
        if rows % (whole * threads) == 0:
            return even_bounds(rows, whole, threads)
    return even_bounds(rows, unit, threads)


def even_bounds(n: int, unit: int, threads: int) -> Sequence[int]:
    """Return the first column of each thread, and `n`: whole units, divided as evenly as possible."""
    each = -(-n // unit // threads) * unit
    return [min(n, each * thread) for thread in range(threads + 1)]
