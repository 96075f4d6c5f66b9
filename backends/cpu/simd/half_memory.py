"""Loads, stores and rounding of 16-bit floats: float16 or bfloat16 in memory, float32 in registers.

A bfloat16 is the upper half of a float32. Operations access 16 consecutive numbers, or one number.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from .vectors import ADDRESS, FLOATS, INTS, LANES, NOTHING, intrinsic, lane_0, llvm_type, splat

_i1, _i16, _i32 = map(ir.IntType, (1, 16, 32))
_F, _I = llvm_type(FLOATS), llvm_type(INTS)
_SHORTS, _HALVES = ir.VectorType(_i16, LANES), ir.VectorType(ir.HalfType(), LANES)
_MASK = ir.VectorType(_i1, LANES)
_ADDRESSED = _SHORTS.as_pointer()


def _ints(value: int) -> ir.Constant:
    return ir.Constant(_I, [value] * LANES)


def _first_lanes_mask(b: Any, count: Any) -> Any:
    """Return a boolean mask that is true in the first `count` lanes."""
    every = b.insert_element(ir.Constant(_I, ir.Undefined), b.trunc(count, _i32), ir.Constant(_i32, 0))
    every = b.shuffle_vector(every, every, _ints(0))
    return b.icmp_signed("<", ir.Constant(_I, list(range(LANES))), every)


def _declare_function(b: Any, name: str, result: ir.Type, *operands: ir.Type) -> Any:
    return b.module.globals.get(name) or ir.Function(b.module, ir.FunctionType(result, operands), name)


def _load_first(b: Any, a: Any, count: Any) -> Any:
    load = _declare_function(b, "llvm.masked.load.v16i16.p0", _SHORTS, _ADDRESSED, _i32, _MASK, _SHORTS)
    none = ir.Constant(_SHORTS, [0] * LANES)
    return b.call(load, [b.inttoptr(a, _ADDRESSED), ir.Constant(_i32, 2), _first_lanes_mask(b, count), none])


def _store_first(b: Any, a: Any, shorts: Any, count: Any) -> None:
    store = _declare_function(b, "llvm.masked.store.v16i16.p0", ir.VoidType(), _SHORTS, _ADDRESSED, _i32, _MASK)
    b.call(store, [shorts, b.inttoptr(a, _ADDRESSED), ir.Constant(_i32, 2), _first_lanes_mask(b, count)])


@intrinsic(FLOATS, ADDRESS, ADDRESS)
def load_first_f16(b, address, count):
    """Load the first `count` float16 as float32 lanes; other lanes are 0, and their memory is not accessed."""
    return b.fpext(b.bitcast(_load_first(b, address, count), _HALVES), _F)


@intrinsic(FLOATS, ADDRESS, ADDRESS)
def load_first_bf16(b, address, count):
    """Load the first `count` bfloat16 as float32 lanes; other lanes are 0, and their memory is not accessed."""
    return b.bitcast(b.shl(b.zext(_load_first(b, address, count), _I), _ints(16)), _F)


@intrinsic(NOTHING, ADDRESS, FLOATS, ADDRESS)
def store_first_f16(b, address, vector, count):
    """Store the first `count` float32 lanes as float16, rounded to nearest, ties to even."""
    _store_first(b, address, b.bitcast(b.fptrunc(vector, _HALVES), _SHORTS), count)


def _round_bits_to_bf16(b: Any, vector: Any) -> Any:
    """Round float32 lanes to bfloat16, ties to even, and return their bits; NaN stays NaN.

    The upper half of each int32 lane is the bfloat16. The lower half is arbitrary.
    """
    bits = b.bitcast(vector, _I)
    odd = b.and_(b.lshr(bits, _ints(16)), _ints(1))
    nearest = b.add(bits, b.add(odd, _ints(0x7FFF)))
    quiet = b.or_(bits, _ints(0x400000))
    return b.select(b.fcmp_unordered("uno", vector, vector), quiet, nearest)


@intrinsic(NOTHING, ADDRESS, FLOATS, ADDRESS)
def store_first_bf16(b, address, vector, count):
    """Store the first `count` float32 lanes as bfloat16, rounded to nearest, ties to even; NaN stays NaN."""
    _store_first(b, address, b.trunc(b.lshr(_round_bits_to_bf16(b, vector), _ints(16)), _SHORTS), count)


@intrinsic(FLOATS, FLOATS)
def round_to_f16_values(b, vector):
    """Round each float32 lane to the nearest float16 value, ties to even; the result is float32."""
    return b.fpext(b.fptrunc(vector, _HALVES), _F)


@intrinsic(FLOATS, FLOATS)
def round_f32_to_bf16_values(b, vector):
    """Round each float32 lane to the nearest bfloat16 value, ties to even; the result is float32."""
    return b.bitcast(b.and_(_round_bits_to_bf16(b, vector), _ints(-0x10000)), _F)


@intrinsic(FLOATS, ADDRESS)
def load_splat_f16(b, address):
    """Load one float16 from `address` and repeat it, as float32, in all 16 lanes."""
    one = b.load(b.inttoptr(address, ir.HalfType().as_pointer()), align=2)
    return splat.body(b, b.fpext(one, ir.FloatType()))


@intrinsic(NOTHING, ADDRESS, FLOATS)
def store_lane_0_as_f16(b, address, vector):
    """Store lane 0 of a float32 vector as one float16."""
    half = b.fptrunc(lane_0.body(b, vector), ir.HalfType())
    b.store(half, b.inttoptr(address, half.type.as_pointer()), align=2)
