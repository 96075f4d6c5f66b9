"""Two products of many rows of activations and the gated unit of both: neither product is written.

A tile is some rows by a group of the gate and one of what it lets through, in place of two groups of one weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache, partial

from ...flow import Flow
from ...operands import need
from ..compiler import Kernel, Part, part
from ..simd.tiles import tile
from ..simd.vectors import load
from ..steps import Chain, Fused, Share, Steps
from ..words import words
from .formats import COLUMNS, FORMATS, Format
from .functions import GATED
from .grouped import ROWS, fetch_part, is_dealt
from .pairs import Pair, pair_of
from .products import blocks_of, bytes_of, wanted_of
from .rounding import round_one, rounded, rounded_bytes
from .rows import put
from .tickets import draw, settle

VECTOR, BLOCK = 4 * ROWS, 4 * COLUMNS
"""Bytes of the units of a row in a group, and in a block, which is rounded."""
LEAST = 32
"""Rows from which on a tile that is not full costs little."""

ARGS = words("weights[2] stride rows columns x pitch count y step scratch tickets rounding[*]")
"""`rounding` is that of `rounding.Target`."""
ROUNDING = ARGS.start("rounding")


def units_of(form: Format, kind: str) -> Part:
    """``(a, expanded, group, chunk, stop, y, step, coming)``: units of a group of the gate and one of what it lets
    through, for rows from `chunk` to before `stop`, to rows of `y`, while groups that begin at row `coming` are fetched
    to the second cache."""
    blocks, unit = blocks_of(form), GATED[kind]
    both = tile(blocks.rows, 2)
    rows_of, zeros, save, saved = both.rows, both.zeros, both.save, both.saved
    expand, add = blocks.expand, blocks.add
    width, record, size, wide, span = blocks.columns, blocks.record, blocks.size, blocks.wide, blocks.span
    tall, nbytes = blocks.rows, blocks.rows * 2 * VECTOR

    def units(a, expanded, group, chunk, stop, y, step, coming):
        stride, columns, left = ARGS.stride(a), ARGS.columns(a), ARGS.rows(a) - group
        x, pitch, n = ARGS.x(a), ARGS.pitch(a), (columns + width - 1) // width
        gate, up = ARGS.weights(a, 0) + coming * stride, ARGS.weights(a, 1) + coming * stride
        tiles, products = (stop - chunk + tall - 1) // tall * ((n + wide - 1) // wide), expanded + 2 * span
        for first in range(0, max(1, n), wide):
            count, sums, to = min(wide, n - first), products + nbytes, y
            for k in range(2):
                at = ARGS.weights(a, k) + group * stride
                expand(expanded + k * span, at, stride, left, columns, first, count)
            for i in range(chunk, stop, tall):
                r = rows_of(x + i * pitch + first * record, pitch, stop - i)
                gate, up = fetch_part(gate, ROWS * stride, tiles), fetch_part(up, ROWS * stride, tiles)
                acc = saved(sums) if first > 0 else zeros()
                for b in range(count):
                    acc = add(acc, expanded + b * size, r, b * record)
                if first + wide < n:
                    save(sums, acc)
                else:
                    save(products, acc)
                    for k in range(min(tall, stop - i)):
                        at = products + 2 * k * VECTOR
                        put(to + k * step, 0, left, unit(load(at), load(at + VECTOR)))
                sums += nbytes
                to += tall * step

    return part(units)


@cache
def pair_many(form: Format, kind: str) -> Kernel:
    """``y[i] = unit(gate @ x[i], up @ x[i])`` for `count` rows, rounded block by block; as float32 only where `step`,
    the bytes from row to row of y, is not 0.

    `weights` are gate and up, `rows` of either; `scratch` is `scratch_bytes` for each thread; other words that
    `grouped.product_of` has, too, mean the same.
    """
    units, many, scratch = units_of(form, kind), blocks_of(form).chunk, scratch_bytes(form)

    def body(a, thread, threads):
        rows, count, step, tickets = ARGS.rows(a), ARGS.count(a), ARGS.step(a), ARGS.tickets(a)
        expanded = ARGS.scratch(a) + thread * scratch
        piece, mine = 0, draw(tickets, 0)
        for chunk in range(0, count, many):
            stop = min(count, chunk + many)
            for block in range(0, rows, COLUMNS):
                if piece == mine:
                    y, pace = ARGS.y(a) + chunk * step + 4 * block, step
                    if step == 0:
                        y, pace = expanded + scratch - many * BLOCK, BLOCK
                    second = block + ROWS
                    units(a, expanded, block, chunk, stop, y, pace, second)
                    if second < rows:
                        units(a, expanded, second, chunk, stop, y + VECTOR, pace, block + threads * COLUMNS)
                    for i in range(chunk, stop):
                        round_one(a, ROUNDING, i, block // COLUMNS, y + (i - chunk) * pace)
                    mine = draw(tickets, piece + 1)
                piece += 1
        settle(tickets, mine, piece, threads)
        return 0

    return Kernel(f"pairs_many.pair_many.{form.dtype}.{kind}", body)


def scratch_bytes(form: Format) -> int:
    """Of each thread: expanded blocks, the products of a tile, and of each row of a chunk sums and a block of units."""
    blocks = blocks_of(form)
    return blocks.scratch + blocks.rows * 2 * VECTOR + blocks.chunk * BLOCK


def _pair_many(flow: Flow, number: int) -> Chain:
    pair = pair_of(flow, number)
    w, x = pair.products[0].operand(0), pair.products[0].operand(1)
    need(pair.products[0].op == "mul_mat" and math.prod(x.shape[:-1]) >= LEAST, "few rows meet a weight as it lies")
    need(blocks_of(FORMATS[w.dtype]).groups == 2, "a tile is of one group")
    return Chain(pair.numbers, partial(_add, pair=pair))


def _add(steps: Steps, pair: Pair) -> None:
    first, wanted = pair.products[0], wanted_of(steps, pair.call)
    w, x = first.operand(0), first.operand(1)
    form, dealt, (stride, _) = FORMATS[w.dtype], is_dealt(steps, first), bytes_of(w)
    q = rounded(steps, x, form.zero, for_all=dealt)[0]
    records = wanted.records(steps, shared=True)
    to = wanted.target(pair.call.out if wanted.floats else None, wanted.passing(steps)[0], records[0])
    nbytes = scratch_bytes(form)
    memory = steps.scratch(f"pair {nbytes}", nbytes * steps.threads)

    def share(tickets: int) -> Share:
        words = ARGS(
            weights=pair.begins,
            stride=stride,
            rows=wanted.columns,
            columns=w.shape[-1],
            x=q.address,
            pitch=rounded_bytes(1, w.shape[-1]),
            count=wanted.rows,
            y=to.floats.address,
            step=to.step,
            scratch=memory.address,
            tickets=tickets,
            rounding=to.rounding,
        )
        return Share(words, [*(p.operand(0) for p in pair.products), q], to.writes)

    if dealt:
        steps.add_pieces(pair_many(form, pair.kind), share)
    else:
        steps.deal(pair_many(form, pair.kind), [share(0)])
    wanted.remember(steps, records)


FUSED: Mapping[str, tuple[Fused, ...]] = {"mul_mat": (_pair_many,)}
