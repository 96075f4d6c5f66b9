"""Codes of the types with code books: an index selects the magnitudes of 4 or 8 columns.

A block has 32 columns of 16 rows. Byte ``4 * row + i`` of a vector of indices has the low 8 bits of index i of the row.
Byte i of the 32-bit lane `row` of a vector of signs has the signs of 8 columns. A code is ``zero + magnitude`` or
``zero - magnitude``. A level is the position of a magnitude in the ascending list of magnitudes.

- Processors with VBMI look indices up in registers: an entry is two bytes of levels, and each instruction selects from
128 bytes. Then the level of a column is moved to its byte and, with the sign, looked up as a code.
- Other processors gather codes from a table in memory.

An index has more than 8 bits if the code book has more than 256 entries. `iq1_codes` has the types IQ1. Functions
with the parameter `b` emit LLVM IR with that builder; byte vectors have 64 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from .....graph.dtypes import DType
from .....graph.lazy_dataclass import dataclass
from .....ops.quantisation import load_code_book
from ...simd import vectors as simd
from ...simd.byte_vectors import BIT_MATRIX_INSTRUCTIONS, apply_instruction_per_register, find_supported_instruction
from ...simd.dot_tiles import CODE_VECTORS, CODES_TYPE, TWO_CODES_TYPE, pack_vectors_into_array
from ...simd.vectors import ADDRESS, BYTES, INTS, LANES, Intrinsic, bytes_of, intrinsic, ints_of, llvm_type
from ...target_cpu import find_features_of_compile_target

_B, _I = llvm_type(BYTES), llvm_type(INTS)
_i8, _i16, _i32, _i64 = (ir.IntType(n) for n in (8, 16, 32, 64))
VECTOR_BYTES, TABLE_BYTES = 64, 128
"""Bytes of a vector, and of the tables of one lookup in registers."""
PERMUTE_TWO = "llvm.x86.avx512.vpermi2var.qi.512"
"""Selects bytes of two vectors by the low 7 bits of each byte of an index."""
PERMUTE_ONE = "llvm.x86.avx512.permvar.qi.512"
"""Selects bytes of a vector by the low 6 bits of each byte of an index."""
MOVE_FIELDS = "llvm.x86.avx512.pmultishift.qb.512"
"""Selects 8 bits for each byte, from any bit of the 8 bytes around it; these are a ring."""


@dataclass(frozen=True, slots=True)
class CodeBook:
    """A code book of a quantised type: its distinct magnitudes and their codes.

    Attributes:
        dtype: The type that has the code book.
        magnitudes: The distinct numbers of its entries, ascending.
        zero: The code of 0; the code of a number n is ``zero + n``.
    """

    dtype: DType
    magnitudes: tuple[int, ...]
    zero: int

    def load_entries_as_levels(self) -> np.ndarray:
        """Load the entries of the code book as levels: int [entries, columns of an entry].

        A level is the position of a number in `magnitudes`.
        """
        return np.searchsorted(np.array(self.magnitudes), load_code_book(self.dtype)).astype(np.uint16)

    def pack_levels_into_two_bytes(self) -> np.ndarray:
        """Pack the levels of each entry into two bytes: uint8 [2, entries].

        A level is the position of a number in `magnitudes`. It has 2 bits in entries of 8 columns, and 4 bits in
        entries of 4 columns.
        """
        levels = self.load_entries_as_levels()
        width = 16 // levels.shape[1]
        words = (levels << width * np.arange(levels.shape[1], dtype=np.uint16)).sum(1).astype("<u2")
        return np.ascontiguousarray(words.view(np.uint8).reshape(-1, 2).T)


def has_128_byte_permutes() -> bool:
    """Return whether the processor can look bytes up in tables of 128 bytes in registers (AVX-512 VBMI)."""
    return bool(find_features_of_compile_target().get("avx512vbmi"))


# ------------------------------------------------------------------------------------------------- building blocks


def _vector(values: Sequence[int] | np.ndarray) -> ir.Constant:
    return ir.Constant(_B, [int(v) for v in values])


def emit_load(b: Any, address: Any, offset: int, kind: ir.Type = _B) -> Any:
    pointer = b.gep(b.inttoptr(address, _i8.as_pointer()), [ir.Constant(address.type, offset)], inbounds=True)
    return b.load(b.bitcast(pointer, kind.as_pointer()), align=1)


def emit_load_16_extended_to_i32(b: Any, address: Any, offset: int, element: ir.Type) -> Any:
    """Emit code that loads 16 unsigned numbers of type `element`, and extends each with zeros to a 32-bit lane."""
    return b.zext(emit_load(b, address, offset, ir.VectorType(element, LANES)), _I)


def emit_fields_of_each_lane_as_4_bytes(b: Any, x: Any, first: int, step: int) -> Any:
    """Emit code that extracts four bit fields of each 32-bit lane as bytes.

    Byte k gets the 8 bits from bit ``first + step * k`` on.
    """
    offsets = [(32 * (row & 1) + first + step * k) % 64 for row in range(LANES) for k in range(4)]
    return simd.emit_llvm_call(b, MOVE_FIELDS, _B, _vector(offsets), x)


def emit_bit_test_per_byte(b: Any, x: Any, bit: int) -> Any:
    """Emit code that tests for each byte of `x` whether bit number `bit` is set."""
    if bit == 7:
        return b.icmp_signed("<", x, bytes_of(0))
    return b.icmp_unsigned("!=", b.and_(x, bytes_of(1 << bit)), bytes_of(0))


def emit_byte_table_lookup(
    b: Any, table: np.ndarray, indices: Sequence[Any], bits: Sequence[Sequence[Any]]
) -> list[Any]:
    """Emit code that looks up each index in a table of bytes; return one vector of bytes for each vector of indices.

    An index has its 7 low bits in `indices`, and its further bits in `bits`, lowest first. All indices are looked up in
    one part (128 bytes) of the table before the next part is loaded, because loads take longest.
    """
    if len(table) == TABLE_BYTES:
        low, high = _vector(table[:VECTOR_BYTES]), _vector(table[VECTOR_BYTES:])
        return [simd.emit_llvm_call(b, PERMUTE_TWO, _B, low, index, high) for index in indices]
    middle = len(table) // 2
    last = (middle // TABLE_BYTES).bit_length() - 1
    first = emit_byte_table_lookup(b, table[:middle], indices, bits)
    second = emit_byte_table_lookup(b, table[middle:], indices, bits)
    return [b.select(own[last], y, x) for x, y, own in zip(first, second, bits, strict=True)]


def emit_even_parity_bit(b: Any, signs: Any) -> Any:
    """Emit code that sets bit 7 of each byte of `signs` so that the number of set bits is even.

    The old bit 7 is ignored.
    """
    known = find_supported_instruction(BIT_MATRIX_INSTRUCTIONS)
    if find_features_of_compile_target().get("gfni") and known is not None:
        name, size = known
        rows = [0x7F, *(1 << bit for bit in reversed(range(7)))]
        matrix = ir.Constant(ir.VectorType(_i8, size), rows * (size // 8))
        return apply_instruction_per_register(b, name, _i8, size, signs, matrix, ir.Constant(_i8, 0))
    seven = b.and_(signs, bytes_of(0x7F))
    parity = seven
    for step in (4, 2, 1):
        parity = b.xor(parity, b.lshr(parity, bytes_of(step)))
    return b.or_(seven, b.shl(parity, bytes_of(7)))


# ------------------------------------------------------------------------------------------- codes by wide permutes


def _make_signed_code_table(book: CodeBook, width: int) -> ir.Constant:
    """Make the byte table that maps a level and a sign to the code of the signed number.

    A level is the position of a number in `book.magnitudes`. An index has the level in its low `width` bits and the
    sign in the next bit. Further bits are ignored.
    """
    levels = [*book.magnitudes, *[0] * ((1 << width) - len(book.magnitudes))]
    codes = [*(book.zero + m for m in levels), *(book.zero - m for m in levels)]
    return _vector(codes * (VECTOR_BYTES // len(codes)))


def _emit_signed_codes(b: Any, book: CodeBook, level: Any, signs: Any, j: int, width: int) -> Any:
    """Emit code that computes the codes of vector `j` of a block from its levels and from the signs of the block.

    A level is the position of a number in `book.magnitudes`; it has `width` bits.
    """
    sign, mask = emit_fields_of_each_lane_as_4_bytes(b, signs, 4 * j - width, 1), (1 << width) - 1
    chosen = b.or_(b.and_(level, bytes_of(mask)), b.and_(sign, bytes_of(255 - mask)))
    return simd.emit_llvm_call(b, PERMUTE_ONE, _B, _make_signed_code_table(book, width), chosen)


def emit_2_bit_levels_as_bytes(b: Any, both: Sequence[Any], low_bit: int) -> list[Any]:
    """Emit code that unpacks 2-bit levels, which stand for magnitudes of a code book, to one byte each.

    An entry of the code book has 8 levels in two bytes, which are in the two vectors of `both`. In the result a level
    begins at bit `low_bit`.
    """
    return [emit_fields_of_each_lane_as_4_bytes(b, both[j % 2], 8 * (j // 2) - low_bit, 2) for j in range(CODE_VECTORS)]


def _emit_lookup_of_8_column_entries(
    b: Any, book: CodeBook, indices: Sequence[Any], bits: Sequence[Sequence[Any]]
) -> list[list[Any]]:
    """Emit code that looks indices up in a code book with entries of 8 columns.

    The result has for each block the vectors of levels: one byte per column with the position of its magnitude in
    `book.magnitudes`.
    """
    halves = [emit_byte_table_lookup(b, table, indices, bits) for table in book.pack_levels_into_two_bytes()]
    return [emit_2_bit_levels_as_bytes(b, both, 0) for both in zip(*halves, strict=True)]


def _emit_lookup_of_4_column_entries(
    b: Any, book: CodeBook, indices: Sequence[Any], bits: Sequence[Sequence[Any]]
) -> list[list[Any]]:
    """Emit code that looks indices up in a code book with entries of 4 columns; a block has two vectors of indices.

    The result has for each block the vectors of levels: one byte per column with the position of its magnitude in
    `book.magnitudes`.
    """
    halves = [emit_byte_table_lookup(b, table, indices, bits) for table in book.pack_levels_into_two_bytes()]
    vectors = []
    for first, second in zip(*halves, strict=True):
        for i in (0, 2):
            order = [4 * row + i + k // 2 + VECTOR_BYTES * (k % 2) for row in range(LANES) for k in range(4)]
            words = simd.emit_llvm_call(b, PERMUTE_TWO, _B, first, _vector(order), second)
            vectors += [emit_fields_of_each_lane_as_4_bytes(b, words, 16 * j, 4) for j in range(2)]
    return [vectors[i : i + CODE_VECTORS] for i in range(0, len(vectors), CODE_VECTORS)]


# ------------------------------------------------------------------------------------------------- codes by gathers


def emit_constant_table_address(b: Any, name: str, table: np.ndarray) -> Any:
    """Emit the address of a constant table of bytes, which is added to the module of the kernel at the first use."""
    symbol = f"hocket.table.{name}"
    known = b.module.globals.get(symbol)
    if known is None:
        kind = ir.ArrayType(_i8, table.size)
        known = ir.GlobalVariable(b.module, kind, symbol)
        known.linkage, known.global_constant, known.align = "internal", True, VECTOR_BYTES
        known.initializer = ir.Constant(kind, bytearray(table.astype(np.uint8).tobytes()))
    return b.ptrtoint(known, _i64)


def emit_gather_of_codes(b: Any, book: CodeBook, codes: np.ndarray, indices: Sequence[Any]) -> list[Any]:
    """Emit code that gathers the codes of all vectors of a block from a table in memory, as byte vectors.

    Args:
        b: The IR builder.
        book: The code book.
        codes: The code of each column of each entry.
        indices: 32-bit lanes, one vector for each entry of a row.
    """
    table, parts = emit_constant_table_address(b, str(book.dtype), codes), codes.shape[1] // 4
    wide, every = ir.VectorType(_i64, LANES), ir.Constant(ir.VectorType(ir.IntType(1), LANES), [1] * LANES)
    base = b.insert_element(ir.Constant(wide, ir.Undefined), table, ir.Constant(_i32, 0))
    base = b.shuffle_vector(base, base, ir.Constant(_I, [0] * LANES))
    vectors = []
    for index in indices:
        for part in range(parts):
            offset = b.add(b.shl(index, ints_of(parts + 1)), ints_of(4 * part))
            at = b.inttoptr(b.add(base, b.zext(offset, wide)), ir.VectorType(_i32.as_pointer(), LANES))
            found = simd.call_generic(
                b, "llvm.masked.gather.v16i32.v16p0", _I, at, ir.Constant(_i32, 4), every, ints_of(0)
            )
            vectors.append(b.bitcast(found, _B))
    return vectors


def _emit_negation_of_codes(b: Any, book: CodeBook, codes: Any, signs: Any, j: int) -> Any:
    """Emit code that negates the codes with a sign bit, in vector `j` of a block: ``2 * zero - code``."""
    spread = b.shuffle_vector(
        signs, signs, ir.Constant(ir.VectorType(_i32, 64), [t // 4 * 4 + j // 2 for t in range(64)])
    )
    bits = _vector([1 << 4 * (j % 2) + t % 4 for t in range(64)])
    is_negative = b.icmp_unsigned("!=", b.and_(spread, bits), bytes_of(0))
    return b.select(is_negative, b.sub(bytes_of(2 * book.zero), codes), codes)


def emit_byte_of_each_lane(b: Any, x: Any, i: int) -> Any:
    """Emit code that extracts byte `i` of each 32-bit lane."""
    return b.and_(b.lshr(b.bitcast(x, _I), ints_of(8 * i)), ints_of(255))


def emit_index_high_bits(b: Any, x: Any, at: int, width: int) -> Any:
    """Emit code that extracts high bits of code book indices: `width` bits of each 32-bit lane of `x`, from bit `at`.

    They become bits 8 and up of the lanes of the result.
    """
    return b.shl(b.and_(b.lshr(x, ints_of(at)), ints_of((1 << width) - 1)), ints_of(8))


# --------------------------------------------------------------------------------------------------------- loaders


@dataclass(frozen=True, slots=True)
class CodeBookLoaders:
    """Loaders of weight codes that are stored as indices into a code book.

    Attributes:
        load_one_block: ``(p, h) -> codes`` loads the codes of 32 columns at `p`; `h` is not used.
        load_two_blocks: ``(p, q) -> codes`` loads the codes at `p` and at `q`. Each part of the book is loaded once.
    """

    load_one_block: Intrinsic
    load_two_blocks: Intrinsic


def make_one_and_two_block_loaders(emit_codes: Callable[[Any, Sequence[Any]], list[list[Any]]]) -> CodeBookLoaders:
    """Make the loaders of one block and of two blocks from a function that emits the code for any number of blocks.

    ``emit_codes(b, addresses)`` returns the vectors of codes at each address.
    """

    @intrinsic(CODES_TYPE, ADDRESS, ADDRESS)
    def one(b, p, h):
        return pack_vectors_into_array(b, emit_codes(b, [p])[0])

    @intrinsic(TWO_CODES_TYPE, ADDRESS, ADDRESS)
    def two(b, p, q):
        first, second = emit_codes(b, [p, q])
        return pack_vectors_into_array(b, [*first, *second])

    return CodeBookLoaders(one, two)


def make_signed_code_book_loaders(
    book: CodeBook, index_vectors: int, high_bits: int = 0, *, has_even_signs: bool, has_index_bits: bool = False
) -> CodeBookLoaders:
    """Make the loaders of weight codes for a code book of magnitudes, with signs stored separately.

    A block stores the vectors of indices, a vector of signs, and the high bits of indices (a byte for each row).

    Args:
        book: The code book.
        index_vectors: 1 for entries of 8 columns, 2 for entries of 4 columns.
        high_bits: High bits of each index in the byte of the row.
        has_even_signs: Whether bit 7 of each byte of signs is not stored, because an even number of bits is set.
        has_index_bits: Whether bit 7 of each byte of signs is the high bit of an index instead.
    """
    signs_offset, bits_offset = VECTOR_BYTES * index_vectors, VECTOR_BYTES * (index_vectors + 1)
    width = index_vectors + 1

    def load_signs(b: Any, p: Any) -> Any:
        stored = emit_load(b, p, signs_offset)
        return emit_even_parity_bit(b, stored) if has_even_signs else stored

    def load_bits(b: Any, p: Any, v: int, index: Any) -> list[Any]:
        bits = [emit_bit_test_per_byte(b, index, 7)]
        if high_bits:
            high = b.bitcast(emit_load_16_extended_to_i32(b, p, bits_offset, _i8), _B)
            spread = emit_fields_of_each_lane_as_4_bytes(b, high, 4 * v * high_bits, high_bits)
            bits += [emit_bit_test_per_byte(b, spread, bit) for bit in range(high_bits)]
        return [*bits, emit_bit_test_per_byte(b, emit_load(b, p, signs_offset), 7)] if has_index_bits else bits

    def permute(b: Any, addresses: Sequence[Any]) -> list[list[Any]]:
        places = [(p, v) for p in addresses for v in range(index_vectors)]
        indices = [emit_load(b, p, VECTOR_BYTES * v) for p, v in places]
        bits = [load_bits(b, *place, index) for place, index in zip(places, indices, strict=True)]
        if index_vectors == 1:
            levels = _emit_lookup_of_8_column_entries(b, book, indices, bits)
        else:
            levels = _emit_lookup_of_4_column_entries(b, book, indices, bits)
        signs = [load_signs(b, p) for p in addresses]
        return [
            [_emit_signed_codes(b, book, x, own, j, width) for j, x in enumerate(vectors)]
            for vectors, own in zip(levels, signs, strict=True)
        ]

    def gather_one(b: Any, p: Any) -> list[Any]:
        lanes = [
            emit_byte_of_each_lane(b, emit_load(b, p, VECTOR_BYTES * v), i)
            for v in range(index_vectors)
            for i in range(4)
        ]
        if high_bits:
            high = emit_load_16_extended_to_i32(b, p, bits_offset, _i8)
            lanes = [b.or_(x, emit_index_high_bits(b, high, high_bits * i, high_bits)) for i, x in enumerate(lanes)]
        if has_index_bits:
            stored = emit_load(b, p, signs_offset, _I)
            lanes = [b.or_(x, emit_index_high_bits(b, stored, 8 * i + 7, 1)) for i, x in enumerate(lanes)]
        found = emit_gather_of_codes(
            b, book, book.zero + np.array(book.magnitudes)[book.load_entries_as_levels()], lanes
        )
        signs = load_signs(b, p)
        return [_emit_negation_of_codes(b, book, x, signs, j) for j, x in enumerate(found)]

    return make_one_and_two_block_loaders(
        lambda b, addresses: permute(b, addresses) if has_128_byte_permutes() else [gather_one(b, p) for p in addresses]
    )
