"""Lanes as candidates: each lane has its own scale for the same numbers, and the best lane is selected.

Lanes also look numbers up in a table of 16 numbers that a vector holds.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from ..target_cpu import find_features_of_compile_target
from .vectors import (
    ADDRESS,
    FLOAT,
    FLOATS,
    INTS,
    LANES,
    Intrinsic,
    call_generic,
    emit_llvm_call,
    intrinsic,
    llvm_type,
)

_F, _I, _f32, _i32, _i64 = llvm_type(FLOATS), llvm_type(INTS), ir.FloatType(), ir.IntType(32), ir.IntType(64)
_MASK_BITS, _i16, _HALF_LANES = ir.IntType(LANES), ir.IntType(16), LANES // 2


def make_16_lane_constant(values: Sequence[float]) -> Intrinsic:
    """Make an intrinsic without operands that returns 16 given float32 numbers."""
    constant = ir.Constant(_F, [float(v) for v in values])
    return intrinsic(FLOATS)(lambda b: constant)


def make_16_lane_integer_constant(values: Sequence[int]) -> Intrinsic:
    """Make an intrinsic without operands that returns 16 given int32 numbers."""
    constant = ir.Constant(_I, list(values))
    return intrinsic(INTS)(lambda b: constant)


def make_reached_boundary_counter(boundaries: Sequence[float]) -> Intrinsic:
    """Make an intrinsic that counts, for each float32 lane, the boundaries that are not above it; NaN counts all."""

    @intrinsic(INTS, FLOATS)
    def count_boundaries(b, x):
        count = ir.Constant(_I, [len(boundaries)] * LANES)
        for boundary in boundaries:
            is_below = b.fcmp_ordered("<", x, ir.Constant(_F, [boundary] * LANES))
            count = b.add(count, b.sext(is_below, _I))
        return count

    return count_boundaries


lane_numbers = make_16_lane_constant(range(LANES))
round_even = intrinsic(FLOATS, FLOATS)(lambda b, x: call_generic(b, "llvm.rint.v16f32", _F, x))
"""Round to integers, ties to even."""
select_lane = intrinsic(FLOAT, FLOATS, ADDRESS)(lambda b, x, lane: b.extract_element(x, b.trunc(lane, _i32)))
round_scalar_to_half = intrinsic(FLOAT, FLOAT)(lambda b, v: b.fpext(b.fptrunc(v, ir.HalfType()), _f32))
"""Round to the nearest float16, ties to even."""
to_int = intrinsic(ADDRESS, FLOAT)(lambda b, v: b.fptosi(v, _i64))
"""Truncate a float32 to an integer."""
to_scalar = intrinsic(FLOAT, ADDRESS)(lambda b, n: b.sitofp(n, _f32))
"""Return an integer as float32."""


@intrinsic(ADDRESS, FLOATS, FLOAT)
def find_first_lane_equal_to(b, x, value):
    """Return the number of the first lane of `x` that equals `value`; 16 without such a lane."""
    same = b.fcmp_ordered("==", x, splat_scalar(b, value))
    bits = b.or_(b.zext(b.bitcast(same, _MASK_BITS), _i64), ir.Constant(_i64, 1 << LANES))
    return call_generic(b, "llvm.cttz.i64", _i64, bits, ir.Constant(ir.IntType(1), 1))


def splat_scalar(b, value):
    """Emit a vector with `value` in each lane."""
    one = b.insert_element(ir.Constant(_F, ir.Undefined), value, ir.Constant(_i32, 0))
    return b.shuffle_vector(one, one, ir.Constant(_I, [0] * LANES))


def _lanes(order: range | list[int]) -> ir.Constant:
    return ir.Constant(ir.VectorType(_i32, len(order)), list(order))


@intrinsic(FLOATS, FLOATS, INTS)
def look_up_lanes_in_16_numbers(b, table, indices):
    """Look up each lane in a table of 16 numbers: lane i of the result is ``table[indices[i] & 15]``."""
    features = find_features_of_compile_target()
    if features.get("avx512f"):
        return emit_llvm_call(b, "llvm.x86.avx512.permvar.sf.512", _F, table, indices)
    if features.get("avx2"):
        eight = ir.VectorType(table.type.element, _HALF_LANES)
        parts = []
        for first in (0, _HALF_LANES):
            index = b.shuffle_vector(indices, indices, _lanes(range(first, first + _HALF_LANES)))
            low, high = (
                emit_llvm_call(
                    b, "llvm.x86.avx2.permps", eight, b.shuffle_vector(table, table, _lanes(range(k, k + 8))), index
                )
                for k in (0, _HALF_LANES)
            )
            bit = b.and_(index, ir.Constant(index.type, [_HALF_LANES] * _HALF_LANES))
            is_high = b.icmp_signed("!=", bit, ir.Constant(index.type, [0] * _HALF_LANES))
            parts.append(b.select(is_high, high, low))
        return b.shuffle_vector(parts[0], parts[1], _lanes(range(LANES)))
    index = b.and_(indices, ir.Constant(_I, [LANES - 1] * LANES))
    found = b.shuffle_vector(table, table, _lanes([0] * LANES))
    for i in range(1, LANES):
        entry = b.shuffle_vector(table, table, _lanes([i] * LANES))
        found = b.select(b.icmp_signed("==", index, ir.Constant(_I, [i] * LANES)), entry, found)
    return found


@intrinsic(INTS, ADDRESS)
def load_u16_lanes(b, address):
    """Load 16 unsigned 16-bit integers, zero-extended to one int32 lane each."""
    return b.zext(b.load(b.inttoptr(address, ir.VectorType(_i16, LANES).as_pointer()), align=2), _I)


@intrinsic(ADDRESS, ADDRESS)
def load_u16(b, address):
    """Load one unsigned 16-bit integer from `address`, zero-extended to 64 bits."""
    return b.zext(b.load(b.inttoptr(address, _i16.as_pointer()), align=2), _i64)
