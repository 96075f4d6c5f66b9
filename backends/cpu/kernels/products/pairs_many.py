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
from ....flow import Flow
from ....operands import need
from ...compiler import Kernel, Part, part
from ...simd.amx import HEIGHT, TILE, WIDTH
from ...simd.tiles import tile
from ...simd.vectors import load
from ...steps import Chain, Fused, Share, Steps
from ...words import words
from ..amx import Operation, nothing, tiles
from ..functions import GATED
from ..rows import put
from ..tickets import draw, settle, span_at, span_of, spans_of, tickets_of
from . import tiled
from .formats import COLUMNS, FORMATS, Format
from .grouped import ROWS, fetch_part, is_dealt
from .pairs import Pair, pair_of
from .products import blocks_of, bytes_of, wanted_of
from .rounding import TALL, TERMS, round_one, rounded, rounded_bytes
from .tiled import squares_of
from .tiled_weights import TiledWeight, tiled_weight

VECTOR, BLOCK = 4 * ROWS, 4 * COLUMNS
"""Bytes of the units of a row in a group, and in a block, which is quantised at once."""
TILES = ".tiles"
"""Suffix of the names of kernels that use AMX tiles."""
NEAR = 1 << 20
"""Bytes of the activations of a chunk that stay in the second cache."""
LEAST = 32
"""Activation rows from which on an incomplete tile costs little."""

ARGS = words("weights[2] stride rows columns x pitch count y step scratch tickets rounding[*]")
ROUNDING = ARGS.start("rounding")
"""First word of `QuantisedTarget.rounding_words`."""


@dataclass(frozen=True, slots=True)
class Way:
    """A method to compute gated units from quantised activations and two weights.

    Attributes:
        compute_units: ``(a, mine, row, wide, chunk, stop, y, step, ahead)`` writes the units of up to `wide` weight
            rows from `row` on, for activation rows `chunk` to `stop`, to rows of `y`. It prefetches weight rows `ahead`
            rows further on to the second cache. `mine` is the scratch of the thread.
        block_width: ``(columns)`` returns the blocks of 32 weight rows per call.
        max_block_width: Upper limit of `block_width`.
        unit_scratch_bytes: Scratch bytes of a thread.
        rows_per_chunk: Activation rows per expansion.
        begin: Called with ``(mine)`` before all units.
        end: Called with ``(mine)`` after all units.
    """

    units: Part
    wide: Part
    widest: int
    scratch: int
    chunk: int
    begin: Operation = nothing
    end: Operation = nothing


