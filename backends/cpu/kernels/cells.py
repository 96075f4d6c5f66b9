"""Rows of cached keys and values as attention reads them: 16 elements at a time, as float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ....graph.dtypes import DType
from ..compiler import Part, part
from ..simd.shorts import load_some_bf16, load_some_half
from ..simd.vectors import LANES, Intrinsic, load, load_bf16, load_half, load_some, zeros
from .blocks import EXPAND, LOADS


@dataclass(frozen=True, slots=True)
class Cells:
    """The operations on cache rows of one type.

    Attributes:
        nbytes: Bytes of an element or of a block.
        row_bytes: ``(n)`` returns the bytes of the first `n` elements of a row.
        load_16: ``(row, c)`` loads 16 elements from column c.
        load_first: ``(row, c, n)`` loads the elements before column n of these, and zeros. Memory behind n is not read.
        expand_range: ``(row, c, n, to)`` expands columns c to n to float32. It is None if each head converts by itself.
    """

    nbytes: int
    span: Part
    whole: Part
    some: Part
    expand: Part | None = None


def _cells(nbytes: int, load: Intrinsic, load_first: Intrinsic) -> Cells:
    """Make the operations of an unquantised type with elements of `nbytes` bytes."""

    def span(n):
        return nbytes * n

    def whole(row, c):
        return load(row + nbytes * c)

    def some(row, c, n):
        return load(row + nbytes * c) if n - c >= LANES else load_first(row + nbytes * c, n - c)

    return Cells(nbytes, part(span), part(whole), part(some))


def _cells_in_blocks(dtype: DType) -> Cells:
    """Make the operations of a type in blocks of 32 elements."""
    block, nbytes, whole = dtype.block, dtype.block_bytes, LOADS[dtype]

    def span(n):
        return n // block * nbytes

    def some(row, c, n):
        return whole(row, c) if c < n else zeros()

    return Cells(nbytes, part(span), whole, part(some), EXPAND[dtype])


CELLS: Mapping[DType, Cells] = MappingProxyType(
    {
        DType.F32: _cells(4, load, load_some),
        DType.F16: _cells(2, load_half, load_some_half),
        DType.BF16: _cells(2, load_bf16, load_some_bf16),
        **{dtype: _cells_in_blocks(dtype) for dtype in LOADS},
    }
)
