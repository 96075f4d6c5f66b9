"""The CPU kernel: each thread computes its share of the rows, 16 columns at a time."""

from __future__ import annotations

import numpy as np

from hocket.backends.cpu.compilation.compiler import kernel
from hocket.backends.cpu.kernels.vector.elementwise import (
    load_lanes,
    make_row_args,
    store_lanes,
)
from hocket.backends.cpu.kernels.vector.row_loops import ELEMENT_STRIDE_WORDS, make_row_loop_args
from hocket.backends.cpu.simd.vectors import LANES, add, lane_sum, splat, sub, zeros
from hocket.backends.cpu.steps.partition import compute_thread_range
from hocket.backends.cpu.steps.step_table import StepTableBuilder
from hocket.backends.fusion.operands import BoundInstruction

ARGS = make_row_args("x y")


@kernel
def subtract_mean(a, thread, threads):  # type: ignore[no-untyped-def]  # Numba infers the types
    """Compute ``y = x - mean(x)``, row by row."""
    n = ARGS.columns(a)
    first, last = compute_thread_range(ARGS.rows(a), thread, threads)
    for i in range(first, last):
        x, y = ARGS.x(a, i), ARGS.y(a, i)
        sums = zeros()
        for c in range(0, n, LANES):
            sums = add(sums, load_lanes(x, c, n, 4))  # beyond the row lanes are zeros
        mean = splat(lane_sum(sums) / np.float32(n))
        for c in range(0, n, LANES):
            store_lanes(y, c, n, sub(load_lanes(x, c, n, 4), mean))
    return 0


def bind(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    """Add the kernel for one call; return False if rows are not dense float32, so that NumPy computes the op."""
    x, y = call.operand(0), call.out
    walk = make_row_loop_args(y.shape, [x, y], whole_rows=True) if x.is_float else None
    if walk is None or walk[ELEMENT_STRIDE_WORDS] != [4, 4]:
        return False
    steps.add(subtract_mean, ARGS(walk=walk), reads=[x], writes=[y])
    return True
