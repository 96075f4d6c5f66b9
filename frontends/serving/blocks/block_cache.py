"""The prefix cache over a pool of blocks: it gives blocks to slots, and finds the blocks of known prompts.

A prompt shares the whole blocks of its known prefix with other slots. Of a block that it knows in part, it gets a copy.
Cells that were decoded token by token are not reused, as in `PrefixCache`. A model with recurrent states also needs
them: the cache keeps copies by the tokens that the states have seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ....graph.errors import format_count
from ....ops.matrix.attention import BLOCK_KEYS
from ...errors import ModelError
from ..prefix_cache import (
    MIN_REUSED_TOKENS,
    NO_CONTENTS,
    PrefixCache,
    SavedRecurrentStates,
    SourceAndTargetSlots,
    choose_save_points,
)
from .prefix_tree import PrefixTree
from .slot_pool import BlockSlotPool

AHEAD_TOKENS = 256
"""New tokens for which blocks must be free when a request starts."""


class BlockPrefixCache(PrefixCache):
    """The prefix cache over the blocks of a pool.

    Args:
        pool: The slots and their blocks.
        state_bytes: Maximum bytes of saved recurrent states; the least recently used ones are dropped.
        retains_contents: Whether a slot keeps its blocks after its request, for slot files, until others need them.
        reserves_whole_texts: Whether a request starts only when blocks for all of its tokens are free. Otherwise blocks
            for its prompt and for `AHEAD_TOKENS` more are enough, and a running request may have to give its blocks.
    """

    def __init__(
        self,
        pool: BlockSlotPool,
        *,
        state_bytes: int = 0,
        reserves_whole_texts: bool = False,
        retains_contents: bool = False,
    ) -> None:
        super().__init__(pool, state_bytes=state_bytes)
        self._pool, self._blocks = pool, pool.allocator
        self._reserves_whole_texts, self._retains_contents = reserves_whole_texts, retains_contents
        self._tree = PrefixTree(pool.allocator)
        self._reserved: list[int] = [0] * pool.slots
        """Per slot the blocks that its request may have in all, if it reserves them."""
        self._saved_by_slot: list[list[tuple[int, ...]]] = [[] for _ in range(pool.slots)]
        """Per slot the prefixes of its present prompt at which it has saved recurrent states."""

    def find_slot_for_prompt(
        self, prompt: tuple[int, ...], free: Sequence[int], window_size: Callable[[int], int] = lambda slot: 1
    ) -> SourceAndTargetSlots:
        """Return the slot for a prompt, and the number of its first tokens that are in cached blocks.

        All slots can read all blocks, so any free slot will do. The one with the smallest window makes the shortest
        steps. It is both the source and the target.
        """
        target = min(free, key=lambda slot: (window_size(slot), self._contents[slot].length > 0, slot))
        _, tokens = self._tree.find_prefix(prompt[:-1])
        if self._memory.has_recurrent_states:
            lengths = sorted({len(key) for key in self._saved if len(key) <= tokens}, reverse=True)
            tokens = next((length for length in lengths if prompt[:length] in self._saved), 0)
        return SourceAndTargetSlots(tokens if tokens >= MIN_REUSED_TOKENS else 0, target, target)

    def has_room_for_request(
        self, match: SourceAndTargetSlots, prompt: tuple[int, ...], limit: int, sent_tokens: int
    ) -> bool:
        """Whether enough blocks are free, or can be freed, for a request that starts now; see `PrefixCache`.

        Slots without a request lose the contents that they have kept, as far as their blocks are needed.
        """
        while True:
            count = self._count_blocks_needed_at_start(
                prompt, limit, sent_tokens
            ) - self._count_blocks_shared_with_running(prompt, match)
            missing = sum(max(0, n - len(self._pool.tables[slot])) for slot, n in enumerate(self._reserved))
            if count + missing <= self._blocks.free_count + self._tree.count_evictable_blocks():
                return True
            if not self._free_oldest_retained_slot():
                return False

    def _free_oldest_retained_slot(self) -> bool:
        """Free the blocks of the slot that has kept its contents longest; return False if no slot keeps any."""
        retaining = [slot for slot, contents in enumerate(self._contents) if contents.length]
        if retaining:
            self.forget_slot_tokens_and_states(min(retaining, key=lambda slot: self._last_use[slot]))
        return bool(retaining)

    def _count_blocks_needed_at_start(self, prompt: tuple[int, ...], limit: int, sent_tokens: int) -> int:
        """Count the blocks that must be free when a request starts, with the blocks of its known prefix."""
        new = self._pool.context if limit < 0 else limit
        ahead = new if self._reserves_whole_texts else min(new, sent_tokens + AHEAD_TOKENS)
        return -(-min(len(prompt) + ahead, self._pool.context) // BLOCK_KEYS)

    def _count_blocks_shared_with_running(self, prompt: tuple[int, ...], match: SourceAndTargetSlots) -> int:
        """Count the known blocks of a prompt that a running request has, so that they cannot be evicted."""
        blocks, _ = self._tree.find_prefix(prompt[: match.tokens])
        whole = blocks[: match.tokens // BLOCK_KEYS]
        return sum(self._blocks.count_references(block) > 1 for block in whole)

    def prepare_target_slot(self, match: SourceAndTargetSlots, prompt: tuple[int, ...], limit: int = 0) -> None:
        """Assign the blocks of a prompt to the target slot of a match; its first `match.tokens` tokens are known.

        A block that is known in part may be evicted meanwhile. Its cells are unchanged until the next run.
        """
        slot, (whole, cells) = match.target, divmod(match.tokens, BLOCK_KEYS)
        self.forget_slot_tokens_and_states(slot)
        if self._memory.has_recurrent_states:
            self._restore_states_and_plan_saves(slot, prompt, match.tokens)
        known, _ = self._tree.find_prefix(prompt[: match.tokens])
        for block in known[:whole]:
            self._blocks.retain(block)
        self._pool.set_table(slot, known[:whole])
        has_blocks = self.reserve_cells(slot, len(prompt))
        assert has_blocks, "has_room_for_request has counted the blocks"
        if cells and known[whole] != (target := self._pool.tables[slot][whole]):
            self._pool.copy_first_cells(known[whole], target, cells)
        if self._reserves_whole_texts:
            self._reserved[slot] = self._count_blocks_needed_at_start(prompt, limit, 0)

    def _restore_states_and_plan_saves(self, slot: int, prompt: tuple[int, ...], tokens: int) -> None:
        """Restore the recurrent states after the first `tokens` of a prompt, and plan where to save further ones."""
        if tokens:
            self._saved.move_to_end(prompt[:tokens])
            self._memory.restore_recurrent_states(slot, self._saved[prompt[:tokens]].states)
        else:
            self._memory.clear_recurrent_states(slot)
        _, shared = self._tree.find_prefix(prompt[:-1])
        self._save_points[slot] = choose_save_points(len(prompt), shared, tokens)

    def reserve_cells(self, slot: int, count: int) -> bool:
        """Reserve blocks of a slot for `count` tokens in all; return False, and reserve none, if too few are free."""
        table = list(self._pool.tables[slot])
        missing = -(-count // BLOCK_KEYS) - len(table)
        if missing <= 0:
            return True
        while self._blocks.free_count < missing:
            if not (self._tree.evict_block() or self._free_oldest_retained_slot()):
                return False
        table += [block for _ in range(missing) if (block := self._blocks.allocate()) is not None]
        self._pool.set_table(slot, table)
        return True

    def record_read_tokens(self, slot: int, tokens: Sequence[int]) -> None:
        """Record the prompt tokens that a slot has read, so that later prompts find them."""
        table = list(self._pool.tables[slot])
        self._tree.add_prompt(tokens, table)
        if table != self._pool.tables[slot]:
            self._pool.set_table(slot, table)
        nbytes = self._memory.compute_recurrent_state_bytes() if len(tokens) in self._save_points[slot] else 0
        if 0 < nbytes <= self._state_bytes:
            self._keep(tuple(tokens), SavedRecurrentStates(self._memory.save_recurrent_states(slot), nbytes))
            self._saved_by_slot[slot].append(tuple(tokens))

    def move_running_request(self, source: int, target: int, length: int) -> None:
        """Move a running request from slot `source` to the free slot `target`; no cell moves."""
        self.forget_slot_tokens_and_states(target)
        if self._memory.has_recurrent_states:
            self._memory.restore_recurrent_states(target, self._memory.save_recurrent_states(source))
        points = self._save_points
        points[target], points[source] = points[source], points[target]
        prefixes = self._saved_by_slot
        prefixes[target], prefixes[source] = prefixes[source], prefixes[target]
        self._pool.set_table(target, list(self._pool.tables[source]))
        self._pool.set_table(source, [])
        self._reserved[target], self._reserved[source] = self._reserved[source], 0

    def record_slot_contents(self, slot: int, tokens: Sequence[int], length: int) -> None:
        """Free the blocks of a slot at the end of its request, or keep them. The tree keeps the prompt."""
        if not self._retains_contents:
            self.forget_slot_tokens_and_states(slot)
            return
        super().record_slot_contents(slot, tokens, length)
        self._reserved[slot] = 0
        self._mark_recently_used(slot)

    def forget_slot_tokens_and_states(self, slot: int) -> None:
        """Free the blocks of a slot; the tree keeps the blocks of its prompt."""
        for block in self._pool.tables[slot]:
            self._blocks.release(block)
        self._pool.set_table(slot, [])
        self._reserved[slot], self._save_points[slot], self._saved_by_slot[slot] = 0, frozenset(), []
        self._contents[slot] = NO_CONTENTS

    def zero_and_forget_slot(self, slot: int) -> None:
        """Zero and forget the blocks that only this slot has; later prompts find neither them nor their states."""
        for key in self._saved_by_slot[slot]:
            if key in self._saved:
                self._drop(key)
        self._tree.forget_last_blocks(self._pool.tables[slot])
        super().zero_and_forget_slot(slot)

    def forget_all_slots(self) -> None:
        """Free all blocks, also the blocks of known prompts."""
        super().forget_all_slots()
        self._tree.clear()
        for key in [*self._saved]:
            self._drop(key)

    def reserve_cells_for_restored_slot(self, slot: int, length: int) -> None:
        """Reserve blocks in an empty slot for the states of `length` tokens that will be restored.

        Raises:
            ModelError: Running requests have too many blocks.
        """
        self.forget_slot_tokens_and_states(slot)
        if not self.reserve_cells(slot, length):
            raise ModelError(
                f"the free blocks of the pool have no room for {format_count(length, 'token')}; try again later"
            )

    def make_restored_tokens_reusable(self, slot: int, tokens: Sequence[int], length: int) -> None:
        """Add the restored contents of a slot to the cache: its first `length` tokens, decoded ones included."""
        self._save_points[slot] = frozenset((length,))
        self.record_read_tokens(slot, tokens[:length])
        self.record_slot_contents(slot, tokens, length)
