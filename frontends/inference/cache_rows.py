"""The rows of KV caches that hold the tokens of a sequence: in the region of a sequence, in a ring, or in blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ...ops.matrix.attention import BLOCK_KEYS
from ...scheduler import Store
from ..models.inputs.step import count_cache_rows_with_spare

CACHE_KINDS = ("cache_k", "cache_v", "cache_c")
"""The names of keys, values and keys of token blocks, before the number of the layer."""


class HasCaches(Protocol):
    """The members of a `Session` that tell where its sequences have their rows."""

    sequences: int
    blocks: int
    tables: list[list[int]]
    store: Store

    def cell_count(self, cache: str) -> int:
        """Return the number of cells of a sequence in a cache; see `Session.cell_count`."""


def is_per_cell_cache(name: str) -> bool:
    """Whether a state is a cache with a row for each cell of a sequence, as opposed to one entry per sequence.

    The name tells: as many recurrent states as a pool has cells would have the shape of a cache.
    """
    return name.rpartition(".")[0] in CACHE_KINDS


def find_cache_rows(
    session: HasCaches, name: str, sequence: int, cells: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Find the rows of a cache that hold some cells of a sequence, a range of numbers in ascending order.

    Args:
        session: The session.
        name: The name of the cache.
        sequence: Number of the sequence.
        cells: The numbers of its cells; in a ring they wrap around.
    """
    if session.blocks:
        table = np.array(session.tables[sequence], np.int64)
        return table[cells // BLOCK_KEYS] * BLOCK_KEYS + cells % BLOCK_KEYS
    count = session.cell_count(name)
    return sequence * count_cache_rows_with_spare(count) + cells % count


def has_cells_for_new_tokens(session: HasCaches, tokens: Sequence[Sequence[int]], lengths: Sequence[int]) -> bool:
    """Whether the cache has a cell for each new token of every sequence.

    In a pool of blocks this depends on allocated blocks; otherwise a sequence has the cells of its context.

    Args:
        session: The session.
        tokens: The new tokens of each sequence.
        lengths: The tokens that each sequence has before them.
    """
    ends = [length + len(new) if new else 0 for new, length in zip(tokens, lengths, strict=True)]
    return not session.blocks or all(
        end <= BLOCK_KEYS * len(table) for end, table in zip(ends, session.tables, strict=True)
    )


def zero_sequence_states(session: HasCaches, sequence: int, length: int) -> None:
    """Zero the rows of a sequence in every state; of caches, the rows of its first `length` cells."""
    for name in session.store.states:
        state = session.store.state(name)
        if is_per_cell_cache(name) and session.blocks:
            used = min(length, BLOCK_KEYS * len(session.tables[sequence]))
            state[find_cache_rows(session, name, sequence, np.arange(used))] = 0
        else:
            rows = state.shape[0] // session.sequences
            used = min(rows, length) if is_per_cell_cache(name) else rows
            state[sequence * rows : sequence * rows + used] = 0
