"""Vector operations of kernels: 16 float32 or int32 lanes, 64 bytes, loaded from addresses.

An operation emits plain LLVM vector code, which is valid on every target: LLVM splits vectors that are too long for the
processor. The module does not import Numba. `compiler` makes Numba functions of the operations when it compiles a
kernel. Kernels call an operation with values, ``store(p, v)``. Other operations call the body with a builder before the
values, ``store.body(b, p, v)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llvmlite import ir

from ....graph.lazy_dataclass import dataclass
from ....graph.old_names import make_module_getattr
from ..target_cpu import find_features_of_compile_target, is_target_of_host_architecture

ADDRESS, FLOAT, DOUBLE, NOTHING = "address", "f32", "f64", "nothing"
FLOATS, INTS, BYTES = "f32x16", "i32x16", "i8x64"
LANES = 16

_i8, _i16, _i32, _i64, _half, _f32 = (*map(ir.IntType, (8, 16, 32, 64)), ir.HalfType(), ir.FloatType())
_F, _I, _B = ir.VectorType(_f32, 16), ir.VectorType(_i32, 16), ir.VectorType(_i8, 64)
_TYPES = {ADDRESS: _i64, FLOAT: _f32, DOUBLE: ir.DoubleType(), FLOATS: _F, INTS: _I, BYTES: _B}


def format_tuple_type(element_type: str, count: int) -> str:
    """Format the type name of a tuple of `count` elements, such as ``f32x16*4``; it is an LLVM array."""
    return f"{element_type}*{count}"


def llvm_type(name: str) -> ir.Type:
    one, _, count = name.partition("*")
    return ir.ArrayType(_TYPES[one], int(count)) if count else _TYPES[one]


@dataclass(frozen=True, slots=True)
class Intrinsic:
    """A vector operation for kernels: type names of result and operands, and the function that emits its LLVM IR."""

    result: str
    operands: tuple[str, ...]
    body: Callable[..., Any]

    def __call__(self, *values: Any) -> Any:
        raise TypeError("an intrinsic runs in compiled kernels only")


def intrinsic(result_type: str, *operand_types: str) -> Callable[[Callable[..., Any]], Intrinsic]:
    """Return a decorator that makes an `Intrinsic` of a body ``(builder, *values) -> value``."""
    return lambda body: Intrinsic(result_type, operand_types, body)


FEW_REGISTERS, MANY_REGISTERS = 8, 32
"""Number of 64-byte vectors that the vector registers hold: without AVX-512, and with AVX-512."""


def count_vector_registers() -> int:
    return MANY_REGISTERS if find_features_of_compile_target().get("avx512f") else FEW_REGISTERS


# ------------------------------------------------------------------------------------------- building blocks


def _pointer(b: Any, address: Any, to: ir.Type) -> Any:
    return b.inttoptr(address, to.as_pointer())


def _load(b: Any, address: Any, kind: ir.Type, align: int) -> Any:
    return b.load(_pointer(b, address, kind), align=align)


def _store(b: Any, address: Any, value: Any, align: int) -> None:
    b.store(value, _pointer(b, address, value.type), align=align)


def _splat(b: Any, value: Any, kind: ir.VectorType) -> Any:
    one = b.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(_i32, 0))
    return b.shuffle_vector(one, one, ir.Constant(ir.VectorType(_i32, kind.count), [0] * kind.count))


def _const(kind: ir.VectorType, value: Any) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)


def bytes_of(value: int) -> ir.Constant:
    return _const(_B, value)


def ints_of(value: int) -> ir.Constant:
    return _const(_I, value)


def _call(b: Any, name: str, result: ir.Type, *values: Any) -> Any:
    kind = ir.FunctionType(result, [v.type for v in values])
    function = b.module.globals.get(name) or ir.Function(b.module, kind, name)
    return b.call(function, values)


call_generic = _call
"""Emit a call of an LLVM intrinsic that every processor has: ``(b, name, result, *values)``."""
FOREIGN_PREFIX = "hocket.of."
"""Prefix of LLVM intrinsics of another architecture, while Numba generates code for this architecture."""


def emit_llvm_call(b: Any, name: str, result_type: ir.Type, *values: Any) -> Any:
    """Emit a call of the LLVM intrinsic `name`, which may be specific to the target processor."""
    if is_target_of_host_architecture():
        return _call(b, name, result_type, *values)
    import llvmlite.binding as llvm

    llvm.add_symbol(FOREIGN_PREFIX + name, 1)  # Numba links functions that are never called
    return _call(b, FOREIGN_PREFIX + name, result_type, *values)


def emit_first_lanes_mask(b: Any, count: Any) -> Any:
    """Return a boolean mask that is true in the first `count` lanes; `count` is an address-sized integer."""
    lanes = ir.Constant(_I, list(range(LANES)))
    return b.icmp_signed("<", lanes, _splat(b, b.trunc(count, _i32), _I))


# ------------------------------------------------------------------------------------- arguments and scalars


@intrinsic(ADDRESS, ADDRESS, ADDRESS)
def load_argument_word(b, argument_block, index):
    """Load the 64-bit argument at `index` of the argument block of a kernel."""
    return b.load(b.gep(_pointer(b, argument_block, _i64), [index]))


@intrinsic(FLOAT, ADDRESS, ADDRESS)
def load_argument_float(b, argument_block, index):
    """Load the float32 argument at `index` of an argument block: the low 32 bits of its word."""
    return b.bitcast(b.trunc(b.load(b.gep(_pointer(b, argument_block, _i64), [index])), _i32), _f32)


load_scalar = intrinsic(FLOAT, ADDRESS)(lambda b, a: _load(b, a, _f32, 4))
load_double = intrinsic(DOUBLE, ADDRESS)(lambda b, a: _load(b, a, ir.DoubleType(), 8))
load_int = intrinsic(ADDRESS, ADDRESS)(lambda b, a: b.sext(_load(b, a, _i32, 4), _i64))
load_long = intrinsic(ADDRESS, ADDRESS)(lambda b, a: _load(b, a, _i64, 8))
load_byte = intrinsic(ADDRESS, ADDRESS)(lambda b, a: b.zext(_load(b, a, _i8, 1), _i64))
load_four = intrinsic(ADDRESS, ADDRESS)(lambda b, a: b.zext(_load(b, a, _i32, 1), _i64))
store_scalar = intrinsic(NOTHING, ADDRESS, FLOAT)(lambda b, a, v: _store(b, a, v, 4))
store_int = intrinsic(NOTHING, ADDRESS, ADDRESS)(lambda b, a, v: _store(b, a, b.trunc(v, _i32), 4))
store_byte = intrinsic(NOTHING, ADDRESS, ADDRESS)(lambda b, a, v: _store(b, a, b.trunc(v, _i8), 1))
store_long = intrinsic(NOTHING, ADDRESS, ADDRESS)(lambda b, a, v: _store(b, a, v, 8))
sqrt_scalar = intrinsic(FLOAT, FLOAT)(lambda b, v: _call(b, "llvm.sqrt.f32", _f32, v))


# ------------------------------------------------------------------------------------------ loads and stores

load = intrinsic(FLOATS, ADDRESS)(lambda b, a: _load(b, a, _F, 4))
load_bytes = intrinsic(BYTES, ADDRESS)(lambda b, a: _load(b, a, _B, 1))
load_f16 = intrinsic(FLOATS, ADDRESS)(lambda b, a: b.fpext(_load(b, a, ir.VectorType(_half, 16), 2), _F))
store = intrinsic(NOTHING, ADDRESS, FLOATS)(lambda b, a, v: _store(b, a, v, 4))
store_bytes = intrinsic(NOTHING, ADDRESS, BYTES)(lambda b, a, v: _store(b, a, v, 1))


@intrinsic(FLOATS, ADDRESS)
def load_bf16(b, address):
    """Load 16 consecutive bfloat16 as 16 float32 lanes."""
    wide = b.zext(_load(b, address, ir.VectorType(_i16, 16), 2), _I)
    return b.bitcast(b.shl(wide, _const(_I, 16)), _F)


load_ints = intrinsic(INTS, ADDRESS)(lambda b, a: _load(b, a, _I, 4))


@intrinsic(INTS, ADDRESS)
def load_u8_as_i32(b, address):
    """Load 16 unsigned bytes, zero-extended to one int32 lane each."""
    return b.zext(_load(b, address, ir.VectorType(_i8, 16), 1), _I)


load_u16_lanes = intrinsic(INTS, ADDRESS)(lambda b, a: b.zext(_load(b, a, ir.VectorType(_i16, 16), 1), _I))


@intrinsic(INTS, ADDRESS)
def load_16_i8_as_i32(b, address):
    """Load 16 signed bytes, sign-extended to one int32 lane each."""
    return b.sext(_load(b, address, ir.VectorType(_i8, 16), 1), _I)


@intrinsic(FLOATS, ADDRESS, ADDRESS)
def load_first_lanes(b, address, count):
    """Load the first `count` float32 lanes; other lanes are 0, and their memory is not accessed."""
    return emit_masked_load(b, address, emit_first_lanes_mask(b, count))


def emit_masked_load(b: Any, address: Any, mask: Any) -> Any:
    """Load the float32 lanes of a mask; other lanes are 0, and their memory is not accessed."""
    where = _pointer(b, address, _F)
    return _call(b, "llvm.masked.load.v16f32.p0", _F, where, ir.Constant(_i32, 4), mask, _const(_F, 0.0))


@intrinsic(FLOATS, ADDRESS, ADDRESS, FLOATS)
def load_first_lanes_or(b, address, count, otherwise):
    """Load the first `count` float32 lanes, and take the other lanes from `otherwise`."""
    where, mask = _pointer(b, address, _F), emit_first_lanes_mask(b, count)
    return _call(b, "llvm.masked.load.v16f32.p0", _F, where, ir.Constant(_i32, 4), mask, otherwise)


@intrinsic(FLOATS, ADDRESS, INTS)
def gather_lanes(b, address, byte_offsets):
    """Load 16 float32 from separate addresses: `address` plus the byte offset of each lane."""
    every = ir.Constant(ir.VectorType(ir.IntType(1), LANES), [1] * LANES)
    return emit_masked_gather(b, address, b.sext(byte_offsets, ir.VectorType(_i64, LANES)), every)


def emit_splat_address(b: Any, value: Any) -> Any:
    """Repeat an address-sized integer in 16 lanes."""
    return _splat(b, value, ir.VectorType(_i64, LANES))


def emit_masked_gather(b: Any, address: Any, byte_offsets: Any, mask: Any) -> Any:
    """Load the float32 lanes of a mask from `address` plus the 64-bit offset of each lane; other lanes are 0."""
    addresses = b.add(emit_splat_address(b, address), byte_offsets)
    at = b.inttoptr(addresses, ir.VectorType(_f32.as_pointer(), LANES))
    return _call(b, "llvm.masked.gather.v16f32.v16p0", _F, at, ir.Constant(_i32, 4), mask, _const(_F, 0.0))


@intrinsic(INTS, ADDRESS, ADDRESS)
def make_clamped_lane_indices(b, first, end):
    """Return the int32 indices `first`, ``first + 1``, ... in 16 lanes, clamped to at most ``end - 1``."""
    numbers = b.add(_splat(b, b.trunc(first, _i32), _I), ir.Constant(_I, list(range(LANES))))
    last = _splat(b, b.sub(b.trunc(end, _i32), ir.Constant(_i32, 1)), _I)
    return b.select(b.icmp_signed("<", numbers, last), numbers, last)


@intrinsic(NOTHING, ADDRESS, FLOATS, ADDRESS)
def store_first_lanes(b, address, vector, count):
    """Store only the first `count` float32 lanes."""
    where, mask = _pointer(b, address, _F), emit_first_lanes_mask(b, count)
    _call(b, "llvm.masked.store.v16f32.p0", ir.VoidType(), vector, where, ir.Constant(_i32, 4), mask)


@intrinsic(NOTHING, ADDRESS, FLOATS)
def store_16_floats_streaming(b, address, vector):
    """Store 16 float32 past the caches (non-temporal); `address` is a multiple of 64 bytes."""
    stored = b.store(vector, _pointer(b, address, _F), align=64)
    stored.set_metadata("nontemporal", b.module.add_metadata([ir.Constant(_i32, 1)]))


@intrinsic(NOTHING, ADDRESS, INTS)
def store_u8_lanes(b, address, vector):
    """Store the low byte of each int32 lane, 16 consecutive bytes."""
    _store(b, address, b.trunc(vector, ir.VectorType(_i8, 16)), 1)


@intrinsic(NOTHING, ADDRESS)
def prefetch(b, a):
    values = [_pointer(b, a, _i8), *(ir.Constant(_i32, n) for n in (0, 3, 1))]
    _call(b, "llvm.prefetch.p0", ir.VoidType(), *values)


@intrinsic(NOTHING, ADDRESS)
def prefetch_l2(b, address):
    """Prefetch the cache line at `address` into the L2 cache."""
    values = [_pointer(b, address, _i8), *(ir.Constant(_i32, n) for n in (0, 2, 1))]
    _call(b, "llvm.prefetch.p0", ir.VoidType(), *values)


# --------------------------------------------------------------------------------------------------- floats

splat = intrinsic(FLOATS, FLOAT)(lambda b, v: _splat(b, v, _F))
splat_from = intrinsic(FLOATS, ADDRESS)(lambda b, a: _splat(b, _load(b, a, _f32, 4), _F))
negative = intrinsic(FLOATS, FLOATS)(lambda b, x: b.fneg(x))
add = intrinsic(FLOATS, FLOATS, FLOATS)(lambda b, x, y: b.fadd(x, y))
sub = intrinsic(FLOATS, FLOATS, FLOATS)(lambda b, x, y: b.fsub(x, y))
mul = intrinsic(FLOATS, FLOATS, FLOATS)(lambda b, x, y: b.fmul(x, y))
div = intrinsic(FLOATS, FLOATS, FLOATS)(lambda b, x, y: b.fdiv(x, y))
fma = intrinsic(FLOATS, FLOATS, FLOATS, FLOATS)(lambda b, x, y, z: _call(b, "llvm.fma.v16f32", _F, x, y, z))
maximum = intrinsic(FLOATS, FLOATS, FLOATS)(lambda b, x, y: _call(b, "llvm.maxnum.v16f32", _F, x, y))
"""The larger lane of two, or the other lane if one is NaN: for maxima that need not propagate NaN."""
minimum = intrinsic(FLOATS, FLOATS, FLOATS)(lambda b, x, y: _call(b, "llvm.minnum.v16f32", _F, x, y))
clamp_min = intrinsic(FLOATS, FLOATS, FLOATS)(lambda b, x, low: b.select(b.fcmp_ordered(">", low, x), low, x))
"""`x`, or `low` if `low` is larger; NaN in `x` stays NaN.

