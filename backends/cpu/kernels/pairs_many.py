"""Two products of many rows of activations and the gated unit of both: neither product is written.

A tile is some rows by a group of the gate and one of what it lets through, in place of two groups of one weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache, partial

from ...flow import Flow
from ...operands import need
from ..compiler import Kernel
from ..simd.tiles import tile
from ..simd.vectors import load
from ..steps import Chain, Fused, Share, Steps
from ..words import words
from .formats import FORMATS, Format
from .functions import GATED
from .grouped import ROWS, bounds_of, is_dealt
from .pairs import Pair, pair_of
from .products import blocks_of, bytes_of, wanted_of
from .rounding import Target, round_row, rounded, rounded_bytes
from .rows import put

VECTOR = 4 * ROWS
LEAST = 32
"""Rows from which on a tile that is not full costs little."""

ARGS = words("weights[2] stride rows columns x pitch count y step scratch rounding[*]")
"""`rounding` is that of `rounding.Target`."""
ROUNDING = ARGS.start("rounding")


@cache
def pair_many(form: Format, kind: str) -> Kernel:
    """``y[i] = unit(gate @ x[i], up @ x[i])`` for `count` rows, also rounded.

    `weights` are gate and up, `rows` of either; `scratch` is `scratch_bytes`; other words that `grouped.product_of`
    has, too, mean the same.
    """
    blocks, unit = blocks_of(form), GATED[kind]
    both = tile(blocks.rows, 2)
    rows_of, zeros, save, saved = both.rows, both.zeros, both.save, both.saved
    expand, add = blocks.expand, blocks.add
    width, record, size, wide, span = blocks.columns, blocks.record, blocks.size, blocks.wide, blocks.span
    tall, many = blocks.rows, blocks.chunk
    nbytes = tall * 2 * VECTOR

    def body(a, thread, threads):
        stride, rows, columns, count = ARGS.stride(a), ARGS.rows(a), ARGS.columns(a), ARGS.count(a)
        x, pitch, y, step, expanded = ARGS.x(a), ARGS.pitch(a), ARGS.y(a), ARGS.step(a), ARGS.scratch(a)
        n, products = (columns + width - 1) // width, expanded + 2 * span
        for chunk in range(0, count, many):
            stop = min(count, chunk + many)
            for group in range(0, rows, ROWS):
                for first in range(0, max(1, n), wide):
                    some_blocks, sums = min(wide, n - first), products + nbytes
                    for k in range(2):
                        at = ARGS.weights(a, k) + group * stride
                        expand(expanded + k * span, at, stride, rows - group, columns, first, some_blocks)
                    for i in range(chunk, stop, tall):
                        r = rows_of(x + i * pitch + first * record, pitch, stop - i)
                        acc = saved(sums) if first > 0 else zeros()
                        for b in range(some_blocks):
                            acc = add(acc, expanded + b * size, r, b * record)
                        if first + wide < n:
                            save(sums, acc)
                        else:
                            save(products, acc)
                            for k in range(min(tall, stop - i)):
                                gate = products + 2 * k * VECTOR
                                put(y + (i + k) * step, group, rows, unit(load(gate), load(gate + VECTOR)))
                        sums += nbytes
            for i in range(chunk, stop):
                round_row(a, ROUNDING, i, y + i * step, rows)
        return 0

    return Kernel(f"pairs_many.pair_many.{form.dtype}.{kind}", body)


def scratch_bytes(form: Format) -> int:
    """Of each thread: expanded blocks, the products of a tile, and the sums of a chunk."""
    return blocks_of(form).scratch + blocks_of(form).rows * 2 * VECTOR


def _pair_many(flow: Flow, number: int) -> Chain:
    pair = pair_of(flow, number)
    w, x = pair.products[0].operand(0), pair.products[0].operand(1)
    need(pair.products[0].op == "mul_mat" and math.prod(x.shape[:-1]) >= LEAST, "few rows meet a weight as it lies")
    need(blocks_of(FORMATS[w.dtype]).groups == 2, "a tile is of one group")
    return Chain(pair.numbers, partial(_add, pair=pair))


def _add(steps: Steps, pair: Pair) -> None:
    first, y, wanted = pair.products[0], pair.call.out, wanted_of(steps, pair.call)
    w, x = first.operand(0), first.operand(1)
    form, dealt, (stride, _) = FORMATS[w.dtype], is_dealt(steps, first), bytes_of(w)
    q = rounded(steps, x, form.zero, for_all=dealt)
    records, bounds = wanted.records(steps, shared=True), bounds_of(pair.call, 2 * ROWS, steps.threads if dealt else 1)
    targets = wanted.written.targets(steps, records, bounds)
    nbytes = scratch_bytes(form)
    memory = steps.scratch(f"pair {nbytes}", nbytes * steps.threads)

    def share(thread: int, to: Target) -> Share:
        low, rows = bounds[thread], bounds[thread + 1] - bounds[thread]
        words = ARGS(
            weights=[at + low * stride for at in pair.begins],
            stride=stride,
            rows=rows,
            columns=w.shape[-1],
            x=q[thread].address,
            pitch=rounded_bytes(1, w.shape[-1]),
            count=wanted.rows,
            y=to.floats.address,
            step=to.step,
            scratch=memory.address + thread * nbytes,
            rounding=to.rounding,
        )
        return Share(words, [*(p.operand(0) for p in pair.products), q[thread]], to.writes)

    shares: Sequence[Share | None] = [None if to is None else share(thread, to) for thread, to in enumerate(targets)]
    if dealt:
        steps.deal_columns(pair_many(form, pair.kind), shares, y, bounds)
    else:
        steps.deal(pair_many(form, pair.kind), shares)
    wanted.remember(steps, records)


FUSED: Mapping[str, tuple[Fused, ...]] = {"mul_mat": (_pair_many,)}
