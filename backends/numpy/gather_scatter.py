"""NumPy kernels of data movement: gather, scatter, concatenate, repeat."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import product

import numpy as np

from ...graph.errors import BackendError
from ..base import Array
from ..host.bindings import Binding, Calls, HostInstruction, make_binding_without_scratch
from .expressions import as_tiling_broadcast_views


def bind_get_rows(call: HostInstruction) -> Calls:
    """Return the NumPy calls that gather table rows by ids: check the ids, then copy the rows.

    The check is separate, because ``take`` writes without a temporary only in mode "clip", which accepts wrong ids.
    """
    table, ids, out = call.operand(0), call.operand(1), call.out
    calls: Calls = [partial(_check_ids, ids, table.shape[-2])]
    for i in np.ndindex(table.shape[:-2]):
        if table.dtype == out.dtype:
            calls.append(partial(np.take, table[i], ids[i], axis=0, out=out[i], mode="clip"))
        else:  # the rows of an integer table are converted to float
            calls.append(partial(_take_converted, table[i], ids[i], out[i]))
    return calls


def _take_converted(table: Array, ids: Array, out: Array) -> None:
    out[...] = table[ids]


def _check_ids(ids: Array, rows: int) -> None:
    if ids.size and not 0 <= ids.min() <= ids.max() < rows:
        raise BackendError(f"row ids run from {ids.min()} to {ids.max()}, but there are rows 0 to {rows - 1} only")


def bind_set_rows(call: HostInstruction) -> Calls:
    into, rows, ids, out = call.operand(0), call.operand(1), call.operand(2), call.out
    calls: Calls = [] if np.shares_memory(into, out) else [partial(np.copyto, out, into)]
    leading = rows.shape[:-2]
    calls.append(partial(_check_ids, ids, into.shape[-2]))
    padded = ids.reshape((1,) * (len(leading) - ids.ndim + 1) + ids.shape, copy=False)
    ratios = [m // n if n else 1 for n, m in zip(padded.shape[:-1], leading, strict=True)]
    for i in product(*map(range, leading)):
        mine = padded[tuple(a // r for a, r in zip(i, ratios, strict=True))]
        calls.append(partial(_scatter_rows, out[i], mine, rows[i]))
    return calls


def _scatter_rows(into: Array, ids: Array, rows: Array) -> None:
    into[ids] = rows


def bind_concat(call: HostInstruction) -> Calls:
    a, b, out = call.operand(0), call.operand(1), call.out
    axis = int(call.number_attribute("axis"))
    ahead = (slice(None),) * (axis % a.ndim)
    return [
        partial(np.copyto, out[(*ahead, slice(0, a.shape[axis]))], a),
        partial(np.copyto, out[(*ahead, slice(a.shape[axis], None))], b),
    ]


def bind_repeat(call: HostInstruction) -> Calls:
    out, tile = as_tiling_broadcast_views(call.out.shape, [call.out, call.operand(0)])
    assert out is not None
    assert tile is not None
    return [partial(np.copyto, out, tile)]


KERNELS: Mapping[str, Binding] = {
    "get_rows": make_binding_without_scratch(bind_get_rows),
    "set_rows": make_binding_without_scratch(bind_set_rows),
    "concat": make_binding_without_scratch(bind_concat),
    "repeat": make_binding_without_scratch(bind_repeat),
}