This is one instruction, ``max(low, x)``, which returns the second operand unless the first operand is larger.
"""
clamp_max = intrinsic(FLOATS, FLOATS, FLOATS)(lambda b, x, high: b.select(b.fcmp_ordered("<", high, x), high, x))
ieee_maximum = intrinsic(FLOATS, FLOATS, FLOATS)(lambda b, x, y: _call(b, "llvm.maximum.v16f32", _F, x, y))
"""The larger lane of two, NaN if either is NaN; +0 is larger than -0."""
ieee_minimum = intrinsic(FLOATS, FLOATS, FLOATS)(lambda b, x, y: _call(b, "llvm.minimum.v16f32", _F, x, y))
absolute = intrinsic(FLOATS, FLOATS)(lambda b, x: _call(b, "llvm.fabs.v16f32", _F, x))
square_root = intrinsic(FLOATS, FLOATS)(lambda b, x: _call(b, "llvm.sqrt.v16f32", _F, x))
round_down = intrinsic(FLOATS, FLOATS)(lambda b, x: _call(b, "llvm.floor.v16f32", _F, x))
round_up = intrinsic(FLOATS, FLOATS)(lambda b, x: _call(b, "llvm.ceil.v16f32", _F, x))
round_to_zero = intrinsic(FLOATS, FLOATS)(lambda b, x: _call(b, "llvm.trunc.v16f32", _F, x))
round_away = intrinsic(FLOATS, FLOATS)(lambda b, x: _call(b, "llvm.round.v16f32", _F, x))
with_sign = intrinsic(FLOATS, FLOATS, FLOATS)(lambda b, x, of: _call(b, "llvm.copysign.v16f32", _F, x, of))
lane_max_without_nan = intrinsic(FLOAT, FLOATS)(lambda b, x: _call(b, "llvm.vector.reduce.fmax.v16f32", _f32, x))
to_float = intrinsic(FLOATS, INTS)(lambda b, x: b.sitofp(x, _F))
truncate_to_int = intrinsic(INTS, FLOATS)(lambda b, x: b.fptosi(x, _I))
round_to_int = intrinsic(INTS, FLOATS)(lambda b, x: b.fptosi(_call(b, "llvm.rint.v16f32", _F, x), _I))


@intrinsic(INTS, FLOATS)
def round_small_floats_to_int(b, x):
    """Round float32 lanes of a magnitude below 2**22 to int32, ties to even: add 1.5 * 2**23 and take the mantissa."""
    shifted = b.fadd(x, _const(_F, 1.5 * 2**23))
    return b.sub(b.bitcast(shifted, _I), _const(_I, 0x4B400000))


@intrinsic(FLOATS)
def zeros(b):
    return _const(_F, 0.0)


@intrinsic(FLOATS, FLOATS, FLOATS, FLOATS, FLOATS)
def where_less(b, x, y, then, otherwise):
    """Select lanes of `then` where ``x < y``, and lanes of `otherwise` elsewhere and for NaN."""
    return b.select(b.fcmp_ordered("<", x, y), then, otherwise)


@intrinsic(FLOATS, FLOATS, FLOATS, FLOATS)
def where_nonzero(b, x, then, otherwise):
    """Select lanes of `then` where `x` is not 0 or is NaN, and lanes of `otherwise` elsewhere."""
    return b.select(b.fcmp_unordered("!=", x, _const(_F, 0.0)), then, otherwise)


def _make_nan_propagating_choice(comparison: str) -> Intrinsic:
    """Make an intrinsic that selects lane x if ``x comparison y``, else lane y; NaN if either lane is NaN."""

    @intrinsic(FLOATS, FLOATS, FLOATS)
    def choose(b, x, y):
        return b.select(b.fcmp_unordered("uno", x, y), b.fadd(x, y), b.select(b.fcmp_ordered(comparison, x, y), x, y))

    return choose


larger, smaller = _make_nan_propagating_choice(">"), _make_nan_propagating_choice("<")


@intrinsic(FLOATS, INTS)
def power_of_two(b, exponents):
    """Return ``2.0**exponents`` of int32 exponents from -126 to 127, as float32 lanes."""
    return b.bitcast(b.shl(b.add(exponents, _const(_I, 127)), _const(_I, 23)), _F)


halve_ints = intrinsic(INTS, INTS)(lambda b, n: b.ashr(n, _const(_I, 1)))


@intrinsic(FLOATS, FLOATS, ADDRESS)
def mask_with_negative_infinity(b, x, count):
    """Keep the first `count` lanes of `x`, and set the other lanes to -inf."""
    return b.select(emit_first_lanes_mask(b, count), x, _const(_F, float("-inf")))


def _make_lane_reduction(combine: Callable[..., Any]) -> Intrinsic:
    """Make an intrinsic that reduces the 16 lanes to a scalar with `combine`, as a binary tree."""

    @intrinsic(FLOAT, FLOATS)
    def reduce_lanes(b, x):
        n = LANES
        while n > 1:
            n //= 2
            half = ir.VectorType(_i32, n)
            low, high = (ir.Constant(half, list(range(start, start + n))) for start in (0, n))
            x = combine(b, b.shuffle_vector(x, x, low), b.shuffle_vector(x, x, high))
        return b.extract_element(x, ir.Constant(_i32, 0))

    return reduce_lanes


lane_sum, lane_product = (
    _make_lane_reduction(lambda b, x, y: b.fadd(x, y)),
    _make_lane_reduction(lambda b, x, y: b.fmul(x, y)),
)
lane_max, lane_min = _make_lane_reduction(larger.body), _make_lane_reduction(smaller.body)


@intrinsic(ADDRESS, FLOATS, FLOATS)
def greater_bitmask(b, x, y):
    """Return a bitmask as an integer: bit i is set if lane i of `x` is greater than lane i of `y`."""
    return b.zext(b.bitcast(b.fcmp_ordered(">", x, y), _i16), _i64)


@intrinsic(ADDRESS, FLOATS, FLOATS)
def greater_or_nan_bitmask(b, x, y):
    """Return a bitmask as an integer: bit i is set if lane i of `x` is greater than lane i of `y`, or either is NaN."""
    return b.zext(b.bitcast(b.fcmp_unordered(">", x, y), _i16), _i64)


@intrinsic(ADDRESS, ADDRESS)
def count_trailing_zeros(b, n):
    """Count the zero bits below the lowest set bit of a 64-bit integer. The result is 64 for 0."""
    return _call(b, "llvm.cttz.i64", _i64, n, ir.Constant(ir.IntType(1), 0))


@intrinsic(ADDRESS, ADDRESS)
def count_leading_zeros(b, n):
    """Count the zero bits above the highest set bit of a 64-bit integer. The result is 64 for 0."""
    return _call(b, "llvm.ctlz.i64", _i64, n, ir.Constant(ir.IntType(1), 0))


# --------------------------------------------------------------------------------------------------- integers


@intrinsic(INTS)
def zero_ints(b):
    return _const(_I, 0)


splat_int = intrinsic(INTS, ADDRESS)(lambda b, v: _splat(b, b.trunc(v, _i32), _I))
add_int = intrinsic(INTS, INTS, INTS)(lambda b, x, y: b.add(x, y))
sub_int = intrinsic(INTS, INTS, INTS)(lambda b, x, y: b.sub(x, y))
and_int = intrinsic(INTS, INTS, INTS)(lambda b, x, y: b.and_(x, y))
or_int = intrinsic(INTS, INTS, INTS)(lambda b, x, y: b.or_(x, y))
shift_left = intrinsic(INTS, INTS, INTS)(lambda b, x, n: b.shl(x, n))
shift_right_signed = intrinsic(INTS, INTS, INTS)(lambda b, x, n: b.ashr(x, n))
shift_right = intrinsic(INTS, INTS, INTS)(lambda b, x, n: b.lshr(x, n))


def _make_bytes_as_floats(first: int) -> Intrinsic:
    @intrinsic(FLOATS, INTS)
    def convert_bytes(b, x):
        chars = b.bitcast(x, _B)
        lanes = ir.Constant(_I, list(range(first, first + LANES)))
        return b.sitofp(b.zext(b.shuffle_vector(chars, chars, lanes), _I), _F)

    return convert_bytes


bytes_as_floats, next_bytes_as_floats = (_make_bytes_as_floats(first) for first in (0, LANES))
"""The unsigned bytes 0 to 15 of a vector as 16 float32 lanes; and the bytes 16 to 31."""

bits_to_float = intrinsic(FLOATS, INTS)(lambda b, x: b.bitcast(x, _F))
float_to_bits = intrinsic(INTS, FLOATS)(lambda b, x: b.bitcast(x, _I))
lane_0 = intrinsic(FLOAT, FLOATS)(lambda b, x: b.extract_element(x, ir.Constant(_i32, 0)))
mul_int = intrinsic(INTS, INTS, INTS)(lambda b, x, y: b.mul(x, y))


if not TYPE_CHECKING:
    __getattr__ = make_module_getattr(globals(), total="lane_sum")
