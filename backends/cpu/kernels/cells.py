"""Rows of cached keys and values, as attention reads them: 16 elements at a time, as float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ....graph.dtypes import DType
from ..compiler import Part, part
from ..simd.shorts import load_some_bf16, load_some_half
from ..simd.vectors import LANES, load, load_bf16, load_half, load_some


@dataclass(frozen=True, slots=True)
class Cells:
    """A type of cache: the bytes of an element; ``whole(row, c)``, the 16 elements from column c; and ``some(row, c,
    n)``, those of them before column n, with zeros in the other lanes, whose memory is not touched."""

    nbytes: int
    whole: Part
    some: Part


@part
def f32_whole(row, c):
    return load(row + 4 * c)


@part
def f32_some(row, c, n):
    return load(row + 4 * c) if n - c >= LANES else load_some(row + 4 * c, n - c)


@part
def f16_whole(row, c):
    return load_half(row + 2 * c)


@part
def f16_some(row, c, n):
    return load_half(row + 2 * c) if n - c >= LANES else load_some_half(row + 2 * c, n - c)


@part
def bf16_whole(row, c):
    return load_bf16(row + 2 * c)


@part
def bf16_some(row, c, n):
    return load_bf16(row + 2 * c) if n - c >= LANES else load_some_bf16(row + 2 * c, n - c)


CELLS: Mapping[DType, Cells] = MappingProxyType(
    {
        DType.F32: Cells(4, f32_whole, f32_some),
        DType.F16: Cells(2, f16_whole, f16_some),
        DType.BF16: Cells(2, bf16_whole, bf16_some),
    }
)
