"""NumPy kernels of matrix products, by BLAS."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np

from ...graph.node import Node
from ...ops.collectives import narrow_to_integer
from ...ops.movement.sharded_tables import to_local_rows
from ..base import Array
from ..host.bindings import Binding, Calls, HostInstruction, make_binding_without_scratch

MAX_WIDENED_ENTRIES = 1 << 22
"""Maximum entries of a matrix that are converted to float64 at a time."""
EXPERT_BLOCK_ROWS = 256
"""Maximum rows that one expert multiplies at a time, so that scratch does not grow with the batch."""


def bind_mul_mat(call: HostInstruction) -> Calls:
    """Return the NumPy calls that compute ``x @ w.T``. Several adjacent matrices of `x` may share a matrix of `w`.

    Terms are summed in float64 and rounded once, so results hardly depend on the distribution of the terms over
    devices.
    """
    w, x, out = call.operand(0), call.operand(1), call.out
    if w.ndim == 2 and x.ndim > 2:  # one matrix for all rows: one large product instead of many
        with suppress(ValueError):  # strides that do not merge
            x, out = x.reshape(-1, x.shape[-1], copy=False), out.reshape(-1, out.shape[-1], copy=False)
    leading = x.ndim - 2
    entries = (1,) * (leading - (w.ndim - 2)) + w.shape[:-2]
    w = w.reshape(tuple(n for m in entries for n in (m, 1)) + w.shape[-2:], copy=False)
    shape = tuple(n for m, total in zip(entries, x.shape[:-2], strict=True) for n in (m, total // m if m else 0))
    x, out = x.reshape(shape + x.shape[-2:], copy=False), out.reshape(shape + out.shape[-2:], copy=False)
    rows = max(1, MAX_WIDENED_ENTRIES // max(1, w.shape[-1]))
    starts = range(0, w.shape[-2], rows)
    return [partial(multiply_in_float64, x, w[..., at : at + rows, :], out[..., at : at + rows]) for at in starts]


def bind_out_prod(call: HostInstruction) -> Calls:
    """Return the NumPy calls that compute ``b.T @ a``, as the matrix product of the transposed operands."""
    a, b = (np.swapaxes(call.operand(i), -1, -2) for i in range(2))
    return bind_mul_mat(replace(call, src=[a, b]))


def multiply_in_float64(x: Array, w: Array, out: Array) -> None:
    """Compute the matrix product ``x @ w.T`` with sums in float64, and write it to `out`."""
    wide = np.matmul(x.astype(np.float64), np.swapaxes(w.astype(np.float64), -1, -2))
    np.copyto(out, wide, casting="same_kind")


def bind_mul_mat_id(call: HostInstruction) -> Calls:
    """Return the NumPy calls that multiply the rows of tokens with the weights of their experts.

    The result is 0 for an expert on another device. For each used expert, the rows of its tokens are gathered,
    multiplied at once, and scattered to the result.
    """
    w, x, ids, out = call.operand(0), call.operand(1), call.operand(2), call.out
    if not x.shape[-1]:
        return [partial(np.copyto, out, np.float32(0))]  # sums of nothing
    rows, first = _flatten_leading_axes(x)
    used, shared = ids.shape[-1], x.shape[-2]
    block = min(EXPERT_BLOCK_ROWS, ids.size)
    gathered, products = call.take_scratch(block, x.shape[-1]), call.take_scratch(block, w.shape[1])
    # Slot i of a token reads row i mod shared of it.
    entry = np.arange(ids.size)
    source = entry // used * shared + entry % used % shared
    part = {name: narrow_to_integer(call.attrs[name]) for name in ("first", "total")}
    own = partial(to_local_rows, ids, count=len(w), subject="ids of experts", **part)
    return [
        *first,
        partial(_multiply_experts, w, rows, own, out.reshape(-1, w.shape[1], copy=False), source, gathered, products),
    ]


def _flatten_leading_axes(x: Array) -> tuple[Array, Calls]:
    """Flatten the leading axes of `x` to one axis: return a matrix, and the calls that fill it in each run.

    There are no calls if a view is possible. Otherwise the matrix is a copy.
    """
    with suppress(ValueError):
        return x.reshape(-1, x.shape[-1], copy=False), []
    dense = np.empty(x.shape, x.dtype)
    return dense.reshape(-1, x.shape[-1]), [partial(np.copyto, dense, x)]


def _multiply_experts(
    w: Array, rows: Array, own: Callable[[], Array], out: Array, source: Array, gathered: Array, products: Array
) -> None:
    chosen = own().reshape(-1)
    order = np.argsort(chosen, kind="stable")
    bounds = [0, *(np.flatnonzero(np.diff(chosen[order])) + 1).tolist(), len(order)]
    for start, stop in pairwise(bounds):
        if chosen[order[start]] < 0:
            out[order[start:stop]] = 0
            continue
        matrix = w[chosen[order[start]]].T
        for at in range(start, stop, len(gathered)):
            mine = order[at : min(at + len(gathered), stop)]
            if len(mine) == 1:
                np.matmul(rows[source[mine[0]]], matrix, out=out[mine[0]])
                continue
            part, product = gathered[: len(mine)], products[: len(mine)]
            np.take(rows, source[mine], axis=0, out=part, mode="clip")
            np.matmul(part, matrix, out=product)
            out[mine] = product


def _count_expert_scratch(node: Node) -> int:
    w, x, ids = (v.spec for v in node.inputs)
    return min(EXPERT_BLOCK_ROWS, ids.size) * (x.shape[-1] + w.shape[1])


KERNELS: Mapping[str, Binding] = {
    "mul_mat": make_binding_without_scratch(bind_mul_mat),
    "out_prod": make_binding_without_scratch(bind_out_prod),
    "mul_mat_id": Binding(bind_mul_mat_id, _count_expert_scratch),
}
