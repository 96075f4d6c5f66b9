"""Products of many activation rows with a weight by AMX tiles: bfloat16 terms, float32 sums.

1. Expand some columns of two weight groups, or of one group of each of two weights (`tiled_weights`).
2. Multiply them with 32 activation rows after another: two activation tiles times two weight tiles.
3. Keep the four tiles of sums in registers.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from ....operands import Bound
from ... import processor
from ...compiler import Kernel, Part, part
from ...simd.amx import HEIGHT, NBYTES, TILE, WIDTH
from ...simd.vectors import load, prefetch_far
from ...steps import Share, Steps
from ...words import words
from ..amx import tiles
from ..rows import put
from ..tickets import draw, settle, span_at, span_of, spans_of, tickets_of
from .formats import COLUMNS, FORMATS
from .grouped import ROWS, fetch_part, is_dealt
from .rounding import TALL, rounded, rounded_bytes
from .tiled_weights import BLOCK, TiledWeight, products_of_terms, tiled_weight

SQUARE = 4 * TILE
"""Bytes of the sums of 32 rows and two groups, tile by tile."""
WIDE, CHUNK, ROOM, MOST = 64, 512, 256, 8
"""Terms of a group's blocks per expansion; activation rows per expansion; expanded terms of two groups; matrices.

