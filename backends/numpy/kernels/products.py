"""Matrix products with packed weights: activations rounded to 8 bits a block, integer dot products, float32 sums.

Every code is unpacked once for a chunk of rows of activations.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from ..compiler import Kernel, Part, kernel, part
from ..steps import Bound, Operand, Steps
from . import dense
from .formats import COLUMNS, FORMATS, ROWS, Format
from .grouped import Blocks, Slots, add_product, in_order, product_of
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


def rounded(steps: Steps, x: Operand, form: Format) -> Operand:
    """`x` rounded to 8 bits for weights of a type, by a step of its own unless an earlier one has done it."""
    key = ("rounded", x.tensor, form.zero)
    if (found := steps.known(key)) is not None:
        return found
    columns, step = x.shape[-1], x.row_step
    rows = math.prod(x.shape[:-1])
    made = steps.scratch(f"rounded {form.zero}", rounded_bytes(rows, columns))
    steps.add(round_rows, [x.address, step, rows, columns, made.address, form.zero], reads=[x], writes=[made])
    steps.remember(key, made, [x])
    return made


def bind_product(steps: Steps, call: Bound, slots: Slots) -> bool:
    """A product with a weight of any type."""
    w, x = call.operand(0), call.operand(1)
    if w.dtype not in FORMATS:
        return dense.bind(steps, call, slots)
    form, blocks = FORMATS[w.dtype], w.shape[-1] // w.dtype.block
    stride = blocks * w.dtype.block_bytes
    if not w.starts_row(ROWS, stride) or not x.has_rows or not call.out.has_rows or not x.is_float:
        return False
    assert w.stored is not None
    q, pitch = rounded(steps, x, form), w.shape[-1] // COLUMNS * RECORD
    add_product(steps, call, product(form), blocks_of(form), stride, w.stored.shape[-2] * stride, q, pitch, slots)
    return True


def _mul_mat(steps: Steps, call: Bound) -> bool:
    w, x = call.operand(0), call.operand(1)
    if len(w.shape) == 3 and w.dtype not in FORMATS:
        return dense.bind_columns(steps, call)
    return len(w.shape) == 2 and bind_product(steps, call, in_order(steps, x))


BINDINGS = {"mul_mat": _mul_mat}