@cache
def way_of(dtype: DType, kind: str, rounding: int) -> Way:
    """Make the gated variant of a weight type.

    Args:
        dtype: The type of both weights.
        kind: A key of `GATED`.
        rounding: The kind of `rounding` of the activations.
    """
    if rounding in TERMS:
        unit = tiles()
        units, wide = tiled_units_of(dtype, kind), _wide_of(tiled_weight(dtype))
        return Way(units, wide, tiled.MOST // 2, tiled.SCRATCH, tiled.CHUNK, unit.configure, unit.release)
    blocks = blocks_of(FORMATS[dtype])
    return Way(units_of(FORMATS[dtype], kind), one, 1, blocks.scratch + blocks.rows * 2 * VECTOR, blocks.chunk)


@part
def one(columns):
    """Return 1: `GatedVariant.block_width` where wider blocks gain nothing."""
    return 1


def _wide_of(weight: TiledWeight) -> Part:
    """Make `GatedVariant.block_width` for AMX tiles. Their matrices have 16 rows of each weight.

    If the activations of a chunk stay in the second cache, the width is one block: its units stay in the nearest cache.
    """
    terms, x_block, tall = weight.terms, weight.x_block, tiled.CHUNK // TALL

    def wide(columns):
        return 1 if columns // COLUMNS * x_block * tall <= NEAR else squares_of(columns, terms) // 2

    return part(wide)


def emit_of(kind: str) -> Part:
    """Make `emit` of `tiled.make_amx_multiply` for alternating groups of two weights: store the gated units."""
    unit, stores = GATED[kind], tiles().store
    store_0, store_1, store_2, store_3 = stores[:4]

    def emit(mine, sums, rows, left, to, step):
        store_0(mine, sums, WIDTH)
        store_1(mine, sums + TILE, WIDTH)
        store_2(mine, sums + 2 * TILE, WIDTH)
        store_3(mine, sums + 3 * TILE, WIDTH)
        for i in range(rows):
            at = sums + i // HEIGHT * 2 * TILE + i % HEIGHT * WIDTH
            put(to + i * step, 0, left, unit(load(at), load(at + TILE)))

    return part(emit)


def tiled_units_of(dtype: DType, kind: str) -> Part:
    """Make `GatedVariant.compute_units` for AMX tiles."""
    meet = tiled.meet_of(tiled_weight(dtype), emit_of(kind), 1)

    def units(a, mine, row, wide, chunk, stop, y, step, ahead):
        stride, columns, x, pitch = ARGS.stride(a), ARGS.columns(a), ARGS.x(a), ARGS.pitch(a)
        gate, up = ARGS.weights(a, 0) + row * stride, ARGS.weights(a, 1) + row * stride
        left = ARGS.rows(a) - row
        squares = (min(wide, left) + ROWS - 1) // ROWS
        meet(mine, gate, up, squares, left, stride, columns, x, pitch, chunk, stop, y, step, ahead * stride)

    return part(units)


def units_of(form: Format, kind: str) -> Part:
    """Make `GatedVariant.compute_units` for integer dot products."""
    blocks, unit = blocks_of(form), GATED[kind]
    both = tile(blocks.rows, 2)
    rows_of, zeros, save, saved = both.rows, both.zeros, both.save, both.saved
    expand, add = blocks.expand, blocks.add
    width, record, size, wide, span = blocks.columns, blocks.record, blocks.size, blocks.wide, blocks.span
    tall, nbytes = blocks.rows, blocks.rows * 2 * VECTOR

    @part
    def units_of_group(a, expanded, group, chunk, stop, y, step, coming):
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
                r = rows_of(x + i * pitch + first * record, pitch, stop - i)
                gate, up = fetch_part(gate, ROWS * stride, parts), fetch_part(up, ROWS * stride, parts)
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

    def units(a, expanded, row, wide, chunk, stop, y, step, ahead):
        second = row + ROWS
        units_of_group(a, expanded, row, chunk, stop, y, step, second)
        if second < ARGS.rows(a):
            units_of_group(a, expanded, second, chunk, stop, y + VECTOR, step, row + ahead)

    return part(units)


@cache
def pair_many(dtype: DType, kind: str, rounding: int) -> Kernel:
    """Make the kernel ``y[i] = unit(gate @ x[i], up @ x[i])`` for `count` rows, quantised block by block.

    The kernel stores float32 only if `step`, the bytes from row to row of y, is not 0. `weights` are gate and up with
    `rows` rows each. Each thread has `compute_gated_scratch_bytes` of `scratch`.
    `grouped.make_matmul_kernel` explains the other words.

    Args:
        dtype: The type of both weights.
        kind: A key of `GATED`.
        rounding: The kind of `rounding` of x.
    """
    way = way_of(dtype, kind, rounding)
    units, wide_of, many, begin, end, own = way.units, way.wide, way.chunk, way.begin, way.end, way.scratch
    passing, scratch = pace_of(way), scratch_bytes(way)

    def body(a, thread, threads):
        rows, count, step, tickets = ARGS.rows(a), ARGS.count(a), ARGS.step(a), ARGS.tickets(a)
        mine, wide = ARGS.scratch(a) + thread * scratch, wide_of(ARGS.columns(a)) * COLUMNS
        begin(mine)
        spans = spans_of(count, many, threads)
        for turn in range(spans):
            span = span_of(turn, spans, thread, threads)
            start, last = span_at(count, many, span, spans), span_at(count, many, span + 1, spans)
            drawn = tickets_of(tickets, span)
            piece, ticket = 0, draw(drawn, 0)
            for chunk in range(start, last, many):
                stop = min(last, chunk + many)
                row = 0
                while row < rows:
                    if piece == ticket:
                        y, pace = ARGS.y(a) + chunk * step + 4 * row, step
                        if step == 0:
                            y, pace = mine + own, passing
                        units(a, mine, row, wide, chunk, stop, y, pace, threads * wide)
                        blocks = (min(wide, rows - row) + COLUMNS - 1) // COLUMNS
                        for i in range(chunk, stop):
                            for b in range(blocks):
                                round_one(a, ROUNDING, i, row // COLUMNS + b, y + (i - chunk) * pace + b * BLOCK)
                        ticket = draw(drawn, piece + 1)
                    piece += 1
                    row += wide
            settle(drawn, ticket, piece, threads)
        end(mine)
        return 0

    return Kernel(f"pairs_many.pair_many.{dtype}.{kind}" + TILES * (rounding in TERMS), body)


def pace_of(way: Way) -> int:
    """Return the bytes from row to row of units that are not stored as float32.

    64 extra bytes spread the rows over the sets of the nearest cache.
    """
    return way.widest * BLOCK + 64


def scratch_bytes(way: Way) -> int:
    """Return the scratch bytes of a thread: for the units, and blocks of units for each row of a chunk."""
    return way.scratch + way.chunk * pace_of(way)


def _pair_many(flow: Flow, number: int) -> Chain:
    """Fuse a gated matmul of many rows."""
    pair = pair_of(flow, number)
    w, x = pair.products[0].operand(0), pair.products[0].operand(1)
    need(pair.products[0].op == "mul_mat" and math.prod(x.shape[:-1]) >= LEAST, "few rows use the unexpanded weight")
    kind = tiled.kind_of(pair.products[0])
    need(kind is not None, "activations are not rounded")
    need(kind in TERMS or blocks_of(FORMATS[w.dtype]).groups == 2, "a tile is of one group")
    return Chain(pair.numbers, partial(_add, pair=pair))


def _add(steps: Steps, pair: Pair) -> None:
    """Add the step of a gated matmul of many rows."""
    first, wanted = pair.products[0], wanted_of(steps, pair.call)
    w, x = first.operand(0), first.operand(1)
    rounding, dealt, (stride, _) = tiled.kind_of(first), is_dealt(steps, first), bytes_of(w)
    assert rounding is not None
    q = rounded(steps, x, rounding, for_all=dealt)[0]
    records = wanted.records(steps, shared=True)
    to = wanted.target(pair.call.out if wanted.floats else None, wanted.passing(steps)[0], records[0])
    nbytes = scratch_bytes(way_of(w.dtype, pair.kind, rounding))
    memory = steps.scratch(f"pair {nbytes}", nbytes * steps.threads)

    def share(tickets: int) -> Share:
        words = ARGS(
            weights=pair.begins,
            stride=stride,
            rows=wanted.columns,
            columns=w.shape[-1],
            x=q.address,
            pitch=rounded_bytes(1, w.shape[-1], rounding),
            count=wanted.rows,
            y=to.floats.address,
            step=to.step,
            scratch=memory.address,
            tickets=tickets,
            rounding=to.rounding,
        )
        return Share(words, [*(p.operand(0) for p in pair.products), q], to.writes)

    if dealt:
        steps.add_pieces(pair_many(w.dtype, pair.kind, rounding), share)
    else:
        steps.deal(pair_many(w.dtype, pair.kind, rounding), [share(0)])
    wanted.remember(steps, records)


FUSED: Mapping[str, tuple[Fused, ...]] = {"mul_mat": (_pair_many,)}
