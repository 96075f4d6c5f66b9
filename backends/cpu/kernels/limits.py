"""What a processor can do at most: memory read and nothing else, products and nothing else."""

from __future__ import annotations

from ..compiler import kernel
from ..simd.vectors import (
    add,
    add_int,
    dot4,
    fma,
    load,
    load_bytes,
    no_ints,
    prefetch,
    prefetch_far,
    store,
    to_float,
    word,
    zeros,
)
from .packing import share

LINES = 8
"""Cache lines read in one turn, each into a sum of its own."""
CHAINS = 12
"""Sums that do not wait for one another: more than a product takes cycles, times the units that make them."""


@kernel
def read(a, thread, threads):
    """Add up memory.  Words: where, how many turns of 512 bytes in all, how many bytes ahead it is fetched to the first
    and to the second cache, 64 bytes for the sums of each thread."""
    lo, hi = share(word(a, 1), thread, threads)
    near, far = word(a, 2), word(a, 3)
    s0, s1, s2, s3, s4, s5, s6, s7 = zeros(), zeros(), zeros(), zeros(), zeros(), zeros(), zeros(), zeros()
    for i in range(lo, hi):
        p = word(a, 0) + i * 64 * LINES
        for line in range(LINES):
            prefetch(p + near + 64 * line)
            prefetch_far(p + far + 64 * line)
        s0, s1, s2, s3 = add(s0, load(p)), add(s1, load(p + 64)), add(s2, load(p + 128)), add(s3, load(p + 192))
        p += 256
        s4, s5, s6, s7 = add(s4, load(p)), add(s5, load(p + 64)), add(s6, load(p + 128)), add(s7, load(p + 192))
    store(word(a, 4) + 64 * thread, add(add(add(s0, s1), add(s2, s3)), add(add(s4, s5), add(s6, s7))))
    return 0


@kernel
def multiply(a, thread, threads):
    """float32: turns of `CHAINS` vector products and sums.  Words: turns, two vectors, 64 bytes a thread."""
    u, v = load(word(a, 1)), load(word(a, 1) + 64)
    s0, s1, s2, s3, s4, s5 = zeros(), zeros(), zeros(), zeros(), zeros(), zeros()
    s6, s7, s8, s9, sa, sb = zeros(), zeros(), zeros(), zeros(), zeros(), zeros()
    for _ in range(word(a, 0)):
        s0, s1, s2, s3 = fma(s0, u, v), fma(s1, u, v), fma(s2, u, v), fma(s3, u, v)
        s4, s5, s6, s7 = fma(s4, u, v), fma(s5, u, v), fma(s6, u, v), fma(s7, u, v)
        s8, s9, sa, sb = fma(s8, u, v), fma(s9, u, v), fma(sa, u, v), fma(sb, u, v)
    x, y, z = add(add(s0, s1), add(s2, s3)), add(add(s4, s5), add(s6, s7)), add(add(s8, s9), add(sa, sb))
    store(word(a, 2) + 64 * thread, add(add(x, y), z))
    return 0


@kernel
def dot(a, thread, threads):
    """The same of bytes, four products in each 32-bit lane."""
    u, v = load_bytes(word(a, 1)), load_bytes(word(a, 1) + 64)
    s0, s1, s2, s3, s4, s5 = no_ints(), no_ints(), no_ints(), no_ints(), no_ints(), no_ints()
    s6, s7, s8, s9, sa, sb = no_ints(), no_ints(), no_ints(), no_ints(), no_ints(), no_ints()
    for _ in range(word(a, 0)):
        s0, s1, s2, s3 = dot4(s0, u, v), dot4(s1, u, v), dot4(s2, u, v), dot4(s3, u, v)
        s4, s5, s6, s7 = dot4(s4, u, v), dot4(s5, u, v), dot4(s6, u, v), dot4(s7, u, v)
        s8, s9, sa, sb = dot4(s8, u, v), dot4(s9, u, v), dot4(sa, u, v), dot4(sb, u, v)
    x = add_int(add_int(s0, s1), add_int(s2, s3))
    y = add_int(add_int(s4, s5), add_int(s6, s7))
    z = add_int(add_int(s8, s9), add_int(sa, sb))
    store(word(a, 2) + 64 * thread, to_float(add_int(add_int(x, y), z)))
    return 0
