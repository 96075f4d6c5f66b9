"""Groups adjacent arrays of a program buffer into batches, which the host sends to a device in one copy each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...base import ALIGNMENT, Tensor, contiguous_strides


@dataclass(frozen=True, slots=True)
class CoalescedArray:
    """One of the arrays that a single copy transfers: its index among all arrays, and its offset in the copy."""

    number: int
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class CoalescedCopy:
    """One memory copy that transfers several adjacent arrays: a byte range of a buffer, and the arrays in it."""

    buffer: int
    offset: int
    nbytes: int
    arrays: tuple[CoalescedArray, ...]


def coalesce_copies(tensors: Sequence[Tensor], max_bytes: int) -> Iterator[CoalescedCopy]:
    """Merge the copies of contiguous tensors that are adjacent in a buffer into copies of at most `max_bytes` bytes.

    Tensors that are not contiguous are left out. A batch overwrites its arrays and the padding between two of them.
    That is safe, because padding never holds a value. Each value begins at a multiple of `ALIGNMENT`, and padding ends
    at the next one.
    """
    dense = (n for n, t in enumerate(tensors) if 0 < t.spec.nbytes <= max_bytes and _is_dense(t))
    inside: list[int] = []
    for number in sorted(dense, key=lambda n: (tensors[n].buffer, tensors[n].offset)):
        if inside and not _can_extend_batch(tensors[inside[0]], tensors[inside[-1]], tensors[number], max_bytes):
            yield _make_batch(tensors, inside)
            inside = []
        inside.append(number)
    if inside:
        yield _make_batch(tensors, inside)


def _is_dense(t: Tensor) -> bool:
    return t.strides == contiguous_strides(t.shape)


def _can_extend_batch(first: Tensor, last: Tensor, t: Tensor, max_bytes: int) -> bool:
    """Return whether `t` can join a batch: it directly follows `last` in memory, and the batch stays small enough.

    Args:
        first: The first tensor of the batch.
        last: The last tensor of the batch.
        t: The new tensor.
        max_bytes: The maximum bytes of a batch.
    """
    next_value = -(-(last.offset + last.spec.nbytes) // ALIGNMENT) * ALIGNMENT
    fits = t.offset + t.spec.nbytes - first.offset <= max_bytes
    return (t.buffer, t.offset) == (last.buffer, next_value) and fits


def _make_batch(tensors: Sequence[Tensor], numbers: Sequence[int]) -> CoalescedCopy:
    first, last = tensors[numbers[0]], tensors[numbers[-1]]
    inside = ((n, tensors[n]) for n in numbers)
    arrays = tuple(CoalescedArray(n, t.offset - first.offset, t.shape, t.dtype.storage) for n, t in inside)
    return CoalescedCopy(first.buffer, first.offset, last.offset + last.spec.nbytes - first.offset, arrays)
