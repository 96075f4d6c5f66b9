"""Matrix products with packed weights: activations rounded to 8 bits a block, integer dot products, float32 sums.

A tile is 16 rows of the weight by 1 or 8 rows of activations: no sum crosses lanes, and each code is unpacked once.
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
    absolute,
    add_int,
    dot4,
    fma,
    four_everywhere,
    lane_0,
    lane_8,
    largest,
    load,
    maximum,
    mul,
    no_ints,
    prefetch,
    round_to_int,
    splat,
    splat_from,
    store,
    store_scalar,
    store_small,
    store_some,
    to_float,
    two_totals,
    word,
    zeros,
)

TILE = 8
"""Rows of activations in a tile."""
LIMIT, NONE, ONE = np.float32(127), np.float32(0), np.float32(1)
SMALLEST, RAISE = np.float32(1e-36), np.float32(2.0**64)
"""A block below it is raised first: the inverse of its scale would be no number."""
CHUNK = 64
"""Rows of activations that pass over a group of the weight before the next group: they stay in the cache."""


@part
def round_block(x, q, d, s, h, b):
    """32 values to 8 bits, ``x ~ d[b] q``; ``s[b]`` is d times the sum of q, ``h[2 b]``, ``h[2 b + 1]`` of halves."""
    low, high = load(x + 128 * b), load(x + 128 * b + 64)
    top = largest(maximum(absolute(low), absolute(high)))
    scale = top / LIMIT
    raised = RAISE if top < SMALLEST else ONE
    inverse, raising = splat(LIMIT / (top * raised) if top > NONE else NONE), splat(raised)
    i, j = round_to_int(mul(mul(low, raising), inverse)), round_to_int(mul(mul(high, raising), inverse))
    store_small(q + 32 * b, i)
    store_small(q + 32 * b + 16, j)
    sums = mul(to_float(two_totals(i, j)), splat(scale))
    first, second = lane_0(sums), lane_8(sums)
    store_scalar(d + 4 * b, scale)
    store_scalar(s + 4 * b, first + second)
    store_scalar(h + 8 * b, first)
    store_scalar(h + 8 * b + 4, second)


@kernel
def round_rows(a, thread, threads):
    """Words: source, bytes between its rows, rows, columns, target as `rounded_bytes` lays it out."""
    source, step, rows, columns, q = word(a, 0), word(a, 1), word(a, 2), word(a, 3), word(a, 4)
    n = columns // COLUMNS
    d, s, h = scales_of(q, rows, columns)
    lo, hi = share(rows, thread, threads)
    for i in range(lo, hi):
        for b in range(n):
            round_block(source + i * step, q + i * columns, d + i * n * 4, s + i * n * 4, h + i * n * 8, b)
    return 0


def rounded_bytes(rows: int, columns: int) -> int:
    """Rounded activations: codes [rows, columns] int8, then float32 scales and sums [rows, columns / 32], and sums of
    halves [rows, columns / 16]."""
    return rows * (columns + columns // COLUMNS * 16)


@part
def scales_of(q, rows, columns):
    """Where scales, sums and sums of halves begin."""
    each = rows * (columns // COLUMNS) * 4
    d = q + rows * columns
    return d, d + each, d + 2 * each


@part
def dots_apart(w, q):
    """Products of 32 columns with one row of activations, as two chains: for a row that is alone."""
    a, b, c, e, f, g, h, i = w
    x = dot4(no_ints(), a, four_everywhere(q))
    y = dot4(no_ints(), b, four_everywhere(q + 4))
    x = dot4(x, c, four_everywhere(q + 8))
    y = dot4(y, e, four_everywhere(q + 12))
    x = dot4(x, f, four_everywhere(q + 16))
    y = dot4(y, g, four_everywhere(q + 20))
    x = dot4(x, h, four_everywhere(q + 24))
    y = dot4(y, i, four_everywhere(q + 28))
    return add_int(x, y)


@part
def dots_together(w, q):
    """The same as one chain, which costs one addition less: for a row among others."""
    a, b, c, e, f, g, h, i = w
    x = dot4(no_ints(), a, four_everywhere(q))
    x = dot4(x, b, four_everywhere(q + 4))
    x = dot4(x, c, four_everywhere(q + 8))
    x = dot4(x, e, four_everywhere(q + 12))
    x = dot4(x, f, four_everywhere(q + 16))
    x = dot4(x, g, four_everywhere(q + 20))
    x = dot4(x, h, four_everywhere(q + 24))
    return dot4(x, i, four_everywhere(q + 28))


@part
def dots_in_halves(w, q):
    """The same, the sums of both halves of the columns apart."""
    a, b, c, e, f, g, h, i = w
    x = dot4(no_ints(), a, four_everywhere(q))
    y = dot4(no_ints(), f, four_everywhere(q + 16))
    x = dot4(x, b, four_everywhere(q + 4))
    y = dot4(y, g, four_everywhere(q + 20))
    x = dot4(x, c, four_everywhere(q + 8))
    y = dot4(y, h, four_everywhere(q + 24))
    x = dot4(x, e, four_everywhere(q + 12))
    y = dot4(y, i, four_everywhere(q + 28))
    return x, y


def add_block_of(form: Format, *, alone: bool) -> Part:
    """``(w, q, scales, d, s, h, acc) -> acc``: what 32 columns add to the products with one row of activations."""
    if form.halves:

        def add_block(w, q, scales, d, s, h, acc):
            first, m, second, o = scales
            x, y = dots_in_halves(w, q)
            one = splat_from(d)
            acc = fma(m, splat_from(h), fma(o, splat_from(h + 4), acc))
            return fma(mul(first, one), to_float(x), fma(mul(second, one), to_float(y), acc))
    else:
        dots = dots_apart if alone else dots_together

        def add_block(w, q, scales, d, s, h, acc):
            scale, m, _, _ = scales
            return fma(mul(scale, splat_from(d)), to_float(dots(w, q)), fma(m, splat_from(s), acc))

    return part(add_block)


@part
def put(y, acc, count):
    if count < ROWS:
        store_some(y, acc, count)
    else:
        store(y, acc)


AHEAD = 4096
"""Bytes ahead of their use at which weights are fetched where each is read once."""


@cache
def product(form: Format) -> Kernel:
    """``y[i] = w @ x[i]``.  Words: packed w, bytes of a row, rows of w, columns, rounded x, rows of x, y, bytes between
    rows of y."""
    codes, scales, width = form.codes, form.scales, form.planes[0]
    add_block, add_alone = add_block_of(form, alone=False), add_block_of(form, alone=True)
    high = form.planes[1] if len(form.planes) > 1 else 0

    def body(a, thread, threads):
        w, stride, rows, columns = word(a, 0), word(a, 1), word(a, 2), word(a, 3)
        q, count, y, step = word(a, 4), word(a, 5), word(a, 6), word(a, 7)
        n = columns // COLUMNS
        d, s, h = scales_of(q, count, columns)
        lo, hi = share((rows + ROWS - 1) // ROWS, thread, threads)
        whole = count // TILE * TILE
        for start in range(0, whole, CHUNK):
            for group in range(lo, hi):
                plane = w + group * ROWS * stride
                second = plane + n * 64 * width
                last = second + n * 64 * high
                for t in range(start, min(whole, start + CHUNK), TILE):
                    a0, a1, a2, a3 = zeros(), zeros(), zeros(), zeros()
                    a4, a5, a6, a7 = zeros(), zeros(), zeros(), zeros()
                    for b in range(n):
                        v = codes(plane + b * 64 * width, second + b * 64 * high)
                        f = scales(last, b)
                        o, at = q + t * columns + b * COLUMNS, t * n + b
                        e, g, i = d + 4 * at, s + 4 * at, h + 8 * at
                        a0 = add_block(v, o, f, e, g, i, a0)
                        a1 = add_block(v, o + columns, f, e + 4 * n, g + 4 * n, i + 8 * n, a1)
                        a2 = add_block(v, o + 2 * columns, f, e + 8 * n, g + 8 * n, i + 16 * n, a2)
                        a3 = add_block(v, o + 3 * columns, f, e + 12 * n, g + 12 * n, i + 24 * n, a3)
                        a4 = add_block(v, o + 4 * columns, f, e + 16 * n, g + 16 * n, i + 32 * n, a4)
                        a5 = add_block(v, o + 5 * columns, f, e + 20 * n, g + 20 * n, i + 40 * n, a5)
                        a6 = add_block(v, o + 6 * columns, f, e + 24 * n, g + 24 * n, i + 48 * n, a6)
                        a7 = add_block(v, o + 7 * columns, f, e + 28 * n, g + 28 * n, i + 56 * n, a7)
                    left, to = rows - group * ROWS, y + t * step + group * ROWS * 4
                    put(to, a0, left)
                    put(to + step, a1, left)
                    put(to + 2 * step, a2, left)
                    put(to + 3 * step, a3, left)
                    put(to + 4 * step, a4, left)
                    put(to + 5 * step, a5, left)
                    put(to + 6 * step, a6, left)
                    put(to + 7 * step, a7, left)
        for group in range(lo, hi):
            plane = w + group * ROWS * stride
            second = plane + n * 64 * width
            last = second + n * 64 * high
            for t in range(whole, count):
                acc = zeros()
                o, e, g, i = q + t * columns, d + 4 * t * n, s + 4 * t * n, h + 8 * t * n
                for b in range(n):
                    at = plane + b * 64 * width
                    for line in range(width):
                        prefetch(at + AHEAD + 64 * line)
                    v = codes(at, second + b * 64 * high)
                    acc = add_alone(v, o + b * COLUMNS, scales(last, b), e + 4 * b, g + 4 * b, i + 8 * b, acc)
                put(y + t * step + group * ROWS * 4, acc, rows - group * ROWS)
        return 0

    return Kernel(f"products.product.{form.name}", body)


# ----------------------------------------------------------------------------------------------------- binding


def rounded(steps: Steps, x: Operand) -> Operand:
    """`x` rounded to 8 bits, by a step of its own unless an earlier one has done it."""
    key = ("rounded", x.tensor)
    if (found := steps.known(key)) is not None:
        return found
    columns, step = x.shape[-1], x.row_step
    rows = math.prod(x.shape[:-1])
    made = steps.scratch("rounded", rounded_bytes(rows, columns))
    steps.add(round_rows, [x.address, step, rows, columns, made.address], reads=[x], writes=[made])
    steps.remember(key, made, [x])
    return made


def _mul_mat(steps: Steps, call: Bound) -> bool:
    w, x, y = call.operand(0), call.operand(1), call.out
    form = FORMATS.get(w.dtype)
    if form is None:
        return dense.bind(steps, call)
    if len(w.shape) != 2 or not w.is_whole or not x.has_rows or not y.has_rows or not x.is_float:
        return False
    rows, columns = w.shape
    q = rounded(steps, x)
    stride = columns // w.dtype.block * w.dtype.block_bytes
    count = math.prod(x.shape[:-1])
    words = [w.address, stride, rows, columns, q.address, count, y.address, y.row_step]
    steps.add(product(form), words, reads=[w, q], writes=[y])
    return True


BINDINGS = {"mul_mat": _mul_mat}
