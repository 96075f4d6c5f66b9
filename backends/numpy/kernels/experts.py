"""Products with the experts that a router chose: slots sorted by expert, then each expert's rows at once."""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from ....graph.dtypes import DType
from ..compiler import Kernel, kernel, part
from ..steps import Bound, Operand, Steps
from .dense import LOADS, put_four
from .formats import FORMATS
from .packing import NO_ROW, share
from .products import add_product, clear
from .rows import lanes
from .simd import LANES, fma, load_int, store_int, word, zeros

TILE = 4


@kernel
def sort_slots(a, thread, threads):
    """Words: ids (int32), how many, experts here, target, the first expert here, experts in all.

    Target: how many slots come before each expert, before those of experts that are elsewhere, and in all; then slots
    in that order.  An id that is no expert at all stops the run.
    """
    ids, count, experts, starts, own, every = word(a, 0), word(a, 1), word(a, 2), word(a, 3), word(a, 4), word(a, 5)
    if thread != 0:
        return 0
    for e in range(experts + 2):
        store_int(starts + 4 * e, 0)
    for i in range(count):
        chosen = load_int(ids + 4 * i)
        if chosen < 0 or chosen >= every:
            return NO_ROW | chosen << 8
        after = starts + 4 * (here(chosen, own, experts) + 1)
        store_int(after, load_int(after) + 1)
    for e in range(experts + 1):
        store_int(starts + 4 * (e + 1), load_int(starts + 4 * (e + 1)) + load_int(starts + 4 * e))
    slots = starts + 4 * (experts + 2)
    for i in range(count):  # each start moves to the end of its run ...
        at = starts + 4 * here(load_int(ids + 4 * i), own, experts)
        store_int(slots + 4 * load_int(at), i)
        store_int(at, load_int(at) + 1)
    for e in range(experts + 1, 0, -1):  # ... which is where the next run starts
        store_int(starts + 4 * e, load_int(starts + 4 * (e - 1)))
    store_int(starts, 0)
    return 0


@part
def here(chosen, own, experts):
    """The number on this device of an expert; one past the last for those that are elsewhere."""
    return chosen - own if own <= chosen and chosen < own + experts else experts


@part
def row_of(slot, used, shared):
    """The row of activations that a slot reads: slot i of a token takes row ``i mod shared`` of it."""
    return slot // used * shared + slot % used % shared


@cache
def plain(dtype: DType) -> Kernel:
    """Words: experts, bytes between them and between rows, rows, columns, x, bytes between its rows, sorted slots,
    experts,
    slots of a token, rows of a token, the output with bytes between its rows."""
    weights = LOADS[dtype]

    def body(a, thread, threads):
        w, between, stride, rows, columns = word(a, 0), word(a, 1), word(a, 2), word(a, 3), word(a, 4)
        x, pace, starts, experts, used, shared = word(a, 5), word(a, 6), word(a, 7), word(a, 8), word(a, 9), word(a, 10)
        y, step = word(a, 11), word(a, 12)
        slots = starts + 4 * (experts + 2)
        lo, hi = share((rows + TILE - 1) // TILE, thread, threads)
        for expert in range(experts):
            start, end = load_int(starts + 4 * expert), load_int(starts + 4 * (expert + 1))
            for tile in range(lo, hi):
                first, matrix = tile * TILE, w + expert * between
                p0 = matrix + first * stride
                p1 = matrix + min(first + 1, rows - 1) * stride
                p2 = matrix + min(first + 2, rows - 1) * stride
                p3 = matrix + min(first + 3, rows - 1) * stride
                for i in range(start, end):
                    slot = load_int(slots + 4 * i)
                    q, b0, b1, b2, b3 = x + row_of(slot, used, shared) * pace, zeros(), zeros(), zeros(), zeros()
                    for c in range(0, columns, LANES):
                        u = lanes(q, c, columns, 4)
                        b0, b1 = fma(weights(p0, c, columns), u, b0), fma(weights(p1, c, columns), u, b1)
                        b2, b3 = fma(weights(p2, c, columns), u, b2), fma(weights(p3, c, columns), u, b3)
                    put_four(y + slot * step + 4 * first, rows - first, b0, b1, b2, b3)
        clear(starts, experts, y, step, min(rows, lo * TILE), min(rows, hi * TILE))
        return 0

    return Kernel(f"experts.plain.{dtype}", body)


def _mul_mat_id(steps: Steps, call: Bound) -> bool:
    w, x, ids, y = call.operand(0), call.operand(1), call.operand(2), call.out
    plain_rows = x.is_float and x.has_rows and y.has_rows and ids.is_dense
    if not plain_rows or ids.dtype is not DType.I32 or len(w.shape) != 3 or not x.shape[-1]:
        return False
    experts, rows, columns = w.shape
    form = FORMATS.get(w.dtype)
    if (form is not None and not w.is_whole) or (form is None and (w.dtype not in LOADS or w.strides[-1] != 1)):
        return False
    slots = _sorted(steps, call, ids, experts)
    used, shared = ids.shape[-1], x.shape[-2]
    ends = [slots.address, experts, used, shared, y.address, y.row_step]
    if form is None:
        size = w.dtype.storage.itemsize
        words = [w.address, size * w.strides[0], size * w.strides[1], rows, columns, x.address, x.row_step]
        steps.add(plain(w.dtype), [*words, *ends], reads=[w, x, slots], writes=[y])
        return True
    add_product(steps, call, slots, experts, used, shared)
    return True


def _sorted(steps: Steps, call: Bound, ids: Operand, experts: int) -> Operand:
    """Slots sorted by expert, by a step of its own unless an earlier one has done it."""
    own, every = (int(np.asarray(call.attrs[name])) for name in ("first", "total"))
    key = ("slots", ids.tensor, own, experts)
    if (found := steps.known(key)) is not None:
        return found
    count = math.prod(ids.shape)
    made = steps.scratch("slots", 4 * (experts + 2 + count))
    steps.add(
        sort_slots, [ids.address, count, experts, made.address, own, every or experts], reads=[ids], writes=[made]
    )
    steps.remember(key, made, [ids])
    return made


BINDINGS = {"mul_mat_id": _mul_mat_id}
