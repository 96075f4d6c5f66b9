"""Matrix products with packed weights: activations rounded to 8 bits a block, integer dot products, float32 sums.

A tile is 32 rows of the weight by 4 rows of activations: no sum crosses lanes, and what is loaded is used at least
twice, since processors broadcast from memory more slowly than they multiply.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from ..compiler import Kernel, Part, kernel, part
from ..steps import Bound, Operand, Steps
from . import dense
from .formats import COLUMNS, FORMATS, ROWS, Format
from .packing import share
from .simd import (
    float_to_bits,
    largest_magnitude,
    load,
    load_int,
    mul,
    mul_int,
    prefetch,
    round_small,
    splat,
    splat_int,
    store,
    store_record,
    store_scalar,
    store_small,
    to_float,
    totals,
    word,
)
from .tiles import HALVES, RECORD, SCALE, SUM, VECTORS, Tile, load_codes, store_codes, tile

TILE = 4
"""Rows of activations in a tile."""
ALONE = 2
"""So many rows go one by one: a tile would cost more."""
LIMIT, NONE, STEP = np.float32(127), np.float32(0), np.float32(1 / 127)
SMALLEST, RAISE = np.float32(1e-36), np.float32(2.0**64)
"""A block below it is raised first: the inverse of its scale would be no number."""
CHUNK = 64
"""Rows of activations that pass over a group of the weight before the next group: they stay in the cache."""
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


GROUPS, WIDE = 2, 16
"""Groups of the weight in a tile, and blocks of 32 columns that are expanded at a time: they stay in the nearest cache.
"""
SCALES, BIASES, EXPANDED = 64 * VECTORS, 64 * VECTORS + 128, 64 * VECTORS + 256
"""An expanded block: codes as bytes, scales of both halves and biases of both as float32; its size."""
GROUP = WIDE * EXPANDED
SCRATCH = GROUPS * (GROUP + CHUNK * ROWS * 4)
"""Bytes that each thread needs: expanded blocks, and sums of a chunk."""


def expand_of(form: Format) -> Part:
    """``(to, group, n, first, count)``: expand so many blocks, of the `n` of a group, from the first."""
    codes, scales, biases, width = form.codes, form.scales, form.biases, form.planes[0]
    high = form.planes[1] if len(form.planes) > 1 else 0
    biased = form.zero == 0

    def expand(to, group, n, first, count):
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
    """``(group, n, r) -> sums``: products of a group with one row of activations, whose records begin at `r`."""
    codes, scales, biases, width = form.codes, form.scales, form.biases, form.planes[0]
    high = form.planes[1] if len(form.planes) > 1 else 0
    one = tile(1, 1)
    zeros, add = one.zeros, add_alone_of(form, one)

    def alone(group, n, r):
        second = group + n * 64 * width
        last = second + n * 64 * high
        acc = zeros()
        for b in range(n):
            at = group + b * 64 * width
            for line in range(width):
                prefetch(at + AHEAD + 64 * line)
            v = codes(at, second + b * 64 * high)
            acc = add(acc, v, scales(last, b), biases(last, b), r, b * RECORD)
        return acc

    return part(alone)


@part
def clear(starts, experts, y, step, lo, hi):
    """Zero the elements from `lo` to before `hi` of the rows whose expert is elsewhere."""
    slots = starts + 4 * (experts + 2)
    for i in range(load_int(starts + 4 * experts), load_int(starts + 4 * experts + 4)):
        row = y + load_int(slots + 4 * i) * step
        for c in range(lo, hi):
            store_scalar(row + 4 * c, NONE)


@cache
def product(form: Format) -> Kernel:
    """``y[i] = w[expert of slot i] @ x[row of slot i]``.

    Words: packed experts, bytes of a row, rows of an expert in memory and in all, columns, rounded x; how many slots
    come before each expert, before those of experts that are elsewhere, and in all, then slots in that order (int32),
    experts, slots of a token, rows of a token (slot i of a token reads row ``i mod rows``); y, bytes between its rows,
    `SCRATCH` bytes for each thread.
    """
    many, one = tile(TILE, GROUPS), tile(1, 1)
    chosen, zeros, put, save, saved = many.chosen, many.zeros, many.put, many.save, many.saved
    choice, put_one = one.chosen, one.put
    expand, add, alone = expand_of(form), add_pair_of(form, many), alone_of(form)

    def body(a, thread, threads):
        w, stride, padded, rows, columns = word(a, 0), word(a, 1), word(a, 2), word(a, 3), word(a, 4)
        q, starts, experts, used, shared = word(a, 5), word(a, 6), word(a, 7), word(a, 8), word(a, 9)
        y, step, expanded = word(a, 10), word(a, 11), word(a, 12) + thread * SCRATCH
        n, groups, slots = columns // COLUMNS, padded // ROWS, starts + 4 * (experts + 2)
        lo, hi = share((groups + GROUPS - 1) // GROUPS, thread, threads)
        for expert in range(experts):
            start, end = load_int(starts + 4 * expert), load_int(starts + 4 * (expert + 1))
            matrix = w + expert * padded * stride
            shared_end = end - (end - start) % TILE if (end - start) % TILE <= ALONE else end
            for chunk in range(start, shared_end, CHUNK):
                stop = min(shared_end, chunk + CHUNK)
                for pair in range(lo, hi):
                    group = pair * GROUPS
                    for first in range(0, max(1, n), WIDE):
                        blocks, sums = min(WIDE, n - first), expanded + GROUPS * GROUP
                        for g in range(min(GROUPS, groups - group)):
                            expand(expanded + g * GROUP, matrix + (group + g) * ROWS * stride, n, first, blocks)
                        for i in range(chunk, stop, TILE):
                            r = chosen(slots + 4 * i, stop - i, used, shared, q + first * RECORD, n * RECORD)
                            acc = saved(sums) if first > 0 else zeros()
                            for b in range(blocks):
                                acc = add(acc, expanded + b * EXPANDED, r, b * RECORD)
                            if first + WIDE < n:
                                save(sums, acc)
                            else:
                                to = chosen(slots + 4 * i, stop - i, 1, 1, y + group * ROWS * 4, step)
                                put(to, acc, rows - group * ROWS)
                            sums += TILE * GROUPS * ROWS * 4
            for group in range(lo * GROUPS, min(hi * GROUPS, groups)):
                for i in range(shared_end, end):
                    acc_one = alone(
                        matrix + group * ROWS * stride, n, choice(slots + 4 * i, 1, used, shared, q, n * RECORD)
                    )
                    put_one(choice(slots + 4 * i, 1, 1, 1, y + group * ROWS * 4, step), acc_one, rows - group * ROWS)
        clear(starts, experts, y, step, min(rows, lo * GROUPS * ROWS), min(rows, hi * GROUPS * ROWS))
        return 0

    return Kernel(f"products.product.{form.name}", body)


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


def add_product(steps: Steps, call: Bound, slots: Operand, experts: int, used: int, shared: int) -> None:
    """The step of `product` for a packed weight, and what rounds its activations; `slots` as its words say."""
    w, x, y = call.operand(0), call.operand(1), call.out
    assert w.stored is not None
    form, (rows, columns), padded = FORMATS[w.dtype], w.shape[-2:], w.stored.shape[-2]
    q, stride = rounded(steps, x, form), columns // w.dtype.block * w.dtype.block_bytes
    memory = steps.scratch("products", SCRATCH * steps.threads)
    words = [w.address, stride, padded, rows, columns, q.address, slots.address, experts, used, shared]
    words += [y.address, y.row_step, memory.address]
    steps.add(product(form), words, reads=[w, q, slots], writes=[y])


def _mul_mat(steps: Steps, call: Bound) -> bool:
    w, x, y = call.operand(0), call.operand(1), call.out
    if w.dtype not in FORMATS:
        return dense.bind(steps, call)
    if len(w.shape) != 2 or not w.is_whole or not x.has_rows or not y.has_rows or not x.is_float:
        return False
    count = math.prod(x.shape[:-1])
    in_order = steps.constant(np.array([0, count, count, *range(count)], np.int32))
    add_product(steps, call, in_order, 1, 1, 1)
    return True


BINDINGS = {"mul_mat": _mul_mat}
