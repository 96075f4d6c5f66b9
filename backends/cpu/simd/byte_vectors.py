"""Vectors of 64 bytes: table lookups, and sums of four products."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from llvmlite import ir

from ..target_cpu import find_target_features
from . import vectors as simd
from .vectors import ADDRESS, BYTES, INTS, Intrinsic, bytes_of, intrinsic, llvm_type

_B, _I = llvm_type(BYTES), llvm_type(INTS)
_i16, _i32 = ir.IntType(16), ir.IntType(32)

DOT4_INSTRUCTIONS: Mapping[str, tuple[str, int]] = MappingProxyType(
    {
        "avx512vnni": ("llvm.x86.avx512.vpdpbusd.512", 64),
        "avxvnni": ("llvm.x86.avx512.vpdpbusd.256", 32),
        "i8mm": ("llvm.aarch64.neon.usdot.v4i32.v16i8", 16),
    }
)
"""By CPU feature: the instruction that adds four products of an unsigned and a signed byte to a lane, and its bytes."""
SHUFFLE_INSTRUCTIONS: Mapping[str, tuple[str, int]] = MappingProxyType(
    {
        "avx512bw": ("llvm.x86.avx512.pshuf.b.512", 64),
        "avx2": ("llvm.x86.avx2.pshuf.b", 32),
        "neon": ("llvm.aarch64.neon.tbl1.v16i8", 16),
    }
)
"""By CPU feature: the instruction that looks bytes up in a table of 16, and its bytes."""
BIT_MATRIX_INSTRUCTIONS: Mapping[str, tuple[str, int]] = MappingProxyType(
    {"avx512bw": ("llvm.x86.vgf2p8affineqb.512", 64), "avx2": ("llvm.x86.vgf2p8affineqb.256", 32)}
)
"""By CPU feature: the instruction that multiplies each byte, as 8 bits, by a bit matrix; it needs ``gfni``, too.

