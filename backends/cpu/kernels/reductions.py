"""Sums, softmax and choices over rows."""

from __future__ import annotations

from functools import cache

import numpy as np

from ....graph.dtypes import DType
from ...operands import Bound
from ..compiler import Kernel, kernel, part
from ..simd.vectors import (
    LANES,
    add,
    float_word,
    lanes_above,
    largest,
    load,
    load_int,
    load_scalar,
    load_some_or,
    maximum,
    mul,
    splat,
    splat_from,
    store_int,
    store_scalar,
    sub,
    total,
    where_inside,
    word,
    zeros,
)
from ..steps import Steps
from .packing import share
from .rows import HEAD, OPERAND, exp, lanes, put, row_address, rows_of

ONE, NONE, MINUS_INFINITY = np.float32(1), np.float32(0), np.float32(-np.inf)
LOWEST = np.float32(-3.0e38)


@part
def lanes_or(p, c, n, otherwise):
    """16 elements of a row; past its end `otherwise`."""
    if n - c >= LANES:
        return load(p + 4 * c)
    return load_some_or(p + 4 * c, n - c, splat(otherwise))


@cache
def sums(mean: bool) -> Kernel:
    """Words: HEAD, source, target."""

    def body(a, thread, threads):
        n = word(a, 0)
        lo, hi = share(word(a, 1) * word(a, 2) * word(a, 3), thread, threads)
        for i in range(lo, hi):
            x, acc = row_address(a, 0, i), zeros()
            for c in range(0, n, LANES):
                acc = add(acc, lanes(x, c, n, 4))
            store_scalar(row_address(a, 1, i), total(acc) / np.float32(n) if mean else total(acc))
        return 0

    return Kernel(f"reductions.{'mean' if mean else 'sums'}", body)


@kernel
def softmax(a, thread, threads):
    """Words: HEAD, source, target, scale."""
    n, scale = word(a, 0), float_word(a, HEAD + 2 * OPERAND)
    lo, hi = share(word(a, 1) * word(a, 2) * word(a, 3), thread, threads)
    factor = splat(scale)
    for i in range(lo, hi):
        x, y = row_address(a, 0, i), row_address(a, 1, i)
        tops, weights = splat(MINUS_INFINITY), zeros()
        for c in range(0, n, LANES):
            tops = maximum(tops, mul(lanes_or(x, c, n, NONE), factor) if n - c >= LANES else tail(x, c, n, factor))
        top = splat(max(largest(tops), LOWEST))
        for c in range(0, n, LANES):
            scores = mul(lanes(x, c, n, 4), factor) if n - c >= LANES else tail(x, c, n, factor)
            e = exp(sub(scores, top))
            weights = add(weights, e)
            put(y, c, n, e)
        weight = total(weights)
        inverse = splat(ONE / weight if weight > NONE else NONE)
        for c in range(0, n, LANES):
            put(y, c, n, mul(lanes(y, c, n, 4), inverse))
    return 0


@part
def tail(x, c, n, factor):
    """The scaled elements at the end of a row; -inf past it."""
    scaled = mul(load_some_or(x + 4 * c, n - c, zeros()), factor)
    return where_inside(scaled, n - c)


@kernel
def top_k(a, thread, threads):
    """The largest first, equal ones in order; 16 at a time are passed over once there are as many as wanted.  Words:
    rows, source, bytes between rows, elements, target, bytes between rows, how many."""
    x, step, n, y, pace, k = word(a, 1), word(a, 2), word(a, 3), word(a, 4), word(a, 5), word(a, 6)
    lo, hi = share(word(a, 0), thread, threads)
    for i in range(lo, hi):
        row, out = x + i * step, y + i * pace
        count = 0
        for first in range(0, n, LANES):
            if (
                count == k
                and lanes_above(lanes(row, first, n, 4), splat_from(row + 4 * load_int(out + 4 * k - 4))) == 0
            ):
                continue
            for c in range(first, min(n, first + LANES)):
                value = load_scalar(row + 4 * c)
                at = count
                while at > 0 and load_scalar(row + 4 * load_int(out + 4 * (at - 1))) < value:
                    at -= 1
                if at < k:
                    count = min(count + 1, k)
                    for j in range(count - 1, at, -1):
                        store_int(out + 4 * j, load_int(out + 4 * (j - 1)))
                    store_int(out + 4 * at, c)
    return 0


@kernel
def causal_mask(a, thread, threads):
    """Words: positions (int32), how many, cells, window (0: unlimited), target."""
    cells, window = word(a, 2), word(a, 3)
    lo, hi = share(word(a, 1), thread, threads)
    for i in range(lo, hi):
        position, y = load_int(word(a, 0) + 4 * i), word(a, 4) + 4 * i * cells
        first = max(0, position - window + 1) if window else 0
        for c in range(cells):
            store_scalar(y + 4 * c, NONE if first <= c and c <= position else MINUS_INFINITY)
    return 0


def _reduced(name: str):
    def bind(steps: Steps, call: Bound) -> bool:
        x, y = call.operand(0), call.out
        if not x.is_float or not y.is_dense or not x.shape[-1]:
            return False
        words = rows_of(x.shape, [x, y], whole_rows=True)
        if words is None or words[HEAD + 4] != 4:
            return False
        steps.add(sums(name == "mean"), words, reads=[x], writes=[y])
        return True

    return bind


def _softmax(steps: Steps, call: Bound) -> bool:
    x, y = call.operand(0), call.out
    if call.optional(1) is not None or call.optional(2) is not None or not x.is_float:
        return False
    words = rows_of(y.shape, [x, y], whole_rows=True)
    if words is None or words[HEAD + 4] != 4 or words[HEAD + OPERAND + 4] != 4:
        return False
    steps.add(softmax, [*words, call.float("scale")], reads=[x], writes=[y])
    return True


def _top_k(steps: Steps, call: Bound) -> bool:
    x, y = call.operand(0), call.out
    if not x.is_float or not x.has_rows or not y.is_dense or y.dtype is not DType.I32:
        return False
    k = y.shape[-1]
    rows = int(np.prod(x.shape[:-1]))
    steps.add(top_k, [rows, x.address, x.row_step, x.shape[-1], y.address, 4 * k, k], reads=[x], writes=[y])
    return True


def _causal_mask(steps: Steps, call: Bound) -> bool:
    pos, y = call.operand(0), call.out
    if not pos.is_dense or not y.is_dense or pos.dtype is not DType.I32:
        return False
    words = [pos.address, int(np.prod(pos.shape)), y.shape[-1], int(np.asarray(call.attrs["window"])), y.address]
    steps.add(causal_mask, words, reads=[pos], writes=[y])
    return True


BINDINGS = {
    "sum_rows": _reduced("sum_rows"),
    "mean": _reduced("mean"),
    "softmax": _softmax,
    "top_k": _top_k,
    "causal_mask": _causal_mask,
}
