"""Kernels that measure the limits of a processor: memory reads alone, and products alone."""

from __future__ import annotations

from functools import cache

from ..compilation.compiler import Kernel, kernel
from ..compilation.kernel_args import declare_args
from ..simd.amx import TILE_MEMORY_BYTES
from ..simd.byte_vectors import dot4
from ..simd.vectors import add, add_int, fma, load, load_bytes, prefetch, prefetch_l2, store, to_float, zero_ints, zeros
from ..steps.partition import compute_thread_range
from .vector.amx_tiles import select_amx_tile_operations

LINES_PER_ITERATION = 8
"""Cache lines that are read in one turn, each into its own sum."""
INDEPENDENT_SUMS = 12
"""Independent sums: more than the latency of a product in cycles times the number of product units."""


TURNS_PER_CHUNK = 128
"""Turns that a thread reads in a row if threads share a region: 64 KiB."""
READ_ARGS = declare_args("memory turns streams together l1_ahead l2_ahead sums")


@kernel
def read_and_sum_memory(a, thread, threads):
    """Read memory and add up its contents, 512 bytes in each turn of the loop, to measure memory bandwidth.

    Each thread reads `streams` streams at a time. Threads read separate parts of the memory, or interleaved chunks if
    `together`. `l1_ahead` and `l2_ahead` are the prefetch distances in bytes to the first and the second cache. Each
    thread has 64 bytes for its sums.
    """
    lo, hi = compute_thread_range(READ_ARGS.turns(a), thread, threads)
    l1_ahead, l2_ahead, streams = READ_ARGS.l1_ahead(a), READ_ARGS.l2_ahead(a), READ_ARGS.streams(a)
    together, each = READ_ARGS.together(a), (hi - lo) // streams
    s0, s1, s2, s3, s4, s5, s6, s7 = zeros(), zeros(), zeros(), zeros(), zeros(), zeros(), zeros(), zeros()
    for i in range(each):
        for stream in range(streams):
            turn = i + stream * each
            turn = (
                (turn // TURNS_PER_CHUNK * threads + thread) * TURNS_PER_CHUNK + turn % TURNS_PER_CHUNK
                if together
                else lo + turn
            )
            p = READ_ARGS.memory(a) + turn * 64 * LINES_PER_ITERATION
            for line in range(LINES_PER_ITERATION):
                prefetch(p + l1_ahead + 64 * line)
                prefetch_l2(p + l2_ahead + 64 * line)
            s0, s1, s2, s3 = add(s0, load(p)), add(s1, load(p + 64)), add(s2, load(p + 128)), add(s3, load(p + 192))
            p += 256
            s4, s5, s6, s7 = add(s4, load(p)), add(s5, load(p + 64)), add(s6, load(p + 128)), add(s7, load(p + 192))
    store(READ_ARGS.sums(a) + 64 * thread, add(add(add(s0, s1), add(s2, s3)), add(add(s4, s5), add(s6, s7))))
    return 0


MULTIPLY_ARGS = declare_args("turns values sums")


@kernel
def repeat_float_multiply_adds(a, thread, threads):
    """Repeat float32 multiply-adds of two vectors in registers, to measure arithmetic speed.

    A turn of the loop has `INDEPENDENT_SUMS` of them. Each thread has 64 bytes for its sums.
    """
    u, v = load(MULTIPLY_ARGS.values(a)), load(MULTIPLY_ARGS.values(a) + 64)
    s0, s1, s2, s3, s4, s5 = zeros(), zeros(), zeros(), zeros(), zeros(), zeros()
    s6, s7, s8, s9, sa, sb = zeros(), zeros(), zeros(), zeros(), zeros(), zeros()
    for _ in range(MULTIPLY_ARGS.turns(a)):
        s0, s1, s2, s3 = fma(s0, u, v), fma(s1, u, v), fma(s2, u, v), fma(s3, u, v)
        s4, s5, s6, s7 = fma(s4, u, v), fma(s5, u, v), fma(s6, u, v), fma(s7, u, v)
        s8, s9, sa, sb = fma(s8, u, v), fma(s9, u, v), fma(sa, u, v), fma(sb, u, v)
    x, y, z = add(add(s0, s1), add(s2, s3)), add(add(s4, s5), add(s6, s7)), add(add(s8, s9), add(sa, sb))
    store(MULTIPLY_ARGS.sums(a) + 64 * thread, add(add(x, y), z))
    return 0


@kernel
def repeat_int8_dot_products(a, thread, threads):
    """Repeat int8 dot products of two vectors in registers, to measure arithmetic speed.

    A turn of the loop has `INDEPENDENT_SUMS` of them. A dot product adds four products in each 32-bit lane. Each thread
    has 64 bytes for its sums.
    """
    u, v = load_bytes(MULTIPLY_ARGS.values(a)), load_bytes(MULTIPLY_ARGS.values(a) + 64)
    s0, s1, s2, s3, s4, s5 = zero_ints(), zero_ints(), zero_ints(), zero_ints(), zero_ints(), zero_ints()
    s6, s7, s8, s9, sa, sb = zero_ints(), zero_ints(), zero_ints(), zero_ints(), zero_ints(), zero_ints()
    for _ in range(MULTIPLY_ARGS.turns(a)):
        s0, s1, s2, s3 = dot4(s0, u, v), dot4(s1, u, v), dot4(s2, u, v), dot4(s3, u, v)
        s4, s5, s6, s7 = dot4(s4, u, v), dot4(s5, u, v), dot4(s6, u, v), dot4(s7, u, v)
        s8, s9, sa, sb = dot4(s8, u, v), dot4(s9, u, v), dot4(sa, u, v), dot4(sb, u, v)
    x = add_int(add_int(s0, s1), add_int(s2, s3))
    y = add_int(add_int(s4, s5), add_int(s6, s7))
    z = add_int(add_int(s8, s9), add_int(sa, sb))
    store(MULTIPLY_ARGS.sums(a) + 64 * thread, to_float(add_int(add_int(x, y), z)))
    return 0


TILE_ARGS = declare_args("turns memory")
INDEPENDENT_TILES = 4


@cache
def make_repeat_amx_tile_products_kernel() -> Kernel:
    """Make the kernel that repeats bfloat16 AMX tile products, to measure arithmetic speed.

    A turn of the loop has `INDEPENDENT_TILES` of them. Each thread has `TILE_MEMORY_BYTES` bytes of scratch.
    """
    unit = select_amx_tile_operations()
    configure, release, clear_0, clear_1, clear_2, clear_3 = unit.configure, unit.release, *unit.clear[:4]
    load_x, load_y, load_u, load_v = unit.load[4:]
    m0, m1, m2, m3 = (unit.multiply(2 * row + k, 4 + row, 6 + k) for row in range(2) for k in range(2))

    def body(a, thread, threads):
        memory = TILE_ARGS.memory(a) + thread * TILE_MEMORY_BYTES
        configure(memory)
        clear_0(memory)
        clear_1(memory)
        clear_2(memory)
        clear_3(memory)
        load_x(memory, memory, 64)
        load_y(memory, memory, 64)
        load_u(memory, memory, 64)
        load_v(memory, memory, 64)
        for _ in range(TILE_ARGS.turns(a)):
            m0(memory)
            m1(memory)
            m2(memory)
            m3(memory)
        release(memory)
        return 0

    return Kernel("peak_probes.multiply_tiles", body)
