"""MoE products of prompts by AMX tiles.

1. Gather the activation rows of an expert into tiles. They are scattered in memory.
2. Multiply the tiles with all rows of the expert's weight.
3. Scatter the results to their slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from ....operands import Bound
from ...compiler import Kernel, Part, part
from ...simd.vectors import load, load_int, store, store_int, zeros
from ...steps import Share, Steps
from ...words import words
from ..amx import tiles
from ..rows import put
from ..tickets import draw, settle
from .formats import COLUMNS
from .grouped import ROWS, Slots, clear, is_dealt, row_of
from .products import bytes_of
from .rounding import LINE, TALL, Target, round_one, rounded, rounded_bytes
from .tiled import CHUNK, MOST, SCRATCH, meet_of, put_of, squares_of
from .tiled_weights import BLOCK, TiledWeight, tiled_weight

PACE = MOST * 2 * ROWS * 4 + 64
"""Bytes from row to row of the results; 64 extra bytes spread the rows over the sets of the nearest cache."""
RESULTS, ROOM = SCRATCH, SCRATCH + CHUNK * PACE
"""Offsets into the scratch of a thread: the results, and the activation row of each row of the tiles."""
GATHERED = ROOM + CHUNK * 4
"""Offset of the gathered activation tiles in the scratch of a thread."""

ARGS = words(
    "weights[2] stride between rows columns x pitch starts experts used shared y step scratch tickets rounding[*]"
)
ROUNDING = ARGS.start("rounding")
"""First word of `QuantisedTarget.rounding_words`."""


@part
def gather(a, mine, chunk, stop):
    """Copy the activation rows of the sorted slots `chunk` to `stop` into tiles of the thread."""
    x, pitch, used, shared = ARGS.x(a), ARGS.pitch(a), ARGS.used(a), ARGS.shared(a)
    slots, numbers = ARGS.starts(a) + 4 * (ARGS.experts(a) + 2), mine + ROOM
    for i in range(chunk, stop):
        store_int(numbers + 4 * (i - chunk), row_of(load_int(slots + 4 * i), used, shared))
    for first in range(0, stop - chunk, TALL):
        to = mine + GATHERED + first // TALL * pitch
        for start in range(0, pitch, BLOCK):
            for i in range(min(TALL, stop - chunk - first)):
                row = load_int(numbers + 4 * (first + i))
                store(to + start + i * LINE, load(x + row // TALL * pitch + row % TALL * LINE + start))


@part
def scatter(a, mine, chunk, stop, first, count):
    """Store or quantise the results of these slots: `count` columns from column `first` on."""
    slots, y, step = ARGS.starts(a) + 4 * (ARGS.experts(a) + 2), ARGS.y(a), ARGS.step(a)
    results = mine + RESULTS
    for i in range(chunk, stop):
        slot = load_int(slots + 4 * i)
        if step != 0:
            for c in range(0, count, ROWS):
                put(y + slot * step + 4 * first, c, count, load(results + 4 * c))
        for b in range((count + COLUMNS - 1) // COLUMNS):
            round_one(a, ROUNDING, slot, first // COLUMNS + b, results + 4 * COLUMNS * b)
        results += PACE


@part
def leave_out(a, mine):
    """Zero the rows of slots of remote experts, in float32 and quantised."""
    starts, experts, rows, results = ARGS.starts(a), ARGS.experts(a), ARGS.rows(a), mine + RESULTS
    slots = starts + 4 * (experts + 2)
    if ARGS.step(a) != 0:
        clear(starts, experts, ARGS.y(a), ARGS.step(a), rows)
    store(results, zeros())
    store(results + 64, zeros())
    for i in range(load_int(starts + 4 * experts), load_int(starts + 4 * experts + 4)):
        for b in range((rows + COLUMNS - 1) // COLUMNS):
            round_one(a, ROUNDING, load_int(slots + 4 * i), b, results)


def product_of(name: str, weight: TiledWeight, emit: Part, each: int) -> Kernel:
    """Make the kernel ``y[i] = w[expert of slot i] @ x[row of slot i]``, or the gated unit of two such products.

    The kernel quantises the result for its consumers. It stores float32 only if `step`, the bytes from row to row of y,
    is not 0. `weights` are two weights, or one weight and its second group of rows. `x` are activation tiles. Each
    thread has `compute_moe_scratch_bytes` of `scratch`. `grouped.make_matmul_kernel` explains the others.

    Args:
        name: The name of the kernel.
        weight: The weight type.
        emit: The epilogue of `tiled.make_amx_multiply`.
        each: Groups of a matrix that belong to the first weight: 1 for a gated unit, else 2.
    """
    meet, configure, release = meet_of(weight, emit, each), tiles().configure, tiles().release
    terms = weight.terms

    def body(a, thread, threads):
        stride, between, rows, columns = ARGS.stride(a), ARGS.between(a), ARGS.rows(a), ARGS.columns(a)
        pitch, starts, tickets = ARGS.pitch(a), ARGS.starts(a), ARGS.tickets(a)
        mine = ARGS.scratch(a) + thread * (GATHERED + CHUNK // TALL * pitch)
        wide = squares_of(columns, terms) // 2 * 2 * each * ROWS
        ahead, results = threads * wide * stride, mine + RESULTS
        configure(mine)
        piece, ticket, held = 0, draw(tickets, 0), -1
        for expert in range(ARGS.experts(a)):
            start, end = load_int(starts + 4 * expert), load_int(starts + 4 * (expert + 1))
            for chunk in range(start, end, CHUNK):
                stop = min(end, chunk + CHUNK)
                row = 0
                while row < rows:
                    if piece == ticket:
                        if held != chunk:
                            gather(a, mine, chunk, stop)
                            held = chunk
                        skipped, left = expert * between + row * stride, rows - row
                        w, v = ARGS.weights(a, 0) + skipped, ARGS.weights(a, 1) + skipped
                        squares = (min(wide, left) + each * ROWS - 1) // (each * ROWS)
                        x, count = mine + GATHERED, stop - chunk
                        meet(mine, w, v, squares, left, stride, columns, x, pitch, 0, count, results, PACE, ahead)
                        scatter(a, mine, chunk, stop, row, min(wide, left))
                        ticket = draw(tickets, piece + 1)
                    piece += 1
                    row += wide
        settle(tickets, ticket, piece, threads)
        release(mine)
        if thread == 0:
            leave_out(a, mine)
        return 0

    return Kernel(name, body)


def scratch_bytes(pitch: int) -> int:
    """Return the scratch bytes of a thread. `pitch` is the bytes of 32 activation rows."""
    return GATHERED + CHUNK // TALL * pitch


@cache
def product(weight: TiledWeight) -> Kernel:
    """Make the kernel of one MoE product."""
    return product_of(f"tiled_experts.product.{weight.dtype}", weight, put_of(), 2)


# ----------------------------------------------------------------------------------------------------- binding


def bind(steps: Steps, call: Bound, slots: Slots) -> None:
    """Add the steps of an MoE product of many rows."""
    w, y = call.operand(0), call.out
    second = w.address + ROWS * bytes_of(w)[0]
    add(steps, product(tiled_weight(w.dtype)), [call], [w.address, second], slots, Target(y, [y]))


def add(
    steps: Steps,
    kernel: Kernel,
    products: Sequence[Bound],
    begins: Sequence[int],
    slots: Slots,
    to: Target,
) -> None:
    """Add the step of MoE products of the same activations.

    Args:
        steps: The steps of the program.
        kernel: The result of `make_amx_moe_kernel`.
        products: One product, or gate and up.
        begins: Addresses of two weights, or of a weight and its second group.
        slots: The slots by expert.
        to: The destination of the result rows.
    """
    w, x = products[0].operand(0), products[0].operand(1)
    dealt, columns, (stride, between) = is_dealt(steps, products[0]), w.shape[-1], bytes_of(w)
    kind = tiled_weight(w.dtype).rounding
    tiled, pitch, rows = rounded(steps, x, kind, for_all=dealt)[0], rounded_bytes(1, columns, kind), to.floats.shape[-1]
    nbytes = scratch_bytes(pitch)
    memory = steps.scratch(f"experts {nbytes}", nbytes * steps.threads)

    def share(tickets: int) -> Share:
        words = ARGS(
            weights=begins,
            stride=stride,
            between=between,
            rows=rows,
            columns=columns,
            x=tiled.address,
            pitch=pitch,
            starts=slots.operand.address,
            experts=slots.experts,
            used=slots.used,
            shared=slots.shared,
            y=to.floats.address,
            step=to.step,
            scratch=memory.address,
            tickets=tickets,
            rounding=to.rounding,
        )
        return Share(words, [*(p.operand(0) for p in products), tiled, slots.operand], to.writes)

    if dealt:
        steps.add_pieces(kernel, share)
    elif rows:
        steps.deal(kernel, [share(0)])
