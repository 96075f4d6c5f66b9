"""Products with the experts that a router chose: slots sorted by expert, then each expert's rows at once."""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from ....graph.dtypes import DType
from ..compiler import Kernel, kernel, part
from ..steps import Bound, Operand, Steps
from .dense import LOADS, put_four
from .formats import COLUMNS, FORMATS, ROWS, Format
from .packing import NO_ROW, share
from .products import add_block_of, put, rounded, scales_of
from .rows import lanes
from .simd import LANES, fma, load_int, store_int, store_scalar, word, zeros

TILE = 4
NONE = np.float32(0)


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
def clear(starts, experts, y, step, lo, hi):
    """Zero the elements from `lo` to before `hi` of the rows whose expert is elsewhere."""
    slots = starts + 4 * (experts + 2)
    for i in range(load_int(starts + 4 * experts), load_int(starts + 4 * experts + 4)):
        row = y + load_int(slots + 4 * i) * step
        for c in range(lo, hi):
            store_scalar(row + 4 * c, NONE)


@part
def row_of(slot, used, shared):
    """The row of activations that a slot reads: slot i of a token takes row ``i mod shared`` of it."""
    return slot // used * shared + slot % used % shared


@cache
def packed(form: Format) -> Kernel:
    """Words: packed experts, bytes of a row, rows of an expert in memory and in all, columns, rounded rows, how many of
    them, sorted slots, experts, slots of a token, rows of a token, the output with bytes between its rows."""
    codes, scales, width = form.codes, form.scales, form.planes[0]
    add_block, add_alone = add_block_of(form, alone=False), add_block_of(form, alone=True)
    high = form.planes[1] if len(form.planes) > 1 else 0

    def body(a, thread, threads):
        w, stride, padded, rows, columns, q, count = (
            word(a, 0),
            word(a, 1),
            word(a, 2),
            word(a, 3),
            word(a, 4),
            word(a, 5),
            word(a, 6),
        )
        starts, experts, used, shared, y, step = (
            word(a, 7),
            word(a, 8),
            word(a, 9),
            word(a, 10),
            word(a, 11),
            word(a, 12),
        )
        n, slots = columns // COLUMNS, starts + 4 * (experts + 2)
        d, s, h = scales_of(q, count, columns)
        lo, hi = share(padded // ROWS, thread, threads)
        for expert in range(experts):
            start, end = load_int(starts + 4 * expert), load_int(starts + 4 * (expert + 1))
            if start == end:
                continue
            for group in range(lo, hi):
                plane = w + (expert * padded + group * ROWS) * stride
                second = plane + n * 64 * width
                last = second + n * 64 * high
                left = rows - group * ROWS
                i = start
                while i < end:
                    # A tile that sticks out computes its last row again instead of rows that are not there.
                    s0 = load_int(slots + 4 * i)
                    s1 = load_int(slots + 4 * min(i + 1, end - 1))
                    s2 = load_int(slots + 4 * min(i + 2, end - 1))
                    s3 = load_int(slots + 4 * min(i + 3, end - 1))
                    r0 = row_of(s0, used, shared)
                    a0 = zeros()
                    if end - i == 1:
                        for b in range(n):
                            v = codes(plane + b * 64 * width, second + b * 64 * high)
                            o, at = q + r0 * columns + b * COLUMNS, r0 * n + b
                            a0 = add_alone(v, o, scales(last, b), d + 4 * at, s + 4 * at, h + 8 * at, a0)
                        put(y + s0 * step + group * ROWS * 4, a0, left)
                        break
                    r1, r2, r3 = row_of(s1, used, shared), row_of(s2, used, shared), row_of(s3, used, shared)
                    a1, a2, a3 = zeros(), zeros(), zeros()
                    for b in range(n):
                        v = codes(plane + b * 64 * width, second + b * 64 * high)
                        f, o = scales(last, b), q + b * COLUMNS
                        e, g, k = d + 4 * b, s + 4 * b, h + 8 * b
                        a0 = add_block(v, o + r0 * columns, f, e + 4 * r0 * n, g + 4 * r0 * n, k + 8 * r0 * n, a0)
                        a1 = add_block(v, o + r1 * columns, f, e + 4 * r1 * n, g + 4 * r1 * n, k + 8 * r1 * n, a1)
                        a2 = add_block(v, o + r2 * columns, f, e + 4 * r2 * n, g + 4 * r2 * n, k + 8 * r2 * n, a2)
                        a3 = add_block(v, o + r3 * columns, f, e + 4 * r3 * n, g + 4 * r3 * n, k + 8 * r3 * n, a3)
                    to = y + group * ROWS * 4
                    put(to + s0 * step, a0, left)
                    put(to + s1 * step, a1, left)
                    put(to + s2 * step, a2, left)
                    put(to + s3 * step, a3, left)
                    i += TILE
        clear(starts, experts, y, step, min(rows, lo * ROWS), min(rows, hi * ROWS))
        return 0

    return Kernel(f"experts.packed.{form.name}", body)


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
    assert w.stored is not None
    q, stride = rounded(steps, x), columns // w.dtype.block * w.dtype.block_bytes
    words = [w.address, stride, w.stored.shape[-2], rows, columns, q.address, math.prod(x.shape[:-1])]
    steps.add(packed(form), [*words, *ends], reads=[w, q, slots], writes=[y])
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
