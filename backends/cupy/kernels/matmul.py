"""Matrix products, also with the experts that a router chose: which kernels take them, and in what tiles."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ....graph.dtypes import DType
from ...base import contiguous_strides
from ...chains import gated_unit, summed_experts, with_other
from ...flow import Flow, apart, lies_as
from ...operands import Bound, Operand, need
from ..binding.chains import Fused
from ..binding.launches import Binding, Launches, Word, blocks, rows_of
from ..binding.packing import PACKINGS
from ..device.driver import Source
from . import dense, packed, products, tiled
from .elementwise import as_float
from .routes import ALONE, MOST_PRODUCTS, UNITS, Products, Summed

ROUTES = Source("routes.cu", ("routes",), ("routes.cuh",))
SOURCES = (ROUTES, *dense.SOURCES, *packed.SOURCES, *tiled.SOURCES)
FEW = 4
"""Rows of x of a matrix up to which single threads keep up with memory; for more there are tensor cores."""
MOST = 65535
"""Entries, or tiles, of a launch."""
Many = Callable[..., None]
"""Multiplies the tiles of a table: x, out, tiles, route."""


def _is_packed(w: Operand) -> bool:
    return w.dtype in PACKINGS and w.is_whole


def _as_stored(launches: Launches, w: Operand) -> Operand:
    """A weight as kernels here read it: packed, or of a float type with dense rows."""
    if _is_packed(w):
        return w
    return w if w.dtype in dense.BY_TYPE else as_float(launches, w)


def _is_read(w: Operand) -> bool:
    """Whether it is multiplied with few rows as it is stored."""
    return _is_packed(w) or (w.dtype in dense.BY_TYPE and w.strides[-1] == 1)


def _has_tiles(w: Operand) -> bool:
    """Whether tensor cores multiply it."""
    return _is_packed(w) or w.dtype in tiled.FLOATS


def _tiles(launches: Launches, w: Operand, entries: float, matrices: int, is_even: bool) -> tuple[int, Many]:
    """How many entries a tile has at most if each matrix has so many, or on the average, and who multiplies them."""
    if found := tiled.shape_of_tiles(launches, w, entries, matrices, is_even):
        tile, shares = found
        return tile.entries, partial(tiled.many, launches, w, tile=tile, shares=shares)
    shape = packed.shape_of_tiles(entries)
    return 8 * shape[0], partial(packed.many, launches, w, shape=shape)


def _few(
    launches: Launches, products: Products, x: Operand, n: int, tokens: int, route: list[Word], unit: int = ALONE
) -> None:
    (packed if _is_packed(products[0][0]) else dense).few(launches, products, x, n, tokens, route, unit)


# -------------------------------------------------------------------------------------------------------- mul_mat


def _matrix_of(w: Operand, x: Operand) -> npt.NDArray[np.int32]:
    """The matrix of each leading entry of `x`: each serves a run of neighbours along every axis."""
    leading = x.shape[:-2]
    sizes = (1,) * (len(leading) - len(w.shape) + 2) + w.shape[:-2]
    matrices = np.arange(math.prod(sizes), dtype=np.int32).reshape(sizes)
    for axis, (n, m) in enumerate(zip(sizes, leading, strict=True)):
        matrices = np.repeat(matrices, m // n if n else 0, axis=axis)
    return matrices.reshape(-1)


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
        route: list[Word] = [1, 1, launches.constant(matrices) if count > 1 else 0, 0, count, count, 0, 0]
        return _few(launches, [(w, out)], x, len(matrices), tokens, route)
    size, many = _tiles(launches, w, tokens, len(matrices), is_even=True)
    tiles = [
        (matrix, entry * tokens + first, min(size, tokens - first), 0)
        for entry, matrix in enumerate(matrices.tolist())
        for first in range(0, tokens, size)
    ]
    need(len(tiles) <= MOST, f"{len(tiles)} tiles are too many for one launch")
    many(x, out, launches.constant(np.array(tiles, np.int32).reshape(-1, 4)), route=[0, 1, 1])


def _lies_evenly(w: Operand) -> bool:
    """Whether its matrices are one step apart."""
    axes = [(n, s) for n, s in zip(w.shape[:-2], w.strides[:-2], strict=True) if n != 1]
    return all(outer == n * inner for (_, outer), (n, inner) in pairwise(axes))


# ----------------------------------------------------------------------------------------------------- mul_mat_id


def _mul_mat_id(launches: Launches, call: Bound) -> None:
    w, x, out = _as_stored(launches, call.operand(0)), as_float(launches, call.operand(1)), call.out
    need(w.strides[-1] == 1 or w.shape[-1] == 1, "rows of experts are not dense")
    rows_of(x), rows_of(out)
    experts, total, slots = w.shape[0], _experts(call), math.prod(call.operand(2).shape)
    spread, choice = _routed(launches, call)
    if _are_few_of_each(call) or not _has_tiles(w):
        need(slots <= MOST, f"{slots} slots are too many for one launch")
        return _few(launches, [(w, out)], x, slots, 1, [*spread, *choice])
    size, many = _tiles(launches, w, slots / total, experts, is_even=False)
    count = experts + 1 + slots // size
    need(count <= MOST, f"{count} tiles are too many for one launch")
    tiles, order = launches.scratch((count, 4), DType.I32), launches.scratch((slots,), DType.I32)
    threads = min(1024, blocks(max(slots, experts + 1), 32) * 32)
    launches.add(ROUTES["routes"], 1, threads, [slots, size, count, tiles, order, *choice], 8 * (experts + 1))
    many(x, out, tiles, route=[order, *spread])


def _experts(call: Bound) -> int:
    """How many there are on all devices."""
    return int(np.asarray(call.attrs["total"])) or call.operand(0).shape[0]


def _are_few_of_each(call: Bound) -> bool:
    """Whether hardly two slots go to one expert."""
    return math.prod(call.operand(2).shape) <= max(FEW, _experts(call) // 2)


def _routed(launches: Launches, call: Bound) -> tuple[list[Word], list[Word]]:
    """Which row of x a slot has, and the fields of `Choice`."""
    x, ids, total = call.operand(1), call.operand(2), _experts(call)
    need(ids.is_dense, "ids of experts do not lie densely")
    flat = replace(ids, tensor=replace(ids.tensor, shape=(math.prod(ids.shape),), strides=(1,)))
    first = int(np.asarray(call.attrs["first"]))
    fault = launches.fault(f"id {{value}} is none of {total} experts")
    return [ids.shape[-1], x.shape[-2]], [flat, first, call.operand(0).shape[0], total, *fault]


# --------------------------------------------------------------------------------------------------------- chains


def _launch_together(
    launches: Launches, flow: Flow, numbers: Sequence[int], outs: Sequence[Operand], unit: int
) -> None:
    """Products of the same few rows."""
    calls = [flow.call(n) for n in numbers]
    need(all(call.op == "mul_mat" for call in calls), "something else makes a result")
    w, x = calls[0].operand(0), calls[0].operand(1)
    tokens = math.prod(x.shape[:-1])
    need(x.is_float and x.has_rows and 0 < tokens <= FEW, "rows of x are many, or do not lie evenly")
    for call in calls:
        matrix = call.operand(0)
        need(lies_as(call.operand(1), x), "other rows are multiplied")
        need(matrix.dtype is w.dtype and matrix.shape[-1] == w.shape[-1] and len(matrix.shape) == 2, "weights differ")
        need(_is_read(matrix), "weights are not read so")
    for out in outs:
        need(out.is_dense, "results are not dense")
        apart(out, [x])
    route: list[Word] = [1, 1, 0, 0, 1, 1, 0, 0]
    # The second result of a unit is not written.
    results = [*outs, *[call.out for call in calls[len(outs) :]]]
    products = [(call.operand(0), _by_row(out)) for call, out in zip(calls, results, strict=True)]
    _few(launches, products, x, 1, tokens, route, unit)


def _by_row(out: Operand) -> Operand:
    """Dense `out` as a matrix."""
    shape = math.prod(out.shape[:-1]), out.shape[-1]
    return replace(out, tensor=replace(out.tensor, shape=shape, strides=contiguous_strides(shape)))


def _unit_of(flow: Flow, number: int) -> int | None:
    """The gated unit that alone reads a product."""
    readers = flow.found(number)
    return readers[0] if readers and len(readers) == 1 and flow.call(readers[0]).op in UNITS else None


def _gated(flow: Flow, number: int) -> tuple[tuple[int, ...], int]:
    """Two products and what joins them."""
    products, unit = gated_unit(flow, number, UNITS)
    need(len(products) == 2 and all(flow.makes(p, unit, k) for k, p in enumerate(products)), "a part is read")
    need(all(flow.call(p).out.shape == flow.call(unit).out.shape for p in products), "shapes differ")
    return products, unit


def _gated_unit(launches: Launches, flow: Flow, number: int) -> Sequence[int]:
    """Two products and what joins them."""
    products, unit = _gated(flow, number)
    call = flow.call(unit)
    _launch_together(launches, flow, products, [call.out], UNITS[call.op])
    return *products, unit


def _unit_of_experts(launches: Launches, flow: Flow, number: int) -> Sequence[int]:
    """Two products with the weights of chosen experts and what joins them."""
    products, unit = _gated(flow, number)
    (gate, up), out = map(flow.call, products), flow.call(unit).out
    w, x, ids = gate.operand(0), gate.operand(1), gate.operand(2)
    same = lies_as(up.operand(1), x) and lies_as(up.operand(2), ids) and dict(gate.attrs) == dict(up.attrs)
    need(same and up.operand(0).shape == w.shape and up.operand(0).dtype is w.dtype, "experts or their rows differ")
    weights = [call.operand(0) for call in (gate, up)]
    need(all(map(_is_read, weights)), "weights are not read so")
    need(_are_few_of_each(gate) and math.prod(ids.shape) <= MOST, "slots are many")
    need(x.is_float and out.is_dense, "operands do not lie densely")
    apart(out, [x, ids])
    spread, choice = _routed(launches, gate)
    made = [(m, _by_row(o)) for m, o in zip(weights, (out, up.out), strict=True)]
    _few(launches, made, x, math.prod(ids.shape), 1, [*spread, *choice], UNITS[flow.call(unit).op])
    return *products, unit


def _of_the_same_rows(launches: Launches, flow: Flow, number: int) -> Sequence[int]:
    """As many products of the same rows as can run together, but none that belongs to a gated unit."""
    own = flow.call(number)
    need(_unit_of(flow, number) is None, "it belongs to a gated unit")
    chosen = [number]
    for other in flow.readers_of(flow.maker(number, 1)):
        call = flow.call(other)
        alike = other > number and call.op == "mul_mat" and lies_as(call.operand(1), own.operand(1))
        if not alike or len(chosen) == MOST_PRODUCTS or _unit_of(flow, other) is not None:
            continue
        same = call.operand(0).dtype is own.operand(0).dtype and len(call.operand(0).shape) == 2
        if same and flow.can_meet([*chosen, other]):
            chosen.append(other)
    need(len(chosen) > 1, "no other product has these rows")
    _launch_together(launches, flow, chosen, [flow.call(n).out for n in chosen], ALONE)
    return chosen


def _launch_sum(
    launches: Launches, down: Bound, total: Bound, out: Operand, other: Bound | None = None, gate: Operand | None = None
) -> None:
    """What the experts answer, each times its share, added up; and what another one does."""
    w, x, ids, shares = down.operand(0), down.operand(1), down.operand(2), total.operand(1)
    used, width, answers = ids.shape[-1], w.shape[-2], total.operand(0)
    tokens = math.prod(ids.shape) // used if used else 0
    need(answers.shape[-2:] == (width, used) and answers.strides[-2] == 1, "answers are not added up")
    need(
        x.is_float and x.is_dense and x.shape[-2] == used and shares.is_float and shares.is_dense,
        "rows of x are shared",
    )
    need(shares.shape[-2:] == (1, used) and shares.tensor.spec.size == tokens * used, "shares are of others")
    need(_is_read(w) and len(w.shape) == 3 and tokens and _are_few_of_each(down), "slots are many")
    need(out.is_dense and out.tensor.spec.size == tokens * width and tokens <= MOST, "results are not dense")
    matrix = other_x = None
    if other is not None:
        matrix, other_x = other.operand(0), other.operand(1)
        need(_is_read(matrix) and len(matrix.shape) == 2, "weights are not read so")
        need(matrix.shape == w.shape[1:] and matrix.dtype is w.dtype, "the other expert is of another kind")
        need(other_x.is_float and other_x.has_rows and math.prod(other_x.shape[:-1]) == tokens, "its rows are others")
        need(gate is None or (gate.is_float and gate.has_rows and gate.tensor.spec.size == tokens), "shares differ")
    apart(out, [x, ids, shares, other_x, gate])
    by_token = replace(shares, tensor=replace(shares.tensor, shape=(tokens, used), strides=(used, 1)))
    summed = Summed(by_token, _routed(launches, down)[1], matrix, other_x, gate)
    (packed if _is_packed(w) else dense).summed(launches, w, x, _by_row(out), summed)


def _sum_of_experts(launches: Launches, flow: Flow, number: int) -> Sequence[int]:
    """What chosen experts answer, weighed."""
    chain = summed_experts(flow, number)
    down, total = map(flow.call, chain)
    _launch_sum(launches, down, total, total.out)
    return chain


def _sum_with_other(launches: Launches, flow: Flow, number: int) -> Sequence[int]:
    """The same, and what the expert of all tokens answers."""
    chain = with_other(flow, number)
    down, total, both, other = (flow.call(n) for n in chain[:4] if n is not None)
    gate = None if chain.logistic is None else flow.call(chain.logistic).operand(0)
    _launch_sum(launches, down, total, both.out, other, gate)
    return chain.numbers


FUSED: Mapping[str, Sequence[Fused]] = {
    "mul_mat": (_gated_unit, _of_the_same_rows),
    "mul_mat_id": (_unit_of_experts, _sum_of_experts, _sum_with_other),
}
BINDINGS: Mapping[str, Binding] = {"mul_mat": _mul_mat, "mul_mat_id": _mul_mat_id}
