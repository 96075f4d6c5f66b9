"""Rows as a GGUF file has them to packed groups of 16, and packed rows back to float32."""

from __future__ import annotations

from functools import cache

from ..compiler import Kernel, part
from .formats import COLUMNS, ROWS, Format
from .simd import (
    load_byte,
    load_int,
    load_scalar,
    store,
    store_byte,
    store_scalar,
    word,
)
from .tiles import store_codes

NO_ROW = 1
"""Status of a run that an id stopped which names no row; the id itself stands above the low byte."""


@part
def share(n, thread, threads):
    """The part of `n` things that is a thread's: (first, past the last)."""
    each = (n + threads - 1) // threads
    return min(n, each * thread), min(n, each * (thread + 1))


@cache
def pack(form: Format) -> Kernel:
    """Words: source, bytes of a row there, target, rows, columns.

    Rows that the last group lacks are left as they are.
    """
    code, split, width, block = form.code, form.split, form.planes[0], form.block
    high = form.planes[1] if len(form.planes) > 1 else 0

    def body(a, thread, threads):
        source, stride, target, rows, columns = word(a, 0), word(a, 1), word(a, 2), word(a, 3), word(a, 4)
        n = columns // COLUMNS
        lo, hi = share((rows + ROWS - 1) // ROWS, thread, threads)
        for group in range(lo, hi):
            planes = target + group * ROWS * stride
            second = planes + n * 64 * width
            scales = second + n * 64 * high
            for lane in range(min(ROWS, rows - group * ROWS)):
                row = source + (group * ROWS + lane) * stride
                for c in range(columns):
                    u = code(row, c)
                    j, byte = c % COLUMNS // 4, lane * 4 + c % 4
                    put(planes, c // COLUMNS, j, byte, u, width)
                    if high:
                        put(second, c // COLUMNS, j, byte, u >> width, high)
                for s in range(columns // block):
                    split(row, scales, lane, s)
        return 0

    return Kernel(f"packing.pack.{form.name}", body)


@part
def put(plane, b, j, byte, u, width):
    """Or the low `width` bits of a code into its place: field ``j % fields`` of a byte of vector ``j // fields``."""
    fields = 8 // width
    at = plane + b * 64 * width + j // fields * 64 + byte
    store_byte(at, load_byte(at) | (u & ((1 << width) - 1)) << j % fields * width)


@cache
def unpack(form: Format) -> Kernel:
    """Rows by number.  Words: packed weight, bytes of a row, rows there, columns, ids (int32), target, bytes between
    target rows, how many, 1,024 bytes of scratch for each thread.  An id that is no row stops the run."""
    codes, scales, biases, width = form.codes, form.scales, form.biases, form.planes[0]
    high = form.planes[1] if len(form.planes) > 1 else 0

    def body(a, thread, threads):
        packed, stride, rows, columns = word(a, 0), word(a, 1), word(a, 2), word(a, 3)
        ids, target, step, scratch = word(a, 4), word(a, 5), word(a, 6), word(a, 8) + 1024 * thread
        n = columns // COLUMNS
        lo, hi = share(word(a, 7), thread, threads)
        for i in range(lo, hi):
            row = load_int(ids + 4 * i)
            if row < 0 or row >= rows:
                return NO_ROW | row << 8
            planes, lane = packed + row // ROWS * ROWS * stride, row % ROWS
            second = planes + n * 64 * width
            last = second + n * 64 * high
            for b in range(n):
                store_codes(scratch, codes(planes + b * 64 * width, second + b * 64 * high))
                d, e = scales(last, b)
                m, o = biases(last, b)
                store(scratch + 512, d)
                store(scratch + 576, m)
                store(scratch + 640, e)
                store(scratch + 704, o)
                for c in range(COLUMNS):
                    u = load_byte(scratch + c // 4 * 64 + lane * 4 + c % 4)
                    at = scratch + 512 + c // 16 * 128 + 4 * lane
                    store_scalar(target + i * step + 4 * (b * COLUMNS + c), load_scalar(at) * u + load_scalar(at + 64))
        return 0

    return Kernel(f"packing.unpack.{form.name}", body)
