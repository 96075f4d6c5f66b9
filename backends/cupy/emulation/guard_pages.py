"""Memory that ends where nothing may be touched, and launches that see no more of it than their operands."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..device.driver import Launch, Span

OPERAND_ALIGNMENT = 16
GUARD_BYTES = 16 << 20
"""Bytes before and after an operand that fault. A wrong row of a matrix lies far outside of one page."""
Bytes = npt.NDArray[np.uint8]
NO_ACCESS, MAP_FAILED = 0, ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_ssize_t)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def allocate_guarded(nbytes: int) -> Bytes:
    """Return zeroed memory between guard zones: it begins at a multiple of 16 and ends within 15 bytes of its zone.

    Raises:
        MemoryError: the system has no such memory.
    """
    pages = _map_pages(nbytes)
    start = len(pages) - -(-nbytes // OPERAND_ALIGNMENT) * OPERAND_ALIGNMENT
    return pages[start : start + nbytes]


def _map_pages(nbytes: int) -> Bytes:
    """Return whole pages for `nbytes` bytes between two guard zones, which take addresses but no memory."""
    size = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    whole = size + 2 * GUARD_BYTES
    low = _libc.mmap(None, whole, NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if low == MAP_FAILED:
        raise MemoryError(os.strerror(ctypes.get_errno()))
    pages = (ctypes.c_uint8 * size).from_address(low + GUARD_BYTES)
    weakref.finalize(pages, _libc.munmap, low, whole).atexit = False
    if _libc.mprotect(low + GUARD_BYTES, size, mmap.PROT_READ | mmap.PROT_WRITE):
        raise MemoryError(os.strerror(ctypes.get_errno()))
    return np.ctypeslib.as_array(pages)


def address_of(memory: Bytes) -> int:
    return int(memory.ctypes.data)


@dataclass(frozen=True, slots=True)
class GuardedOperand:
    """Bytes of the program's memory from `low` to before `high`, and those that a launch sees in their stead."""

    low: int
    high: int
    guarded_address: int
    memory: Bytes

    def copy_in(self, pattern: int) -> None:
        """Copy the operand in; the bytes around it, up to where memory faults, hold the pattern."""
        ctypes.memset(address_of(self.memory), pattern, len(self.memory))
        ctypes.memmove(self.guarded_address, self.low, self.high - self.low)

    def has_intact_margins(self, pattern: int) -> bool:
        """Whether the bytes around it are what they were."""
        start = self.guarded_address - address_of(self.memory)
        before, after = self.memory[:start], self.memory[start + self.high - self.low :]
        return bool((before == pattern).all() and (after == pattern).all())

    def copy_back(self) -> None:
        """Copy the operand back."""
        ctypes.memmove(self.low, self.guarded_address, self.high - self.low)


class GuardedMemoryPool:
    """Memory that operands of one launch after another have for their own."""

    def __init__(self) -> None:
        self._allocated_pages: dict[tuple[int, int], Bytes] = {}

    def allocate(self, number: int, nbytes: int) -> Bytes:
        """Whole pages for operand `number` of a launch."""
        key = (number, -(-nbytes // mmap.PAGESIZE))
        if key not in self._allocated_pages:
            self._allocated_pages[key] = _map_pages(nbytes)
        return self._allocated_pages[key]


def guard_operands(spans: Sequence[Span], rooms: GuardedMemoryPool) -> list[GuardedOperand]:
    """Memory of its own for each operand of a launch, those that overlap together."""
    merged: list[list[int]] = []
    for span in sorted(spans, key=lambda s: s.low):
        if merged and span.low < merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], span.high)
        elif span.high > span.low:
            merged.append([span.low, span.high])
    taken = []
    for number, (low, high) in enumerate(merged):
        before = low % OPERAND_ALIGNMENT
        room = -(-(high - low + before) // OPERAND_ALIGNMENT) * OPERAND_ALIGNMENT
        memory = rooms.allocate(number, room)
        taken.append(GuardedOperand(low, high, address_of(memory) + len(memory) - room + before, memory))
    return taken


def redirect_words(launch: Launch, where: Sequence[GuardedOperand]) -> list[int]:
    """The words of a launch whose operands lie in these places."""
    words = list(launch.words)
    for span in launch.spans:
        place = _find_operand(span, where)
        if place is not None:
            words[span.word] += place.guarded_address - place.low
    return words


def _find_operand(span: Span, where: Sequence[GuardedOperand]) -> GuardedOperand | None:
    return next((p for p in where if p.low <= span.low and span.high <= p.high and span.low < span.high), None)
