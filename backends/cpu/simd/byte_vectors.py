"""Operations on vectors of 64 bytes: table lookups, bit fields, and int8 dot products of four bytes per int32 lane."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from llvmlite import ir

from ..target_cpu import find_features_of_compile_target
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
"""By CPU feature: LLVM name and operand bytes of the int8 dot-product instruction (VNNI, usdot).

The instruction adds four products of an unsigned and a signed byte to each int32 lane.
"""
SHUFFLE_INSTRUCTIONS: Mapping[str, tuple[str, int]] = MappingProxyType(
    {
        "avx512bw": ("llvm.x86.avx512.pshuf.b.512", 64),
        "avx2": ("llvm.x86.avx2.pshuf.b", 32),
        "neon": ("llvm.aarch64.neon.tbl1.v16i8", 16),
    }
)
"""By CPU feature: LLVM name and operand bytes of the instruction that looks bytes up in a table of 16 bytes."""
BIT_MATRIX_INSTRUCTIONS: Mapping[str, tuple[str, int]] = MappingProxyType(
    {"avx512bw": ("llvm.x86.vgf2p8affineqb.512", 64), "avx2": ("llvm.x86.vgf2p8affineqb.256", 32)}
)
"""By CPU feature: LLVM name and operand bytes of the instruction that multiplies each byte by an 8 x 8 bit matrix.

