"""Transposes of int8 and int4 blocks: 16 rows become columns of four bytes per row, as `dot4` needs them.

The integers become unsigned: the lowest integer becomes 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from .permute_lanes import transpose_vectors
from .vectors import ADDRESS, BYTES, FLOATS, LANES, NOTHING, Intrinsic, bytes_of, intrinsic, llvm_type, store_bytes

_i8, _i32, _i64 = map(ir.IntType, (8, 32, 64))
_B, _F = llvm_type(BYTES), llvm_type(FLOATS)


def _load_byte_run(b: Any, address: Any, count: int) -> Any:
    return b.load(b.inttoptr(address, ir.VectorType(_i8, count).as_pointer()), align=1)


def _concat_vectors(b: Any, x: Any, y: Any) -> Any:
    count = 2 * x.type.count
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(_i32, count), list(range(count))))


def _load_two_int8_blocks_as_unsigned(b: Any, first: Any, second: Any) -> Any:
    """Load two blocks of 32 signed bytes as one vector of unsigned bytes: each byte plus 128."""
    return b.xor(_concat_vectors(b, _load_byte_run(b, first, 32), _load_byte_run(b, second, 32)), bytes_of(128))


def _load_two_int4_blocks_as_unsigned(b: Any, first: Any, second: Any) -> Any:
    """Load two blocks of 32 4-bit integers as one vector of unsigned bytes: each integer plus 8, as it is stored.

    The low halves of the 16 bytes are the first half of a block.
    """
    four = ir.VectorType(_i8, 16)
    low, high = (ir.Constant(four, [n] * 16) for n in (15, 4))
    runs = (_load_byte_run(b, first, 16), _load_byte_run(b, second, 16))
    return _concat_vectors(b, *(_concat_vectors(b, b.and_(q, low), b.lshr(q, high)) for q in runs))


def _make_transpose_of_quantised_blocks(load_two_blocks: Callable[[Any, Any, Any], Any]) -> Intrinsic:
    """Make an intrinsic that transposes two quantised blocks of each of 16 rows, in units of four bytes.

    The intrinsic is ``(source, step, last, second, to)``. Rows are `step` bytes apart, and the second block of a row is
    `second` bytes after the first block. Row `last` replaces missing rows. The result has 16 vectors. Each vector has
    four bytes of every row.
    """

    @intrinsic(NOTHING, *[ADDRESS] * 5)
    def transpose_blocks(b, source, step, last, second, to):
        numbers = [ir.Constant(_i64, i) for i in range(LANES)]
        rows = [b.add(source, b.mul(step, b.select(b.icmp_signed("<", i, last), i, last))) for i in numbers]
        vectors = [b.bitcast(load_two_blocks(b, row, b.add(row, second)), _F) for row in rows]
        for i, column in zip(numbers, transpose_vectors(b, vectors), strict=True):
            store_bytes.body(b, b.add(to, b.mul(i, ir.Constant(_i64, 64))), b.bitcast(column, _B))

    return transpose_blocks


transpose_8_bit_blocks, transpose_4_bit_blocks = (
    _make_transpose_of_quantised_blocks(_load_two_int8_blocks_as_unsigned),
    _make_transpose_of_quantised_blocks(_load_two_int4_blocks_as_unsigned),
)


@intrinsic(NOTHING, ADDRESS, ADDRESS, ADDRESS, ADDRESS)
def copy_16_strided_f16_repeating_last(b, source, step, last, destination):
    """Copy 16 float16, `step` bytes apart, to consecutive memory; number `last` is repeated for the missing ones."""
    short = ir.IntType(16).as_pointer()
    for i in range(LANES):
        number = ir.Constant(_i64, i)
        at = b.add(source, b.mul(step, b.select(b.icmp_signed("<", number, last), number, last)))
        half = b.load(b.inttoptr(at, short), align=2)
        b.store(half, b.inttoptr(b.add(destination, ir.Constant(_i64, 2 * i)), short), align=2)
