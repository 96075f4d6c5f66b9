"""A pool of pinned host arrays: a device copies results into them, and callers keep them as long as they need."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from ...base import Array

MAX_BLOCKS_PER_SIZE, MAX_PINNED_BYTES = 4, 64 << 20
"""The largest number of blocks of one size, and of bytes in all blocks."""


class PinnedBlock:
    """A block of pinned host memory that is lent to one array at a time."""

    def __init__(self, memory: Any) -> None:
        self.memory = memoryview(memory)  # NumPy would make an array the base of all views
        self.address = int(np.frombuffer(self.memory, np.uint8).ctypes.data)
        self._lent_array: Callable[[], Array | None] = lambda: None

    @property
    def is_free(self) -> bool:
        """Whether the block is free: the lent array and all views of it are deleted."""
        return self._lent_array() is None

    def lend_array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Lend the block as an array of this shape and dtype. The block is in use until the array is deleted."""
        flat = np.frombuffer(self.memory, np.uint8)
        self._lent_array = weakref.ref(flat)
        return np.ndarray(shape, dtype, flat)


class PinnedPool:
    """A pool of pinned host memory blocks, which are reused after their arrays are deleted.

    The memory is pinned and resident, so a result needs no extra copy and causes no page faults.
    """

    def __init__(self, pin: Callable[[int], Any]) -> None:
        self._pin, self._pinned_bytes = pin, 0
        self._blocks: defaultdict[int, list[PinnedBlock]] = defaultdict(list)

    def find_or_allocate_block(self, nbytes: int) -> PinnedBlock | None:
        """Find a free block of `nbytes` bytes, or allocate one; return `None` if the pool is full.

        The pool is full if it has its maximum of blocks or bytes, because callers still hold many arrays.
        """
        blocks = self._blocks[nbytes]
        for block in blocks:
            if block.is_free:
                return block
        if len(blocks) == MAX_BLOCKS_PER_SIZE or self._pinned_bytes + nbytes > MAX_PINNED_BYTES:
            return None
        self._pinned_bytes += nbytes
        blocks.append(PinnedBlock(self._pin(nbytes)))
        return blocks[-1]
