"""Loads of the lanes that a vector of integers selects, such as the elements of an image without its padding."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from .vectors import ADDRESS, FLOATS, INTS, LANES, emit_masked_gather, emit_masked_load, intrinsic

_INT_LANES = ir.VectorType(ir.IntType(32), LANES)


@intrinsic(FLOATS, ADDRESS, INTS)
def load_negative_lanes(b, address, mask):
    """Load the lanes of 16 floats for which `mask` is negative; other lanes are 0, and are not accessed."""
    return emit_masked_load(b, address, _is_negative(b, mask))


@intrinsic(FLOATS, ADDRESS, INTS, INTS)
def gather_negative_lanes(b, address, byte_offsets, mask):
    """Load the lanes for which `mask` is negative, at byte offsets from `address`; other lanes are 0."""
    offsets = b.sext(byte_offsets, ir.VectorType(ir.IntType(64), LANES))
    return emit_masked_gather(b, address, offsets, _is_negative(b, mask))


def _is_negative(b: Any, mask: Any) -> Any:
    return b.icmp_signed("<", mask, ir.Constant(_INT_LANES, [0] * LANES))
