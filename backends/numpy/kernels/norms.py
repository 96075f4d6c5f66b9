"""Norms of rows."""

from __future__ import annotations

from functools import cache

import numpy as np

from ..compiler import Kernel, part
from ..steps import Binding, Bound, Steps
from .packing import share
from .rows import HEAD, OPERAND, lanes, put, row_address, rows_of
from .simd import LANES, add, fma, mul, splat, sqrt_scalar, total, word, zeros
from .simd import float_word as number

EPS = HEAD + 2 * OPERAND
"""The word after the operands."""
ONE = np.float32(1)


@part
def sum_of_squares(x, n):
    first, second = zeros(), zeros()
    c = 0
    while c + 2 * LANES <= n:
        v, w = lanes(x, c, n, 4), lanes(x, c + LANES, n, 4)
        first, second = fma(v, v, first), fma(w, w, second)
        c += 2 * LANES
    while c < n:
        v = lanes(x, c, n, 4)
        first = fma(v, v, first)
        c += LANES
    return total(add(first, second))


@part
def rms_factor(squares, n, eps):
    return ONE / sqrt_scalar(squares / np.float32(n) + eps)


@part
def l2_factor(squares, n, eps):
    """At least eps below the line, as ggml has it."""
    return ONE / max(sqrt_scalar(squares), eps)


@part
def l2_factor_added(squares, n, eps):
    return ONE / sqrt_scalar(squares + eps)


FACTORS = {"rms_norm": rms_factor, "l2_norm": l2_factor, "l2_norm_added": l2_factor_added}


@cache
def norm(name: str) -> Kernel:
    """Each row times one number that follows from its sum of squares.  Words: HEAD, source, target, eps."""
    factor = FACTORS[name]

    def body(a, thread, threads):
        n, eps = word(a, 0), number(a, EPS)
        lo, hi = share(word(a, 1) * word(a, 2) * word(a, 3), thread, threads)
        for i in range(lo, hi):
            x, y = row_address(a, 0, i), row_address(a, 1, i)
            f = splat(factor(sum_of_squares(x, n), n, eps))
            for c in range(0, n, LANES):
                put(y, c, n, mul(lanes(x, c, n, 4), f))
        return 0

    return Kernel(f"norms.norm.{name}", body)


def _bind(name: str) -> Binding:
    def bind(steps: Steps, call: Bound) -> bool:
        x, y = call.operand(0), call.out
        kind = "l2_norm_added" if name == "l2_norm" and not call.attrs["clamp"] else name
        words = rows_of(y.shape, [x, y], whole_rows=True) if x.is_float else None
        if words is None or words[HEAD + 4] != 4 or words[HEAD + OPERAND + 4] != 4:
            return False
        steps.add(norm(kind), [*words, call.float("eps")], reads=[x], writes=[y])
        return True

    return bind


BINDINGS = {name: _bind(name) for name in ("rms_norm", "l2_norm")}
