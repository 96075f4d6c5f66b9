"""Pools of slots on several ranks, which are threads of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hocket.distributed import World
from hocket.distributed.rank_calls import RankCalls
from hocket.frontends.inference.session import DeviceGroup
from hocket.frontends.serving.slots import SlotPool
from hocket.frontends.serving.thread import list_pool_and_draft_pool

from ..ranks.thread_link import in_threads

LeadResult = TypeVar("LeadResult")
ONE_RANK = DeviceGroup(devices=("cpu:0",), split_mode="tensor", threads=1)
"""The group that each of two ranks names; together it is `TWO_DEVICES`."""
TWO_DEVICES = DeviceGroup(devices=("cpu:0", "cpu:1"), split_mode="tensor", threads=1)


def lead_pool(make_pool: Callable[[World, RankCalls], SlotPool], lead: Callable[[SlotPool], LeadResult]) -> LeadResult:
    """Return the result of `lead` on rank 0 of two, while the other rank follows; `make_pool` runs on both."""

    def run(world: World) -> LeadResult | None:
        calls = RankCalls(world)
        pool = make_pool(world, calls)
        if world.rank:
            calls.follow_rank_0(list_pool_and_draft_pool(pool))
            return None
        result = lead(pool)
        calls.end()
        return result

    result: LeadResult = in_threads(2, run)[0]
    return result
