"""Vector operations of kernels: 16 float32 or int32 lanes, 64 bytes, loaded from addresses.

Each operation is a few lines for LLVM's builder. They are plain vector code, valid on every target: LLVM splits vectors
that are too long for the processor. Nothing here imports Numba. `compiler` makes functions of these declarations when a
kernel has to be compiled. Kernels call an operation with values, ``store(p, v)``. Other operations call its body with a
builder before the values, ``store.body(b, p, v)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llvmlite import ir

from ....graph.lazy_dataclass import dataclass
from ....graph.old_names import make_module_getattr
from ..target_cpu import find_target_features, is_native

ADDRESS, FLOAT, DOUBLE, NOTHING = "address", "f32", "f64", "nothing"
FLOATS, INTS, BYTES = "f32x16", "i32x16", "i8x64"
LANES = 16

_i8, _i16, _i32, _i64, _half, _f32 = (*map(ir.IntType, (8, 16, 32, 64)), ir.HalfType(), ir.FloatType())
_F, _I, _B = ir.VectorType(_f32, 16), ir.VectorType(_i32, 16), ir.VectorType(_i8, 64)
_TYPES = {ADDRESS: _i64, FLOAT: _f32, DOUBLE: ir.DoubleType(), FLOATS: _F, INTS: _I, BYTES: _B}


def vector_tuple_type(kind: str, count: int) -> str:
    """Return the type name of `count` values as one value."""
    return f"{kind}*{count}"


def llvm_type(name: str) -> ir.Type:
    one, _, count = name.partition("*")
    return ir.ArrayType(_TYPES[one], int(count)) if count else _TYPES[one]


@dataclass(frozen=True, slots=True)
class Intrinsic:
    """An operation: the type names of its result and operands, and its body for an LLVM builder."""

    result: str
    operands: tuple[str, ...]
    body: Callable[..., Any]

    def __call__(self, *values: Any) -> Any:
        raise TypeError("an intrinsic runs in compiled kernels only")


def intrinsic(result: str, *operands: str) -> Callable[[Callable[..., Any]], Intrinsic]:
    """Return a decorator for a body ``(builder, *values) -> value``."""
    return lambda body: Intrinsic(result, operands, body)


FEW_REGISTERS, MANY_REGISTERS = 8, 32
"""Vectors of 64 bytes that the registers hold, without and with AVX-512."""


def count_vector_registers() -> int:
    return MANY_REGISTERS if find_target_features().get("avx512f") else FEW_REGISTERS


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
"""Call an instruction that LLVM has for every processor: ``(b, name, result, *values)``."""
FOREIGN_PREFIX = "hocket.of."
"""Prefix of an instruction of another architecture while Numba makes code for this one."""


def call_llvm(b: Any, name: str, result: ir.Type, *values: Any) -> Any:
    """Call an instruction by its name in LLVM."""
    if is_native():
        return _call(b, name, result, *values)
    import llvmlite.binding as llvm

    llvm.add_symbol(FOREIGN_PREFIX + name, 1)  # Numba links functions that are never called
    return _call(b, FOREIGN_PREFIX + name, result, *values)


def _first_lanes_mask(b: Any, count: Any) -> Any:
    """Return the mask of the lanes below `count` (an address-sized integer)."""
    lanes = ir.Constant(_I, list(range(LANES)))
    return b.icmp_signed("<", lanes, _splat(b, b.trunc(count, _i32), _I))


# ------------------------------------------------------------------------------------- arguments and scalars


@intrinsic(ADDRESS, ADDRESS, ADDRESS)
def load_word(b, block, index):
    """Load word `index` of an argument block."""
    return b.load(b.gep(_pointer(b, block, _i64), [index]))


@intrinsic(FLOAT, ADDRESS, ADDRESS)
def load_float_word(b, block, index):
    """Load the float32 that has the low half of a word as its bits."""
    return b.bitcast(b.trunc(b.load(b.gep(_pointer(b, block, _i64), [index])), _i32), _f32)


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
def load_bf16(b, a):
    """Load 16 bfloat16, the upper halves of float32."""
    wide = b.zext(_load(b, a, ir.VectorType(_i16, 16), 2), _I)
    return b.bitcast(b.shl(wide, _const(_I, 16)), _F)


load_ints = intrinsic(INTS, ADDRESS)(lambda b, a: _load(b, a, _I, 4))


@intrinsic(INTS, ADDRESS)
def load_u8_lanes(b, a):
    """Load 16 unsigned bytes, one per lane."""
    return b.zext(_load(b, a, ir.VectorType(_i8, 16), 1), _I)


load_u16_lanes = intrinsic(INTS, ADDRESS)(lambda b, a: b.zext(_load(b, a, ir.VectorType(_i16, 16), 1), _I))


@intrinsic(INTS, ADDRESS)
def load_i8_lanes(b, a):
    """Load 16 signed bytes, one per lane."""
    return b.sext(_load(b, a, ir.VectorType(_i8, 16), 1), _I)


@intrinsic(FLOATS, ADDRESS, ADDRESS)
def load_first_lanes(b, a, count):
    """Load the first `count` lanes; the others are zero, and their memory is not accessed."""
    mask = _first_lanes_mask(b, count)
    where = _pointer(b, a, _F)
    return _call(b, "llvm.masked.load.v16f32.p0", _F, where, ir.Constant(_i32, 4), mask, _const(_F, 0.0))


@intrinsic(FLOATS, ADDRESS, ADDRESS, FLOATS)
def load_first_lanes_or(b, a, count, otherwise):
    """Load the first `count` lanes and take the others from `otherwise`."""
    where = _pointer(b, a, _F)
    return _call(
        b, "llvm.masked.load.v16f32.p0", _F, where, ir.Constant(_i32, 4), _first_lanes_mask(b, count), otherwise
    )


@intrinsic(FLOATS, ADDRESS, INTS)
def gather_lanes(b, a, offsets):
    """Load each lane from its own offset in bytes after an address."""
    wide = ir.VectorType(_i64, LANES)
    at = b.inttoptr(b.add(_splat(b, a, wide), b.sext(offsets, wide)), ir.VectorType(_f32.as_pointer(), LANES))
    every = ir.Constant(ir.VectorType(ir.IntType(1), LANES), [1] * LANES)
    return _call(b, "llvm.masked.gather.v16f32.v16p0", _F, at, ir.Constant(_i32, 4), every, _const(_F, 0.0))


@intrinsic(INTS, ADDRESS, ADDRESS)
def lane_indices(b, first, end):
    """Return consecutive indices from `first`, one per lane; the last one before `end` replaces later ones."""
    numbers = b.add(_splat(b, b.trunc(first, _i32), _I), ir.Constant(_I, list(range(LANES))))
    last = _splat(b, b.sub(b.trunc(end, _i32), ir.Constant(_i32, 1)), _I)
    return b.select(b.icmp_signed("<", numbers, last), numbers, last)


@intrinsic(NOTHING, ADDRESS, FLOATS, ADDRESS)
def store_first_lanes(b, a, v, count):
    """Store only the first `count` lanes."""
    where = _pointer(b, a, _F)
    _call(b, "llvm.masked.store.v16f32.p0", ir.VoidType(), v, where, ir.Constant(_i32, 4), _first_lanes_mask(b, count))


@intrinsic(NOTHING, ADDRESS, FLOATS)
def store_streaming(b, a, v):
    """Store past the caches, to an address that is a multiple of 64: for values that are not read soon."""
    stored = b.store(v, _pointer(b, a, _F), align=64)
    stored.set_metadata("nontemporal", b.module.add_metadata([ir.Constant(_i32, 1)]))


@intrinsic(NOTHING, ADDRESS, INTS)
def store_u8_lanes(b, a, v):
    """Store the low bytes of 16 lanes."""
    _store(b, a, b.trunc(v, ir.VectorType(_i8, 16)), 1)


@intrinsic(NOTHING, ADDRESS)
def prefetch(b, a):
    values = [_pointer(b, a, _i8), *(ir.Constant(_i32, n) for n in (0, 3, 1))]
    _call(b, "llvm.prefetch.p0", ir.VoidType(), *values)


@intrinsic(NOTHING, ADDRESS)
def prefetch_l2(b, a):
    """Prefetch into the second cache."""
    values = [_pointer(b, a, _i8), *(ir.Constant(_i32, n) for n in (0, 2, 1))]
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
"""The larger of two numbers, or the other one if one is NaN: for maxima that need not propagate NaN."""
minimum = intrinsic(FLOATS, FLOATS, FLOATS)(lambda b, x, y: _call(b, "llvm.minnum.v16f32", _F, x, y))
clamp_min = intrinsic(FLOATS, FLOATS, FLOATS)(lambda b, x, low: b.select(b.fcmp_ordered(">", low, x), low, x))
"""`x`, or `low` if it is larger; NaN stays NaN.

