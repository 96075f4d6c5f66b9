"""The allocator of the blocks of a pool, with reference counts."""

from __future__ import annotations


class BlockAllocator:
    """The blocks of a pool: a block is free, or some slots and the prefix tree refer to it.

    Block 0 is never allocated, because padding writes to it.

    Args:
        count: Number of blocks, block 0 included.
    """

    def __init__(self, count: int) -> None:
        self._references = [0] * count
        self._free = list(range(count - 1, 0, -1))

    @property
    def free_count(self) -> int:
        """Number of free blocks."""
        return len(self._free)

    @property
    def usable_count(self) -> int:
        """Number of blocks that can be allocated, free or not."""
        return len(self._references) - 1

    def allocate(self) -> int | None:
        """Allocate a block with one reference; `None` if no block is free."""
        if not self._free:
            return None
        block = self._free.pop()
        self._references[block] = 1
        return block

    def retain(self, block: int) -> None:
        """Add a reference to a block that has one."""
        self._references[block] += 1

    def release(self, block: int) -> None:
        """Remove a reference to a block; without references it is free."""
        self._references[block] -= 1
        if not self._references[block]:
            self._free.append(block)

    def count_references(self, block: int) -> int:
        """Return the number of references to a block."""
        return self._references[block]
