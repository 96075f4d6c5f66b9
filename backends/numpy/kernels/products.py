"""Matrix products with packed weights: activations rounded to 8 bits a block, integer dot products, float32 sums.

Every code is unpacked once for a chunk of rows of activations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import numpy as np

from ....graph.dtypes import DType
from ...operands import Bound, Operand
from ..compiler import Kernel, Part, kernel, part
from ..steps import Share, Steps, like
from . import dense
from .formats import COLUMNS, FORMATS, ROWS, Format
from .grouped import Blocks, Slots, add_product, even_bounds, in_order, is_dealt, product_of
from .packing import share
from .simd import (
    float_to_bits,
    largest_magnitude,
    load,
    mul,
    mul_int,
    prefetch,
    round_small,
    splat,
    splat_int,
    store,
    store_record,
    store_small,
    to_float,
    totals,
    word,
)
from .tiles import HALVES, RECORD, SCALE, SUM, VECTORS, Tile, load_codes, store_codes, tile

LIMIT, NONE, STEP = np.float32(127), np.float32(0), np.float32(1 / 127)
SMALLEST, RAISE = np.float32(1e-36), np.float32(2.0**64)
"""A block below it is raised first: the inverse of its scale would be no number."""
AHEAD = 4096
"""Bytes ahead of their use at which weights are fetched where each is read once."""


@part
def round_block(x, record, zero):
    """32 values to 8 bits and what belongs to them, as `tiles.RECORD` says.  Where one is NaN so is the scale."""
    low, high = load(x), load(x + 64)
    top = largest_magnitude(low, high)
    scale = top * STEP
    if top < SMALLEST:
        low, high, top = mul(low, splat(RAISE)), mul(high, splat(RAISE)), top * RAISE
    inverse = splat(LIMIT / top if top > NONE else NONE)
    i, j = round_small(mul(low, inverse)), round_small(mul(high, inverse))
    store_small(record, i)
    store_small(record + 16, j)
    ints = totals(i, j)
    sums = mul_int(ints, splat_int(-zero)) if zero else float_to_bits(mul(to_float(ints), splat(scale)))
    store_record(record + SCALE, scale, sums)


@kernel
def round_rows(a, thread, threads):
    """Words: source, bytes between its rows, rows, columns, target, what is subtracted from each code of the weight."""
    source, step, rows, columns, target, zero = word(a, 0), word(a, 1), word(a, 2), word(a, 3), word(a, 4), word(a, 5)
    n = columns // COLUMNS
    lo, hi = share(rows, thread, threads)
    for i in range(lo, hi):
        for b in range(n):
            round_block(source + i * step + 4 * COLUMNS * b, target + (i * n + b) * RECORD, zero)
    return 0


def rounded_bytes(rows: int, columns: int) -> int:
    """Records [rows, columns / 32]."""
    return rows * (columns // COLUMNS) * RECORD


SCALES, BIASES, EXPANDED = 64 * VECTORS, 64 * VECTORS + 128, 64 * VECTORS + 256
"""An expanded block: codes as bytes, scales of both halves and biases of both as float32; its size."""
WIDE = 16
GROUP = WIDE * EXPANDED


def expand_of(form: Format) -> Part:
    """Codes to bytes, and scales to float32."""
    codes, scales, biases, width = form.codes, form.scales, form.biases, form.planes[0]
    high = form.planes[1] if len(form.planes) > 1 else 0
    biased = form.zero == 0

    def expand(to, group, stride, left, columns, first, count):
        n = columns // COLUMNS
        second = group + n * 64 * width
        last = second + n * 64 * high
        for b in range(first, first + count):
            store_codes(to, codes(group + b * 64 * width, second + b * 64 * high))
            d, e = scales(last, b)
            store(to + SCALES, d)
            store(to + SCALES + 64, e)
            if biased:
                m, o = biases(last, b)
                store(to + BIASES, m)
                store(to + BIASES + 64, o)
            to += EXPANDED

    return part(expand)


def add_pair_of(form: Format, rows: Tile) -> Part:
    """``(acc, p, r, at) -> acc``: what a block of two groups, expanded at `p`, adds to products with the rows `r`
    (their records of the same columns stand at `at`)."""
    scaled, biased, centred = rows.scaled, rows.biased, form.zero != 0
    every = rows.centred if centred else rows.dots
    low = rows.centred_low if centred else rows.dots_low
    high = rows.centred_high if centred else rows.dots_high
    if form.halves:

        def add(acc, p, r, at):
            u, v, s, f, b = load_codes(p), load_codes(p + GROUP), p + SCALES, p + GROUP + SCALES, p + GROUP + BIASES
            acc = scaled(acc, low(u, v, r, at), load(s), load(f), r, at)
            acc = scaled(acc, high(u, v, r, at), load(s + 64), load(f + 64), r, at)
            if centred:
                return acc
            acc = biased(acc, load(p + BIASES), load(b), r, at + HALVES)
            return biased(acc, load(p + BIASES + 64), load(b + 64), r, at + HALVES + 4)
    else:

        def add(acc, p, r, at):
            x = every(load_codes(p), load_codes(p + GROUP), r, at)
            acc = scaled(acc, x, load(p + SCALES), load(p + GROUP + SCALES), r, at)
            return acc if centred else biased(acc, load(p + BIASES), load(p + GROUP + BIASES), r, at + SUM)

    return part(add)


def add_alone_of(form: Format, row: Tile) -> Part:
    """``(acc, codes, scales, biases, r, at) -> acc``: the same of a block of one group, that is not expanded."""
    scaled, biased, centred = row.scaled, row.biased, form.zero != 0
    every = row.centred if centred else row.dots
    low = row.centred_low if centred else row.dots_low
    high = row.centred_high if centred else row.dots_high
    if form.halves:

        def add(acc, codes, scales, biases, r, at):
            acc = scaled(acc, low(codes, r, at), scales[0], r, at)
            acc = scaled(acc, high(codes, r, at), scales[1], r, at)
            if centred:
                return acc
            return biased(biased(acc, biases[0], r, at + HALVES), biases[1], r, at + HALVES + 4)
    else:

        def add(acc, codes, scales, biases, r, at):
            acc = scaled(acc, every(codes, r, at), scales[0], r, at)
            return acc if centred else biased(acc, biases[0], r, at + SUM)

    return part(add)


def alone_of(form: Format) -> Part:
    codes, scales, biases, width = form.codes, form.scales, form.biases, form.planes[0]
    high = form.planes[1] if len(form.planes) > 1 else 0
    one = tile(1, 1)
    rows, zeros, put, add = one.rows, one.zeros, one.put, add_alone_of(form, one)

    def alone(to, group, stride, left, columns, x):
        n = columns // COLUMNS
        second = group + n * 64 * width
        last = second + n * 64 * high
        acc, r = zeros(), rows(x, 0, 1)
        for b in range(n):
            at = group + b * 64 * width
            for line in range(width):
                prefetch(at + AHEAD + 64 * line)
            v = codes(at, second + b * 64 * high)
            acc = add(acc, v, scales(last, b), biases(last, b), r, b * RECORD)
        put(rows(to, 0, 1), acc, left)

    return part(alone)


@cache
def blocks_of(form: Format) -> Blocks:
    """A tile is 4 rows of activations by 2 groups: what is loaded is used at least twice, since processors broadcast
    from memory more slowly than they multiply."""
    expand, add, alone = expand_of(form), add_pair_of(form, tile(4, 2)), alone_of(form)
    return Blocks(COLUMNS, RECORD, EXPANDED, WIDE, 4, 2, 2, expand, add, alone)


@cache
def product(form: Format) -> Kernel:
    return product_of(f"products.product.{form.name}", blocks_of(form))


# ----------------------------------------------------------------------------------------------------- binding


def rounded(steps: Steps, x: Operand, form: Format, *, for_all: bool) -> Sequence[Operand]:
    """`x` rounded to 8 bits for weights of a type, where each thread finds it; by a step of its own unless an earlier
    one has done it.

    For a product that all threads share they round the columns that they have of `x`, or all of few rows each for
    itself, or share the rows.
    """
    key = ("rounded", x.tensor, form.zero)
    if (found := steps.known(key)) is not None:
        return found
    rows, columns, name = math.prod(x.shape[:-1]), x.shape[-1], f"rounded {form.zero}"
    nbytes, own, bounds = rounded_bytes(rows, columns), steps.stand_ins(x), steps.columns_of([x])
    if bounds is not None and (rows > 1 or any(b % COLUMNS for b in bounds)):
        bounds = None
    if own is not None or (for_all and bounds is None and steps.is_repeated([x])):
        made = steps.copies(name, nbytes)
        parts = [_rounding(o, to, rows, form, 0, columns) for o, to in zip(own or [x] * len(made), made, strict=True)]
        steps.deal(round_rows, parts)
    elif rows == 1 and for_all:
        made = [steps.scratch(name, nbytes)] * steps.threads
        bounds = bounds or even_bounds(columns, COLUMNS, steps.threads)
        steps.deal(round_rows, [_rounding(x, made[0], 1, form, *pair) for pair in pairwise(bounds)])
    else:
        made = [steps.scratch(name, nbytes)] * steps.threads
        share = _rounding(x, made[0], rows, form, 0, columns)
        steps.add(round_rows, share.words, reads=share.reads, writes=share.writes)
    steps.remember(key, made, [x])
    return made


def _rounding(x: Operand, to: Operand, rows: int, form: Format, first: int, last: int) -> Share:
    """Columns from `first` to before `last`: of one row, or all of them."""
    source, skipped = x.part(len(x.shape) - 1, first, last - first), rounded_bytes(1, first)
    target = to.part(0, skipped, rounded_bytes(rows, last - first))
    words = [source.address, source.row_step, rows, last - first, target.address, form.zero]
    return Share(words, [source], [target])


def stand_ins(steps: Steps, call: Bound) -> Sequence[Operand] | None:
    """Where each thread may write a result for itself instead of into its tensor, because nothing but products reads
    it; None if the tensor it has to be, or if it is too much for each to do it all."""
    y = call.out
    if steps.threads == 1 or not steps.is_repeated([y]) or not y.is_dense:
        return None
    readers = call.readers()
    if not readers or not all(_reads_stand_ins(r, y) for r in readers):
        return None
    if not any(is_dealt(steps, r) for r in readers):
        return None
    return [like(o, y) for o in steps.copies("own", y.tensor.spec.nbytes)]


def _reads_stand_ins(call: Bound, y: Operand) -> bool:
    x = call.optional(1)
    if x is None or x.region != y.region or not x.is_dense or not is_compiled(call):
        return False
    return not any(o is not None and o is not x and o.region.overlaps(y.region) for o in call.src)


def is_compiled(call: Bound) -> bool:
    """Whether this is a product that `bind_product` binds, of rows that may lie anywhere."""
    if call.op not in ("mul_mat", "mul_mat_id"):
        return False
    w, x = call.operand(0), call.operand(1)
    experts = call.op == "mul_mat_id"
    if len(w.shape) != 2 + experts or not (x.is_float and x.has_rows and call.out.has_rows):
        return False
    if experts and not slots_fit(call):
        return False
    if w.dtype in FORMATS:
        return w.starts_row(ROWS, w.shape[-1] // w.dtype.block * w.dtype.block_bytes)
    return dense.fits(w)


def slots_fit(call: Bound) -> bool:
    """Whether ids of experts lie as kernels read them."""
    x, ids = call.operand(1), call.operand(2)
    return ids.is_dense and ids.dtype is DType.I32 and bool(x.shape[-1])


def bind_product(steps: Steps, call: Bound, slots: Slots) -> None:
    """A product with a weight of any type."""
    w, x = call.operand(0), call.operand(1)
    if w.dtype not in FORMATS:
        dense.bind(steps, call, steps.stand_ins(x) or [x] * steps.threads, slots)
        return
    form, blocks = FORMATS[w.dtype], w.shape[-1] // w.dtype.block
    stride = blocks * w.dtype.block_bytes
    assert w.stored is not None
    q, pitch = rounded(steps, x, form, for_all=is_dealt(steps, call)), w.shape[-1] // COLUMNS * RECORD
    add_product(steps, call, product(form), blocks_of(form), stride, w.stored.shape[-2] * stride, q, pitch, slots)


def _mul_mat(steps: Steps, call: Bound) -> bool:
    if is_compiled(call):
        bind_product(steps, call, in_order(steps, call.operand(1)))
        return True
    return len(call.operand(0).shape) == 3 and dense.bind_columns(steps, call)


BINDINGS = {"mul_mat": _mul_mat}
