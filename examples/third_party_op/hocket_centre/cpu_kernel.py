"""The CPU kernel: each thread computes its share of the rows, 16 columns at a time."""

from __future__ import annotations

import numpy as np

from hocket.backends.cpu.compiler import kernel
from hocket.backends.cpu.kernels.packing import share
from hocket.backends.cpu.kernels.rows import ELEMENTS, lanes, put, row_words, rows_of
from hocket.backends.cpu.simd.vectors import LANES, add, splat, sub, total, zeros
from hocket.backends.cpu.steps import Steps
from hocket.backends.operands import Bound

ARGS = row_words("x y")


@kernel
def centred(a, thread, threads):  # type: ignore[no-untyped-def]  # Numba infers the types
    """Compute ``y = x - mean(x)``, row by row."""
    n = ARGS.columns(a)
    first, last = share(ARGS.rows(a), thread, threads)
    for i in range(first, last):
        x, y = ARGS.x(a, i), ARGS.y(a, i)
        sums = zeros()
        for c in range(0, n, LANES):
            sums = add(sums, lanes(x, c, n, 4))  # beyond the row lanes are zeros
        mean = splat(total(sums) / np.float32(n))
        for c in range(0, n, LANES):
            put(y, c, n, sub(lanes(x, c, n, 4), mean))
    return 0


def bind(steps: Steps, call: Bound) -> bool:
    """Add the kernel for one call; return False if rows are not dense float32, so that NumPy computes the op."""
    x, y = call.operand(0), call.out
    walk = rows_of(y.shape, [x, y], whole_rows=True) if x.is_float else None
    if walk is None or walk[ELEMENTS] != [4, 4]:
        return False
    steps.add(centred, ARGS(walk=walk), reads=[x], writes=[y])
    return True
