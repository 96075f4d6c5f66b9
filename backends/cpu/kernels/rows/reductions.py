"""Running reductions and selections over rows, and the causal mask."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

import numpy as np

from .....graph.dtypes import DType
from ....fusion.operands import BoundInstruction
from ...compilation.compiler import Kernel, kernel, subroutine
from ...compilation.kernel_args import declare_args
from ...simd.vectors import (
    LANES,
    Intrinsic,
    add,
    greater_or_nan_bitmask,
    lane_0,
    larger,
    load_int,
    load_scalar,
    mul,
    smaller,
    splat,
    splat_from,
    store_int,
    store_scalar,
)
from ...steps.partition import compute_thread_range
from ...steps.step_table import StepTableBuilder
from ..vector.elementwise import load_lanes, make_row_args, make_whole_row_args_and_dense_copy

FLOAT_ONE, FLOAT_ZERO, MINUS_INFINITY = np.float32(1), np.float32(0), np.float32(-np.inf)


SUM_ARGS = make_row_args("x y")


FOLD_OPERATIONS: Mapping[str, tuple[Intrinsic, float]] = MappingProxyType(
    {"sum": (add, 0.0), "prod": (mul, 1.0), "max": (larger, -np.inf), "min": (smaller, np.inf)}
)
"""For each kind: the operation on two vectors, and its neutral element."""


@cache
def make_running_reduction_kernel(kind: str) -> Kernel:
    """Make the kernel that computes running reductions of each row, such as a cumulative sum.

    ``y[c] = x[0] op ... op x[c]``, in which `kind` names the operation.
    """
    join, start = FOLD_OPERATIONS[kind]
    neutral = np.float32(start)

    def body(a, thread, threads):
        n = SUM_ARGS.columns(a)
        lo, hi = compute_thread_range(SUM_ARGS.rows(a), thread, threads)
        for i in range(lo, hi):
            x, y, acc = SUM_ARGS.x(a, i), SUM_ARGS.y(a, i), splat(neutral)
            for c in range(n):
                acc = join(acc, splat_from(x + 4 * c))
                store_scalar(y + 4 * c, lane_0(acc))
        return 0

    return Kernel(f"reductions.running.{kind}", body)


@subroutine
def is_before_descending_with_nan_last(value, other):
    """Return whether `value` comes before `other` in a descending sort that puts NaN last."""
    return value > other or (other != other and value == value)


TOP_K_ARGS = declare_args("rows x step n y pace k")


@kernel
def find_top_k_indices(a, thread, threads):
    """Find the indices of the `k` largest of the `n` elements of each row.

    The largest comes first, equal elements keep their order, and NaN is last. 16 elements are skipped at once if all
    are too small. `step` and `pace` are bytes from row to row of x and y.
    """
    x, step, n, y, pace = TOP_K_ARGS.x(a), TOP_K_ARGS.step(a), TOP_K_ARGS.n(a), TOP_K_ARGS.y(a), TOP_K_ARGS.pace(a)
    k = TOP_K_ARGS.k(a)
    lo, hi = compute_thread_range(TOP_K_ARGS.rows(a), thread, threads)
    for i in range(lo, hi):
        row, out = x + i * step, y + i * pace
        count = 0
        for first in range(0, n, LANES):
            if (
                count == k
                and greater_or_nan_bitmask(
                    load_lanes(row, first, n, 4), splat_from(row + 4 * load_int(out + 4 * k - 4))
                )
                == 0
            ):
                continue
            for c in range(first, min(n, first + LANES)):
                value = load_scalar(row + 4 * c)
                at = count
                while at > 0 and is_before_descending_with_nan_last(
                    value, load_scalar(row + 4 * load_int(out + 4 * (at - 1)))
                ):
                    at -= 1
                if at < k:
                    count = min(count + 1, k)
                    for j in range(count - 1, at, -1):
                        store_int(out + 4 * j, load_int(out + 4 * (j - 1)))
                    store_int(out + 4 * at, c)
    return 0


MASK_ARGS = declare_args("positions count cells window y")


@kernel
def make_causal_mask_from_positions(a, thread, threads):
    """Compute the causal attention mask [count, cells] of int32 positions: 0 for visible cells, -inf for others.

    A token sees the cells up to its position; with a `window` other than 0, only the last `window` of them.
    """
    cells, window = MASK_ARGS.cells(a), MASK_ARGS.window(a)
    lo, hi = compute_thread_range(MASK_ARGS.count(a), thread, threads)
    for i in range(lo, hi):
        position, y = load_int(MASK_ARGS.positions(a) + 4 * i), MASK_ARGS.y(a) + 4 * i * cells
        first = max(0, position - window + 1) if window else 0
        for c in range(cells):
            store_scalar(y + 4 * c, FLOAT_ZERO if first <= c and c <= position else MINUS_INFINITY)
    return 0


def _bind_accumulation(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    x, y = call.operand(0), call.out
    walked = make_whole_row_args_and_dense_copy(steps, x, y) if y.shape and y.is_dense_along(-1) else None
    if walked is None:
        return False
    walk, x = walked
    steps.add(
        make_running_reduction_kernel(str(call.attrs.get("kind", "sum"))), SUM_ARGS(walk=walk), reads=[x], writes=[y]
    )
    return True


def _bind_top_k(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    x, y = call.operand(0), call.out
    if not x.is_float or not x.has_uniform_row_stride or not y.is_dense or y.dtype is not DType.I32:
        return False
    k = y.shape[-1]
    rows = int(np.prod(x.shape[:-1]))
    words = TOP_K_ARGS(rows=rows, x=x.address, step=x.row_stride_bytes, n=x.shape[-1], y=y.address, pace=4 * k, k=k)
    steps.add(find_top_k_indices, words, reads=[x], writes=[y])
    return True


def _bind_causal_mask(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    pos, y = call.operand(0), call.out
    if not pos.is_dense or not y.is_dense or pos.dtype is not DType.I32:
        return False
    count, cells, window = int(np.prod(pos.shape)), y.shape[-1], int(np.asarray(call.attrs["window"]))
    words = MASK_ARGS(positions=pos.address, count=count, cells=cells, window=window, y=y.address)
    steps.add(make_causal_mask_from_positions, words, reads=[pos], writes=[y])
    return True


BINDINGS = {
    "cumsum": _bind_accumulation,
    "accumulate": _bind_accumulation,
    "top_k": _bind_top_k,
    "causal_mask": _bind_causal_mask,
}
