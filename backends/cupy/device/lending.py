"""Arrays of the host in pinned memory: a device copies into them, and whoever gets one has it as long as he likes."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from ...base import Array

ALIKE, MOST = 4, 64 << 20
"""Blocks of one size, and bytes of all of them."""


class Block:
    """Pinned memory that one array shows at a time."""

    def __init__(self, memory: Any) -> None:
        self.memory = memoryview(memory)  # NumPy would take an array for the owner of all that shows it
        self.address = int(np.frombuffer(self.memory, np.uint8).ctypes.data)
        self._shown: Callable[[], Array | None] = lambda: None

    @property
    def is_free(self) -> bool:
        """Whether there is neither the array that was lent, nor a view of it, which would keep it."""
        return self._shown() is None

    def lent(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        flat = np.frombuffer(self.memory, np.uint8)
        self._shown = weakref.ref(flat)
        return np.ndarray(shape, dtype, flat)


class Lending:
    """Blocks that are lent, and lent again when nobody has the array any more: their memory is pinned, and is there,
    so a result costs neither a copy nor faults of new pages."""

    def __init__(self, pin: Callable[[int], Any]) -> None:
        self._pin, self._held = pin, 0
        self._blocks: defaultdict[int, list[Block]] = defaultdict(list)

    def block(self, nbytes: int) -> Block | None:
        """One of so many bytes that is free; None where callers keep many, whose memory should not stay pinned."""
        alike = self._blocks[nbytes]
        for block in alike:
            if block.is_free:
                return block
        if len(alike) == ALIKE or self._held + nbytes > MOST:
            return None
        self._held += nbytes
        alike.append(Block(self._pin(nbytes)))
        return alike[-1]
