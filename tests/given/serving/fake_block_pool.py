"""A pool of blocks without a model: cells hold tokens, and a run finds cells that have other tokens than its text."""

from __future__ import annotations

from hocket.frontends.serving.blocks.allocator import BlockAllocator
from hocket.ops.matrix.attention import BLOCK_KEYS

from .fake_pool import compute_logits


class FakeBlockPool:
    """Slots over `blocks` usable blocks; a run costs a virtual second."""

    has_recurrent_states = False
    droppable_last_tokens = None
    planning_seconds = 0.0

    def __init__(self, slots: int, blocks: int, *, context: int, batch: int = 64) -> None:
        self.slots, self.context, self.batch, self.now = slots, context, batch, 0.0
        self.allocator = BlockAllocator(blocks + 1)
        self.tables = [list[int]() for _ in range(slots)]
        self.cells = [[-1] * BLOCK_KEYS for _ in range(blocks + 1)]
        self.copied_cells, self.saved_seconds = 0, 0.0
        """The cells that were copied, and the predicted gain of mixed steps."""

    def set_table(self, slot, blocks):
        assert 0 not in blocks
        assert len(set(blocks)) == len(blocks)
        self.tables[slot][:] = blocks

    def copy_first_cells(self, source, target, cells):
        self.copied_cells += cells
        self.cells[target][:cells] = self.cells[source][:cells]

    def read_prompt(self, slot, tokens, before):
        self.now += 1
        return self._append(slot, tokens, before)

    def decode(self, tokens, before):
        self.now += 1
        return {slot: self._append(slot, [token], before[slot]) for slot, token in tokens.items()}

    def predict_seconds_saved_by_mixing(self, *_):
        return self.saved_seconds

    def read_prompt_and_decode(self, slot, prompt, tokens, before):
        assert tokens, "a mixed step decodes"
        self.now += 1
        rows = {each: self._append(each, [token], before[each]) for each, token in tokens.items()}
        return rows | {slot: self._append(slot, prompt, before[slot])}

    def list_evaluated_draft_tokens(self, slot):
        return ()

    def decode_to_candidates(self, *_):
        return None

    def predict_prompt_seconds(self, size):
        """Predict so that the engine keeps to the smallest chunks, and a long prompt takes many steps."""
        return (size / 16) ** 2

    def zero_slot_states(self, slot):
        for block in self.tables[slot]:
            if self.allocator.count_references(block) <= 1:
                self.cells[block] = [-1] * BLOCK_KEYS

    def rebind_plans_and_zero_states(self):
        self.cells = [[-1] * BLOCK_KEYS for _ in self.cells]

    def _append(self, slot, tokens, before):
        table, length = self.tables[slot], len(before)
        assert [self.cells[table[i // BLOCK_KEYS]][i % BLOCK_KEYS] for i in range(length)] == [*before]
        for i, token in enumerate(tokens, length):
            self.cells[table[i // BLOCK_KEYS]][i % BLOCK_KEYS] = token
        return compute_logits([*before, *tokens])