The processor needs the feature ``gfni``, too. A matrix is eight bytes. The last byte selects the bits that add up to
the lowest bit of the result. The first byte selects the bits that add up to the highest bit.
"""


def find_supported_instruction(instructions_by_feature: Mapping[str, tuple[str, int]]) -> tuple[str, int] | None:
    """Return the name and the operand bytes of the first instruction that the target processor supports, or None.

    `instructions_by_feature` has the instructions by CPU feature.
    """
    return next(
        (known for feature, known in instructions_by_feature.items() if find_features_of_compile_target().get(feature)),
        None,
    )


def has_dot4_instruction() -> bool:
    """Return whether the target processor has an instruction for `dot4`, an int8 dot product of four bytes."""
    return find_supported_instruction(DOT4_INSTRUCTIONS) is not None


def apply_instruction_per_register(
    b: Any, instruction: str, result_element: ir.Type, register_bytes: int, *values: Any
) -> Any:
    """Apply an LLVM instruction of `register_bytes` to each such slice of longer vectors, and concatenate the results.

    Args:
        b: The IR builder.
        instruction: Name of the instruction in LLVM.
        result_element: Element type of the result.
        register_bytes: Bytes of one operand vector of the instruction.
        values: The operands. Scalars and vectors of at most `register_bytes` bytes are passed unchanged.
    """
    result = ir.VectorType(result_element, 8 * register_bytes // result_element.width)
    parts = [
        simd.emit_llvm_call(b, instruction, result, *(_slice_vector(b, v, i, register_bytes) for v in values))
        for i in range(_count_vector_bytes(values[0]) // register_bytes)
    ]
    while len(parts) > 1:
        parts = [_concat_vectors(b, *parts[i : i + 2]) for i in range(0, len(parts), 2)]
    return parts[0]


def move_bit_field(b: Any, x: Any, from_bit: int, width: int, to_bit: int) -> Any:
    """Move the field of `width` bits in each byte from bit `from_bit` to bit `to_bit`, and clear the other bits."""
    if (
        from_bit != to_bit
        and find_features_of_compile_target().get("gfni")
        and (known := find_supported_instruction(BIT_MATRIX_INSTRUCTIONS)) is not None
    ):
        name, size = known
        rows = [1 << bit - to_bit + from_bit if to_bit <= bit < to_bit + width else 0 for bit in reversed(range(8))]
        matrix = ir.Constant(ir.VectorType(_B.element, size), rows * (size // 8))
        return apply_instruction_per_register(b, name, _B.element, size, x, matrix, ir.Constant(_B.element, 0))
    return b.shl(b.and_(b.lshr(x, bytes_of(from_bit)), bytes_of((1 << width) - 1)), bytes_of(to_bit))


def _count_vector_bytes(value: Any) -> int:
    """Return the number of bytes of an LLVM vector. The result is 0 for a scalar."""
    kind = value.type
    return kind.count * kind.element.width // 8 if isinstance(kind, ir.VectorType) else 0


def _slice_vector(b: Any, value: Any, index: int, size: int) -> Any:
    """Return slice number `index` of `size` bytes of a vector; return a value of at most `size` bytes unchanged."""
    if _count_vector_bytes(value) <= size:
        return value
    count = 8 * size // value.type.element.width
    return b.shuffle_vector(value, value, _lanes(range(index * count, (index + 1) * count)))


def _concat_vectors(b: Any, x: Any, y: Any) -> Any:
    return b.shuffle_vector(x, y, _lanes(range(2 * x.type.count)))


def _lanes(order: range) -> ir.Constant:
    return ir.Constant(ir.VectorType(_i32, len(order)), list(order))


@intrinsic(BYTES, ADDRESS)
def splat_4_bytes(b, address):
    """Load four bytes from `address` and repeat them 16 times in a vector of 64 bytes."""
    four = b.load(b.inttoptr(address, _i32.as_pointer()), align=1)
    one = b.insert_element(ir.Constant(_I, ir.Undefined), four, ir.Constant(_i32, 0))
    return b.bitcast(b.shuffle_vector(one, one, ir.Constant(_I, [0] * _I.count)), _B)


def make_repeated_16_byte_lookup_table(values: list[int]) -> Intrinsic:
    """Make an intrinsic that returns a lookup table of 16 bytes, repeated four times for `look_up_in_16_byte_table`."""
    return intrinsic(BYTES)(lambda b: ir.Constant(_B, values * 4))


@intrinsic(BYTES, BYTES)
def absolute_bytes(b, x):
    """Return the absolute values of 64 signed bytes, as unsigned bytes."""
    return simd.emit_llvm_call(b, "llvm.abs.v64i8", _B, x, ir.Constant(ir.IntType(1), 0))


@intrinsic(BYTES, BYTES, BYTES)
def look_up_in_16_byte_table(b, table, indices):
    """Look up bytes in a table of 16 bytes: byte i of the result is ``table[indices[i]]``, for indices from 0 to 15.

    `table` holds the same 16 bytes four times.
    """
    if (known := find_supported_instruction(SHUFFLE_INSTRUCTIONS)) is not None:
        name, size = known
        return apply_instruction_per_register(b, name, _B.element, size, table, indices)
    found = bytes_of(0)
    for i in range(16):
        entry = b.shuffle_vector(table, table, ir.Constant(ir.VectorType(_i32, 64), [i] * 64))
        found = b.select(b.icmp_unsigned("==", indices, bytes_of(i)), entry, found)
    return found


@intrinsic(INTS, INTS, BYTES, BYTES)
def dot4(b, sums, unsigned_bytes, signed_bytes):
    """Add the dot product of four adjacent unsigned and signed bytes to each int32 lane of `sums`."""
    if (known := find_supported_instruction(DOT4_INSTRUCTIONS)) is not None:
        name, size = known
        return apply_instruction_per_register(b, name, _i32, size, sums, unsigned_bytes, signed_bytes)
    # Even and odd bytes as 16-bit lanes, multiplied and added in pairs: vpmaddwd on x86, smull and smlal on Arm.
    half, wide = ir.VectorType(_i16, 32), ir.VectorType(_i32, 32)
    eight = ir.Constant(half, [8] * 32)
    unsigned_bytes, signed_bytes = b.bitcast(unsigned_bytes, half), b.bitcast(signed_bytes, half)
    even, odd = _lanes(range(0, 32, 2)), _lanes(range(1, 32, 2))
    evens = b.and_(unsigned_bytes, ir.Constant(half, [255] * 32)), b.ashr(b.shl(signed_bytes, eight), eight)
    odds = b.lshr(unsigned_bytes, eight), b.ashr(signed_bytes, eight)
    for x, y in (evens, odds):
        p = b.mul(b.sext(x, wide), b.sext(y, wide))
        sums = b.add(sums, b.add(b.shuffle_vector(p, p, even), b.shuffle_vector(p, p, odd)))
    return sums
