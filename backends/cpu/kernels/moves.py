"""Rows gathered and scattered by number, and copies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import pairwise

import numpy as np

from ....graph.dtypes import DType
from ...chains import ChangedState, changed_state
from ...flow import Flow
from ...operands import Bound, Operand, need
from ..compiler import Kernel
from ..simd.vectors import LANES, load_int, load_long, word
from ..steps import Chain, Fused, Share, Steps
from .dense import LOADS
from .formats import FORMATS
from .packing import NO_ROW, share, unpack
from .rows import add_rows, put, unary


@cache
def move_rows(scatter: bool, dtype: DType = DType.F32) -> Kernel:
    """Row ``ids[i]`` of a table to row i as float32, or the other way round.  Words: table, bytes between its rows,
    rows, columns,
    ids, bytes of an id, the other rows, bytes between them, how many for each table, tables, bytes between these.  An
    id
    that is no row stops the run."""
    load = LOADS[dtype]

    def body(a, thread, threads):
        table, step, rows, columns = word(a, 0), word(a, 1), word(a, 2), word(a, 3)
        ids, size, other, pace, count = word(a, 4), word(a, 5), word(a, 6), word(a, 7), word(a, 8)
        lo, hi = share(count * word(a, 9), thread, threads)
        for i in range(lo, hi):
            mine = table + i // count * word(a, 10)
            row = load_int(ids + 4 * i) if size == 4 else load_long(ids + 8 * i)
            if row < 0 or row >= rows:
                return NO_ROW | row << 8
            source, target = mine + row * step, other + i * pace
            if scatter:
                source, target = target, source
            for c in range(0, columns, LANES):
                put(target, c, columns, load(source, c, columns))
        return 0

    return Kernel(f"moves.{'scatter' if scatter else 'gather'}.{dtype}", body)


def _ids_size(ids: Operand) -> int | None:
    """Bytes of an id, if they lie densely."""
    return {DType.I32: 4, DType.I64: 8}.get(ids.dtype) if ids.is_dense else None


def _get_rows(steps: Steps, call: Bound) -> bool:
    table, ids, out = call.operand(0), call.operand(1), call.out
    size = _ids_size(ids)
    if size is None or not out.has_rows:
        return False
    *leading, rows, columns = table.shape
    if table.dtype in FORMATS and (leading or not table.is_whole):
        return False
    if (form := FORMATS.get(table.dtype)) is not None:
        if size != 4:
            return False
        stride = columns // table.dtype.block * table.dtype.block_bytes
        scratch = steps.scratch("unpack", 1024 * steps.threads)
        words = [table.address, stride, rows, columns, ids.address, out.address, out.row_step, math.prod(ids.shape)]
        _add(steps, unpack(form), [*words, scratch.address], [table, ids], [out, scratch], out)
        return True
    if table.dtype not in LOADS or table.strides[-1] != 1 or len(leading) > 1 or not ids.shape[-1]:
        return False
    nbytes = table.dtype.storage.itemsize
    words = [table.address, nbytes * table.strides[-2], rows, columns, ids.address, size, out.address, out.row_step]
    words += [ids.shape[-1], *leading, nbytes * table.strides[0]] if leading else [math.prod(ids.shape), 1, 0]
    _add(steps, move_rows(False, table.dtype), words, [table, ids], [out], out)
    return True


def _set_rows(steps: Steps, call: Bound) -> bool:
    into, rows, ids, out = call.operand(0), call.operand(1), call.operand(2), call.out
    size = _ids_size(ids)
    plain = all(o.is_float and o.has_rows and len(o.shape) == 2 for o in (into, rows, out))
    if size is None or not plain or len(ids.shape) != 1:
        return False
    if into.address != out.address and not add_rows(steps, unary("copy"), [into], out):
        return False
    words = [out.address, out.row_step, *out.shape, ids.address, size, rows.address, rows.row_step, rows.shape[0], 1, 0]
    _add(steps, move_rows(True), words, [rows, ids, out], [out], rows)
    return True


def _save_and_set_rows(flow: Flow, number: int) -> Chain:
    """Rows of a table, to be kept, and others in their place."""
    chain = changed_state(flow, number, "set_rows")
    save, change = map(flow.call, chain)
    table, ids, kept = save.operand(0), save.operand(1), save.out
    into, rows, out = change.operand(0), change.operand(1), change.out
    need(ids.tensor == change.operand(2).tensor and table.tensor == into.tensor == out.tensor, "other rows are saved")
    need(all(o.is_float and o.has_rows and len(o.shape) == 2 for o in (table, rows, kept)), "operands have no rows")
    need(table.strides[-1] == 1 and len(ids.shape) == 1 and _ids_size(ids) is not None, "ids lie otherwise")
    return Chain(chain, partial(_add_save_and_set_rows, save=save, change=change, numbers=chain))


def _add_save_and_set_rows(steps: Steps, save: Bound, change: Bound, numbers: ChangedState) -> None:
    """Each thread moves the columns that it has of the new rows; the two go one by one if threads have none of these.

    Every thread looks at all ids, so all stop at one that is no row, and none sets any.
    """
    table, ids, kept, rows = save.operand(0), save.operand(1), save.out, change.operand(1)
    bounds = steps.columns_of([rows])
    if bounds is None or bounds[-1] != table.shape[1] or 0 in np.diff(bounds):  # who moves nothing would not stop
        for steps.number, bind, call in zip(numbers, (_get_rows, _set_rows), (save, change), strict=True):
            is_bound = bind(steps, call)
            assert is_bound, "the chain has asked for all that they need"
        return
    parts = [[o.part(1, low, high - low) for o in (table, rows, kept)] for low, high in pairwise(bounds)]

    def share(table: Operand, other: Operand, count: int) -> list[int]:
        words = [table.address, table.row_step, *table.shape, ids.address, _ids_size(ids) or 0]
        return [*words, other.address, other.row_step, count, 1, 0]

    count = rows.shape[0]
    steps.number = numbers.save
    saves = [Share(share(table, kept, count), [table, ids], [kept]) for table, _, kept in parts]
    steps.deal_columns(move_rows(False), saves, kept, bounds)
    steps.number = numbers.change
    changes = [Share(share(table, rows, count), [rows, ids, table], [table]) for table, rows, _ in parts]
    steps.deal(move_rows(True), changes)


def _add(
    steps: Steps,
    kernel: Kernel,
    words: Sequence[int],
    reads: Sequence[Operand],
    writes: Sequence[Operand],
    moved: Operand,
) -> None:
    """A step that moves `moved` to or from where ids say, and stops at one that is none."""
    steps.add(kernel, words, reads=reads, writes=writes, nbytes=moved.tensor.spec.nbytes, stops=True)


def _concat(steps: Steps, call: Bound) -> bool:
    a, b, out = call.operand(0), call.operand(1), call.out
    axis = int(np.asarray(call.attrs["axis"])) % len(out.shape)
    parts = (out.part(axis, 0, a.shape[axis]), out.part(axis, a.shape[axis], b.shape[axis]))
    return all(add_rows(steps, unary("copy"), [s], part) for s, part in zip((a, b), parts, strict=True))


BINDINGS = {"get_rows": _get_rows, "set_rows": _set_rows, "concat": _concat}
FUSED: Mapping[str, tuple[Fused, ...]] = {"get_rows": (_save_and_set_rows,)}
