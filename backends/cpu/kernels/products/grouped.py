"""The loops of a matrix product, whatever the weight's type: experts, rows of activations, groups of the weight.

Groups of 16 rows of the weight are expanded, some columns at a time, to what a tile multiplies: that stays in the
nearest cache while many rows of activations pass.  A few rows meet the weight as it lies, up to four at once.
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
"""Rows of the weight in a group, a lane each, so that no sum crosses lanes; and in two groups."""
NONE = np.float32(0)
MANY_ROWS = 32
"""Rows of activations from which on threads rather share a product evenly than go on with the columns that they have
of it: it takes longer than a meeting."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """How weights of one type meet activations.

    A block is `columns` of a group.  ``expand(to, group, stride, left, columns, first, count)`` writes so many blocks
    from the first to `to`, `size` bytes each, of a group whose rows are `stride` bytes long and of which `left` exist.
    ``add(acc, p, r, at)`` adds to the sums of a tile (`rows` rows of activations by `groups`) the products with a
    block that is expanded at `p`, and `span` bytes on for the next group, and begins at byte `at` of the rows `r`.
    ``few(n)`` is ``(to, group, stride, left, columns, x, near, far)``, which stores the products of a group with n rows
    of activations: `to` and `x` are addresses, as `Tile.chosen` has them, `near` and `far` how many bytes ahead the
    weight is fetched to the first and the second cache.  ``few_of_two(n)`` is the same for two groups, of which the
    second may not be there, where registers have room for four rows of them.

    At most `wide` blocks are expanded at a time, which `chunk` rows of activations meet before they are expanded again.
    Rows that would leave a tile with `left_over` or fewer meet the weight as it lies, and so do all of them where they
    are `lying` or fewer: what is expanded for them is used too seldom, and a group of the weight stays in the nearest
    cache meanwhile.
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
        return self.wide * self.size

    @property
    def scratch(self) -> int:
        """Bytes of a thread: expanded blocks, and the float32 sums of whole tiles of a chunk."""
        tiles = -(-self.chunk // self.rows)
        return self.groups * (self.span + tiles * self.rows * ROWS * 4)


@part
def clear(starts, experts, y, step, n):
    """Zero the `n` elements of the rows whose expert is elsewhere."""
    slots = starts + 4 * (experts + 2)
    for i in range(load_int(starts + 4 * experts), load_int(starts + 4 * experts + 4)):
        row = y + load_int(slots + 4 * i) * step
        for c in range(n):
            store_scalar(row + 4 * c, NONE)


@part
def fetch(p, lines, near, far):
    """Cache lines of a weight so many bytes ahead of `p`, to the first and to the second cache."""
    for line in range(lines):
        prefetch(p + near + 64 * line)
        prefetch_far(p + far + 64 * line)


@part
def fetch_part(p, nbytes, parts):
    """One of so many `parts` of a weight, cache line by cache line, to the second cache; where the next part begins."""
    for _ in range(nbytes // parts // 64 + 1):
        prefetch_far(p)
        p += 64
    return p


@part
def row_of(slot, used, shared):
    """The row of activations that a slot reads: slot i of a token takes row ``i mod shared`` of it."""
    return slot // used * shared + slot % used % shared


def at_once(rows: int, least: int, few: Part) -> Part:
    """``(i, end, ...) -> i``: so many `rows` of activations at once meet `few` groups of the weight, from slot `i` on
    while `least` or more are left; the slot behind them."""
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
    """What `at_once` gives where registers have no room for so many rows."""
    return i


def lying_of(blocks: Blocks) -> Part:
    """``(i, end, slots, used, shared, x, pitch, y, step, at, stride, left, columns, near, far)``: slots from `i` to
    before `end` meet a weight as it lies, `PAIR` rows from `at` on, of which `left` exist."""
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
    """``(a, expanded, matrix, group, chunk, stop, coming)``: slots from `chunk` to before `stop` meet the groups of a
    tile, which are expanded for them, while those that begin at `coming` are fetched to the second cache."""
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
    """``y[i] = w[expert of slot i] @ x[row of slot i]``.

    Bytes: `stride` of a row of w and `between` its experts, `pitch` and `step` from row to row of x and y,
    `Blocks.scratch` for each thread.  At `starts`: how many slots come before each expert, before those of experts that
    are elsewhere, and in all, then slots in that order (int32).  A token has so many slots `used`, and so many rows
    `shared` by them.  Threads take groups of the weight as they come where there are `tickets` (`tickets.draw`).
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
    """Which rows meet which expert: sorted slots as `product_of` reads them, experts, slots of a token, rows of it."""

    operand: Operand
    experts: int
    used: int
    shared: int


def in_order(steps: Steps, x: Operand) -> Slots:
    """Rows that all meet the same weight."""
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
    """The step: the weight's rows are `stride` bytes and its experts `between`; `x` is for each thread where it finds
    the activations, a row every `pitch` bytes.  Threads have whole tiles of the weight's rows, so columns of y."""
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
    """Whether threads share a product."""
    return steps.is_shared([call.operand(0), call.operand(1)], [call.out])


def bounds_of(call: Bound, unit: int, threads: int) -> Sequence[int]:
    """Which columns of the result each thread has: whole tiles, and whole heads where these are read and all threads
    get as many."""
    y = call.out
    rows, readers = y.shape[-1], call.readers() if threads > 1 else None
    sizes = {o.shape[-1] for r in readers or () for o in r.src if o and o.shape and o.region == y.region}
    for size in sorted(sizes - {rows}):
        whole = math.lcm(unit, size)
        if rows % (whole * threads) == 0:
            return even_bounds(rows, whole, threads)
    return even_bounds(rows, unit, threads)


def even_bounds(n: int, unit: int, threads: int) -> Sequence[int]:
    """Where the share of each thread begins, and `n`: whole units, as many for each as can be."""
    each = -(-n // unit // threads) * unit
    return [min(n, each * thread) for thread in range(threads + 1)]
