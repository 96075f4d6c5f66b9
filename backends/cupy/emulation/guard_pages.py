"""Buffers between guard zones, so that an access out of bounds faults.

Each operand of a launch is copied to its own pages, and ends at the end of these pages. After the launch the operand is
copied back. Bytes between the operand and the guard zones hold a pattern, which must be unchanged.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..device.driver import AddressSpan, KernelLaunch

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


def allocate_bytes_before_guard_zone(nbytes: int) -> Bytes:
    """Allocate `nbytes` zeroed bytes that end next to memory without access, so that an overrun raises a fault.

    They are aligned to 16 bytes, so the end may be up to 15 bytes before the guard zone.

    Raises:
        MemoryError: The system has no memory.
    """
    pages = _map_guarded_pages(nbytes)
    start = len(pages) - -(-nbytes // OPERAND_ALIGNMENT) * OPERAND_ALIGNMENT
    return pages[start : start + nbytes]


def _map_guarded_pages(nbytes: int) -> Bytes:
    """Allocate complete pages for at least `nbytes` bytes between two guard zones.

    A guard zone is a range of addresses without memory, where each access is a fault.
    """
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
    """Return the address of the first byte of an array."""
    return int(memory.ctypes.data)


@dataclass(frozen=True, slots=True)
class GuardedOperand:
    """An operand of a launch and its guarded copy: a copy next to guard pages, which the launch uses instead.

    The operand is the bytes [`low`, `high`) of the program's memory.
    """

    low: int
    high: int
    guarded_address: int
    memory: Bytes

    def copy_in(self, pattern: int) -> None:
        """Copy the operand into the guarded memory, and fill the margins up to the guard pages with `pattern`."""
        ctypes.memset(address_of(self.memory), pattern, len(self.memory))
        ctypes.memmove(self.guarded_address, self.low, self.high - self.low)

    def has_intact_margins(self, pattern: int) -> bool:
        """Return whether the bytes around the guarded copy still hold `pattern`; if not, a store was out of bounds."""
        start = self.guarded_address - address_of(self.memory)
        before, after = self.memory[:start], self.memory[start + self.high - self.low :]
        return bool((before == pattern).all() and (after == pattern).all())

    def copy_back(self) -> None:
        """Copy the guarded copy back to the memory of the program."""
        ctypes.memmove(self.low, self.guarded_address, self.high - self.low)


class GuardedMemoryPool:
    """A pool of guarded memory for the operands of a launch; the next launch reuses the memory."""

    def __init__(self) -> None:
        self._allocated_pages: dict[tuple[int, int], Bytes] = {}

    def allocate_or_reuse(self, number: int, nbytes: int) -> Bytes:
        """Return guarded pages of at least `nbytes` bytes for operand `number` of a launch; reuse them if possible."""
        key = (number, -(-nbytes // mmap.PAGESIZE))
        if key not in self._allocated_pages:
            self._allocated_pages[key] = _map_guarded_pages(nbytes)
        return self._allocated_pages[key]


def guard_operands(spans: Sequence[AddressSpan], pool: GuardedMemoryPool) -> list[GuardedOperand]:
    """Allocate guarded memory for each operand of a launch.

    Operands that overlap share one guarded operand. Nothing is copied into the memory.

    Args:
        spans: The byte ranges of the operands.
        pool: The pool of guarded memory.
    """
    merged: list[list[int]] = []
    for span in sorted(spans, key=lambda s: s.low):
        if merged and span.low < merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], span.high)
        elif span.high > span.low:
            merged.append([span.low, span.high])
    guarded_operands = []
    for number, (low, high) in enumerate(merged):
        before = low % OPERAND_ALIGNMENT
        padded_bytes = -(-(high - low + before) // OPERAND_ALIGNMENT) * OPERAND_ALIGNMENT
        memory = pool.allocate_or_reuse(number, padded_bytes)
        guarded_operands.append(
            GuardedOperand(low, high, address_of(memory) + len(memory) - padded_bytes + before, memory)
        )
    return guarded_operands


def redirect_words_to_guarded(launch: KernelLaunch, operands: Sequence[GuardedOperand]) -> list[int]:
    """Return the arguments of a launch in which addresses of guarded copies replace the addresses of operands."""
    words = list(launch.words)
    for span in launch.spans:
        operand = _find_operand(span, operands)
        if operand is not None:
            words[span.word_index] += operand.guarded_address - operand.low
    return words


def _find_operand(span: AddressSpan, operands: Sequence[GuardedOperand]) -> GuardedOperand | None:
    return next((o for o in operands if o.low <= span.low and span.high <= o.high and span.low < span.high), None)
