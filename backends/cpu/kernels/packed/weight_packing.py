"""Packing of GGUF rows into groups of 16, and unpacking to float32."""

from __future__ import annotations

from functools import cache

from ...compilation.compiler import Kernel
from ...compilation.kernel_args import declare_args
from ...simd.dot_tiles import store_codes
from ...simd.vectors import load_byte, load_int, load_scalar, store, store_scalar
from ...steps.partition import compute_thread_range
from .format_table import BLOCK_COLUMNS, GROUP_ROWS, UNIT_BLOCKS, PackedFormat

INVALID_ROW = 1
"""Status of a run with an invalid row id. The id is stored above the low byte."""


PACK_ARGS = declare_args("source stride target rows columns")


@cache
def make_pack_weight_rows_kernel(form: PackedFormat) -> Kernel:
    """Make the kernel that packs the weight rows at `source` into groups of 16 rows at `target`.

    A source row has `stride` bytes. Missing rows of the last group are not written.
    """
    split, block, nbytes, pack_codes = form.pack_scales, form.dtype.block, form.packed_block_bytes, form.pack_codes
    of_first, of_second = form.plane_bytes

    def body(a, thread, threads):
        source, stride, target, rows = PACK_ARGS.source(a), PACK_ARGS.stride(a), PACK_ARGS.target(a), PACK_ARGS.rows(a)
        n = PACK_ARGS.columns(a) // BLOCK_COLUMNS
        lo, hi = compute_thread_range((rows + GROUP_ROWS - 1) // GROUP_ROWS, thread, threads)
        for group in range(lo, hi):
            for first in range(0, n, UNIT_BLOCKS):
                count, skipped = min(UNIT_BLOCKS, n - first), first * nbytes
                planes = target + group * GROUP_ROWS * stride + skipped
                second = planes + count * of_first
                scales = second + count * of_second
                for lane in range(min(GROUP_ROWS, rows - group * GROUP_ROWS)):
                    row = source + (group * GROUP_ROWS + lane) * stride + skipped // GROUP_ROWS
                    for b in range(count):
                        pack_codes(row, b, planes + b * of_first, second + b * of_second, lane)
                    for s in range(count * BLOCK_COLUMNS // block):
                        split(row, scales, lane, s)
        return 0

    return Kernel(f"weight_packing.pack.{form.dtype}", body)


UNPACK_ARGS = declare_args("packed stride rows columns ids target step count scratch")


@cache
def make_dequantise_rows_by_id_kernel(form: PackedFormat) -> Kernel:
    """Make the kernel that dequantises some rows of a packed weight to float32; `ids` (int32) has their numbers.

    There are `count` ids. `stride` is the bytes of a packed row, `step` the bytes from row to row of the target. Each
    thread has 1,024 bytes of scratch. An invalid id stops the run.
    """
    codes, scales, biases, nbytes = form.load_codes, form.load_scales, form.load_biases, form.packed_block_bytes
    of_first, of_second = form.plane_bytes

    def body(a, thread, threads):
        packed, stride, rows = UNPACK_ARGS.packed(a), UNPACK_ARGS.stride(a), UNPACK_ARGS.rows(a)
        columns = UNPACK_ARGS.columns(a)
        ids, target, step = UNPACK_ARGS.ids(a), UNPACK_ARGS.target(a), UNPACK_ARGS.step(a)
        scratch = UNPACK_ARGS.scratch(a) + 1024 * thread
        n = columns // BLOCK_COLUMNS
        lo, hi = compute_thread_range(UNPACK_ARGS.count(a), thread, threads)
        for i in range(lo, hi):
            row = load_int(ids + 4 * i)
            if row < 0 or row >= rows:
                return INVALID_ROW | row << 8
            group, lane = packed + row // GROUP_ROWS * GROUP_ROWS * stride, row % GROUP_ROWS
            for b in range(n):
                j = b % UNIT_BLOCKS
                count, planes = min(UNIT_BLOCKS, n - (b - j)), group + (b - j) * nbytes
                second = planes + count * of_first
                last = second + count * of_second
                store_codes(scratch, codes(planes + j * of_first, second + j * of_second))
                d, e = scales(last, j)
                m, o = biases(last, j)
                store(scratch + 512, d)
                store(scratch + 576, m)
                store(scratch + 640, e)
                store(scratch + 704, o)
                for c in range(BLOCK_COLUMNS):
                    u = load_byte(scratch + c // 4 * 64 + lane * 4 + c % 4)
                    at = scratch + 512 + c // 16 * 128 + 4 * lane
                    # target[i, c] = scale * code + bias
                    store_scalar(
                        target + i * step + 4 * (b * BLOCK_COLUMNS + c), load_scalar(at) * u + load_scalar(at + 64)
                    )
        return 0

    return Kernel(f"weight_packing.unpack.{form.dtype}", body)