A matrix is eight bytes. The last byte selects the bits that add up to the lowest bit of the result, the first byte
those for the highest bit.
"""


def find_instruction(of: Mapping[str, tuple[str, int]]) -> tuple[str, int] | None:
    """Return the first instruction that the processor has, with its bytes, or None."""
    return next((known for feature, known in of.items() if find_target_features().get(feature)), None)


def has_dot4() -> bool:
    """Return whether the processor adds four products at once."""
    return find_instruction(DOT4_INSTRUCTIONS) is not None


def apply_per_register(b: Any, name: str, element: ir.Type, size: int, *values: Any) -> Any:
    """Apply an instruction that takes `size` bytes of each vector to longer vectors, and join the results.

    Args:
        b: The builder.
        name: Name of the instruction in LLVM.
        element: Element type of the result.
        size: Bytes of each vector that the instruction takes.
        values: The operands. Scalars and vectors of at most `size` bytes are passed unchanged.
    """
    result = ir.VectorType(element, 8 * size // element.width)
    parts = [
        simd.call_llvm(b, name, result, *(_slice_vector(b, v, i, size) for v in values))
        for i in range(_count_vector_bytes(values[0]) // size)
    ]
    while len(parts) > 1:
        parts = [_concat_vectors(b, *parts[i : i + 2]) for i in range(0, len(parts), 2)]
    return parts[0]


def move_bits(b: Any, x: Any, at: int, width: int, to: int) -> Any:
    """Move `width` bits of each byte from bit `at` to bit `to`, and clear the other bits."""
    if (
        at != to
        and find_target_features().get("gfni")
        and (known := find_instruction(BIT_MATRIX_INSTRUCTIONS)) is not None
    ):
        name, size = known
        rows = [1 << bit - to + at if to <= bit < to + width else 0 for bit in reversed(range(8))]
        matrix = ir.Constant(ir.VectorType(_B.element, size), rows * (size // 8))
        return apply_per_register(b, name, _B.element, size, x, matrix, ir.Constant(_B.element, 0))
    return b.shl(b.and_(b.lshr(x, bytes_of(at)), bytes_of((1 << width) - 1)), bytes_of(to))


def _count_vector_bytes(value: Any) -> int:
    """Return the bytes of a vector; 0 for a scalar."""
    kind = value.type
    return kind.count * kind.element.width // 8 if isinstance(kind, ir.VectorType) else 0


def _slice_vector(b: Any, value: Any, i: int, size: int) -> Any:
    """Return slice `i` of `size` bytes; a shorter value is returned unchanged."""
    if _count_vector_bytes(value) <= size:
        return value
    count = 8 * size // value.type.element.width
    return b.shuffle_vector(value, value, _lanes(range(i * count, (i + 1) * count)))


def _concat_vectors(b: Any, x: Any, y: Any) -> Any:
    return b.shuffle_vector(x, y, _lanes(range(2 * x.type.count)))


def _lanes(order: range) -> ir.Constant:
    return ir.Constant(ir.VectorType(_i32, len(order)), list(order))


@intrinsic(BYTES, ADDRESS)
def splat_4_bytes(b, a):
    """Load four bytes and repeat them in every group of four bytes."""
    four = b.load(b.inttoptr(a, _i32.as_pointer()), align=1)
    one = b.insert_element(ir.Constant(_I, ir.Undefined), four, ir.Constant(_i32, 0))
    return b.bitcast(b.shuffle_vector(one, one, ir.Constant(_I, [0] * _I.count)), _B)


def make_byte_table(values: list[int]) -> Intrinsic:
    """Return an intrinsic for a table of 16 bytes, repeated four times, as `look_up` needs it."""
    return intrinsic(BYTES)(lambda b: ir.Constant(_B, values * 4))


@intrinsic(BYTES, BYTES)
def absolute_bytes(b, x):
    """Return the magnitudes of signed bytes, as unsigned bytes."""
    return simd.call_llvm(b, "llvm.abs.v64i8", _B, x, ir.Constant(ir.IntType(1), 0))


@intrinsic(BYTES, BYTES, BYTES)
def look_up(b, table, index):
    """Return entry ``index[i]`` (0 to 15) of the table that each 16 bytes of `table` hold."""
    if (known := find_instruction(SHUFFLE_INSTRUCTIONS)) is not None:
        name, size = known
        return apply_per_register(b, name, _B.element, size, table, index)
    found = bytes_of(0)
    for i in range(16):
        entry = b.shuffle_vector(table, table, ir.Constant(ir.VectorType(_i32, 64), [i] * 64))
        found = b.select(b.icmp_unsigned("==", index, bytes_of(i)), entry, found)
    return found


@intrinsic(INTS, INTS, BYTES, BYTES)
def dot4(b, acc, u, s):
    """Add to each lane the sum of four adjacent products of unsigned `u` and signed `s`."""
    if (known := find_instruction(DOT4_INSTRUCTIONS)) is not None:
        name, size = known
        return apply_per_register(b, name, _i32, size, acc, u, s)
    # Even and odd bytes as 16-bit lanes, multiplied and added in pairs: vpmaddwd on x86, smull and smlal on Arm.
    half, wide = ir.VectorType(_i16, 32), ir.VectorType(_i32, 32)
    eight = ir.Constant(half, [8] * 32)
    u, s = b.bitcast(u, half), b.bitcast(s, half)
    even, odd = _lanes(range(0, 32, 2)), _lanes(range(1, 32, 2))
    evens = b.and_(u, ir.Constant(half, [255] * 32)), b.ashr(b.shl(s, eight), eight)
    odds = b.lshr(u, eight), b.ashr(s, eight)
    for x, y in (evens, odds):
        p = b.mul(b.sext(x, wide), b.sext(y, wide))
        acc = b.add(acc, b.add(b.shuffle_vector(p, p, even), b.shuffle_vector(p, p, odd)))
    return acc
