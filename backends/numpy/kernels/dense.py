"""Matrix products with weights of float32, float16 or bfloat16 as they lie, in float32."""

from __future__ import annotations

import math
from functools import cache

from ....graph.dtypes import DType
from ..compiler import Kernel, kernel, part
from ..steps import Bound, Steps
from .packing import share
from .rows import lanes, put
from .simd import LANES, fma, load_bf16, load_half, prefetch, splat_from, store_scalar, total, word, zeros

TILE = 4
"""Rows of the weight, and of the activations, whose sums are kept in registers."""
AHEAD = 2048


@part
def f32_lanes(p, c, n):
    return lanes(p, c, n, 4)


@part
def f16_lanes(p, c, n):
    return load_half(p + 2 * c)


@part
def bf16_lanes(p, c, n):
    return load_bf16(p + 2 * c)


LOADS = {DType.F32: f32_lanes, DType.F16: f16_lanes, DType.BF16: bf16_lanes}


@cache
def product(dtype: DType) -> Kernel:
    """``y[i] = w @ x[i]``.  Words: w, bytes between its rows, rows, columns (of halves a multiple of 16), x, bytes
    between its rows, how many, y, bytes between its rows."""
    weights, size = LOADS[dtype], dtype.storage.itemsize

    def body(a, thread, threads):
        w, stride, rows, columns = word(a, 0), word(a, 1), word(a, 2), word(a, 3)
        x, step, count, y, pace = word(a, 4), word(a, 5), word(a, 6), word(a, 7), word(a, 8)
        lo, hi = share((rows + TILE - 1) // TILE, thread, threads)
        for tile in range(lo, hi):
            first = tile * TILE
            p0 = w + first * stride
            p1 = w + min(first + 1, rows - 1) * stride
            p2 = w + min(first + 2, rows - 1) * stride
            p3 = w + min(first + 3, rows - 1) * stride
            i = 0
            while i + TILE <= count:
                x0, x1, x2, x3 = x + i * step, x + (i + 1) * step, x + (i + 2) * step, x + (i + 3) * step
                a00, a01, a02, a03 = zeros(), zeros(), zeros(), zeros()
                a10, a11, a12, a13 = zeros(), zeros(), zeros(), zeros()
                a20, a21, a22, a23 = zeros(), zeros(), zeros(), zeros()
                a30, a31, a32, a33 = zeros(), zeros(), zeros(), zeros()
                for c in range(0, columns, LANES):
                    v0, v1, v2, v3 = (
                        weights(p0, c, columns),
                        weights(p1, c, columns),
                        weights(p2, c, columns),
                        weights(p3, c, columns),
                    )
                    u = lanes(x0, c, columns, 4)
                    a00, a10, a20, a30 = fma(v0, u, a00), fma(v1, u, a10), fma(v2, u, a20), fma(v3, u, a30)
                    u = lanes(x1, c, columns, 4)
                    a01, a11, a21, a31 = fma(v0, u, a01), fma(v1, u, a11), fma(v2, u, a21), fma(v3, u, a31)
                    u = lanes(x2, c, columns, 4)
                    a02, a12, a22, a32 = fma(v0, u, a02), fma(v1, u, a12), fma(v2, u, a22), fma(v3, u, a32)
                    u = lanes(x3, c, columns, 4)
                    a03, a13, a23, a33 = fma(v0, u, a03), fma(v1, u, a13), fma(v2, u, a23), fma(v3, u, a33)
                to = y + i * pace + 4 * first
                put_four(to, rows - first, a00, a10, a20, a30)
                put_four(to + pace, rows - first, a01, a11, a21, a31)
                put_four(to + 2 * pace, rows - first, a02, a12, a22, a32)
                put_four(to + 3 * pace, rows - first, a03, a13, a23, a33)
                i += TILE
            while i < count:
                q, b0, b1, b2, b3 = x + i * step, zeros(), zeros(), zeros(), zeros()
                for c in range(0, columns, LANES):
                    ahead = c * size + AHEAD
                    prefetch(p0 + ahead)
                    prefetch(p1 + ahead)
                    prefetch(p2 + ahead)
                    prefetch(p3 + ahead)
                    u = lanes(q, c, columns, 4)
                    b0, b1 = fma(weights(p0, c, columns), u, b0), fma(weights(p1, c, columns), u, b1)
                    b2, b3 = fma(weights(p2, c, columns), u, b2), fma(weights(p3, c, columns), u, b3)
                put_four(y + i * pace + 4 * first, rows - first, b0, b1, b2, b3)
                i += 1
        return 0

    return Kernel(f"dense.product.{dtype}", body)


@part
def put_four(to, left, a, b, c, d):
    """The sums of four rows, of which `left` exist."""
    store_scalar(to, total(a))
    if left > 1:
        store_scalar(to + 4, total(b))
    if left > 2:
        store_scalar(to + 8, total(c))
    if left > 3:
        store_scalar(to + 12, total(d))


@kernel
def columns(a, thread, threads):
    """``y[b, i] = w[b] @ x[b, i]`` where columns of w are dense.  Words: matrices, rows of x in each, rows of w,
    columns;
    w with bytes between matrices and between columns; x and y with bytes between matrices and between rows; bytes
    between
    the elements of a row of x."""
    count, rows, n = word(a, 1), word(a, 2), word(a, 3)
    lo, hi = share(word(a, 0) * count, thread, threads)
    for unit in range(lo, hi):
        b, i = unit // count, unit % count
        w, x = word(a, 4) + b * word(a, 5), word(a, 7) + b * word(a, 8) + i * word(a, 9)
        y = word(a, 10) + b * word(a, 11) + i * word(a, 12)
        for c in range(0, rows, LANES):
            acc = zeros()
            for k in range(n):
                acc = fma(lanes(w + k * word(a, 6), c, rows, 4), splat_from(x + k * word(a, 13)), acc)
            put(y, c, rows, acc)
    return 0


def _bind_columns(steps: Steps, call: Bound) -> bool:
    """Matrices, one for each matrix of x, whose columns lie densely."""
    w, x, y = call.operand(0), call.operand(1), call.out
    alike = len(w.shape) == len(x.shape) == 3 and w.shape[0] == x.shape[0]
    if not alike or not (w.is_float and x.is_float) or w.strides[1] != 1 or y.strides[-1] != 1:
        return False
    words = [x.shape[0], x.shape[1], w.shape[1], w.shape[2], w.address, 4 * w.strides[0], 4 * w.strides[2]]
    words += [x.address, 4 * x.strides[0], 4 * x.strides[1], y.address, 4 * y.strides[0], 4 * y.strides[1]]
    steps.add(columns, [*words, 4 * x.strides[2]], reads=[w, x], writes=[y])
    return True


def bind(steps: Steps, call: Bound) -> bool:
    """``mul_mat`` with a weight that is not packed."""
    w, x, y = call.operand(0), call.operand(1), call.out
    if len(w.shape) == 3:
        return _bind_columns(steps, call)
    if w.dtype not in LOADS or len(w.shape) != 2 or w.strides[-1] != 1 or not x.is_float:
        return False
    if not x.has_rows or not y.has_rows or (w.dtype is not DType.F32 and w.shape[1] % LANES):
        return False
    stride = w.strides[0] * w.dtype.storage.itemsize
    words = [w.address, stride, *w.shape, x.address, x.row_step, math.prod(x.shape[:-1]), y.address, y.row_step]
    steps.add(product(w.dtype), words, reads=[w, x], writes=[y])
    return True
