"""Arrays that lie side by side in a buffer of a program, which the host can send to a device in one copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...base import ALIGNMENT, Tensor, contiguous_strides


@dataclass(frozen=True, slots=True)
class Piece:
    """One array of a parcel: its number among all that are sent, and the byte of the parcel where it begins."""

    number: int
    at: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class Parcel:
    """Bytes of a buffer, and the arrays in them."""

    buffer: int
    offset: int
    nbytes: int
    pieces: tuple[Piece, ...]


def parcels_of(tensors: Sequence[Tensor], most: int) -> Iterator[Parcel]:
    """Those of `tensors` that are dense, in parcels of at most so many bytes; the others are in none.

    Of a buffer only what two arrays fill is overwritten, and what no value can have: each begins at a multiple of
    `ALIGNMENT`, so that nothing lies between the end of one and the next such byte.
    """
    dense = (n for n, t in enumerate(tensors) if 0 < t.spec.nbytes <= most and _is_dense(t))
    inside: list[int] = []
    for number in sorted(dense, key=lambda n: (tensors[n].buffer, tensors[n].offset)):
        if inside and not _follows(tensors[inside[0]], tensors[inside[-1]], tensors[number], most):
            yield _parcel(tensors, inside)
            inside = []
        inside.append(number)
    if inside:
        yield _parcel(tensors, inside)


def _is_dense(t: Tensor) -> bool:
    return t.strides == contiguous_strides(t.shape)


def _follows(first: Tensor, last: Tensor, t: Tensor, most: int) -> bool:
    """Whether `t` goes into the parcel that so begins and ends."""
    next_value = -(-(last.offset + last.spec.nbytes) // ALIGNMENT) * ALIGNMENT
    fits = t.offset + t.spec.nbytes - first.offset <= most
    return (t.buffer, t.offset) == (last.buffer, next_value) and fits


def _parcel(tensors: Sequence[Tensor], numbers: Sequence[int]) -> Parcel:
    first, last = tensors[numbers[0]], tensors[numbers[-1]]
    inside = ((n, tensors[n]) for n in numbers)
    pieces = tuple(Piece(n, t.offset - first.offset, t.shape, t.dtype.storage) for n, t in inside)
    return Parcel(first.buffer, first.offset, last.offset + last.spec.nbytes - first.offset, pieces)
