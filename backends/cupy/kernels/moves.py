"""Kernels that move entries: copies, padding, gathers and scatters of rows, and triangles."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ....graph.dtypes import DType
from ....graph.errors import BackendError
from ....ops.declaration.shape_rules import integers_attribute
from ....ops.elementwise.generators import arange
from ...base import contiguous_strides
from ...fusion.operands import BoundInstruction, Operand, require_supported
from ..binding.iteration_axes import as_row_starts, build_merged_tiling_iteration_axes, split_tiled_axes_for_broadcast
from ..binding.launch_builder import LaunchBuilder, LaunchWord, OpBinder, count_blocks
from ..device.driver import KernelSource
from . import blocks
from .elementwise import (
    CELL_DTYPES,
    CUDA_TYPE_NAMES,
    ELEMENTWISE_THREADS,
    MAX_ELEMENTS,
    READ_TYPE_NAMES,
    as_float,
    count_elementwise_blocks,
    launch_binary,
    launch_cast,
    launch_elementwise,
)
from .products import packed

BITS_TYPE_NAMES = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}
ID_TYPE_NAMES = {DType.I32: "i32", DType.I64: "i64"}
PAD_ZEROS, PAD_CIRCULAR, PAD_REFLECT = range(3)
SOURCE = KernelSource(
    "moves.cu",
    (
        *(f"{kernel}<{t}>" for kernel in ("copied", "shifted") for t in BITS_TYPE_NAMES.values()),
        *(f"gather<{t}, {i}>" for t in READ_TYPE_NAMES.values() for i in ID_TYPE_NAMES.values()),
        *(f"scatter<{CUDA_TYPE_NAMES[t]}, {i}>" for t in CELL_DTYPES for i in ID_TYPE_NAMES.values()),
        *("add_rows", "band"),
    ),
    ("columns.cuh", "cells.cuh", "elements.cuh"),
)
SOURCES = (SOURCE,)


def launch_broadcast_and_convert(launches: LaunchBuilder, x: Operand, out: Operand) -> None:
    """Launch a copy of `x` to `out`: broadcast to its shape, and converted to its dtype."""
    if x.dtype is not out.dtype:
        return launch_cast(launches, x, out)
    if x.dtype.is_quantised:
        x, out = _view_bytes_as_integers(x), _view_bytes_as_integers(out)
    launch_elementwise(launches, SOURCE[f"copied<{_find_bits_type(x)}>"], [x], out, [])


def _view_bytes_as_integers(x: Operand, dtype: DType = DType.I16) -> Operand:
    """View the bytes of `x`, with a dense last axis, as integers of `dtype`, so that integer kernels can copy them."""
    nbytes = dtype.storage.itemsize
    shape = (*x.shape[:-1], x.dtype.count_bytes(x.shape[-1]) // nbytes)
    strides = (*(x.dtype.count_bytes(step) // nbytes for step in x.strides[:-1]), 1)
    return replace(x, tensor=replace(x.tensor, shape=shape, strides=strides, dtype=dtype))


def _find_bits_type(x: Operand) -> str:
    require_supported(not x.dtype.is_quantised, f"copies of {x.dtype} are missing")
    return BITS_TYPE_NAMES[x.dtype.storage.itemsize]


def _bind_copy(launches: LaunchBuilder, call: BoundInstruction) -> None:
    launch_broadcast_and_convert(launches, call.operand(0), call.out)


def _bind_concat(launches: LaunchBuilder, call: BoundInstruction) -> None:
    a, b, out = call.operand(0), call.operand(1), call.out
    axis = int(np.asarray(call.attrs["axis"])) % len(out.shape)
    launch_broadcast_and_convert(launches, a, out.slice_axis(axis, 0, a.shape[axis]))
    launch_broadcast_and_convert(launches, b, out.slice_axis(axis, a.shape[axis], b.shape[axis]))


# ------------------------------------------------------------------------------------------------- shifted axes


def _launch_shifted_copy(
    launches: LaunchBuilder, x: Operand, out: Operand, shifts: Sequence[int], pad_mode: int
) -> None:
    """Launch a copy of `x` with shifted indices along each axis, for padding and rolling.

    Args:
        launches: Receives the launch.
        x: The operand.
        out: The result.
        shifts: For each axis, the index in `out` to which index 0 of `x` goes.
        pad_mode: The values where `x` has no element: `PAD_ZEROS`, `PAD_CIRCULAR` or `PAD_REFLECT`.
    """
    if x.dtype is not out.dtype:
        x = as_float(launches, x)
    count, rank = math.prod(out.shape), len(out.shape)
    require_supported(count < MAX_ELEMENTS, f"a result of {count} elements is too large for one launch")
    filled = [(*values, *([1] * (5 - rank))) for values in (out.shape, x.shape, shifts, x.strides)]
    words: list[LaunchWord] = [count, rank, pad_mode, *(word for values in filled for word in values), x, out]
    launches.add_launch(
        SOURCE[f"shifted<{_find_bits_type(x)}>"], count_blocks(count, ELEMENTWISE_THREADS), ELEMENTWISE_THREADS, words
    )


def _bind_pad(launches: LaunchBuilder, call: BoundInstruction) -> None:
    how = PAD_CIRCULAR if call.attrs["circular"] else PAD_ZEROS
    _launch_shifted_copy(launches, call.operand(0), call.out, integers_attribute(call.attrs, "left"), how)


def _bind_roll(launches: LaunchBuilder, call: BoundInstruction) -> None:
    _launch_shifted_copy(launches, call.operand(0), call.out, integers_attribute(call.attrs, "shifts"), PAD_CIRCULAR)


def _bind_pad_reflect(launches: LaunchBuilder, call: BoundInstruction) -> None:
    left = int(np.asarray(call.attrs["left"]))
    shifts = [*([0] * (len(call.out.shape) - 1)), left]
    _launch_shifted_copy(launches, call.operand(0), call.out, shifts, PAD_REFLECT)


# ------------------------------------------------------------------------------------------------------ regions


def _slice_result_region(call: BoundInstruction) -> Operand:
    """Return a view of the region of the result into which an instruction writes its second operand.

    The region begins at the attribute `offsets` and has the shape of the second operand.
    """
    region = call.out
    for axis, (start, n) in enumerate(
        zip(integers_attribute(call.attrs, "offsets"), call.operand(1).shape, strict=True)
    ):
        region = region.slice_axis(axis, start, n)
    return region


def copy_unless_in_place(launches: LaunchBuilder, x: Operand, out: Operand) -> None:
    """Launch a copy of `x` to `out`; launch nothing if both are the same memory."""
    if x.address != out.address:
        launch_broadcast_and_convert(launches, x, out)


def _bind_set(launches: LaunchBuilder, call: BoundInstruction) -> None:
    copy_unless_in_place(launches, call.operand(0), call.out)
    launch_broadcast_and_convert(launches, call.operand(1), _slice_result_region(call))


def _bind_acc(launches: LaunchBuilder, call: BoundInstruction) -> None:
    copy_unless_in_place(launches, call.operand(0), call.out)
    region = _slice_result_region(call)
    launch_binary(launches, "add", region, call.operand(1), region)


# --------------------------------------------------------------------------------------------------------- rows


def gather_key_blocks(launches: LaunchBuilder, call: BoundInstruction) -> BoundInstruction:
    """Copy the keys and values of a paged attention (blocks of a pool) to scratch memory in order, in their dtype.

    All kernels of attention over contiguous keys can then compute the returned instruction.

    Raises:
        BackendError: a pool of 16-bit keys begins at an odd element; only an address tells this.
    """
    q, mask, table = call.operand(0), call.optional_operand(3), call.operand(5)
    *leading, blocks = table.shape
    rows = []
    for x in (call.operand(1), call.operand(2)):
        pool = x
        # A copy of such a pool would need scratch that was not asked for; the plan copies a pool with gaps instead.
        require_supported(x.is_dense or x.has_packed_layout, "blocks of keys with gaps are not read")
        if x.dtype in (DType.F16, DType.BF16) and x.address % DType.F32.block_bytes:
            raise BackendError(f"attention: blocks of {x.dtype} keys begin at an odd element; cast them to f32")
        if x.has_packed_layout:
            pool = launches.allocate_scratch(x.shape)
            launch_broadcast_and_convert(launches, as_float(launches, x), pool)
        count, keys, *row = pool.shape
        width = math.prod((keys, *row))
        out = launches.allocate_scratch((*table.shape, width), pool.dtype)
        flat = _with_shape_and_strides(pool, (count, width), (width, 1))
        words = tuple(_view_bytes_as_integers(rows, DType.F32) for rows in (flat, out))
        _bind_get_rows(launches, replace(call, op="get_rows", src=(words[0], table), dst=(words[1],)))
        strides = contiguous_strides((*leading, blocks * keys, *row))
        seen = blocks * keys if mask is None else mask.shape[-1]
        rows.append(_with_shape_and_strides(out, (*leading, seen, *row), strides))
    return replace(call, src=(q, *rows, mask, call.optional_operand(4)))


def _choose_copy_threads(columns: int) -> int:
    return min(256, max(32, count_blocks(columns, 32) * 32))


def _bind_get_rows(launches: LaunchBuilder, call: BoundInstruction) -> None:
    table, ids, out = call.operand(0), call.operand(1), call.out
    if table.has_packed_layout and table.is_whole_buffer and len(table.shape) == 2:
        return packed.bind_packed_get_rows(launches, call)
    if table.has_packed_layout:
        table = packed.dequantise_weight(launches, table)
    require_supported(table.dtype in READ_TYPE_NAMES, f"rows of {table.dtype} are missing")
    require_supported(ids.dtype in ID_TYPE_NAMES, f"ids of type {ids.dtype} are missing")
    *leading, rows, columns = table.shape
    heads = _with_shape_and_strides(table, (*leading, 1), (*table.strides[:-2], 0))
    axes = build_merged_tiling_iteration_axes(ids.shape, [heads, ids, as_row_starts(out)])
    words: list[LaunchWord] = [
        rows,
        columns,
        *table.strides[-2:],
        *axes.axes_struct_fields,
        *axes.make_address_and_stride_fields(0, table),
        *axes.make_address_and_stride_fields(1, ids),
    ]
    words += [
        *axes.make_address_and_stride_fields(2, out),
        *launches.add_fault_message(f"id {{value}} names no row of its table, which has {rows}"),
    ]
    kernel = SOURCE[f"gather<{READ_TYPE_NAMES[table.dtype]}, {ID_TYPE_NAMES[ids.dtype]}>"]
    launches.add_launch(kernel, axes.element_count, _choose_copy_threads(columns), words)


def _with_shape_and_strides(x: Operand, shape: Sequence[int], strides: Sequence[int]) -> Operand:
    return replace(x, tensor=replace(x.tensor, shape=tuple(shape), strides=tuple(strides)))


def _bind_set_rows(launches: LaunchBuilder, call: BoundInstruction) -> None:
    into, rows, ids, out = call.operand(0), call.operand(1), call.operand(2), call.out
    require_supported(ids.dtype in ID_TYPE_NAMES, f"ids of type {ids.dtype} are missing")
    rows = as_float(launches, rows)
    copy_unless_in_place(launches, into, out)
    heads = as_row_starts(rows)
    table = _with_shape_and_strides(out, (*out.shape[:-2], 1), (*out.strides[:-2], 0))
    shape, (table_of, ids_of, rows_of) = split_tiled_axes_for_broadcast(heads.shape, [table, ids, heads], tiled_index=1)
    axes = build_merged_tiling_iteration_axes(shape, [table_of, ids_of, rows_of])
    words: list[LaunchWord] = [
        out.shape[-2],
        out.shape[-1],
        out.strides[-2],
        rows.strides[-1],
        *axes.axes_struct_fields,
        *axes.make_address_and_stride_fields(0, out),
    ]
    words += [*axes.make_address_and_stride_fields(1, ids), *axes.make_address_and_stride_fields(2, rows)]
    words += launches.add_fault_message(f"id {{value}} names no row of its table, which has {out.shape[-2]}")
    id_type, columns = ID_TYPE_NAMES[ids.dtype], out.shape[-1]
    if out.dtype.is_quantised:
        kernel, threads = (
            blocks.select_block_store_kernel(out.dtype, id_type),
            blocks.choose_block_store_threads(columns),
        )
    else:
        kernel, threads = SOURCE[f"scatter<{CUDA_TYPE_NAMES[out.dtype]}, {id_type}>"], _choose_copy_threads(columns)
    launches.add_launch(kernel, axes.element_count, threads, words)


def _bind_add_id(launches: LaunchBuilder, call: BoundInstruction) -> None:
    x, ids, out = as_float(launches, call.operand(0)), call.operand(2), call.out
    table = as_float(launches, call.operand(1))
    first, total = (int(np.asarray(call.attrs[name])) for name in ("first", "total"))
    axes = build_merged_tiling_iteration_axes(ids.shape, [as_row_starts(x), ids, as_row_starts(out)])
    own, columns = table.shape
    words: list[LaunchWord] = [
        first,
        own,
        total or own,
        columns,
        x.strides[-1],
        *table.strides,
        *axes.axes_struct_fields,
    ]
    words += [
        *axes.make_address_and_stride_fields(0, x),
        *axes.make_address_and_stride_fields(1, ids),
        *axes.make_address_and_stride_fields(2, out),
        table,
    ]
    words += launches.add_fault_message(f"id {{value}} is none of {total or own} experts")
    launches.add_launch(SOURCE["add_rows"], axes.element_count, _choose_copy_threads(columns), words)


# ------------------------------------------------------------------------------------------- triangles, numbers

_UNBOUNDED = 2**40
_BAND_BY_KIND = {
    "upper_diag": (0, _UNBOUNDED),
    "upper": (1, _UNBOUNDED),
    "lower_diag": (-_UNBOUNDED, 0),
    "lower": (-_UNBOUNDED, -1),
}


def _launch_diagonal_band_copy(
    launches: LaunchBuilder, x: Operand, out: Operand, low: int, high: int, fill_value: float = 0.0
) -> None:
    """Launch a copy of a band of diagonals of each matrix; entries outside of the band become `fill_value`.

    Args:
        launches: Receives the launch.
        x: The operand [..., rows, columns].
        out: The result.
        low: The lowest diagonal of the band. Diagonal d has the entries with column - row = d.
        high: The highest diagonal.
        fill_value: The value of all other entries.
    """
    x = as_float(launches, x)
    axes = build_merged_tiling_iteration_axes(out.shape, [x, out])
    require_supported(
        axes.element_count < MAX_ELEMENTS, f"a result of {axes.element_count} elements is too large for one launch"
    )
    words: list[LaunchWord] = [
        axes.element_count,
        *out.shape[-2:],
        low,
        high,
        float(fill_value),
        *axes.axes_struct_fields,
        *axes.make_address_and_stride_fields(0, x),
        *axes.make_address_and_stride_fields(1, out),
    ]
    launches.add_launch(SOURCE["band"], count_elementwise_blocks(axes.element_count), ELEMENTWISE_THREADS, words)


def _bind_tri(launches: LaunchBuilder, call: BoundInstruction) -> None:
    _launch_diagonal_band_copy(launches, call.operand(0), call.out, *_BAND_BY_KIND[str(call.attrs["kind"])])


def _bind_diag_mask_inf(launches: LaunchBuilder, call: BoundInstruction) -> None:
    past = int(np.asarray(call.attrs["n_past"]))
    _launch_diagonal_band_copy(launches, call.operand(0), call.out, -_UNBOUNDED, past, -math.inf)


def _bind_diag(launches: LaunchBuilder, call: BoundInstruction) -> None:
    x = call.operand(0)
    rows = _with_shape_and_strides(x, (*x.shape[:-1], 1, x.shape[-1]), (*x.strides[:-1], 0, x.strides[-1]))
    _launch_diagonal_band_copy(launches, rows, call.out, 0, 0)


def _bind_arange(launches: LaunchBuilder, call: BoundInstruction) -> None:
    launch_broadcast_and_convert(
        launches, launches.upload_constant(arange.reference(**call.attrs).astype(np.float32)), call.out
    )


BINDINGS: Mapping[str, OpBinder] = {
    "cont": _bind_copy,
    "repeat": _bind_copy,
    "concat": _bind_concat,
    "pad": _bind_pad,
    "roll": _bind_roll,
    "pad_reflect_1d": _bind_pad_reflect,
    "set": _bind_set,
    "acc": _bind_acc,
    "get_rows": _bind_get_rows,
    "set_rows": _bind_set_rows,
    "add_id": _bind_add_id,
    "tri": _bind_tri,
    "diag_mask_inf": _bind_diag_mask_inf,
    "diag": _bind_diag,
    "arange": _bind_arange,
}
