"""Gathered and scattered rows, copies, concatenation and padding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import pairwise

import numpy as np

from ....graph.dtypes import DType
from ....ops.declaration.shape_rules import integers_attribute
from ...chains import ChangedState, changed_state
from ...flow import Flow
from ...operands import Bound, Operand, need
from ..compiler import Kernel, Part, part
from ..simd.vectors import LANES, load, load_int, load_long
from ..steps import Chain, Fused, Share, Steps
from ..words import words
from . import blocks
from .cells import CELLS
from .packing import NO_ROW, UNPACK, share, unpack
from .products.formats import FORMATS
from .rows import FILL_WORDS, STORES, add_rows, add_unary, can_copy, fill, lanes, put

MOVE = words("table step rows columns ids id_bytes other pace count tables between")


def _to_rows(dtype: DType) -> Part:
    """Make the part that copies a float32 row to a row of `dtype`, rounded to nearest."""
    if dtype in blocks.STORES:
        store_block = blocks.STORES[dtype]

        def copy(source, target, columns):
            for c in range(0, columns, blocks.BLOCK):
                store_block(target, c, load(source + 4 * c), load(source + 4 * c + 64))

        return part(copy)
    store = STORES[dtype]

    def convert(source, target, columns):
        for c in range(0, columns, LANES):
            store(target, c, columns, lanes(source, c, columns, 4))

    return part(convert)


def _from_rows(dtype: DType) -> Part:
    """Make the part that copies a row of `dtype` to a float32 row."""
    some = CELLS[dtype].some

    def copy(source, target, columns):
        for c in range(0, columns, LANES):
            put(target, c, columns, some(source, c, columns))

    return part(copy)


@cache
def move_rows(scatter: bool, dtype: DType = DType.F32) -> Kernel:
    """Make the kernel ``other[i] = table[ids[i]]``, or with `scatter` ``table[ids[i]] = other[i]``, for each table.

    There are `count` rows per table; `other` is float32. `step`, `pace` and `between` are bytes from row to row of a
    table, from row to row of `other`, and from table to table. An invalid id stops the run.
    """
    copy = _to_rows(dtype) if scatter else _from_rows(dtype)

    def body(a, thread, threads):
        table, step, rows, columns = MOVE.table(a), MOVE.step(a), MOVE.rows(a), MOVE.columns(a)
        ids, size, other, pace, count = MOVE.ids(a), MOVE.id_bytes(a), MOVE.other(a), MOVE.pace(a), MOVE.count(a)
        lo, hi = share(count * MOVE.tables(a), thread, threads)
        for i in range(lo, hi):
            mine = table + i // count * MOVE.between(a)
            row = load_int(ids + 4 * i) if size == 4 else load_long(ids + 8 * i)
            if row < 0 or row >= rows:
                return NO_ROW | row << 8
            source, target = mine + row * step, other + i * pace
            if scatter:
                source, target = target, source
            copy(source, target, columns)
        return 0

    return Kernel(f"moves.{'scatter' if scatter else 'gather'}.{dtype}", body)


WIDEN = words("rows columns x x_row y y_row")


@cache
def widen_rows(dtype: DType) -> Kernel:
    """Return the kernel that copies rows of `dtype` to rows of float32; `x_row` and `y_row` are bytes."""
    copy = _from_rows(dtype)

    def body(a, thread, threads):
        first, last = share(WIDEN.rows(a), thread, threads)
        for i in range(first, last):
            copy(WIDEN.x(a) + i * WIDEN.x_row(a), WIDEN.y(a) + i * WIDEN.y_row(a), WIDEN.columns(a))
        return 0

    return Kernel(f"moves.widen_rows.{dtype}", body)


def _ids_size(ids: Operand) -> int | None:
    """Return the bytes of an id; None for strided ids or other types."""
    return {DType.I32: 4, DType.I64: 8}.get(ids.dtype) if ids.is_dense else None


def _get_rows(steps: Steps, call: Bound) -> bool:
    """Add the gather of rows of a plain or packed table; False if kernels cannot read it."""
    table, ids, out = call.operand(0), call.operand(1), call.out
    size = _ids_size(ids)
    if size is None or not out.has_rows:
        return False
    *leading, rows, columns = table.shape
    if table.is_packed:
        form = FORMATS.get(table.dtype)
        if form is None or leading or not table.is_whole or size != 4:
            return False
        stride = table.dtype.bytes_of(columns)
        scratch = steps.scratch("unpack", 1024 * steps.threads)
        words = UNPACK(
            packed=table.address,
            stride=stride,
            rows=rows,
            columns=columns,
            ids=ids.address,
            target=out.address,
            step=out.row_step,
            count=math.prod(ids.shape),
            scratch=scratch.address,
        )
        _add(steps, unpack(form), words, [table, ids], [out, scratch], out)
        return True
    if table.dtype not in CELLS or table.strides[-1] != 1 or len(leading) > 1 or not ids.shape[-1]:
        return False
    words = MOVE(
        table=table.address,
        step=table.dtype.bytes_of(table.strides[-2]),
        rows=rows,
        columns=columns,
        ids=ids.address,
        id_bytes=size,
        other=out.address,
        pace=out.row_step,
        count=ids.shape[-1] if leading else math.prod(ids.shape),
        tables=math.prod(leading),
        between=table.dtype.bytes_of(table.strides[0]) if leading else 0,
    )
    _add(steps, move_rows(False, table.dtype), words, [table, ids], [out], out)
    return True


def _is_written(table: Operand) -> bool:
    """Return whether kernels can write rows in the type of `table`."""
    return table.dtype in STORES or (table.dtype in blocks.STORES and not table.is_packed)


def _set_rows(steps: Steps, call: Bound) -> bool:
    """Add the scatter of rows, after a copy of the table if it is not updated in place; False if it does not fit."""
    into, rows, ids, out = call.operand(0), call.operand(1), call.operand(2), call.out
    size = _ids_size(ids)
    plain = all(o.has_rows and len(o.shape) == 2 for o in (into, rows, out))
    if size is None or not plain or len(ids.shape) != 1 or not rows.is_float or not _is_written(out):
        return False
    if into.address != out.address and not (out.is_float and add_unary(steps, "copy", into, out)):
        return False
    words = _words_of(out, rows, ids, size)
    _add(steps, move_rows(True, out.dtype), words, [rows, ids, out], [out], rows)
    return True


def _save_and_set_rows(flow: Flow, number: int) -> Chain:
    """Fuse saving rows of a table and overwriting them."""
    chain = changed_state(flow, number, "set_rows")
    save, change = map(flow.call, chain)
    table, ids, kept = save.operand(0), save.operand(1), save.out
    into, rows, out = change.operand(0), change.operand(1), change.out
    need(ids.tensor == change.operand(2).tensor and table.tensor == into.tensor == out.tensor, "other rows are saved")
    need(all(o.has_rows and len(o.shape) == 2 for o in (table, rows, kept)), "operands have no rows")
    need(_is_written(table) and rows.is_float and kept.is_float, "rows are not float32, or the table has another type")
    need(
        table.strides[-1] == 1 and len(ids.shape) == 1 and _ids_size(ids) is not None,
        "the table is strided, or ids are not a dense vector",
    )
    return Chain(chain, partial(_add_save_and_set_rows, save=save, change=change, numbers=chain))


def _add_save_and_set_rows(steps: Steps, save: Bound, change: Bound, numbers: ChangedState) -> None:
    """Add both steps. Each thread moves its columns of the new rows.

    If threads have no columns of these, the two steps are bound separately. Every thread checks all ids, so all threads
    stop at an invalid id and none overwrites a row.
    """
    table, ids, kept, rows = save.operand(0), save.operand(1), save.out, change.operand(1)
    bounds, size = steps.columns_of([rows]), _ids_size(ids)
    if (
        bounds is None
        or size is None
        or bounds[-1] != table.shape[1]
        or 0 in np.diff(bounds)  # a thread without columns would not stop
        or np.any(np.mod(bounds, table.dtype.block))
    ):
        for steps.number, bind, call in zip(numbers, (_get_rows, _set_rows), (save, change), strict=True):
            is_bound = bind(steps, call)
            assert is_bound, "the fused pattern has checked both ops"
        return
    parts = [[o.part(1, low, high - low) for o in (table, rows, kept)] for low, high in pairwise(bounds)]

    steps.number = numbers.save
    saves = [Share(_words_of(table, kept, ids, size), [table, ids], [kept]) for table, _, kept in parts]
    steps.deal_columns(move_rows(False, table.dtype), saves, kept, bounds)
    steps.number = numbers.change
    changes = [Share(_words_of(table, rows, ids, size), [rows, ids, table], [table]) for table, rows, _ in parts]
    steps.deal(move_rows(True, table.dtype), changes)


def _words_of(table: Operand, other: Operand, ids: Operand, size: int) -> list[int]:
    """Return the words of one table. Table and `other` have two axes."""
    rows, columns = table.shape
    return MOVE(
        table=table.address,
        step=table.row_step,
        rows=rows,
        columns=columns,
        ids=ids.address,
        id_bytes=size,
        other=other.address,
        pace=other.row_step,
        count=other.shape[0],
        tables=1,
        between=0,
    )


def _add(
    steps: Steps,
    kernel: Kernel,
    words: Sequence[int],
    reads: Sequence[Operand],
    writes: Sequence[Operand],
    moved: Operand,
) -> None:
    """Add a step that moves `moved` by ids. An invalid id stops the run."""
    steps.add(kernel, words, reads=reads, writes=writes, nbytes=moved.tensor.spec.nbytes, stops=True)


def _concat(steps: Steps, call: Bound) -> bool:
    """Add two copies to the parts of the result."""
    a, b, out = call.operand(0), call.operand(1), call.out
    axis = int(np.asarray(call.attrs["axis"])) % len(out.shape)
    parts = (out.part(axis, 0, a.shape[axis]), out.part(axis, a.shape[axis], b.shape[axis]))
    pairs = [(s, part) for s, part in zip((a, b), parts, strict=True) if s.tensor.spec.size]
    if not all(can_copy(*pair) or _can_widen(*pair) for pair in pairs):
        return False
    for source, target in pairs:
        if can_copy(source, target):
            add_unary(steps, "copy", source, target)
        else:
            words = WIDEN(
                rows=math.prod(source.shape[:-1]),
                columns=source.shape[-1],
                x=source.address,
                x_row=source.row_step,
                y=target.address,
                y_row=target.row_step,
            )
            steps.add(widen_rows(source.dtype), words, reads=[source], writes=[target])
    return True


def _can_widen(source: Operand, target: Operand) -> bool:
    """Return whether `widen_rows` copies `source` there: rows of 16-bit numbers to rows of float32."""
    halves = source.dtype in (DType.F16, DType.BF16) and not source.is_packed
    return halves and source.has_rows and target.is_float and target.has_rows


def _pad(steps: Steps, call: Bound) -> bool:
    """Add zeros everywhere, then copy x to the middle."""
    x, out = call.operand(0), call.out
    if call.attrs["circular"]:
        return False
    inner = out
    for axis, (n, left) in enumerate(zip(x.shape, integers_attribute(call.attrs, "left"), strict=True)):
        inner = inner.part(axis, left, n)
    zeros = {"value": 0}
    if not x.tensor.spec.size:
        return add_rows(steps, (fill, FILL_WORDS, zeros), [], out)
    if not can_copy(x, inner) or not add_rows(steps, (fill, FILL_WORDS, zeros), [], out):
        return False
    return add_unary(steps, "copy", x, inner)


BINDINGS = {"pad": _pad, "get_rows": _get_rows, "set_rows": _set_rows, "concat": _concat}
FUSED: Mapping[str, tuple[Fused, ...]] = {"get_rows": (_save_and_set_rows,)}
