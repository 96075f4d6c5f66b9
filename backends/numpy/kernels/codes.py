"""Codes of packed weights as vectors: 16 rows by 32 columns, unpacked from one or two planes of bits.

Each function takes where the block stands in its planes, and gives the 8 vectors of its columns 0 to 3, 4 to 7, ...
"""

from __future__ import annotations

from ..compiler import part
from .simd import bits, high_nibbles, load_bytes, low_nibbles, or_bytes


@part
def codes_8(p, h):
    return (
        load_bytes(p),
        load_bytes(p + 64),
        load_bytes(p + 128),
        load_bytes(p + 192),
        load_bytes(p + 256),
        load_bytes(p + 320),
        load_bytes(p + 384),
        load_bytes(p + 448),
    )


@part
def codes_4(p, h):
    a, b, c, d = load_bytes(p), load_bytes(p + 64), load_bytes(p + 128), load_bytes(p + 192)
    return (
        low_nibbles(a),
        high_nibbles(a),
        low_nibbles(b),
        high_nibbles(b),
        low_nibbles(c),
        high_nibbles(c),
        low_nibbles(d),
        high_nibbles(d),
    )


@part
def codes_5(p, h):
    a, b, c, d, e, f, g, i = codes_4(p, h)
    z = load_bytes(h)
    return (
        or_bytes(a, bits(z, 0, 1, 4)),
        or_bytes(b, bits(z, 1, 1, 4)),
        or_bytes(c, bits(z, 2, 1, 4)),
        or_bytes(d, bits(z, 3, 1, 4)),
        or_bytes(e, bits(z, 4, 1, 4)),
        or_bytes(f, bits(z, 5, 1, 4)),
        or_bytes(g, bits(z, 6, 1, 4)),
        or_bytes(i, bits(z, 7, 1, 4)),
    )


@part
def codes_6(p, h):
    a, b, c, d, e, f, g, i = codes_4(p, h)
    y, z = load_bytes(h), load_bytes(h + 64)
    return (
        or_bytes(a, bits(y, 0, 3, 4)),
        or_bytes(b, bits(y, 2, 3, 4)),
        or_bytes(c, bits(y, 4, 3, 4)),
        or_bytes(d, bits(y, 6, 3, 4)),
        or_bytes(e, bits(z, 0, 3, 4)),
        or_bytes(f, bits(z, 2, 3, 4)),
        or_bytes(g, bits(z, 4, 3, 4)),
        or_bytes(i, bits(z, 6, 3, 4)),
    )


@part
def codes_2(p, h):
    y, z = load_bytes(p), load_bytes(p + 64)
    return (
        bits(y, 0, 3, 0),
        bits(y, 2, 3, 0),
        bits(y, 4, 3, 0),
        bits(y, 6, 3, 0),
        bits(z, 0, 3, 0),
        bits(z, 2, 3, 0),
        bits(z, 4, 3, 0),
        bits(z, 6, 3, 0),
    )


@part
def codes_3(p, h):
    a, b, c, d, e, f, g, i = codes_2(p, h)
    z = load_bytes(h)
    return (
        or_bytes(a, bits(z, 0, 1, 2)),
        or_bytes(b, bits(z, 1, 1, 2)),
        or_bytes(c, bits(z, 2, 1, 2)),
        or_bytes(d, bits(z, 3, 1, 2)),
        or_bytes(e, bits(z, 4, 1, 2)),
        or_bytes(f, bits(z, 5, 1, 2)),
        or_bytes(g, bits(z, 6, 1, 2)),
        or_bytes(i, bits(z, 7, 1, 2)),
    )
