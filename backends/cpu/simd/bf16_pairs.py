"""Conversions between float32 and bfloat16 vectors, and bfloat16 pairs.

A pair has 32 bits: lane i holds the bfloat16 of lane i of two float32 vectors, the first vector in the lower half.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from ..target_cpu import find_features_of_compile_target
from . import vectors as simd
from .dot_tiles import CODES_TYPE, unpack_vectors_from_array
from .vectors import ADDRESS, FLOATS, INTS, LANES, NOTHING, intrinsic, ints_of, llvm_type

_i16, _i32 = map(ir.IntType, (16, 32))
_F, _I = llvm_type(FLOATS), llvm_type(INTS)
_TWICE = ir.VectorType(_i16, 2 * LANES)


class _BFloat16Type(ir.Type):
    """The LLVM type ``bfloat``, which llvmlite does not have."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16Type)

    def __hash__(self) -> int:
        return hash("bfloat")


_BFLOAT16_VECTOR = ir.VectorType(_BFloat16Type(), 2 * LANES)


def round_and_concat_as_bf16(b: Any, low: Any, high: Any) -> Any:
    """Round two float32 vectors to bfloat16 and concatenate the 32 bit patterns, `low` before `high`.

    Rounding is to nearest, ties to even; NaN stays NaN.
    """
    if not find_features_of_compile_target().get("avx512bf16"):
        halves = [
            b.trunc(b.lshr(_round_bits_to_bf16_precision(b, v), ints_of(16)), ir.VectorType(_i16, LANES))
            for v in (low, high)
        ]
        return b.shuffle_vector(*halves, _lane_order([*range(2 * LANES)]))
    name, kind = "llvm.x86.avx512bf16.cvtne2ps2bf16.512", ir.FunctionType(_BFLOAT16_VECTOR, [_F, _F])
    return b.bitcast(b.call(b.module.globals.get(name) or ir.Function(b.module, kind, name), [high, low]), _TWICE)


def widen_bf16_to_low_and_high_halves(b: Any, bf16_bits: Any) -> tuple[Any, Any]:
    """Widen 32 bfloat16 bit patterns to two float32 vectors: the first 16 values and the last 16 values."""
    halves = (b.shuffle_vector(bf16_bits, bf16_bits, _lane_order([*range(i, i + LANES)])) for i in (0, LANES))
    low, high = (b.bitcast(b.shl(b.zext(half, _I), ints_of(16)), _F) for half in halves)
    return low, high


def _lane_order(lanes: list[int]) -> ir.Constant:
    return ir.Constant(ir.VectorType(_i32, len(lanes)), lanes)


def round_and_interleave_as_bf16(b: Any, first: Any, second: Any) -> Any:
    """Round two float32 vectors to bfloat16 and interleave the lanes as pairs, `first` in the lower half.

    Rounding is to nearest, ties to even; NaN stays NaN.
    """
    if not find_features_of_compile_target().get("avx512bf16"):
        return b.or_(
            b.lshr(_round_bits_to_bf16_precision(b, first), ints_of(16)), _round_bits_to_bf16_precision(b, second)
        )
    shorts = round_and_concat_as_bf16(b, first, second)
    order = _lane_order([lane + half for lane in range(LANES) for half in (0, LANES)])
    return b.bitcast(b.shuffle_vector(shorts, shorts, order), _I)


def _round_bits_to_bf16_precision(b: Any, vector: Any) -> Any:
    """Round float32 lanes to bfloat16 precision, and return their bits with lower halves of zero; NaN stays NaN."""
    bits = b.bitcast(vector, _I)
    odd = b.and_(b.lshr(bits, ints_of(16)), ints_of(1))
    nearest = b.add(bits, b.add(odd, ints_of(0x7FFF)))
    quiet = b.or_(bits, ints_of(0x400000))
    return b.and_(b.select(b.fcmp_unordered("uno", vector, vector), quiet, nearest), ints_of(0xFFFF0000))


@intrinsic(FLOATS, INTS)
def extract_first_of_pairs(b, pairs):
    return b.bitcast(b.shl(pairs, ints_of(16)), _F)


@intrinsic(FLOATS, INTS)
def extract_second_of_pairs(b, pairs):
    return b.bitcast(b.and_(pairs, ints_of(0xFFFF0000)), _F)


@intrinsic(NOTHING, ADDRESS, FLOATS, FLOATS)
def store_two_vectors_as_bf16(b, address, low, high):
    """Store two float32 vectors as 32 consecutive bfloat16, `low` before `high`."""
    shorts = round_and_concat_as_bf16(b, low, high)
    b.store(shorts, b.inttoptr(address, shorts.type.as_pointer()), align=2)


@intrinsic(NOTHING, ADDRESS, CODES_TYPE, *[FLOATS] * 4)
def store_dequantised_bf16_tile(b, address, codes, low_scale, high_scale, low_bias, high_bias):
    """Store ``scale * code + bias`` of weights at `address` as bfloat16 pairs, the layout of an AMX tile.

    The tile has 32 columns of 16 weight rows. `low_scale` and `low_bias` have a number for each row, for the first 16
    columns. `high_scale` and `high_bias` are for the last 16 columns.
    """
    for j, vector in enumerate(unpack_vectors_from_array(b, codes)):
        scale, bias = (low_scale, low_bias) if j < 4 else (high_scale, high_bias)
        numbers = b.bitcast(vector, _I)
        values = []
        for k in range(4):
            code = b.and_(b.lshr(numbers, ints_of(8 * k)), ints_of(255))
            values.append(simd.fma.body(b, scale, simd.to_float.body(b, code), bias))
        for k in range(2):
            pair = round_and_interleave_as_bf16(b, values[2 * k], values[2 * k + 1])
            at = b.add(address, ir.Constant(address.type, 64 * (2 * j + k)))
            b.store(pair, b.inttoptr(at, pair.type.as_pointer()), align=64)