The last two are limits, so that the expanded terms and the sums stay in the second cache.
"""
MANY = 256
"""Fewest activation rows of a span: fewer do not pay for expanding the weight."""
EXPANDED, SUMS = NBYTES, NBYTES + ROOM * BLOCK
"""Offsets into the scratch of a thread: the expanded blocks behind the registers, and the sums of a chunk."""
SCRATCH = SUMS + CHUNK // TALL * MOST * SQUARE


def kind_of(call: Bound) -> int | None:
    """Return how a product reads its activations, as a kind of `rounding`; None for float32."""
    w, packed = call.operand(0), FORMATS.get(call.operand(0).dtype)
    experts = (int(np.asarray(call.attrs["total"])) or w.shape[0]) if call.op == "mul_mat_id" else 1
    if processor.tiles() and w.shape[-1] and w.shape[-1] % COLUMNS == 0:
        weight = tiled_weight(w.dtype)
        if math.prod(call.out.shape[:-1]) >= weight.least * experts:
            return weight.rounding
    return packed.zero if packed else None


@part
def squares_of(columns, terms):
    """Return the matrices of two groups that are expanded together: as many as the scratch can hold.

    More matrices mean that activations are loaded from distant memory less often.
    """
    return min(MOST, ROOM // (terms * min(WIDE // terms, columns // COLUMNS)))


def meet_of(weight: TiledWeight, emit: Part, each: int) -> Part:
    """Make the part that multiplies activation rows `chunk` to `stop` with two groups for each of `squares` matrices.

    The part is ``(mine, w, v, squares, left, stride, columns, x, pitch, chunk, stop, to, step, ahead)``. The first
    `each` groups of a matrix are rows at `w`, the others rows at `v`. `left` weight rows exist. Meanwhile the part
    prefetches weight rows `ahead` bytes further on, and the next activation rows, to the second cache.

    Args:
        weight: The weight type.
        emit: ``(mine, sums, rows, left, to, step)`` stores the sums of `rows` rows from the first four registers.
        each: Groups of a matrix that belong to `w`: 2, or 1 for two weights.
    """
    unit, expand = tiles(), weight.expand
    multiply_one, multiply_two = products_of_terms(weight, 1), products_of_terms(weight, 2)
    clear_0, clear_1, clear_2, clear_3 = unit.clear[:4]
    load_0, load_1, load_2, load_3 = unit.load[:4]
    store_0, store_1, store_2, store_3 = unit.store[:4]
    w_block, x_block = weight.block, weight.x_block
    lines, wide = x_block // MOST // 64, WIDE // weight.terms

    def meet(mine, w, v, squares, left, stride, columns, x, pitch, chunk, stop, to, step, ahead):
        n, apart = columns // COLUMNS, each * ROWS * stride
        passes = (n + wide - 1) // wide
        parts = passes * squares * ((stop - chunk + TALL - 1) // TALL)
        next_w, next_v = w + ahead, v + ahead
        for number in range(passes):
            first, last = n * number // passes, n * (number + 1) // passes
            for k in range(squares):
                block = mine + EXPANDED + k * (last - first) * w_block
                here, there = left - k * each * ROWS, left - (k * each + each - 1) * ROWS
                expand(block, w + k * apart, stride, here, first, last, n)
                if there > 0:
                    expand(block + TILE, v + k * apart, stride, there, first, last, n)
            sums = mine + SUMS
            for i in range(chunk, stop, TALL):
                block, coming = mine + EXPANDED, x + (i // TALL + 1) * pitch + first * x_block
                for k in range(squares):
                    next_w = fetch_part(next_w, squares * ROWS * stride, parts)
                    next_v = fetch_part(next_v, squares * ROWS * stride, parts)
                    if number == 0:
                        clear_0(mine)
                        clear_1(mine)
                        clear_2(mine)
                        clear_3(mine)
                    else:
                        load_0(mine, sums, WIDTH)
                        load_1(mine, sums + TILE, WIDTH)
                        load_2(mine, sums + 2 * TILE, WIDTH)
                        load_3(mine, sums + 3 * TILE, WIDTH)
                    r = x + i // TALL * pitch + first * x_block
                    for _ in range(first, last):
                        for line in range(lines):
                            prefetch_far(coming + 64 * line)
                        coming += 64 * lines
                        if stop - i > HEIGHT:
                            multiply_two(mine, r, block)
                        else:
                            multiply_one(mine, r, block)
                        r += x_block
                        block += w_block
                    if number + 1 < passes:
                        store_0(mine, sums, WIDTH)
                        store_1(mine, sums + TILE, WIDTH)
                        store_2(mine, sums + 2 * TILE, WIDTH)
                        store_3(mine, sums + 3 * TILE, WIDTH)
                    else:
                        place = to + (i - chunk) * step + k * each * WIDTH
                        emit(mine, sums, min(TALL, stop - i), left - k * each * ROWS, place, step)
                    sums += SQUARE

    return part(meet)


def put_of() -> Part:
    """Make `emit` of a plain product, which stores the sums to rows of `to`."""
    unit = tiles()
    store_0, store_1, store_2, store_3 = unit.store[:4]

    def put_sums(mine, sums, rows, left, to, step):
        if rows == TALL and left >= 2 * ROWS:
            store_0(mine, to, step)
            store_1(mine, to + WIDTH, step)
            store_2(mine, to + 16 * step, step)
            store_3(mine, to + 16 * step + WIDTH, step)
        else:
            store_0(mine, sums, WIDTH)
            store_1(mine, sums + TILE, WIDTH)
            store_2(mine, sums + 2 * TILE, WIDTH)
            store_3(mine, sums + 3 * TILE, WIDTH)
            for i in range(rows):
                at = sums + i // 16 * 2 * TILE + i % 16 * WIDTH
                put(to + i * step, 0, left, load(at))
                if left > ROWS:
                    put(to + i * step, ROWS, left, load(at + TILE))

    return part(put_sums)


ARGS = words("w stride rows columns x pitch count y step scratch tickets")


@cache
def product(weight: TiledWeight) -> Kernel:
    """Make the kernel ``y[i] = w @ x[i]`` for `count` rows.

    Words in bytes: `pitch` from 32 rows of activation tiles to the next, `stride` of a weight row, `step` from row to
    row of y. Each thread has `SCRATCH_BYTES`.
    """
    meet, configure, release = meet_of(weight, put_of(), 2), tiles().configure, tiles().release

    terms = weight.terms

    def body(a, thread, threads):
        stride, rows, count, step, tickets = ARGS.stride(a), ARGS.rows(a), ARGS.count(a), ARGS.step(a), ARGS.tickets(a)
        columns, x, pitch, mine = ARGS.columns(a), ARGS.x(a), ARGS.pitch(a), ARGS.scratch(a) + thread * SCRATCH
        most, spans = squares_of(columns, terms), spans_of(count, MANY, threads)
        configure(mine)
        for turn in range(spans):
            span = span_of(turn, spans, thread, threads)
            start, end = span_at(count, TALL, span, spans), span_at(count, TALL, span + 1, spans)
            own = tickets_of(tickets, span)
            piece, ticket = 0, draw(own, 0)
            for chunk in range(start, end, CHUNK):
                row = 0
                while row < rows:
                    if piece == ticket:
                        squares = min(most, (rows - row + 2 * ROWS - 1) // (2 * ROWS))
                        w, to = ARGS.w(a) + row * stride, ARGS.y(a) + chunk * step + 4 * row
                        v, stop, ahead = w + ROWS * stride, min(end, chunk + CHUNK), threads * most * 2 * ROWS * stride
                        meet(mine, w, v, squares, rows - row, stride, columns, x, pitch, chunk, stop, to, step, ahead)
                        ticket = draw(own, piece + 1)
                    piece += 1
                    row += most * 2 * ROWS
            settle(own, ticket, piece, threads)
        release(mine)
        return 0

    return Kernel(f"tiled.product.{weight.dtype}", body)


def bind(steps: Steps, call: Bound, stride: int) -> None:
    """Add the steps of a product. `stride` is the bytes of a weight row."""
    w, x, y = call.operand(0), call.operand(1), call.out
    weight, dealt, columns = tiled_weight(w.dtype), is_dealt(steps, call), w.shape[-1]
    tiled = rounded(steps, x, weight.rounding, for_all=dealt)[0]
    memory = steps.scratch("tiled", SCRATCH * steps.threads)

    def share(tickets: int) -> Share:
        words = ARGS(
            w=w.address,
            stride=stride,
            rows=y.shape[-1],
            columns=columns,
            x=tiled.address,
            pitch=rounded_bytes(1, columns, weight.rounding),
            count=math.prod(y.shape[:-1]),
            y=y.address,
            step=y.row_step,
            scratch=memory.address,
            tickets=tickets,
        )
        return Share(words, [w, tiled], [y])

    if dealt:
        steps.add_pieces(product(weight), share)
    elif y.shape[-1]:
        steps.deal(product(weight), [share(0)])
