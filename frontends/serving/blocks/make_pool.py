"""The pool and the prefix cache of a server: with a region of each cache per slot, or with a pool of blocks."""

from __future__ import annotations

from ....distributed.rank_calls import RankCalls
from ...inference.session import Session
from ..prefix_cache import PrefixCache
from ..slots import SlotPool
from .block_cache import BlockPrefixCache
from .slot_pool import BlockSlotPool


def make_slot_pool(root: Session, slots: int, pool_tokens: int, rank_calls: RankCalls | None = None) -> SlotPool:
    """Make the slots of a server, each with the context of a session.

    Args:
        root: The session that has the weights.
        slots: Number of slots.
        pool_tokens: Cells of the pool that all slots share; 0 for a region per slot.
        rank_calls: As in `SlotPool`.
    """
    context, batch = root.context, root.batch
    if not pool_tokens:
        return SlotPool(root, slots, context=context, batch=batch, rank_calls=rank_calls)
    return BlockSlotPool(root, slots, pool_tokens=pool_tokens, context=context, batch=batch, rank_calls=rank_calls)


def make_prefix_cache(
    pool: SlotPool, *, state_bytes: int, reserves_whole_texts: bool, retains_contents: bool
) -> PrefixCache:
    """Make the prefix cache of a pool; see `PrefixCache` and `BlockPrefixCache` for the arguments."""
    if isinstance(pool, BlockSlotPool):
        return BlockPrefixCache(
            pool,
            state_bytes=state_bytes,
            reserves_whole_texts=reserves_whole_texts,
            retains_contents=retains_contents,
        )
    return PrefixCache(pool, state_bytes=state_bytes)
