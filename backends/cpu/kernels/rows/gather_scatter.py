"""Gathered and scattered rows, and concatenations of 16-bit rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import pairwise

import numpy as np

from .....graph.dtypes import DType
from ....fusion.dataflow import Dataflow
from ....fusion.operands import BoundInstruction, Operand, require_supported
from ....fusion.patterns import SavedStateUpdate, match_saved_state_update
from ...compilation.compiler import Kernel, Subroutine, subroutine
from ...compilation.kernel_args import declare_args
from ...simd.vectors import LANES, load, load_int, load_long
from ...steps.partition import compute_even_bounds, compute_thread_range
from ...steps.step_table import FusedBinding, FusionMatcher, StepTableBuilder, ThreadWork
from ..packed.format_table import FORMATS
from ..packed.weight_packing import INVALID_ROW, UNPACK_ARGS, make_dequantise_rows_by_id_kernel
from ..vector import block_rows
from ..vector.cache_cells import CELLS_BY_DTYPE
from ..vector.elementwise import (
    LANE_STORERS,
    add_copy_step,
    can_copy,
    load_lanes,
    store_lanes,
)

MOVE_ARGS = declare_args("table step rows columns ids id_bytes other pace count tables between")


def _make_convert_row_from_f32(dtype: DType) -> Subroutine:
    """Make the subroutine that converts a float32 row to a row of `dtype`, rounded to nearest."""
    if dtype in block_rows.BLOCK_STORERS:
        store_block = block_rows.BLOCK_STORERS[dtype]

        def copy(source, target, columns):
            for c in range(0, columns, block_rows.BLOCK_ELEMENTS):
                store_block(target, c, load(source + 4 * c), load(source + 4 * c + 64))

        return subroutine(copy)
    store = LANE_STORERS[dtype]

    def convert(source, target, columns):
        for c in range(0, columns, LANES):
            store(target, c, columns, load_lanes(source, c, columns, 4))

    return subroutine(convert)


def _make_convert_row_to_f32(dtype: DType) -> Subroutine:
    """Make the subroutine that converts a row of `dtype` to a float32 row."""
    some = CELLS_BY_DTYPE[dtype].load_first

    def copy(source, target, columns):
        for c in range(0, columns, LANES):
            store_lanes(target, c, columns, some(source, c, columns))

    return subroutine(copy)


@cache
def make_gather_or_scatter_rows_kernel(scatter: bool, dtype: DType = DType.F32) -> Kernel:
    """Make the kernel that gathers rows, ``other[i] = table[ids[i]]``, or scatters them, ``table[ids[i]] = other[i]``.

    There are `count` rows for each table; `other` is float32. An invalid id stops the run. Kernel arguments in bytes:
    `step` from row to row of a table, `pace` from row to row of `other`, and `between` from table to table.
    """
    copy = _make_convert_row_from_f32(dtype) if scatter else _make_convert_row_to_f32(dtype)

    def body(a, thread, threads):
        table, step, rows, columns = MOVE_ARGS.table(a), MOVE_ARGS.step(a), MOVE_ARGS.rows(a), MOVE_ARGS.columns(a)
        ids, size, other, pace = MOVE_ARGS.ids(a), MOVE_ARGS.id_bytes(a), MOVE_ARGS.other(a), MOVE_ARGS.pace(a)
        count = MOVE_ARGS.count(a)
        lo, hi = compute_thread_range(count * MOVE_ARGS.tables(a), thread, threads)
        for i in range(lo, hi):
            mine = table + i // count * MOVE_ARGS.between(a)
            row = load_int(ids + 4 * i) if size == 4 else load_long(ids + 8 * i)
            if row < 0 or row >= rows:
                return INVALID_ROW | row << 8
            source, target = mine + row * step, other + i * pace
            if scatter:
                source, target = target, source
            copy(source, target, columns)
        return 0

    return Kernel(f"gather_scatter.{'scatter' if scatter else 'gather'}.{dtype}", body)


SAVE_ARGS = declare_args("table step rows columns ids id_bytes other pace count saved saved_pace")


@cache
def make_save_and_scatter_rows_kernel(dtype: DType) -> Kernel:
    """Make the kernel that saves rows, ``saved[i] = table[ids[i]]``, and then overwrites them with rows of `other`.

    An invalid id stops the run before a row is overwritten. The arguments are as in
    `make_gather_or_scatter_rows_kernel`; one thread processes all of its columns.
    """
    save, change = _make_convert_row_to_f32(dtype), _make_convert_row_from_f32(dtype)

    def body(a, thread, threads):
        table, step, rows, columns = SAVE_ARGS.table(a), SAVE_ARGS.step(a), SAVE_ARGS.rows(a), SAVE_ARGS.columns(a)
        ids, size, count = SAVE_ARGS.ids(a), SAVE_ARGS.id_bytes(a), SAVE_ARGS.count(a)
        for i in range(count):
            row = load_int(ids + 4 * i) if size == 4 else load_long(ids + 8 * i)
            if row < 0 or row >= rows:
                return INVALID_ROW | row << 8
            save(table + row * step, SAVE_ARGS.saved(a) + i * SAVE_ARGS.saved_pace(a), columns)
        for i in range(count):
            row = load_int(ids + 4 * i) if size == 4 else load_long(ids + 8 * i)
            change(SAVE_ARGS.other(a) + i * SAVE_ARGS.pace(a), table + row * step, columns)
        return 0

    return Kernel(f"gather_scatter.save_and_scatter.{dtype}", body)


WIDEN = declare_args("rows columns x x_row y y_row")


@cache
def make_16_bit_to_f32_kernel(dtype: DType) -> Kernel:
    """Make the kernel that converts rows of a 16-bit type to rows of float32; `x_row` and `y_row` are their bytes."""
    copy = _make_convert_row_to_f32(dtype)

    def body(a, thread, threads):
        first, last = compute_thread_range(WIDEN.rows(a), thread, threads)
        for i in range(first, last):
            copy(WIDEN.x(a) + i * WIDEN.x_row(a), WIDEN.y(a) + i * WIDEN.y_row(a), WIDEN.columns(a))
        return 0

    return Kernel(f"gather_scatter.widen_rows.{dtype}", body)


def _find_id_bytes(ids: Operand) -> int | None:
    """Return the bytes of one row id: 4 for int32, 8 for int64; None if kernels cannot read the ids."""
    return {DType.I32: 4, DType.I64: 8}.get(ids.dtype) if ids.is_dense else None


def _bind_get_rows(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    """Add the step of `get_rows`, which gathers rows of a plain or packed table.

    Return False if kernels cannot read the operands.
    """
    table, ids, out = call.operand(0), call.operand(1), call.out
    size = _find_id_bytes(ids)
    if size is None or not out.has_uniform_row_stride:
        return False
    *leading, rows, columns = table.shape
    if table.has_packed_layout:
        form = FORMATS.get(table.dtype)
        if form is None or leading or not table.is_whole_buffer or size != 4:
            return False
        stride = table.dtype.count_bytes(columns)
        scratch = steps.scratch("unpack", 1024 * steps.threads)
        words = UNPACK_ARGS(
            packed=table.address,
            stride=stride,
            rows=rows,
            columns=columns,
            ids=ids.address,
            target=out.address,
            step=out.row_stride_bytes,
            count=math.prod(ids.shape),
            scratch=scratch.address,
        )
        _add_checked_gather_or_scatter_step(
            steps, make_dequantise_rows_by_id_kernel(form), words, [table, ids], [out, scratch], out
        )
        return True
    if table.dtype not in CELLS_BY_DTYPE or table.strides[-1] != 1 or len(leading) > 1 or not ids.shape[-1]:
        return False
    words = MOVE_ARGS(
        table=table.address,
        step=table.dtype.count_bytes(table.strides[-2]),
        rows=rows,
        columns=columns,
        ids=ids.address,
        id_bytes=size,
        other=out.address,
        pace=out.row_stride_bytes,
        count=ids.shape[-1] if leading else math.prod(ids.shape),
        tables=math.prod(leading),
        between=table.dtype.count_bytes(table.strides[0]) if leading else 0,
    )
    _add_checked_gather_or_scatter_step(
        steps, make_gather_or_scatter_rows_kernel(False, table.dtype), words, [table, ids], [out], out
    )
    return True


def _is_writable_table(table: Operand) -> bool:
    """Return whether kernels can write rows of the type of `table`: floats, or cache blocks that are not packed."""
    return table.dtype in LANE_STORERS or (table.dtype in block_rows.BLOCK_STORERS and not table.has_packed_layout)


def _bind_set_rows(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    """Add the steps of `set_rows`, which scatters rows into a table; return False if kernels cannot do that.

    If the table is not updated in place, it is copied first.
    """
    into, rows, ids, out = call.operand(0), call.operand(1), call.operand(2), call.out
    size = _find_id_bytes(ids)
    plain = all(o.has_uniform_row_stride and len(o.shape) == 2 for o in (into, rows, out))
    if size is None or not plain or len(ids.shape) != 1 or not rows.is_float or not _is_writable_table(out):
        return False
    if into.address != out.address and not (out.is_float and add_copy_step(steps, into, out)):
        return False
    words = _make_gather_or_scatter_args(out, rows, ids, size)
    _add_checked_gather_or_scatter_step(
        steps, make_gather_or_scatter_rows_kernel(True, out.dtype), words, [rows, ids, out], [out], rows
    )
    return True


def _fuse_save_and_set_rows(flow: Dataflow, number: int) -> FusedBinding:
    """Fuse the instruction that saves rows of a table with the one that overwrites these rows."""
    chain = match_saved_state_update(flow, number, "set_rows")
    save, change = map(flow.bound_instruction, chain)
    table, ids, saved_rows = save.operand(0), save.operand(1), save.out
    into, rows, out = change.operand(0), change.operand(1), change.out
    require_supported(
        ids.tensor == change.operand(2).tensor and table.tensor == into.tensor == out.tensor, "other rows are saved"
    )
    require_supported(
        all(o.has_uniform_row_stride and len(o.shape) == 2 for o in (table, rows, saved_rows)),
        "operands have no rows",
    )
    require_supported(
        _is_writable_table(table) and rows.is_float and saved_rows.is_float,
        "rows are not float32, or the table has another type",
    )
    require_supported(
        table.strides[-1] == 1 and len(ids.shape) == 1 and _find_id_bytes(ids) is not None,
        "the table is strided, or ids are not a dense vector",
    )
    return FusedBinding(chain, partial(_add_save_and_set_rows_by_columns, save=save, change=change, numbers=chain))


def _add_save_and_set_rows_by_columns(
    steps: StepTableBuilder, save: BoundInstruction, change: BoundInstruction, numbers: SavedStateUpdate
) -> None:
    """Add the step that saves rows of a table and then overwrites them; each thread moves its own columns.

    Every thread checks all ids, so all threads stop at an invalid id before a row is overwritten. If a thread would
    have no columns, the two instructions are bound separately.
    """
    table, ids, saved_rows, rows = save.operand(0), save.operand(1), save.out, change.operand(1)
    bounds, size, columns = steps.find_column_bounds_written_since_barrier([rows]), _find_id_bytes(ids), table.shape[1]
    assert size is not None, "the fused pattern has checked the ids"
    if bounds is None and not steps.is_step_shared_by_threads([rows], [saved_rows]):
        bounds = [0, columns]
    unit = math.lcm(table.dtype.block, LANES)
    bounds = bounds or compute_even_bounds(columns, unit, steps.threads)
    if bounds[-1] != columns or 0 in np.diff(bounds) or np.any(np.mod(bounds, table.dtype.block)):
        for steps.instruction_number, bind, call in zip(
            numbers, (_bind_get_rows, _bind_set_rows), (save, change), strict=True
        ):
            is_bound = bind(steps, call)
            assert is_bound, "the fused pattern has checked both ops"
        return
    parts: list[ThreadWork] = []
    for low, high in pairwise(bounds):
        into, other, saved = (o.slice_axis(1, low, high - low) for o in (table, rows, saved_rows))
        words = SAVE_ARGS(
            table=into.address,
            step=into.row_stride_bytes,
            rows=into.shape[0],
            columns=into.shape[1],
            ids=ids.address,
            id_bytes=size,
            other=other.address,
            pace=other.row_stride_bytes,
            count=other.shape[0],
            saved=saved.address,
            saved_pace=saved.row_stride_bytes,
        )
        parts.append(ThreadWork(words, [into, ids, other], [saved, into]))
    steps.instruction_number = numbers.save
    kernel = make_save_and_scatter_rows_kernel(table.dtype)
    if len(bounds) == 2:
        steps.add_per_thread(kernel, parts, stops=True)
    else:
        steps.add_by_columns(kernel, parts, [saved_rows], bounds)


def _make_gather_or_scatter_args(table: Operand, other: Operand, ids: Operand, size: int) -> list[int]:
    """Make the arguments of the kernel that gathers or scatters rows of one table.

    `table` and `other` have two axes. A row has `size` elements.
    """
    rows, columns = table.shape
    return MOVE_ARGS(
        table=table.address,
        step=table.row_stride_bytes,
        rows=rows,
        columns=columns,
        ids=ids.address,
        id_bytes=size,
        other=other.address,
        pace=other.row_stride_bytes,
        count=other.shape[0],
        tables=1,
        between=0,
    )


def _add_checked_gather_or_scatter_step(
    steps: StepTableBuilder,
    kernel: Kernel,
    words: Sequence[int],
    reads: Sequence[Operand],
    writes: Sequence[Operand],
    moved: Operand,
) -> None:
    """Add the step that gathers or scatters the rows of `moved` by ids; an invalid id stops the run."""
    steps.add(kernel, words, reads=reads, writes=writes, nbytes=moved.tensor.spec.nbytes, stops=True)


def _bind_concat_of_16_bit_or_no_rows(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    """Add the steps of a concatenation with 16-bit rows or an empty operand. Return False for other operands.

    Other concatenations of float32 are computed by generated kernels.
    """
    a, b, out = call.operand(0), call.operand(1), call.out
    axis = int(np.asarray(call.attrs["axis"])) % len(out.shape)
    parts = (out.slice_axis(axis, 0, a.shape[axis]), out.slice_axis(axis, a.shape[axis], b.shape[axis]))
    pairs = [(s, part) for s, part in zip((a, b), parts, strict=True) if s.tensor.spec.size]
    if not all(can_copy(*pair) or _can_widen_16_bit_rows(*pair) for pair in pairs) or (
        len(pairs) == 2 and a.is_float and b.is_float
    ):
        return False
    for source, target in pairs:
        if can_copy(source, target):
            add_copy_step(steps, source, target)
        else:
            words = WIDEN(
                rows=math.prod(source.shape[:-1]),
                columns=source.shape[-1],
                x=source.address,
                x_row=source.row_stride_bytes,
                y=target.address,
                y_row=target.row_stride_bytes,
            )
            steps.add(make_16_bit_to_f32_kernel(source.dtype), words, reads=[source], writes=[target])
    return True


def _can_widen_16_bit_rows(source: Operand, target: Operand) -> bool:
    """Return whether `make_16_bit_to_f32_kernel` can convert 16-bit rows of `source` to float32 rows of
    `target`.
    """
    halves = source.dtype in (DType.F16, DType.BF16) and not source.has_packed_layout
    return halves and source.has_uniform_row_stride and target.is_float and target.has_uniform_row_stride


BINDINGS = {"get_rows": _bind_get_rows, "set_rows": _bind_set_rows, "concat": _bind_concat_of_16_bit_or_no_rows}
FUSED: Mapping[str, tuple[FusionMatcher, ...]] = {"get_rows": (_fuse_save_and_set_rows,)}
