"""Sums, softmax and selections over rows."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

import numpy as np

from ....graph.dtypes import DType
from ...operands import Bound
from ..compiler import Kernel, kernel, part
from ..simd.vectors import (
    LANES,
    Intrinsic,
    add,
    factor_across,
    lane_0,
    lanes_not_below,
    larger,
    largest,
    largest_across,
    load,
    load_int,
    load_scalar,
    load_some_or,
    maximum,
    mul,
    smaller,
    smallest_across,
    splat,
    splat_from,
    store_int,
    store_scalar,
    sub,
    total,
    where_inside,
    zeros,
)
from ..steps import Binding, Steps
from ..words import words
from .functions import exp
from .packing import share
from .rows import lanes, put, row_words, whole_rows

ONE, NONE, MINUS_INFINITY = np.float32(1), np.float32(0), np.float32(-np.inf)
LOWEST = np.finfo(np.float32).min
"""The mask value of some models. A row of it has a softmax; only a row of -inf has none."""


@part
def lanes_or(p, c, n, otherwise):
    """Load 16 elements of a row; `otherwise` past its end."""
    if n - c >= LANES:
        return load(p + 4 * c)
    return load_some_or(p + 4 * c, n - c, splat(otherwise))


SUMS = row_words("x y")


@cache
def sums(mean: bool) -> Kernel:
    """Make the kernel of the sum or the mean of each row."""

    def body(a, thread, threads):
        n = SUMS.columns(a)
        lo, hi = share(SUMS.rows(a), thread, threads)
        for i in range(lo, hi):
            x, acc = SUMS.x(a, i), zeros()
            for c in range(0, n, LANES):
                acc = add(acc, lanes(x, c, n, 4))
            store_scalar(SUMS.y(a, i), total(acc) / np.float32(n) if mean else total(acc))
        return 0

    return Kernel(f"reductions.{'mean' if mean else 'sums'}", body)


FOLDS: Mapping[str, tuple[Intrinsic, Intrinsic, float]] = MappingProxyType(
    {
        "sum": (add, total, 0.0),
        "prod": (mul, factor_across, 1.0),
        "max": (larger, largest_across, -np.inf),
        "min": (smaller, smallest_across, np.inf),
    }
)
"""For each kind: the operation on two vectors, its reduction across lanes, its neutral element."""


@cache
def folded(kind: str) -> Kernel:
    """Make the kernel that reduces each row to one number."""
    join, across, start = FOLDS[kind]
    neutral = np.float32(start)

    def body(a, thread, threads):
        n = SUMS.columns(a)
        lo, hi = share(SUMS.rows(a), thread, threads)
        for i in range(lo, hi):
            x, acc = SUMS.x(a, i), splat(neutral)
            for c in range(0, n, LANES):
                acc = join(acc, lanes_or(x, c, n, neutral))
            store_scalar(SUMS.y(a, i), across(acc))
        return 0

    return Kernel(f"reductions.{kind}", body)


@cache
def running(kind: str) -> Kernel:
    """Make the kernel of running reductions: ``y[c] = x[0] op ... op x[c]``."""
    join, _, start = FOLDS[kind]
    neutral = np.float32(start)

    def body(a, thread, threads):
        n = SUMS.columns(a)
        lo, hi = share(SUMS.rows(a), thread, threads)
        for i in range(lo, hi):
            x, y, acc = SUMS.x(a, i), SUMS.y(a, i), splat(neutral)
            for c in range(n):
                acc = join(acc, splat_from(x + 4 * c))
                store_scalar(y + 4 * c, lane_0(acc))
        return 0

    return Kernel(f"reductions.running.{kind}", body)


SOFTMAX = row_words("x y", "scale:f32")


@kernel
def softmax(a, thread, threads):
    """Compute ``softmax(scale * x)`` of each row."""
    n, scale = SOFTMAX.columns(a), SOFTMAX.scale(a)
    lo, hi = share(SOFTMAX.rows(a), thread, threads)
    factor = splat(scale)
    for i in range(lo, hi):
        x, y = SOFTMAX.x(a, i), SOFTMAX.y(a, i)
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
        inverse = splat(ONE / weight if weight != NONE else NONE)  # NaN stays NaN
        for c in range(0, n, LANES):
            put(y, c, n, mul(lanes(y, c, n, 4), inverse))
    return 0


@part
def tail(x, c, n, factor):
    """Load the scaled elements at the end of a row; -inf past it."""
    scaled = mul(load_some_or(x + 4 * c, n - c, zeros()), factor)
    return where_inside(scaled, n - c)


@part
def comes_before(value, other):
    """Return whether `value` is larger than `other`, which may be NaN. NaN is smallest."""
    return value > other or (other != other and value == value)


TOP_K = words("rows x step n y pace k")


@kernel
def top_k(a, thread, threads):
    """Find the `k` largest of `n` elements of each row: indices, largest first, equal ones in order, NaN last.

    16 elements are skipped at once if none of them can enter the k. `step` and `pace` are bytes from row to row of x
    and y.
    """
    x, step, n, y, pace, k = TOP_K.x(a), TOP_K.step(a), TOP_K.n(a), TOP_K.y(a), TOP_K.pace(a), TOP_K.k(a)
    lo, hi = share(TOP_K.rows(a), thread, threads)
    for i in range(lo, hi):
        row, out = x + i * step, y + i * pace
        count = 0
        for first in range(0, n, LANES):
            if (
                count == k
                and lanes_not_below(lanes(row, first, n, 4), splat_from(row + 4 * load_int(out + 4 * k - 4))) == 0
            ):
                continue
            for c in range(first, min(n, first + LANES)):
                value = load_scalar(row + 4 * c)
                at = count
                while at > 0 and comes_before(value, load_scalar(row + 4 * load_int(out + 4 * (at - 1)))):
                    at -= 1
                if at < k:
                    count = min(count + 1, k)
                    for j in range(count - 1, at, -1):
                        store_int(out + 4 * j, load_int(out + 4 * (j - 1)))
                    store_int(out + 4 * at, c)
    return 0


MASK = words("positions count cells window y")


@kernel
def causal_mask(a, thread, threads):
    """Compute the mask [count, cells] of int32 positions: 0 for visible cells, -inf for others.

    Cells up to the position are visible, within `window` (0: unlimited).
    """
    cells, window = MASK.cells(a), MASK.window(a)
    lo, hi = share(MASK.count(a), thread, threads)
    for i in range(lo, hi):
        position, y = load_int(MASK.positions(a) + 4 * i), MASK.y(a) + 4 * i * cells
        first = max(0, position - window + 1) if window else 0
        for c in range(cells):
            store_scalar(y + 4 * c, NONE if first <= c and c <= position else MINUS_INFINITY)
    return 0


def _reduced(name: str) -> Binding:
    """Make the binding of `sum_rows`, `mean` or `reduce`."""

    def bind(steps: Steps, call: Bound) -> bool:
        x, y = call.operand(0), call.out
        walked = whole_rows(steps, x, y) if y.is_dense and x.shape[-1] else None
        if walked is None:
            return False
        walk, x = walked
        kernel = folded(str(call.attrs["kind"])) if name == "reduce" else sums(name == "mean")
        steps.add(kernel, SUMS(walk=walk), reads=[x], writes=[y])
        return True

    return bind


def _running(steps: Steps, call: Bound) -> bool:
    x, y = call.operand(0), call.out
    walked = whole_rows(steps, x, y) if y.shape and y.is_dense_along(-1) else None
    if walked is None:
        return False
    walk, x = walked
    steps.add(running(str(call.attrs.get("kind", "sum"))), SUMS(walk=walk), reads=[x], writes=[y])
    return True


def _softmax(steps: Steps, call: Bound) -> bool:
    x, y = call.operand(0), call.out
    alone = call.optional(1) is None and call.optional(2) is None
    walked = whole_rows(steps, x, y) if alone and y.is_dense_along(-1) else None
    if walked is None:
        return False
    walk, x = walked
    steps.add(softmax, SOFTMAX(walk=walk, scale=call.float("scale")), reads=[x], writes=[y])
    return True


def _top_k(steps: Steps, call: Bound) -> bool:
    x, y = call.operand(0), call.out
    if not x.is_float or not x.has_rows or not y.is_dense or y.dtype is not DType.I32:
        return False
    k = y.shape[-1]
    rows = int(np.prod(x.shape[:-1]))
    words = TOP_K(rows=rows, x=x.address, step=x.row_step, n=x.shape[-1], y=y.address, pace=4 * k, k=k)
    steps.add(top_k, words, reads=[x], writes=[y])
    return True


def _causal_mask(steps: Steps, call: Bound) -> bool:
    pos, y = call.operand(0), call.out
    if not pos.is_dense or not y.is_dense or pos.dtype is not DType.I32:
        return False
    count, cells, window = int(np.prod(pos.shape)), y.shape[-1], int(np.asarray(call.attrs["window"]))
    words = MASK(positions=pos.address, count=count, cells=cells, window=window, y=y.address)
    steps.add(causal_mask, words, reads=[pos], writes=[y])
    return True


BINDINGS = {
    "sum_rows": _reduced("sum_rows"),
    "mean": _reduced("mean"),
    "reduce": _reduced("reduce"),
    "cumsum": _running,
    "accumulate": _running,
    "softmax": _softmax,
    "top_k": _top_k,
    "causal_mask": _causal_mask,
}
