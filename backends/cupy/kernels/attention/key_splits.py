"""The sizes of an attention instruction, and the number of splits of its keys."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...binding.launch_builder import count_blocks
from .kinds import ATTENTION_THREADS

TARGET_BLOCKS, MAX_KEY_SPLITS = 512, ATTENTION_THREADS
"""Blocks that keep any device busy when blocks share keys; and the most splits: in the end a thread weighs each."""
TARGET_WARPGROUP_BLOCKS = 96
"""Blocks that keep a device busy with warpgroup tiles. One such block fills a multiprocessor.

On an H200, 512 tokens of 16 heads on 4 of 256 take 181 microseconds over 8,192 cells in 128 blocks, 245 in 512.
"""
TARGET_MULTIPROCESSORS = 132
"""Multiprocessors of the GPU for which the work of few rows is balanced."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes of an attention instruction.

    `heads_per_key_head` query heads share one of `key_heads` key heads. There are `key_count` keys of `key_columns`
    columns, and as many values of `value_columns` columns. The mask has `mask_heads` heads.
    """

    batch: int
    tokens: int
    heads_per_key_head: int
    key_heads: int
    key_count: int
    key_columns: int
    value_columns: int
    mask_heads: int

    @property
    def rows_per_key_head(self) -> int:
        """The number of query rows for each key head: tokens times query heads per key head."""
        return self.tokens * self.heads_per_key_head

    @property
    def query_heads(self) -> int:
        """The number of query heads."""
        return self.heads_per_key_head * self.key_heads

    def choose_key_splits(self, row_blocks: int, keys_per_step: int, target_blocks: int = TARGET_BLOCKS) -> int:
        """Choose into how many parts the keys are split; thread blocks process the parts at the same time.

        Args:
            row_blocks: Blocks along the query rows.
            keys_per_step: Keys that a block processes at once.
            target_blocks: Number of blocks that keeps the device busy.
        """
        splits = count_blocks(target_blocks, max(1, self.batch * self.key_heads * row_blocks))
        return max(1, min(MAX_KEY_SPLITS, splits, count_blocks(self.key_count, keys_per_step)))

    def choose_balanced_key_splits(self, row_blocks: int, keys_per_step: int) -> int:
        """Choose the number of key splits that leaves the fewest multiprocessors idle at the end.

        The smallest candidate gives each multiprocessor two blocks. The largest has twice as many splits.
        """
        count = max(1, self.batch * self.key_heads * row_blocks)
        min_splits = max(1, 2 * TARGET_MULTIPROCESSORS // count)
        min_splits, max_splits = (
            max(1, min(MAX_KEY_SPLITS, n * min_splits, count_blocks(self.key_count, keys_per_step))) for n in (1, 2)
        )

        def compute_wave_overhead(splits: int) -> float:
            waves = splits * count / TARGET_MULTIPROCESSORS
            return round(math.ceil(waves) / waves, 2)

        return min(range(min_splits, max_splits + 1), key=compute_wave_overhead)
