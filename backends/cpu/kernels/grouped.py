"""The loops of a matrix product, whatever the weight's type: experts, rows of activations, groups of the weight.

Groups of 16 rows of the weight are expanded, some columns at a time, to what a tile multiplies: that stays in the
nearest cache while many rows of activations pass.  A few rows meet the weight as it lies, up to four at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ...operands import Bound, Operand
from ..compiler import Kernel, Part, part
from ..fetching import ahead
from ..simd.tiles import tile
from ..simd.vectors import LANES, MANY, load_int, prefetch, prefetch_far, store_scalar, vectors_in_registers
from ..steps import Share, Steps
from ..words import words
from .packing import share

ROWS = LANES
"""Rows of the weight in a group: a lane each, so that no sum crosses lanes."""
NONE = np.float32(0)


@dataclass(frozen=True, slots=True)
class Blocks:
    """How weights of one type meet activations.

    A block is `columns` of a group.  ``expand(to, group, stride, left, columns, first, count)`` writes so many blocks
    from the first to `to`, `size` bytes each, of a group whose rows are `stride` bytes long and of which `left` exist.
    ``add(acc, p, r, at)`` adds to the sums of a tile (`rows` rows of activations by `groups`) the products with a
    block that is expanded at `p`, and `span` bytes on for the next group, and begins at byte `at` of the rows `r`.
    ``few(n)`` is ``(to, group, stride, left, columns, x, near, far)``, which stores the products of a group with n rows
    of activations: `to` and `x` are addresses, as `Tile.chosen` has them, `near` and `far` how many bytes ahead the
    weight is fetched to the first and the second cache.

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

    @property
    def span(self) -> int:
        return self.wide * self.size

    @property
    def scratch(self) -> int:
        """Bytes that each thread needs: expanded blocks, and the sums of a chunk."""
        return self.groups * (self.span + self.chunk * ROWS * 4)


@part
def clear(starts, experts, y, step, lo, hi):
    """Zero the elements from `lo` to before `hi` of the rows whose expert is elsewhere."""
    slots = starts + 4 * (experts + 2)
    for i in range(load_int(starts + 4 * experts), load_int(starts + 4 * experts + 4)):
        row = y + load_int(slots + 4 * i) * step
        for c in range(lo, hi):
            store_scalar(row + 4 * c, NONE)


@part
def fetch(p, lines, near, far):
    """Cache lines of a weight so many bytes ahead of `p`, to the first and to the second cache."""
    for line in range(lines):
        prefetch(p + near + 64 * line)
        prefetch_far(p + far + 64 * line)


@part
def row_of(slot, used, shared):
    """The row of activations that a slot reads: slot i of a token takes row ``i mod shared`` of it."""
    return slot // used * shared + slot % used % shared


def at_once(blocks: Blocks, rows: int, least: int) -> Part:
    """``(i, end, ...) -> i``: so many `rows` of activations at once meet a group of the weight as it lies, from slot
    `i` on while `least` or more are left; the slot behind them."""
    chosen, few = tile(rows, 1).chosen, blocks.few(rows)

    def meet(i, end, slots, used, shared, x, pitch, y, step, at, stride, left, columns, near, far):
        while i + least <= end:
            to = chosen(slots + 4 * i, end - i, 1, 1, y, step)
            r = chosen(slots + 4 * i, end - i, used, shared, x, pitch)
            few(to, at, stride, left, columns, r, near, far)
            i += rows
        return i

    return part(meet)


ARGS = words("w stride between rows columns x pitch starts experts used shared y step scratch near far")