This is one instruction, ``max(low, x)``, which returns its second operand unless the first is larger.
"""
clamp_max = intrinsic(FLOATS, FLOATS, FLOATS)(lambda b, x, high: b.select(b.fcmp_ordered("<", high, x), high, x))
ieee_maximum = intrinsic(FLOATS, FLOATS, FLOATS)(lambda b, x, y: _call(b, "llvm.maximum.v16f32", _F, x, y))
"""The larger of two numbers, NaN if one is; +0 is larger than -0."""
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
def round_below_2_22(b, x):
    """Round numbers below 2**22 to integers, ties to even, by the mantissa of their sum with 1.5 * 2**23."""
    shifted = b.fadd(x, _const(_F, 1.5 * 2**23))
    return b.sub(b.bitcast(shifted, _I), _const(_I, 0x4B400000))


@intrinsic(FLOATS)
def zeros(b):
    return _const(_F, 0.0)


@intrinsic(FLOATS, FLOATS, FLOATS, FLOATS, FLOATS)
def where_less(b, x, y, then, otherwise):
    """Select lanes of `then` where ``x < y``, else of `otherwise` (also for NaN)."""
    return b.select(b.fcmp_ordered("<", x, y), then, otherwise)


@intrinsic(FLOATS, FLOATS, FLOATS, FLOATS)
def where_nonzero(b, x, then, otherwise):
    """Select lanes of `then` where x is not 0 (also for NaN), else of `otherwise`."""
    return b.select(b.fcmp_unordered("!=", x, _const(_F, 0.0)), then, otherwise)


def _make_choice(sign: str) -> Intrinsic:
    """Make an intrinsic for the number of two for which ``x sign y`` holds; NaN if one of them is NaN."""

    @intrinsic(FLOATS, FLOATS, FLOATS)
    def choose(b, x, y):
        return b.select(b.fcmp_unordered("uno", x, y), b.fadd(x, y), b.select(b.fcmp_ordered(sign, x, y), x, y))

    return choose


larger, smaller = _make_choice(">"), _make_choice("<")


def make_comparison(sign: str) -> Intrinsic:
    """Make an intrinsic that is 1 where ``x sign y`` holds, else 0; for NaN only ``!=`` holds."""

    @intrinsic(FLOATS, FLOATS, FLOATS)
    def compare_lanes(b, x, y):
        compare = b.fcmp_unordered if sign == "!=" else b.fcmp_ordered
        return b.select(compare(sign, x, y), _const(_F, 1.0), _const(_F, 0.0))

    return compare_lanes


@intrinsic(FLOATS, INTS)
def power_of_two(b, n):
    """Return ``2**n`` for n from -126 to 127."""
    return b.bitcast(b.shl(b.add(n, _const(_I, 127)), _const(_I, 23)), _F)


halve_ints = intrinsic(INTS, INTS)(lambda b, n: b.ashr(n, _const(_I, 1)))


@intrinsic(FLOATS, FLOATS, ADDRESS)
def mask_with_negative_infinity(b, x, count):
    """Keep the first `count` lanes and set the others to -inf."""
    return b.select(_first_lanes_mask(b, count), x, _const(_F, float("-inf")))


@intrinsic(FLOATS, FLOATS, ADDRESS)
def mask_with_zeros(b, x, count):
    """Keep the first `count` lanes and set the others to 0."""
    return b.select(_first_lanes_mask(b, count), x, _const(_F, 0.0))


def _make_lane_reduction(join: Callable[..., Any]) -> Intrinsic:
    """Make an intrinsic that reduces all lanes in the order of a tree."""

    @intrinsic(FLOAT, FLOATS)
    def reduce_lanes(b, x):
        n = LANES
        while n > 1:
            n //= 2
            half = ir.VectorType(_i32, n)
            low, high = (ir.Constant(half, list(range(start, start + n))) for start in (0, n))
            x = join(b, b.shuffle_vector(x, x, low), b.shuffle_vector(x, x, high))
        return b.extract_element(x, ir.Constant(_i32, 0))

    return reduce_lanes


lane_sum, lane_product = (
    _make_lane_reduction(lambda b, x, y: b.fadd(x, y)),
    _make_lane_reduction(lambda b, x, y: b.fmul(x, y)),
)
lane_max, lane_min = _make_lane_reduction(larger.body), _make_lane_reduction(smaller.body)


@intrinsic(ADDRESS, FLOATS, FLOATS)
def greater_bits(b, x, y):
    """Return one bit for each lane, from the lowest: whether ``x > y``."""
    return b.zext(b.bitcast(b.fcmp_ordered(">", x, y), _i16), _i64)


@intrinsic(ADDRESS, FLOATS, FLOATS)
def not_less_or_equal_bits(b, x, y):
    """Return one bit for each lane, from the lowest: whether ``x > y`` or one of them is NaN."""
    return b.zext(b.bitcast(b.fcmp_unordered(">", x, y), _i16), _i64)


@intrinsic(ADDRESS, ADDRESS)
def count_trailing_zeros(b, n):
    """Count the zero bits below the lowest set bit; 64 for 0."""
    return _call(b, "llvm.cttz.i64", _i64, n, ir.Constant(ir.IntType(1), 0))


@intrinsic(ADDRESS, ADDRESS)
def count_leading_zeros(b, n):
    """Count the zero bits above the highest set bit; 64 for 0."""
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
"""Unsigned bytes 0 to 15 of a vector, a lane each; and bytes 16 to 31."""

bits_to_float = intrinsic(FLOATS, INTS)(lambda b, x: b.bitcast(x, _F))
float_to_bits = intrinsic(INTS, FLOATS)(lambda b, x: b.bitcast(x, _I))
lane_0 = intrinsic(FLOAT, FLOATS)(lambda b, x: b.extract_element(x, ir.Constant(_i32, 0)))
mul_int = intrinsic(INTS, INTS, INTS)(lambda b, x, y: b.mul(x, y))


if not TYPE_CHECKING:
    __getattr__ = make_module_getattr(globals(), total="lane_sum")
