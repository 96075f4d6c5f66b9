"""Lanes as candidates: each lane has its own scale for the same numbers, and the best lane is selected."""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from .vectors import ADDRESS, FLOAT, FLOATS, INTS, LANES, Intrinsic, call_generic, intrinsic, llvm_type

_F, _I, _f32, _i32, _i64 = llvm_type(FLOATS), llvm_type(INTS), ir.FloatType(), ir.IntType(32), ir.IntType(64)
_MASK_BITS = ir.IntType(LANES)


def make_lane_constant(values: Sequence[float]) -> Intrinsic:
    """Make an intrinsic without operands that returns 16 given float32 numbers."""
    constant = ir.Constant(_F, [float(v) for v in values])
    return intrinsic(FLOATS)(lambda b: constant)


lane_numbers = make_lane_constant(range(LANES))
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
def find_lane(b, x, value):
    """Return the first lane that equals `value`; 16 if there is none."""
    same = b.fcmp_ordered("==", x, splat_scalar(b, value))
    bits = b.or_(b.zext(b.bitcast(same, _MASK_BITS), _i64), ir.Constant(_i64, 1 << LANES))
    return call_generic(b, "llvm.cttz.i64", _i64, bits, ir.Constant(ir.IntType(1), 1))


def splat_scalar(b, value):
    """Emit a vector with `value` in each lane."""
    one = b.insert_element(ir.Constant(_F, ir.Undefined), value, ir.Constant(_i32, 0))
    return b.shuffle_vector(one, one, ir.Constant(_I, [0] * LANES))
