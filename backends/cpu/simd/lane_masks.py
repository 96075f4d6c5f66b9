"""Loads of the lanes that the bits of an integer select, such as the elements of an image without its padding."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from .vectors import ADDRESS, FLOATS, INTS, LANES, emit_masked_gather, emit_masked_load, intrinsic


@intrinsic(FLOATS, ADDRESS, ADDRESS)
def load_lanes_of_bits(b, address, bits):
    """Load the lanes of 16 floats for which a bit of `bits` is set; other lanes are 0, and are not accessed."""
    return emit_masked_load(b, address, _lanes_of_bits(b, bits))


@intrinsic(FLOATS, ADDRESS, INTS, ADDRESS)
def gather_lanes_of_bits(b, address, byte_offsets, bits):
    """Load the lanes for which a bit of `bits` is set, at byte offsets from `address`; other lanes are 0."""
    offsets = b.sext(byte_offsets, ir.VectorType(ir.IntType(64), LANES))
    return emit_masked_gather(b, address, offsets, _lanes_of_bits(b, bits))


def _lanes_of_bits(b: Any, bits: Any) -> Any:
    """Return a boolean mask: lane i is true if bit i of the integer `bits` is set."""
    return b.bitcast(b.trunc(bits, ir.IntType(LANES)), ir.VectorType(ir.IntType(1), LANES))
