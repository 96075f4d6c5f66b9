"""Packing of GGUF rows into groups of 16, and unpacking to float32."""

from __future__ import annotations

from functools import cache

from ..compiler import Kernel, Part, part
from ..simd.tiles import store_codes
from ..simd.vectors import load_byte, load_int, load_scalar, store, store_int, store_scalar
from ..words import words
from .products.formats import COLUMNS, ROWS, UNIT, Format

NO_ROW = 1
"""Status of a run with an invalid row id. The id is stored above the low byte."""


@part
def share(n, thread, threads):
    """Return the range of `n` items of a thread: (first, end)."""
    each = (n + threads - 1) // threads
    return min(n, each * thread), min(n, each * (thread + 1))


def _moved(four: Part, first: int, width: int) -> Part:
    """Make ``(row, c, to)``: copy bits `first` to `first` + `width` of 32 codes to one lane of a plane.

    The first four columns become the lowest bits of the first vector.
    """
    fields, mask = 8 // width, ((1 << width) - 1) * 0x01010101

    def moved(row, c, to):
        for vector in range(width):
            bits = 0
            for field in range(fields):
                bits |= (four(row, c + 4 * (vector * fields + field)) >> first & mask) << field * width
            store_int(to + 64 * vector, bits)

    return part(moved)


PACK = words("source stride target rows columns")


@cache
def pack(form: Format) -> Kernel:
    """Make the kernel that packs rows at `source`, `stride` bytes each, to groups at `target`.

    Missing rows of the last group are not written.
    """
    split, block, nbytes, width = form.split, form.dtype.block, form.nbytes, form.planes[0]
    high = form.planes[1] if len(form.planes) > 1 else 0
    low_bits, high_bits = _moved(form.four, 0, width), _moved(form.four, width, high or width)

    def body(a, thread, threads):
        source, stride, target, rows = PACK.source(a), PACK.stride(a), PACK.target(a), PACK.rows(a)
        n = PACK.columns(a) // COLUMNS
        lo, hi = share((rows + ROWS - 1) // ROWS, thread, threads)
        for group in range(lo, hi):
            for first in range(0, n, UNIT):
                count, skipped = min(UNIT, n - first), first * nbytes
                planes = target + group * ROWS * stride + skipped
                second = planes + count * 64 * width
                scales = second + count * 64 * high
                for lane in range(min(ROWS, rows - group * ROWS)):
                    row = source + (group * ROWS + lane) * stride + skipped // ROWS
                    for b in range(count):
                        low_bits(row, b * COLUMNS, planes + b * 64 * width + 4 * lane)
                        if high:
                            high_bits(row, b * COLUMNS, second + b * 64 * high + 4 * lane)
                    for s in range(count * COLUMNS // block):
                        split(row, scales, lane, s)
        return 0

    return Kernel(f"packing.pack.{form.dtype}", body)


UNPACK = words("packed stride rows columns ids target step count scratch")


@cache
def unpack(form: Format) -> Kernel:
    """Make the kernel that unpacks `count` rows by id to float32.

    `ids` are int32. `stride` is the bytes of a packed row, `step` the bytes from row to row of the target. Each thread
    has 1,024 bytes of scratch. An invalid id stops the run.
    """
    codes, scales, biases, nbytes, width = form.codes, form.scales, form.biases, form.nbytes, form.planes[0]
    high = form.planes[1] if len(form.planes) > 1 else 0

    def body(a, thread, threads):
        packed, stride, rows, columns = UNPACK.packed(a), UNPACK.stride(a), UNPACK.rows(a), UNPACK.columns(a)
        ids, target, step, scratch = UNPACK.ids(a), UNPACK.target(a), UNPACK.step(a), UNPACK.scratch(a) + 1024 * thread
        n = columns // COLUMNS
        lo, hi = share(UNPACK.count(a), thread, threads)
        for i in range(lo, hi):
            row = load_int(ids + 4 * i)
            if row < 0 or row >= rows:
                return NO_ROW | row << 8
            group, lane = packed + row // ROWS * ROWS * stride, row % ROWS
            for b in range(n):
                j = b % UNIT
                count, planes = min(UNIT, n - (b - j)), group + (b - j) * nbytes
                second = planes + count * 64 * width
                last = second + count * 64 * high
                store_codes(scratch, codes(planes + j * 64 * width, second + j * 64 * high))
                d, e = scales(last, j)
                m, o = biases(last, j)
                store(scratch + 512, d)
                store(scratch + 576, m)
                store(scratch + 640, e)
                store(scratch + 704, o)
                for c in range(COLUMNS):
                    u = load_byte(scratch + c // 4 * 64 + lane * 4 + c % 4)
                    at = scratch + 512 + c // 16 * 128 + 4 * lane
                    # target[i, c] = scale * code + bias
                    store_scalar(target + i * step + 4 * (b * COLUMNS + c), load_scalar(at) * u + load_scalar(at + 64))
        return 0

    return Kernel(f"packing.unpack.{form.dtype}", body)
