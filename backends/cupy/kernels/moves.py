"""Kernels that move entries: copies, padding, gathers and scatters of rows, and triangles."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ....graph.dtypes import DType
from ....ops.declaration.shape_rules import integers_attribute
from ....ops.elementwise.generators import arange
from ...operands import Bound, Operand, need
from ..binding.axes import axes_of, expanded, row_heads
from ..binding.launches import Binding, Launches, Word, blocks
from ..binding.packing import PACKINGS
from ..device.driver import Source
from .elementwise import CELLS, MOST_ELEMENTS, THREADS, TYPES, as_float, launch_binary, launch_cast, launch_map, spread
from .products import packed

BITS = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}
IDS = {DType.I32: "i32", DType.I64: "i64"}
ZEROS, AROUND, MIRRORED = range(3)
SOURCE = Source(
    "moves.cu",
    (
        *(f"{kernel}<{t}>" for kernel in ("copied", "shifted") for t in BITS.values()),
        *(f"gather<{t}, {i}>" for t in TYPES.values() for i in IDS.values()),
        *(f"scatter<{TYPES[t]}, {i}>" for t in CELLS for i in IDS.values()),
        *("add_rows", "band"),
    ),
    ("columns.cuh", "cells.cuh", "elements.cuh"),
)
SOURCES = (SOURCE,)


def launch_copy(launches: Launches, x: Operand, out: Operand) -> None:
    """Copy `x` to `out`, broadcast to its shape; another dtype is converted."""
    if x.dtype is not out.dtype:
        return launch_cast(launches, x, out)
    launch_map(launches, SOURCE[f"copied<{_bits(x)}>"], [x], out, [])


def _bits(x: Operand) -> str:
    need(not x.dtype.is_quantised, f"copies of {x.dtype} are missing")
    return BITS[x.dtype.storage.itemsize]


def _copy(launches: Launches, call: Bound) -> None:
    launch_copy(launches, call.operand(0), call.out)


def _concat(launches: Launches, call: Bound) -> None:
    a, b, out = call.operand(0), call.operand(1), call.out
    axis = int(np.asarray(call.attrs["axis"])) % len(out.shape)
    launch_copy(launches, a, out.part(axis, 0, a.shape[axis]))
    launch_copy(launches, b, out.part(axis, a.shape[axis], b.shape[axis]))


# ------------------------------------------------------------------------------------------------- shifted axes


def _launch_shifted(launches: Launches, x: Operand, out: Operand, shifts: Sequence[int], how: int) -> None:
    """Launch a copy with shifted indices along each axis; `how` selects the values outside of x."""
    if x.dtype is not out.dtype:
        x = as_float(launches, x)
    count, rank = math.prod(out.shape), len(out.shape)
    need(count < MOST_ELEMENTS, f"a result of {count} elements is too large for one launch")
    filled = [(*values, *([1] * (5 - rank))) for values in (out.shape, x.shape, shifts, x.strides)]
    words: list[Word] = [count, rank, how, *(word for values in filled for word in values), x, out]
    launches.add(SOURCE[f"shifted<{_bits(x)}>"], blocks(count, THREADS), THREADS, words)


def _pad(launches: Launches, call: Bound) -> None:
    how = AROUND if call.attrs["circular"] else ZEROS
    _launch_shifted(launches, call.operand(0), call.out, integers_attribute(call.attrs, "left"), how)


def _roll(launches: Launches, call: Bound) -> None:
    _launch_shifted(launches, call.operand(0), call.out, integers_attribute(call.attrs, "shifts"), AROUND)


def _pad_reflect(launches: Launches, call: Bound) -> None:
    left = int(np.asarray(call.attrs["left"]))
    shifts = [*([0] * (len(call.out.shape) - 1)), left]
    _launch_shifted(launches, call.operand(0), call.out, shifts, MIRRORED)


# ------------------------------------------------------------------------------------------------------ regions


def _region(call: Bound) -> Operand:
    """Return the part of the result at `offsets`, with the shape of the second operand."""
    region = call.out
    for axis, (start, n) in enumerate(
        zip(integers_attribute(call.attrs, "offsets"), call.operand(1).shape, strict=True)
    ):
        region = region.part(axis, start, n)
    return region


def begin_with(launches: Launches, x: Operand, out: Operand) -> None:
    """Copy `x` to `out`, unless they are the same memory."""
    if x.address != out.address:
        launch_copy(launches, x, out)


def _set(launches: Launches, call: Bound) -> None:
    begin_with(launches, call.operand(0), call.out)
    launch_copy(launches, call.operand(1), _region(call))


def _acc(launches: Launches, call: Bound) -> None:
    begin_with(launches, call.operand(0), call.out)
    region = _region(call)
    launch_binary(launches, "add", region, call.operand(1), region)


# --------------------------------------------------------------------------------------------------------- rows


def _row_threads(columns: int) -> int:
    return min(256, max(32, blocks(columns, 32) * 32))


def _get_rows(launches: Launches, call: Bound) -> None:
    table, ids, out = call.operand(0), call.operand(1), call.out
    if table.dtype in PACKINGS and table.is_whole and len(table.shape) == 2:
        return packed.get_rows(launches, call)
    if table.dtype in PACKINGS:
        table = packed.expanded(launches, table)
    need(table.dtype in TYPES, f"rows of {table.dtype} are missing")
    need(ids.dtype in IDS, f"ids of type {ids.dtype} are missing")
    *leading, rows, columns = table.shape
    heads = _with_axes(table, (*leading, 1), (*table.strides[:-2], 0))
    axes = axes_of(ids.shape, [heads, ids, row_heads(out)])
    words: list[Word] = [rows, columns, *table.strides[-2:], *axes.words, *axes.walk(0, table), *axes.walk(1, ids)]
    words += [*axes.walk(2, out), *launches.fault(f"id {{value}} names no row of its table, which has {rows}")]
    kernel = SOURCE[f"gather<{TYPES[table.dtype]}, {IDS[ids.dtype]}>"]
    launches.add(kernel, axes.count, _row_threads(columns), words)


def _with_axes(x: Operand, shape: Sequence[int], strides: Sequence[int]) -> Operand:
    return replace(x, tensor=replace(x.tensor, shape=tuple(shape), strides=tuple(strides)))


def _set_rows(launches: Launches, call: Bound) -> None:
    into, rows, ids, out = call.operand(0), call.operand(1), call.operand(2), call.out
    need(ids.dtype in IDS, f"ids of type {ids.dtype} are missing")
    rows = as_float(launches, rows)
    begin_with(launches, into, out)
    heads = row_heads(rows)
    table = _with_axes(out, (*out.shape[:-2], 1), (*out.strides[:-2], 0))
    shape, (table_of, ids_of, rows_of) = expanded(heads.shape, [table, ids, heads], divides=1)
    axes = axes_of(shape, [table_of, ids_of, rows_of])
    words: list[Word] = [
        out.shape[-2],
        out.shape[-1],
        out.strides[-2],
        rows.strides[-1],
        *axes.words,
        *axes.walk(0, out),
    ]
    words += [*axes.walk(1, ids), *axes.walk(2, rows)]
    words += launches.fault(f"id {{value}} names no row of its table, which has {out.shape[-2]}")
    launches.add(
        SOURCE[f"scatter<{TYPES[out.dtype]}, {IDS[ids.dtype]}>"], axes.count, _row_threads(out.shape[-1]), words
    )


def _add_id(launches: Launches, call: Bound) -> None:
    x, ids, out = as_float(launches, call.operand(0)), call.operand(2), call.out
    table = as_float(launches, call.operand(1))
    first, total = (int(np.asarray(call.attrs[name])) for name in ("first", "total"))
    axes = axes_of(ids.shape, [row_heads(x), ids, row_heads(out)])
    own, columns = table.shape
    words: list[Word] = [first, own, total or own, columns, x.strides[-1], *table.strides, *axes.words]
    words += [*axes.walk(0, x), *axes.walk(1, ids), *axes.walk(2, out), table]
    words += launches.fault(f"id {{value}} is none of {total or own} experts")
    launches.add(SOURCE["add_rows"], axes.count, _row_threads(columns), words)


# ------------------------------------------------------------------------------------------- triangles, numbers

_FAR = 2**40
_KEPT = {"upper_diag": (0, _FAR), "upper": (1, _FAR), "lower_diag": (-_FAR, 0), "lower": (-_FAR, -1)}


def _launch_band(launches: Launches, x: Operand, out: Operand, low: int, high: int, other: float = 0.0) -> None:
    """Copy the entries of a band of diagonals from `low` to `high`, and set the rest to `other`."""
    x = as_float(launches, x)
    axes = axes_of(out.shape, [x, out])
    need(axes.count < MOST_ELEMENTS, f"a result of {axes.count} elements is too large for one launch")
    words: list[Word] = [
        axes.count,
        *out.shape[-2:],
        low,
        high,
        float(other),
        *axes.words,
        *axes.walk(0, x),
        *axes.walk(1, out),
    ]
    launches.add(SOURCE["band"], spread(axes.count), THREADS, words)


def _tri(launches: Launches, call: Bound) -> None:
    _launch_band(launches, call.operand(0), call.out, *_KEPT[str(call.attrs["kind"])])


def _diag_mask_inf(launches: Launches, call: Bound) -> None:
    past = int(np.asarray(call.attrs["n_past"]))
    _launch_band(launches, call.operand(0), call.out, -_FAR, past, -math.inf)


def _diag(launches: Launches, call: Bound) -> None:
    x = call.operand(0)
    rows = _with_axes(x, (*x.shape[:-1], 1, x.shape[-1]), (*x.strides[:-1], 0, x.strides[-1]))
    _launch_band(launches, rows, call.out, 0, 0)


def _arange(launches: Launches, call: Bound) -> None:
    launch_copy(launches, launches.constant(arange.reference(**call.attrs).astype(np.float32)), call.out)


BINDINGS: Mapping[str, Binding] = {
    "cont": _copy,
    "repeat": _copy,
    "concat": _concat,
    "pad": _pad,
    "roll": _roll,
    "pad_reflect_1d": _pad_reflect,
    "set": _set,
    "acc": _acc,
    "get_rows": _get_rows,
    "set_rows": _set_rows,
    "add_id": _add_id,
    "tri": _tri,
    "diag_mask_inf": _diag_mask_inf,
    "diag": _diag,
    "arange": _arange,
}
