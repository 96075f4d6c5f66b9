"""Matrix products, also with the experts that a router chose: which kernels take them, and in what tiles."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ....graph.dtypes import DType
from ...operands import Bound, Operand
from ..driver import Source
from ..launches import Binding, Launches, Word, blocks, need, rows_of
from ..packing import PACKINGS
from . import dense, packed, products
from .elementwise import as_float

ROUTES = Source("routes.cu", ("routes",), ("routes.cuh",))
SOURCES = (ROUTES, *dense.SOURCES, *packed.SOURCES)
FEW = 4
"""Rows of x of a matrix up to which single threads keep up with memory; for more there are tensor cores."""
MOST = 65535
"""Entries, or tiles, of a launch."""


def _is_packed(w: Operand) -> bool:
    return w.dtype in PACKINGS and w.is_whole


def _as_stored(launches: Launches, w: Operand) -> Operand:
    """A weight as kernels here read it: packed, or of a float type with dense rows."""
    if _is_packed(w):
        return w
    return w if w.dtype in dense.BY_TYPE else as_float(launches, w)


def _has_tiles(w: Operand) -> bool:
    """Whether tensor cores multiply it."""
    return _is_packed(w) or w.dtype in (DType.F16, DType.BF16)


def _tile_size(w: Operand, entries: float) -> int:
    return 8 * packed.shape_of_tiles(entries)[0] if _is_packed(w) else dense.TILE


def _many(
    launches: Launches, w: Operand, x: Operand, out: Operand, tiles: Operand, entries: float, route: list[Word]
) -> None:
    if _is_packed(w):
        packed.many(launches, w, x, out, tiles, packed.shape_of_tiles(entries), route)
    else:
        dense.many(launches, w, x, out, tiles, route)


def _few(launches: Launches, w: Operand, x: Operand, out: Operand, n: int, tokens: int, route: list[Word]) -> None:
    (packed if _is_packed(w) else dense).few(launches, w, x, out, n, tokens, route)


# -------------------------------------------------------------------------------------------------------- mul_mat


def _matrix_of(w: Operand, x: Operand) -> npt.NDArray[np.int32]:
    """The matrix of each leading entry of `x`: each serves a run of neighbours along every axis."""
    leading = x.shape[:-2]
    sizes = (1,) * (len(leading) - len(w.shape) + 2) + w.shape[:-2]
    found = np.arange(math.prod(sizes), dtype=np.int32).reshape(sizes)
    for axis, (n, m) in enumerate(zip(sizes, leading, strict=True)):
        found = np.repeat(found, m // n if n else 0, axis=axis)
    return found.reshape(-1)


def _mul_mat(launches: Launches, call: Bound) -> None:
    w, x, out = _as_stored(launches, call.operand(0)), as_float(launches, call.operand(1)), call.out
    matrices, tokens = _matrix_of(w, x), x.shape[-2]
    if math.prod(w.shape[:-2]) == 1:
        matrices, tokens = np.zeros(1, np.int32), math.prod(x.shape[:-1])
    even = w.strides[-1] == 1 and (len(w.shape) == 2 or _lies_evenly(w)) and len(matrices) <= MOST
    if not _is_packed(w) and (not even or not x.has_rows or (tokens > FEW and not _has_tiles(w))):
        return products.launch_any(launches, w, x, out)
    if tokens <= FEW:
        need(len(matrices) <= MOST, f"{len(matrices)} matrices are too many for one launch")
        count = math.prod(w.shape[:-2])
        # All of them are there, so that nothing can be wrong.
        route: list[Word] = [1, 1, launches.constant(matrices), 0, count, count, 0, 0]
        return _few(launches, w, x, out, len(matrices), tokens, route)
    size = _tile_size(w, tokens)
    tiles = [
        (matrix, entry * tokens + first, min(size, tokens - first), 0)
        for entry, matrix in enumerate(matrices.tolist())
        for first in range(0, tokens, size)
    ]
    need(len(tiles) <= MOST, f"{len(tiles)} tiles are too many for one launch")
    _many(launches, w, x, out, launches.constant(np.array(tiles, np.int32).reshape(-1, 4)), tokens, [0, 1, 1])


def _lies_evenly(w: Operand) -> bool:
    """Whether its matrices are one step apart."""
    axes = [(n, s) for n, s in zip(w.shape[:-2], w.strides[:-2], strict=True) if n != 1]
    return all(outer == n * inner for (_, outer), (n, inner) in pairwise(axes))


# ----------------------------------------------------------------------------------------------------- mul_mat_id


def _mul_mat_id(launches: Launches, call: Bound) -> None:
    w, x, ids, out = (
        _as_stored(launches, call.operand(0)),
        as_float(launches, call.operand(1)),
        call.operand(2),
        call.out,
    )
    need(w.strides[-1] == 1 or w.shape[-1] == 1, "rows of experts are not dense")
    need(ids.is_dense, "ids of experts do not lie densely")
    rows_of(x), rows_of(out)
    first, total = (int(np.asarray(call.attrs[name])) for name in ("first", "total"))
    experts, slots = w.shape[0], math.prod(ids.shape)
    total = total or experts
    spread: list[Word] = [ids.shape[-1], x.shape[-2]]
    flat = replace(ids, tensor=replace(ids.tensor, shape=(slots,), strides=(1,)))
    choice = [flat, first, experts, total, *launches.fault(f"id {{value}} is none of {total} experts")]
    if slots <= max(FEW, total // 2) or not _has_tiles(w):  # hardly two of one expert
        need(slots <= MOST, f"{slots} slots are too many for one launch")
        return _few(launches, w, x, out, slots, 1, [*spread, *choice])
    size = _tile_size(w, slots / total)
    count = experts + 1 + slots // size
    need(count <= MOST, f"{count} tiles are too many for one launch")
    tiles, order = launches.scratch((count, 4), DType.I32), launches.scratch((slots,), DType.I32)
    threads = min(1024, blocks(max(slots, experts + 1), 32) * 32)
    launches.add(ROUTES["routes"], 1, threads, [slots, size, count, tiles, order, *choice], 8 * (experts + 1))
    _many(launches, w, x, out, tiles, slots / total, [order, *spread])


BINDINGS: Mapping[str, Binding] = {"mul_mat": _mul_mat, "mul_mat_id": _mul_mat_id}