def product_of(name: str, blocks: Blocks) -> Kernel:
    """``y[i] = w[expert of slot i] @ x[row of slot i]``.

    Bytes: `stride` of a row of w and `between` its experts, `pitch` and `step` from row to row of x and y,
    `Blocks.scratch` for each thread.  At `starts`: how many slots come before each expert, before those of experts that
    are elsewhere, and in all, then slots in that order (int32).  A token has so many slots `used`, and so many rows
    `shared` by them.
    """
    some = tile(blocks.rows, blocks.groups)
    chosen, zeros, put, save, saved = some.chosen, some.zeros, some.put, some.save, some.saved
    expand, add = blocks.expand, blocks.add
    two, one = at_once(blocks, 2, 2), at_once(blocks, 1, 1)
    four = at_once(blocks, 4, 3) if vectors_in_registers() == MANY else two
    width, record, size, wide = blocks.columns, blocks.record, blocks.size, blocks.wide
    span, scratch = blocks.span, blocks.scratch
    tall, tile_groups, many = blocks.rows, blocks.groups, blocks.chunk
    left_over, lying = blocks.left_over, blocks.lying

    def body(a, thread, threads):
        w, stride, between, rows, columns = ARGS.w(a), ARGS.stride(a), ARGS.between(a), ARGS.rows(a), ARGS.columns(a)
        x, pitch, starts, experts = ARGS.x(a), ARGS.pitch(a), ARGS.starts(a), ARGS.experts(a)
        used, shared, near, far = ARGS.used(a), ARGS.shared(a), ARGS.near(a), ARGS.far(a)
        y, step, expanded = ARGS.y(a), ARGS.step(a), ARGS.scratch(a) + thread * scratch
        n, groups, slots = (columns + width - 1) // width, (rows + ROWS - 1) // ROWS, starts + 4 * (experts + 2)
        lo, hi = share((groups + tile_groups - 1) // tile_groups, thread, threads)
        lo, hi = lo * tile_groups, min(groups, hi * tile_groups)
        for expert in range(experts):
            start, end = load_int(starts + 4 * expert), load_int(starts + 4 * (expert + 1))
            matrix, last = w + expert * between, end
            if end - start <= lying:
                last = start
            elif (end - start) % tall <= left_over:
                last -= (end - start) % tall
            for chunk in range(start, last, many):
                stop = min(last, chunk + many)
                for group in range(lo, hi, tile_groups):
                    for first in range(0, max(1, n), wide):
                        count, sums = min(wide, n - first), expanded + tile_groups * span
                        for g in range(min(tile_groups, groups - group)):
                            at, left = matrix + (group + g) * ROWS * stride, rows - (group + g) * ROWS
                            expand(expanded + g * span, at, stride, left, columns, first, count)
                        for i in range(chunk, stop, tall):
                            r = chosen(slots + 4 * i, stop - i, used, shared, x + first * record, pitch)
                            acc = saved(sums) if first > 0 else zeros()
                            for b in range(count):
                                acc = add(acc, expanded + b * size, r, b * record)
                            if first + wide < n:
                                save(sums, acc)
                            else:
                                to = chosen(slots + 4 * i, stop - i, 1, 1, y + group * ROWS * 4, step)
                                put(to, acc, rows - group * ROWS)
                            sums += tall * tile_groups * ROWS * 4
            for group in range(lo, hi):
                left, at, to = rows - group * ROWS, matrix + group * ROWS * stride, y + group * ROWS * 4
                i = four(last, end, slots, used, shared, x, pitch, to, step, at, stride, left, columns, near, far)
                i = two(i, end, slots, used, shared, x, pitch, to, step, at, stride, left, columns, near, far)
                one(i, end, slots, used, shared, x, pitch, to, step, at, stride, left, columns, near, far)
        clear(starts, experts, y, step, lo * ROWS, min(rows, hi * ROWS))
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
    bounds = bounds_of(call, blocks.groups * ROWS, steps.threads if is_dealt(steps, call) else 1)
    near, far = ahead(w.dtype, several=math.prod(y.shape[:-1]) > to.experts)

    def part(thread: int) -> Share | None:
        first, count = bounds[thread], bounds[thread + 1] - bounds[thread]
        if not count:
            return None
        mine, own = y.part(len(y.shape) - 1, first, count), x[thread]
        words = ARGS(
            w=w.address + first * stride,
            stride=stride,
            between=between,
            rows=count,
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
        )
        return Share(words, [w, own, to.operand], [mine])

    if len(bounds) > 2:
        steps.deal_columns(kernel, [part(thread) for thread in range(steps.threads)], y, bounds)
    elif (whole := part(0)) is not None:
        steps.deal(kernel, [whole])


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
