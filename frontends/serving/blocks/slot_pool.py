"""The slots of an engine over one pool of blocks: a slot has a block table in place of a region of each KV cache."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ....distributed.rank_calls import RankCalls, on_all_ranks
from ....graph.validation import format_value
from ....ops.matrix.attention import BLOCK_KEYS
from ....scheduler import format_bytes
from ...errors import ModelError
from ...inference.saved_state import SavedSessionState
from ...inference.session import Session
from ...models import Model
from ...models.inputs.step import MAX_CACHE_ROW
from ..slots import SlotPool
from .allocator import BlockAllocator

MAX_POOL_TOKENS = (MAX_CACHE_ROW // BLOCK_KEYS - 1) * BLOCK_KEYS
"""Most cells of a pool. One block more is for padding."""
NO_SLOT_FILES = "layers with an attention window cannot be saved from a pool of blocks; leave out --pool-tokens"


class BlockSlotPool(SlotPool):
    """Slots of at most `context` tokens, with KV caches of `pool_tokens` cells for all slots.

    Recurrent states have a row for each slot. Raises `ModelError` for a model without KV caches, or with other caches
    than keys and values, and for a pool that is smaller than the context.

    Args:
        like: The session that has the weights.
        slots: Number of slots.
        pool_tokens: Cells of the pool, rounded up to whole blocks.
        context: Largest number of tokens of a slot.
        batch: Maximum prompt tokens of one run.
        rank_calls: The calls that run on all ranks of `like`.
    """

    def __init__(
        self,
        like: Session,
        slots: int,
        *,
        pool_tokens: int,
        context: int,
        batch: int,
        rank_calls: RankCalls | None = None,
    ) -> None:
        require_model_and_context_fit_pool(like.model, context, pool_tokens)
        blocks, batch = count_pool_blocks(pool_tokens), min(batch, context)
        _require_pool_memory(like, slots, blocks)
        self.allocator = BlockAllocator(blocks)
        root = Session(like.model, like=like, sequences=slots, context=context, batch=batch, blocks=blocks)
        super().__init__(root, slots, context=context, batch=batch, shares_states=True, rank_calls=rank_calls)
        self.tables: list[list[int]] = root.tables
        """The blocks of each slot. Sessions of windows refer to the same lists."""

    @on_all_ranks
    def _add_window(self, first: int, count: int) -> None:
        start, root = time.perf_counter(), self._all_slots
        self._windows[first, count] = window = Session(
            root.model,
            like=root,
            first_sequence=first,
            sequences=count,
            context=self.context,
            batch=self.batch,
            blocks=root.blocks,
        )
        window.tables = self.tables[first : first + count]
        self._opening_seconds += time.perf_counter() - start

    @on_all_ranks
    def set_table(self, slot: int, blocks: list[int]) -> None:
        """Set the blocks of a slot."""
        self.tables[slot][:] = blocks

    @on_all_ranks
    def copy_first_cells(self, source: int, target: int, cells: int) -> None:
        """Copy the first cells of a block to another block."""
        for name in self._caches:
            self._all_slots.store.copy_state_rows(name, source * BLOCK_KEYS, target * BLOCK_KEYS, cells)

    def zero_slot_states(self, slot: int) -> None:
        """Zero the blocks and states that this slot alone has; a run may have left NaN or infinite numbers."""
        self._zero_blocks([block for block in self.tables[slot] if self.allocator.count_references(block) <= 1])
        self.clear_recurrent_states(slot)

    @on_all_ranks
    def _zero_blocks(self, blocks: list[int]) -> None:
        for name in self._caches:
            for block in blocks:
                self._all_slots.store.state(name)[block * BLOCK_KEYS : (block + 1) * BLOCK_KEYS] = 0

    def can_still_run_steps(self, slot: int) -> bool:
        """Whether the devices still run steps: try a prompt of one token, which is read into the block for padding."""
        self.set_table(slot, [0])
        try:
            return super().can_still_run_steps(slot)
        finally:
            self.set_table(slot, [])

    def capture_slot(self, slot: int, tokens: list[int], length: int) -> SavedSessionState:
        """Copy the states of a slot; see `SlotPool.capture_slot`. Raises `ModelError` for a model with windows."""
        self._require_no_windows()
        return super().capture_slot(slot, tokens, length)

    def check_saved_state(self, slot: int, state: SavedSessionState, path: str) -> int:
        """Check that a slot can be restored from a saved state; see `SlotPool.check_saved_state`.

        Raises `ModelError` for a model with windows, too.
        """
        self._require_no_windows()
        return super().check_saved_state(slot, state, path)

    def _require_no_windows(self) -> None:
        """Raise `ModelError` for a model with windows: a file has only the last tokens of such a layer."""
        if any(self._all_slots.model.hyper.windows.values()):
            raise ModelError(NO_SLOT_FILES)

    def resize_to_slot_count(self, slots: int, lengths: Sequence[int]) -> None:
        """Raise `ModelError`: the number of slots is fixed."""
        raise ModelError("slots that share a pool of blocks cannot change their number; make another pool")


def count_pool_blocks(pool_tokens: int) -> int:
    """Return the blocks of a pool of `pool_tokens` cells. The first block is for padding."""
    return -(-pool_tokens // BLOCK_KEYS) + 1


def require_model_and_context_fit_pool(model: Model, context: int, pool_tokens: int) -> None:
    """Require that slots of `context` tokens of a model can share a pool of `pool_tokens` cells.

    Raises:
        ModelError: The model has no KV caches, or the pool is smaller than the context or larger than a cache may be.
    """
    if pool_tokens < context:
        raise ModelError(f"pool_tokens is {pool_tokens}, less than the context of {context}; use at least {context}")
    if pool_tokens > MAX_POOL_TOKENS:
        raise ModelError(f"pool_tokens is {format_value(pool_tokens)}; need at most {MAX_POOL_TOKENS}")
    if not model.hyper.windows:
        raise ModelError(f"{model.architecture} has no KV caches to share; start the server without --pool-tokens")


def _require_pool_memory(like: Session, slots: int, blocks: int) -> None:
    """Require that the blocks, and the recurrent states of all slots, fit into the memory of the devices.

    Raises:
        ModelError: They are larger.
    """
    rows = [(like.store.state(name), like.is_per_cell_cache(name)) for name in like.state_names]
    cells = blocks * BLOCK_KEYS
    needed = sum(one.spec.nbytes // one.shape[0] * (cells if is_cache else slots) for one, is_cache in rows)
    memories = [device.memory for _, device in like.group]
    if all(memories) and needed > (available := sum(memory for memory in memories if memory)):
        raise ModelError(
            f"a pool of {cells} tokens needs {format_bytes(needed)}, but the devices have "
            f"{format_bytes(available)}; use a smaller pool_tokens"
        )
