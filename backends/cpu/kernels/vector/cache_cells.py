"""Rows of cached keys and values as attention reads them: 16 elements at a time, as float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from .....graph.dtypes import DType
from ...compilation.compiler import Subroutine, subroutine
from ...simd.half_memory import load_first_bf16, load_first_f16
from ...simd.vectors import LANES, Intrinsic, load, load_bf16, load_f16, load_first_lanes, zeros
from .block_rows import BLOCK_EXPANDERS, BLOCK_LOADERS


@dataclass(frozen=True, slots=True)
class CacheRowReaders:
    """The subroutines that read KV cache rows of one type as float32.

    Attributes:
        nbytes: Bytes of an element or of a block.
        row_bytes: ``(n)`` returns the bytes of the first `n` elements of a row.
        load_16: ``(row, c)`` loads 16 elements from column c.
        load_first: ``(row, c, n)`` loads up to 16 elements from column c, but only before column n; other lanes are
            zero. Memory after column n is not read.
        expand_range: ``(row, c, n, to)`` expands columns c to n to float32. It is None if each head converts by itself.
    """

    nbytes: int
    row_bytes: Subroutine
    load_16: Subroutine
    load_first: Subroutine
    expand_range: Subroutine | None = None


def _make_unquantised_row_readers(nbytes: int, load: Intrinsic, load_first: Intrinsic) -> CacheRowReaders:
    """Make the subroutines for cache rows of an unquantised type with elements of `nbytes` bytes."""

    def row_bytes(n):
        return nbytes * n

    def load_16(row, c):
        return load(row + nbytes * c)

    def load_first_or_16(row, c, n):
        return load(row + nbytes * c) if n - c >= LANES else load_first(row + nbytes * c, n - c)

    return CacheRowReaders(nbytes, subroutine(row_bytes), subroutine(load_16), subroutine(load_first_or_16))


def _make_quantised_row_readers(dtype: DType) -> CacheRowReaders:
    """Make the subroutines for cache rows of a type that is quantised in blocks of 32 elements."""
    block, nbytes, load_16 = dtype.block, dtype.block_bytes, BLOCK_LOADERS[dtype]

    def row_bytes(n):
        return n // block * nbytes

    def load_first(row, c, n):
        return load_16(row, c) if c < n else zeros()

    return CacheRowReaders(nbytes, subroutine(row_bytes), load_16, subroutine(load_first), BLOCK_EXPANDERS[dtype])


CELLS_BY_DTYPE: Mapping[DType, CacheRowReaders] = MappingProxyType(
    {
        DType.F32: _make_unquantised_row_readers(4, load, load_first_lanes),
        DType.F16: _make_unquantised_row_readers(2, load_f16, load_first_f16),
        DType.BF16: _make_unquantised_row_readers(2, load_bf16, load_first_bf16),
        **{dtype: _make_quantised_row_readers(dtype) for dtype in BLOCK_LOADERS},
    }
)
