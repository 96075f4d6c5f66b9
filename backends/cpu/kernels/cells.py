"""Rows of cached keys and values, as attention reads them: 16 elements at a time, as float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ....graph.dtypes import DType
from ..compiler import Part, part
from ..simd.shorts import load_some_bf16, load_some_half
from ..simd.vectors import LANES, Intrinsic, load, load_bf16, load_half, load_some


@dataclass(frozen=True, slots=True)
class Cells:
    """A type of cache: the bytes of an element; ``whole(row, c)``, the 16 elements from column c; and ``some(row, c,
    n)``, those of them before column n, with zeros in the other lanes, whose memory is not touched."""

    nbytes: int
    whole: Part
    some: Part


def _cells(nbytes: int, load: Intrinsic, load_first: Intrinsic) -> Cells:
    def whole(row, c):
        return load(row + nbytes * c)

    def some(row, c, n):
        return load(row + nbytes * c) if n - c >= LANES else load_first(row + nbytes * c, n - c)

    return Cells(nbytes, part(whole), part(some))


CELLS: Mapping[DType, Cells] = MappingProxyType(
    {
        DType.F32: _cells(4, load, load_some),
        DType.F16: _cells(2, load_half, load_some_half),
        DType.BF16: _cells(2, load_bf16, load_some_bf16),
    }
)
